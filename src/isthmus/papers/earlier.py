"""Numbers from before runs were recorded: means over seeds whose runs are gone, by settings.

``<paper>-earlier.jsonl`` beside a page has a line per number: the run folder's name without its seed (so that a number
goes once the settings of its row change), the score, mean, deviation and number of seeds. A page shows such a number,
marked, until as many seeds are recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from isthmus.errors import DataError
from isthmus.papers.judge import Earlier

Numbers = Mapping[tuple[str, str], Earlier]
"""(run folder without its seed, score) -> number."""


def read_earlier(path: Path) -> Numbers:
    """Numbers of a paper; none if there is no such file."""
    if not path.exists():
        return {}
    found: dict[tuple[str, str], Earlier] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            run, score = entry.pop("run"), entry.pop("score")
            found[run, score] = Earlier(**entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(
                f"{path} line {number} is not a number of earlier runs: restore the file from git"
            ) from None
    return found


def without_seed(folder: str) -> str:
    """``fedavg-cora-random-k10-0123abcd-s0`` -> the same without ``-s0``."""
    return folder.rpartition("-s")[0]
