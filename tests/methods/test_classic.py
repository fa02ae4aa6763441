"""Local, Central, FedAvg, FedSGD, FedProx, FedPer: the testable properties of specs/baselines 1-7, and the general
properties of FedAvg's variants (tests/test_testing.py has those of every method).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.interface import QuorumError
from isthmus.methods.fedavg import draw
from isthmus.nn.train import Proximal
from isthmus.seeds import Stream
from isthmus.tensors import Weights, equal_weights, max_difference
from isthmus.testing import check_method

PLAIN: dict[str, Any] = {
    "hidden": (8,),
    "dropout": 0.0,
    "rounds": 5,
    "backbone": "gcn",
    "input_norm": False,
    "head": False,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"backbone": "sage"},
        {"backbone": "mlp"},
        {"reset_optimizer": True},
        {"optimizer": "sgd"},
        {"input_norm": True, "share_input_norm": False},
    ],
    ids=str,
)
def test_general_properties_of_fedavg_variants(settings: dict[str, Any]) -> None:
    skip = {"one_client_equals_local": "local keeps its optimiser"} if "reset_optimizer" in settings else {}
    check_method("fedavg", settings=settings, skip=skip)


@pytest.mark.parametrize("backbone", ["gat", "gin", "sgc", "gprgnn", "dgcn"])
def test_every_backbone_has_the_general_properties(backbone: str) -> None:
    calm = {"dprate": 0.0} if backbone == "gprgnn" else {}
    check_method("fedavg", settings={"backbone": backbone, "head": False, **calm})


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(dataset="csbm:nodes=120,classes=3,features=12,degree=4", clients=4, split="30/20/50", seed=1)


def play(method: str, scenario: Scenario, **settings: Any) -> SimulatedRun:
    flags = {"dataset": "csbm", "clients": len(scenario.parts), "seed": 1, **PLAIN, **settings}
    experiment = SimulatedRun(resolve(method, flags), scenario)
    experiment.loop.play()
    return experiment


def models(experiment: SimulatedRun) -> dict[str, Weights]:
    return {client: experiment.engine.party(client).client.export() for client in experiment.engine.parties("client")}


def only(experiment: SimulatedRun) -> Weights:
    return next(iter(models(experiment).values()))


def without_cross_edges(scenario: Scenario) -> Scenario:
    """The same graph with all cross edges gone, so that its parts are separable."""
    order = torch.cat([data.node_id for data in scenario.parts.values()])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    edges = torch.cat([data.node_id[data.edge_index] for data in scenario.parts.values()], dim=1)
    return replace(scenario, whole=replace(scenario.whole, edge_index=edges))


def test_local_sends_nothing(scenario: Scenario) -> None:
    totals = play("local", scenario).loop.totals
    assert sum(totals.training.values()) == sum(totals.setup.values()) == 0


def test_central_equals_local_with_one_client(scenario: Scenario) -> None:
    one = build_scenario(dataset="csbm:nodes=120,classes=3,features=12,degree=4", clients=1, split="30/20/50", seed=1)
    assert equal_weights(only(play("central", one)), only(play("local", one)))


@pytest.mark.parametrize("clients", [2, 5])
def test_fedsgd_mlp_weighted_by_training_nodes_equals_central_mlp(clients: int) -> None:
    """Samples of an MLP are independent, so sum_k (n_k / n) g_k is the gradient of the pooled loss (specs/baselines
    3).
    """
    cut = build_scenario(
        dataset="csbm:nodes=120,classes=3,features=12,degree=4", clients=clients, split="30/20/50", seed=1
    )
    settings = {"backbone": "mlp", "rounds": 20, "hidden": (16,), "input_norm": True}
    assert (
        max_difference(only(play("fedsgd", cut, weighting="train", **settings)), only(play("central", cut, **settings)))
        < 1e-5
    )


@pytest.mark.parametrize("backbone", ["gcn", "sage"])
def test_fedsgd_equals_central_when_nothing_is_cut(scenario: Scenario, backbone: str) -> None:
    separable = without_cross_edges(scenario)
    ours, central = (play(m, separable, backbone=backbone, rounds=20) for m in ("fedsgd", "central"))
    assert max_difference(only(ours), only(central)) < 1e-5
    assert max_difference(only(ours), only(play("central", scenario, backbone=backbone, rounds=20))) > 1e-3, (
        "cutting edges must matter"
    )


def test_fedavg_with_one_plain_sgd_step_equals_fedsgd(scenario: Scenario) -> None:
    settings = {"optimizer": "sgd", "lr": 0.5, "rounds": 8, "precision": "float64"}
    assert (
        max_difference(only(play("fedavg", scenario, **settings)), only(play("fedsgd", scenario, **settings))) < 1e-12
    )


def test_common_models_are_identical_everywhere(scenario: Scenario) -> None:
    for method in ("fedavg", "fedsgd", "fedprox"):
        first, *others = models(play(method, scenario)).values()
        assert all(equal_weights(first, other) for other in others)


def test_weighting_counts_what_it_says(scenario: Scenario) -> None:
    totals = {
        weighting: play("fedavg", scenario, weighting=weighting, rounds=1).loop.state.total  # type: ignore[attr-defined]
        for weighting in ("train", "nodes", "uniform")
    }
    assert totals == {"train": 36.0, "nodes": 120.0, "uniform": 4.0}


def test_fedavg_is_the_weighted_mean_of_the_clients(scenario: Scenario) -> None:
    """(P1) One round by hand: shares are non-negative, sum to one, and give the server's weights."""
    averaged = only(play("fedavg", scenario, rounds=1, weighting="nodes"))
    alone = models(play("local", scenario, rounds=1))
    shares = {client: data.num_nodes / 120 for client, data in scenario.parts.items()}
    assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= 0.0
    for name, tensor in averaged.items():
        expected = sum(share * alone[client][name] for client, share in shares.items())
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)


