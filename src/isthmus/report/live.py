"""A run while it goes on, as one small page that a browser on the same machine reads again every two seconds.

The page is made anew from the files of the run folder for every request; nothing of the run is changed, and the run
need not know.
"""

from __future__ import annotations

import html
import json
import math
import tomllib
from pathlib import Path
from typing import Any

from isthmus.errors import DataError
from isthmus.report import words
from isthmus.report.runs import as_number
from isthmus.report.style import CSS

EVERY = 2
"""Seconds between two readings."""
STYLE = """
progress { width: 100%; }
.live { position: relative; height: 13rem; margin: .9rem 0 1.6rem 3.6rem; border-bottom: 1px solid var(--line); }
.live svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.live path { fill: none; vector-effect: non-scaling-stroke; stroke-linecap: round; stroke-linejoin: round; }
.live span { position: absolute; color: var(--muted); font-size: .75rem; line-height: 1rem; }
.live .y { right: calc(100% + .5rem); transform: translateY(-50%); white-space: nowrap; }
.live .x { top: calc(100% + .2rem); }
.whole { white-space: nowrap; }
"""
"""The picture is stretched over the page; its texts are not."""


def live_page(folder: Path) -> str:
    """The page of a run folder, finished or not.

    Raises:
        DataError: The folder holds no run.
    """
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        lacks = "its config.toml is damaged" if isinstance(error, ValueError) else "no config.toml"
        inside = sorted(folder.rglob("config.toml"), key=lambda file: file.stat().st_mtime)
        other = f"the newest in it is {inside[-1].parent}" if inside else "start one with `isthmus run`"
        raise DataError(f"{folder} is not a run folder ({lacks}); {other}") from None
    run = config.get("run", {})
    finished = (folder / "result.json").is_file()
    lines = _lines(folder / "metrics.jsonl")
    last = lines[-1] if lines else {}
    method, goal = str(run.get("method", "?")), int(as_number(run.get("rounds")) or 0)
    at = int(as_number(last.get("round")) or 0)
    status = "finished" if finished else f"round {at} of {goal}" if lines else "setting up"
    sent = sum(value for value in (last.get("bytes") or {}).values() if as_number(value) is not None)
    facts = {
        "status": status,
        "validation": _percent(last.get("val")),
        "test": _percent(last.get("test")),
        "sent": words.size(sent if lines else None),
        "time": words.seconds(as_number(last.get("seconds"))),
    }
    told = (
        f"{run.get('clients')} clients ({run.get('partition')}), split {run.get('split')}, preset {run.get('preset')}, "
        f"seed {run.get('seed')}, score {words.metric(str(run.get('metric')))}"
    )
    tiles = "".join(f"<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd></div>" for name, value in facts.items())
    refresh = "" if finished else f'<meta http-equiv="refresh" content="{EVERY}">'
    done = f"isthmus report {folder}" if finished else ""
    after = f"<p class='fine'>The run is finished: <code>{esc(done)}</code> writes its report.</p>" if done else ""
    share = 1.0 if finished else at / goal if goal else 0.0
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">{refresh}'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{esc(method)}: {esc(status)}</title><style>{CSS}{STYLE}</style></head>"
        "<body><header>"
        f'<p class="eyebrow">Isthmus · {"finished run" if finished else "run in progress"}</p>'
        f"<h1>{esc(method)} on {esc(words.dataset(str(run.get('dataset'))))}</h1>"
        f'<p class="lede">{esc(told)}</p></header><main>'
        f'<progress value="{share:.4f}" max="1" aria-label="rounds done"></progress>'
        f'<dl class="tiles" aria-live="polite">{tiles}</dl>'
        '<h2 class="unseen">Curves</h2>'
        f"<h3>Scores by round</h3>{_curves(lines, ('val', 'test'), percent=True)}"
        f"<h3>Losses by round</h3>{_curves(lines, ('train_loss', 'val_loss'), percent=False)}"
        f"{after}</main></body></html>"
    )


def esc(text: object) -> str:
    return html.escape(str(text), quote=True)


def _lines(file: Path) -> list[dict[str, Any]]:
    """The evaluated rounds so far; a line that is being written is left out."""
    found = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and as_number(record.get("round")) is not None:
                found.append(record)
    except (OSError, ValueError):
        return []
    return found


def _percent(value: object) -> str:
    number = as_number(value)
    return words.ABSENT if number is None else f"{words.percent(number)} %"


def _curves(lines: list[dict[str, Any]], names: tuple[str, ...], *, percent: bool) -> str:
    """Lines against rounds as an SVG picture, with their last values in words."""
    points = {
        name: [(float(line["round"]), value) for line in lines if (value := as_number(line.get(name))) is not None]
        for name in names
    }
    every = [value for each in points.values() for _, value in each]
    if not every:
        return '<p class="what">Nothing is evaluated yet.</p>'
    grid = _ticks(min(0.0, *every), max(every))
    low, high = grid[0], grid[-1]
    first, last = (end(x for each in points.values() for x, _ in each) for end in (min, max))
    paths = [f'<path stroke="var(--grid)" d="M0,{_down(value, low, high)}H100"/>' for value in grid]
    said = []
    for number, (name, each) in enumerate(points.items()):
        if not each:
            continue
        xy = [f"{100 * (x - first) / ((last - first) or 1.0):.2f},{_down(y, low, high)}" for x, y in each]
        paths.append(f'<path class="curve" stroke="var(--s{number})" stroke-width="2" d="M{"L".join(xy)}"/>')
        paths.append(f'<path stroke="var(--s{number})" stroke-width="9" d="M{xy[-1]}h0"/>')
        value = each[-1][1]
        key = f'<span class="key" style="color:var(--s{number})"></span>'
        text = f"{LONG[name]} {_percent(value) if percent else f'{value:.4f}'}"
        said.append(f'<span class="whole">{key}{text}</span>')
    ticks = ""
    for value in grid:
        text = f"{100 * value:g} %" if percent else f"{value:g}"
        ticks += f'<span class="y" style="top:{_down(value, low, high)}%">{text}</span>'
    ticks += f'<span class="x" style="left:0">round {first:.0f}</span>'
    ticks += f'<span class="x" style="right:0">{last:.0f}</span>' if last > first else ""
    return (
        '<figure><div class="live"><svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{esc(", ".join(LONG[name] for name in names))} by round">{"".join(paths)}</svg>{ticks}</div>'
        f"<figcaption>After round {last:.0f}: {'; '.join(said)}.</figcaption></figure>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Three to five round numbers, evenly spaced, that hold both ends between them."""
    span = (high - low) or 1.0
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(step for step in (0.2 * unit, 0.5 * unit, unit, 2 * unit, 5 * unit) if span / step <= 4.001)
    first, last = math.floor(low / step + 1e-9), max(math.ceil(high / step - 1e-9), math.floor(low / step) + 1)
    return [round(number * step, 12) for number in range(first, last + 1)]


LONG = {"val": "validation", "test": "test", "train_loss": "training loss", "val_loss": "validation loss"}


def _down(value: float, low: float, high: float) -> str:
    """How far below the top, in percent of the picture."""
    return f"{100 * (high - value) / ((high - low) or 1.0):.2f}"
