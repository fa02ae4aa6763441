"""``isthmus reproduce``: a paper's tables, our results beside the published ones, cell by cell."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.batch import Jobs, run_jobs
from isthmus.cli.console import clock, print_table, stdout
from isthmus.cli.run import Json

if TYPE_CHECKING:
    from isthmus.experiments.batch import Job, Outcome
    from isthmus.papers import Cell, Comparison, Paper, Table

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
    json_: Json = False,
) -> None:
    """Run the cells of a published table and print our results beside the paper's."""
    from isthmus.errors import ConfigError
    from isthmus.papers import find_tables, paper_names, read_records, select

    if target is None:
        if not list_:
            raise ConfigError(
                f"name a paper, or a table as PAPER/TABLE; papers: {', '.join(paper_names())} (--list shows their "
                "tables)"
            )
        _list_tables([table for name in paper_names() for table in find_tables(name)[1]], json_)
        return
    paper, tables = find_tables(target)
    cells = select(tables, only)
    if list_:
        if "/" in target.strip("/") or only:
            _list_cells(cells, json_)
        else:
            _list_tables(tables, json_)
        return
    report = Reproduction(tables, cells, runs, out, {} if docs is None else read_records(_records(docs, paper)))
    report.run(jobs)
    comparisons = report.compare(cells)
    document = report.document(paper.name, comparisons)
    if json_:
        print(json.dumps(document))
    else:
        report.show(comparisons)
    report.write(paper.name)
    if docs is not None:
        print(f"page: {report.write_docs(paper, docs)}", file=sys.stderr)
    report.raise_failure(comparisons)


def _records(folder: Path, paper: Paper) -> Path:
    return folder / f"{paper.name}.jsonl"


