"""Ray: the same bits as one process for every method, nothing lost with an actor, many clients on few actors. Real
processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packages import weight_hashes

pytest.importorskip("ray", reason="the extra isthmus[ray] is not installed; `make test-engines` installs it")
import ray

import isthmus
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import report_statistics, scenario_of
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.engines.ray import Cluster, RayEngine
from isthmus.federation.party import Invocation, Turn
from isthmus.federation.roles import Role, RoleTable
from isthmus.methods.fedavg import FedAvgClient, FedAvgConfig
from isthmus.methods.registry import all_methods
from isthmus.seeds import Stream
from isthmus.tensors import equal_weights
from isthmus.testing import final_hashes, small_runs

METHODS = [method.name for method in all_methods()]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One cluster with two actors for all tests of this file."""
    with Cluster(actors=4) as cluster:
        yield cluster


def test_addresses_that_lead_nowhere(tmp_path: Path) -> None:
    assert not ray.is_initialized()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # bound, but nobody listens
        settings: dict[str, Any] = {"dataset": "csbm:nodes=90", "clients": 3, "engine": "ray", "out": tmp_path / "r"}
        for address, said in (
            (f"127.0.0.1:{port}", "no ray cluster answers"),
            ("nowhere", "HOST:PORT"),
            ("ray://a:1", "HOST:PORT"),
        ):
            with pytest.raises(ConfigError, match=said):
                isthmus.run("fedavg", set={"ray.address": address}, **settings)
    assert not (tmp_path / "r").exists()


def hashes(settings: Any, scenario: Any, engine: Any, **options: Any) -> dict[str, str]:
    with SimulatedRun(settings, scenario, engine=engine, **options) as simulated:
        simulated.loop.play()
        return final_hashes(simulated)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_with_the_same_bits(method: str, cluster: Cluster) -> None:
    runs = small_runs(method, settings={"dropout": 0.3} if "dropout" in _fields(method) else {})
    assert runs
    for task, (settings, scenario) in runs.items():
        assert hashes(settings, scenario, partial(RayEngine, cluster=cluster, actors=2)) == hashes(
            settings, scenario, LocalEngine
        ), task


def _fields(method: str) -> set[str]:
    return {name for one in all_methods() if one.name == method for name in one.config.__dataclass_fields__}


def test_secure_sums_on_actors(cluster: Cluster) -> None:
    settings, scenario = small_runs("fedavg", settings={"secure_sum": True})["node"]
    assert hashes(settings, scenario, partial(RayEngine, cluster=cluster, actors=2)) == hashes(
        settings, scenario, LocalEngine
    )


class Killing(RayEngine):
    """Kills the process of an actor while it works on a given round."""

    at: tuple[str, int] = ("train", 2)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.killed = 0
        self.revived = 0

    def carry(self, kind: Any, frames: Any, timeout: float | None) -> Any:
        if kind == "call" and not self.killed and self.now == self.at:
            place = random.Random(self.at[1]).choice(sorted(frames))
            pid = ray.get(self._actors[place].pid.remote())
            os.kill(pid, signal.SIGKILL)
            self.killed = pid
        return super().carry(kind, frames, timeout)

    def dispatch(self, calls: Any, timeout: float | None) -> Any:
        self.now = calls[0].turn.phase, calls[0].turn.round
        return super().dispatch(calls, timeout)

    def revive(self) -> None:
        self.revived += any(actor is None for actor in self._actors.values())
        super().revive()


def test_an_actor_killed_in_a_random_round_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    settings, scenario = small_runs(
        "fedavg", settings={"rounds": 6, "selection": "best_val_acc", "dropout": 0.3}, set={"checkpoint.every": 2}
    )["node"]
    Killing.at = random.Random().choice([("train", round) for round in range(1, 7)] + [("evaluation", 4)])
    engines: dict[str, Any] = {"local": LocalEngine, "ray": partial(Killing, cluster=cluster, actors=2)}
    results = {}
    for name, engine in engines.items():
        with SimulatedRun(settings, scenario, engine=engine) as simulated:
            folder = RunFolder.create(tmp_path / name, simulated.settings.to_toml(), report_statistics(scenario))
            results[name] = simulated.play(folder, resumed=False)
    ours: Any = simulated.engine
    assert ours.killed and ours.revived == 1, Killing.at
    models = [weight_hashes(tmp_path / name) for name in engines]
    assert models[0] == models[1] and len(models[0]) == 3, Killing.at
    for key in ("test", "val", "selected_round", "bytes", "per_client"):
        assert results["local"][key] == results["ray"][key], (key, Killing.at)


def test_cohorts_on_actors(cluster: Cluster) -> None:
    settings, scenario = small_runs("fedavg", settings={"execution": "cohort", "rounds": 1}, clients=4)["node"]
    found = []
    for engine in (partial(RayEngine, cluster=cluster, actors=2), LocalEngine):
        with SimulatedRun(settings, scenario, engine=engine) as simulated:
            assert simulated.settings.run.execution == "cohort"
            simulated.loop.play()
            found.append({client: export.weights for client, export in simulated.engine.export(False)})
    for client, weights in found[1].items():
        for name, tensor in weights.items():
            torch.testing.assert_close(found[0][client][name], tensor, atol=1e-5, rtol=0)


