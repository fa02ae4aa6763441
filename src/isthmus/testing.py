"""A kit for method authors: the general properties every federated method should have, on small scenarios.

    from isthmus.testing import check_method

    def test_my_method():
        check_method("my-method")

Our own methods are tested with it. Give ``skip={"property": "reason"}`` where a property does not apply by design.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from isthmus.errors import unknown
from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import AnyScenario, build
from isthmus.federation.ledger import differences
from isthmus.methods.registry import get_method
from isthmus.tensors import Weights, equal_weights, max_difference

SCENARIO: dict[str, Any] = {
    "dataset": "csbm:nodes=90,classes=3,features=16,degree=4",
    "partition": "random",
    "split": "30/20/50",
    "seed": 5,
}
GRAPHS: dict[str, Any] = {"dataset": "motifs", "partition": None, "split": "stratified:60/20/20", "seed": 2}
CALM: dict[str, Any] = {"hidden": (8,), "dropout": 0.0, "rounds": 4, "preset": "fedstruct"}
CALM_GRAPHS: dict[str, Any] = {
    "hidden": (8, 8),
    "dropout": 0.0,
    "rounds": 3,
    "batch_size": 16,
    "lr": 0.01,
    "preset": "fedstar",
}
SECRETIVE: dict[str, dict[str, Any]] = {"fedstruct": {"protocol": "published"}}
"""Methods whose parties order things by secrets of their own, so that two runs of one seed differ in rounding; and how
they do not.
"""
_TASKS = {"node": (CALM, SCENARIO), "graph": (CALM_GRAPHS, GRAPHS)}
_ONE_BATCH = 10_000
Models = dict[str, Weights]


def check_method(
    name: str,
    *,
    settings: Mapping[str, Any] | None = None,
    skip: Mapping[str, str] | None = None,
    clients: int = 3,
    task: Literal["node", "graph"] = "node",
) -> list[str]:
    """Run all general properties; raises AssertionError on the first that fails. Returns the names of those that ran.

    Args:
        name: A registered method.
        settings: Further settings for every run; unknown keys are refused as on the command line.
        skip: Property -> why it does not apply.
        clients: Size of the small federation.
        task: Of the small scenario: one graph cut into parts, or sets of graphs (where clients are not trained
            together).
    """
    kit = _Kit(name, dict(settings or {}), clients, task)
    checks: dict[str, Callable[[], None]] = {
        "one_client_equals_local": kit.one_client_equals_local,
        "identical_clients_stay_identical": kit.identical_clients_stay_identical,
        "order_does_not_matter": kit.order_does_not_matter,
        "same_seed_same_result": kit.same_seed_same_result,
        "wire_equals_declaration": kit.wire_equals_declaration,
        "wire_coded_equals_local": kit.wire_coded_equals_local,
        "state_is_declared": kit.state_is_declared,
        "resume_is_bit_equal": kit.resume_is_bit_equal,
    }
    if task == "node":
        checks["cohort_equals_each"] = kit.cohort_equals_each
    for skipped in skip or {}:
        if skipped not in checks:
            raise unknown("property", skipped, checks)
    ran = [check for check in checks if check not in (skip or {})]
    for check in ran:
        checks[check]()
    return ran


def small_runs(
    name: str, *, settings: Mapping[str, Any] | None = None, set: Mapping[str, Any] | None = None, clients: int = 3
) -> dict[str, tuple[Settings, AnyScenario]]:
    """A small run of a method for each task it takes (``node``, ``graph``), with its own paper's preset, one client by
    one: what engines are compared on."""
    runs: dict[str, tuple[Settings, AnyScenario]] = {}
    for task, (calm, place) in _TASKS.items():
        if task in get_method(name).tasks:
            flags = {"dataset": place["dataset"], "clients": clients, "seed": place["seed"], "execution": "each"}
            own = {key: value for key, value in _known(name, calm).items() if key != "preset"} | SECRETIVE.get(name, {})
            runs[task] = resolve(name, {**flags, **own, **(settings or {})}, set), build(clients=clients, **place)
    return runs


def final_hashes(experiment: SimulatedRun) -> dict[str, str]:
    """SHA-256 of what each client ends with."""
    hashes = {}
    for client, weights in _exports(experiment).items():
        digest = hashlib.sha256()
        for key in sorted(weights):
            digest.update(
                f"{key}{weights[key].dtype}{tuple(weights[key].shape)}".encode()
                + weights[key].contiguous().numpy().tobytes()
            )
        hashes[client] = digest.hexdigest()
    return hashes


def _known(name: str, calm: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(get_method(name).config)} | {"rounds", "preset"}
    return {key: value for key, value in calm.items() if key in known}


class _Kit:
    def __init__(self, name: str, settings: dict[str, Any], clients: int, task: str) -> None:
        self.method = get_method(name)
        calm, self.place = _TASKS[task]
        self.settings = _known(name, calm) | settings
        self.clients = clients
        # Each client shuffles its graphs for itself: where clients are to do the same, all of them are one batch, in an
        # order of its own.
        self.shuffled = task == "graph"
        self.together = _known(name, {"batch_size": _ONE_BATCH, "precision": "float64"}) if self.shuffled else {}

    # -- properties --------------------------------------------------------------------------------

    def one_client_equals_local(self) -> None:
        """(P2) A federation of one is that one alone, bit for bit, dropout included."""
        scenario = build(clients=1, **self.place)
        ours = self.models(scenario, dropout=0.3)
        shared = {f.name for f in fields(get_method("local").config)} | {"rounds", "preset"}
        alone = self.models(
            scenario, method="local", **{k: v for k, v in {**self.settings, "dropout": 0.3}.items() if k in shared}
        )
        _same(
            next(iter(ours.values())),
            next(iter(alone.values())),
            f"{self.method.name} with one client differs from local training",
        )

    def identical_clients_stay_identical(self) -> None:
        """(P3) Clients with the same data end with the same model."""
        one = build(clients=1, **self.place)
        data = next(iter(one.parts.values()))
        models = self.models(
            _with_parts(one, {f"client-{i}": data for i in range(self.clients)}), execution="each", **self.together
        )
        first = next(iter(models.values()))
        for client, model in models.items():
            complaint = f"{client} drifted away from a client with the same data"
            _close(model, first, 1e-9, complaint) if self.shuffled else _same(model, first, complaint)

    def order_does_not_matter(self) -> None:
        """(P4) Which client comes first changes nothing but rounding."""
        scenario = self.scenario()
        names, data = list(scenario.parts), list(scenario.parts.values())
        plain = self.models(scenario, **self.together)
        turned = self.models(_with_parts(scenario, dict(zip(names, data[::-1], strict=True))), **self.together)
        for a, b in zip(names, names[::-1], strict=True):
            _close(plain[a], turned[b], 1e-5, "the result depends on the order of the clients")

    def same_seed_same_result(self) -> None:
        """(P6) Twice the same run, with dropout."""
        first, second = (self.models(self.scenario(), dropout=0.3) for _ in range(2))
        _all_same(first, second, "two runs with the same seed differ")

    def wire_equals_declaration(self) -> None:
        """(P5) What a run shows is exactly the method's disclosure sheet."""
        experiment = self.experiment(self.scenario())
        experiment.loop.play()
        wrong = differences(experiment.loop.sheet, self.method.discloses_with(experiment.settings.method_config))
        assert not wrong, f"disclosure sheet of {self.method.name}: {'; '.join(wrong)}"

    def wire_coded_equals_local(self) -> None:
        """Messages through the wire codec give the same bits as copies."""
        plain = self.models(self.scenario(), dropout=0.3, execution="each")
        coded = self.models(self.scenario(), dropout=0.3, execution="each", wire=True)
        _all_same(plain, coded, "wire-coded and copied messages give different bits")

    def state_is_declared(self) -> None:
        """Nothing survives a round but declared state: parties rebuilt from it after every round end the same."""
        plain = self.models(self.scenario(), execution="each", dropout=0.3)
        forgetful = self.experiment(self.scenario(), execution="each", dropout=0.3)
        for step in range(1, forgetful.loop.steps + 1):
            forgetful.loop.play(until=step)
            forgetful.loop.checkpoint()
            forgetful.loop.restore()
        _all_same(plain, _exports(forgetful), "a party remembers something outside its declared state")

    def resume_is_bit_equal(self) -> None:
        """Stopped half-way and continued by a new process' worth of objects, the run ends with the same bits."""
        plain = self.models(self.scenario(), dropout=0.3)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            first = self.experiment(self.scenario(), dropout=0.3, set={"checkpoint.every": 1})
            stopped = RunFolder.create(path, first.settings.to_toml(), {})
            first.engine.keep_tags(stopped.store)
            loop = first.new_loop(stopped)
            loop.play(until=max(1, loop.steps // 2))
            stopped.close()
            second = self.experiment(self.scenario(), dropout=0.3, set={"checkpoint.every": 1})
            second.play(RunFolder.open(path), resumed=True)
            _all_same(plain, _exports(second), "a resumed run ends differently")

    def cohort_equals_each(self) -> None:
        """Clients trained together end where they end one by one (1e-5 after one round), dropout included."""
        each = self.models(self.scenario(), execution="each", dropout=0.3, rounds=1)
        together = self.models(self.scenario(), execution="cohort", dropout=0.3, rounds=1)
        for client in each:
            _close(each[client], together[client], 1e-5, "training together and one by one differ")

    # -- tools -------------------------------------------------------------------------------------

    def scenario(self) -> AnyScenario:
        return build(clients=self.clients, **self.place)

    def experiment(
        self, scenario: AnyScenario, *, method: str | None = None, set: Mapping[str, Any] | None = None, **changes: Any
    ) -> SimulatedRun:
        given = changes if method is not None else {**self.settings, **changes}
        if method is None and "dropout" not in {field.name for field in fields(self.method.config)}:
            given.pop("dropout", None)
        flags = {"dataset": self.place["dataset"], "clients": len(scenario.parts), "seed": self.place["seed"], **given}
        return SimulatedRun(resolve(method or self.method.name, flags, set), scenario)

    def models(self, scenario: AnyScenario, **changes: Any) -> Models:
        experiment = self.experiment(scenario, **changes)
        experiment.loop.play()
        return _exports(experiment)


def _exports(experiment: SimulatedRun) -> Models:
    return {client: export.weights or {} for client, export in experiment.engine.export(selected=False)}


def _with_parts(scenario: AnyScenario, parts: Mapping[str, Any]) -> AnyScenario:
    changed: Any = {"parts": parts, "clients": len(parts)}
    return replace(scenario, **changed)


def _same(a: Weights, b: Weights, complaint: str) -> None:
    assert equal_weights(a, b), f"{complaint} (largest difference {max_difference(a, b):.3g})"


def _all_same(a: Models, b: Models, complaint: str) -> None:
    assert a.keys() == b.keys()
    for client in a:
        _same(a[client], b[client], f"{client}: {complaint}")


def _close(a: Weights, b: Weights, tolerance: float, complaint: str) -> None:
    difference = max_difference(a, b)
    assert difference <= tolerance, f"{complaint} (largest difference {difference:.3g})"
