"""``isthmus stop``: stop a run, or the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.errors import RunError

NAME = "stop"


def command(
    federation: Annotated[Path, typer.Argument(help="The federation's folder.")] = Path("federation"),
    run: Annotated[str | None, typer.Option(help="Stop this run only; it can be submitted again.")] = None,
) -> None:
    """Stop a run, or without --run the server. Organisations end their part themselves, with Ctrl-C."""
    from isthmus.deploy.federation_folder import Headquarters

    headquarters = Headquarters.read(federation)
    if run is not None:
        headquarters.stop_run(run)
        print(f"{run} stopped; go on with: isthmus submit --federation {federation} --again {run}")
    elif headquarters.stop_server():
        print("server stopped")
    else:
        raise RunError("no server of this federation runs on this machine")
