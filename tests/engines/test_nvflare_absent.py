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

from nvflare_helpers import add_run, client_job, hashes, settings_of, wait_until

from isthmus.deploy.federation_folder import _run_status
from isthmus.deploy.loopback import LoopbackFederation
from isthmus.experiments.folder import RunFolder

ROUNDS, RUN, VICTIM = 400, "five", "site-4"
PATIENCE = 900.0
"""Six NVIDIA FLARE processes take their time on a machine that is busy with others."""


@pytest.fixture
def five(tmp_path: Path) -> Iterator[LoopbackFederation]:
    (tmp_path / "runs").mkdir()
    with LoopbackFederation(5, tmp_path / "runs", tmp_path / "state") as made:
        yield made


@pytest.mark.parametrize("victim", ["job", "site"])
def test_a_run_goes_on_without_a_killed_site_and_takes_it_back(five: LoopbackFederation, victim: str) -> None:
    given = {"checkpoint.every": 20, "secure_sum": True, "least_clients": 4, "reset_optimizer": True, "eval_every": 10}
    path = add_run(five, RUN, settings_of("fedavg", "nvflare", given, rounds=ROUNDS, clients=5))
    supervisor = five.supervisor()
    supervising = threading.Thread(target=supervisor.finish, args=([RUN],))
    supervising.start()
    wait_until(lambda: _run_status(path)["rounds"] >= 10, PATIENCE)
    if victim == "job":
        os.kill(client_job(five, VICTIM), signal.SIGKILL)
    else:
        five.parents.pop(VICTIM).stop()
    missing = wait_until(lambda: _run_status(path)["missing"], PATIENCE)
    [(client, (lost, since))] = missing.items()
    assert since <= time.time()
    wait_until(lambda: _run_status(path)["rounds"] >= lost + 5, PATIENCE)  # it goes on
    assert len(supervisor.attempts) == 1 or victim == "job"
    if victim == "site":
        five.start_one(VICTIM)
    supervising.join(timeout=PATIENCE)
    assert not supervising.is_alive()
    found = RunFolder(path).result()
    assert found is not None and found["rounds"] == ROUNDS
    [(first, last)] = found["absent"][client]
    print(f"{victim}: lost in step {first}, back in step {last}, {len(supervisor.attempts)} jobs")  # noqa: T201
    assert list(found["absent"]) == [client] and first == lost and lost + 3 < last <= ROUNDS
    assert len(supervisor.attempts) == 2
    models = [hashes(five.state / name / RUN / "models") for name in five.names]
    assert sorted(name for each in models for name in each) == [f"client-{k}" for k in range(5)]
    assert list(models[five.names.index(VICTIM)]) == [client]
