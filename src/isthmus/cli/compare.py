"""``isthmus compare``: several methods on one scenario, with the same seeds and partitions for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.batch import interruptible
from isthmus.cli.console import print_table, received
from isthmus.cli.options import BatchOptions, takes

if TYPE_CHECKING:
    from isthmus.api.table import Table

NAME = "compare"
RAN = "ran with"
SPARE = ("shared", "ms/round", "parameters", "seeds", "down", "peer", "up", "test pooled")
"""Columns a narrow terminal does without, in this order."""


@takes(BatchOptions)
def command(
    methods: Annotated[
        list[str],
        typer.Argument(help="Methods, with own settings as in local:backbone=mlp; differences are to the first."),
    ],
    *,
    options: BatchOptions,
) -> None:
    """Run several methods on the same data, splits and seeds; print a table and disclosures, and write a report."""
    options.check(methods)
    from isthmus.api.batch import raise_failure
    from isthmus.api.compare import compare_outcomes
    from isthmus.api.table import check_table_file, write_table

    check_table_file(options.table)
    found, outcomes = compare_outcomes(
        methods,
        options.flags,
        options.overrides,
        options.config,
        runs=options.runs,
        out=options.out,
        run=interruptible(options.jobs, silent=True),
    )
    if options.json_:
        print(json.dumps(found))
    elif "report" in found:
        _print_comparison(found)
    if options.table is not None:
        write_table([found.table()], options.table)
    raise_failure(outcomes)


def _print_comparison(document: Mapping[str, Any]) -> None:
    from isthmus.api.compare import Comparison

    table = Comparison(document).table()
    rows, common = _shortened(table)
    empty = () if any(row[table.headings.index(RAN)] for row in rows) else (RAN,)
    headings = [heading for heading in table.headings if heading not in empty]
    shown = [[row[table.headings.index(heading)] for heading in headings] for row in rows]
    left_out = print_table(headings, shown, f"{table.title}{common}", spare=SPARE)
    if left_out:
        print(f"not shown, for want of width: {', '.join(left_out)} (--table FILE has all columns)")
    print("\n".join([*table.notes, ""]))
    sheets = [
        [
            row["method"],
            received(line for line in row["discloses"] if line["to"] == "server"),
            received(line for line in row["discloses"] if "server" not in (line["from"], line["to"])),
        ]
        for row in document["methods"]
        if row["discloses"]
    ]
    if sheets:
        print_table(
            ("method", "what the server receives", "what clients receive of each other"),
            sheets,
            "What each party receives (every message: the report, or isthmus disclose METHOD)",
        )
    for row in document["methods"]:
        if not row["discloses"] and row["seeds"]:
            print(f"{row['method']}: no message left a party")
        for reason in row["reasons"]:
            print(f"{row['method']}: not all seeds: {reason}")
    print(f"report: {document['report']}")


def _shortened(table: Table) -> tuple[list[list[str]], str]:
    """The rows, and for the title what ends the text "ran with" of all of them, such as the number of rounds."""
    at = table.headings.index(RAN)
    told = [row[at].split(", ") for row in table.texts]
    common = 0
    while len({tuple(words[-common - 1 :]) for words in told}) == 1 and common < min(map(len, told)):
        common += 1
    rows = [
        [*row[:at], ", ".join(words[: len(words) - common]), *row[at + 1 :]]
        for row, words in zip(table.texts, told, strict=True)
    ]
    return rows, "".join(f", {word}" for word in told[0][len(told[0]) - common :])
