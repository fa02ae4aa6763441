"""``isthmus submit``: play a run between organisations."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.console import Watch
from isthmus.cli.run import Json, show
from isthmus.errors import ConfigError

NAME = "submit"

Federation = Annotated[Path, typer.Option(help="The federation's folder.")]


def command(
    run: Annotated[
        Path | None, typer.Argument(help="TOML file: method, dataset, clients and any other setting.")
    ] = None,
    federation: Federation = Path("federation"),
    again: Annotated[str | None, typer.Option(help="Go on with a run that was submitted before, by its name.")] = None,
    json_: Json = False,
) -> None:
    """Submit a run and stay with it: after a crash it is submitted again from the newest checkpoint all parties
    hold.
    """
    from isthmus.deploy.federation_folder import Headquarters

    if (run is None) == (again is None):
        raise ConfigError("give a run file, e.g. `isthmus submit run.toml`, or the name of an earlier run with --again")
    headquarters = Headquarters.read(federation)
    name = headquarters.prepare(run) if run is not None else str(again)
    go_on = f"isthmus submit --federation {shlex.quote(str(federation))} --again {name}"
    print(f"run {name}; after an interruption: {go_on}", file=sys.stderr)
    watch = Watch()
    show(watch, lambda: headquarters.play(name, [watch]), json_, go_on)
