"""Many runs from the command line: what ``compare``, ``sweep`` and ``reproduce`` share."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.console import clock
from isthmus.errors import DataError, RunError

if TYPE_CHECKING:
    from isthmus.experiments.batch import Job, Outcome

Runs = Annotated[int, typer.Option(help="Seeds, the same for all.", min=1)]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time (default: one per core).", min=1)]
Out = Annotated[
    Path | None, typer.Option(help="Folder of runs and report; finished runs in it are used, begun ones continued.")
]


def run_jobs(
    jobs: Sequence[Job],
    names: Mapping[Path, str],
    workers: int | None,
    scores: Mapping[Path, str] | None = None,
    *,
    silent: bool = False,
) -> dict[Path, Outcome]:
    """Run the jobs that are not finished yet, with a line per run; after Ctrl-C the same command continues."""
    from isthmus.experiments.batch import run_all

    try:
        return run_all(jobs, workers=workers, on_done=BatchProgress(len(names), names, scores, silent=silent))
    except KeyboardInterrupt:
        print("\nstopped; the same command continues where this one stopped", file=sys.stderr)
        raise typer.Exit(130) from None


class BatchProgress:
    """Prints a line per finished run on stderr; why a scenario cannot be built is printed once, not for each of its
    runs.

    Args:
        scores: Key of the result to show, by folder.
        silent: Do not print reasons; the caller shows them at the end.
    """

    def __init__(
        self, total: int, names: Mapping[Path, str], scores: Mapping[Path, str] | None = None, *, silent: bool = False
    ) -> None:
        self.total, self.names, self.scores, self.silent = total, names, scores or {}, silent
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
            from isthmus.papers.cells import measured

            score = measured(outcome.result, self.scores.get(outcome.job.folder, "score"))
            seconds = sum(outcome.result["seconds"].values())
            text = f"{'-' if score is None else f'{100 * score:.2f} %'} in {seconds:.1f} s"
        else:
            text = f"{outcome.status}: {outcome.reason}"
        print(f"[{self.count}/{self.total}] {name}: {text}; left {clock(left)}", file=sys.stderr, flush=True)


def raise_failure(outcomes: Mapping[Path, Outcome]) -> None:
    """Raise the first failure, with its exit code; called after everything else was shown."""
    for status, error in (("failed", RunError), ("damaged", DataError), ("skipped", DataError)):
        bad = [outcome for outcome in outcomes.values() if outcome.status == status]
        if bad:
            reasons = dict.fromkeys(outcome.reason for outcome in bad)
            which = "" if len(reasons) == 1 else ", the first"
            raise error(f"{len(bad)} of {len(outcomes)} runs have no result{which}: {next(iter(reasons))}")
