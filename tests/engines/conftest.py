"""One federation for all tests of the engine nvflare: starting it costs more than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

SUPER = "super@loopback.isthmus"
ABSENT = "absent"
"""An organisation with a kit that is never started."""


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from isthmus.deploy.heartbeat import is_alive
    from isthmus.deploy.loopback import Loopback
    from isthmus.deploy.processes import descendants

    folder = tmp_path_factory.mktemp("federation")
    (folder / "runs").mkdir()
    extra = [
        {"name": SUPER, "type": "admin", "org": "loopback", "role": "super"},
        {"name": ABSENT, "type": "client", "org": ABSENT},
    ]
    with Loopback(3, folder / "runs", folder / "state", extra) as made:
        yield made
        pids = [
            pid
            for keeper in made.keepers.values()
            if keeper.pid is not None
            for pid in (keeper.pid, *descendants(keeper.pid))
        ]
    assert not any(is_alive(pid) for pid in pids)
