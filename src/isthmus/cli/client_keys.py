"""``isthmus client request|join|renew|roster``: keys of an organisation that nobody else ever holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.client import CLIENT_TOML, NAME, Config, app
from isthmus.errors import ConfigError

__all__ = ["NAME", "app"]

if TYPE_CHECKING:
    from isthmus.deploy.roster_change import Line, Roster

Kit = Annotated[Path, typer.Option(help="This organisation's kit; the key is made in it and stays there.")]
Out = Annotated[Path, typer.Option(help="Where the file for the others is written.")]
KIT, CHANGE = Path("kit"), Path("roster-change.toml")

roster = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Change the roster, signed by everybody who stays."
)
app.add_typer(roster, name="roster")


@app.command("request")
def request(
    organisation: Annotated[str, typer.Argument(help="Name of this organisation in the federation.")],
    config: Config = CLIENT_TOML,
    kit: Kit = KIT,
    out: Out = Path("request.toml"),
) -> None:
    """Make this organisation's key for the connection and a request for its certificate; prints the fingerprint."""
    from isthmus.deploy.startup_kit import CONFIG_FILES

    if any((kit / "startup" / name).exists() for name in CONFIG_FILES):
        raise ConfigError(f"{kit} is in use: renew its certificate with `isthmus client renew`, or name another --kit")
    _ask(organisation, config, kit, out)
    print("tell the hub's operator the fingerprint above by another way than the file, e.g. by phone", file=sys.stderr)


@app.command("renew")
def renew(config: Config = CLIENT_TOML, kit: Kit = KIT, out: Out = Path("request.toml")) -> None:
    """Make a new key and ask for a new certificate; the old ones stay in use until `isthmus client join`."""
    from isthmus.deploy.startup_kit import StartupKit

    _ask(StartupKit.read(kit).name, config, kit, out)


def _ask(organisation: str, config: Path, kit: Path, out: Path) -> None:
    from isthmus.deploy import require_nvflare
    from isthmus.deploy.join_files import request as make
    from isthmus.deploy.provisioning import FederationConfig
    from isthmus.deploy.roster import read_identity
    from isthmus.deploy.site_settings import SiteSettings

    require_nvflare()
    FederationConfig("x", (organisation,))  # a name that no hub would accept is refused here
    settings = SiteSettings.read(config)
    if settings.identity is None or settings.client is None:
        raise ConfigError(f"{config} must name client and identity: `isthmus client identity` makes them")
    made = make(kit, organisation, settings.client, read_identity(settings.identity))
    out.write_text(made.to_toml())
    print(made.fingerprint)
    print(f"the key is in {kit / 'startup'} and stays there; send {out} to the hub's operator", file=sys.stderr)


@app.command("join")
def join(
    approval: Annotated[Path, typer.Argument(help="The file that the hub's operator sent back.")],
    fingerprint: Annotated[
        str | None,
        typer.Option(help="Fingerprint of the hub's root, as its operator read it to you; needed once per kit."),
    ] = None,
    kit: Kit = KIT,
) -> None:
    """Put an approved certificate beside its key. A client that runs takes it over between two jobs."""
    from isthmus.deploy import require_nvflare
    from isthmus.deploy.certificates import read_certificate
    from isthmus.deploy.join_files import Approval
    from isthmus.deploy.join_files import join as put

    require_nvflare()
    made = put(kit, Approval.read(approval), fingerprint)
    expires = read_certificate(made.startup / "client.crt").not_valid_after_utc
    print(f"{made.name} may connect to {made.target[0]}:{made.target[1]} until {expires:%Y-%m-%d %H:%M} UTC")


@app.command("restored")
def restored(
    head: Annotated[str, typer.Argument(help="The line that the refusal names, 16 digits or more.")],
    config: Config = CLIENT_TOML,
) -> None:
    """After restoring an old backup, record in the audit chain that its newer part is lost; runs are joined again."""
    import re

    from isthmus.deploy.audit_chain import ORDER, RESTORED, AuditChain
    from isthmus.deploy.processes import user
    from isthmus.deploy.site_settings import SiteSettings

    if not re.fullmatch(r"[0-9a-f]{16,64}", head):
        raise ConfigError(f"{head!r} is no line of an audit chain: give the digits that the refusal names")
    chain = AuditChain(SiteSettings.read(config).state).open()
    chain.append(ORDER, name=RESTORED, contract=head, by=user())
    print(
        f"written: what followed line {chain.head.number - 1} is lost; what was spent of epsilon since is not counted"
    )


