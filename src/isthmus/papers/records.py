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
_OF_A_CLIENT = ("client", "test_score", "test_score_last")

Records = dict[str, Mapping[str, Any]]
"""Name of a run folder (settings and seed, see `folder_of`) -> its record: a result with less in it."""


def record_of(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """What a page needs of a result. Long lists and the folder's place on somebody's machine stay behind; short ones,
    such as clusters, are kept."""
    kept: dict[str, Any] = {
        key: value for key, value in result.items() if value is None or isinstance(value, str | int | float)
    }
    for key in _WHOLE:
        if key in result:
            kept[key] = _without_long_lists(result[key])
    if result.get("per_client"):
        kept["per_client"] = [{key: row[key] for key in _OF_A_CLIENT if key in row} for row in result["per_client"]]
    return kept | {"run_dir": name}


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
