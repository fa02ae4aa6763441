"""``isthmus client start|identity``: an organisation's side of a federation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from isthmus.errors import RunError

NAME = "client"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Between organisations: take part in a federation.")


@app.command("identity")
def identity(
    organisation: Annotated[str, typer.Argument(help="Name of this organisation in the federation.")],
    client: Annotated[str, typer.Option(help="Which client of the runs it is.")],
    out: Annotated[Path, typer.Option(help="Where the secret key is kept.")] = Path("identity.key"),
) -> None:
    """Make this organisation's long-term key and print its lines of the roster, for the others."""
    from isthmus.deploy.roster import make_identity

    made = make_identity(out)
    print(f'[{organisation}]\nclient = "{client}"\nkey = "{made.public.hex()}"')
    print(
        f"the secret half is in {out} and stays here; send the lines above to the others, by a way you trust",
        file=sys.stderr,
    )


@app.command("start")
def start(
    kit: Annotated[Path, typer.Option(help="The kit this organisation was given.")],
    config: Annotated[Path, typer.Option(help="What it takes part with, client.toml.")],
) -> None:
    """Take part until Ctrl-C. Only the installed package runs, only with what client.toml says."""
    from isthmus.deploy.federation_folder import interrupt_on_terminate
    from isthmus.deploy.membership import Membership

    interrupt_on_terminate()
    membership = Membership.check(kit, config)
    for line in membership.lines:
        print(line, file=sys.stderr)
    keeper = membership.keep()
    host, port = keeper.kit.target
    print(f"{keeper.kit.name} takes part at {host}:{port}, log in {keeper.log}; Ctrl-C ends it", file=sys.stderr)
    try:
        keeper.wait()
    finally:
        keeper.stop()
    if keeper.failed:
        raise RunError(f"{keeper.kit.name} does not stay up: see {keeper.log}")
