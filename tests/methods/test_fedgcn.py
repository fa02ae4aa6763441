"""FedGCN: sums over hops are exact for any partition (baselines spec, section 14), and the published simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fedstruct_helpers import experiment, graph, scenario
from torch import Tensor

from isthmus.data.scenario import Scenario
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.config import resolve
from isthmus.graph.normalise import gcn_norm
from isthmus.methods.fedavg import Broadcast
from isthmus.methods.fedgcn.published import extended_data
from isthmus.nn.inputs import build_inputs
from isthmus.nn.train import predict
from isthmus.tensors import equal_weights
from isthmus.testing import check_method

MODEL = {"hidden": (8,), "backbone": "gcn", "head": False, "dropout": 0.0, "precision": "float64"}
SINGLE = 1e-6
"""The central model's propagation matrix is rounded to single precision."""


def after_exchange(where: Scenario, **settings: Any) -> Any:
    run = experiment(where, "fedgcn", **{**MODEL, **settings})
    run.loop.play(until=2)
    return run


def own_logits(run: Any, where: Scenario) -> Tensor:
    """Logits of every node by its owner, with the common first weights."""
    found = torch.zeros(where.whole.num_nodes, where.whole.num_classes, dtype=torch.float64)
    for client, data in where.parts.items():
        party = run.engine.party(client).client
        found[data.node_id] = party.learner.logits(party.state.weights)
    return found


def central_logits(run: Any, where: Scenario) -> Tensor:
    party = run.engine.party("client-0").client
    model = party.own_learner.model
    return predict(model, party.state.weights, build_inputs(where.whole, model, dtype=torch.float64))


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("clients", [1, 2, 4])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_two_hops_equal_the_central_model(directed: bool, clients: int, norm: bool, head: bool) -> None:
    where = graph(45, clients=clients, directed=directed, isolated=2)
    hidden = (8, 6) if head else (8,)
    run = after_exchange(where, hops=2, input_norm=norm, head=head, hidden=hidden)
    torch.testing.assert_close(own_logits(run, where), central_logits(run, where), atol=SINGLE, rtol=0)


def test_one_hop_is_exact_where_no_cross_edge_is_left_for_the_second_layer() -> None:
    where = graph(45, clients=3)
    run = after_exchange(where, hops=1)
    difference = (own_logits(run, where) - central_logits(run, where)).abs().max(1).values
    crossing = torch.zeros(45, dtype=torch.bool)
    for data in where.parts.values():
        assert data.cross is not None
        crossing[data.node_id[data.cross.own[~data.cross.outgoing]]] = True
    assert float(difference[~crossing].max()) < SINGLE
    assert float(difference[crossing].min()) > 100 * SINGLE


def test_partial_sums_add_up_to_the_first_product() -> None:
    where = graph(45, clients=3)
    run = after_exchange(where, hops=1, input_norm=False)
    expected = gcn_norm(where.whole.edge_index, 45) @ where.whole.x.double().numpy()
    for client, data in where.parts.items():
        sums = run.engine.party(client).client.state.sums.own
        np.testing.assert_allclose(sums[:, :-2].numpy(), expected[data.node_id.numpy()], atol=SINGLE, rtol=0)


def test_no_hop_is_fedavg_and_one_client_is_central() -> None:
    where = graph(45, clients=3)
    runs = [
        experiment(where, method, **{**MODEL, "rounds": 3, "dropout": 0.3}, **more)
        for method, more in (("fedgcn", {"hops": 0}), ("fedavg", {}))
    ]
    for run in runs:
        run.loop.play()
    assert all(torch.equal(a, b) for a, b in zip(*(run.loop.state.weights.values() for run in runs), strict=True))  # type: ignore[attr-defined]
    alone = scenario(where.whole, torch.zeros(45, dtype=torch.int64), 1)
    ours = [experiment(alone, "fedgcn", **{**MODEL, "rounds": 3, "hops": hops}) for hops in (0, 1, 2)]
    for run in ours:
        run.loop.play()
    for other in ours[1:]:
        for name, tensor in ours[0].loop.state.weights.items():  # type: ignore[attr-defined]
            torch.testing.assert_close(tensor, other.loop.state.weights[name], atol=10 * SINGLE, rtol=0)  # type: ignore[attr-defined]


