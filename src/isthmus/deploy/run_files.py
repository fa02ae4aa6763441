"""Files of a run folder and of a site's state by which other processes see how a run stands.

Imports little: the keeper of a hub or a site reads them and stays small.
"""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.deploy.heartbeat import read_heartbeat
from isthmus.deploy.processes import is_alive

HEARTBEAT, PROGRESS, FAILED, STOPPED, WAITING = ".beat", "progress.json", "failed.json", "stopped", "waiting.json"
"""``stopped`` is the other direction: the coordinator wants this run to stop."""
BACK = "back"
"""So is this: organisations that the run goes on without are connected again."""
AUDIT = "audit.jsonl"
"""A site's audit chain, in its state folder."""


def committed_rounds(folder: Path) -> int:
    """How many rounds a run folder holds. What owners of tables agree on before the first is number 0, and no round."""
    names = [path.stem for path in (folder / "ledger").glob("*.jsonl")]
    return sum(name.isdecimal() and int(name) > 0 for name in names)


def run_state(path: Path) -> str:
    """A run in a word, for a failed one with the reason."""
    beat = read_heartbeat(path / HEARTBEAT)
    if (path / "result.json").exists():
        return "finished"
    if beat is not None and is_alive(beat[0]):
        return "running"
    if (path / STOPPED).exists():
        return "stopped"
    try:
        failure = json.loads((path / FAILED).read_text())
        return "waiting" if failure["again"] else f"failed: {failure['text']}"
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return "waiting"
