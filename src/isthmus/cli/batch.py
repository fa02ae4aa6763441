"""Many runs from the command line: what ``compare``, ``sweep`` and ``reproduce`` share."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from isthmus.api.batch import Runner
    from isthmus.experiments.batch import Job, Outcome

Runs = Annotated[int, typer.Option(help="Number of seeds; all methods use the same.", min=1)]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time (default: one per core).", min=1)]
Out = Annotated[
    Path | None, typer.Option(help="Folder of runs and report; finished runs in it are used, begun ones continued.")
]
TableFile = Annotated[
    Path | None, typer.Option("--table", help="Also write the table into this file: .csv, .md or .tex.")
]


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
