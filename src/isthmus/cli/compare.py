"""``isthmus compare``: several methods on one scenario, with the same seeds and partitions for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from isthmus.api.progress import size
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

NAME = "compare"


def command(
    methods: Annotated[
        list[str],
        typer.Argument(help="Methods, with own settings as in local:backbone=mlp; differences are to the first."),
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
    runs: Runs = 3,
    jobs: Jobs = None,
    out: Out = None,
    table: TableFile = None,
    json_: Json = False,
) -> None:
    """Run several methods on one scenario; table, disclosure and report."""
    overrides = dict(parse_override(text) for text in set_ or ())
    check_run(methods, dataset, overrides, config, plugin, preset)
    from isthmus.api.batch import raise_failure
    from isthmus.api.compare import compare_outcomes
    from isthmus.api.table import check_table_file, write_table

    check_table_file(table)
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
    found, outcomes = compare_outcomes(
        methods, flags, overrides, config, runs=runs, out=out, run=interruptible(jobs, silent=True)
    )
    if json_:
        print(json.dumps(found))
    elif "report" in found:
        _print_comparison(found)
    if table is not None:
        write_table([found.table()], table)
    raise_failure(outcomes)


def _print_comparison(document: Mapping[str, Any]) -> None:
    from isthmus.api.compare import Comparison

    table = Comparison(document).table()
    print_table(table.headings, table.texts, table.title)
    print("\n".join([*table.notes, ""]))
    received = [
        [
            row["method"],
            line["from"],
            line["to"],
            line["phase"],
            ", ".join(line["kinds"]),
            line["protection"],
            f"{line['times']:.0f}",
            size(line["bytes"]),
        ]
        for row in document["methods"]
        for line in row["discloses"]
    ]
    if received:
        print_table(
            ("method", "from", "to", "phase", "receives", "protection", "times", "bytes"),
            received,
            "What each party receives, in one run",
        )
    for row in document["methods"]:
        if not row["discloses"] and row["seeds"]:
            print(f"{row['method']}: no message left a party")
        for reason in row["reasons"]:
            print(f"{row['method']}: not all seeds: {reason}")
    print(f"report: {document['report']}")
