"""FedLit: specs/baselines 15, and the slips of the reference code that must not come back."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.methods.fedlit import Centroids, Common, FedLitClient, FedLitState, Order, Update, most_alike
from isthmus.nn.optim import OptimizerState
from isthmus.nn.typed_edges import (
    align,
    assign,
    em_step,
    features,
    first_centres,
    first_typed,
    propagation,
    reorder,
    typed_forward,
    typed_inputs,
)
from isthmus.seeds import Stream
from isthmus.tensors import Weights, equal_weights, max_difference
from isthmus.testing import check_method

SMALL: dict[str, Any] = {
    "hidden": (8,),
    "dropout": 0.0,
    "rounds": 3,
    "local_epochs": 2,
    "lr": 0.02,
    "execution": "each",
    "backbone": "gcn",
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(
        dataset="csbm:nodes=120,classes=3,features=12,degree=4", clients=3, split="client:40/30/30", seed=1
    )


def play(scenario: Scenario, **settings: Any) -> SimulatedRun:
    flags = {"dataset": "csbm", "clients": len(scenario.parts), "seed": 1, **SMALL, **settings}
    experiment = SimulatedRun(resolve("fedlit", flags), scenario)
    experiment.loop.play()
    return experiment


def client_of(experiment: SimulatedRun, name: str = "client-0") -> FedLitClient:
    client = experiment.engine.party(name).client
    assert isinstance(client, FedLitClient)
    return client


@pytest.mark.parametrize("backbone", ["gcn", "sage", "sgc"])
def test_general_properties(backbone: str) -> None:
    check_method("fedlit", settings={"backbone": backbone}, skip={"one_client_equals_local": "another network"})


def test_alignment_is_a_permutation_and_finds_the_right_one() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 8, generator=generator)
    for _ in range(20):
        shuffled = torch.randperm(5, generator=generator)
        noisy = centres[shuffled] + 0.05 * torch.randn(5, 8, generator=generator)
        order = align(noisy, centres)
        assert sorted(order) == list(range(5))
        assert shuffled[order].tolist() == list(range(5))
    assert sorted(align(torch.zeros(4, 3), torch.zeros(4, 3))) == list(
        range(4)
    )  # nothing to go by: still a permutation


def test_the_order_of_a_clients_types_does_not_matter() -> None:
    """A client that numbers its types otherwise sends the same weights once put in order."""
    weights = first_typed("gcn", 6, 4, 3, 3, Stream(0))
    centroids, centres = (torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    plain = reorder(weights, torch.tensor(align(centroids, centres)))
    for turn in ([1, 2, 0], [2, 1, 0]):
        other = torch.tensor(turn)
        turned = reorder(reorder(weights, other), torch.tensor(align(centroids[other], centres)))
        assert equal_weights(plain, turned)


def test_every_edge_has_one_type_both_ways(scenario: Scenario) -> None:
    experiment = play(scenario)
    for name in scenario.parts:
        client = client_of(experiment, name)
        state, data = client.state, client.data
        assert isinstance(state, FedLitState)
        assert int(state.types.min()) >= 0 and int(state.types.max()) < 4
        typed = {}
        for arc, edge in zip(client.inputs.arcs.T.tolist(), client.inputs.edge_of.tolist(), strict=True):
            typed[tuple(arc)] = int(state.types[edge])
        assert all(typed[b, a] == t for (a, b), t in typed.items())
        assert len(typed) == int((data.edge_index[0] != data.edge_index[1]).sum())
        assert propagation("sage", client.inputs, state.types, 4, torch.float64).csr.nnz == len(
            typed
        )  # no arc twice, none lost


@pytest.mark.parametrize("backbone", ["gcn", "sage", "sgc", "mlp"])
def test_with_one_type_it_is_fedavg_of_a_plain_network(scenario: Scenario, backbone: str) -> None:
    experiment = play(scenario, types=1, backbone=backbone, precision="float64", weight_decay=0.0, weighting="uniform")
    first: Weights = experiment.settings.method_config.first(12, 3, Stream(1, ("common",)).child("init"))
    plain = Plain(backbone, {n: d for n, d in scenario.parts.items()}, first)
    for _ in range(3):
        plain.round()
    assert max_difference(experiment.loop.state.weights, plain.weights) < 1e-6  # type: ignore[attr-defined]


class Plain:
    """FedAvg of the single-channel network, dense, with torch's Adam kept at every client."""

    def __init__(self, backbone: str, parts: Mapping[str, NodeData], first: Weights) -> None:
        self.backbone, self.parts, self.weights = backbone, parts, dict(first)
        self.local = {n: {k: t.clone().requires_grad_() for k, t in first.items()} for n in parts}
        self.adam = {n: torch.optim.Adam(list(w.values()), lr=0.02) for n, w in self.local.items()}

    def logits(self, data: NodeData, w: Mapping[str, Tensor]) -> Tensor:
        a = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
        a[data.edge_index[1], data.edge_index[0]] = 1.0
        if self.backbone == "sage":
            a = (a / a.sum(1, keepdim=True).clamp(min=1.0)).float().double()
        else:
            a = a + torch.eye(data.num_nodes, dtype=torch.float64)
            scale = a.sum(1).rsqrt()
            a = (scale.unsqueeze(1) * a * scale).float().double()
        h = data.x.double() @ w["feature.weight"] + w["feature.bias"]
        h = h @ w["branch.input.weight"][0] + w["branch.input.bias"][0]
        if self.backbone == "sgc":
            h = (a.float() @ a.float()).double() @ (h @ w["branch.0.weight"][0]) + w["branch.0.bias"][0]
        else:
            for layer in range(2):
                out = h @ w[f"branch.{layer}.weight"][0]
                out = out if self.backbone == "mlp" else a @ out
                out = out + h @ w[f"branch.{layer}.root"][0] if self.backbone == "sage" else out
                h = torch.relu(out + w[f"branch.{layer}.bias"][0])
        return h @ w["classify.weight"] + w["classify.bias"]

    def round(self) -> None:
        for name, data in self.parts.items():
            with torch.no_grad():
                for key, tensor in self.local[name].items():
                    tensor.copy_(self.weights[key])
            for _ in range(2):
                self.adam[name].zero_grad()
                loss = torch.nn.functional.cross_entropy(
                    self.logits(data, self.local[name])[data.train], data.y[data.train]
                )
                loss.backward()  # type: ignore[no-untyped-call]
                self.adam[name].step()
        self.weights = {
            key: torch.stack([self.local[name][key].detach() for name in self.parts]).mean(0) for key in self.weights
        }


