"""Five organisations on loopback, real processes: one is killed, the run goes on without it behind masks, and takes it
back when it has been started again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from nvflare_helpers import add_run, hashes, settings_of, wait_until

from isthmus.deploy.federation_folder import _run_status
from isthmus.deploy.loopback import LoopbackFederation
from isthmus.deploy.process_supervisor import ProcessSupervisor
from isthmus.deploy.processes import descendants
from isthmus.deploy.run_status import committed_rounds
from isthmus.experiments.folder import RunFolder

ROUNDS, RUN, VICTIM = 400, "five", "site-4"
PATIENCE = 900.0
"""Six NVIDIA FLARE processes take their time on a machine that is busy with others."""


@pytest.fixture
def five(tmp_path: Path) -> Iterator[LoopbackFederation]:
    (tmp_path / "runs").mkdir()
    with LoopbackFederation(5, tmp_path / "runs", tmp_path / "state") as made:
        yield made


def test_a_run_goes_on_without_a_killed_site_and_takes_it_back(five: LoopbackFederation) -> None:
    given = {"checkpoint.every": 20, "secure_sum": True, "least_clients": 4, "reset_optimizer": True, "patience": 0}
    path = add_run(five, RUN, settings_of("fedavg", "nvflare", {**given, "eval_every": 10}, rounds=ROUNDS, clients=5))
    supervisor = five.supervisor()
    supervising = threading.Thread(target=supervisor.finish, args=([RUN],))
    supervising.start()
    wait_until(lambda: committed_rounds(path) >= 5, PATIENCE)
    _kill(five.parents.pop(VICTIM))
    missing = wait_until(lambda: _run_status(path, None)["missing"], PATIENCE)
    [(client, (lost, since))] = missing.items()
    assert since <= time.time()
    wait_until(lambda: committed_rounds(path) >= lost + 5, PATIENCE)  # it goes on
    assert len(supervisor.attempts) == 1
    five.start_one(VICTIM)
    supervising.join(timeout=PATIENCE)
    assert not supervising.is_alive()
    found = RunFolder(path).result()
    assert found is not None and found["rounds"] == ROUNDS
    [(first, last)] = found["absent"][client]
    print(f"lost in step {first}, absent until step {last} of {ROUNDS + 1}, {len(supervisor.attempts)} jobs")  # noqa: T201
    assert list(found["absent"]) == [client] and first == lost and lost + 3 < last < ROUNDS
    assert len(supervisor.attempts) == 2
    models = [list(hashes(five.state / name / RUN / "models")) for name in five.names]
    assert sorted(client for each in models for client in each) == [f"client-{k}" for k in range(5)]
    assert models[five.names.index(VICTIM)] == [client]


def _kill(parent: ProcessSupervisor) -> None:
    """All processes of a site at once, without a word to the server."""
    assert parent.pid is not None
    for pid in (parent.pid, *descendants(parent.pid)):
        os.kill(pid, signal.SIGKILL)
    parent.stop()