def test_actors_say_why_a_cohort_is_not_used(cluster: Cluster) -> None:
    class Overriding(FedAvgClient[FedAvgConfig]):
        def samples(self) -> float:
            return 1.0

    settings, scenario = small_runs("fedavg", settings={"execution": "auto", "rounds": 1}, clients=4)["node"]
    table = RoleTable({"client": Role(Overriding)})
    engine = RayEngine(scenario.parts, table, settings.method_config, Stream(0), cohort=True, cluster=cluster, actors=2)
    with contextlib.closing(engine):
        assert engine.execution == "each" and "Overriding overrides samples" in engine.why_each


def test_a_thousand_clients_on_two_actors(cluster: Cluster) -> None:
    settings = resolve(
        "fedavg",
        {
            "dataset": "csbm:nodes=15000,classes=3,features=8,degree=4",
            "clients": 1000,
            "rounds": 2,
            "eval_every": 2,
            "hidden": 8,
            "split": "30/20/50",
            "seed": 1,
        },
    )
    with SimulatedRun(
        settings, scenario_of(settings), engine=partial(RayEngine, cluster=cluster, actors=2)
    ) as simulated:
        simulated.loop.play()
        exported = dict(simulated.engine.export(False))
        assert len(exported) == 1000 and len(simulated.engine.places) == 2  # type: ignore[attr-defined]
        common = exported["client-000"].weights
        assert common is not None and all(torch.isfinite(tensor).all() for tensor in common.values())
        assert all(export.weights is not None and equal_weights(export.weights, common) for export in exported.values())
        updates = [row["times"] for row in simulated.loop.sheet.rows() if row["message"] == "Update"]
        assert updates == [2000], "everybody trains in every round"
        assert len(simulated.loop.lines[-1]["per_client"]) == 1000


def test_more_actors_than_clients(cluster: Cluster) -> None:
    settings, scenario = small_runs("fedavg")["node"]
    with SimulatedRun(settings, scenario, engine=partial(RayEngine, cluster=cluster, actors=500)) as simulated:
        assert dict(simulated.engine.resolved) == {"ray_actors": 3}


def test_what_goes_wrong_in_an_actor_is_told(cluster: Cluster) -> None:
    settings, scenario = small_runs("fedavg")["node"]
    with SimulatedRun(settings, scenario, engine=partial(RayEngine, cluster=cluster, actors=2)) as simulated:
        bad = Invocation("client-0", "client", "local_update", Turn(0, "train", 1, 1), 1)  # its message is missing
        outcome: Any = simulated.engine.dispatch([bad], None)
        assert "expects Broadcast" in str(outcome["client-0"].cause)
        good = Invocation("client-1", "client", "size", Turn(0, "train", 1, 1), 1)
        late: Any = simulated.engine.dispatch([good], 0.0)
        assert late["client-1"].kind == "timeout" or late["client-1"].__class__.__name__ == "Size"
        assert simulated.engine.tags() == ()  # still there, or there again


# -- the command line, with clusters of its own
# ------------------------------------------------------------------------------------

RUN = [
    "run",
    "fedavg",
    "--dataset",
    "csbm:nodes=90,features=6,degree=4",
    "--clients",
    "3",
    "--set",
    "execution=each",
    "--set",
    "backbone=gcn",
    "--set",
    "hidden=8",
    "--set",
    "checkpoint.every=5",
    "--rounds",
    "200",
]
COMMAND = [sys.executable, "-c", "import sys; from isthmus.cli.main import main; sys.exit(main(sys.argv[1:]))"]
CLUSTER = """
import sys, ray
from isthmus.federation.engines.ray import Cluster
with Cluster(actors=3):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("local") / "run"
    subprocess.run([*COMMAND, *RUN, "--out", str(out)], check=True, capture_output=True, timeout=300)
    return models(out)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder with a short name (ray's sockets), by which processes can be identified."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def models(out: Path) -> dict[str, str]:
    return weight_hashes(out)


def left_over(scratch: Path) -> list[str]:
    """Processes that name the temporary folder, and what is left in it; they are given a moment to end."""
    deadline = time.monotonic() + 60
    while True:
        found = [str(path) for path in scratch.glob("isthmus-ray-*")]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found += [text] if f"{scratch}/" in text else []
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def test_interrupted_and_resumed_it_ends_with_the_same_bits_and_leaves_nothing(
    local_run: dict[str, str], scratch: Path, tmp_path: Path
) -> None:
    out, environment = tmp_path / "run", {**os.environ, "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        [*COMMAND, *RUN, "--engine", "ray", "--out", str(out)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 240
    while (
        process.poll() is None
        and time.monotonic() < deadline
        and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3)
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0, "it was over before it could be interrupted"
    assert "Traceback" not in errors and not (out / "result.json").exists(), errors
    assert not left_over(scratch)
    done = subprocess.run(
        [*COMMAND, "resume", str(out), "--json"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["engine"] == "ray" and result["execution"] == "each"
    assert models(out) == local_run
    assert "ray.actors" in (out / "config.toml").read_text()
    assert not left_over(scratch)


def test_an_existing_cluster_is_used_and_left_alone(local_run: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert cluster.stdin is not None and cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        out = tmp_path / "run"
        wanted = ["--engine", "ray", "--set", f"ray.address={address}", "--set", "ray.actors=2"]
        done = subprocess.run(
            [*COMMAND, *RUN, *wanted, "--out", str(out)], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert models(out) == local_run
        assert cluster.poll() is None
    finally:
        cluster.communicate("", timeout=120)
