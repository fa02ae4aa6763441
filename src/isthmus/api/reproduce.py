"""A paper's tables, our results beside the published ones, cell by cell."""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.api.batch import Runner, runner
from isthmus.api.progress import watched
from isthmus.api.table import Cell as TableCell
from isthmus.api.table import Table as ResultTable
from isthmus.api.table import counted
from isthmus.errors import ConfigError, DataError, RunError
from isthmus.experiments.batch import Job, Outcome, existing_outcome
from isthmus.papers import (
    Cell,
    Comparison,
    Paper,
    Table,
    cell_settings,
    compare_table,
    find_tables,
    folder_of,
    record_of,
    select,
    why_not,
    write_records,
)
from isthmus.papers import tables as published_tables
from isthmus.papers.counts import BEGIN, END, Counts, count, counts_table
from isthmus.papers.earlier import Numbers, without_seed
from isthmus.papers.figures import draw
from isthmus.papers.judge import Earlier
from isthmus.papers.page import difference_text, ours_text, paired_text, published_text, write_page
from isthmus.papers.records import curve_of
from isthmus.papers.tables import SPREADS

logger = logging.getLogger(__name__)

OUT = Path("runs/reproduce")


class Reproduced(dict[str, Any]):
    """What a reproduction found: ``paper``, ``verdicts`` and ``tables``, with every cell, ours beside theirs."""

    def __init__(self, document: Mapping[str, Any], tables: Sequence[ResultTable]) -> None:
        super().__init__(document)
        self._tables = tuple(tables)

    def tables(self) -> tuple[ResultTable, ...]:
        """One table per table of the paper; cells without a number are left out."""
        return self._tables

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._tables)


def reproduce(
    target: str,
    *,
    only: str | None = None,
    runs: int | None = None,
    jobs: int = 1,
    out: str | os.PathLike[str] = OUT,
    quiet: bool = False,
) -> Reproduced:
    """Run the cells of a published table and put our results beside the paper's.

    Args:
        target: Paper, or table of a paper, e.g. ``fedstruct/table2``.
        only: Cells that match all words, ``"cora 10"``, or all words of one of several, ``"cora 10 or citeseer 5"``.
        runs: Seeds per cell; default: as the paper. 0 runs nothing and shows what is there.
        jobs: Runs at a time.
        out: Folder of the run folders; finished runs in it are used, begun ones continued.
        quiet: Show no progress.
    """
    paper, tables = find_tables(target)
    work = Reproduction(tables, select(tables, only), runs, Path(out), {})
    work.run(runner(jobs, shown=watched(quiet)))
    comparisons = work.compare(work.cells)
    work.write(paper.name)
    work.raise_failure(comparisons)
    return work.reproduced(paper.name, comparisons)


def earlier_file(folder: Path, paper: Paper) -> Path:
    """Where numbers from before records are kept."""
    return folder / f"{paper.name}-earlier.jsonl"


def records_file(folder: Path, paper: Paper) -> Path:
    """Where records of a paper's runs are kept."""
    return folder / f"{paper.name}.jsonl"