class Reproduction:
    """Cells, the runs they need, and their outcomes.

    Args:
        records: Finished runs whose folders may be gone, by the name of the folder.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        cells: Sequence[Cell],
        runs: int | None,
        out: Path,
        records: Mapping[str, Mapping[str, Any]],
    ) -> None:
        from isthmus.papers import why_not

        self.tables, self.cells, self.out = tables, cells, out
        self.runs = {table.key: table.runs if runs is None else runs for table in tables}
        self.why_not = {id(cell): why_not(cell) for cell in cells}
        self.records = records
        self.outcomes: dict[Path, Outcome] = {}
        self.seconds = 0.0

    def jobs_of(self, cell: Cell, runs: int) -> list[Job]:
        from isthmus.experiments.batch import Job
        from isthmus.papers import cell_settings, folder_of

        settings = [cell_settings(cell, seed) for seed in range(runs)]
        return [Job(each, folder_of(each, self.out), models=False) for each in settings]

    def run(self, workers: int | None) -> None:
        """Run what is missing. The first seed of all cells comes first, so that every cell has a number early."""
        wanted: dict[Path, tuple[int, Job]] = {}
        names: dict[Path, str] = {}
        scores: dict[Path, str] = {}
        for cell in self.cells:
            if self.why_not[id(cell)] is None:
                for seed, job in enumerate(self.jobs_of(cell, self.runs[cell.table])):
                    if job.folder.name in self.records and not job.folder.exists():
                        continue
                    wanted.setdefault(job.folder, (seed, job))
                    names.setdefault(job.folder, f"{cell.name}, seed {seed}")
                    scores.setdefault(job.folder, cell.score if cell.unit == "%" else "score")
        ordered = [job for _, job in sorted(wanted.values(), key=lambda pair: pair[0])]
        started = time.monotonic()
        self.outcomes = run_jobs(ordered, names, workers, scores)
        self.seconds = time.monotonic() - started

    def results(self, cell: Cell) -> dict[int, Mapping[str, Any]]:
        """Results of a cell by seed: of this call, from an earlier one in the folder, or from the records."""
        from isthmus.experiments.batch import existing_outcome
        from isthmus.papers import why_not

        if id(cell) not in self.why_not:
            self.why_not[id(cell)] = why_not(cell)
        if self.why_not[id(cell)] is not None:
            return {}
        table = next(table for table in self.tables if table.key == cell.table)
        asked = self.runs[cell.table]
        found = {}
        for seed, job in enumerate(self.jobs_of(cell, asked or table.runs)):
            outcome = self.outcomes.get(job.folder) or existing_outcome(job)
            if outcome is not None and outcome.result is not None:
                found[seed] = outcome.result
            elif job.folder.name in self.records:
                found[seed] = self.records[job.folder.name]
        return found

    def reason(self, cell: Cell) -> str:
        """Why a cell has no number, or not all of its seeds."""
        if missing := self.why_not.get(id(cell)):
            return missing
        outcomes = [
            self.outcomes[job.folder]
            for job in self.jobs_of(cell, self.runs[cell.table])
            if job.folder in self.outcomes
        ]
        reasons = dict.fromkeys(outcome.reason for outcome in outcomes if outcome.result is None)
        return "; ".join(reasons) or ("" if self.results(cell) else "not run here")

    def compare(self, cells: Sequence[Cell]) -> list[Comparison]:
        from isthmus.papers import compare_table

        return [
            row
            for table in self.tables
            for row in compare_table(
                table, [cell for cell in cells if cell.table == table.key], self.results, self.reason
            )
        ]

    def document(self, paper: str, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        from isthmus.papers.tables import SPREADS

        tables = [
            {
                "table": table.key,
                "title": table.title,
                "spread": table.spread,
                "spread_meaning": SPREADS[table.spread],
                "runs": self.runs[table.key],
                "notes": [note.text for note in table.notes if not note.only],
                "cells": [row.to_json() for row in comparisons if row.cell.table == table.key],
            }
            for table in self.tables
        ]
        counts: dict[str, int] = {}
        for row in comparisons:
            counts[row.verdict] = counts.get(row.verdict, 0) + 1
        states: dict[str, int] = {}
        for outcome in self.outcomes.values():
            states[outcome.status] = states.get(outcome.status, 0) + 1
        seconds = round(self.seconds, 3)
        return {
            "paper": paper,
            "out": str(self.out),
            "seconds": seconds,
            "runs": states,
            "verdicts": counts,
            "tables": tables,
        }

    # -- output ------------------------------------------------------------------------------------

    def show(self, comparisons: Sequence[Comparison]) -> None:
        from isthmus.papers.tables import SPREADS

        console = stdout()
        for table in self.tables:
            rows = [row for row in comparisons if row.cell.table == table.key]
            shown = [row for row in rows if row.mean is not None]
            if shown:
                title = f"{table.name}: {table.title}"
                print_table(*_cells(table, shown), title)
                console.print(f"±: {SPREADS[table.spread]}; the same seeds and partitions for every row")
                notes = dict.fromkeys(
                    f"{'finding' if note.finding else 'note'}: {note.text}" for row in shown for note in row.cell.notes
                )
                for note in [*(f"note: {note.text}" for note in table.notes if not note.only), *notes]:
                    console.print(note)
            skipped: dict[str, list[str]] = {}
            for row in rows:
                if row.reason:
                    skipped.setdefault(row.reason, []).append(row.cell.row if row.mean is None else row.cell.name)
            for reason, names in skipped.items():
                labels = list(dict.fromkeys(names))
                console.print(
                    f"not run: {', '.join(labels[:6])}{f' and {len(labels) - 6} more' if len(labels) > 6 else ''}: "
                    f"{reason}"
                )
        done = sum(outcome.status == "done" for outcome in self.outcomes.values())
        reused = sum(outcome.status == "reused" for outcome in self.outcomes.values())
        console.print(
            f"{done} runs done and {reused} found finished, in {clock(self.seconds)} min; run folders in {self.out}"
        )

    def write(self, paper: str) -> None:
        """Write ``<paper>-<table>.json`` beside the run folders: every cell of the table that has results, of this call
        or an earlier one.
        """
        from isthmus.errors import ConfigError

        for table in self.tables:
            rows = [row for row in self.compare(table.cells) if row.mean is not None]
            if rows:
                document = self.document(paper, rows)
                document["tables"] = [entry for entry in document["tables"] if entry["table"] == table.key]
                try:
                    self.out.mkdir(parents=True, exist_ok=True)
                    (self.out / f"{paper}-{table.key}.json").write_text(json.dumps(document, indent=1) + "\n")
                except OSError as error:
                    raise ConfigError(f"cannot write into {self.out}: {error.strerror}; choose another --out") from None

    def write_docs(self, paper: Paper, folder: Path) -> Path:
        """The results page of the whole paper, and the records it can be written from again."""
        from isthmus.errors import ConfigError
        from isthmus.papers import record_of, write_records
        from isthmus.papers.page import write_page

        every = Reproduction(paper.tables, (), None, self.out, self.records)
        tables = [(table, every.compare(table.cells)) for table in paper.tables]
        results = [result for table in paper.tables for cell in table.cells for result in every.results(cell).values()]
        runs = {Path(result["run_dir"]).name: result for result in results}
        path = folder / f"{paper.name}.md"
        if not runs and path.exists():
            raise ConfigError(
                f"{path} was not changed: there is no run of {paper.name} in {self.out} and no record beside it: run "
                "some cells first"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(write_page(paper, tables, list(runs.values())))
            if runs:
                write_records(_records(folder, paper), {name: record_of(name, result) for name, result in runs.items()})
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another folder") from None
        return path

    def raise_failure(self, comparisons: Sequence[Comparison]) -> None:
        """Exit 4 if a run failed, 3 if a folder is damaged or nothing could be run for lack of data, 2 if nothing here
        can run at all.
        """
        from isthmus.errors import ConfigError, DataError, RunError

        bad = {
            status: [o for o in self.outcomes.values() if o.status == status]
            for status in ("failed", "damaged", "skipped")
        }
        if bad["failed"]:
            raise RunError(
                f"{len(bad['failed'])} of {len(self.outcomes)} runs failed, the first: {bad['failed'][0].reason}"
            )
        if bad["damaged"]:
            raise DataError(f"{len(bad['damaged'])} run folders cannot be used, the first: {bad['damaged'][0].reason}")
        if all(row.mean is None for row in comparisons):
            if bad["skipped"]:
                raise DataError(f"nothing could be run: {bad['skipped'][0].reason}")
            reasons = dict.fromkeys(row.reason for row in comparisons if row.reason)
            raise ConfigError(f"none of these cells has a result: {'; '.join(list(reasons)[:5])}")


def _cells(table: Table, rows: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    from isthmus.papers.page import difference_text, ours_text, paired_text, published_text

    paired = any(row.paired for row in rows)
    headings = [
        "cell",
        "published",
        "ours",
        "seeds",
        "difference",
        "verdict",
        *([f"to {table.reference}"] if paired else []),
        "parameters",
        "shared",
        "s/run",
    ]
    lines = [
        [
            row.cell.name,
            published_text(row),
            ours_text(row),
            _seeds(sorted(row.values)),
            difference_text(row),
            row.verdict,
            *([paired_text(row)] if paired else []),
            "" if row.trainable is None else f"{row.trainable:,}",
            "" if row.shared is None else f"{row.shared:,}",
            "" if row.seconds is None else f"{row.seconds:.1f}",
        ]
        for row in rows
    ]
    return headings, lines


def _seeds(seeds: Sequence[int]) -> str:
    return (
        f"{seeds[0]}-{seeds[-1]}"
        if len(seeds) > 1 and seeds[-1] - seeds[0] == len(seeds) - 1
        else ",".join(map(str, seeds))
    )


def _list_tables(tables: Sequence[Table], as_json: bool) -> None:
    from isthmus.papers import why_not

    entries: list[dict[str, Any]] = []
    for table in tables:
        missing = [why_not(cell) for cell in table.cells]
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
