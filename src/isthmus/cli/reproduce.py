"""``isthmus reproduce``: a paper's tables, our results beside the published ones, cell by cell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.api.progress import clock
from isthmus.cli.batch import interruptible
from isthmus.cli.console import print_table, stdout
from isthmus.cli.options import Jobs, Json, TableFile

if TYPE_CHECKING:
    from isthmus.api.reproduce import Reproduction
    from isthmus.papers import Cell, Comparison, Table

NAME = "reproduce"
OUT = Path("runs/reproduce")


def command(
    target: Annotated[str | None, typer.Argument(metavar="PAPER[/TABLE]", help="For example fedstruct/table2.")] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List papers, tables or cells with their commands; nothing is run.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(help='Cells that match all words, "cora 10", or one by name, "FE GIN / GCN".')
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Seeds per cell (default: as the paper; 0 only shows what is there).", min=0)
    ] = None,
    jobs: Jobs = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the run folders; finished runs in it are used, begun ones continued.")
    ] = OUT,
    docs: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Also write the paper's results page into this folder, with a record of every run; runs recorded "
                "there are not repeated."
            )
        ),
    ] = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="Also draw the tables' figures as SVG, into the folder of the runs.")
    ] = False,
    table: TableFile = None,
    json_: Json = False,
) -> None:
    """Run the cells of a published table and print our results beside the paper's."""
    from isthmus.api.reproduce import Reproduction, earlier_file, records_file
    from isthmus.api.table import check_table_file, write_table
    from isthmus.errors import ConfigError
    from isthmus.papers import find_tables, paper_names, read_earlier, read_records, select

    if target is None:
        if not list_:
            raise ConfigError(
                f"name a paper, or a table as PAPER/TABLE; papers: {', '.join(paper_names())} (--list shows their "
                "tables)"
            )
        _list_tables([each for name in paper_names() for each in find_tables(name)[1]], json_)
        return
    paper, tables = find_tables(target)
    cells = select(tables, only)
    if list_:
        if "/" in target.strip("/") or only:
            _list_cells(cells, json_)
        else:
            _list_tables(tables, json_)
        return
    check_table_file(table)
    records = {} if docs is None else read_records(records_file(docs, paper))
    work = Reproduction(
        tables, cells, runs, out, records, None if docs is None else read_earlier(earlier_file(docs, paper))
    )
    work.run(interruptible(jobs))
    comparisons = work.compare(cells)
    found = work.reproduced(paper.name, comparisons)
    if json_:
        print(json.dumps(found))
    else:
        _show(work, comparisons)
    work.write(paper.name)
    if plot:
        shown = [(each, work.compare(each.cells)) for each in tables]
        drawn = work.draw(shown, out / "figures")
        if not drawn:
            raise ConfigError(f"nothing of {target} can be drawn: no such figure, or none of its cells was run")
        for key, figures in drawn.items():
            for file, verdict in figures:
                print(f"figure of {key}: {out / 'figures' / file}\n    {verdict}", file=sys.stderr)
    if docs is not None:
        print(f"page: {work.write_docs(paper, docs)}", file=sys.stderr)
    if table is not None:
        write_table(found.tables(), table)
    work.raise_failure(comparisons)


def _show(work: Reproduction, comparisons: Sequence[Comparison]) -> None:
    console = stdout()
    for table in work.tables:
        shown = work.results_table(table, comparisons)
        if shown.rows:
            print_table(shown.headings, shown.texts, shown.title)
            for note in shown.notes:
                console.print(note)
        skipped: dict[str, list[str]] = {}
        for row in comparisons:
            if row.reason and row.cell.table == table.key:
                skipped.setdefault(row.reason, []).append(row.cell.row if row.mean is None else row.cell.name)
        for reason, names in skipped.items():
            labels = list(dict.fromkeys(names))
            console.print(
                f"not run: {', '.join(labels[:6])}{f' and {len(labels) - 6} more' if len(labels) > 6 else ''}: {reason}"
            )
    done = sum(outcome.status == "done" for outcome in work.outcomes.values())
    reused = sum(outcome.status == "reused" for outcome in work.outcomes.values())
    console.print(
        f"{done} runs done and {reused} found finished, in {clock(work.seconds)} min; run folders in {work.out}"
    )


def _list_tables(tables: Sequence[Table], as_json: bool) -> None:
    from isthmus.papers import why_not

    entries: list[dict[str, Any]] = []
    lacking = _lacking(tables)
    for table in tables:
        missing = [why_not(cell) or lacking(cell) for cell in table.cells]
        entries.append(
            {
                "table": table.name,
                "aliases": list(table.aliases),
                "title": table.title,
                "cells": len(table.cells),
                "runs": table.runs,
                "runnable": sum(reason is None for reason in missing),
                "missing": sorted({reason for reason in missing if reason}),
            }
        )
    if as_json:
        print(json.dumps({"tables": entries}))
        return
    rows = [
        [e["table"], ", ".join(e["aliases"]), e["title"], str(e["cells"]), str(e["runnable"]), str(e["runs"])]
        for e in entries
    ]
    print_table(("table", "also", "what", "cells", "runnable now", "seeds"), rows)


def _lacking(tables: Sequence[Table]) -> Callable[[Cell], str | None]:
    """Why a cell that Isthmus can run cannot be run on this machine: data that are not here, too little memory."""
    import os

    from isthmus.data.catalogue import list_datasets

    absent = {entry.name for entry in list_datasets() if entry.where is None and entry.kind != "generator"}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9

    def why(cell: Cell) -> str | None:
        dataset = str(cell.run.get("dataset", ""))
        if dataset in absent:
            return f"data set {dataset} is not here (isthmus data get {dataset})"
        if cell.memory is not None and memory < 1.5 * cell.memory:
            return f"a run took more than {cell.memory:g} GB, and this machine has {memory:.0f}"
        return None

    return why


def _list_cells(cells: Sequence[Cell], as_json: bool) -> None:
    from isthmus.papers import cell_command, why_not

    entries: list[dict[str, Any]] = [
        {
            "table": f"{cell.paper}/{cell.table}",
            "cell": cell.name,
            "published": cell.published.text,
            "score": cell.score,
            "command": cell_command(cell),
            "run": dict(cell.run),
            "missing": why_not(cell),
            "notes": [note.text for note in cell.notes],
        }
        for cell in cells
    ]
    if as_json:
        print(json.dumps({"cells": entries}))
        return
    for entry in entries:
        print(f"{entry['table']}  {entry['cell']}  {entry['published']}\n    {entry['missing'] or entry['command']}")
        for note in entry["notes"]:
            print(f"    note: {note}")
