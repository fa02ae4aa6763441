"""One federation for all tests of the engine nvflare: starting it takes longer than most of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "deploy"))  # banks_page, shared with its tests


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from nvflare_helpers import ABSENT, SUPER

    from isthmus.deploy.loopback import LoopbackFederation
    from isthmus.deploy.processes import descendants, is_alive

    folder = tmp_path_factory.mktemp("federation")
    (folder / "runs").mkdir()
    extra = [
        {"name": SUPER, "type": "admin", "org": "loopback", "role": "super"},
        {"name": ABSENT, "type": "client", "org": ABSENT},
    ]
    with LoopbackFederation(3, folder / "runs", folder / "state", extra) as made:
        yield made
        pids = [
            pid
            for parent in made.parents.values()
            if parent.pid is not None
            for pid in (parent.pid, *descendants(parent.pid))
        ]
    assert not any(is_alive(pid) for pid in pids)
