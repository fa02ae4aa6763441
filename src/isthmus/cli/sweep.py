"""``isthmus sweep``: one method over a grid of settings, ranked by validation; test scores are only shown."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.batch import Jobs, Out, Runs, raise_failure, run_jobs
from isthmus.cli.compare import SCENARIO, percent_spread, split_commas, summary
from isthmus.cli.console import print_table
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

if TYPE_CHECKING:
    from isthmus.experiments.batch import Outcome

NAME = "sweep"
MAX_POINTS = 10_000


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
    json_: Json = False,
) -> None:
    """Run a method over a grid of settings."""
    from isthmus.errors import ConfigError
    from isthmus.experiments.batch import Job
    from isthmus.experiments.config import resolve
    from isthmus.experiments.config_values import parse_override
    from isthmus.methods.own_parts import find_method
    from isthmus.papers import folder_of

    axes = dict(parse_grid(text) for text in grid)
    if len(axes) < len(grid):
        raise ConfigError("a key is in two --grid options: give all its values in one")
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(points) * runs > MAX_POINTS:
        raise ConfigError(f"this grid needs {len(points) * runs} runs, more than {MAX_POINTS}: sweep fewer values")
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
    for key in axes:
        if flags.get(key) is not None:
            raise ConfigError(f"{key} is both swept and given as --{key}: choose one")
    overrides = dict(parse_override(text) for text in set_ or ())
    method = find_method(method)[0]
    target = out if out is not None else Path("runs/sweep") / method
    jobs_of = []
    for point in points:
        settings = [resolve(method, {**flags, "seed": seed}, {**overrides, **point}, config) for seed in range(runs)]
        jobs_of.append([Job(each, folder_of(each, target)) for each in settings])
    names = {
        job.folder: f"{_point(point)}, seed {seed}"
        for point, each in zip(points, jobs_of, strict=True)
        for seed, job in enumerate(each)
    }
    outcomes = run_jobs([each[seed] for seed in range(runs) for each in jobs_of], names, jobs, silent=True)
    rows = sweep_rows(points, [[outcomes[job.folder] for job in each] for each in jobs_of])
    document = {
        "method": method,
        "grid": axes,
        "runs": runs,
        "out": str(target),
        "ranked_by": ranked_by(axes),
        "rows": rows,
    }
    if any(row["seeds"] for row in rows):
        (target / "sweep.json").write_text(json.dumps(document, indent=1) + "\n")
    if json_:
        print(json.dumps(document))
    elif any(row["seeds"] for row in rows):
        _print_sweep(document)
    raise_failure(outcomes)


def parse_grid(text: str) -> tuple[str, list[Any]]:
    """``key=a,b,c``; commas inside brackets belong to a value."""
    from isthmus.errors import ConfigError
    from isthmus.experiments.config_values import parse_override

    key, equals, rest = text.partition("=")
    key = key.strip()
    values = split_commas(rest)
    if not equals or not key or not all(values):
        raise ConfigError(f"--grid takes key=a,b,c, got {text!r}")
    if key in ("seed", "method"):
        raise ConfigError(f"{key} cannot be swept: use {'--runs' if key == 'seed' else 'isthmus compare'}")
    if len(set(values)) < len(values):
        raise ConfigError(f"--grid {key} has a value twice")
    return key, [parse_override(f"{key}={value}")[1] for value in values]


def ranked_by(axes: Mapping[str, Any]) -> str | None:
    """Validation scores rank settings of one scenario; over several scenarios there is no ranking."""
    return None if any(key in SCENARIO for key in axes) else "val"


def sweep_rows(points: Sequence[Mapping[str, Any]], outcomes: Sequence[Sequence[Outcome]]) -> list[dict[str, Any]]:
    """One row per point of the grid, the best on validation first; where scenarios differ, in the order of the grid."""
    from isthmus.metrics.spread import spread

    rows: list[dict[str, Any]] = []
    for point, each in zip(points, outcomes, strict=True):
        results = [outcome.result for outcome in each if outcome.result is not None]
        summaries = {key: summary(spread([result[key] for result in results])) for key in ("val", "test", "score")}
        rows.append(
            {
                "point": dict(point),
                "seeds": [result["seed"] for result in results],
                **summaries,
                "selected_round": [result["selected_round"] for result in results],
                "seconds": sum(sum(result["seconds"].values()) for result in results),
                "folders": [str(outcome.job.folder) for outcome in each],
                "reasons": sorted({outcome.reason for outcome in each if outcome.result is None}),
            }
        )
    if points and ranked_by(points[0]) is not None:
        rows.sort(key=lambda row: -row["val"]["mean"] if row["val"] is not None else 1.0)
    return rows


def _print_sweep(document: Mapping[str, Any]) -> None:
    keys = list(document["grid"])
    lines = [
        [
            *(str(row["point"][key]) for key in keys),
            percent_spread(row["val"]),
            percent_spread(row["test"]),
            percent_spread(row["score"]),
            str(len(row["seeds"])),
            f"{row['seconds']:.1f}",
        ]
        for row in document["rows"]
    ]
    how = (
        "best validation first"
        if document["ranked_by"]
        else "in the order of the grid: scores of different scenarios cannot be compared"
    )
    print_table(
        (*keys, "val", "test (not used)", "score (not used)", "seeds", "s"), lines, f"{document['method']}: {how}"
    )
    for row in document["rows"]:
        for reason in row["reasons"]:
            print(f"{_point(row['point'])}: not all seeds: {reason}")
    print(f"run folders and sweep.json in {document['out']}")


def _point(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in point.items())