def test_an_empty_type_starts_again_at_the_least_typical_edge() -> None:
    embedding = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    types, means = em_step(embedding, torch.tensor([[1.0, 0.2], [-1.0, 0.0]]))
    assert types.tolist() == [0, 0, 0]
    assert torch.equal(means[1], embedding[2]) and bool(means.isfinite().all())
    again, _ = em_step(embedding, means)
    assert again.tolist() == [0, 0, 1]


def test_k_means_parts_two_bundles() -> None:
    generator = torch.Generator().manual_seed(3)
    bundles = torch.cat([torch.tensor([[1.0, 0.0, 0.0]]).repeat(9, 1), torch.tensor([[0.0, 0.0, 1.0]]).repeat(7, 1)])
    embedding = bundles + 0.05 * torch.randn(16, 3, generator=generator)
    types = assign(embedding, first_centres(embedding, 2))
    assert len(set(types[:9].tolist())) == 1 and set(types[:9].tolist()) != set(types[9:].tolist())


def test_a_node_without_edges_is_not_blank(scenario: Scenario) -> None:
    data = scenario.parts["client-0"]
    keep = (data.edge_index != 0).all(dim=0)
    inputs = typed_inputs(replace(data, edge_index=data.edge_index[:, keep]), torch.float32)
    for backbone in ("gcn", "sage", "sgc"):
        weights = first_typed(backbone, 12, 8, 3, 4, Stream(0))
        matrix = propagation(backbone, inputs, torch.zeros(inputs.edges.shape[1], dtype=torch.int64), 4, torch.float32)
        f = features(weights, inputs)
        out = typed_forward(backbone, weights, f, matrix)
        moved = typed_forward(
            backbone, weights, torch.where(torch.arange(len(f)).unsqueeze(1) == 0, f + 1.0, f), matrix
        )
        assert not torch.equal(out[0], moved[0])


def test_clients_without_edges_or_labels(scenario: Scenario) -> None:
    parts = dict(scenario.parts)
    parts["client-0"] = replace(parts["client-0"], edge_index=torch.zeros(2, 0, dtype=torch.int64))
    parts["client-1"] = replace(parts["client-1"], train=torch.zeros_like(parts["client-1"].train))
    experiment = play(replace(scenario, parts=parts))
    assert all(bool(tensor.isfinite().all()) for tensor in experiment.loop.state.weights.values())  # type: ignore[attr-defined]
    bare = replace(
        scenario,
        parts={n: replace(d, edge_index=torch.zeros(2, 0, dtype=torch.int64)) for n, d in scenario.parts.items()},
    )
    assert all(bool(tensor.isfinite().all()) for tensor in play(bare).loop.state.weights.values())  # type: ignore[attr-defined]