def test_masked_sums_are_the_same_up_to_fixed_point() -> None:
    where = graph(45, clients=3)
    runs = [after_exchange(where, hops=2, secure_sum=masked) for masked in (False, True)]
    torch.testing.assert_close(own_logits(runs[0], where), own_logits(runs[1], where), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("hops", "reached"), [(1, 1), (2, 2)])
def test_the_published_simulation_hands_over_the_neighbourhood(hops: int, reached: int) -> None:
    where = graph(45, clients=4, seed=3)
    run = after_exchange(where, hops=hops, legacy=True)
    whole = where.whole
    neighbours = {node: set() for node in range(45)}
    for a, b in whole.edge_index.T.tolist():
        neighbours[a].add(b)
        neighbours[b].add(a)
    for client, data in where.parts.items():
        party: Any = run.engine.party(client).client
        closure = set(data.node_id.tolist())
        for _ in range(reached):
            closure |= {far for node in closure for far in neighbours[node]}
        extended = extended_data(data, party.state.surroundings)
        assert set(extended.node_id.tolist()) == closure
        arcs = {(int(extended.node_id[a]), int(extended.node_id[b])) for a, b in extended.edge_index.T.tolist()}
        assert arcs == {(a, b) for a, b in whole.edge_index.T.tolist() if a in closure and b in closure}
        torch.testing.assert_close(extended.x.to_dense(), whole.x[extended.node_id])
        assert not extended.train[data.num_nodes :].any()


def test_the_published_simulation_is_not_quite_central() -> None:
    """Degrees at the rim are cut: trap 1 of the spec."""
    where = graph(45, clients=4)
    run = after_exchange(where, hops=2, legacy=True)
    assert float((own_logits(run, where) - central_logits(run, where)).abs().max()) > 1000 * SINGLE


@pytest.mark.parametrize(
    "settings",
    [
        {"backbone": "gcn", "hops": 2},
        {"backbone": "gcn", "hops": 1, "input_norm": True},
        {"backbone": "sage", "hops": 2, "legacy": True},
    ],
    ids=["exact", "one-hop", "legacy"],
)
def test_general_properties(settings: dict[str, Any]) -> None:
    skip = {
        "identical_clients_stay_identical": "a node has one owner",
        "one_client_equals_local": "rounding: sums are formed before the first product, not in it",
    }
    check_method("fedgcn", settings={"head": False, **settings}, skip=skip)


DP = {"dp_clip": 0.1, "dp_noise": 1.0, "weighting": "uniform"}


def test_a_replayed_round_adds_the_same_noise() -> None:
    run = after_exchange(graph(45, clients=3), hops=1, **DP)
    client: Any = run.engine.party("client-0").client
    before, common = client.state, Broadcast(run.loop.state.weights, 3.0)
    updates = []
    for state in (before, before, replace(before, secret=b"x" * 32)):
        client.state = state
        updates.append(client.local_update(common).weights)
    assert equal_weights(updates[0], updates[1]) and not equal_weights(updates[0], updates[2])


@pytest.mark.parametrize("hops", [0, 1])
def test_privacy_says_that_the_exchange_is_not_covered(hops: int) -> None:
    stated = experiment(graph(45, clients=3), "fedgcn", **{**MODEL, **DP, "hops": hops}).privacy
    assert stated is not None and ("exchange before training" in stated["not_covered"]) is bool(hops)


def test_cross_edges_that_do_not_match_are_an_error() -> None:
    where = graph(45, clients=3)
    cross = where.parts["client-1"].cross
    assert cross is not None
    keep = cross.outgoing | (torch.arange(cross.num_edges) % 2 == 0)
    fewer = replace(
        cross, **{name: getattr(cross, name)[keep] for name in ("own", "owner", "other", "outgoing", "weight")}
    )
    broken = replace(where, parts={**where.parts, "client-1": replace(where.parts["client-1"], cross=fewer)})
    with pytest.raises(RunError, match="both ends must list every cross edge"):
        after_exchange(broken, hops=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hops": 3}, "hops must be 0, 1 or 2"),
        ({"backbone": "sage"}, "use backbone=gcn"),
        ({"hidden": (8, 8, 8)}, "at most 2 layers"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("fedgcn", {"dataset": "csbm", "head": False, **settings})
