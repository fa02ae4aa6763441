"""``isthmus client identity|offer|start``: an organisation's side of a federation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

NAME = "client"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Between organisations: take part in a federation.")


@app.command("identity")
def identity(
    organisation: Annotated[str, typer.Argument(help="Name of this organisation in the federation.")],
    client: Annotated[str, typer.Option(help="Which client of the runs it is.")],
    out: Annotated[Path, typer.Option(help="Where the secret key is kept.")] = Path("identity.key"),
) -> None:
    """Make this organisation's long-term key and print its roster lines, for the other organisations."""
    from isthmus.deploy.roster import make_identity

    made = make_identity(out)
    print(f'[{organisation}]\nclient = "{client}"\nkey = "{made.public.hex()}"')
    print(
        f"the secret key is in {out} and stays here; send the lines above to the others, over a channel you trust",
        file=sys.stderr,
    )


@app.command("offer")
def offer(config: Annotated[Path, typer.Option(help="The organisation's client.toml.")]) -> None:
    """Print what this organisation takes part with, for the coordinator: no data, of tables hashes of the schema."""
    from isthmus.deploy.site_settings import SiteSettings

    print(SiteSettings.read(config).offer().to_toml(), end="")


@app.command("start")
def start(
    kit: Annotated[Path, typer.Option(help="Startup kit of this organisation.")],
    config: Annotated[Path, typer.Option(help="Its data, keys and allowed methods, client.toml.")],
) -> None:
    """Take part until Ctrl-C. Only the installed package runs, on the data of client.toml."""
    from isthmus.deploy.client_setup import ClientSetup
    from isthmus.deploy.processes import interrupt_on_terminate

    interrupt_on_terminate()
    setup = ClientSetup.check(kit, config)
    for line in setup.summary:
        print(line, file=sys.stderr)
    parent = setup.start()
    host, port = setup.kit.target
    print(f"{setup.kit.name} takes part at {host}:{port}, log in {parent.log}; Ctrl-C ends it", file=sys.stderr)
    parent.run_until_stopped()
