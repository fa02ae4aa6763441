"""``isthmus stop``: stop a run, or the server of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.errors import RunError, no_federation

NAME = "stop"


def command(
    federation: Annotated[Path, typer.Argument(help="The federation's folder.")] = Path("federation"),
    run: Annotated[str | None, typer.Option(help="Stop this run only; it can be submitted again.")] = None,
) -> None:
    """Stop a run, or without --run the server. OrganisationKeys end their part themselves, with Ctrl-C."""
    if not (federation / "federation.toml").is_file():
        raise no_federation(federation)
    from isthmus.deploy.federation_folder import FederationFolder

    folder = FederationFolder.read(federation)
    if run is not None:
        folder.stop_run(run)
        print(f"{run} stopped; continue with: isthmus submit --federation {federation} --again {run}")
    elif folder.stop_server():
        print("server stopped")
    else:
        raise RunError("no server of this federation runs on this machine: stop it where it was started")
