"""Differential privacy of what clients send in training: clipped and noisy on the wire, counted as dp-accounting
counts, off by default.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from faults import Fault, FaultyEngine
from torch import Tensor

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.ledger import differences
from isthmus.methods.fedavg import Update
from isthmus.methods.fedsgd import Step
from isthmus.methods.training import NoisyState
from isthmus.privacy.dp import Mechanism
from isthmus.tensors import Weights, equal_weights

METHODS = ["fedavg", "fedprox", "fedper", "fedsgd"]
FLAGS: dict[str, Any] = {
    "dataset": "csbm",
    "clients": 3,
    "seed": 5,
    "rounds": 3,
    "hidden": (8,),
    "weighting": "uniform",
    "execution": "each",
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(dataset="csbm:nodes=90,classes=3,features=16,degree=4", clients=3, split="30/20/50", seed=5)


class Recording(LocalEngine):
    """Writes down what each client receives and what it answers in training."""

    heard: list[tuple[Any, Any]]

    def _invoke(self, call: Any) -> Any:
        outcome = super()._invoke(call)
        if isinstance(outcome, Update | Step):
            self.__dict__.setdefault("heard", []).append((call.argument, outcome))
        return outcome


def settings(method: str = "fedavg", **changes: Any) -> Settings:
    return resolve(method, {**FLAGS, **changes})


def play(
    scenario: Scenario,
    method: str = "fedavg",
    engine: type[LocalEngine] = LocalEngine,
    plan: Any = None,
    **changes: Any,
) -> SimulatedRun:
    options = {} if plan is None else {"plan": plan}
    experiment = SimulatedRun(settings(method, **changes), scenario, engine=engine, **options)
    experiment.loop.play()
    return experiment


def common(experiment: SimulatedRun) -> Weights:
    state: Any = experiment.loop.state
    weights: Weights = state.weights
    return weights


def sent(experiment: SimulatedRun) -> list[Tensor]:
    """What each answer adds to the weights it answers, or its gradient; without the share 1/3."""
    engine: Any = experiment.engine
    flat = []
    for received, answer in engine.heard:
        if isinstance(answer, Update):
            parts = [answer.weights[name] / answer.share - received.weights[name] for name in received.weights]
        else:
            parts = [answer.gradients[name] / answer.share for name in received.weights]
        flat.append(torch.cat([part.flatten() for part in parts]).double())
    return flat


@pytest.mark.parametrize("method", METHODS)
def test_without_clip_it_is_the_method_bit_for_bit(scenario: Scenario, method: str) -> None:
    plain, off = play(scenario, method), play(scenario, method, dp_clip=0.0, dp_noise=0.0, dp_delta=0.5)
    assert equal_weights(common(plain), common(off)) and off.privacy is None
    # Clipping that clips nothing changes no more than one rounding per round.
    wide = play(scenario, method, dp_clip=1e6)
    for name, tensor in common(plain).items():
        torch.testing.assert_close(common(wide)[name], tensor, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_on_the_wire_is_no_longer_than_the_clip(scenario: Scenario, method: str) -> None:
    free = sent(play(scenario, method, Recording, precision="float64"))
    clip = min(float(update.norm()) for update in free) / 2
    bound = sent(play(scenario, method, Recording, precision="float64", dp_clip=clip))
    assert len(bound) == len(free) == 9
    norms = torch.tensor([float(update.norm()) for update in bound])
    assert bool((norms <= clip * (1 + 1e-9)).all()) and bool((norms > 0.99 * clip).any())
    cosine = torch.nn.functional.cosine_similarity(free[0], bound[0], dim=0)
    assert cosine > 1 - 1e-9, "shortened, not turned"


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_noise_has_the_stated_scale_and_is_each_clients_own(scenario: Scenario, method: str) -> None:
    clip, noise = 0.01, 50.0
    wide: dict[str, Any] = {"precision": "float64", "hidden": (64,), "dp_clip": clip, "dp_noise": noise}
    updates = torch.stack(sent(play(scenario, method, Recording, rounds=4, **wide)))
    count = updates.numel()
    # The clipped signal adds at most clip^2 per message to the sum of squares.
    assert abs(float(updates.square().mean().sqrt()) / (clip * noise) - 1) < 5 / (2 * count) ** 0.5
    correlation = torch.corrcoef(updates) - torch.eye(len(updates), dtype=torch.float64)
    assert float(correlation.abs().max()) < 6 / updates.shape[1] ** 0.5, "independent over clients and rounds"
    again = sent(play(scenario, method, Recording, rounds=1, **wide))
    assert float((again[0] - updates[0]).abs().max()) > clip, "the seed does not give the noise away"


def test_a_replayed_round_releases_the_same_numbers(scenario: Scenario) -> None:
    class Both(FaultyEngine, Recording):
        pass

    fault = Fault("client-2", "train", 2, "local_update", kind="crashed")
    experiment = play(scenario, engine=Both, plan=[fault], dp_clip=0.1, dp_noise=1.0)
    engine: Any = experiment.engine
    assert engine.rollbacks == 1
    answers = [answer for _, answer in engine.heard]
    # Rounds 1 (three clients), 2 (two, the third is down), then both again from the tag after setup.
    assert len(answers) == 3 + 2 + 3 + 3 + 3
    for first, replayed in zip(answers[:5], answers[5:10], strict=True):
        assert equal_weights(first.weights, replayed.weights)


def test_noise_follows_secret_purpose_and_numbers() -> None:
    mechanism, secret = Mechanism(1.0, 1.0), bytes(range(32))
    update = {"w": torch.linspace(-0.1, 0.1, 50, dtype=torch.float64)}

    def noise(update: Weights, secret: bytes = secret, purpose: tuple[str | int, ...] = ("train", 1)) -> Tensor:
        return mechanism.release_update(update, secret=secret, purpose=purpose).weights["w"] - update["w"]

    assert torch.equal(noise(update), noise(update))
    other = {"w": update["w"] + 1e-9}
    for changed in (
        noise(other),
        noise(update, bytes(32)),
        noise(update, purpose=("train", 2)),
        noise(update, purpose=("train", "1")),
    ):
        assert float((changed - noise(update)).abs().max()) > 0.1
    with pytest.raises(ValueError, match="32 bytes"):
        noise(update, b"short")


def test_the_secret_stays_with_the_party(scenario: Scenario) -> None:
    experiment = play(scenario, dp_clip=0.1, dp_noise=1.0)
    states = [experiment.engine.party(name).client.state for name in experiment.engine.parties("client")]
    assert all(isinstance(state, NoisyState) for state in states) and len({state.secret for state in states}) == 3
    assert not isinstance(play(scenario, dp_clip=0.1).engine.party("client-0").client.state, NoisyState), (
        "no noise, no secret"
    )


def test_a_resumed_run_goes_on_with_the_same_secret(scenario: Scenario, tmp_path: Path) -> None:
    private = resolve("fedavg", {**FLAGS, "dp_clip": 0.1, "dp_noise": 1.0}, {"checkpoint.every": 1})

    def secrets_of(experiment: SimulatedRun) -> list[bytes]:
        return [experiment.engine.party(name).client.state.secret for name in experiment.engine.parties("client")]

    first = SimulatedRun(private, scenario)
    folder = RunFolder.create(tmp_path / "run", first.settings.to_toml(), {})
    first.engine.keep_tags(folder.store)
    first.new_loop(folder).play(until=2)
    folder.close()
    second = SimulatedRun(private, scenario)
    assert secrets_of(second) != secrets_of(first), "made afresh, until the checkpoint is read"
    result = second.play(RunFolder.open(tmp_path / "run"), resumed=True)
    assert secrets_of(second) == secrets_of(first) and result["privacy"] == first.privacy


@pytest.mark.parametrize(("method", "epochs", "releases"), [("fedavg", 2, 3), ("fedsgd", 2, 6)])
def test_epsilon_is_that_of_dp_accounting(scenario: Scenario, method: str, epochs: int, releases: int) -> None:
    stated = SimulatedRun(
        settings(method, local_epochs=epochs, dp_clip=0.5, dp_noise=4.0, dp_delta=1e-6, secure_sum=True), scenario
    ).privacy
    assert stated is not None and (stated["releases"], stated["unit"], stated["delta"]) == (releases, "client", 1e-6)
    for key, multiplier in (
        ("epsilon", 4.0 / 2),
        ("epsilon_of_totals", 4.0 * 3**0.5 / 2),
    ):  # all data replaced: sensitivity 2 clip
        accountant = dp_accounting.rdp.RdpAccountant()
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), releases)
        assert stated[key] == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)
    assert stated["epsilon_of_totals"] < stated["epsilon"]


def test_the_result_states_epsilon_and_warns(
    scenario: Scenario, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = SimulatedRun(settings(dp_clip=0.1, dp_noise=5.0), scenario)
    folder = RunFolder.create(tmp_path / "run", experiment.settings.to_toml(), {})
    with caplog.at_level(logging.WARNING, logger="isthmus"):
        result = experiment.play(folder, resumed=False)
    assert result["privacy"] == experiment.privacy and "epsilon_of_totals" not in result["privacy"]
    assert (
        "times as long as the longest signal" in result["privacy"]["warning"]
        and "evaluation" in result["privacy"]["not_covered"]
    )
    assert (
        result["privacy"]["warning"] in caplog.text
        and result["privacy"]["warning"] in (tmp_path / "run" / "log.txt").read_text()
    )
    assert differences(experiment.loop.sheet, sheet_of(experiment.settings.method)) == []


def test_clip_alone_promises_nothing(scenario: Scenario) -> None:
    stated = SimulatedRun(settings(dp_clip=0.1), scenario).privacy
    assert stated is not None and stated["epsilon"] is None and "no privacy" in stated["warning"]


def test_masks_and_noise_go_together(scenario: Scenario) -> None:
    experiment = play(scenario, dp_clip=0.1, dp_noise=0.1, secure_sum=True)
    assert {row["protection"] for row in experiment.loop.sheet.rows() if row["message"] == "Update"} == {"masked"}


def test_clients_are_run_one_by_one(scenario: Scenario) -> None:
    with pytest.raises(ConfigError, match="execution=each"):
        settings(dp_clip=1.0, execution="cohort")
    auto = settings(execution="auto")
    assert SimulatedRun(auto, scenario).settings.run.execution == "cohort"
    private = replace(auto, method_config=replace(auto.method_config, dp_clip=1.0))
    assert SimulatedRun(private, scenario).settings.run.execution == "each"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dp_noise": 1.0}, "set dp_clip"),
        ({"dp_clip": 1.0, "weighting": "train"}, "weighting=uniform"),
        ({"dp_clip": 1.0, "weighting": "nodes"}, "weighting=uniform"),
    ],
)
def test_settings_that_protect_nobody_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        settings(**changes)


def test_the_missing_extra_is_named_before_anything_runs(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp", None)
    with pytest.raises(ConfigError, match=r"isthmus\[dp\]"):
        SimulatedRun(settings(dp_clip=1.0, dp_noise=1.0), scenario)