class Reproduction:
    """Cells, the runs they need, and their outcomes.

    Args:
        records: Finished runs whose folders may be gone, by the name of the folder.
        earlier: Numbers of runs that were not recorded.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        cells: Sequence[Cell],
        runs: int | None,
        out: Path,
        records: Mapping[str, Mapping[str, Any]],
        earlier: Numbers | None = None,
    ) -> None:
        self.earlier = earlier or {}
        self.tables, self.cells, self.out = tables, cells, out
        self.runs = {table.key: table.runs if runs is None else runs for table in tables}
        self.why_not = {id(cell): why_not(cell) for cell in cells}
        self.records = records
        self.outcomes: dict[Path, Outcome] = {}
        self.seconds = 0.0

    def jobs_of(self, cell: Cell, runs: int) -> list[Job]:
        settings = [cell_settings(cell, seed) for seed in range(runs)]
        return [Job(each, folder_of(each, self.out), models=False) for each in settings]

    def run(self, run: Runner) -> None:
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
        self.outcomes = run(ordered, names, scores)
        self.seconds = time.monotonic() - started

    def results(self, cell: Cell) -> dict[int, Mapping[str, Any]]:
        """Results of a cell by seed: of this call, from an earlier one in the folder, or from the records."""
        if id(cell) not in self.why_not:
            self.why_not[id(cell)] = why_not(cell)
        if self.why_not[id(cell)] is not None:
            return {}
        asked = self.runs.get(cell.table)
        published = next(
            (table.runs for table in published_tables.load_paper(cell.paper).tables if table.key == cell.table), 0
        )
        found: dict[int, Mapping[str, Any]] = {}
        for seed, job in enumerate(self.jobs_of(cell, asked or published)):
            outcome = self.outcomes.get(job.folder) or existing_outcome(job)
            if outcome is not None and outcome.result is not None:
                found[seed] = {**outcome.result, "run_dir": str(job.folder)}  # where it is now
            elif job.folder.name in self.records:
                found[seed] = self.records[job.folder.name]
        return found

    def reason(self, cell: Cell) -> str:
        """Why a cell has no number, or not all of its seeds."""
        if missing := self.why_not.get(id(cell)):
            return missing
        outcomes = [
            self.outcomes[job.folder]
            for job in self.jobs_of(cell, self.runs.get(cell.table, 0))
            if job.folder in self.outcomes
        ]
        reasons = dict.fromkeys(outcome.reason for outcome in outcomes if outcome.result is None)
        return "; ".join(reasons) or ("" if self.results(cell) else "not run here")

    def compare(self, cells: Sequence[Cell]) -> list[Comparison]:
        return [
            row
            for table in self.tables
            for row in compare_table(
                table,
                [cell for cell in cells if cell.table == table.key],
                self.results,
                self.reason,
                earlier=self.number_before,
                find=functools.partial(find_cell, table.paper),
            )
        ]

    def number_before(self, cell: Cell) -> Earlier | None:
        """The number of a cell from before records; None if there is none with its settings."""
        if not self.earlier or self.why_not.setdefault(id(cell), why_not(cell)) is not None:
            return None
        (job,) = self.jobs_of(cell, 1)
        return self.earlier.get((without_seed(job.folder.name), cell.score))

    def document(self, paper: str, comparisons: Sequence[Comparison]) -> dict[str, Any]:
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
        causes: dict[str, int] = {}
        for row in comparisons:
            if row.cause:
                causes[row.cause] = causes.get(row.cause, 0) + 1
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
            "causes": causes,
            "tables": tables,
        }

    def reproduced(self, paper: str, comparisons: Sequence[Comparison]) -> Reproduced:
        """Everything, as Python sees it."""
        shown = [self.results_table(table, comparisons) for table in self.tables]
        return Reproduced(self.document(paper, comparisons), [table for table in shown if table.rows])

    def results_table(self, table: Table, comparisons: Sequence[Comparison]) -> ResultTable:
        """Ours beside theirs, of one table: the cells that have a number."""
        rows = [row for row in comparisons if row.cell.table == table.key and row.mean is not None]
        remarks = dict.fromkeys(
            f"{'finding' if note.finding else 'note'}: {note.text}" for row in rows for note in row.cell.notes
        )
        notes = [
            f"±: {SPREADS[table.spread]}; the same seeds and partitions for every row",
            *(f"note: {note.text}" for note in table.notes if not note.only),
            *(
                f"{cause}: {', '.join(row.cell.name for row in rows if row.cause == cause)}"
                for cause in dict.fromkeys(row.cause for row in rows if row.cause)
            ),
            *remarks,
        ]
        return _table(table, rows, notes)

    # -- files -------------------------------------------------------------------------------------

    def write(self, paper: str) -> None:
        """Write ``<paper>-<table>.json`` beside the run folders: every cell of the table that has results, of this call
        or an earlier one.
        """
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
        every = Reproduction(paper.tables, (), None, self.out, self.records, self.earlier)
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
            figures = every.draw(tables, folder / FIGURES)
            shown = {key: [(f"{FIGURES}/{file}", verdict) for file, verdict in each] for key, each in figures.items()}
            path.write_text(write_page(paper, tables, list(runs.values()), shown))
            if runs:
                records = {name: record_of(name, each, curve_of(self.out / name)) for name, each in runs.items()}
                if unused := sorted(self.records.keys() - records.keys()):  # the settings of their rows have changed
                    logger.warning("%d records belong to no cell and are kept, e.g. %s", len(unused), unused[0])
                write_records(records_file(folder, paper), {**self.records, **records})
            write_counts(folder, paper.name, count(tables))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another folder") from None
        return path

    def draw(
        self, compared: Sequence[tuple[Table, Sequence[Comparison]]], folder: Path
    ) -> dict[str, list[tuple[str, str]]]:
        """Draw what can be drawn, one SVG per plot; returns the files' names with their verdicts by table."""
        drawn: dict[str, list[tuple[str, str]]] = {}
        for table, rows in compared:
            for number, plot in enumerate(table.plots, 1):
                drawing = draw(table, plot, rows, self.with_curves)
                if drawing is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    name = f"{table.paper}-{table.key}{f'-{number}' if number > 1 else ''}.svg"
                    (folder / name).write_text(drawing.picture)
                    drawn.setdefault(table.key, []).append((name, drawing.verdict))
        return drawn

    def with_curves(self, cell: Cell) -> dict[int, Mapping[str, Any]]:
        """Results of a cell with their small curves."""
        return {
            seed: {**result, "curve": curve_of(self.out / Path(result["run_dir"]).name) or result.get("curve")}
            for seed, result in self.results(cell).items()
        }

    def raise_failure(self, comparisons: Sequence[Comparison]) -> None:
        """Exit 4 if a run failed, 3 if a folder is damaged or nothing could be run for lack of data, 2 if nothing here
        can run at all.
        """
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


