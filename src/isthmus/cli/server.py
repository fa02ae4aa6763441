"""``isthmus server init|start``: make a federation of organisations, and run its server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

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
    """Make a root certificate and a startup kit for the server, the coordinator and each organisation."""
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.deploy.provisioning import FederationConfig

    federation = FederationFolder.create(folder, FederationConfig(name, tuple(organisation), host, port, days))
    print(f"kits of {name} are in {folder / 'kits'}:")
    for one in federation.config.organisations:
        print(f"  {one:<20} give it to {one}, over a channel you trust")
    print(f"  {'server, coordinator':<20} stay here")
    print(f"{folder / 'root'} holds the root key: keep it offline, with somebody who does not run the server.")
    print(f"next: isthmus server start {folder}")


@app.command("start")
def start(folder: Folder) -> None:
    """Run the server until Ctrl-C; it is restarted if it dies."""
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.deploy.processes import interrupt_on_terminate

    interrupt_on_terminate()
    federation = FederationFolder.read(folder)
    parent, config = federation.start_server(), federation.config
    print(
        f"server of {config.name} on {config.host}:{config.port}, log in {parent.log}; Ctrl-C ends it", file=sys.stderr
    )
    parent.run_until_stopped()
