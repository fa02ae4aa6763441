"""A federation of three simulated organisations on loopback: real kits, certificates and processes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from nvflare_helpers import add_run, at_round, client_job, local_hashes, server_job, settings_of, site_hashes, wait_until

from isthmus.deploy.loopback import Loopback
from isthmus.deploy.project import SERVER_KIT
from isthmus.methods.registry import all_methods

ROUNDS = 40


def test_all_methods_in_one_job(federation: Loopback, tmp_path: Path) -> None:
    wanted = {}
    for method in all_methods():
        name = f"all-{method.name}"
        wanted[name] = local_hashes(settings_of(method.name, "local"), tmp_path / name)
        add_run(federation, name, settings_of(method.name, "nvflare"))
    supervisor = federation.supervisor()
    supervisor.play(list(wanted))
    assert len(supervisor.attempts) == 1
    assert {name: site_hashes(federation, name) for name in wanted} == wanted


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return local_hashes(settings_of("fedavg", "local", rounds=ROUNDS), tmp_path_factory.mktemp("local") / "run")


@pytest.mark.parametrize("victim", ["client job", "client parent", "server job", "server parent"])
def test_a_kill_at_a_random_round_changes_nothing(federation: Loopback, victim: str, undisturbed: dict[str, str]) -> None:
    run = f"kill-{victim.replace(' ', '-')}"
    add_run(federation, run, settings_of("fedavg", "nvflare", {"checkpoint.every": 1}, rounds=ROUNDS))
    supervisor = federation.supervisor()
    playing = threading.Thread(target=supervisor.play, args=([run],))
    playing.start()
    killed_at = random.randint(3, ROUNDS - 10)
    at_round(federation, run, killed_at)
    site = random.choice(federation.names)
    keeper = federation.keepers[SERVER_KIT if "server" in victim else site]
    jobs = {"client job": lambda: client_job(federation, site), "server job": lambda: server_job(federation, run)}
    pid = jobs[victim]() if victim in jobs else keeper.pid
    assert pid is not None
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(supervisor.attempts) > 1)
    seconds = time.monotonic() - begun
    playing.join(timeout=120.0)
    assert not playing.is_alive()
    print(f"{victim}: killed at round {killed_at}, next job after {seconds:.1f} s, done after {time.monotonic() - begun:.1f} s")  # noqa: T201
    assert len(supervisor.attempts) == 2
    assert site_hashes(federation, run) == undisturbed
