"""The page of ``isthmus trilemma``: score against bytes, coloured by what an adversary recovers, one picture each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.report import words
from isthmus.report.figures import Figure, base_layout, label
from isthmus.report.page import page_text, write_page
from isthmus.report.parts import esc


@dataclass(frozen=True)
class Point:
    """A method: score in 0..1 with its spread, bytes of a run, and by adversary the share recovered with a sentence."""

    method: str
    ran: str
    score: float
    spread: float | None
    sent: int
    recovered: Mapping[str, tuple[float, str]]
    failed: str = ""
    untried: Mapping[str, str] = field(default_factory=dict)
    """By adversary the attacks that its messages allow and that no program here measures."""


def tradeoff_figure(points: Sequence[Point], adversary: str, metric: str = "accuracy") -> Figure:
    """Score against bytes; the stronger a mark's colour, the more this adversary recovers. Diamonds were not
    attacked.
    """
    shares = [point.recovered.get(adversary) for point in points]
    hover = [
        f"<b>{label(point.method)}</b> ({label(point.ran, 80)})<br>{100 * point.score:.2f} %"
        f"{'' if point.spread is None else f' ± {100 * point.spread:.2f}'}, {words.size(point.sent)}<br>"
        + label(f"{100 * share[0]:.1f} %: {share[1]}" if share else _unattacked(point, adversary), 160)
        for point, share in zip(points, shares, strict=True)
    ]
    sent = [math.log10(point.sent) for point in points if point.sent]
    powers = list(range(math.floor(min(sent)), math.ceil(max(sent)) + 1)) if sent else [0, 1]
    nothing = powers[0] - 1  # where a method that sends nothing stands
    places = [(math.log10(point.sent) if point.sent else nothing, 100 * point.score) for point in points]
    marks = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [x],
            "y": [y],
            "hovertext": [text],
            "hoverinfo": "text",
            "marker": {
                "size": 13,
                "color": f"@heat2/{0.06 + 0.94 * (share[0] if share else 0.0):.2f}",
                "line": {"color": "@ink", "width": 1},
                "symbol": "diamond" if point.failed or (not share and point.untried.get(adversary)) else "circle",
            },
        }
        for point, share, text, (x, y) in zip(points, shares, hover, places, strict=True)
    ]
    if any(not point.sent for point in points):
        powers.insert(0, nothing)
    axes = base_layout(
        460,
        x={
            "title": {"text": "bytes of a whole run (logarithmic)"},
            "tickvals": powers,
            "ticktext": ["0" if power == nothing else words.size(10.0**power) for power in powers],
            "range": [powers[0] - 0.1, powers[-1] + 0.6],
        },
        y={"title": {"text": f"test {words.metric(metric)}, %"}},
        zoom=True,
    )
    axes["annotations"] = [
        {"x": x, "y": y, "text": f"\u00a0\u00a0{label(point.method, 32)}"}
        for point, (x, y) in zip(points, places, strict=True)
    ]
    return {"data": marks, "layout": axes}


def write_tradeoff(
    points: Sequence[Point],
    adversaries: Sequence[str],
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    out: Path,
    metric: str = "accuracy",
) -> Path:
    """One offline page: a picture per adversary, and the table."""
    figures: dict[str, Figure] = {}
    built = [
        '<header><p class="eyebrow">Isthmus · federated graph learning</p>',
        f'<h1>Score, bytes, and what attacks recover</h1><p class="lede">{esc(title)}</p></header><main>',
        '<h2 class="unseen">Methods compared</h2>',
    ]
    for index, adversary in enumerate(adversaries):
        figures[f"f{index}"] = tradeoff_figure(points, adversary, metric)
        built.append(
            f"<h3>Seen by the {esc(adversary)}</h3><figure>"
            f'<div class="plot" id="f{index}" data-section="{index}" role="img" '
            f'aria-label="score against bytes of each method" style="min-height:460px"></div>'
            f"<figcaption>{esc(_caption(adversary))}</figcaption></figure>"
        )
    head = "".join(f'<th scope="col">{esc(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{esc(row[0])}</th>' + "".join(f"<td>{esc(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    built.append(
        f'<h3>Table</h3><div class="scroll wide" tabindex="0" role="region" aria-label="table">'
        f'<table class="roomy" aria-label="all methods"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
    built += [f'<p class="what">{esc(note)}</p>' for note in notes]
    built.append("</main>")
    write_page(out, page_text(title, "".join(built), figures))
    return out


def _unattacked(point: Point, adversary: str) -> str:
    untried = point.untried.get(adversary)
    return point.failed or (f"not tried: {untried}" if untried else "no attack applies")


def _caption(adversary: str) -> str:
    return (
        "Every mark is a method: the higher, the better its score; the further left, the fewer bytes; the stronger its "
        f"colour, the more the {adversary} recovers (empty: nothing, full: everything). The numbers of this figure "
        "name the attack that recovers most. Diamonds were not attacked: no program here tries what their messages "
        "allow, or all data are in one place."
    )
