"""Figures of the papers, drawn from our results, with the paper's claim and whether ours shows it.

A table's ``plot`` in its TOML file says how: ``x`` is ``columns`` or ``rows`` (the other, with the parts, are the
series), ``kind`` is ``lines``, ``bars``, ``curves`` (test score against rounds, seed 0) or ``clients`` (the same of
each client of one cell); ``claim`` is a sentence, ``holds`` are statements that are checked against our means:
``A > B`` (in every place that both have), ``flat A 3`` (within 3 points), ``falls A``, ``rises A``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.papers.cells import Cell
from isthmus.papers.judge import Comparison
from isthmus.papers.svg import Series, chart
from isthmus.papers.tables import Plot, Table

Results = Callable[[Cell], Mapping[int, Mapping[str, Any]]]


def draw(table: Table, rows: Sequence[Comparison], results: Results) -> str | None:
    """The figure of a table as SVG; None where it has none, or nothing was run."""
    plot = table.plot
    if plot is None:
        return None
    if plot.kind in ("curves", "clients"):
        return _curves(plot, rows, results)
    shown = [row for row in rows if row.mean is not None]
    if not shown:
        return None
    seen = {_place(plot, row.cell) for row in shown}
    places = [place for place in (table.columns if plot.x == "columns" else table.rows) if place in seen]
    names = list(dict.fromkeys(_name(plot, row.cell) for row in shown))
    found = {(_name(plot, row.cell), _place(plot, row.cell)): row for row in shown}
    series = []
    for name in names:
        cells = [found.get((name, place)) for place in places]
        series.append(
            Series(
                name,
                tuple(None if row is None else row.mean for row in cells),
                tuple(None if row is None or row.seeds < 2 else row.run_spread for row in cells),
            )
        )
    unit = {"%": "accuracy, %", "s": "seconds", "GB": "GB"}[shown[0].cell.unit]
    return chart(places, series, x=plot.axis, y=unit, bars=plot.kind == "bars")


def _place(plot: Plot, cell: Cell) -> str:
    return cell.column if plot.x == "columns" else cell.row


def _name(plot: Plot, cell: Cell) -> str:
    part = cell.parts if len(cell.parts) == 1 else ()
    return " / ".join([cell.row if plot.x == "columns" else cell.column, *part])


def _curves(plot: Plot, rows: Sequence[Comparison], results: Results) -> str | None:
    """Test score against rounds, of the first seed, from what records keep."""
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for row in rows:
        if plot.cells and row.cell.name not in plot.cells:
            continue
        kept = results(row.cell)
        curve = kept[min(kept)].get("curve") if kept else None
        if not isinstance(curve, Mapping):
            continue
        if plot.kind == "clients":
            found |= {name: (curve["round"], values) for name, values in (curve.get("clients") or {}).items()}
        else:
            found[row.cell.name] = curve["round"], curve["test"]
    if not found:
        return None
    steps = sorted({step for steps, _ in found.values() for step in steps})
    series = []
    for name, (own, values) in found.items():
        at = dict(zip(own, values, strict=True))
        points = [at.get(step) for step in steps]
        series.append(Series(name, tuple(None if value is None else 100 * value for value in points)))
    return chart([str(step) for step in steps], series, x=plot.axis or "round", y="test accuracy, %")


def verdict(table: Table, rows: Sequence[Comparison]) -> str:
    """What the paper's figure claims, and whether ours shows it."""
    plot = table.plot
    assert plot is not None
    told = [_holds(plot, text, rows) for text in plot.holds]
    return f"Claimed: {plot.claim} Ours: {'; '.join(told) or 'drawn, not judged'}."


def _holds(plot: Plot, text: str, rows: Sequence[Comparison]) -> str:
    means: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.mean is not None:
            means.setdefault(_name(plot, row.cell), {})[_place(plot, row.cell)] = row.mean
    order = {place: i for i, place in enumerate(dict.fromkeys(_place(plot, row.cell) for row in rows))}
    if " > " in text:
        above, below = text.split(" > ")
        common = [place for place in means.get(above, {}) if place in means.get(below, {})]
        if not common:
            return f"{above} above {below}: not run"
        held = [place for place in common if means[above][place] > means[below][place]]
        missed = ", ".join(place for place in common if place not in held)
        told = f"{above} lies above {below} at {len(held)} of {len(common)} places"
        return f"{told} (not at {missed})" if held and missed else told
    word, _, rest = text.partition(" ")
    name, _, limit = rest.rpartition(" ") if word == "flat" else (rest, "", "")
    values = [value for _, value in sorted(means.get(name, {}).items(), key=lambda pair: order[pair[0]])]
    if len(values) < 2:
        return f"{name}: not run at two places"
    if word == "flat":
        width = max(values) - min(values)
        return f"{name} {'is flat' if width <= float(limit) else 'is not flat'} (its values span {width:.1f} points)"
    change = values[-1] - values[0]
    held_so = change < 0 if word == "falls" else change > 0
    return f"{name} {word if held_so else f'does not {word[:-1]}'} ({change:+.1f} from the first place to the last)"
