"""``isthmus resume``: continue a run that was stopped, killed, or lost its parties."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.api.progress import ProgressDisplay
from isthmus.cli.options import Json
from isthmus.cli.run import run_and_print
from isthmus.errors import check_run_folder

NAME = "resume"


def command(
    run_dir: Annotated[Path, typer.Argument(help="The run folder.")],
    rounds: Annotated[
        str | None, typer.Option(help="More rounds for a finished run, as +100; without it a stopped run goes on.")
    ] = None,
    json_: Json = False,
) -> None:
    """Continue a run from its newest checkpoint; the result is that of an uninterrupted run."""
    if rounds is None:
        check_run_folder(run_dir)
    from isthmus.experiments.run import resume

    display = ProgressDisplay()
    run_and_print(display, lambda: resume(run_dir, [display], more=rounds), json_)
