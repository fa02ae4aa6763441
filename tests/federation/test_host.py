"""Parties in other processes: the same bits as in one process, every refusal an answer, lost places taken back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hosted import HostedEngine
from packages import weight_hashes

from isthmus.errors import ConfigError, DataError, ProtocolError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.folder import FileStore, RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.federation import codec, wire
from isthmus.federation.engines import engine_class
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.host import Answer, Order, PartyHost
from isthmus.federation.interface import QuorumError
from isthmus.federation.party import Invocation, Turn
from isthmus.methods.registry import all_methods, get_method
from isthmus.seeds import Stream
from isthmus.testing import final_hashes, small_runs

METHODS = [method.name for method in all_methods()]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hashes(settings: Any, scenario: Any, **options: Any) -> dict[str, str]:
    with SimulatedRun(settings, scenario, **options) as experiment:
        experiment.loop.play()
        return final_hashes(experiment)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_with_the_same_bits_behind_walls(method: str) -> None:
    runs = small_runs(method)
    assert runs
    for settings, scenario in runs.values():
        assert hashes(settings, scenario, engine=HostedEngine) == hashes(settings, scenario, engine=LocalEngine)


def test_secure_sums_cross_walls() -> None:
    settings, scenario = small_runs("fedavg", settings={"secure_sum": True})["node"]
    assert hashes(settings, scenario, engine=HostedEngine) == hashes(settings, scenario, engine=LocalEngine)


def test_a_broadcast_crosses_once_per_place() -> None:
    settings, scenario = small_runs("fedavg", settings={"rounds": 1})["node"]
    one, three = (SimulatedRun(settings, scenario, engine=HostedEngine, places=n) for n in (1, 3))
    one.loop.play(), three.loop.play()
    engines: Any = (one.engine, three.engine)
    assert one.loop.totals == three.loop.totals, "the ledger counts messages, not transports"
    assert engines[0].carried < 0.5 * engines[1].carried


def test_cohorts_train_inside_a_place() -> None:
    settings, scenario = small_runs("fedavg", settings={"execution": "cohort", "rounds": 1}, clients=4)["node"]
    with (
        SimulatedRun(settings, scenario, engine=HostedEngine) as experiment,
        SimulatedRun(settings, scenario, engine=LocalEngine) as local,
    ):
        assert experiment.settings.run.execution == "cohort"
        for one in (experiment, local):
            one.loop.play()
        found, expected = (dict(one.engine.export(False)) for one in (experiment, local))
    for client in expected:
        ours, theirs = found[client].weights, expected[client].weights
        assert ours is not None and theirs is not None
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("round", [1, 2, 4])
def test_a_lost_place_comes_back_from_its_tags(round: int, tmp_path: Path) -> None:
    settings, scenario = small_runs("fedavg", settings={"selection": "best_val_acc"}, set={"checkpoint.every": 2})[
        "node"
    ]

    class Dying(HostedEngine):
        def dispatch(self, calls: Any, timeout: float | None) -> Any:
            turn = calls[0].turn
            if turn.phase == "train" and turn.round == round and turn.incarnation == 0:
                self.kill("place-1")
            return super().dispatch(calls, timeout)

    results = {}
    for engine in (LocalEngine, Dying):
        experiment = SimulatedRun(settings, scenario, engine=engine)
        folder = RunFolder.create(tmp_path / engine.__name__, experiment.settings.to_toml(), {})
        results[engine.__name__] = experiment.play(folder, resumed=False)
    assert getattr(experiment.engine, "revived") == 1  # noqa: B009
    models = [weight_hashes(tmp_path / name) for name in results]
    assert models[0] == models[1] and len(models[0]) == 3
    assert results["LocalEngine"]["test"] == results["Dying"]["test"]


def test_a_place_lost_at_the_very_end_comes_back(tmp_path: Path) -> None:
    settings, scenario = small_runs("fedavg", set={"checkpoint.every": 2, "selection": "last"})["node"]

    class Dying(HostedEngine):
        def export(self, selected: bool) -> Any:
            if not self.revived:
                self.kill("place-0")
            return super().export(selected)

    experiment = SimulatedRun(settings, scenario, engine=Dying)
    experiment.play(RunFolder.create(tmp_path / "r", experiment.settings.to_toml(), {}), resumed=False)
    assert final_hashes(experiment) == hashes(settings, scenario, engine=LocalEngine)


def test_without_stores_a_lost_place_ends_the_run() -> None:
    settings, scenario = small_runs("fedavg")["node"]
    experiment = SimulatedRun(settings, scenario, engine=HostedEngine)
    experiment.loop.play(until=2)
    engine: Any = experiment.engine
    engine.kill("place-0")
    with pytest.raises(QuorumError):
        engine.commit(2)
    with pytest.raises(DataError, match="no checkpoint that all parties hold"):
        experiment.loop.play()


# -- what a host refuses ---------------------------------------------------------------------------------


@pytest.fixture
def host() -> PartyHost:
    settings, scenario = small_runs("fedavg")["node"]
    parts: Mapping[str, Any] = scenario.parts
    return PartyHost(parts, get_method("fedavg").table, settings.method_config, Stream(0, ("party",)))


def refused(host: PartyHost, kind: str, frame: wire.Frame) -> str:
    answer = codec.decode(host.handle(kind, frame)[0], Answer)
    assert answer.error
    with pytest.raises(RunError):
        answer.check("place")
    return answer.text


def order(**columns: Any) -> wire.Frame:
    return (codec.encode(Order(**columns)),)


def test_what_a_host_refuses(host: PartyHost) -> None:
    call = Invocation("client-0", "client", "samples", Turn(0, "train", 1, 1), 1)
    assert "unknown handler" in refused(host, "call", wire.encode_calls([call]))
    stranger = Invocation("client-9", "client", "size", Turn(0, "train", 1, 1), 1)
    assert "unknown party" in refused(host, "call", wire.encode_calls([stranger]))
    assert "unknown order" in refused(host, "order", order(name="shell"))
    assert "unknown kind of frame" in refused(host, "exec", order(name="tags"))
    assert "unknown role" in refused(host, "order", order(name="sum_keys", role="admin"))
    assert "unknown client" in refused(host, "order", order(name="export", clients=("client-9",)))
    assert "malformed order" in refused(host, "order", (*order(name="tags"), b"more"))
    for frame in ((), (b"",), (b"garbage" * 10,), (b"\x80\x04cposix\nsystem\n",)):
        assert refused(host, "call", frame)
        assert refused(host, "order", frame)


def test_a_host_that_cannot_read_a_tag_says_so(host: PartyHost, tmp_path: Path) -> None:
    host.keep_tags(lambda party: FileStore(tmp_path / party))
    assert codec.decode(host.handle("order", order(name="fetch", step=3))[0], Answer).error == "DataError"


def test_texts_of_errors_leave_only_where_they_may() -> None:
    def outcome(explain: bool) -> str:
        settings, scenario = small_runs("fedavg")["node"]
        engine = HostedEngine(
            scenario.parts, get_method("fedavg").table, settings.method_config, Stream(0), explain=explain
        )
        bad = Invocation("client-0", "client", "local_update", Turn(0, "train", 1, 1), 1)  # its message is missing
        found: Any = engine.dispatch([bad], None)["client-0"]
        assert found.kind == "protocol"
        return str(found.cause or "")

    assert "expects Broadcast" in outcome(True)
    assert outcome(False) == ""


def test_answers_of_other_parties_are_not_taken() -> None:
    settings, scenario = small_runs("fedavg")["node"]
    with SimulatedRun(settings, scenario, engine=HostedEngine) as experiment:
        engine: Any = experiment.engine
        engine.hosts["place-0"] = engine.hosts["place-1"]
        with pytest.raises(ProtocolError):
            engine.sum_keys("client")
        with pytest.raises(ProtocolError, match="unknown client"):
            list(engine.export(False))


# -- engines by name -------------------------------------------------------------------------------


def test_an_experiment_closes_its_engine_also_where_it_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, scenario = small_runs("fedavg")["node"]
    made: list[HostedEngine] = []

    def make(*args: Any, **options: Any) -> HostedEngine:
        made.append(HostedEngine(*args, **options))
        return made[-1]

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(SimulatedRun, "new_loop", lambda *_: 1 // 0)
        SimulatedRun(settings, scenario, engine=make)
    with SimulatedRun(settings, scenario, engine=make):
        assert not made[1].closed
    assert made[0].closed and made[1].closed


def test_an_engine_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'isthmus\[ray\]'"):
        engine_class("ray")


def test_unknown_engines_and_options_of_another_engine() -> None:
    with pytest.raises(ConfigError, match="unknown engine"):
        engine_class("spark")
    with pytest.raises(ConfigError, match="unknown value for engine"):
        resolve("fedavg", {"dataset": "csbm", "engine": "spark"})
    with pytest.raises(ConfigError, match="option of engine ray"):
        resolve("fedavg", {"dataset": "csbm"}, {"ray.actors": 2})
    with pytest.raises(ConfigError, match=r"ray\.actors must be at least 1"):
        resolve("fedavg", {"dataset": "csbm", "engine": "ray"}, {"ray.actors": 0})
