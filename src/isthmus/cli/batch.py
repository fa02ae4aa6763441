"""Many runs from the command line: what ``compare``, ``sweep`` and ``reproduce`` share."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from isthmus.api.batch import Runner
    from isthmus.experiments.batch import Job, Outcome


def interruptible(workers: int | None, *, silent: bool = False) -> Runner:
    """Runs with a line per run; after Ctrl-C the same command continues."""
    from isthmus.api.batch import runner

    run = runner(workers, shown=True, silent=silent)

    def watched(jobs: Sequence[Job], names: Mapping[Path, str], scores: Mapping[Path, str]) -> dict[Path, Outcome]:
        try:
            return run(jobs, names, scores)
        except KeyboardInterrupt:
            print("\nstopped; the same command continues where this one stopped", file=sys.stderr)
            raise typer.Exit(130) from None

    return watched
