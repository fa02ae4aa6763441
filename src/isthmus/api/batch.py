"""Many runs for one table: what comparisons, sweeps and reproductions share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from isthmus.api.progress import clock, say
from isthmus.errors import ConfigError, DataError, IsthmusError, RunError
from isthmus.experiments.batch import Job, Outcome, run_all
from isthmus.papers.cells import measured

Runner = Callable[[Sequence[Job], Mapping[Path, str], Mapping[Path, str]], dict[Path, Outcome]]
"""(jobs, names, key of the score to show, by folder) -> outcomes by folder."""


def runner(workers: int | None, *, shown: bool, silent: bool = False) -> Runner:
    """What runs the jobs that are not finished yet.

    Args:
        workers: Runs at a time; 1 for this process.
        shown: A line per run on stderr.
        silent: No line for runs that could not be done; the caller tells why.
    """

    def run(jobs: Sequence[Job], names: Mapping[Path, str], scores: Mapping[Path, str]) -> dict[Path, Outcome]:
        progress = BatchProgress(len(names), names, scores, silent=silent)
        return run_all(jobs, workers=workers, on_done=progress if shown else lambda outcome: None)

    return run


class BatchProgress:
    """Prints a line per finished run on stderr; why a scenario cannot be built is printed once, not for each of its
    runs.

    Args:
        scores: Key of the result to show, by folder.
        silent: Do not print reasons; the caller shows them at the end.
    """

    def __init__(
        self, total: int, names: Mapping[Path, str], scores: Mapping[Path, str], *, silent: bool = False
    ) -> None:
        self.total, self.names, self.scores, self.silent = total, names, scores, silent
        self.printed: set[str] = set()
        self.count, self.executed, self.started = 0, 0, time.monotonic()

    def __call__(self, outcome: Outcome) -> None:
        self.count += 1
        name = self.names.get(outcome.job.folder, outcome.job.folder.name)
        known = self.silent or outcome.reason in self.printed
        if outcome.status == "reused" or (outcome.status == "skipped" and known):
            return
        self.printed.add(outcome.reason)
        self.executed += 1
        left = (time.monotonic() - self.started) / self.executed * (self.total - self.count)
        if outcome.result is not None:
            score = measured(outcome.result, self.scores.get(outcome.job.folder, "score"))
            seconds = sum(outcome.result["seconds"].values())
            text = f"{'-' if score is None else f'{100 * score:.2f} %'} in {seconds:.1f} s"
        else:
            text = f"{outcome.status}: {outcome.reason}"
        say(f"[{self.count}/{self.total}] {name}: {text}; left {clock(left)}")


def raise_failure(outcomes: Mapping[Path, Outcome]) -> None:
    """Raise the first failure, with its exit code; called after everything else was shown."""
    for status, error in (("failed", RunError), ("damaged", DataError), ("skipped", DataError)):
        bad = [outcome for outcome in outcomes.values() if outcome.status == status]
        if bad:
            reasons = dict.fromkeys(outcome.reason for outcome in bad)
            which = "" if len(reasons) == 1 else ", the first"
            kind: type[IsthmusError] = ConfigError if status == "skipped" and bad[0].asked_wrong else error
            raise kind(f"{len(bad)} of {len(outcomes)} runs have no result{which}: {next(iter(reasons))}")