def test_fraction_draws_that_many_and_weights_sum_to_one(scenario: Scenario) -> None:
    everyone = [f"client-{i}" for i in range(10)]
    drawn = [draw(everyone, 0.3, Stream(seed)) for seed in range(20)]
    assert (
        all(len(chosen) == 3 and chosen == sorted(set(chosen)) for chosen in drawn)
        and len({tuple(chosen) for chosen in drawn}) > 5
    )
    experiment = play("fedavg", scenario, fraction=0.5, rounds=1)
    weights = only(experiment)
    alone = models(play("local", scenario, rounds=1))
    chosen = draw(scenario.parts, 0.5, Stream(1, ("server", "train", 1, "draw")))
    samples = {client: scenario.parts[client].num_train for client in chosen}
    for name, tensor in weights.items():
        expected = sum(count * alone[client][name] for client, count in samples.items()) / sum(samples.values())
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)


def test_fedprox_with_mu_zero_is_fedavg_bit_for_bit(scenario: Scenario) -> None:
    assert equal_weights(
        only(play("fedprox", scenario, mu=0.0, local_epochs=3)), only(play("fedavg", scenario, local_epochs=3))
    )


def test_fedprox_gradient_is_mu_times_the_distance() -> None:
    weights, anchor = {"w": torch.tensor([3.0, -1.0])}, {"w": torch.tensor([1.0, 1.0])}
    grads = {"w": torch.zeros(2)}
    Proximal(0.5, anchor)(weights, grads)
    assert grads["w"].tolist() == [1.0, -1.0]
    Proximal(0.5, weights)(weights, grads)  # at the anchor the term has no gradient: the first local step is FedAvg's
    assert grads["w"].tolist() == [1.0, -1.0]


def test_fedprox_first_step_is_fedavgs_and_large_mu_keeps_clients_close(scenario: Scenario) -> None:
    assert equal_weights(only(play("fedprox", scenario, mu=10.0, rounds=1)), only(play("fedavg", scenario, rounds=1)))
    settings = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.0, "local_epochs": 30, "rounds": 1}
    start = only(play("fedavg", scenario, **{**settings, "lr": 1e-30}))
    free, held = (max_difference(only(play("fedprox", scenario, mu=mu, **settings)), start) for mu in (0.0, 15.0))
    assert held < free / 5


