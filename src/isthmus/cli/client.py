"""``isthmus client ...``: an organisation's side of a federation."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.deploy.approval import Approvals
    from isthmus.deploy.site_settings import SiteSettings

NAME = "client"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Between organisations: take part in a federation.")

Config = Annotated[Path, typer.Option(help="The organisation's client.toml.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
CLIENT_TOML = Path("client.toml")


@app.command("identity")
def identity(
    organisation: Annotated[str, typer.Argument(help="Name of this organisation in the federation.")],
    client: Annotated[str, typer.Option(help="Which client of the runs it is.")],
    out: Annotated[Path, typer.Option(help="Where the secret key is kept.")] = Path("identity.key"),
) -> None:
    """Make this organisation's long-term key and print its roster lines, for the other organisations; write a
    client.toml with a strict policy beside the key, if there is none.
    """
    from isthmus.deploy.kit_files import write_client_toml
    from isthmus.deploy.roster import make_identity
    from isthmus.errors import ConfigError

    for what, given in (("organisation", organisation), ("client", client)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", given):
            raise ConfigError(f"{what} {given!r}: use letters, digits, '-' and '_', at most 40, e.g. bank-a")
    made = make_identity(out)
    print(f'[{organisation}]\nclient = "{client}"\nkey = "{made.public.hex()}"')
    print(
        f"the secret key is in {out} and stays here; send the lines above to the others, over a channel you trust",
        file=sys.stderr,
    )
    config = out.with_name(CLIENT_TOML.name)
    if write_client_toml(config, client, out.name):
        print(f"{config} holds a strict policy and a place for your data: edit it", file=sys.stderr)
    else:
        print(f"{config} exists already and is kept; docs/policy.md says what to write under [policy]", file=sys.stderr)


@app.command("offer")
def offer(config: Config) -> None:
    """Print this organisation's offer for the coordinator: its policy and hashes of its schema, but no data."""
    from isthmus.deploy.site_contract import full_offer
    from isthmus.deploy.site_settings import SiteSettings

    print(full_offer(SiteSettings.read(config)).to_toml(), end="")


@app.command("contract")
def contract(
    run: Annotated[Path, typer.Argument(help="The run file that the coordinator means to submit.")],
    config: Config = CLIENT_TOML,
    json_: Json = False,
) -> None:
    """Print the contract a run would be: who will see what, how often, under which protection. Nothing is joined."""
    from isthmus.cli.console import print_table
    from isthmus.deploy.audit_chain import AuditChain
    from isthmus.deploy.site_contract import DerivedContract, Showing, showings, summary
    from isthmus.deploy.site_settings import SiteSettings

    site = SiteSettings.read(config)
    derived = DerivedContract.of_file(site, run)
    derived.keep(site.state)
    refusals = list(dict.fromkeys(site.policy.refusals(derived.settings, derived.contract)))
    if json_:
        content = {"contract": derived.contract.to_json(), "privacy": derived.privacy, "refused": refusals}
        print(json.dumps({"hash": derived.contract.hash, **content}))
        return
    columns = ("phase", "from", "seen by", "message", "kinds of content", "what is seen", "times")
    assert len(columns) == len(Showing._fields)
    print_table(columns, [tuple(row) for row in showings(derived.contract)], "What leaves this organisation")
    for line in summary(derived, site.policy, AuditChain(site.state).open()):
        print(line)
    for refusal in refusals:
        print(f"the policy of {config} refuses it: {refusal}")
    if not refusals and site.policy.approve:
        print(f"to approve it: isthmus client approve {derived.contract.hash[:16]}")


@app.command("approve")
def approve(
    contract: Annotated[str | None, typer.Argument(help="Hash of the contract, its first 16 digits suffice.")] = None,
    config: Config = CLIENT_TOML,
    list_: Annotated[bool, typer.Option("--list", help="Show what is approved.")] = False,
    withdraw: Annotated[str | None, typer.Option(help="Withdraw the approval of the contract with this hash.")] = None,
    by: Annotated[str | None, typer.Option(help="Who approves; by default the user of this process.")] = None,
) -> None:
    """Approve a contract that this site has derived itself, so that a run under it may be joined (approve = true)."""
    from isthmus.deploy.audit_chain import ORDER, AuditChain
    from isthmus.deploy.processes import user
    from isthmus.deploy.site_settings import SiteSettings

    if [contract is not None, list_, withdraw is not None].count(True) != 1:
        raise ConfigError("give the hash of a contract, --list, or --withdraw HASH")
    site = SiteSettings.read(config)
    approvals = _approvals(site)
    if list_:
        for each in approvals.all():
            print(f"{each.contract}  {each.on}  {each.by}")
        return
    chain, person = AuditChain(site.state).open(), by or user()
    if withdraw is not None:
        for each in approvals.withdraw(withdraw):
            chain.append(ORDER, name="withdraw", contract=each.contract, by=person)
            print(f"withdrawn: {each.contract}; a run that was joined goes on until its next attempt")
        return
    chain.append(ORDER, name="approve", contract=approvals.find(str(contract)), by=person)
    made = approvals.approve(str(contract), person)
    print(f"approved: {made.contract} by {made.by}")
    if not site.policy.approve:
        print(f"{config} does not ask for approvals: write approve = true under [policy]", file=sys.stderr)


