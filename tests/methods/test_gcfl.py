"""GCFL, GCFL+ and FedSage: cuts, what they reduce to, and the general properties."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.data.graphscenario import GraphScenario, build_graph_scenario
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.methods.gcfl import (
    GCFLConfig,
    ServerState,
    cluster_and_average,
    facts,
    gcfl_round,
    minimum_cut,
)
from isthmus.methods.gcflplus import similarity
from isthmus.methods.single_models import LocalModel
from isthmus.metrics.time_warping import dtw
from isthmus.tensors import Weights, equal_weights
from isthmus.testing import check_method

SMALL: dict[str, Any] = {"hidden": (8, 8), "rounds": 3, "batch_size": 16, "eval_every": 1, "lr": 0.01, "seed": 2}
CLIENTS = tuple(f"client-{i}" for i in range(6))


@pytest.fixture(scope="module")
def motifs() -> GraphScenario:
    return build_graph_scenario(dataset="motifs", clients=4, split="stratified:60/20/20", seed=2)


@pytest.fixture(scope="module")
def nodes() -> Scenario:
    return build_scenario(
        dataset="csbm:nodes=120,classes=3,features=16,degree=4", partition="random", clients=4, split="30/20/50", seed=5
    )


def play(method: str, scenario: Any, **settings: Any) -> SimulatedRun:
    experiment = SimulatedRun(
        resolve(method, {"dataset": scenario.dataset, "clients": len(scenario.parts), **SMALL, **settings}), scenario
    )
    experiment.loop.play()
    return experiment


def models(experiment: SimulatedRun) -> dict[str, Weights]:
    return {client: experiment.engine.party(client).client.export() for client in experiment.engine.parties("client")}


def all_equal(a: dict[str, Weights], b: dict[str, Weights]) -> bool:
    return a.keys() == b.keys() and all(equal_weights(a[client], b[client]) for client in a)


@pytest.mark.parametrize("method", ["gcfl", "gcflplus"])
def test_general_properties(method: str) -> None:
    check_method(
        method,
        settings={"eps1": 10.0, "eps2": 0.0, "warmup": 3} | ({"window": 2} if method == "gcflplus" else {}),
        skip={"order_does_not_matter": "a cut of equal value may fall either way; see the test without cuts"},
    )
    check_method(method, skip={"cohort_equals_each": "each only"})


def test_fedsage_is_fedavg_with_sage(nodes: Scenario, motifs: GraphScenario) -> None:
    check_method("fedsage")
    for scenario in (nodes, motifs):
        assert all_equal(
            models(play("fedsage", scenario, backbone="sage")), models(play("fedavg", scenario, backbone="sage"))
        )
    with pytest.raises(ConfigError, match="use the method fedavg"):
        resolve("fedsage", {"dataset": "chem", "backbone": "gin"})
    assert resolve("fedsage", {"dataset": "chem"}).method_config.backbone == "sage"


@pytest.mark.parametrize("method", ["gcfl", "gcflplus"])
def test_never_cut_it_is_fedavg_on_nodes_and_fedper_on_graphs(
    method: str, nodes: Scenario, motifs: GraphScenario
) -> None:
    never = {"eps1": 0.0, "warmup": 0}
    assert all_equal(models(play(method, nodes, **never)), models(play("fedavg", nodes, execution="each")))
    assert all_equal(models(play(method, motifs, **never)), models(play("fedper", motifs)))


@pytest.mark.parametrize("method", ["gcfl", "gcflplus"])
def test_clusters_partition_the_clients_and_only_refine(method: str, motifs: GraphScenario) -> None:
    settings = {"eps1": 100.0, "eps2": 0.0, "warmup": 1, "rounds": 6} | ({"window": 2} if method == "gcflplus" else {})
    experiment = SimulatedRun(resolve(method, {"dataset": "motifs", "clients": 4, **SMALL, **settings}), motifs)
    before = [set(motifs.parts)]
    for step in range(1, experiment.loop.steps + 1):
        experiment.loop.play(until=step)
        now = [set(cluster) for cluster in experiment.loop.state.clusters]  # type: ignore[attr-defined]
        assert sorted(client for cluster in now for client in cluster) == sorted(motifs.parts)
        assert all(any(cluster <= old for old in before) for cluster in now)
        before = now
    assert len(before) > 1
    ended, state = models(experiment), experiment.loop.state
    for members, shared in zip(state.clusters, state.weights, strict=True):  # type: ignore[attr-defined]
        assert all(torch.equal(ended[client][name], tensor) for client in members for name, tensor in shared.items())
    assert not equal_weights(*state.weights[:2])  # type: ignore[attr-defined]
    assert {"clusters", "mean_norm_0", "max_norm_0"} <= set(experiment.loop.lines[-1]["log"])


def two_groups() -> dict[str, LocalModel]:
    """Clients 0, 2, 4 pull one way, 1, 3, 5 the other: together they stand still."""
    generator = torch.Generator().manual_seed(0)
    way = torch.randn(5, 4, generator=generator)
    return {
        client: LocalModel(
            {"w": (1 if i % 2 == 0 else -1) * way + 0.05 * torch.randn(5, 4, generator=generator)}, 3.0 + i
        )
        for i, client in enumerate(CLIENTS)
    }


class Replying:
    """A federation that answers with given messages."""

    def __init__(self, replies: dict[str, LocalModel]) -> None:
        self.replies = replies

    def call(self, *_: Any, **__: Any) -> dict[str, LocalModel]:
        return self.replies


def test_two_groups_are_told_apart_after_the_warmup_only() -> None:
    start = ServerState(20, (CLIENTS,), ({"w": torch.zeros(5, 4)},))
    config = GCFLConfig(eps1=1.0, eps2=1.0)
    after, log = gcfl_round(start, Replying(two_groups()), config)  # type: ignore[arg-type]
    assert set(after.clusters) == {CLIENTS[0::2], CLIENTS[1::2]} and after.splits == (21,) and log["clusters"] == 2.0
    assert log["mean_norm_0"] < 1.0 < log["max_norm_0"]
    replies = two_groups()
    for cluster, shared in zip(after.clusters, after.weights, strict=True):
        n = sum(replies[c].samples for c in cluster)
        assert torch.allclose(shared["w"], sum(replies[c].samples / n * replies[c].weights["w"] for c in cluster))  # type: ignore[arg-type]
    early, _ = gcfl_round(ServerState(19, start.clusters, start.weights), Replying(two_groups()), config)  # type: ignore[arg-type]
    assert early.clusters == (CLIENTS,)
    assert after.norms == ((log["mean_norm_0"], log["max_norm_0"]),) and facts(after, config, None)["norms"] == [
        list(after.norms[0])
    ]
    summary = f"2 clusters, cut in round 21 (mean {after.norms[0][0]:.3f}, largest {after.norms[0][1]:.3f})"
    assert facts(after, config, None)["summary"] == summary
    assert facts(early, config, None)["summary"] == "one cluster, never cut (eps1 1.0, eps2 1.0, not before round 21)"
    for eps in ({"eps1": 0.0, "eps2": 1.0}, {"eps1": 1.0, "eps2": 100.0}):
        assert gcfl_round(start, Replying(two_groups()), GCFLConfig(**eps))[0].clusters == (CLIENTS,)  # type: ignore[arg-type]


def test_clusters_of_two_are_never_cut_and_means_are_weighted() -> None:
    replies = {client: reply for client, reply in two_groups().items() if client in CLIENTS[:2]}
    start = ServerState(50, (CLIENTS[:2],), ({"w": torch.zeros(5, 4)},))
    after, log = cluster_and_average(
        start, replies, GCFLConfig(eps1=100.0, eps2=0.0), lambda *_: pytest.fail("asked for a matrix")
    )
    wanted = (3 * replies[CLIENTS[0]].weights["w"] + 4 * replies[CLIENTS[1]].weights["w"]) / 7
    assert torch.allclose(after.weights[0]["w"], wanted)
    plain = sum(reply.weights["w"] for reply in replies.values()) / 2  # the norm that decides is that of the plain mean
    assert log["mean_norm_0"] == pytest.approx(float(plain.norm()), rel=1e-5)


def test_a_known_minimum_cut() -> None:
    matrix = torch.tensor([[0, 9, 1, 0], [9, 0, 0, 1], [1, 0, 0, 9], [0, 1, 9, 0]], dtype=torch.float64)
    assert minimum_cut(CLIENTS[:4], matrix) == [CLIENTS[:2], CLIENTS[2:4]]
    for matrix in (torch.zeros(4, 4), torch.ones(4, 4)):
        sides = minimum_cut(CLIENTS[:4], matrix)
        assert len(sides) == 2 and all(sides) and sorted((*sides[0], *sides[1])) == sorted(CLIENTS[:4])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]), min_size=10, max_size=10))
def test_no_cut_is_cheaper(values: list[float]) -> None:
    """Against all cuts of five clients, those that cost nothing included."""
    matrix = torch.zeros(5, 5, dtype=torch.float64)
    matrix[tuple(torch.tril_indices(5, 5, -1))] = torch.tensor(values, dtype=torch.float64)
    matrix += matrix.T.clone()

    def cost(side: set[int]) -> float:
        return float(sum(matrix[i, j] for i in side for j in set(range(5)) - side))

    cheapest = min(cost({i for i in range(5) if bits >> i & 1}) for bits in range(1, 31))
    sides = minimum_cut(CLIENTS[:5], matrix)
    assert (
        len(sides) == 2
        and all(sides)
        and cost({CLIENTS.index(client) for client in sides[0]}) == pytest.approx(cheapest)
    )


def test_a_client_without_samples_may_be_cut_off_and_keeps_its_clusters_weights() -> None:
    replies = two_groups() | {CLIENTS[5]: LocalModel({"w": torch.zeros(5, 4)}, 0.0)}
    matrix = torch.ones(6, 6)
    matrix[5, :] = matrix[:, 5] = 0.0
    start = ServerState(50, (CLIENTS,), ({"w": torch.full((5, 4), 0.5)},))
    after, _ = cluster_and_average(start, replies, GCFLConfig(eps1=100.0, eps2=0.0), lambda *_: matrix)
    assert after.clusters == (CLIENTS[:5], CLIENTS[5:]) and torch.equal(after.weights[1]["w"], start.weights[0]["w"])
    again, _ = cluster_and_average(after, replies, GCFLConfig(eps1=0.0, eps2=0.0), lambda *_: matrix)
    assert torch.equal(again.weights[1]["w"], start.weights[0]["w"])
    with pytest.raises(RunError, match="no client has a training sample"):
        cluster_and_average(
            start, {c: LocalModel(r.weights, 0.0) for c, r in replies.items()}, GCFLConfig(), lambda *_: matrix
        )


def naive_dtw(a: list[float], b: list[float]) -> float:
    """The definition: the best over all monotone alignments."""

    def cost(i: int, j: int) -> float:
        here = (a[i] - b[j]) ** 2
        if i == 0 and j == 0:
            return here
        ways = [(i - 1, j), (i, j - 1), (i - 1, j - 1)]
        return here + min(cost(p, q) for p, q in ways if p >= 0 and q >= 0)

    return math.sqrt(cost(len(a) - 1, len(b) - 1))


numbers = st.lists(st.floats(-5, 5), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(numbers, numbers)
def test_dtw_is_its_definition(a: list[float], b: list[float]) -> None:
    assert dtw(a, b) == pytest.approx(naive_dtw(a, b), abs=1e-9) and dtw(a, b) == pytest.approx(dtw(b, a), abs=1e-9)
    assert dtw(a, a) == 0.0


def test_dtw_forgives_a_shift_and_refuses_nothing_at_all() -> None:
    step, late, other = [0.0, 0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0, 0.0]
    assert dtw(step, late) == 0.0 < dtw(step, other)
    with pytest.raises(ValueError, match="without values"):
        dtw([], [1.0])


def test_similarity_of_series_groups_those_that_move_alike() -> None:
    series = [(1.0, 2.0, 3.0), (10.0, 20.0, 30.0), (3.0, 2.0, 1.0), (30.0, 20.0, 10.0)]
    plain, standard = (similarity(series, standardise=flag) for flag in (False, True))
    assert torch.equal(plain, plain.T) and float(plain.min()) == 0.0 and float(plain[0, 2]) > float(plain[0, 1])
    assert float(standard[0, 1]) == pytest.approx(float(standard.max())) and float(standard[0, 2]) < 1e-9
    assert torch.isfinite(similarity([(1.0, 1.0), (2.0, 2.0)], standardise=True)).all()


def test_series_wait_for_the_window_and_are_cleared_by_a_cut(motifs: GraphScenario) -> None:
    settings = {"eps1": 100.0, "eps2": 0.0, "warmup": 0, "window": 3, "rounds": 6}
    experiment = SimulatedRun(resolve("gcflplus", {"dataset": "motifs", "clients": 4, **SMALL, **settings}), motifs)
    lengths, clusters = [], []
    for step in range(1, experiment.loop.steps + 1):
        experiment.loop.play(until=step)
        state: Any = experiment.loop.state
        lengths.append({len(values) for values in state.series.values()})
        clusters.append(len(state.clusters))
    assert clusters[:3] == [1, 1, 2] and lengths[:3] == [{1}, {2}, {0}]
    assert all(value > 0.0 for values in state.series.values() for value in values)


def test_the_last_values_are_kept(motifs: GraphScenario) -> None:
    short, long = (play("gcflplus", motifs, eps1=0.0, rounds=5, window=window).loop.state.series for window in (2, 9))  # type: ignore[attr-defined]
    assert short == {client: values[-2:] for client, values in long.items()} and {
        len(values) for values in long.values()
    } == {5}


def test_the_norm_is_of_the_shared_layers_at_the_last_step(motifs: GraphScenario) -> None:
    one = replace(motifs, parts={"client-0": motifs.parts["client-0"]}, clients=1)
    calm = {"dropout": 0.0, "batch_size": 10_000, "eps1": 0.0, "precision": "float64"}
    run = SimulatedRun(resolve("gcflplus", {"dataset": "motifs", "clients": 1, **SMALL, **calm, "rounds": 1}), one)
    client = run.engine.party("client-0").client
    grads = client.learner.gradients(client.state.weights, client.stream)
    wanted = float(torch.cat([g.flatten() for name, g in grads.items() if name.startswith("convs.")]).norm())
    run.loop.play()
    assert run.loop.state.series["client-0"] == (pytest.approx(wanted, rel=1e-6),)  # type: ignore[attr-defined]
    rounds, epochs = (
        play("gcflplus", one, **{**calm, **more}).loop.state.series["client-0"]  # type: ignore[attr-defined]
        for more in ({"rounds": 2}, {"rounds": 1, "local_epochs": 2})
    )
    assert epochs[-1] == pytest.approx(rounds[-1], rel=1e-6) and epochs[-1] != pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "bad", [{"eps1": -1.0}, {"warmup": -1}, {"fraction": 0.5}, {"dp_clip": 1.0, "weighting": "uniform"}]
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GCFLConfig(**bad)
    with pytest.raises(ConfigError, match="secure_sum"):
        resolve("gcfl", {"dataset": "chem", "secure_sum": True})


def test_thresholds_follow_the_setting() -> None:
    names = ("chem", "bio-chem", "bio-chem-sn", "bio-sn-cv", "mutag")
    found = [resolve("gcfl", {"dataset": name, "preset": "fedstar"}).method_config for name in names]
    assert [(c.eps1, c.eps2) for c in found] == [(0.07, 0.28), (0.07, 0.35), (0.08, 0.40), (0.08, 0.40), (0.05, 0.1)]
