"""``isthmus link``: which edges between owners both sides list, by the messages organisations would exchange."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.console import print_table
from isthmus.cli.data import own_tables

if TYPE_CHECKING:
    from isthmus.data.tables.owner import OwnerTables

NAME = "link"


def command(
    places: Annotated[list[Path], typer.Argument(help="client.toml of every owner, or one folder of owners' folders.")],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the owners' edges by private set intersection, in this process, and count what both sides list."""
    from isthmus.experiments.tables import link_counts

    tables, caps = _owners(places)
    rows: list[dict[str, Any]] = [
        {"owner": owner, "partner": partner, "listed": n.listed, "agreed": n.agreed, "only_here": n.only_here}
        for owner, found in link_counts(tables, caps).items()
        for partner, n in found.items()
    ]
    listed = {row["owner"]: row["listed"] for row in rows}
    nobody = {owner: listed[owner] - sum(row["agreed"] for row in rows if row["owner"] == owner) for owner in tables}
    if json_:
        print(json.dumps({"pairs": rows, "agreed_by_nobody": nobody}))
        return
    print_table(
        ("owner", "partner", "listed", "agreed", "only here"),
        [tuple(map(str, row.values())) for row in rows],
        "Edges that lead out of an owner's tables",
    )
    for owner, count in nobody.items():
        print(f"{owner}: {count} edges that no partner lists; they stay outside the graph")


def _owners(places: list[Path]) -> tuple[dict[str, OwnerTables], dict[str, int | None]]:
    """Tables of every owner, and the largest set of edges each of them compares."""
    from isthmus.data.tables.owner import read_owner
    from isthmus.errors import ConfigError
    from isthmus.experiments.tables import check_same_schema, read_owners

    if len(places) == 1 and places[0].is_dir():
        tables = read_owners(places[0], seed=0)
        return tables, dict.fromkeys(tables)
    sites = [own_tables(path) for path in places]
    names = [str(site.client) for site, _ in sites]
    if len(set(names)) < len(names):
        raise ConfigError(f"two of these files are of the same client ({', '.join(names)}): give each owner's once")
    tables = {str(site.client): read_owner(own.folder, str(site.client), seed=own.seed) for site, own in sites}
    check_same_schema({name: owned.schema for name, owned in tables.items()})
    return tables, {str(site.client): site.policy.max_ids for site, _ in sites}