def find_cell(paper: str, table: str, name: str) -> tuple[Table, Cell] | None:
    """A cell of a paper by its table and name."""
    for each in published_tables.load_paper(paper).tables:
        if each.key == table:
            return next(((each, cell) for cell in each.cells if cell.name == name), None)
    return None


COUNTS = "counts.json"
FIGURES = "figures"


def write_counts(folder: Path, paper: str, found: Counts) -> None:
    """Keep the counts of a paper in ``counts.json``, and write all papers' into the table at the top of ``README.md``
    where that has the place for it. What was there when counting began stays as ``before``."""
    path, readme = folder / COUNTS, folder / "README.md"
    kept: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {"before": {}, "now": {}}
    kept["now"][paper] = found.to_json()
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    text = readme.read_text() if readme.exists() else ""
    if BEGIN in text and END in text:
        before, now = ({name: Counts(**kept[when][name]) for name in sorted(kept[when])} for when in ("before", "now"))
        head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
        readme.write_text(f"{head}{BEGIN}\n\n{counts_table(before, now)}\n\n{END}{tail}")


def _table(table: Table, rows: Sequence[Comparison], notes: Sequence[str]) -> ResultTable:
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
        (
            TableCell(row.cell.name),
            TableCell(published_text(row), row.cell.published.mean, row.cell.published.spread),
            TableCell(ours_text(row), row.mean, row.spread),
            TableCell(_seeds(sorted(row.values)) if row.values else f"{row.earlier_seeds} unrecorded"),
            TableCell(difference_text(row), row.difference),
            TableCell(row.verdict),
            *([TableCell(paired_text(row), None if row.paired is None else row.paired.mean)] if paired else []),
            counted(row.trainable),
            counted(row.shared),
            counted(row.seconds, None if row.seconds is None else f"{row.seconds:.1f}"),
        )
        for row in rows
    ]
    title = f"{table.name}: {table.title}"
    return ResultTable(title, tuple(headings), tuple(lines), tuple(notes), frozenset({"published", "ours"}))


def _seeds(seeds: Sequence[int]) -> str:
    return (
        f"{seeds[0]}-{seeds[-1]}"
        if len(seeds) > 1 and seeds[-1] - seeds[0] == len(seeds) - 1
        else ",".join(map(str, seeds))
    )
