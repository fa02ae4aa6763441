"""Records of finished runs: what a results page needs of each, one line per run in ``<paper>.jsonl`` beside the page.

Run folders are large and live where they were made. A record is about a kilobyte, is committed with the page, and
stands for a folder
that is gone: tables grow over many sessions and machines, and a page can always be written again. A run folder wins
over a record of the same run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import DataError

_WHOLE = ("facts", "parameters", "seconds", "versions")
SHORT = 400
"""Characters a list of a result may have to be kept."""
_OF_A_CLIENT = ("client", "test_score", "test_score_last", "test_minority")

Records = dict[str, Mapping[str, Any]]
"""Name of a run folder (settings and seed, see `folder_of`) -> its record: a result with less in it."""


def record_of(name: str, result: Mapping[str, Any], curve: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a page needs of a result. Long lists and the folder's place on somebody's machine stay behind; short ones,
    such as clusters, are kept, and so is a small learning curve (`curve_of`)."""
    kept: dict[str, Any] = {
        key: value for key, value in result.items() if value is None or isinstance(value, str | int | float)
    }
    for key in _WHOLE:
        if key in result:
            kept[key] = _without_long_lists(result[key])
    if result.get("per_client"):
        kept["per_client"] = [
            {key: row[key] for key in _OF_A_CLIENT if row.get(key) is not None} for row in result["per_client"]
        ]
    known = curve or result.get("curve")
    return kept | ({"curve": known} if isinstance(known, Mapping) else {}) | {"run_dir": name}


POINTS = 20
"""Points of a kept learning curve."""
FEW_CLIENTS = 5
"""So many clients at most have curves of their own."""


def curve_of(folder: Path) -> dict[str, Any] | None:
    """A learning curve small enough to keep: validation and test score at about `POINTS` evaluated rounds, and each
    client's test score where there are few. None without a ``metrics.jsonl``."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    lines = [line for line in lines if line.get("test") is not None]
    if not lines:
        return None
    every = -(-len(lines) // POINTS)
    kept = lines[::every] + ([lines[-1]] if (len(lines) - 1) % every else [])
    curve: dict[str, Any] = {
        "round": [line["round"] for line in kept],
        **{key: [_rounded(line.get(key)) for line in kept] for key in ("val", "test")},
    }
    clients = kept[-1].get("per_client") or {}
    if 1 < len(clients) <= FEW_CLIENTS:
        curve["clients"] = {
            name: [_share(line["per_client"].get(name, {}).get("test")) for line in kept] for name in clients
        }
    return curve


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _share(counts: Any) -> float | None:
    return round(counts[0] / counts[1], 4) if counts and counts[1] else None


def _without_long_lists(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_long_lists(each) if isinstance(each, Mapping) else each
        for key, each in value.items()
        if not isinstance(each, list) or len(json.dumps(each)) <= SHORT
    }


def read_records(path: Path) -> Records:
    """Records of a paper; none if there is no such file."""
    found: Records = {}
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return found
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            found[record["run_dir"]] = record
            int(record["seed"])
        except (ValueError, TypeError, KeyError):
            raise DataError(
                f"{path} line {number} is not a record of a run: remove the line, or restore the file from git"
            ) from None
    return found


def write_records(path: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
    """One line per run, by name, so that a new run is one new line in a diff."""
    path.write_text("".join(json.dumps(records[name], separators=(",", ":")) + "\n" for name in sorted(records)))
