"""Small charts as SVG: lines or bars over named places, with deviations; nothing is needed to draw or read them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = ("#0067b1", "#d1540a", "#00855f", "#b04f8b", "#d98e00", "#3fa3e0", "#8a7b00", "#6b7480")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 330, 52, 14, 44


@dataclass(frozen=True)
class Series:
    """Values at the places of the axis, None where there is none; ``spreads`` alike."""

    name: str
    values: tuple[float | None, ...]
    spreads: tuple[float | None, ...] = ()


def chart(places: Sequence[str], series: Sequence[Series], *, x: str, y: str, bars: bool = False) -> str:
    """A chart with its legend below."""
    known = [value for each in series for value in each.values if value is not None]
    if not known or not places:
        raise ValueError("a chart needs a value")
    reach = [s for each in series for s in each.spreads if s is not None]
    low, high = min(known) - max(reach, default=0.0), max(known) + max(reach, default=0.0)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    rows = math.ceil(len(series) / 3)
    total = HEIGHT + 18 * rows
    inner, floor = WIDTH - LEFT - 12, HEIGHT - BOTTOM

    def up(value: float) -> float:
        return round(floor - (value - low) / ((high - low) or 1.0) * (floor - TOP), 1)

    step = inner / len(places)

    def along(index: int) -> float:
        return round(LEFT + step * (index + 0.5), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f'<rect width="{WIDTH}" height="{total}" fill="#ffffff"/>',
    ]
    for tick in ticks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{up(tick)}" y2="{up(tick)}" stroke="#e3e7ec"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(tick) + 4}" text-anchor="end" fill="#5b6470">{tick:g}</text>')
    every = max(1, math.ceil(len(places) / 12))
    for index, place in enumerate(places):
        if index % every == 0:
            parts.append(
                f'<text x="{along(index)}" y="{floor + 17}" text-anchor="middle" fill="#5b6470">{_text(place)}</text>'
            )
    parts.append(f'<text x="{LEFT + inner / 2}" y="{floor + 36}" text-anchor="middle" fill="#16191d">{_text(x)}</text>')
    parts.append(
        f'<text x="14" y="{(floor + TOP) / 2}" text-anchor="middle" fill="#16191d" '
        f'transform="rotate(-90 14 {(floor + TOP) / 2})">{_text(y)}</text>'
    )
    for number, each in enumerate(series):
        colour, dash = COLOURS[number % len(COLOURS)], _DASHES[number // len(COLOURS) % len(_DASHES)]
        points = [(along(i), value, i) for i, value in enumerate(each.values) if value is not None]
        if bars:
            wide = step * 0.8 / len(series)
            points = [(x0 - step * 0.4 + wide * (number + 0.5), value, i) for x0, value, i in points]
            parts += [
                f'<rect x="{x0 - wide * 0.45:.1f}" y="{up(value)}" width="{wide * 0.9:.1f}" '
                f'height="{floor - up(value):.1f}" fill="{colour}"/>'
                for x0, value, _ in points
            ]
        else:
            path = " ".join(f"{x0},{up(value)}" for x0, value, _ in points)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            )
            if len(places) <= 25:
                parts += [f'<circle cx="{x0}" cy="{up(v)}" r="3.2" fill="{colour}"/>' for x0, v, _ in points]
        for x0, value, i in points:
            spread = each.spreads[i] if i < len(each.spreads) else None
            if spread:
                parts.append(
                    f'<line x1="{x0:.1f}" x2="{x0:.1f}" y1="{up(value - spread)}" y2="{up(value + spread)}" '
                    f'stroke="{"#16191d" if bars else colour}" stroke-width="1"/>'
                )
        left, down = LEFT + (number % 3) * 222, HEIGHT + 18 * (number // 3) + 4
        parts.append(
            f'<line x1="{left}" x2="{left + 20}" y1="{down}" y2="{down}" stroke="{colour}" stroke-width="3" '
            f'stroke-dasharray="{dash}"/><text x="{left + 26}" y="{down + 4}" fill="#16191d">{_text(each.name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Mark:
    """A point of a scatter chart; ``shade`` in 0..1 is its darkness, None a hollow mark."""

    name: str
    x: float
    y: float
    shade: float | None


def scatter(marks: Sequence[Mark], *, x: str, y: str, shade: str) -> str:
    """Named marks over a logarithmic axis; names of marks that lie on one another stand together."""
    if not marks:
        raise ValueError("a chart needs a value")
    low, high = (edge(mark.y for mark in marks) for edge in (min, max))
    ticks = _ticks(low, high)
    floor, wide = HEIGHT + 60, WIDTH - LEFT - 110
    first, last = (math.log10(edge(mark.x for mark in marks)) for edge in (min, max))
    first, last = math.floor(first), max(math.ceil(last), math.floor(first) + 1)

    def place(mark: Mark) -> tuple[float, float]:
        across = LEFT + 10 + (math.log10(mark.x) - first) / (last - first) * wide
        return across, floor - (mark.y - ticks[0]) / (ticks[-1] - ticks[0]) * (floor - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {floor + 66}" width="{WIDTH}" '
        f'height="{floor + 66}" font-family="sans-serif" font-size="12" role="img">',
        f'<rect width="{WIDTH}" height="{floor + 66}" fill="#ffffff"/>',
    ]
    for tick in ticks:
        up = floor - (tick - ticks[0]) / (ticks[-1] - ticks[0]) * (floor - TOP)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{up:.1f}" y2="{up:.1f}" stroke="#e3e7ec"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up + 4:.1f}" text-anchor="end" fill="#5b6470">{tick:g}</text>')
    for power in range(first, last + 1):
        across = LEFT + 10 + (power - first) / (last - first) * wide
        parts.append(
            f'<text x="{across:.1f}" y="{floor + 18}" text-anchor="middle" fill="#5b6470">{10.0**power:g}</text>'
        )
    parts.append(f'<text x="{LEFT + wide / 2}" y="{floor + 36}" text-anchor="middle" fill="#16191d">{_text(x)}</text>')
    parts.append(f'<text x="{LEFT}" y="{floor + 56}" fill="#5b6470">{_text(f"upwards: {y}; darker: {shade}")}</text>')
    groups: list[list[tuple[Mark, float, float]]] = []
    for mark in sorted(marks, key=lambda each: -each.y):
        across, up = place(mark)
        near = next((group for group in groups if abs(group[0][1] - across) < 40 and abs(group[0][2] - up) < 14), None)
        (near.append if near is not None else lambda item: groups.append([item]))((mark, across, up))
    for group in groups:
        for mark, across, up in group:
            dark = "none" if mark.shade is None else f"rgb({', '.join(str(round(c)) for c in _blue(mark.shade))})"
            parts.append(
                f'<circle cx="{across:.1f}" cy="{up:.1f}" r="5.5" fill="{dark}" stroke="#16191d">'
                f"<title>{_text(mark.name)}</title></circle>"
            )
        names = [mark.name for mark, _, _ in group]
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        _, across, up = group[0]
        parts.append(f'<text x="{across + 9:.1f}" y="{up - 6:.1f}" font-size="11" fill="#5b6470">{_text(shown)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Map:
    """Values of cells, a row of them for every row of the map; None or what is not above zero stays white."""

    name: str
    rows: Sequence[Sequence[float | None]]


def heat_maps(maps: Sequence[Map], *, every: int, note: str, shades: int = 12) -> str:
    """Square maps beside each other on one logarithmic scale, darker for more; lines after ``every`` cells."""
    known = [value for each in maps for row in each.rows for value in row if value]
    if not known or min(known) < 0.0:
        raise ValueError("a map needs a value, and none below zero")
    low, high = math.log10(min(known)), math.log10(max(known))
    side = (WIDTH - 20 * (len(maps) - 1)) / len(maps)
    total = round(side + 66)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f'<rect width="{WIDTH}" height="{total}" fill="#ffffff"/>',
    ]
    for number, each in enumerate(maps):
        left, cells = number * (side + 20), len(each.rows)
        drawn: dict[int, list[str]] = {}
        for y, row in enumerate(each.rows):
            for x, value in enumerate(row):
                if value:
                    shade = round((math.log10(value) - low) / ((high - low) or 1.0) * (shades - 1))
                    drawn.setdefault(shade, []).append(f"M{x} {y}h1v1h-1z")
        parts.append(f'<text x="{left:.1f}" y="14" fill="#16191d">{_text(each.name)}</text>')
        parts.append(f'<g transform="translate({left:.1f} 22) scale({side / cells:.4f})">')
        for shade, path in sorted(drawn.items()):
            colour = ", ".join(str(round(c)) for c in _blue(shade / max(shades - 1, 1)))
            parts.append(f'<path d="{"".join(path)}" fill="rgb({colour})" shape-rendering="crispEdges"/>')
        lines = "".join(f"M0 {at}h{cells}M{at} 0v{cells}" for at in range(0, cells + 1, every))
        parts.append(f'<path d="{lines}" fill="none" stroke="#d1540a" stroke-width="0.08"/></g>')
    scale = f"lightest {10.0**low:.1e}, darkest {10.0**high:.1e}, logarithmic; white: nothing"
    parts.append(f'<text x="0" y="{side + 40:.1f}" fill="#5b6470">{_text(note)}</text>')
    parts.append(f'<text x="0" y="{side + 57:.1f}" fill="#5b6470">{_text(scale)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _blue(shade: float) -> list[float]:
    light, dark = (241, 245, 249), (8, 66, 127)
    return [a + (b - a) * min(1.0, max(0.0, shade)) for a, b in zip(light, dark, strict=True)]


def _ticks(low: float, high: float) -> list[float]:
    """Four to seven round numbers that span the values."""
    width = max(high - low, 1e-9)
    size = 10.0 ** math.floor(math.log10(width))
    step = next(size * factor for factor in (0.1, 0.2, 0.5, 1.0, 2.0) if width / (size * factor) <= 6)
    first = math.floor(low / step)
    return [round(step * n, 10) for n in range(first, math.ceil(high / step) + 1)]


def _text(text: str) -> str:
    return html.escape(text, quote=True)
