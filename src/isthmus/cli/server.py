"""``isthmus server init|start``: make a federation of organisations, and run its server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from isthmus.errors import RunError

NAME = "server"

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Between organisations: make a federation, run its server."
)

Folder = Annotated[Path, typer.Argument(help="The federation's folder.")]


@app.command("init")
def init(
    folder: Folder,
    organisation: Annotated[list[str], typer.Option(help="An organisation that takes part; repeat for each.")],
    name: Annotated[str, typer.Option(help="Name of the federation.")] = "federation",
    host: Annotated[
        str, typer.Option(help="Name or address under which the organisations reach the server.")
    ] = "localhost",
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8002,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 360,
) -> None:
    """Make a root certificate and a kit for the server, the coordinator and each organisation."""
    from isthmus.deploy.federation_folder import Headquarters
    from isthmus.deploy.project import Project

    made = Headquarters.create(folder, Project(name, tuple(organisation), host, port, days))
    print(f"kits of {name} are in {made.path / 'kits'}:")
    for one in made.project.organisations:
        print(f"  {one:<20} give it to {one}, over a channel you trust")
    print(f"  {'server, coordinator':<20} stay here")
    print(f"{made.path / 'root'} holds the root key: take it offline, to somebody who does not run the server.")
    print(f"next: isthmus server start {folder}")


@app.command("start")
def start(folder: Folder) -> None:
    """Run the server until Ctrl-C; it is started again if it dies."""
    from isthmus.deploy.federation_folder import Headquarters, interrupt_on_terminate

    interrupt_on_terminate()
    headquarters = Headquarters.read(folder)
    keeper = headquarters.keep_server()
    project = headquarters.project
    print(
        f"server of {project.name} on {project.host}:{project.port}, log in {keeper.log}; Ctrl-C ends it",
        file=sys.stderr,
    )
    try:
        keeper.wait()
    finally:
        keeper.stop()
    if keeper.failed:
        raise RunError(f"the server does not stay up: see {keeper.log}")
