"""``isthmus sweep``: one method over a grid of settings, ranked by validation; test scores are only shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from isthmus.cli.batch import interruptible
from isthmus.cli.console import print_table
from isthmus.cli.options import BatchOptions, takes

NAME = "sweep"


@takes(BatchOptions, runs=1)
def command(
    method: Annotated[str, typer.Argument(help="Method; isthmus methods lists them.")],
    grid: Annotated[
        list[str], typer.Option(help="Values of a setting, as key=a,b,c (lists as [64],[64,64]); may be repeated.")
    ],
    *,
    options: BatchOptions,
) -> None:
    """Run a method over a grid of settings."""
    options.check([method], [text.partition("=")[0] for text in grid])
    from isthmus.api.batch import raise_failure
    from isthmus.api.sweep import parse_grid, sweep_outcomes
    from isthmus.api.table import check_table_file, write_table
    from isthmus.errors import ConfigError

    check_table_file(options.table)
    axes = dict(parse_grid(text) for text in grid)
    if len(axes) < len(grid):
        raise ConfigError("a key is in two --grid options: give all its values in one")
    found, outcomes = sweep_outcomes(
        method,
        axes,
        options.flags,
        options.overrides,
        options.config,
        runs=options.runs,
        out=options.out,
        run=interruptible(options.jobs, silent=True),
    )
    if options.json_:
        print(json.dumps(found))
    elif any(row["seeds"] for row in found["rows"]):
        _print_sweep(found)
    if options.table is not None:
        write_table([found.table()], options.table)
    raise_failure(outcomes)


def _print_sweep(document: Mapping[str, Any]) -> None:
    from isthmus.api.sweep import Sweep, point_text

    table = Sweep(document).table()
    print_table(table.headings, table.texts, table.title)
    for row in document["rows"]:
        for reason in row["reasons"]:
            print(f"{point_text(row['point'])}: not all seeds: {reason}")
    print(f"run folders and sweep.json in {document['out']}; isthmus report {document['out']} writes a page about them")
