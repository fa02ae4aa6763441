"""Figures of the papers, drawn from our results, with the paper's claim and whether ours shows it.

A table's ``plot`` in its TOML file, one or a list, says how: ``x`` is ``columns`` or ``rows`` (the other, with the
parts, are the series), ``kind`` is ``lines``, ``bars``, ``curves`` (test score against rounds, first seed), ``clients``
(the same of each client of one cell) or ``client-bars`` (a score of each client, first seed); ``cells`` are words that
pick what is shown; ``claim`` is a sentence, ``holds`` are statements that are checked against what is drawn: ``A > B``
(in every place that both have, on the seeds that both have), ``flat A 3`` (within 3 points), ``falls A``, ``rises A``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from isthmus.papers.cells import Cell
from isthmus.papers.judge import Comparison
from isthmus.papers.svg import Series, chart
from isthmus.papers.tables import Plot, Table, matching

Results = Callable[[Cell], Mapping[int, Mapping[str, Any]]]


class Drawing(NamedTuple):
    """A figure of a table: the picture, and the claim with what our numbers say of it."""

    picture: str
    verdict: str


class _Shown(NamedTuple):
    places: list[str]
    series: list[Series]
    unit: str = "%"
    by_seed: Mapping[tuple[str, str], Mapping[int, float]] = MappingProxyType({})
    """Values by seed, by series and place, where means are shown."""


def draw(table: Table, plot: Plot, rows: Sequence[Comparison], results: Results) -> Drawing | None:
    """A figure of a table as SVG with its verdict; None where nothing of it was run."""
    if plot.cells:
        names = {cell.name for words in plot.cells for cell in matching(table.cells, words)}
        rows = [row for row in rows if row.cell.name in names]
    shown = _READ[plot.kind](table, plot, rows, results)
    if not shown.series:
        return None
    unit = {"%": "accuracy, %", "s": "seconds", "GB": "GB"}[shown.unit]
    axis = plot.axis or ("round" if plot.kind in ("curves", "clients") else "")
    picture = chart(shown.places, shown.series, x=axis, y=unit, bars=plot.kind in ("bars", "client-bars"))
    told = "; ".join(_holds(text, shown) for text in plot.holds) or "drawn, not judged"
    return Drawing(picture, f"Claimed: {plot.claim} Ours: {told}.")


def _means(table: Table, plot: Plot, rows: Sequence[Comparison], results: Results) -> _Shown:
    """Means over seeds with their spread, over the columns or the rows."""
    shown = [row for row in rows if row.mean is not None]
    seen = {_place(plot, row.cell) for row in shown}
    places = [place for place in (table.columns if plot.x == "columns" else table.rows) if place in seen]
    found = {(_name(plot, row.cell), _place(plot, row.cell)): row for row in shown}
    series = []
    for name in dict.fromkeys(_name(plot, row.cell) for row in shown):
        cells = [found.get((name, place)) for place in places]
        series.append(
            Series(
                name,
                tuple(None if row is None else row.mean for row in cells),
                tuple(None if row is None or row.seeds < 2 else row.run_spread for row in cells),
            )
        )
    by_seed = {key: row.values for key, row in found.items()}
    return _Shown(places, series, shown[0].cell.unit if shown else "%", by_seed)


def _place(plot: Plot, cell: Cell) -> str:
    return cell.column if plot.x == "columns" else cell.row


def _name(plot: Plot, cell: Cell) -> str:
    part = cell.parts if len(cell.parts) == 1 else ()
    return " / ".join([cell.row if plot.x == "columns" else cell.column, *part])


def _curves(table: Table, plot: Plot, rows: Sequence[Comparison], results: Results) -> _Shown:
    """Test score against rounds, of the first seed, from what records keep."""
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        kept = results(row.cell)
        curve = kept[min(kept)].get("curve") if kept else None
        if not isinstance(curve, Mapping):
            continue
        lines = (curve.get("clients") or {}) if plot.kind == "clients" else {row.cell.name: curve["test"]}
        found |= {name: dict(zip(curve["round"], values, strict=True)) for name, values in lines.items()}
    steps = sorted({step for curve in found.values() for step in curve})
    return _Shown([str(step) for step in steps], [_percent(name, curve, steps) for name, curve in found.items()])


def _client_bars(table: Table, plot: Plot, rows: Sequence[Comparison], results: Results) -> _Shown:
    """A score of every client, of the first seed: other seeds may deal other parts to a client of the same name."""
    found: dict[str, dict[str, float | None]] = {}
    for row in rows:
        kept = results(row.cell)
        clients = (kept[min(kept)].get("per_client") or ()) if kept else ()
        scores = {client["client"]: client.get(plot.score) for client in clients}
        if any(score is not None for score in scores.values()):
            found[row.cell.row] = scores
    places = list(dict.fromkeys(client for scores in found.values() for client in scores))
    return _Shown(places, [_percent(name, scores, places) for name, scores in found.items()])


def _percent(name: str, found: Mapping[Any, float | None], places: Sequence[Any]) -> Series:
    values = [found.get(place) for place in places]
    return Series(name, tuple(None if value is None else 100 * value for value in values))


_READ: Mapping[str, Callable[[Table, Plot, Sequence[Comparison], Results], _Shown]] = {
    "lines": _means,
    "bars": _means,
    "curves": _curves,
    "clients": _curves,
    "client-bars": _client_bars,
}


def _holds(text: str, shown: _Shown) -> str:
    means = {
        series.name: {p: v for p, v in zip(shown.places, series.values, strict=True) if v is not None}
        for series in shown.series
    }
    if " > " in text:
        above, below = text.split(" > ")
        common = [place for place in means.get(above, {}) if place in means.get(below, {})]
        if not common:
            return f"{above} above {below}: not run"

        def higher(place: str) -> bool:
            mine, theirs = (shown.by_seed.get((name, place), {}) for name in (above, below))
            if seeds := mine.keys() & theirs.keys():  # seeds draw other parts: unequal ones are not compared
                return statistics.fmean(mine[s] for s in seeds) > statistics.fmean(theirs[s] for s in seeds)
            return means[above][place] > means[below][place]

        held = [place for place in common if higher(place)]
        missed = ", ".join(place for place in common if place not in held)
        told = f"{above} lies above {below} at {len(held)} of {len(common)} places"
        return f"{told} (not at {missed})" if held and missed else told
    word, _, rest = text.partition(" ")
    name, _, limit = rest.rpartition(" ") if word == "flat" else (rest, "", "")
    values = list(means.get(name, {}).values())
    if len(values) < 2:
        return f"{name}: not run at two places"
    if word == "flat":
        width = max(values) - min(values)
        return f"{name} {'is flat' if width <= float(limit) else 'is not flat'} (its values span {width:.1f} points)"
    change = values[-1] - values[0]
    held_so = change < 0 if word == "falls" else change > 0
    return f"{name} {word if held_so else f'does not {word[:-1]}'} ({change:+.1f} from the first place to the last)"
