"""APFL: specs/baselines 8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.methods.apfl import APFLClient, APFLState, mixed
from isthmus.nn.train import gradients
from isthmus.tensors import Weights, equal_weights, max_difference
from isthmus.testing import check_method

SMALL: dict[str, Any] = {
    "hidden": (8,),
    "dropout": 0.3,
    "rounds": 3,
    "local_epochs": 3,
    "lr": 0.02,
    "preset": "fedspray",
    "execution": "each",
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(
        dataset="csbm:nodes=120,classes=3,features=12,degree=4", clients=3, split="client:40/30/30", seed=1
    )


def play(method: str, scenario: Scenario, **settings: Any) -> SimulatedRun:
    flags = {"dataset": "csbm", "clients": len(scenario.parts), "seed": 1, **SMALL, **settings}
    experiment = SimulatedRun(resolve(method, flags), scenario)
    experiment.loop.play()
    return experiment


def models(experiment: SimulatedRun) -> dict[str, Weights]:
    return {name: experiment.engine.party(name).client.export() for name in experiment.engine.parties("client")}


def client_of(experiment: SimulatedRun) -> APFLClient:
    client = experiment.engine.party("client-0").client
    assert isinstance(client, APFLClient)
    return client


def test_general_properties() -> None:
    check_method("apfl", skip={"one_client_equals_local": "two models that start alike but step apart"})


@pytest.mark.parametrize(("mixing", "other"), [(0.0, "fedavg"), (1.0, "local")])
def test_the_ends_are_fedavg_and_local(scenario: Scenario, mixing: float, other: str) -> None:
    ours, theirs = models(play("apfl", scenario, mixing=mixing, adaptive=False)), models(play(other, scenario))
    for name, weights in theirs.items():
        assert equal_weights(ours[name], weights)


def test_a_round_is_the_papers_formula(scenario: Scenario) -> None:
    settings = {
        "precision": "float64",
        "dropout": 0.0,
        "optimizer": "sgd",
        "lr": 0.3,
        "alpha_lr": 0.1,
        "weight_decay": 0.0,
    }
    before, after = (play("apfl", scenario, rounds=rounds, **settings) for rounds in (1, 2))
    client, state, later = client_of(before), client_of(before).state, client_of(after).state
    assert isinstance(state, APFLState) and isinstance(later, APFLState)
    learner: Any = client.learner
    v, w, alpha = dict(state.private), dict(before.loop.state.weights), state.alpha  # type: ignore[attr-defined]
    for epoch in range(3):
        bar = {name: alpha * v[name] + (1 - alpha) * w[name] for name in v}
        g, h = (gradients(learner.model, at, learner.inputs)[0] for at in (bar, w))
        slope = sum(float(((v[name] - w[name]) * g[name]).sum()) for name in v)
        v, w = {name: v[name] - 0.3 * alpha * g[name] for name in v}, {name: w[name] - 0.3 * h[name] for name in w}
        alpha = min(1.0, max(0.0, alpha - 0.1 * slope)) if epoch == 0 else alpha
    assert 0.0 < alpha < 1.0 and alpha != state.alpha
    assert max_difference(later.private, v) < 1e-9 and later.alpha == pytest.approx(alpha, abs=1e-9)
    assert max_difference(later.weights, mixed(v, after.loop.state.weights, alpha)) < 1e-9  # type: ignore[attr-defined]


def test_the_shared_model_knows_nothing_of_the_private_one(scenario: Scenario) -> None:
    runs = [
        play("apfl", scenario, mixing=mixing, adaptive=adaptive)
        for mixing, adaptive in ((0.5, True), (0.9, False), (0.1, True))
    ]
    fedavg = play("fedavg", scenario)
    for run in runs:
        assert equal_weights(run.loop.state.weights, fedavg.loop.state.weights)  # type: ignore[attr-defined]
    assert not equal_weights(models(runs[0])["client-0"], models(runs[1])["client-0"])


def test_alpha_steps_down_its_finite_difference(scenario: Scenario) -> None:
    """One round of one step: alpha moves by -eta_alpha df(vbar)/dalpha."""
    settings = {"precision": "float64", "dropout": 0.0, "alpha_lr": 0.05}
    experiment = play("apfl", scenario, rounds=2, **settings)
    client, state = client_of(experiment), client_of(experiment).state
    assert isinstance(state, APFLState)
    shared: Weights = experiment.loop.state.weights  # type: ignore[attr-defined]
    learner: Any = client.learner

    def loss(alpha: float) -> float:
        return float(gradients(learner.model, mixed(state.private, shared, alpha), learner.inputs)[1])

    slope = (loss(state.alpha + 1e-6) - loss(state.alpha - 1e-6)) / 2e-6
    longer = client_of(play("apfl", scenario, rounds=3, **settings)).state
    assert isinstance(longer, APFLState)
    assert longer.alpha - state.alpha == pytest.approx(-0.05 * slope, rel=1e-4)
    assert abs(slope) > 1e-6


def test_alpha_stays_a_share(scenario: Scenario) -> None:
    for mixing in (0.0, 0.5, 1.0):
        state = client_of(play("apfl", scenario, mixing=mixing, alpha_lr=1e6)).state
        assert isinstance(state, APFLState)
        assert state.alpha in (0.0, 1.0)


def test_private_model_and_alpha_never_leave(scenario: Scenario) -> None:
    sheet = play("apfl", scenario).loop.sheet
    assert {row["message"] for row in sheet.rows() if row["receiver"] == "server"} == {"Size", "Update", "Evaluation"}


def test_mixtures() -> None:
    v, w = {"a": torch.tensor([1.0, 3.0])}, {"a": torch.tensor([3.0, -1.0])}
    assert mixed(v, w, 0.25)["a"].tolist() == [2.5, 0.0]


@pytest.mark.parametrize(
    ("key", "value"),
    [("mixing", -0.1), ("mixing", 1.1), ("alpha_lr", -1.0), ("fraction", 0.5), ("reset_optimizer", True)],
)
def test_what_cannot_be_set(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        resolve("apfl", {"dataset": "csbm", key: value})
