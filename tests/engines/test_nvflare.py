"""A federation of three simulated organisations on loopback: real kits, certificates and processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from nvflare_helpers import (
    NODES,
    TIMEOUT,
    add_run,
    at_round,
    client_job,
    hashes,
    local_hashes,
    server_job,
    settings_of,
    site_hashes,
    wait_until,
)

from isthmus.deploy.loopback import LoopbackFederation, free_port
from isthmus.deploy.processes import descendants, is_alive
from isthmus.deploy.provisioning import SERVER_KIT
from isthmus.deploy.run_status import committed_rounds
from isthmus.experiments.run import resume
from isthmus.methods.registry import all_methods
from isthmus.testing import small_runs

ROUNDS = 40


def test_all_methods_in_one_job(federation: LoopbackFederation, tmp_path: Path) -> None:
    """Every registered method, on each of its tasks, is bit-equal to a run in one process."""
    wanted = {}
    for method in all_methods():
        for task, (settings, scenario) in small_runs(method.name).items():
            name = f"{method.name}-{task}"
            run = replace(settings.run, partition=scenario.partition, split=scenario.split, clients=scenario.clients)
            wanted[name] = local_hashes(replace(settings, run=run), tmp_path / name)
            add_run(federation, name, replace(settings, run=replace(run, engine="nvflare")))
    assert {name.rpartition("-")[0] for name in wanted} == {method.name for method in all_methods()}
    supervisor = federation.supervisor()
    supervisor.finish(list(wanted))
    found = {name: site_hashes(federation, name) for name in wanted}
    for name in wanted:
        first = next(iter(wanted[name].values()))[:12]
        print(  # noqa: T201
            f"{name:20s} {len(wanted[name])} models, local {first}, nvflare "
            f"{'equal' if found[name] == wanted[name] else 'DIFFERENT'}"
        )
    assert found == wanted
    assert len(supervisor.attempts) == 1


def test_own_files_are_found_from_where_the_run_was_started(
    federation: LoopbackFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = Data(x=torch.randn(60, 4), edge_index=torch.randint(60, (2, 180)), y=torch.arange(60) % 2)
    torch.save(graph, "graph.pt")
    part = np.arange(60) % 3
    np.savez("split.npz", train=part == 0, val=part == 1, test=part == 2)
    own = {"dataset": "./graph.pt", "split": "masks:split.npz"}
    add_run(federation, "own-files", settings_of("fedavg", "nvflare", **own))
    federation.supervisor().finish(["own-files"])
    wanted = local_hashes(settings_of("fedavg", "local", **own), tmp_path / "run")
    assert site_hashes(federation, "own-files") == wanted


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return local_hashes(settings_of("fedavg", "local", rounds=ROUNDS), tmp_path_factory.mktemp("local") / "run")


@pytest.mark.parametrize("victim", ["client job", "client parent", "server job", "server parent"])
def test_a_kill_at_a_random_round_changes_nothing(
    federation: LoopbackFederation, victim: str, undisturbed: dict[str, str]
) -> None:
    run = f"kill-{victim.replace(' ', '-')}"
    add_run(federation, run, settings_of("fedavg", "nvflare", {"checkpoint.every": 1}, rounds=ROUNDS))
    supervisor = federation.supervisor()
    supervising = threading.Thread(target=supervisor.finish, args=([run],))
    supervising.start()
    killed_at = random.randint(3, ROUNDS - 10)
    at_round(federation, run, killed_at)
    site = random.choice(federation.names)
    parent = federation.parents[SERVER_KIT if "server" in victim else site]
    jobs = {"client job": lambda: client_job(federation, site), "server job": lambda: server_job(federation, run)}
    pid = jobs[victim]() if victim in jobs else parent.pid
    assert pid is not None
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(supervisor.attempts) > 1)
    seconds = time.monotonic() - killed
    supervising.join(timeout=TIMEOUT)
    assert not supervising.is_alive()
    print(  # noqa: T201
        f"{victim}: killed at round {killed_at}, next job after {seconds:.1f} s, done after "
        f"{time.monotonic() - killed:.1f} s"
    )
    assert len(supervisor.attempts) == 2
    assert site_hashes(federation, run) == undisturbed


def test_ctrl_c_ends_everything_and_resume_continues(tmp_path: Path) -> None:
    """`isthmus run --engine nvflare`, interrupted in the middle of a round."""
    wanted = local_hashes(settings_of("fedper", "local", rounds=60), tmp_path / "local")
    out = tmp_path / "out"
    options = [
        f"{key}={value}"
        for key, value in {**NODES, "rounds": 60, "hidden": 8, "checkpoint.every": 1, "engine": "nvflare"}.items()
    ]
    command = [sys.executable, "-m", "isthmus.cli.main", "run", "fedper", "--out", str(out)]
    process = subprocess.Popen(
        [*command, *(part for option in options for part in ("--set", option))], stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: committed_rounds(out) >= 5)
    started = descendants(process.pid)
    assert len(started) >= 7, "server and three sites, and the job of each"
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=TIMEOUT)[1]
    assert process.returncode == 130 and f"continue with: isthmus resume {out}" in stderr
    wait_until(lambda: not any(map(is_alive, started)), 10.0)
    assert committed_rounds(out) < 60
    assert resume(out)["rounds"] == 60
    assert hashes(out / "models") == wanted


def test_organisations_by_their_commands(tmp_path: Path) -> None:
    """What a newcomer types, on one machine: two organisations with long-term keys of their own, a server, a run."""
    home, port = tmp_path / "federation", free_port()
    isthmus("server", "init", home, "--organisation", "bank-a", "--organisation", "bank-b", "--port", port)
    roster = ""
    for n, x in enumerate("ab"):
        roster += isthmus("client", "identity", f"bank-{x}", "--client", f"client-{n}", "--out", tmp_path / f"{x}.key")
    (tmp_path / "roster.toml").write_text(roster)
    data = "".join(f"{key} = {json.dumps(value)}\n" for key, value in {**NODES, "clients": 2}.items())
    for n, x in enumerate("ab"):
        (tmp_path / f"{x}.toml").write_text(
            f'client = "client-{n}"\nstate = "state-{x}"\nroster = "roster.toml"\nidentity = "{x}.key"\n[data]\n{data}'
        )
        join(home, f"bank-{x}", tmp_path / f"{x}.toml", tmp_path / f"kit-{x}")
    (tmp_path / "run.toml").write_text(f'method = "fedavg"\nrounds = 3\nhidden = 8\n{data}')
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running("server", "start", home))
        for x in "ab":
            stack.enter_context(
                running("client", "start", "--kit", tmp_path / f"kit-{x}", "--config", tmp_path / f"{x}.toml")
            )
        result = json.loads(isthmus("submit", tmp_path / "run.toml", "--federation", home, "--json"))
        assert result["rounds"] == 3 and result["engine"] == "nvflare" and result["clients"] == 2
        status = json.loads(isthmus("status", home, "--json"))
        assert status["organisations"] == {"bank-a": "connected", "bank-b": "connected"}
        assert [(run["state"], run["rounds"]) for run in status["runs"]] == [("finished", 4)]
        isthmus("stop", home)
        assert server.wait(timeout=20.0) is not None
    down = subprocess.run(
        [sys.executable, "-m", "isthmus.cli.main", "status", str(home), "--json"], capture_output=True, text=True
    )
    assert (down.returncode, json.loads(down.stdout)["server"]) == (4, False)
    assert "isthmus server start" in down.stderr
    wanted = local_hashes(settings_of("fedavg", "local", rounds=3, clients=2, scale="none"), tmp_path / "local")
    (run,) = (home / "runs").iterdir()
    assert (
        hashes(tmp_path / "state-a" / run.name / "models") | hashes(tmp_path / "state-b" / run.name / "models")
        == wanted
    )
    assert not (run / "models").exists(), "models stay with their owners"


def join(home: Path, name: str, config: Path, kit: Path) -> None:
    """Request, approval and joining, as the organisation and the hub's operator type it."""
    request, approval = home / f"{name}.request", home / f"{name}.approval"
    told = isthmus("client", "request", name, "--config", config, "--kit", kit, "--out", request).strip()
    isthmus("server", "approve", home, request, "--fingerprint", told, "--out", approval)
    root = isthmus("server", "fingerprint", home).strip()
    isthmus("client", "join", approval, "--kit", kit, "--fingerprint", root)


def isthmus(*arguments: object) -> str:
    """Standard output of a command that must succeed."""
    command = [sys.executable, "-m", "isthmus.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "isthmus.cli.main", *map(str, arguments)], stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=20.0)
