"""``isthmus data list|get|verify|check|describe|tables``, ``datasets``, ``partitions``: data sets and own tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import known
from isthmus.cli.console import print_table
from isthmus.errors import ConfigError, DataError

if TYPE_CHECKING:
    from isthmus.data.tables.check import Checked
    from isthmus.deploy.site_settings import SiteSettings, SiteTables

NAME = "data"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Data sets and own tables: fetch, check, describe.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
def datasets(json_: Json = False) -> None:
    """List everything --dataset accepts: node sets, sets of graphs, settings of several sets, generators."""
    entries = known.datasets()
    if entries is None:
        from isthmus.data.catalogue import list_datasets

        entries = [entry.to_json() for entry in list_datasets()]
    if json_:
        print(json.dumps({"datasets": entries}))
        return
    rows = [
        (entry["name"], entry["task"], entry["kind"], entry["where"] or "not here", _size(entry["size"]))
        for entry in entries
    ]
    print_table(("name", "task", "kind", "where", "size"), rows)


@app.command("get")
def get(name: Annotated[str, typer.Argument(help="Data set or setting.")], json_: Json = False) -> None:
    """Download a data set if necessary, verify and convert it, so that runs need no network."""
    known.check_dataset(name)
    from isthmus.data import catalogue

    found = catalogue.get(name)
    if json_:
        print(json.dumps({"datasets": [{"name": each, "source": source} for each, source in found]}))
    else:
        print_table(("name", "from"), found)


@app.command("verify")
def verify(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; all if none is given.")] = None,
    json_: Json = False,
) -> None:
    """Check the SHA-256 of every raw file that is here, and whether some are missing. Nothing is downloaded."""
    for name in names or ():
        known.check_dataset(name)
    from isthmus.data import catalogue

    results = catalogue.verify(names or ())
    if json_:
        print(json.dumps({"datasets": [{**vars(result), "problems": list(result.problems)} for result in results]}))
    else:
        print_table(
            ("name", "status", "from", ""), [(r.name, r.status, r.source or "", "; ".join(r.problems)) for r in results]
        )
    bad = [result for result in results if result.status in ("damaged", "incomplete")]
    if bad:
        what = "; ".join(f"{each.name} is {each.status}: {'; '.join(each.problems)}" for each in bad)
        copies = (
            " ('isthmus data get NAME' makes a converted copy anew)"
            if any(each.source == "converted copy" for each in bad)
            else ""
        )
        raise DataError(f"{what}; replace these files or unset ISTHMUS_DATA to fetch them again{copies}")


@app.command("check")
def check(
    place: Annotated[Path, typer.Argument(help="Folder of tables, folder of owners' folders, or a client.toml.")],
    against: Annotated[Path | None, typer.Option(help="The schema.toml that was agreed on.")] = None,
    json_: Json = False,
) -> None:
    """Check own tables: print errors by file, line and column, and a summary that contains only counts."""
    from isthmus.data.tables.check import check_folder

    if place.suffix == ".toml":
        site, tables = own_tables(place)
        found = check_folder(tables.folder, against=against, seed=tables.seed, owner=str(site.client))
    else:
        found = check_folder(place, against=against)
    if json_:
        print(json.dumps({"owners": [_checked(each) for each in found]}))
    else:
        _print_checked(found)
    if any(each.problems.errors for each in found):
        raise typer.Exit(DataError.exit_code)


def own_tables(path: Path) -> tuple[SiteSettings, SiteTables]:
    """A ``client.toml``, and where its tables are."""
    from isthmus.deploy.site_settings import SiteSettings

    site = SiteSettings.read(path)
    if site.tables is None:
        raise ConfigError(f'{path} has no tables: add [tables] and below it folder = "data"')
    return site, site.tables


def _checked(found: Checked) -> dict[str, Any]:
    problems = {kind: [asdict(each) for each in getattr(found.problems, kind)] for kind in ("errors", "warnings")}
    return {"owner": found.owner, **problems, "summary": dict(found.summary)}


def _print_checked(found: list[Checked]) -> None:
    """Problems first, then the summary: the part a person may send to the partners."""
    for each in found:
        for kind, problems in (("error", each.problems.errors), ("warning", each.problems.warnings)):
            for problem in problems:
                print(f"{kind}: {each.owner}: {problem}")
    errors = sum(len(each.problems.errors) for each in found)
    if any(each.summary for each in found):
        print("Summary: counts only, it can be sent to the partners")
    for each in found:
        for what, value in each.summary:
            print(f"{each.owner}: {what}: {value}")
    print("no errors" if not errors else f"{errors} errors: correct them and check again")


@app.command("describe")
def describe(folder: Annotated[Path, typer.Argument(help="Folder with one owner's CSV or Parquet files.")]) -> None:
    """Print a draft of schema.toml for the tables of a folder; types are guessed, so edit it before use."""
    from isthmus.data.tables.describe import draft_schema

    print(draft_schema(folder), end="")


@app.command("tables")
def tables(
    name: Annotated[str, typer.Argument(help="Data set with transfers: amlsim-fanin, amlsim-cycle, banks.")],
    folder: Annotated[Path, typer.Argument(help="New folder; one folder per bank is written into it.")],
    partition: Annotated[str | None, typer.Option(help="Which bank has which account.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of banks.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Rule for schema.toml: stratified:40/20/40, group:ring:40/20/40, ...")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.", min=0)] = 0,
    json_: Json = False,
) -> None:
    """Write a data set of transfers as tables, one folder per bank, to try out the path of own tables."""
    from isthmus.data.transfer_tables import write_tables

    sizes = write_tables(name, folder, partition=partition, clients=clients, split=split, seed=seed)
    if json_:
        print(json.dumps({"folder": str(folder), "owners": [{"owner": o, "accounts": n} for o, n in sizes.items()]}))
    else:
        print_table(("owner", "accounts"), [(owner, str(number)) for owner, number in sizes.items()])


def partitions(
    dataset: Annotated[
        str | None, typer.Option(help="Show what a partition does to this data set instead of listing them.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Which partition.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    split: Annotated[str | None, typer.Option(help="Train/validation/test.")] = None,
    seed: Annotated[int, typer.Option(help="Seed.", min=0)] = 0,
    json_: Json = False,
) -> None:
    """List partitions and splits; with --dataset: sizes, cross edges, label skew and homophily of one."""
    if dataset is None:
        if any(given is not None for given in (partition, clients, split)):
            raise ConfigError("--partition, --clients and --split describe a data set: give --dataset too")
        _list_partitions(json_)
        return
    known.check_dataset(dataset)
    from isthmus.data.graphscenario import task_of
    from isthmus.experiments.scenarios import build, report_statistics

    facts = report_statistics(build(dataset=dataset, partition=partition, clients=clients, split=split, seed=seed))
    if json_:
        print(json.dumps(facts))
        return
    if task_of(dataset) == "graph":
        columns: tuple[str, ...] = ("client", "title", "graphs", "train", "val", "test", "nodes", "edges", "features")
        print_table(columns, [tuple(str(row[column]) for column in columns) for row in facts["clients"]])
        return
    columns = ("client", "nodes", "train", "val", "test", "edges", "cross_edges", "homophily")
    print_table(columns, [tuple(_cell(row[column]) for column in columns) for row in facts["clients"]])
    share, skew = _cell(facts["cross_share"]), _cell(facts["label_skew"])
    print(f"cross-edge share {share}, label skew {skew} (mean total variation distance to all labels)")
    print(f"nodes with a neighbour elsewhere {_cell(facts['leakage'])} (eps_p, mean over clients)")


def _list_partitions(json_: bool) -> None:
    found = known.known()
    if found is not None:
        rows = found["partitions"]
    else:
        from isthmus.data.catalogue import list_partitions

        rows = list_partitions()
    if json_:
        print(json.dumps({"partitions": rows}))
    else:
        print_table(
            ("kind", "name", "task", "what it does"),
            [(row["kind"], row["name"], row["task"], row["what"]) for row in rows],
        )


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _size(size: Any) -> str:
    return ", ".join(
        f"{key} {'/'.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for key, value in size.items()
    )
