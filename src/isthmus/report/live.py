"""A run while it goes on, as one small page that a browser on the same machine reads again every two seconds.

The page is made anew from the files of the run folder for every request; nothing of the run is changed, and the run
need not know.
"""

from __future__ import annotations

import html
import json
import tomllib
from pathlib import Path
from typing import Any

from isthmus.errors import DataError
from isthmus.report import words
from isthmus.report.runs import as_number
from isthmus.report.style import CSS

EVERY = 2
"""Seconds between two readings."""
WIDTH, HEIGHT = 640, 220


def live_page(folder: Path) -> str:
    """The page of a run folder, finished or not.

    Raises:
        DataError: The folder holds no run.
    """
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError(f"{folder} is not a run folder (no config.toml); isthmus run makes one") from None
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
        f"seed {run.get('seed')}, score {run.get('metric')}"
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
        f"<title>{esc(method)}: {esc(status)}</title><style>{CSS} progress {{ width: 100%; }}</style></head>"
        "<body><header>"
        f'<p class="eyebrow">Isthmus · run in progress</p><h1>{esc(method)} on {esc(run.get("dataset"))}</h1>'
        f'<p class="lede">{esc(told)}</p></header><main>'
        f'<progress value="{share:.4f}" max="1" aria-label="rounds done"></progress>'
        f'<dl class="tiles" aria-live="polite">{tiles}</dl>'
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
    low, high = min(0.0, *every), max(every) or 1.0
    first, last = (end(x for each in points.values() for x, _ in each) for end in (min, max))
    paths, said = [], []
    for number, (name, each) in enumerate(points.items()):
        if not each:
            continue
        xy = [
            (
                8 + (WIDTH - 16) * (x - first) / ((last - first) or 1.0),
                HEIGHT - 8 - (HEIGHT - 16) * (y - low) / ((high - low) or 1.0),
            )
            for x, y in each
        ]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in xy)
        paths.append(f'<polyline fill="none" stroke="var(--s{number})" stroke-width="2" points="{drawn}"/>')
        paths.append(f'<circle cx="{xy[-1][0]:.1f}" cy="{xy[-1][1]:.1f}" r="4" fill="var(--s{number})"/>')
        value = each[-1][1]
        shown = _percent(value) if percent else f"{value:.4f}"
        key = f'<span class="key" style="background:var(--s{number})"></span>'
        said.append(f"{key}{esc(name.replace('_', ' '))} {shown}")
    top, bottom = (_percent(end) if percent else f"{end:.3g}" for end in (high, low))
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" '
        f'aria-label="{esc(", ".join(names))} by round">{"".join(paths)}</svg><figcaption>{"; ".join(said)}. From '
        f"{bottom} to {top}, rounds {first:.0f} to {last:.0f}.</figcaption></figure>"
    )
