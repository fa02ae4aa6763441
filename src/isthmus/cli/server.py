"""``isthmus server ...``: make a federation of organisations, decide who belongs to it, run its server."""

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
Metrics = Annotated[int | None, typer.Option(help="Port of this machine's loopback for /healthz and /metrics.")]
RootFolder = Annotated[Path | None, typer.Option("--root", help="Where the root key is; by default FOLDER/root.")]


@app.command("init")
def init(
    folder: Folder,
    organisation: Annotated[
        list[str] | None,
        typer.Option(help="An organisation that takes part; repeat for each. More: isthmus server add."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the federation.")] = "federation",
    host: Annotated[
        str, typer.Option(help="Name or address under which the organisations reach the server.")
    ] = "localhost",
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8002,
    days: Annotated[int, typer.Option(help="How long certificates are valid.")] = 90,
) -> None:
    """Make a root certificate, and the kits of server and coordinator. Organisations make their own keys."""
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.deploy.membership import fingerprint_of
    from isthmus.deploy.provisioning import FederationConfig

    config = FederationConfig(name, tuple(organisation or ()), host, port, days)
    federation = FederationFolder.create(folder, config)
    print(f"federation {name} is in {folder}; expected: {', '.join(config.organisations) or 'nobody yet'}")
    print(f"{folder / 'root'} holds the root key: keep it offline, with somebody who does not run the server.")
    print(f"fingerprint of the root, for the organisations: {fingerprint_of(federation)}")
    print(f"next: isthmus server approve {folder} REQUEST for each organisation, isthmus server start {folder}")


@app.command("fingerprint")
def fingerprint(folder: Folder) -> None:
    """Print the fingerprint of the root, which organisations confirm when they join."""
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.deploy.membership import fingerprint_of

    print(fingerprint_of(FederationFolder.read(folder)))


@app.command("add")
def add(folder: Folder, organisation: Annotated[str, typer.Argument(help="Who may join from now on.")]) -> None:
    """Expect another organisation; the others notice nothing. Its request is approved as any other."""
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.deploy.membership import add as take_in

    take_in(FederationFolder.read(folder), organisation)
    print(f"{organisation} is expected; next: its request, isthmus server approve {folder} REQUEST")


@app.command("approve")
def approve(
    folder: Folder,
    request: Annotated[Path, typer.Argument(help="The file that `isthmus client request` or `renew` wrote.")],
    fingerprint: Annotated[
        str | None, typer.Option(help="Of the request, as a person there told it; a renewal needs none.")
    ] = None,
    valid: Annotated[str | None, typer.Option(help="How long: 90d, 12h, 5m; by default that of `init`.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Revoke its earlier certificates at once: a key was lost.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Where the approval is written; by default NAME.approval.")] = None,
    root: RootFolder = None,
) -> None:
    """Sign the certificate that an organisation asks for. Needs the root key; no private key passes through here."""
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.deploy.membership import approve as sign

    federation = FederationFolder.read(folder)
    approval, asked = sign(federation, request, root or folder / "root", fingerprint, valid, replace)
    path = out or Path(f"{asked.organisation}.approval")
    path.write_text(approval.to_toml())
    print(f"approved: {asked.organisation}; send it {path} (no secret)")


@app.command("revoke")
def revoke(folder: Folder, organisation: Annotated[str, typer.Argument(help="Who is excluded.")]) -> None:
    """Exclude an organisation: it is cut off within seconds, also in a running job, and cannot connect again."""
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.deploy.membership import revoke as exclude

    exclude(FederationFolder.read(folder), organisation)
    print(f"revoked: {organisation}; those who stay take it off their roster (isthmus client roster remove)")


@app.command("renew")
def renew(folder: Folder, root: RootFolder = None) -> None:
    """Issue the certificates of server and coordinator again; a server that runs takes its own over between jobs."""
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.deploy.membership import renew_hub

    for line in renew_hub(FederationFolder.read(folder), root or folder / "root"):
        print(line)


@app.command("start")
def start(folder: Folder, metrics: Metrics = None) -> None:
    """Run the server until Ctrl-C; it is restarted if it dies."""
    from isthmus.deploy.federation_folder import FederationFolder

    federation = FederationFolder.read(folder)
    order, config = federation.server_order(metrics), federation.config
    print(
        f"server of {config.name} on {config.host}:{config.port}, log in {order.log}; Ctrl-C ends it", file=sys.stderr
    )
    order.become()
