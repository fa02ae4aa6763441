"""The methods in ``examples/`` do what their papers say, pass the kit, and the README shows the first as it is."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import isthmus
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.federation.interface import View
from isthmus.methods.registry import METHODS
from isthmus.seeds import Stream
from isthmus.tensors import Weights, max_difference, num_values, weighted_mean
from isthmus.testing import check_method

ROOT = Path(__file__).parent.parent
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
SMALL: dict[str, Any] = {
    "dataset": "csbm:nodes=120,classes=3,features=16,degree=4",
    "partition": "dirichlet:alpha=1",
    "split": "50/20/30",
    "clients": 5,
    "seed": 3,
    "rounds": 3,
    "hidden": (8,),
    "dropout": 0.0,
}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "precision": "float64"}


@pytest.fixture(scope="module", autouse=True)
def examples() -> Iterator[None]:
    for name, path in EXAMPLES.items():
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    for name in EXAMPLES:
        del METHODS._entries[name]  # other tests are about our own methods


def play(method: str, **settings: Any) -> SimulatedRun:
    resolved = resolve(method, {**SMALL, **settings})
    experiment = SimulatedRun(resolved, scenario_of(resolved))
    experiment.loop.play()
    return experiment


def models(experiment: SimulatedRun) -> dict[str, Weights]:
    return {client: export.weights or {} for client, export in experiment.engine.export(selected=False)}


def mean_of(items: list[Weights]) -> dict[str, torch.Tensor]:
    return weighted_mean(items, [1 / len(items)] * len(items))


@pytest.mark.parametrize("task", ["node", "graph"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_general_properties(name: str, task: Any) -> None:
    ran = check_method(name, task=task)
    assert "resume_is_bit_equal" in ran and "wire_equals_declaration" in ran


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_by_name_and_the_same_in_every_execution(name: str, tmp_path: Path) -> None:
    default, each = (
        isthmus.run(name, out=tmp_path / str(len(given)), **{**SMALL, "rounds": 15, "lr": 0.02}, **given)
        for given in ({}, {"execution": "each"})
    )
    assert default["rounds"] == 15 and default["test"] > 0.5
    assert default["test"] == each["test"] and default["bytes"] == each["bytes"]


def test_the_readme_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert EXAMPLES["fedmedian"].read_text() in blocks


def test_what_follows_from_the_weights_in_the_state_need_not_be_written() -> None:
    result = play("fedmedian", rounds=1)
    assert result.settings.method.shared_values(result.loop.state) == num_values(result.loop.state.weights) > 0
    alone = play("gossip", rounds=1)
    assert alone.settings.method.shared_values(alone.loop.state) == 0


def test_one_common_model_needs_clients_with_the_same_features_and_classes() -> None:
    different = View(("a", "b"), num_features=1, num_classes=2, task="graph", alike=False)
    for name in EXAMPLES:
        method = METHODS[name]
        with pytest.raises(ConfigError, match="try fedavg"):
            method.init(different, method.config(), Stream(0))


# -- FedMedian -------------------------------------------------------------------------------------


def test_fedmedian_takes_the_median_of_what_clients_would_train_alone() -> None:
    trained = list(models(play("local", rounds=1, execution="each")).values())
    common = play("fedmedian", rounds=1).loop.state.weights
    for name, tensor in common.items():
        assert torch.equal(tensor, torch.stack([weights[name] for weights in trained]).median(0).values)


# -- SCAFFOLD --------------------------------------------------------------------------------------


def test_one_local_step_of_scaffold_is_a_step_on_the_mean_gradient() -> None:
    """Then the corrections cancel in the mean: FedAvg with equal clients."""
    ours = play("scaffold", **SGD, local_epochs=1)
    theirs = play("fedavg", **SGD, local_epochs=1, weighting="uniform")
    assert max_difference(ours.loop.state.weights, theirs.loop.state.weights) < 1e-12


def test_scaffold_by_hand() -> None:
    """Round 2 of one client with two local steps, written out."""
    settings = {**SGD, "local_epochs": 2, "weight_decay": 0.0}
    first, second = (play("scaffold", **settings, rounds=rounds) for rounds in (1, 2))
    x, c = first.loop.state.weights, first.loop.state.control
    clients = [first.engine.party(name).client for name in first.engine.parties("client")]
    ends = []
    for client in clients:
        own, y = client.state.control, dict(x)
        for _ in range(2):
            g = client.learner.gradients(y, client.stream)
            y = {name: y[name] - 0.1 * (g[name] - own[name] + c[name]) for name in y}
        ends.append(y)
    assert max_difference(second.loop.state.weights, mean_of(ends)) < 1e-12
    at_x = [client.learner.gradients(x, client.stream) for client in clients]
    assert max_difference(second.loop.state.control, mean_of(at_x)) < 1e-12


def test_clients_of_scaffold_do_not_drift() -> None:
    """Where clients differ and take many steps, FedAvg stops beside the optimum of the mean loss, SCAFFOLD at it."""
    settings = {**SGD, "backbone": "sgc", "input_norm": False, "local_epochs": 10, "rounds": 150, "weight_decay": 0.05}
    norms = {}
    for method, more in (("scaffold", {}), ("fedavg", {"weighting": "uniform"})):
        experiment = play(method, **settings, **more)
        clients = [experiment.engine.party(name).client for name in experiment.engine.parties("client")]
        x = experiment.loop.state.weights
        mean = mean_of([client.learner.gradients(x, client.stream) for client in clients])
        slope = [(mean[name] + 0.05 * tensor).flatten() for name, tensor in x.items()]  # of the mean loss, with decay
        norms[method] = float(torch.cat(slope).norm())
    assert norms["scaffold"] < 0.1 * norms["fedavg"]


def test_a_server_step_of_scaffold_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="server_lr"):
        play("scaffold", server_lr=0.0)


def test_scaffold_needs_only_sums() -> None:
    plain, masked = (play("scaffold", **SGD, execution="each", secure_sum=secure) for secure in (False, True))
    assert max_difference(plain.loop.state.weights, masked.loop.state.weights) < 1e-4
    shown = {row["message"]: row["protection"] for row in masked.loop.sheet.rows()}
    assert shown["Update"] == "masked"


# -- gossip ----------------------------------------------------------------------------------------


def test_gossip_averages_what_ring_neighbours_would_train_alone() -> None:
    trained = list(models(play("local", rounds=1, execution="each")).values())
    for i, ours in enumerate(models(play("gossip", rounds=1)).values()):
        ring = [trained[i], trained[i - 1], trained[(i + 1) % len(trained)]]
        assert max_difference(ours, mean_of(ring)) < 1e-6


def test_the_server_of_gossip_sees_no_model() -> None:
    rows = play("gossip").loop.sheet.rows()
    assert {row["message"] for row in rows if row["receiver"] == "server"} == {"Evaluation"}
    assert {row["message"] for row in rows if row["receiver"] == "client"} == {"Ring", "Trained"}