@pytest.mark.parametrize(("layers", "same_as"), [(0, "fedavg"), (2, "local")])
def test_fedper_without_and_with_all_layers_personal(scenario: Scenario, layers: int, same_as: str) -> None:
    ours, reference = models(play("fedper", scenario, personal_layers=layers)), models(play(same_as, scenario))
    assert all(equal_weights(ours[client], reference[client]) for client in ours)


def test_fedper_shares_the_base_and_keeps_the_last_layer(scenario: Scenario) -> None:
    first, second, *_ = models(play("fedper", scenario)).values()
    assert all(torch.equal(first[name], second[name]) for name in first if name.startswith("layers.0."))
    assert not any(torch.equal(first[name], second[name]) for name in first if name.startswith("layers.1."))


def test_reference_profile_keeps_the_input_norm_at_home(scenario: Scenario) -> None:
    first, second, *_ = models(play("fedavg", scenario, input_norm=True, share_input_norm=False)).values()
    assert not torch.equal(first["input_norm.gamma"], second["input_norm.gamma"])
    assert torch.equal(first["layers.0.weight"], second["layers.0.weight"])


def test_reset_optimizer_makes_the_first_adam_step_sign_descent(scenario: Scenario) -> None:
    """FedGGR spec, section 11: 16. Every client weight with a gradient moves by lr per round."""
    before = play("local", scenario, lr=1e-30, rounds=1)
    client = "client-0"
    start = models(before)[client]
    experiment = play("fedavg", scenario, reset_optimizer=True, weight_decay=0.0, rounds=1, lr=0.01, execution="each")
    steps = experiment.engine.party(client).client.state.optimizer.steps
    assert steps == (1,)
    two = play("fedavg", scenario, reset_optimizer=True, weight_decay=0.0, rounds=2, lr=0.01, execution="each")
    assert two.engine.party(client).client.state.optimizer.steps == (1,), "the optimiser starts afresh in every round"
    moved = max_difference(only(experiment), start)
    assert moved <= 0.0101


def test_a_client_without_training_nodes_adds_exactly_nothing(scenario: Scenario) -> None:
    def unlabelled(data: NodeData) -> NodeData:
        return replace(data, train=torch.zeros_like(data.train))

    parts = dict(scenario.parts)
    parts["client-0"] = unlabelled(parts["client-0"])
    crippled = replace(scenario, parts=parts)
    fewer = replace(scenario, parts={client: data for client, data in parts.items() if client != "client-0"})
    for method in ("fedsgd", "fedavg"):
        with_it = models(play(method, crippled))["client-1"]
        assert all(torch.isfinite(tensor).all() for tensor in with_it.values())
        assert max_difference(with_it, models(play(method, fewer))["client-1"]) < 1e-6


def test_nobody_with_training_nodes_is_an_error(scenario: Scenario) -> None:
    parts = {client: replace(data, train=torch.zeros_like(data.train)) for client, data in scenario.parts.items()}
    with pytest.raises(RunError, match="no client has a training node"):
        play("fedavg", replace(scenario, parts=parts))


def test_cohort_equals_each_in_float64_over_twenty_rounds(scenario: Scenario) -> None:
    for method in ("local", "fedavg", "fedsgd", "fedprox", "fedper"):
        settings = {
            "precision": "float64",
            "rounds": 20,
            "dropout": 0.4,
            "local_epochs": 2,
            "backbone": "sage",
            "head": True,
        }
        each, together = (
            models(play(method, scenario, execution=execution, **settings)) for execution in ("each", "cohort")
        )
        assert max(max_difference(each[client], together[client]) for client in each) < 1e-10, method


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_diverging_training_is_reported_not_averaged(scenario: Scenario) -> None:
    with pytest.raises((RunError, QuorumError), match="not finite"):
        play("fedavg", scenario, lr=1e30, rounds=10, optimizer="sgd")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fraction", 0.0),
        ("lr", -1.0),
        ("local_epochs", 0),
        ("weight_decay", -0.1),
        ("hidden", "0"),
        ("backbone", "gcnn"),
        ("dropout", 1.0),
        ("loss", "mse"),
        ("weighting", "edges"),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=str(value).strip("0") or key):
        resolve("fedavg", {"dataset": "csbm"}, {key: value})
