"""``isthmus data list|get|verify``, ``datasets``, ``partitions``: what there is, whether it is here, whether it is whole."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from isthmus.cli.console import print_table
from isthmus.errors import DataError

NAME = "data"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Data sets: list, make usable offline, check that files are whole.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
def datasets(json_: Json = False) -> None:
    """List everything --dataset takes: node sets, sets of graphs, settings of several sets, generators."""
    from isthmus.data.catalogue import list_datasets

    entries = list_datasets()
    if json_:
        print(json.dumps({"datasets": [entry.to_json() for entry in entries]}))
        return
    rows = [(entry.name, entry.task, entry.kind, entry.where or "not here", _size(entry.size)) for entry in entries]
    print_table(("name", "task", "kind", "where", "size"), rows)


@app.command("get")
def get(name: Annotated[str, typer.Argument(help="Data set or setting.")], json_: Json = False) -> None:
    """Fetch a data set if need be, verify and convert it, so that runs need no network."""
    from isthmus.data import catalogue

    found = catalogue.get(name)
    if json_:
        print(json.dumps({"datasets": [{"name": each, "source": source} for each, source in found]}))
    else:
        print_table(("name", "from"), found)


@app.command("verify")
def verify(names: Annotated[list[str] | None, typer.Argument(help="Data sets; all if none is given.")] = None, json_: Json = False) -> None:
    """Check the SHA-256 of every raw file that is here. Nothing is fetched."""
    from isthmus.data import catalogue

    results = catalogue.verify(names or ())
    if json_:
        print(json.dumps({"datasets": [{**vars(result), "problems": list(result.problems)} for result in results]}))
    else:
        print_table(("name", "status", "from", ""), [(r.name, r.status, r.source or "", "; ".join(r.problems)) for r in results])
    damaged = [result.name for result in results if result.status == "damaged"]
    if damaged:
        raise DataError(f"damaged: {', '.join(damaged)}; replace these files or unset ISTHMUS_DATA to fetch them again")


def partitions() -> None:
    """List partitions and splits."""
    from isthmus.data.catalogue import list_partitions

    print_table(("kind", "name", "task", "what it does"), [(r["kind"], r["name"], r["task"], r["what"]) for r in list_partitions()])


def _size(size: Any) -> str:
    return ", ".join(f"{key} {'/'.join(map(str, value)) if isinstance(value, (list, tuple)) else value}" for key, value in size.items())