def _approvals(site: SiteSettings) -> Approvals:
    from isthmus.deploy.approval import Approvals
    from isthmus.deploy.roster import read_identity

    if site.identity is None:
        raise ConfigError(f"{site.path.name} names no identity, and approvals are signed with it: add identity")
    return Approvals(site.state, read_identity(site.identity))


@app.command("audit")
def audit(
    config: Annotated[Path, typer.Argument(help="The organisation's client.toml.")] = CLIENT_TOML,
    verify: Annotated[bool, typer.Option("--verify", help="Check every line of the chain.")] = False,
    head: Annotated[
        str | None, typer.Option(help="Check that this head, which somebody kept, is a line of the chain.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Show the lines of this run only.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print lines as they are.")] = False,
) -> None:
    """Show what was asked of this site in all its runs, and check that nobody changed the record of it."""
    from isthmus.deploy.audit_chain import AuditChain
    from isthmus.deploy.audit_chain import verify as verify_chain
    from isthmus.deploy.site_settings import SiteSettings
    from isthmus.errors import DataError

    site = SiteSettings.read(config)
    found = verify_chain(site.state)
    chain = AuditChain(site.state).open()
    if head is not None:
        number = chain.has_head(head.lower())
        if number is None:
            raise DataError(
                f"no line of this chain of {found.number} lines has the hash {head}: it was cut or rewritten since "
                "that head was kept"
            )
        print(f"line {number} of {found.number} has this hash: nothing up to it was changed since")
    if verify:
        print(f"{found.number} lines, unbroken; head {found.hash}")
        spent, delta = chain.spent
        print(f"{len(chain.runs)} runs joined, epsilon {spent:.4g} and delta {delta:.4g} spent")
    if head is None and not verify:
        for record in chain.read():
            if run is None or record.get("run") == run:
                print(json.dumps(record) if json_ else _in_words(record))


def _in_words(record: dict[str, Any]) -> str:
    """One line of the chain for people."""
    where = f" {record['run']}" if "run" in record else ""
    match record["kind"]:
        case "join":
            text = f"{record['stage']}, attempt {record['attempt']}, contract {record['contract'][:16]}"
            text += f", epsilon {record['epsilon']:.4g}" if record["epsilon"] else ""
        case "call":
            text = f"{record['party']} {record['phase']} {record['round']}: {record['handler']}"
            text += (
                f", sum over {', '.join(map(str, map(len, record['rosters'].values())))}" if record["rosters"] else ""
            )
        case "refused":
            text = " ".join(filter(None, (record.get("party"), record.get("handler"), f"({record['text']})")))
        case "meet":
            text = ", ".join(record["parties"])
        case "order":
            text = " ".join(str(record[key]) for key in ("name", "step", "contract", "by") if key in record)
        case _:
            text = ""
    return f"{record['number']:>7}  {record['kind']:<8}{where}  {text}".rstrip()


@app.command("start")
def start(
    kit: Annotated[Path, typer.Option(help="Startup kit of this organisation.")],
    config: Annotated[Path, typer.Option(help="The organisation's client.toml: its data, keys and policy.")],
    metrics: Annotated[
        int | None, typer.Option(help="Port of this machine's loopback for /healthz and /metrics.")
    ] = None,
    at_once: Annotated[int, typer.Option(help="Largest number of runs at the same time; each takes about 500 MB.")] = 4,
) -> None:
    """Take part until Ctrl-C. Only the installed package runs, on the data of client.toml."""
    from isthmus.deploy.client_setup import ClientSetup

    setup = ClientSetup.check(kit, config)
    for line in setup.summary:
        print(line, file=sys.stderr)
    order, (host, port) = setup.order(metrics, at_once), setup.kit.target
    print(f"{setup.kit.name} takes part at {host}:{port}, log in {order.log}; Ctrl-C ends it", file=sys.stderr)
    order.become()
