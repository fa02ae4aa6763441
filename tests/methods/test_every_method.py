"""What every method takes, whatever it does: any score, class weights, optimisers, schedules, patience."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of_settings
from isthmus.experiments.run import SimulatedRun, scenario_of
from isthmus.methods.registry import Method, all_methods
from isthmus.methods.schedule import rate_factor
from isthmus.methods.training import TrainConfig
from isthmus.tensors import Weights, equal_weights

METHODS = [method.name for method in all_methods()]
# Clients hold classes in different numbers, so class weights matter.
SMALL: dict[str, Any] = {
    "dataset": "csbm:nodes=121,classes=2,features=5,degree=4",
    "partition": "random",
    "clients": 3,
    "split": "50/25/25",
    "rounds": 3,
    "hidden": 8,
    "lr": 0.05,
    "execution": "each",
}
NEEDED: dict[str, dict[str, Any]] = {
    "fedgcn": {"backbone": "gcn"},
    "fedpergnn": {"preset": "hifgl"},
    "fedggr": {"encoder": "projection", "embedding_width": 4, "k": 3},
    "fedstruct": {"protocol": "published", "structure_hops": 2, "nsf_dim": 4, "structure_hidden": 4},
    "hifgl": {"secmp": "plain", "lr_decay": 0.9},
    "fedstar": {"hidden": "8,8"},
    "fedsage": {"backbone": "sage"},
}


def played(method: str, **changes: Any) -> SimulatedRun:
    settings = resolve(method, {**SMALL, **NEEDED.get(method, {}), **changes})
    simulated = SimulatedRun(settings, scenario_of(settings))
    simulated.loop.play()
    return simulated


def models(simulated: SimulatedRun) -> dict[str, Weights]:
    return {
        client: export.weights
        for client, export in simulated.engine.export(simulated.settings.run.selection != "last")
        if export.weights is not None
    }


def same(first: SimulatedRun, second: SimulatedRun) -> bool:
    ours, theirs = models(first), models(second)
    return all(equal_weights(ours[client], theirs[client]) for client in ours)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_every_score(method: str) -> None:
    simulated = played(method, metric="auprc", selection="best_val_acc", rounds=2)
    for line in simulated.loop.lines:
        assert 0.0 <= line["test"] <= 1.0 and 0.0 <= line["val_accuracy"] <= 1.0
    stated = {line.key for line in sheet_of_settings(simulated.settings)}
    assert {line["message"] for line in simulated.loop.sheet.rows()} >= {"Detail"}
    assert any("Detail" in str(key) for key in stated)


@pytest.mark.parametrize("method", METHODS)
def test_class_weights_change_training_in_every_method(method: str) -> None:
    """In the first step already: not by a round more or less."""
    plain, balanced = (played(method, class_weight=each, rounds=1, selection="last") for each in ("none", "balanced"))
    assert not same(plain, balanced)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "adamw", "weight_decay": 0.1}, {"schedule": "cosine"}, {"schedule": "decay", "lr_step": 1}],
)
def test_optimisers_and_schedules_act_in_every_method(method: str, changes: dict[str, Any]) -> None:
    fixed = {"weight_decay": 0.1, "selection": "last", "schedule": "constant", "optimizer": "adam"}
    first, second = played(method, **fixed), played(method, **{**fixed, **changes})
    assert not same(first, second)


@pytest.mark.parametrize("mode", ["hierarchical", "cross-silo", "cross-device"])
@pytest.mark.parametrize("secure", [False, True])
def test_hifgl_gives_scores_in_every_mode(mode: str, secure: bool) -> None:
    simulated = played("hifgl", mode=mode, metric="auprc", class_weight="balanced", secure_sum=secure, rounds=2)
    stated = {line.key for line in sheet_of_settings(simulated.settings)}
    ledger = {
        tuple(row[name] for name in ("phase", "sender", "receiver", "message")) for row in simulated.loop.sheet.rows()
    }
    assert {row for row in ledger if row[3] in ("Detail", "ClassCounts")} == {
        tuple(key[:4]) for key in stated if key[3] in ("Detail", "ClassCounts")
    }


def test_class_weights_of_hifgl_are_those_of_the_whole_loss() -> None:
    """One silo, no cross edges: HiFGL's step is the central model's, with balanced classes too."""
    shared = {"clients": 1, "class_weight": "balanced", "rounds": 1, "weight_decay": 0.0, "dropout": 0.0, "hidden": 8}
    hifgl = played("hifgl", mode="cross-silo", one_neighbour="allow", precision="float64", backbone="gcn", **shared)
    central = played(
        "central", backbone="gcn", precision="float64", input_norm=False, head=False, selection="last", **shared
    )
    (ours,), (theirs,) = models(hifgl).values(), models(central).values()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-9)


def test_patience_ends_training_once_validation_stops_improving() -> None:
    simulated = played("fedavg", rounds=200, patience=6, eval_every=2, selection="best_val_acc", lr=0.1)
    lines, best = simulated.loop.lines, simulated.loop.best
    assert best is not None and lines[-1]["round"] - best["round"] == 6 and lines[-1]["round"] < 200
    assert max(line["val"] for line in lines) == best["val"]


def test_a_score_a_method_cannot_give_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Method, "has_details", property(lambda self: False))
    with pytest.raises(ConfigError, match="only accuracy"):
        resolve("fedavg", {**SMALL, "metric": "auprc"})
    assert resolve("fedavg", SMALL).run.metric == "accuracy"


def test_rates_of_the_schedules() -> None:
    constant, decay = TrainConfig(), TrainConfig(schedule="decay", lr_decay=0.5, lr_step=2)
    cosine = TrainConfig(schedule="cosine", schedule_rounds=10)
    assert [rate_factor(constant, t) for t in (1, 50)] == [1.0, 1.0]
    assert [rate_factor(decay, t) for t in (1, 2, 3, 5)] == [1.0, 1.0, 0.5, 0.25]
    assert rate_factor(cosine, 1) == 1.0 and rate_factor(cosine, 6) == pytest.approx(0.5)
    assert 0.0 < rate_factor(cosine, 10) < 0.03
    assert resolve("fedavg", {**SMALL, "schedule": "cosine"}).method_config.schedule_rounds == 3