# -- roster ----------------------------------------------------------------------------------------


@roster.command("add")
def add(
    lines: Annotated[Path, typer.Argument(help="The roster lines, or the request, of the organisation.")],
    config: Config = CLIENT_TOML,
    out: Out = CHANGE,
) -> None:
    """Propose to take an organisation in, or to give one that is on the roster a new key."""
    from isthmus.deploy.join_files import JoinRequest
    from isthmus.deploy.roster_change import Line, Roster
    from isthmus.experiments.config_values import read_toml

    if "csr" in read_toml(lines):
        asked = JoinRequest.read(lines)
        name, line = asked.organisation, Line(asked.client, asked.key)
    else:
        given = Roster.read(lines).lines
        if len(given) != 1:
            raise ConfigError(f"{lines} names {len(given)} organisations: give the lines of one")
        ((name, line),) = given.items()
    _propose(config, name, line, out)


@roster.command("remove")
def remove(
    organisation: Annotated[str, typer.Argument(help="Organisation that leaves.")],
    config: Config = CLIENT_TOML,
    out: Out = CHANGE,
) -> None:
    """Propose to take an organisation off the roster."""
    _propose(config, organisation, None, out)


def _propose(config: Path, organisation: str, line: Line | None, out: Path) -> None:
    from isthmus.deploy.roster_change import propose

    own = _own_roster(config)
    change = propose(own, organisation, line)
    change.write(out)
    print(f"{change.words}; {', '.join(change.stay(own))} must sign {out}")
    if line is not None:  # who carried the file may have put a key of their own in it
        print(f"before anybody signs: ask {organisation} by another way, e.g. by phone, for its key", file=sys.stderr)


@roster.command("sign")
def sign(
    change: Annotated[Path, typer.Argument(help="The change; the signature is added to it.")] = CHANGE,
    config: Config = CLIENT_TOML,
) -> None:
    """Sign a change with this organisation's long-term key, after reading what it says."""
    from isthmus.deploy.roster import read_identity
    from isthmus.deploy.roster_change import RosterChange
    from isthmus.deploy.site_settings import SiteSettings

    settings, own = SiteSettings.read(config), _own_roster(config)
    names = [name for name, line in own.lines.items() if line.client == settings.client]
    if not names or settings.identity is None:
        raise ConfigError(f"{settings.client} of {config} is not on the roster: only those who are sign")
    signed = RosterChange.read(change).sign(own, names[0], read_identity(settings.identity))
    missing = signed.missing(own)
    signed.write(change)
    rest = f"still missing: {', '.join(missing)}" if missing else "all who stay have signed: apply it everywhere"
    print(f"signed: {signed.words}; {rest}")


@roster.command("apply")
def apply(
    change: Annotated[Path, typer.Argument(help="The change, with all signatures.")] = CHANGE,
    config: Config = CLIENT_TOML,
) -> None:
    """Change this organisation's roster, if everybody who stays has signed. It holds from the next run on."""
    from isthmus.deploy.audit_chain import ORDER, AuditChain
    from isthmus.deploy.roster_change import RosterChange
    from isthmus.deploy.site_settings import SiteSettings

    settings, own = SiteSettings.read(config), _own_roster(config)
    asked = RosterChange.read(change)
    changed = asked.apply(own)
    assert settings.roster is not None
    AuditChain(settings.state).open().append(ORDER, name="roster", contract=changed.hash, by=asked.words[:200])
    kept = changed.write(settings.roster)
    print(f"{asked.words}; the roster before is kept as {kept.name}")


def _own_roster(config: Path) -> Roster:
    from isthmus.deploy.roster_change import Roster
    from isthmus.deploy.site_settings import SiteSettings

    settings = SiteSettings.read(config)
    if settings.roster is None:
        raise ConfigError(f'{config} names no roster: add roster = "roster.toml"')
    return Roster.read(settings.roster)