def test_every_client_gets_its_own_alignment(scenario: Scenario) -> None:
    """After a round all clients' centroids lie in the same order: each is nearest to the centre of its own number."""
    experiment = play(scenario, rounds=1)
    centres = experiment.loop.state.centres  # type: ignore[attr-defined]
    for name in scenario.parts:
        state = client_of(experiment, name).state
        assert isinstance(state, FedLitState)
        assert align(state.centroids, centres) == list(range(4))


def test_the_first_reference_is_nobodys_place_in_line() -> None:
    output = {f"c{k}": torch.randn(3, 4, generator=torch.Generator().manual_seed(k)) for k in range(4)}
    turned = {f"c{3 - k}": output[f"c{k}"] for k in range(4)}
    assert torch.equal(most_alike(output), most_alike(turned))


@pytest.mark.parametrize(("key", "value"), [("types", 0), ("backbone", "gat"), ("dp_clip", 1.0)])
def test_what_cannot_be_set(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"fedlit|types|weighting"):
        resolve("fedlit", {"dataset": "csbm", key: value})


def test_numbering_types_otherwise_before_upload_changes_nothing(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, turn, local_update = (
        play(scenario, precision="float64"),
        torch.tensor([2, 0, 3, 1]),
        FedLitClient.local_update,
    )

    @functools.wraps(local_update)
    def turned(self: FedLitClient, common: Common) -> Centroids:
        reply, state = local_update(self, common), self.state
        if self.party != "client-1":
            return reply
        assert isinstance(state, FedLitState)
        first, second = (reorder(part, turn) for part in (state.optimizer.first, state.optimizer.second))
        moments = OptimizerState(state.optimizer.steps, first, second)
        self.state = FedLitState(
            reorder(state.weights, turn), moments, state.centroids[turn], turn.argsort()[state.types]
        )
        return Centroids(state.centroids[turn], reply.edges)

    monkeypatch.setattr(FedLitClient, "local_update", turned)
    other = play(scenario, precision="float64")
    a, b = (cast(Any, run.loop.state) for run in (plain, other))
    back = torch.tensor(align(b.centres, a.centres))  # if client-1 was the first reference, all numbers are turned
    assert max_difference(a.weights, reorder(b.weights, back)) < 1e-8
    assert any(line["log"]["types_reordered"] for line in other.loop.lines)


def test_branches_count_once_where_they_are_used_and_the_rest_by_size(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {
        **scenario.parts,
        "client-0": replace(scenario.parts["client-0"], edge_index=torch.zeros(2, 0, dtype=torch.int64)),
    }
    sent: dict[str, tuple[Weights, Tensor, int]] = {}
    put_in_order = FedLitClient.put_in_order

    @functools.wraps(put_in_order)
    def spy(self: FedLitClient, order: Order) -> Update:
        update, state = put_in_order(self, order), self.state
        assert isinstance(state, FedLitState)
        used = [
            t
            for (a, b), t in zip(self.inputs.edges.T.tolist(), state.types.tolist(), strict=True)
            if self.data.train[[a, b]].any()
        ]
        sent[self.party] = (
            dict(state.weights),
            torch.tensor([float(t in used) for t in range(4)], dtype=torch.float64),
            self.data.num_train,
        )
        return update

    monkeypatch.setattr(FedLitClient, "put_in_order", spy)
    weights = play(replace(scenario, parts=parts), rounds=1, precision="float64").loop.state.weights  # type: ignore[attr-defined]
    sizes, active = [n for _, _, n in sent.values()], torch.stack([used for _, used, _ in sent.values()])
    assert not bool(sent["client-0"][1].any())
    for name, tensor in weights.items():
        own = torch.stack([w[name] for w, _, _ in sent.values()])
        if name.startswith("branch."):
            used = active.sum(0) > 0
            mean = torch.einsum("kt,kt...->t...", active, own) / active.sum(0).clamp(min=1).view(
                -1, *[1] * (tensor.dim() - 1)
            )
            torch.testing.assert_close(tensor[used], mean[used])
        else:
            torch.testing.assert_close(
                tensor, torch.einsum("k,k...->...", torch.tensor(sizes).double() / sum(sizes), own)
            )
