"""The result table: runs grouped by scenario, method and settings, with spread over seeds.

The terminal and the page show the same rows. Spread is the population standard deviation over seeds: the seeds given
are all there are, not a sample from which to guess. With one seed it is unknown, and the page says so.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isthmus.metrics.gain import Gain, Scored, gains
from isthmus.metrics.scores import at_score_round
from isthmus.report import words
from isthmus.report.runs import LeftOut, Run, read_runs


@dataclass(frozen=True)
class Scenario:
    """What must agree before two scores may stand in one table."""

    dataset: str
    partition: str
    clients: int | None
    split: str
    metric: str

    @classmethod
    def of(cls, run: Run) -> Scenario:
        return cls(run.dataset, run.partition_name, run.clients, run.split, run.metric)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, ordered by it. `label` tells it from other groups of the same method."""

    scenario: Scenario
    method: str
    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)


@dataclass(frozen=True)
class ResultRow:
    """One line of the result table. Scores in 0..1; spread None with one seed; bytes and seconds are means over
    seeds.
    """

    scenario: Scenario
    method: str
    label: str
    runs: int
    seeds: tuple[int, ...]
    score: float | None
    score_spread: float | None
    test: float | None
    test_spread: float | None
    client_mean: float | None
    client_mean_spread: float | None
    minority: float | None
    minority_spread: float | None
    trainable: float | None
    shared: float | None
    up_per_round: float | None
    down_per_round: float | None
    peer_per_run: float | None
    device_per_run: float | None
    seconds_per_round: float | None
    epsilon: float | None = None
    backbone: str = ""
    gain: Gain | None = None
    best: bool = False
    reference: bool = False
    """Local or Central: what the others are measured by."""
    rules: tuple[str, ...] = ()
    """How the score of each run is formed."""


@dataclass(frozen=True)
class Column:
    """A column of the table: its heading and how a row fills it."""

    heading: str
    cell: Callable[[ResultRow], str]
    numeric: bool = True
    value: Callable[[ResultRow], float | None] = lambda row: None
    """What the column is sorted by, of a numeric one."""


def result_table(run_dirs: Sequence[Path]) -> list[ResultRow]:
    """The result table of these run folders: one row per scenario, method and settings, in the order given.

    Folders that cannot be used are skipped (the report names them).

    Raises:
        DataError: No folder is usable.
    """
    groups, _ = group_runs(read_runs(run_dirs)[0])
    return result_rows(groups)


