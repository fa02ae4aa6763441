"""Shared by the tests of real federations on loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packages import weight_hashes

from isthmus.deploy.heartbeat import read_heartbeat
from isthmus.deploy.loopback import LoopbackFederation, prepare_run
from isthmus.deploy.processes import descendants
from isthmus.deploy.run_files import FAILED, HEARTBEAT
from isthmus.deploy.run_status import committed_rounds
from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.run import start
from isthmus.experiments.variants import first_variant

NODES: dict[str, Any] = {"dataset": "csbm:nodes=90,classes=3,features=8", "clients": 3, "seed": 3}
TIMEOUT = 240.0
SUPER = "super@loopback.isthmus"
ABSENT = "absent"
"""An organisation with a kit that is never started."""


def settings_of(method: str, engine: str, set: Mapping[str, Any] | None = None, **more: Any) -> Settings:
    given = {**NODES, "rounds": 2, "hidden": 8, **more}
    return resolve(
        method,
        {key: value for key, value in given.items() if value is not None},
        {"execution": "each", **(set or {})} | {"engine": engine},
    )


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every client's final weights."""
    return weight_hashes(folder)


def local_hashes(settings: Settings, folder: Path) -> dict[str, str]:
    start(first_variant(settings), folder)  # between organisations nothing is tried
    return hashes(folder / "models")


def site_hashes(federation: LoopbackFederation, run: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in federation.names:
        found |= hashes(federation.state / name / run / "models")
    return dict(sorted(found.items()))


def add_run(federation: LoopbackFederation, run: str, settings: Settings) -> Path:
    return prepare_run(settings, federation.runs / run)[0]


def wait_until(condition: Callable[[], Any], timeout: float = TIMEOUT) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"condition not met after {timeout} s")


def at_round(federation: LoopbackFederation, run: str, step: int) -> None:
    """Wait for a round; a run that was given up is said at once."""

    def reached() -> bool:
        failed = federation.runs / run / FAILED
        assert not failed.exists() or json.loads(failed.read_text())["again"], failed.read_text()
        return committed_rounds(federation.runs / run) >= step

    wait_until(reached)


def server_job(federation: LoopbackFederation, run: str) -> int:
    beat = read_heartbeat(federation.runs / run / HEARTBEAT)
    assert beat is not None
    return beat[0]


def client_job(federation: LoopbackFederation, site: str) -> int:
    """The newest job process of a site."""
    parent = federation.parents[site].pid
    assert parent is not None
    return max(descendants(parent))
