"""The methods in ``examples/`` do what their papers say, pass the kit, and the page on methods shows the first as it
is.
"""

from __future__ import annotations

import importlib.util
import re
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
def examples() -> None:
    for name, path in EXAMPLES.items():
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def play(method: str, **settings: Any) -> SimulatedRun:
    resolved = resolve(method, {**SMALL, **settings})
    experiment = SimulatedRun(resolved, scenario_of(resolved))
    experiment.loop.play()
    return experiment


def models(experiment: SimulatedRun) -> dict[str, Weights]:
    return {client: export.weights or {} for client, export in experiment.engine.export(selected=False)}


def mean_of(items: list[Weights]) -> dict[str, torch.Tensor]:
    return weighted_mean(items, [1 / len(items)] * len(items))


PAPER = {"preset": "fedstruct"}


@pytest.mark.parametrize("task", ["node", "graph"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_general_properties(name: str, task: Any) -> None:
    ran = check_method(name, task=task)
    assert "resume_is_bit_equal" in ran and "wire_equals_declaration" in ran


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_by_name_and_the_same_in_every_execution(name: str, tmp_path: Path) -> None:
    default, each = (
        isthmus.run(
            name, out=tmp_path / str(len(given)), **{**SMALL, "rounds": 15, "lr": 0.02, "preset": "fedstruct"}, **given
        )
        for given in ({}, {"execution": "each"})
    )
    assert default["rounds"] == 15 and default["test"] > 0.5
    assert default["test"] == each["test"] and default["bytes"] == each["bytes"]


def test_the_readme_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-method.md").read_text(), flags=re.S)
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
