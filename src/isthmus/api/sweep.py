"""One method over a grid of settings, ranked by validation; test scores are only shown."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.api.batch import Runner, raise_failure, runner
from isthmus.api.compare import SCENARIO, split_commas
from isthmus.api.progress import watched
from isthmus.api.several import summary
from isthmus.api.table import Cell, Table, counted, scored
from isthmus.errors import ConfigError
from isthmus.experiments.batch import Job, Outcome
from isthmus.experiments.config import resolve
from isthmus.experiments.config_values import parse_override
from isthmus.experiments.run import by_name
from isthmus.methods.own_parts import find_method
from isthmus.papers import folder_of

MAX_POINTS = 10_000


class Sweep(dict[str, Any]):
    """What a sweep found, the mapping of ``sweep.json``: ``method``, ``grid``, ``ranked_by`` and ``rows``, the best on
    validation first.
    """

    @property
    def best(self) -> dict[str, Any]:
        """The settings that validation prefers."""
        if self["ranked_by"] is None:
            raise ConfigError("these runs are of different scenarios, whose scores cannot be compared: none is best")
        point: dict[str, Any] = self["rows"][0]["point"]
        return point

    def table(self) -> Table:
        """A row per point of the grid."""
        return _table(self)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def sweep(
    method: str,
    grid: Mapping[str, Sequence[Any]],
    *,
    runs: int = 1,
    jobs: int = 1,
    out: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    set: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Sweep:
    """Run a method over a grid of settings; finished runs in the folder are used, begun ones continued.

    Args:
        grid: Values of each setting, ``{"lr": [0.01, 0.1], "hidden": [[16], [64, 64]]}``.
        runs, jobs, out, config, set, quiet, settings: As of `isthmus.compare`; by default under ``runs/sweep``.
    """
    found, outcomes = sweep_outcomes(
        method,
        {key: list(values) for key, values in grid.items()},
        by_name(settings),
        set,
        None if config is None else Path(config),
        runs=runs,
        out=None if out is None else Path(out),
        run=runner(jobs, shown=watched(quiet), silent=True),
    )
    raise_failure(outcomes)
    return found


def sweep_outcomes(
    method: str,
    axes: Mapping[str, list[Any]],
    flags: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    config: Path | None,
    *,
    runs: int,
    out: Path | None,
    run: Runner,
) -> tuple[Sweep, dict[Path, Outcome]]:
    """The sweep, and what became of each run, failures included."""
    if not axes or not all(axes.values()):
        raise ConfigError('a sweep needs values to try, e.g. {"lr": [0.01, 0.1]}')
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(points) * runs > MAX_POINTS:
        raise ConfigError(f"this grid needs {len(points) * runs} runs, more than {MAX_POINTS}: sweep fewer values")
    for key in axes:
        if flags.get(key) is not None:
            raise ConfigError(f"{key} is both swept and given as --{key}: choose one")
    method = find_method(method)[0]
    target = out if out is not None else Path("runs/sweep") / method
    jobs_of = []
    for point in points:
        settings = [
            resolve(method, {**flags, "seed": seed}, {**(overrides or {}), **point}, config) for seed in range(runs)
        ]
        jobs_of.append([Job(each, folder_of(each, target)) for each in settings])
    names = {
        job.folder: f"{point_text(point)}, seed {seed}"
        for point, each in zip(points, jobs_of, strict=True)
        for seed, job in enumerate(each)
    }
    outcomes = run([each[seed] for seed in range(runs) for each in jobs_of], names, {})
    rows = sweep_rows(points, [[outcomes[job.folder] for job in each] for each in jobs_of])
    found = Sweep(
        {
            "method": method,
            "grid": dict(axes),
            "runs": runs,
            "out": str(target),
            "ranked_by": ranked_by(axes),
            "rows": rows,
        }
    )
    if any(row["seeds"] for row in rows):
        (target / "sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    return found, outcomes


def parse_grid(text: str) -> tuple[str, list[Any]]:
    """``key=a,b,c``; commas inside brackets belong to a value."""

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
    rows: list[dict[str, Any]] = []
    for point, each in zip(points, outcomes, strict=True):
        results = [outcome.result for outcome in each if outcome.result is not None]
        summaries = {key: summary([result[key] for result in results]) for key in ("val", "test", "score")}
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


def point_text(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in point.items())


def _table(document: Mapping[str, Any]) -> Table:
    keys = tuple(document["grid"])
    how = (
        "best validation first"
        if document["ranked_by"]
        else "in the order of the grid: scores of different scenarios cannot be compared"
    )
    scores = ("val", "test", "score")
    headings = ("val", "test (not used)", "score (not used)")
    rows = tuple(
        (
            *(Cell(str(row["point"][key])) for key in keys),
            *(scored(row[key]) for key in scores),
            counted(len(row["seeds"])),
            counted(row["seconds"], f"{row['seconds']:.1f}"),
        )
        for row in document["rows"]
    )
    return Table(f"{document['method']}: {how}", (*keys, *headings, "seeds", "s"), rows, spreads=frozenset(headings))
