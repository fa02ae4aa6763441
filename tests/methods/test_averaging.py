"""Aggregation that one client cannot move far, without masks and behind them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.engines.local import LocalEngine
from isthmus.methods.averaging import aggregated, norm, parties_of_sum
from isthmus.methods.fedavg import Broadcast, FedAvgConfig, Update
from isthmus.methods.fedsgd import Step
from isthmus.privacy.guard import fixed_groups
from isthmus.tensors import Weights, equal_weights, max_difference, scaled
from isthmus.testing import check_method

CLIENTS = 9
SMALL: dict[str, Any] = {
    "dataset": "csbm",
    "clients": CLIENTS,
    "seed": 5,
    "rounds": 2,
    "hidden": (8,),
    "execution": "each",
    "dropout": 0.0,
    "head": False,
    "input_norm": False,
}
HOSTILE = "client-4"
GROUPS = {"groups": 3, "aggregation": "median"}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    place = "csbm:nodes=270,classes=3,features=16,degree=4"
    return build_scenario(dataset=place, clients=CLIENTS, split="40/20/40", seed=5)


class Hostile(LocalEngine):
    """One client sends what it likes: its honest message changed by ``lie``."""

    def __init__(self, *arguments: Any, lie: Any, handler: str = "local_update", **options: Any) -> None:
        super().__init__(*arguments, **options)
        client: Any = self.party(HOSTILE).client
        honest = getattr(client, handler)
        setattr(client, handler, lambda common: lie(honest(common), common))


def opposite(factor: float) -> Any:
    def lie(update: Update, common: Broadcast) -> Update:
        own = scaled(update.weights, 1.0 / update.share)
        sent = {name: start - factor * (own[name] - start) for name, start in common.weights.items()}
        return Update(scaled(sent, update.share), update.share)

    return lie


def play(scenario: Scenario, method: str = "fedavg", lie: Any = None, **settings: Any) -> SimulatedRun:
    given: dict[str, Any] = {**SMALL, **settings}
    handler = "gradient" if method == "fedsgd" else "local_update"
    attack = {} if lie is None else {"engine": Hostile, "lie": lie, "handler": handler}
    simulated = SimulatedRun(resolve(method, given), scenario, **attack)
    simulated.loop.play()
    return simulated


def weights(simulated: SimulatedRun) -> Weights:
    found: Weights = simulated.loop.state.weights  # type: ignore[attr-defined]
    return found


# -- by hand ---------------------------------------------------------------------------------------


def steps(*rows: list[float]) -> dict[str, Tensor]:
    return {"w": torch.tensor(rows)}


@pytest.mark.parametrize(
    ("aggregation", "trim", "rows", "wanted"),
    [
        ("median", 0.2, [[1.0, 5.0], [2.0, -9.0], [99.0, 6.0]], [2.0, 5.0]),
        ("median", 0.2, [[1.0], [2.0], [4.0], [99.0]], [3.0]),
        ("trimmed", 0.25, [[1.0], [2.0], [4.0], [99.0]], [3.0]),
        ("trimmed", 0.34, [[-50.0], [2.0], [4.0]], [2.0]),
        ("bounded", 0.2, [[3.0, 4.0], [0.0, 1.0], [0.0, 50.0]], [3.0 / 3, (4.0 + 1.0 + 5.0) / 3]),
        ("bounded", 0.2, [[0.0, 0.0], [0.0, 0.0], [0.0, 7.0]], [0.0, 0.0]),
    ],
)
def test_by_hand(aggregation: str, trim: float, rows: list[list[float]], wanted: list[float]) -> None:
    assert aggregated(steps(*rows), aggregation, trim)["w"].tolist() == pytest.approx(wanted)


@given(
    honest=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=9),
    hostile=st.floats(-(2.0**99), 2.0**99, width=32),
    aggregation=st.sampled_from(["median", "trimmed"]),
)
def test_one_number_cannot_leave_the_range_of_the_others(honest: list[float], hostile: float, aggregation: str) -> None:
    found = float(aggregated(steps(*[[value] for value in [*honest, hostile]]), aggregation, 0.4)["w"])
    assert min(honest) - 1e-5 <= found <= max(honest) + 1e-5


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2), min_size=1, max_size=9))
def test_no_step_is_longer_than_the_median_one(rows: list[list[float]]) -> None:
    lengths = sorted(math.hypot(*row) for row in rows)
    middle = (lengths[(len(rows) - 1) // 2] + lengths[len(rows) // 2]) / 2
    assert norm(aggregated(steps(*rows), "bounded", 0.2)) <= middle * (1 + 1e-5) + 1e-6


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation": "median"},
        {"aggregation": "trimmed"},
        {"aggregation": "bounded"},
        {"max_step": 0.3},
        {"secure_sum": True, "max_step": 0.3},
        {"secure_sum": True, **GROUPS},
        {"secure_sum": True, "groups": 3, "aggregation": "bounded"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_hostile_client_moves_the_mean_anywhere_and_these_hardly(scenario: Scenario, options: dict[str, Any]) -> None:
    honest = weights(play(scenario, **options))
    spoiled = weights(play(scenario, lie=opposite(1000.0), **options))
    moved = norm({name: spoiled[name] - honest[name] for name in honest})
    masked = {"secure_sum": options.get("secure_sum", False)}
    plain, wrecked = weights(play(scenario, **masked)), weights(play(scenario, lie=opposite(1000.0), **masked))
    assert norm({name: wrecked[name] - plain[name] for name in plain}) > 5, "the attack works without a defence"
    assert moved < 1.5, "two rounds of ordinary steps"


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedsgd", "apfl", "fedper", "adafgl", "ditto", "moon"])
def test_groups_behind_masks_are_groups(scenario: Scenario, method: str) -> None:
    settings = {"optimizer": "sgd", "lr": 0.1, "precision": "float64", **GROUPS}
    clear, masked = (play(scenario, method, secure_sum=on, **settings) for on in (False, True))
    assert 0.0 < max_difference(weights(clear), weights(masked)) < 1e-9
    assert max_difference(weights(clear), weights(play(scenario, method, **settings | {"groups": 0}))) > 1e-6


def test_gradients_are_aggregated_too(scenario: Scenario) -> None:
    def lie(step: Step, common: Broadcast) -> Step:
        return Step(scaled(step.gradients, -1e4), step.share)

    given: dict[str, Any] = {"method": "fedsgd", "optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}
    far, near = (
        max_difference(weights(play(scenario, **given, **more)), weights(play(scenario, lie=lie, **given, **more)))
        for more in ({}, {"aggregation": "median"})
    )
    assert far > 10.0 and near < 0.1


@pytest.mark.parametrize("share", [1e-300, -1.0, 0.0, 1e6])
@pytest.mark.parametrize("aggregation", ["median", "bounded"])
def test_a_false_share_gains_nothing(scenario: Scenario, share: float, aggregation: str) -> None:
    def lie(update: Update, common: Broadcast) -> Update:
        return Update(scaled(update.weights, -10.0), share)

    honest = weights(play(scenario, aggregation=aggregation))
    spoiled = weights(play(scenario, aggregation=aggregation, lie=lie))
    assert norm({name: spoiled[name] - honest[name] for name in honest}) < 1.5


def test_a_bound_that_nobody_reaches_changes_nothing_and_the_length_is_logged(scenario: Scenario) -> None:
    free, bound = play(scenario), play(scenario, max_step=1e6)
    assert max_difference(weights(free), weights(bound)) < 1e-5
    assert 0.0 < bound.loop.lines[-1]["log"]["step_norm"] < 10.0 and free.loop.lines[-1]["log"] == {}
    assert "step_norm" in play(scenario, aggregation="median").loop.lines[-1]["log"]


def test_clients_trained_together_give_the_same_median(scenario: Scenario) -> None:
    each, together = (play(scenario, aggregation="median", execution=how, rounds=1) for how in ("each", "cohort"))
    assert max_difference(weights(each), weights(together)) < 1e-5


def test_the_defaults_are_fedavg_to_the_bit(scenario: Scenario) -> None:
    plain = play(scenario, aggregation="mean", groups=0, max_step=0.0, trim=0.3)
    assert equal_weights(weights(plain), weights(play(scenario)))


@pytest.mark.parametrize("options", [{"aggregation": "median"}, {"max_step": 0.5, "aggregation": "bounded"}])
def test_general_properties_hold(options: dict[str, Any]) -> None:
    ran = check_method("fedavg", settings=options, skip={"one_client_equals_local": "rounding of the step"})
    assert "wire_equals_declaration" in ran and "resume_is_bit_equal" in ran


def test_general_properties_hold_with_groups() -> None:
    skip = {
        "one_client_equals_local": "one client is no group",
        "identical_clients_stay_identical": "fewer clients than the groups need",
        "order_does_not_matter": "groups go by the clients' names",
    }
    assert "wire_equals_declaration" in check_method("fedavg", settings=GROUPS, clients=9, skip=skip)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("fedavg", {"aggregation": "median", "secure_sum": True}, "set groups=3 or more"),
        ("fedsgd", {"aggregation": "trimmed", "secure_sum": True}, "which secure_sum=true hides"),
        ("fedavg", {"groups": 2, "aggregation": "median"}, "of two, none is the odd one"),
        ("fedavg", {"groups": 3}, "groups without aggregation change nothing"),
        (
            "fedavg",
            {"groups": 3, "aggregation": "trimmed"},
            "leaves nobody out: set trim to at least 0.334",
        ),
        ("fedavg", {"groups": 3, "aggregation": "median", "fraction": 0.5}, "leave fraction at 1"),
        ("fedavg", {"trim": 0.5, "aggregation": "trimmed"}, r"trim must lie in \(0, 0.5\)"),
        ("fedavg", {"max_step": -1.0}, "max_step must be at least 0"),
        ("gcfl", {"aggregation": "median"}, "gcfl does not average its clients as fedavg does: leave aggregation out"),
        ("fedpergnn", {"max_step": 1.0, "preset": "hifgl"}, "fedpergnn does not average"),
        ("fedgta", {"aggregation": "median"}, "fedgta does not average"),
        ("fedpub", {"groups": 3, "aggregation": "median"}, "leave aggregation and groups out"),
        ("fedtad", {"max_step": 1.0}, "fedtad does not average"),
        ("fedstar", {"sharing": "none", "max_step": 1.0}, "sharing=none sends nothing"),
        ("fedspray", {"aggregation": "median"}, "aggregation"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(method: str, options: dict[str, Any], reason: str) -> None:
    dataset = "motifs" if method == "fedstar" else "cora"
    with pytest.raises(ConfigError, match=reason):
        resolve(method, {"dataset": dataset, **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"groups": 4, "aggregation": "median"}, "groups=4 needs at least 12 clients, 3 in each, and there are 9"),
        ({"aggregation": "trimmed", "trim": 0.1}, "trim=0.1 of 9 clients leaves nobody out"),
        ({"aggregation": "trimmed", "trim": 0.2, "fraction": 0.4}, "of 4 clients leaves nobody out"),
    ],
)
def test_too_few_clients_are_refused_before_the_first_round(
    scenario: Scenario, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        SimulatedRun(resolve("fedavg", {**SMALL, **options}), scenario)


def test_noise_of_a_total_is_that_of_its_group() -> None:
    """epsilon_of_totals counts the noise of those in one total."""

    def parties(masked: bool, drawn: int = 10, **options: Any) -> int:
        return parties_of_sum(FedAvgConfig(**options), drawn, 10, masked)

    assert parties(True) == parties(False) == 10 and parties(False, drawn=4) == 4
    assert parties(True, drawn=4) == 5, "two groups"
    assert parties(True, groups=3, aggregation="median") == 3 == min(map(len, fixed_groups(map(str, range(10)), 3)))
    assert parties(False, aggregation="median") == 1