def table_cells(rows: Sequence[ResultRow]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells as plain text, for a terminal."""
    shown = columns(rows)
    return [column.heading for column in shown], [[column.cell(row) for column in shown] for row in rows]


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[LeftOut]]:
    """Runs gathered by scenario, method and settings, in order of first appearance.

    A second run of the same seed is left out: counted twice, it would make the spread look smaller than it is.
    """
    gathered: dict[tuple[Scenario, str, str], dict[int, Run]] = {}
    repeated: list[LeftOut] = []
    for run in runs:
        seeds = gathered.setdefault((Scenario.of(run), run.method, _canonical(run.settings)), {})
        if run.seed in seeds:
            repeated.append(LeftOut(run.path, f"same method, settings and seed ({run.seed}) as {seeds[run.seed].path}"))
        else:
            seeds[run.seed] = run
    groups = [
        Group(scenario, method, method, tuple(seeds[seed] for seed in sorted(seeds)))
        for (scenario, method, _), seeds in gathered.items()
    ]
    return _labelled(groups), repeated


def by_scenario(groups: Iterable[Group]) -> list[tuple[Scenario, list[Group]]]:
    """The groups of each scenario, in order of first appearance."""
    sections: dict[Scenario, list[Group]] = {}
    for group in groups:
        sections.setdefault(group.scenario, []).append(group)
    return list(sections.items())


def result_rows(groups: Iterable[Group]) -> list[ResultRow]:
    """One row per group, the best score of each scenario marked (all of them where the table shows the same number).
    References win nothing, and among scores that are formed differently nobody does.
    """
    rows = _with_gains([_row(group) for group in groups])
    top: dict[Scenario, float] = {}
    rivals: dict[Scenario, int] = {}
    rules: dict[Scenario, set[str]] = {}
    for row in rows:
        rules.setdefault(row.scenario, set()).update(row.rules)
        if row.reference:
            continue
        rivals[row.scenario] = rivals.get(row.scenario, 0) + 1
        if row.score is not None:
            top[row.scenario] = max(top.get(row.scenario, row.score), row.score)
    return [
        replace(
            row,
            best=not row.reference
            and rivals[row.scenario] > 1
            and len(rules[row.scenario]) <= 1
            and row.score is not None
            and words.percent(row.score) == words.percent(top[row.scenario]),
        )
        for row in rows
    ]


def _with_gains(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Graph information gain, among the rows of each scenario."""
    gained = list(rows)
    for scenario in dict.fromkeys(row.scenario for row in rows):
        places = [place for place, row in enumerate(rows) if row.scenario == scenario]
        found = gains([Scored(rows[place].method, rows[place].backbone, rows[place].test) for place in places])
        for place, gain in zip(places, found, strict=True):
            gained[place] = replace(rows[place], gain=gain)
    return gained


def columns(rows: Sequence[ResultRow]) -> list[Column]:
    """The columns these rows fill; those about minority classes, privacy, gain, peers and devices only where some row
    has them.
    """
    shown = [
        Column("method", lambda row: row.label, numeric=False),
        Column("score (%)", lambda row: words.score(row.score, row.score_spread), value=lambda row: row.score),
    ]
    if len({row.runs for row in rows}) > 1:  # else the page says it once
        shown.insert(1, Column("runs", lambda row: str(row.runs), value=lambda row: row.runs))
    rules: dict[Scenario, set[str]] = {}
    for row in rows:
        rules.setdefault(row.scenario, set()).update(row.rules)
    alone = [row.scenario for row in rows if row.method == "local"]
    local = {
        row.scenario: row.score
        for row in rows
        if row.method == "local" and len(rules[row.scenario]) < 2 and alone.count(row.scenario) == 1
    }
    if any(row.method != "local" and row.scenario in local for row in rows):
        shown.append(Column("to Local", lambda row: _gain(row, local), value=lambda row: _to_local(row, local)))
    shown += [
        Column("test pooled (%)", lambda row: words.score(row.test, row.test_spread), value=lambda row: row.test),
        Column(
            "client mean (%)",
            lambda row: words.score(row.client_mean, row.client_mean_spread),
            value=lambda row: row.client_mean,
        ),
    ]
    if any(row.minority is not None for row in rows):
        shown.append(
            Column(
                "minority (%)" if all(row.scenario.metric == "accuracy" for row in rows) else "minority accuracy (%)",
                lambda row: words.score(row.minority, row.minority_spread),
                value=lambda row: row.minority,
            )
        )
    if any(row.epsilon is not None for row in rows):  # differential privacy; a row without it has no such bound
        shown.append(
            Column(
                "epsilon",
                lambda row: words.count(None) if row.epsilon is None else f"{row.epsilon:.3g}",
                value=lambda row: row.epsilon,
            )
        )
    if any(row.gain is not None for row in rows):
        shown.append(
            Column(
                "graph gain (%)",
                lambda row: words.ABSENT if row.gain is None else words.percent(row.gain.value),
                value=lambda row: None if row.gain is None else row.gain.value,
            )
        )
    shown += [
        Column("parameters", lambda row: words.count(row.trainable), value=lambda row: row.trainable),
        Column("up / round", lambda row: words.size(row.up_per_round), value=lambda row: row.up_per_round),
        Column("down / round", lambda row: words.size(row.down_per_round), value=lambda row: row.down_per_round),
    ]
    # result.json counts these for the whole run, setup included, so they cannot be given per round.
    if any(row.peer_per_run for row in rows):
        shown.append(
            Column(
                "between clients / run", lambda row: words.size(row.peer_per_run), value=lambda row: row.peer_per_run
            )
        )
    if any(row.device_per_run for row in rows):
        shown.append(
            Column("device / run", lambda row: words.size(row.device_per_run), value=lambda row: row.device_per_run)
        )
    shown.append(
        Column(
            "time / round", lambda row: words.seconds(row.seconds_per_round), value=lambda row: row.seconds_per_round
        )
    )
    return shown


def _to_local(row: ResultRow, local: Mapping[Scenario, float | None]) -> float | None:
    """Score less that of Local, where both are formed alike."""
    base = local.get(row.scenario)
    return None if row.method == "local" or row.score is None or base is None else row.score - base


def _gain(row: ResultRow, local: Mapping[Scenario, float | None]) -> str:
    found = _to_local(row, local)
    return words.ABSENT if found is None else f"{100 * found:+.2f}"


def mean_and_spread(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and population standard deviation; the spread is None below two values.

    Both are None if any value is missing: a mean over the seeds that went well would flatter.
    """
    given = list(values)
    known = [value for value in given if value is not None]
    if not known or len(known) < len(given):
        return None, None
    return statistics.fmean(known), statistics.pstdev(known) if len(known) > 1 else None


def _row(group: Group) -> ResultRow:
    def over_seeds(*keys: str) -> tuple[float | None, float | None]:
        return mean_and_spread(run.number(*keys) for run in group.runs)

    def at_score(key: str) -> tuple[float | None, float | None]:
        """At the round at which the score is read: a row shows one round."""
        return mean_and_spread(run.number(at_score_round(run.result, key)) for run in group.runs)

    def per_round(direction: str) -> float | None:
        return mean_and_spread(_per_round(run, direction) for run in group.runs)[0]

    score, score_spread = over_seeds("score")
    test, test_spread = at_score("test")
    # A pooled run has one owner, and a mean over that one is no client mean.
    pooled = any(run.pooled for run in group.runs)
    client_mean, client_mean_spread = (None, None) if pooled else at_score("test_client_mean")
    minority, minority_spread = at_score("test_minority")
    return ResultRow(
        scenario=group.scenario,
        method=group.method,
        label=group.label,
        runs=len(group.runs),
        seeds=group.seeds,
        score=score,
        score_spread=score_spread,
        test=test,
        test_spread=test_spread,
        client_mean=client_mean,
        client_mean_spread=client_mean_spread,
        minority=minority,
        minority_spread=minority_spread,
        trainable=over_seeds("parameters", "trainable")[0],
        shared=over_seeds("parameters", "shared")[0],
        up_per_round=per_round("up"),
        down_per_round=per_round("down"),
        peer_per_run=over_seeds("bytes", "peer")[0],
        device_per_run=over_seeds("bytes", "device")[0],
        seconds_per_round=over_seeds("seconds_per_round")[0],
        epsilon=over_seeds("privacy", "epsilon")[0],
        backbone=_flat(group.runs[0].settings).get("method.backbone", ""),
        reference=group.runs[0].reference,
        rules=tuple(sorted({rule for run in group.runs if (rule := run.text("score_rule"))})),
    )


def _per_round(run: Run, direction: str) -> float | None:
    """Training bytes of one round; setup and evaluation are not in it."""
    total, rounds = run.number("bytes", direction), run.number("rounds")
    return total / rounds if total is not None and rounds else None


def _canonical(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _labelled(groups: Sequence[Group]) -> list[Group]:
    """Labels that tell groups of one method in one scenario apart by the settings in which they differ."""
    labelled = []
    for group in groups:
        rivals = [other for other in groups if other.scenario == group.scenario and other.method == group.method]
        if len(rivals) == 1:
            labelled.append(group)
            continue
        flat = [_flat(rival.runs[0].settings) for rival in rivals]
        differing = [
            key for key in sorted({key for one in flat for key in one}) if len({one.get(key) for one in flat}) > 1
        ]
        own = _flat(group.runs[0].settings)
        labels = [f"{key.rpartition('.')[2]}={own.get(key, words.ABSENT)}" for key in differing]
        label = f"{group.method} · {', '.join(labels[:3])}" if labels else group.method
        if len(labels) > 3 or not labels:
            label += f" · {group.runs[0].path.name}"
        labelled.append(replace(group, label=label))
    return labelled


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat
