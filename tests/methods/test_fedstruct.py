"""FedStruct's training against one plain computation on the whole graph (spec 14: 6, 7, 8, 14, 20, 21, 22) and the
general properties.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from dense_powers import combined_adjacency
from fedstruct_helpers import experiment, graph, same_secrets, scenario, states, walk
from torch import Tensor

from isthmus.data.scenario import Scenario
from isthmus.data.split_graph import split_graph
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.messages import Kind
from isthmus.federation.session import Session
from isthmus.graph.normalise import row_norm
from isthmus.methods.fedstruct import FedStructClient, FedStructConfig, Task
from isthmus.methods.fedstruct.algorithm import PROTOCOLS
from isthmus.methods.fedstruct.features import fingerprint
from isthmus.nn.inputs import Inputs
from isthmus.nn.loss import get_loss
from isthmus.tensors import Weights
from isthmus.testing import check_method

SKIP = {
    "one_client_equals_local": "one client still has its structure branch",
    "identical_clients_stay_identical": "a node has one owner: clients with the same nodes are refused",
    "order_does_not_matter": (
        "data and the names that cross edges give must be exchanged together: see test_names_of_clients_do_not_matter"
    ),
}


@pytest.mark.parametrize(
    "settings",
    [
        {"nsf": "hop2vec", "protocol": "hardened"},
        {
            "nsf_at": "clients",
            "protocol": "published",
            "prune_mode": "global",
            "loss": "double_softmax",
            "weighting": "nodes",
        },
        {"nsf": "walk", "backbone": "sage", "train_betas": True, "protocol": "hardened"},
    ],
    ids=["hardened", "published", "fixed"],
)
def test_general_properties(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    same_secrets(monkeypatch)
    small = {"nsf_dim": 8, "structure_hidden": (6,), "structure_hops": 3, "prune": 4}
    assert "resume_is_bit_equal" in check_method("fedstruct", settings={**small, **settings}, skip=SKIP)


def test_fedavg_has_the_general_properties_too(monkeypatch: pytest.MonkeyPatch) -> None:
    same_secrets(monkeypatch)
    small = {"nsf_dim": 8, "structure_hidden": (6,), "structure_hops": 2, "algorithm": "fedavg", "local_epochs": 2}
    small |= {"protocol": "hardened"}
    ran = check_method(
        "fedstruct", settings=small, skip={**SKIP, "cohort_equals_each": "fedavg steps each client by itself"}
    )
    assert "wire_equals_declaration" in ran


# -- one plain computation on the whole graph
# ----------------------------------------------------------------------------------------


class Plain:
    """q = h + z on the whole graph with torch's own layers: local propagation per owner, one dense Abar, one loss."""

    def __init__(
        self, where: Scenario, weights: Weights, nsf: Tensor, hops: int, betas: tuple[float, ...], learn: bool
    ) -> None:
        n = where.whole.num_nodes
        self.where = where
        local = sp.lil_matrix((n, n))
        for data in where.parts.values():
            ids = data.node_id.numpy()
            local[np.ix_(ids, ids)] = row_norm(data.edge_index, data.num_nodes).toarray()
        self.local = torch.from_numpy(np.linalg.matrix_power(local.toarray(), hops))
        self.abar = torch.from_numpy(combined_adjacency(walk(where), betas))
        self.theta = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        self.nsf = nsf.clone().requires_grad_(learn)

    def mlp(self, x: Tensor, prefix: str, norm: str) -> Tensor:
        t = self.theta
        if f"{prefix}{norm}.gamma" in t:
            x = torch.nn.functional.layer_norm(x, (x.shape[1],), t[f"{prefix}{norm}.gamma"], t[f"{prefix}{norm}.beta"])
        layers = len([name for name in t if name.startswith(f"{prefix}layers.") and name.endswith("weight")])
        for i in range(layers):
            x = x @ t[f"{prefix}layers.{i}.weight"] + t[f"{prefix}layers.{i}.bias"]
            x = torch.relu(x) if i < layers - 1 else x
        return x

    def logits(self) -> Tensor:
        z = (
            self.mlp(self.nsf, "structure.", "norm")
            if any(name.startswith("structure.layers") for name in self.theta)
            else self.nsf
        )
        return self.local @ self.mlp(self.where.whole.x.double(), "feature.", "input_norm") + self.abar @ z

    def loss(self) -> Tensor:
        """1/|Vt| sum over all training nodes (E3)."""
        train = self.where.whole.train
        return torch.nn.functional.cross_entropy(self.logits()[train], self.where.whole.y[train])

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.theta.values(), *([self.nsf] if self.nsf.requires_grad else [])]


