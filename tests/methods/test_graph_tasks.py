"""Classic methods on sets of graphs: shared convolutions, personal ends, pooled reference, rare classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from isthmus.data.graphscenario import GraphScenario, build_graph_scenario
from isthmus.errors import ConfigError, IsthmusError, ProtocolError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import pool_graphs, view_of
from isthmus.nn.registry import backbones
from isthmus.tensors import Weights, equal_weights, max_difference
from isthmus.testing import check_method

SMALL: dict[str, Any] = {
    "preset": "fedstar",
    "hidden": (8, 8),
    "rounds": 3,
    "batch_size": 16,
    "eval_every": 1,
    "lr": 0.01,
}


def play(method: str, scenario: GraphScenario, until: int | None = None, **settings: Any) -> SimulatedRun:
    flags = {"dataset": "motifs", "clients": len(scenario.parts), "seed": 2, **SMALL, **settings}
    experiment = SimulatedRun(resolve(method, flags), scenario)
    experiment.loop.play(until=until)
    return experiment


def models(experiment: SimulatedRun) -> dict[str, Weights]:
    return {client: experiment.engine.party(client).client.export() for client in experiment.engine.parties("client")}


@pytest.mark.parametrize("method", ["local", "fedavg", "fedsgd", "fedprox", "fedper", "central"])
@pytest.mark.parametrize("backbone", backbones())
def test_every_classic_method_runs_on_graphs(motifs: GraphScenario, method: str, backbone: str) -> None:
    experiment = play(method, motifs, backbone=backbone, rounds=1)
    assert experiment.settings.run.preset == "fedstar" and experiment.settings.run.execution == "each"
    assert 0.0 <= experiment.loop.lines[-1]["test"] <= 1.0


def test_one_client_equals_local_bit_for_bit() -> None:
    one = build_graph_scenario(dataset="motifs", clients=1, split="stratified:60/20/20", seed=2)
    assert equal_weights(models(play("fedavg", one))["client-0"], models(play("local", one))["client-0"])


def test_where_features_differ_only_what_fits_is_shared(mixed: GraphScenario) -> None:
    assert not view_of(mixed.parts).alike
    found = list(models(play("fedavg", mixed)).values())
    for name in found[0]:
        same = all(
            model[name].shape == found[0][name].shape and torch.equal(model[name], found[0][name]) for model in found
        )
        assert same == (not name.startswith(("pre.", "readout."))), name


@pytest.mark.parametrize("backbone", backbones())
def test_fedper_shares_the_convolutions_alone(motifs: GraphScenario, backbone: str) -> None:
    first, second, _ = models(play("fedper", motifs, backbone=backbone)).values()
    for name in first:
        assert torch.equal(first[name], second[name]) == name.startswith(("convs.", "gamma")), name


@pytest.mark.parametrize(
    "method", ["local", "fedavg", "fedsgd", "fedprox", "fedper", "fedsage", "gcfl", "gcflplus", "fedstar"]
)
def test_general_properties(method: str) -> None:
    settings: dict[str, Any] = {
        "fedstar": {"first_weights": "common", "degrees": 4, "steps": 4},
        "fedsage": {"backbone": "sage"},
    }
    skip = {
        "fedsgd": "a step of all graphs a round, not one a batch",
        "fedprox": "it pulls from the second batch of a round on",
        "fedstar": "two channels; see the test against sharing=none",
    }
    skipped = {"one_client_equals_local": skip[method]} if method in skip else {}
    check_method(method, task="graph", settings=settings.get(method), skip=skipped)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedper", "fedsage", "gcfl", "gcflplus", "fedstar"])
def test_a_round_starts_from_what_was_downloaded(motifs: GraphScenario, method: str) -> None:
    """Evaluation hands every client the common weights: a client that ignored the round's own download would end
    elsewhere without it.
    """
    often, once = (models(play(method, motifs, rounds=4, eval_every=every)) for every in (1, 99))
    assert all(equal_weights(often[client], once[client]) for client in often)


@pytest.mark.parametrize(
    ("method", "settings", "kept"),
    [
        ("fedper", {}, "post.weight"),
        ("gcfl", {}, "readout.bias"),
        ("gcflplus", {}, "pre.weight"),
        ("fedstar", {}, "convs.0.inner.weight"),
        ("fedstar", {"decoupled": False, "sharing": "all"}, "pre.weight"),
        ("fedstar", {"sharing": "convs"}, "structure.embed.weight"),
    ],
)
def test_a_server_that_asks_for_more_is_refused(
    motifs: GraphScenario, method: str, settings: dict[str, Any], kept: str
) -> None:
    """A client answers with the weights a message names; what is personal must not be among them, whatever the server
    says.
    """
    experiment = play(method, motifs, rounds=2, **settings)
    client = experiment.engine.party("client-0").client
    mine = {kept: client.state.weights[kept]}
    with pytest.raises(ProtocolError, match=f"never leave this client .{kept}"):
        client.allowed(mine)
    state: Any = experiment.loop.state
    clustered = isinstance(state.weights, tuple)
    greedy = ({**state.weights[0], **mine}, *state.weights[1:]) if clustered else {**state.weights, **mine}
    hostile = play(method, motifs, rounds=4, until=2, **settings)
    hostile.loop.state = replace(hostile.loop.state, weights=greedy)  # type: ignore[type-var]
    with pytest.raises(IsthmusError, match="never leave this client"):
        hostile.loop.play()
    quiet = play("fedstar", motifs, rounds=1, sharing="none").engine.party("client-0").client
    with pytest.raises(ProtocolError):
        quiet.allowed({"structure.embed.weight": quiet.state.weights["structure.embed.weight"]})


def test_what_cannot_be_is_refused_in_one_line(mixed: GraphScenario) -> None:
    with pytest.raises(ConfigError, match="cannot be pooled"):
        play("central", mixed)
    with pytest.raises(ConfigError, match="one common model"):
        play("fedsgd", mixed)
    with pytest.raises(ConfigError, match="unknown backbone 'gatt': did you mean 'gat'"):
        play("fedavg", mixed, backbone="gatt")
    with pytest.raises(ConfigError, match="gin has no options"):
        play("fedavg", mixed, backbone="gin", hops=2)
    for key in ("head", "input_norm"):
        with pytest.raises(ConfigError, match=f"{key}=true is for node tasks"):
            play("fedavg", mixed, **{key: True})


def test_pooled_graphs_are_the_graphs_of_all_clients(motifs: GraphScenario) -> None:
    pooled, parts = pool_graphs(motifs.parts), list(motifs.parts.values())
    assert pooled.num_graphs == sum(part.num_graphs for part in parts) and pooled.num_train == sum(
        part.num_train for part in parts
    )
    last = pooled.select(torch.tensor([pooled.num_graphs - 1]))
    alone = parts[-1].select(torch.tensor([parts[-1].num_graphs - 1]))
    assert torch.equal(last.edge_index, alone.edge_index) and torch.equal(last.y, alone.y)


def test_fedsgd_equals_one_full_batch_step_of_central(motifs: GraphScenario) -> None:
    settings = {"rounds": 4, "dropout": 0.0, "batch_size": 10_000, "precision": "float64", "weighting": "train"}
    ours = models(play("fedsgd", motifs, **settings))["client-0"]
    settings.pop("weighting")
    assert max_difference(ours, models(play("central", motifs, **settings))["central"]) < 1e-9


def test_class_weights_and_metrics_reach_graph_tasks(motifs: GraphScenario) -> None:
    plain = models(play("local", motifs))["client-0"]
    assert max_difference(plain, models(play("local", motifs, class_weight="balanced"))["client-0"]) > 0.0
    line = play("fedavg", motifs, metric="macro_f1").loop.lines[-1]
    assert 0.0 <= line["test"] <= 1.0 and "test_accuracy" in line


def test_a_resumed_graph_run_is_bit_equal(motifs: GraphScenario) -> None:
    plain = models(play("fedavg", motifs))
    experiment = SimulatedRun(resolve("fedavg", {"dataset": "motifs", "clients": 3, "seed": 2, **SMALL}), motifs)
    for step in range(1, experiment.loop.steps + 1):
        experiment.loop.play(until=step)
        experiment.loop.checkpoint()
        experiment.loop.restore()
    again = models(experiment)
    assert all(equal_weights(plain[client], again[client]) for client in plain)


@pytest.mark.parametrize(("method", "setting"), [("fedprox", {"mu": 0.0}), ("fedper", {"personal_layers": 0})])
def test_without_their_own_term_they_are_fedavg(
    motifs: GraphScenario, mixed: GraphScenario, method: str, setting: dict[str, Any]
) -> None:
    for scenario in (motifs, mixed):
        ours, plain = models(play(method, scenario, **setting)), models(play("fedavg", scenario))
        assert all(equal_weights(ours[client], plain[client]) for client in ours)
