"""Ours beside theirs: mean, spread of the paper's kind, difference, paired differences, and a verdict.

The yardstick of a verdict is the published spread; where none (or zero) is printed, that of the same number in another
table of the paper, which a note says, else ours. Where the spread is that of
single clients (``client-stds``) and the score their mean, it is divided by the root of their number.

    within 1, within 2   the means differ by at most one, two yardsticks
    above, below         by more
    no spread            there is no yardstick: nothing printed and one seed
    no number            nothing is printed (a figure)
    not judged           seconds and memory of another machine
    not run              no result here; the reason says why

Beside above and below stands what is known of the cause:

    cause shown          runs that change one thing lie within 2 of the published number; they are named
    cause guessed        a finding that names this cell says what it may be, and no run shows it
    not reproduced       neither
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isthmus.metrics.spread import Spread, client_stds, spread
from isthmus.papers.cells import Cell, measured
from isthmus.papers.tables import Table

FACTORS = {"%": 100.0, "s": 1.0, "GB": 1e-3}
"""From ``result.json`` to the unit of a cell: fractions, seconds, megabytes."""

Results = Mapping[int, Mapping[str, Any]]
"""Seed -> result."""


@dataclass(frozen=True)
class Paired:
    """Mean and population standard deviation of the differences to another row, seed by seed (std None with one seed),
    and the differences themselves, by seed in order."""

    row: str
    mean: float
    std: float | None
    seeds: int
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """One cell, ours and theirs. Numbers in the unit of the cell; None where unknown.

    Args:
        values: Our score by seed.
        spread: Of the paper's kind.
        run_spread: Population standard deviation of our score over seeds, whatever the paper's kind.
        yardstick: What a verdict measures with.
        paired: Difference to the table's reference row on the same seeds and partitions.
        gain: Ours of what the paper prints in brackets.
        seconds: Mean time of a run.
        reason: Why there is no number of ours.
    """

    cell: Cell
    values: Mapping[int, float]
    mean: float | None
    spread: float | None
    run_spread: float | None
    difference: float | None
    yardstick: float | None
    verdict: str
    paired: Paired | None
    gain: float | None
    trainable: int | None
    shared: int | None
    seconds: float | None
    reason: str
    cause: str = ""
    shown_by: str = ""
    earlier_seeds: int = 0
    """Seeds of a number from before runs were recorded, which has no values by seed."""

    @property
    def seeds(self) -> int:
        """How many seeds our number is the mean of."""
        return len(self.values) or self.earlier_seeds

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        cell, paper = self.cell, self.cell.published
        return {
            "cell": cell.name,
            "row": cell.row,
            "column": cell.column,
            "parts": list(cell.parts),
            "unit": cell.unit,
            "score": cell.score,
            "run": dict(cell.run),
            "published": {
                "text": paper.text,
                "mean": paper.mean,
                "spread": paper.spread,
                "gain": paper.gain,
                "approximate": paper.approximate,
                "printed": next((note.printed for note in cell.notes if note.printed), None),
            },
            "ours": {
                "mean": self.mean,
                "spread": self.spread,
                "run_spread": self.run_spread,
                "gain": self.gain,
                "seeds": sorted(self.values) or list(range(self.earlier_seeds)),
                "values": [self.values[seed] for seed in sorted(self.values)],
            },
            "difference": self.difference,
            "yardstick": self.yardstick,
            "verdict": self.verdict,
            "cause": self.cause,
            "shown_by": self.shown_by,
            "recorded": not self.earlier_seeds,
            "paired": None if self.paired is None else vars(self.paired),
            "parameters": {"trainable": self.trainable, "shared": self.shared},
            "seconds_per_run": self.seconds,
            "notes": [note.text for note in cell.notes if not note.finding],
            "findings": [note.text for note in cell.notes if note.finding],
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Earlier:
    """A mean over runs of which no record was kept, in the unit of its cell."""

    mean: float
    std: float | None
    seeds: int
    trainable: int | None = None
    shared: int | None = None
    seconds: float | None = None


def compare_table(
    table: Table,
    cells: Sequence[Cell],
    results: Callable[[Cell], Results],
    reason: Callable[[Cell], str] = lambda cell: "",
    *,
    earlier: Callable[[Cell], Earlier | None] = lambda cell: None,
    find: Callable[[str, str], tuple[Table, Cell] | None] = lambda table, name: None,
) -> list[Comparison]:
    """Ours beside theirs for some cells of a table.

    Args:
        results: Our results of a cell, by seed; also asked for the rows that cells refer to.
        reason: Why a cell has none.
        earlier: A number of a cell from before records; it stands until as many seeds are recorded.
        find: A cell of the paper by table and name, with its table: those whose runs show a cause.
    """
    cache: dict[int, Mapping[int, float]] = {}

    def values(cell: Cell) -> Mapping[int, float]:
        if id(cell) not in cache:
            cache[id(cell)] = _values(cell, results(cell))
        return cache[id(cell)]

    def compared(where: Table, cell: Cell) -> Comparison:
        return _comparison(where, cell, results(cell), values, reason(cell), earlier(cell))

    return [_with_cause(compared(table, cell), find, compared) for cell in cells]


def _with_cause(
    row: Comparison,
    find: Callable[[str, str], tuple[Table, Cell] | None],
    compared: Callable[[Table, Cell], Comparison],
) -> Comparison:
    """What is known of why a cell is off. A shown cause needs runs of its own, or a score of its own, within 2 of the
    same number; where they are not, it is no cause. A guess is one that says so and names the cell.
    """
    if row.verdict not in ("above", "below"):
        return row
    for note in row.cell.notes:
        if note.cause == "shown" and (other := find(*note.closing(row.cell))) is not None:
            closed = compared(*other)
            same = other[1].published.mean == row.cell.published.mean
            changed = (other[1].run, other[1].score) != (row.cell.run, row.cell.score)
            if same and changed and closed.verdict in ("within 1", "within 2"):
                return replace(row, cause="cause shown", shown_by=" / ".join(note.closing(row.cell)))
    guessed = any(note.cause == "guessed" for note in row.cell.notes)
    return replace(row, cause="cause guessed" if guessed else "not reproduced")


def _comparison(
    table: Table,
    cell: Cell,
    results: Results,
    values: Callable[[Cell], Mapping[int, float]],
    reason: str,
    past: Earlier | None,
) -> Comparison:
    own = values(cell)
    if past is not None and past.seeds > len(own):
        return _from_before(table, cell, past)
    summary = spread(list(own.values()))
    if summary is None and results and not reason:
        reason = f"the runs did not measure {cell.score}"
    ours = _spread_of_kind(table.spread, cell, results, summary)
    theirs = cell.published
    difference = summary.mean - theirs.mean if summary is not None and theirs.mean is not None else None
    yardstick = theirs.spread or cell.spread_elsewhere or ours or None
    if yardstick and table.spread == "client-stds" and cell.unit == "%":
        # The printed ± is that of one client; a mean over clients that vary by themselves varies by the root of their
        # number less.
        yardstick /= math.sqrt(_num_clients(results))
    some = next(iter(results.values()), {}) if own else {}
    seconds = [sum(result["seconds"].values()) for result in results.values() if "seconds" in result] if own else []
    return Comparison(
        cell=cell,
        values=own,
        mean=summary.mean if summary else None,
        spread=ours,
        run_spread=summary.std if summary else None,
        difference=difference,
        yardstick=yardstick,
        verdict=_verdict(cell, summary, difference, yardstick),
        paired=_paired(table, cell, values),
        gain=_gain(table, cell, values),
        trainable=some.get("parameters", {}).get("trainable"),
        shared=some.get("parameters", {}).get("shared"),
        seconds=statistics.fmean(seconds) if seconds else None,
        reason=reason,
    )


def _from_before(table: Table, cell: Cell, past: Earlier) -> Comparison:
    """A number whose runs were not recorded: no values by seed, so neither pairs nor gains."""
    theirs = cell.published
    difference = None if theirs.mean is None else past.mean - theirs.mean
    yardstick = theirs.spread or cell.spread_elsewhere or past.std or None
    return Comparison(
        cell=cell,
        values={},
        mean=past.mean,
        spread=past.std,
        run_spread=past.std,
        difference=difference,
        yardstick=yardstick,
        verdict=_verdict(cell, Spread(past.mean, past.std, past.seeds), difference, yardstick),
        paired=None,
        gain=None,
        trainable=past.trainable,
        shared=past.shared,
        seconds=past.seconds,
        reason="",
        earlier_seeds=past.seeds,
    )


def _values(cell: Cell, results: Results) -> dict[int, float]:
    """Our score by seed, in the unit of the cell; empty unless every seed has one, since a mean over the lucky seeds
    would flatter.
    """
    found = {seed: measured(result, cell.score) for seed, result in sorted(results.items())}
    numbers = {seed: value * FACTORS[cell.unit] for seed, value in found.items() if isinstance(value, int | float)}
    return numbers if len(numbers) == len(found) else {}


def _spread_of_kind(kind: str, cell: Cell, results: Results, summary: Spread | None) -> float | None:
    if summary is None:
        return None
    if kind != "client-stds" or cell.unit != "%":
        return summary.std
    key = "test_score_last" if cell.score.endswith("_last") else "test_score"
    found = client_stds([results[seed].get("per_client") for seed in sorted(results)], key)
    return None if found is None else found * FACTORS[cell.unit]


def _num_clients(results: Results) -> int:
    return max((1, *(len(result.get("per_client") or ()) for result in results.values())))


def _verdict(cell: Cell, summary: Spread | None, difference: float | None, yardstick: float | None) -> str:
    if summary is None:
        return "not run"
    if cell.unit != "%":
        return "not judged"
    if difference is None:
        return "no number"
    if yardstick is None:
        return "no spread"
    distance = abs(difference) / yardstick
    if distance <= 2 + 1e-9:
        return "within 1" if distance <= 1 + 1e-9 else "within 2"
    return "above" if difference > 0 else "below"


def _partner(table: Table, cell: Cell, row: str | None) -> Cell | None:
    """The cell of another row beside this one: same column, same part or one that spans it."""
    if row is None or row == cell.row:
        return None
    for other in table.cells:
        beside = other.parts == cell.parts or (len(other.parts) > 1 and set(cell.parts) <= set(other.parts))
        if other.row == row and other.column == cell.column and beside:
            return other
    return None


def _paired(table: Table, cell: Cell, values: Callable[[Cell], Mapping[int, float]]) -> Paired | None:
    other = _partner(table, cell, table.reference)
    if other is None or other.score != cell.score or cell.unit != "%":
        return None
    mine, theirs = values(cell), values(other)
    differences = [mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())]
    summary = spread(differences)
    return None if summary is None else Paired(other.row, summary.mean, summary.std, summary.runs, tuple(differences))


def _gain(table: Table, cell: Cell, values: Callable[[Cell], Mapping[int, float]]) -> float | None:
    """The bracketed number, ours."""
    if table.gain is None or cell.column in table.gain.without:
        return None

    names = [cell.row, table.gain.low]
    if table.gain.high:
        names.append(next((row for ending, row in table.gain.high.items() if cell.row.endswith(ending)), ""))
    cells = [cell if name == cell.row else _partner(table, cell, name) for name in names]
    found = [values(each) if each is not None else {} for each in cells]
    seeds = set.intersection(*(set(each) for each in found))  # differences of means are taken over the same seeds
    if not seeds:
        return None
    own, low, *high = (statistics.fmean(each[seed] for seed in seeds) for each in found)
    if not high:
        return own - low
    return None if high[0] == low else 100 * (own - low) / (high[0] - low)
