"""``isthmus demo``: Local, FedAvg, FedSGD and Central on Cora, then a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from isthmus.api.progress import ProgressDisplay
from isthmus.cli.console import print_table

NAME = "demo"
METHODS = ("local", "fedavg", "fedsgd", "central")
GENERATED = "csbm:nodes=2700,classes=7,features=400,homophily=0.8,degree=4"


def command(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="Seeds per method.", min=1)] = 3,
) -> None:
    """Compare four methods on Cora split between 10 clients, and write a report."""
    from isthmus.data.scenario import build_scenario
    from isthmus.errors import DataError
    from isthmus.experiments.config import resolve
    from isthmus.experiments.run import start
    from isthmus.report import result_table, table_cells, write_report

    dataset = "cora"
    try:
        build_scenario(dataset=dataset)
    except DataError as error:
        print(f"Cora is not available here ({error})\nrunning on a generated graph instead", file=sys.stderr)
        dataset = GENERATED
    target = _unused(out)
    folders = []
    for method in METHODS:
        for seed in range(seeds):
            flags = {"dataset": dataset, "clients": 10, "partition": "random", "split": "10/10/80", "seed": seed}
            settings = resolve(method, flags)
            folders.append(target / f"{method}-s{seed}")
            display = ProgressDisplay(f"{method:8s} seed {seed}", lines=2)
            try:
                start(settings, folders[-1], [display])
            finally:
                display.stop()
    print_table(*table_cells(result_table(folders)))
    print(f"\nreport: {write_report(folders, target / 'report.html').resolve()}")


def _unused(out: Path) -> Path:
    """``out``, numbered where it exists."""
    number, path = 1, out
    while path.exists():
        number += 1
        path = out.with_name(f"{out.name}-{number}")
    return path