def plain_of(run: SimulatedRun, where: Scenario) -> Plain:
    """The plain computation from the same start; rows of S by global id."""
    config = run.settings.method_config
    run.loop.play(until=2 + config.structure_hops)
    state: Any = run.loop.state
    node = np.zeros(where.whole.num_nodes, dtype=np.int64)
    for client, own in states(run).items():
        node[where.parts[client].node_id.numpy()] = own.columns.numpy()
    held = state.nsf if state.nsf is not None else next(iter(states(run).values())).nsf
    betas = config.power_weights
    return Plain(where, state.weights, held[torch.from_numpy(node)], config.hops or 2, betas, config.learns_nsf)


@pytest.mark.parametrize("clients", [1, 3, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"nsf": "hop2vec"},
        {"nsf": "hop2vec", "form": "direct", "nsf_lr": 0.05},
        {"nsf": "degree", "betas": (0.5, 0.3, 0.2)},
        {"nsf": "walk"},
        {"nsf": "hop2vec", "protocol": "published", "nsf_at": "clients"},
    ],
    ids=["hop2vec", "direct", "degree", "walk", "published"],
)
def test_twenty_adam_steps_equal_training_at_one_place(clients: int, settings: dict[str, Any]) -> None:
    where = graph(36, clients=clients)
    given = {"structure_hops": 3, "prune": 0, "rounds": 20, "lr": 0.01, "weight_decay": 1e-3, "loss": "ce", **settings}
    run = experiment(where, **given)
    plain = plain_of(run, where)
    groups = [{"params": list(plain.theta.values())}]
    if plain.nsf.requires_grad:
        lr, decay = run.settings.method_config.nsf_rates
        groups.append({"params": [plain.nsf], "lr": lr, "weight_decay": decay})  # type: ignore[dict-item]
    adam = torch.optim.Adam(groups, lr=0.01, weight_decay=1e-3)
    for _ in range(20):
        adam.zero_grad()
        plain.loss().backward()  # type: ignore[no-untyped-call]
        adam.step()
    run.loop.play()
    state: Any = run.loop.state
    for name, tensor in state.weights.items():
        torch.testing.assert_close(tensor, plain.theta[name].detach(), atol=1e-8, rtol=0)
    right = (plain.logits().argmax(1) == where.whole.y)[where.whole.test]
    assert run.loop.lines[-1]["test"] == pytest.approx(float(right.double().mean()))


def test_gradients_of_the_clients_add_up_to_that_of_the_pooled_loss() -> None:
    where = graph(36, clients=4)
    run = experiment(where, structure_hops=3, prune=0, loss="ce", weighting="train")
    plain = plain_of(run, where)
    state: Any = run.loop.state
    run.loop.session.clock.begin("train", 1, run.loop.at.step + 1)
    total = run.loop.session.sum(FedStructClient.gradient, Task(state.weights, state.nsf, state.total))
    expected = torch.autograd.grad(plain.loss(), list(plain.theta.values()))
    for name, grad in zip(plain.theta, expected, strict=True):
        torch.testing.assert_close(total.gradients[name], grad, atol=1e-10, rtol=0)
    assert total.share == pytest.approx(1.0)


