"""``isthmus resume``: continue a run that was stopped, killed, or lost its parties."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.console import Watch
from isthmus.cli.run import Json, show

NAME = "resume"


def command(run_dir: Annotated[Path, typer.Argument(help="The run folder.")], json_: Json = False) -> None:
    """Continue a run from its newest checkpoint; ends as the undisturbed run would have."""
    from isthmus.experiments.run import resume

    watch = Watch()
    show(watch, lambda: resume(run_dir, [watch]), json_)
