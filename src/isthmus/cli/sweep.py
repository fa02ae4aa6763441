"""``isthmus sweep``: one method over a grid of settings, ranked by validation; test scores are only shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from isthmus.cli.batch import Jobs, Out, Runs, TableFile, interruptible
from isthmus.cli.console import print_table
from isthmus.cli.known import check_run
from isthmus.cli.run import (
    Clients,
    Config,
    Dataset,
    EngineName,
    Json,
    Metric,
    Partition,
    Plugin,
    Preset,
    Profile,
    Rounds,
    Set,
    Split,
)
from isthmus.experiments.config_values import parse_override

NAME = "sweep"


def command(
    method: Annotated[str, typer.Argument(help="Method; isthmus methods lists them.")],
    grid: Annotated[
        list[str], typer.Option(help="Values of a setting, as key=a,b,c (lists as [64],[64,64]); may be repeated.")
    ],
    dataset: Dataset = None,
    partition: Partition = None,
    clients: Clients = None,
    split: Split = None,
    rounds: Rounds = None,
    preset: Preset = None,
    profile: Profile = None,
    metric: Metric = None,
    engine: EngineName = None,
    config: Config = None,
    set_: Set = None,
    plugin: Plugin = None,
    runs: Runs = 1,
    jobs: Jobs = None,
    out: Out = None,
    table: TableFile = None,
    json_: Json = False,
) -> None:
    """Run a method over a grid of settings."""
    overrides = dict(parse_override(text) for text in set_ or ())
    swept = [text.partition("=")[0] for text in grid]
    check_run([method], dataset, [*overrides, *swept], config, plugin, preset)
    from isthmus.api.batch import raise_failure
    from isthmus.api.sweep import parse_grid, sweep_outcomes
    from isthmus.api.table import check_table_file, write_table
    from isthmus.errors import ConfigError

    check_table_file(table)
    axes = dict(parse_grid(text) for text in grid)
    if len(axes) < len(grid):
        raise ConfigError("a key is in two --grid options: give all its values in one")
    flags = {
        "dataset": dataset,
        "partition": partition,
        "clients": clients,
        "split": split,
        "rounds": rounds,
        "preset": preset,
        "profile": profile,
        "metric": metric,
        "engine": engine,
        "plugins": plugin,
    }
    found, outcomes = sweep_outcomes(
        method, axes, flags, overrides, config, runs=runs, out=out, run=interruptible(jobs, silent=True)
    )
    if json_:
        print(json.dumps(found))
    elif any(row["seeds"] for row in found["rows"]):
        _print_sweep(found)
    if table is not None:
        write_table([found.table()], table)
    raise_failure(outcomes)


def _print_sweep(document: Mapping[str, Any]) -> None:
    from isthmus.api.sweep import Sweep, point_text

    table = Sweep(document).table()
    print_table(table.headings, table.texts, table.title)
    for row in document["rows"]:
        for reason in row["reasons"]:
            print(f"{point_text(row['point'])}: not all seeds: {reason}")
    print(f"run folders and sweep.json in {document['out']}; isthmus report {document['out']} writes a page about them")
