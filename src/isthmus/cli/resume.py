"""``isthmus resume``: continue a run that was stopped, killed, or lost its parties."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.console import ProgressDisplay
from isthmus.cli.run import Json, run_and_print

NAME = "resume"


def command(run_dir: Annotated[Path, typer.Argument(help="The run folder.")], json_: Json = False) -> None:
    """Continue a run from its newest checkpoint; the result is that of an uninterrupted run."""
    from isthmus.experiments.run import resume

    display = ProgressDisplay()
    run_and_print(display, lambda: resume(run_dir, [display]), json_)