@pytest.mark.parametrize("execution", ["each", "cohort"])
def test_server_held_and_replicated_structure_features_give_the_same_bits(
    execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_secrets(monkeypatch)
    where = graph(50, clients=3)
    given = {"structure_hops": 3, "prune": 5, "rounds": 4, "dropout": 0.4, "execution": execution}
    held, copies = (experiment(where, nsf_at=place, **given) for place in ("server", "clients"))
    for run in (held, copies):
        run.loop.play()
    assert all(
        torch.equal(held.loop.state.weights[name], copies.loop.state.weights[name]) for name in held.loop.state.weights
    )  # type: ignore[attr-defined]
    replicas = [state.nsf for state in states(copies).values()]
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    assert torch.equal(held.loop.state.nsf, replicas[0])  # type: ignore[attr-defined]
    assert held.loop.lines[-1]["test"] == copies.loop.lines[-1]["test"]


def test_a_replica_that_strays_stops_the_run() -> None:
    run = experiment(graph(clients=3), nsf_at="clients", structure_hops=2, rounds=3)
    run.loop.play(until=run.loop.steps - 1)
    client = run.engine.party("client-1").client
    client.state = replace(client.state, nsf=client.state.nsf + 1e-9)
    with pytest.raises(RunError, match="client-1 differ"):
        run.loop.play()


def test_one_client_is_the_central_model() -> None:
    where = graph(30, clients=1)
    run = experiment(where, structure_hops=2, prune=0)
    run.loop.play(until=4)
    (state,) = states(run).values()
    client: Any = run.engine.party("client-0").client
    dense = state.combined[0].to_dense()[:, state.columns]
    np.testing.assert_allclose(dense.numpy(), combined_adjacency(walk(where), (0, 1.0)), atol=1e-12)
    assert torch.equal(client.data.edge_index, where.whole.edge_index)


def test_a_client_without_labels_has_a_gradient_of_exact_zeros() -> None:
    where = graph(40, clients=3)
    bare = replace(where.parts["client-1"], train=torch.zeros_like(where.parts["client-1"].train))
    run = experiment(
        replace(where, parts={**where.parts, "client-1": bare}),
        structure_hops=2,
        dropout=0.5,
        rounds=3,
        weighting="train",
    )
    run.loop.play()
    state: Any = run.loop.state
    session = Session(run.engine, run.settings.method.table)  # without the contract: single replies are looked at
    session.clock.begin("train", 9, run.loop.at.step + 1)
    replies = session.call(FedStructClient.gradient, Task(state.weights, state.nsf, state.total))
    for grad in (*replies["client-1"].gradients.values(), replies["client-1"].nsf):
        assert not grad.any()
    assert replies["client-0"].nsf.any()
    assert all(torch.isfinite(tensor).all() for tensor in state.weights.values())


def test_a_run_without_any_label_says_so() -> None:
    where = graph(20, clients=2)
    parts = {client: replace(data, train=torch.zeros_like(data.train)) for client, data in where.parts.items()}
    with pytest.raises(RunError, match="no client has a training node"):
        experiment(replace(where, parts=parts)).loop.play()


def test_names_of_clients_do_not_matter() -> None:
    where = graph(45, clients=3)
    owner = torch.empty(45, dtype=torch.int64)
    for number, data in enumerate(where.parts.values()):
        owner[data.node_id] = number
    turned = scenario(where.whole, 2 - owner, 3)
    runs = [experiment(each, structure_hops=3, prune=0, rounds=5, nsf="degree") for each in (where, turned)]
    for run in runs:
        run.loop.play()
    first, second = (run.loop.state.weights for run in runs)  # type: ignore[attr-defined]
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-10
    assert runs[0].loop.lines[-1]["test"] == runs[1].loop.lines[-1]["test"]


def test_numbers_of_nodes_do_not_matter() -> None:
    """Global ids may be anything: here they are spread out and in another order."""
    where = graph(45, clients=3)
    ids = 7 * torch.randperm(45, generator=torch.Generator().manual_seed(1)) + 1000
    parts = {}
    for client, data in where.parts.items():
        assert data.cross is not None
        parts[client] = replace(data, node_id=ids[data.node_id], cross=replace(data.cross, other=ids[data.cross.other]))
    given = {"structure_hops": 3, "prune": 0, "rounds": 5, "nsf": "degree"}
    for protocol in ("published", "hardened"):
        runs = [experiment(each, protocol=protocol, **given) for each in (where, replace(where, parts=parts))]
        for run in runs:
            run.loop.play()
        first, second = (run.loop.state.weights for run in runs)  # type: ignore[attr-defined]
        assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-10


def test_secure_sums_give_the_same_model_up_to_fixed_point(monkeypatch: pytest.MonkeyPatch) -> None:
    same_secrets(monkeypatch)
    where = graph(45, clients=3)
    given = {"structure_hops": 3, "prune": 0, "rounds": 3, "optimizer": "sgd", "lr": 0.1}
    plain, masked = experiment(where, **given), experiment(where, secure_sum=True, **given)
    for run in (plain, masked):
        run.loop.play()
    first, second = (run.loop.state.weights for run in (plain, masked))  # type: ignore[attr-defined]
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5


def test_trained_betas_move_and_are_told() -> None:
    where = graph(45, clients=3)
    run = experiment(where, structure_hops=3, prune=0, rounds=5, train_betas=True, beta0=0.5, lr=0.01)
    run.loop.play()
    facts = run.settings.method.facts
    assert facts is not None
    output = facts(run.loop.kept_state, run.settings.method_config, where)
    assert len(output["betas"]) == 4 and output["betas"] != [0.5, 0.0, 0.0, 1.0]
    assert output["kept_row_mass"] == pytest.approx(1.0) and output["empty_rows"] == 0 and output["nodes"] == 45


def test_two_hardened_runs_of_one_seed_have_secrets_of_their_own() -> None:
    where = graph(45, clients=3)
    runs = [experiment(where, structure_hops=2, prune=0, rounds=2) for _ in range(2)]
    for run in runs:
        run.loop.play()
    first, second = ([state.columns.tolist() for state in states(run).values()] for run in runs)
    assert first != second
    assert not torch.equal(runs[0].loop.state.nsf.sort(0).values, runs[1].loop.state.nsf.sort(0).values)  # type: ignore[attr-defined]


def test_structure_alone_predicts_with_z(monkeypatch: pytest.MonkeyPatch) -> None:
    same_secrets(monkeypatch)
    where = graph(45, clients=3)
    both, alone = (experiment(where, structure_hops=3, rounds=2, inference=how) for how in ("both", "structure"))
    for run in (both, alone):
        run.loop.play()
    assert all(torch.equal(both.loop.state.weights[n], alone.loop.state.weights[n]) for n in both.loop.state.weights)  # type: ignore[attr-defined]
    logits = []
    for run in (both, alone):
        client: Any = run.engine.party("client-0").client
        logits.append(client.logits())
    feature = {n.removeprefix("feature."): t for n, t in both.loop.state.weights.items() if n.startswith("feature.")}  # type: ignore[attr-defined]
    torch.testing.assert_close(logits[0] - logits[1], client.learner.logits(feature), atol=1e-10, rtol=0)


def test_double_softmax_of_a_perfect_answer_is_bounded_away_from_zero() -> None:
    logits = torch.tensor([[60.0, 0.0, 0.0]], dtype=torch.float64)
    inputs = Inputs(1, {}, (), ((1,),), (1,), torch.tensor([0]), torch.ones(1, dtype=torch.float64))
    assert float(get_loss("ce").value(logits, inputs)) == pytest.approx(0.0, abs=1e-12)
    assert float(get_loss("double_softmax").value(logits, inputs)) == pytest.approx(math.log(1 + 2 / math.e))


def test_an_unlucky_partition_works() -> None:
    """Twenty clients of sixty nodes: some without labels, some without edges inside."""
    run = experiment(graph(60, clients=20, train=0.1), structure_hops=2, rounds=2, dropout=0.3)
    run.loop.play()
    assert run.loop.lines[-1]["test"] is not None


def test_a_round_moves_theta_and_s_once_in_each_direction() -> None:
    where, width = graph(40, clients=3), 12
    run = experiment(where, structure_hops=2, nsf_dim=width, rounds=1)
    run.loop.play()
    values = sum(tensor.numel() for tensor in run.loop.state.weights.values()) + 40 * width  # type: ignore[attr-defined]
    batch = {entry.message: entry for _, entries in run.loop._entries for entry in entries if entry.phase == "train"}
    assert batch["Task"].by_kind[Kind.MODEL] + batch["Task"].by_kind[Kind.EMBEDDING] == 3 * 8 * values
    assert batch["Step"].by_kind[Kind.GRADIENT] == 3 * 8 * values


def test_a_fingerprint_sees_every_value() -> None:
    nsf = torch.zeros(4, 3)
    other = nsf.clone()
    other[3, 2] = 1e-30
    assert fingerprint(nsf) == fingerprint(nsf.clone()) != fingerprint(other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "direct", "nsf": "degree"}, "no head to read"),
        ({"nsf": "walk", "nsf_dim": 4, "structure_hops": 4}, "nsf_dim must be above"),
        ({"nsf_lr": 0.0}, "nsf_lr must be above 0"),
        ({"nsf_weight_decay": -1.0}, "nsf_weight_decay must be at least 0"),
        ({"algorithm": "fedavg", "nsf_at": "clients"}, "nsf_at=server"),
        ({"structure_hidden": (0,)}, "widths of at least 1"),
        ({"nsf": "graphlets"}, "unknown value for nsf"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("fedstruct", {"dataset": "csbm", "preset": "fedstruct", **settings})


def test_every_protocol_of_the_settings_is_there() -> None:
    assert get_args(get_type_hints(FedStructConfig)["protocol"]) == ("streamed", *PROTOCOLS)


@pytest.mark.parametrize(
    ("dataset", "hops", "hidden", "feature_hops"),
    [
        ("cora", 10, (256,), 2),
        ("citeseer", 20, (128, 64), 2),
        ("pubmed", 20, (128,), 2),
        ("chameleon", 1, (256,), 1),
        ("amazon-photo", 3, (256,), 1),
        ("amazon-ratings", 5, (256,), 2),
    ],
)
def test_presets_are_the_papers_table(dataset: str, hops: int, hidden: tuple[int, ...], feature_hops: int) -> None:
    paper = resolve("fedstruct", {"dataset": dataset})
    config = paper.method_config
    assert (config.structure_hops, config.structure_hidden, config.hops, config.backbone) == (
        hops,
        hidden,
        feature_hops,
        "dgcn",
    )
    assert (config.prune, config.nsf_dim, config.loss, config.weighting) == (30, 256, "ce", "train")
    assert (config.protocol, config.prune_mode) == ("streamed", "row")
    reference = resolve("fedstruct", {"dataset": dataset, "profile": "reference"}).method_config
    assert (reference.protocol, reference.prune_mode) == ("published", "global")
    assert (reference.loss, reference.weighting) == ("double_softmax", "nodes")


def test_parts_are_cut_as_the_helpers_say() -> None:
    """The helper's self-loop and isolated nodes are really there: tests lean on them."""
    where = graph(40, clients=3, isolated=2)
    assert bool(((where.whole.edge_index[0] == 0) & (where.whole.edge_index[1] == 0)).any())
    assert not torch.isin(where.whole.edge_index, torch.tensor([38, 39])).any()
    assert split_graph(where.whole, torch.zeros(40, dtype=torch.int64), ("client-0",))["client-0"].cross.num_edges == 0  # type: ignore[union-attr]
