"""FedStruct's streamed protocol: losses, gradients and models are those of the dense un-pruned computation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp
import torch
from dense_powers import combined_adjacency
from fedstruct_helpers import experiment as any_experiment
from fedstruct_helpers import graph, states, walk
from torch import Tensor

from isthmus.cli.main import main
from isthmus.data.scenario import Scenario
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.interface import Failure, QuorumError
from isthmus.federation.kept import kept_bytes, restore_kept
from isthmus.graph.normalise import row_norm
from isthmus.methods.fedstruct import streamed
from isthmus.methods.fedstruct.closed_edges import NOBODY, closed_arcs, told_apart
from isthmus.methods.fedstruct.streamed_client import KEPT_VALUES, StreamedClient
from isthmus.methods.fedstruct.streamed_hops import ArcList, Hop, Start
from isthmus.privacy.determined import Equations, determined
from isthmus.tensors import Weights
from isthmus.testing import check_method

experiment = partial(any_experiment, protocol="streamed")
SKIP = {
    "one_client_equals_local": "one client still has its structure branch",
    "identical_clients_stay_identical": "a node has one owner: clients with the same nodes are refused",
    "order_does_not_matter": (
        "data and the names that cross edges give must be exchanged together: see test_fedstruct.py"
    ),
}


def same_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """First rows of S come from secrets; runs that are compared must have the same ones."""
    monkeypatch.setattr("isthmus.methods.fedstruct.streamed_client.secrets.token_bytes", lambda size: b"7" * size)


class Dense:
    """q = h + z on the whole graph under autograd: local propagation per owner, one dense Abar, one loss (E1 to E3)."""

    def __init__(self, where: Scenario, run: SimulatedRun) -> None:
        config, state = run.settings.method_config, run.loop.state
        n = where.whole.num_nodes
        local = sp.lil_matrix((n, n))
        for data in where.parts.values():
            ids = data.node_id.numpy()
            local[np.ix_(ids, ids)] = row_norm(data.edge_index, data.num_nodes).toarray()
        self.where = where
        self.local = torch.from_numpy(np.linalg.matrix_power(local.toarray(), config.hops or 2))
        one_hot = np.eye(config.structure_hops)
        self.powers = [torch.eye(n, dtype=torch.float64)]
        self.powers += [torch.from_numpy(combined_adjacency(walk(where), tuple(row))) for row in one_hot]
        weights: Weights = state.weights  # type: ignore[attr-defined]
        self.theta = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        given = torch.tensor([config.beta0, *config.power_weights], dtype=torch.float64)
        self.betas = self.theta.get("structure.betas", given)
        self.nsf = rows_of_s(run, where).requires_grad_(config.learns_nsf)

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
        headed = any(name.startswith("structure.layers") for name in self.theta)
        g = self.mlp(self.nsf, "structure.", "norm") if headed else self.nsf
        z = torch.stack([beta * (power @ g) for beta, power in zip(self.betas, self.powers, strict=True)]).sum(0)
        return self.local @ self.mlp(self.where.whole.x.double(), "feature.", "input_norm") + z

    def loss(self) -> Tensor:
        train = self.train
        return torch.nn.functional.cross_entropy(self.logits()[train], self.where.whole.y[train])

    @property
    def train(self) -> Tensor:
        """Training nodes of all clients."""
        mask = torch.zeros(self.where.whole.num_nodes, dtype=torch.bool)
        for data in self.where.parts.values():
            mask[data.node_id[data.train]] = True
        return mask


def rows_of_s(run: SimulatedRun, where: Scenario) -> Tensor:
    """Everybody's rows by global id."""
    parts = {c: run.engine.party(c).client.rows_of_s() for c in where.parts}  # type: ignore[attr-defined]
    first = next(iter(parts.values()))
    out = torch.zeros(where.whole.num_nodes, first.shape[1], dtype=torch.float64)
    for client, rows in parts.items():
        out[where.parts[client].node_id] = rows.double()
    return out


def without_labels(where: Scenario, client: str) -> Scenario:
    bare = replace(where.parts[client], train=torch.zeros_like(where.parts[client].train))
    return replace(where, parts={**where.parts, client: bare})


@pytest.mark.parametrize("execution", ["each", "cohort"])
@pytest.mark.parametrize(
    ("where", "settings"),
    [
        (graph(36, clients=4), {}),
        (graph(36, clients=4, directed=True, isolated=3), {"betas": (0.5, 0.3, 0.2), "beta0": 0.1}),
        (without_labels(graph(36, clients=3), "client-1"), {"train_betas": True, "beta0": 0.2}),
        (graph(30, clients=1), {}),
        (graph(36, clients=3, seed=3), {"form": "direct", "nsf_lr": 0.05, "structure_hidden": ()}),
        (graph(36, clients=5, directed=True), {"nsf": "degree", "structure_hidden": (8, 5)}),
    ],
    ids=["undirected", "directed, isolated, betas", "no labels, trained betas", "one client", "direct", "degree"],
)
def test_losses_and_gradients_are_those_of_the_dense_computation(
    where: Scenario, settings: dict[str, Any], execution: str
) -> None:
    if execution == "cohort" and len(where.parts) == 1:
        pytest.skip("a cohort has two clients or more")
    run = experiment(
        where, structure_hops=3, loss="ce", weighting="train", **{"optimizer": "sgd", "execution": execution} | settings
    )
    run.loop.play(until=1)
    dense, state = Dense(where, run), run.loop.state
    before = rows_of_s(run, where)
    config, session = run.settings.method_config, run.loop.session
    session.clock.begin("train", 1, run.loop.at.step + 1)
    streamed.differentiated(session, config, Start(state.weights, state.total, True))  # type: ignore[attr-defined]
    step = session.sum(StreamedClient.finish)
    names, tensors = list(dense.theta), [*dense.theta.values(), *([dense.nsf] if config.learns_nsf else [])]
    expected = torch.autograd.grad(dense.loss(), tensors)
    for name, grad in zip(names, expected, strict=False):
        torch.testing.assert_close(step.gradients[name], grad, atol=1e-12, rtol=1e-9, msg=name)
    assert step.share == pytest.approx(1.0)
    if config.learns_nsf:  # plain gradient descent: the step tells the gradient
        lr, decay = config.nsf_rates
        torch.testing.assert_close(
            (before - rows_of_s(run, where)) / lr, expected[-1] + decay * before, atol=1e-12, rtol=1e-9
        )
    session.clock.begin("evaluation", 1, run.loop.at.step + 1)
    streamed.evaluate(state, session, config)  # type: ignore[arg-type]
    found = {c: run.engine.party(c).client.logits() for c in where.parts}
    fresh = Dense(where, run)  # S has stepped
    for client, logits in found.items():
        torch.testing.assert_close(logits, fresh.logits()[where.parts[client].node_id].detach(), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("backbone", ["sage", "gcn", "mlp"])
@pytest.mark.parametrize("directed", [False, True])
def test_gradients_of_any_feature_model_are_the_slopes_of_the_pooled_loss(
    backbone: str, directed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_secrets(monkeypatch)  # other first rows of S may lie at a kink of a ReLU, where a difference is no slope
    where = graph(36, clients=3, directed=directed)
    model = {"backbone": backbone, "hidden": (6,), "loss": "ce", "weighting": "train", "optimizer": "sgd"}
    run = experiment(where, structure_hops=2, betas=(0.4, 0.6), execution="each", **model)
    run.loop.play(until=1)
    state: Any = run.loop.state
    config, session, turns = run.settings.method_config, run.loop.session, iter(range(1, 100))

    def loss(weights: Weights) -> float:
        session.clock.begin("evaluation", 1, run.loop.at.step + next(turns))
        streamed.evaluate(replace(state, weights=weights), session, config)
        parts = [
            (run.engine.party(c).client.logits()[data.train], data.y[data.train]) for c, data in where.parts.items()
        ]
        logits, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        return float(torch.nn.functional.cross_entropy(logits, labels))

    draws = torch.Generator().manual_seed(0)
    slopes = []
    for name in state.weights:
        way = torch.randn(state.weights[name].shape, generator=draws, dtype=torch.float64)
        above, below = ({**state.weights, name: state.weights[name] + sign * 1e-5 * way} for sign in (1, -1))
        slopes.append((name, way, (loss(above) - loss(below)) / 2e-5))
    session.clock.begin("train", 1, run.loop.at.step + next(turns))
    streamed.differentiated(session, config, Start(state.weights, state.total, True))
    gradients = session.sum(StreamedClient.finish).gradients
    assert any(name.startswith("feature.") and abs(slope) > 1e-3 for name, _, slope in slopes)
    for name, way, slope in slopes:
        assert float((gradients[name] * way).sum()) == pytest.approx(slope, abs=2e-7), name


@pytest.mark.parametrize("secure", [False, True])
def test_twenty_adam_steps_equal_training_at_one_place(secure: bool) -> None:
    where = graph(36, clients=3)
    given = {"structure_hops": 3, "rounds": 20, "lr": 0.01, "weight_decay": 1e-3, "loss": "ce"}
    run = experiment(where, secure_sum=secure, **given)
    run.loop.play(until=1)
    dense = Dense(where, run)
    adam = torch.optim.Adam([*dense.theta.values(), dense.nsf], lr=0.01, weight_decay=1e-3)
    for _ in range(20):
        adam.zero_grad()
        dense.loss().backward()  # type: ignore[no-untyped-call]
        adam.step()
    run.loop.play()
    for name, tensor in run.loop.state.weights.items():  # type: ignore[attr-defined]
        torch.testing.assert_close(tensor, dense.theta[name].detach(), atol=1e-5 if secure else 1e-8, rtol=0)


def test_together_is_each_by_itself_also_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    same_secrets(monkeypatch)
    where = graph(60, clients=4, directed=True)
    given = {"structure_hops": 4, "rounds": 4, "dropout": 0.5, "train_betas": True, "local_epochs": 2}
    runs = [experiment(where, execution=how, **given) for how in ("each", "cohort")]
    for run in runs:
        run.loop.play()
    assert runs[1].engine.execution == "cohort"
    first, second = (run.loop.state.weights for run in runs)  # type: ignore[attr-defined]
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-10
    assert float((rows_of_s(runs[0], where) - rows_of_s(runs[1], where)).abs().max()) < 1e-10
    assert [line["bytes"] for line in runs[0].loop.lines] == [line["bytes"] for line in runs[1].loop.lines]
    assert runs[0].loop.totals.evaluation == runs[1].loop.totals.evaluation


def test_hidden_values_that_are_not_kept_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    same_secrets(monkeypatch)
    where, given = graph(60, clients=3), {"structure_hops": 2, "rounds": 3, "dropout": 0.5}

    def trained(execution: str) -> list[Tensor]:
        run = experiment(where, execution=execution, **given)
        run.loop.play()
        assert run.engine.execution == execution
        return [*run.loop.state.weights.values(), rows_of_s(run, where)]  # type: ignore[attr-defined]

    kept = {execution: trained(execution) for execution in ("each", "cohort")}
    assert KEPT_VALUES > 60 * 12
    monkeypatch.setattr("isthmus.methods.fedstruct.streamed_client.KEPT_VALUES", 0)
    monkeypatch.setattr("isthmus.methods.fedstruct.streamed_cohort.KEPT_TOGETHER", 0)
    for execution, first in kept.items():
        assert all(torch.equal(a, b) for a, b in zip(first, trained(execution), strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nsf": "degree", "train_betas": True},
        {"algorithm": "fedavg", "local_epochs": 2},
        {"withhold_exposed": True},
        {"backbone": "sage", "hidden": (8,), "betas": (0.2, 0.3, 0.5)},
    ],
    ids=["hop2vec", "degree", "fedavg", "closed", "sage"],
)
def test_general_properties(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    same_secrets(monkeypatch)
    small = {"nsf_dim": 8, "structure_hidden": (6,), "structure_hops": 3}
    skip = SKIP | ({"cohort_equals_each": "fedavg steps each client by itself"} if "algorithm" in settings else {})
    assert "resume_is_bit_equal" in check_method("fedstruct", settings={**small, **settings}, skip=skip)


def test_one_plain_local_step_averages_to_the_step_of_fedsgd(monkeypatch: pytest.MonkeyPatch) -> None:
    same_secrets(monkeypatch)
    where = graph(45, clients=3)
    given = {"structure_hops": 3, "rounds": 3, "optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0, "train_betas": True}
    runs = [experiment(where, algorithm=name, **given) for name in ("fedsgd", "fedavg")]
    for run in runs:
        run.loop.play()
    first, second = (run.loop.state.weights for run in runs)  # type: ignore[attr-defined]
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-12


def test_no_row_of_s_and_nothing_of_its_size_leaves_an_owner(tmp_path: Path) -> None:
    where = graph(45, clients=3)
    run = experiment(where, structure_hops=2, rounds=2, nsf_dim=29, structure_hidden=())
    run.loop.play()
    sizes = {entry.message: entry for _, entries in run.loop._entries for entry in entries}
    assert set(sizes) >= {"Forward", "Backward", "ThetaStep", "ArcList"}
    assert sizes["Forward"].protection == sizes["Backward"].protection == "summed"
    slots = {client: run.engine.party(client).client.boundary.size for client in where.parts}  # type: ignore[attr-defined]
    assert sizes["Forward"].by_kind["embedding"] == 8 * 3 * 2 * sum(slots.values())
    assert set(zip(sizes["Forward"].sender, sizes["Forward"].receiver, strict=True)) == {
        (a, b) for a in slots for b in slots if a != b
    }


def test_owners_without_an_edge_between_them_write_all_the_same() -> None:
    """Six nodes in three owners; the last owner is linked to nobody."""
    where = graph(45, clients=3)
    parts = dict(where.parts)
    for client, data in parts.items():
        assert data.cross is not None
        lonely = data.cross.owners.index("client-2") if "client-2" in data.cross.owners else -1
        keep = (
            torch.zeros(data.cross.num_edges, dtype=torch.bool) if client == "client-2" else data.cross.owner != lonely
        )
        cross = data.cross
        cut = replace(
            cross, **{name: getattr(cross, name)[keep] for name in ("own", "owner", "other", "outgoing", "weight")}
        )
        parts[client] = replace(data, cross=cut)
    run = experiment(replace(where, parts=parts), structure_hops=2, rounds=2, secure_sum=True)
    run.loop.play()
    sent = [e for _, entries in run.loop._entries for e in entries if e.message == "Forward" and e.phase == "train"]
    assert all(len(entry.sender) == 6 and entry.protection == "masked" for entry in sent)


def test_owners_that_disagree_on_cross_edges_stop_the_run() -> None:
    where = graph(45, clients=3)
    data = where.parts["client-1"]
    assert data.cross is not None
    weight = data.cross.weight.clone()
    weight[0] += 1.0
    parts = {**where.parts, "client-1": replace(data, cross=replace(data.cross, weight=weight))}
    with pytest.raises(DataError, match="do not match"):
        experiment(replace(where, parts=parts), structure_hops=2).loop.play()


def test_a_client_that_leaves_between_hops_loses_the_round_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = graph(45, clients=3)
    run = experiment(where, structure_hops=3, rounds=4, **{"checkpoint.every": 1})
    run.loop.play(until=3)
    before = rows_of_s(run, where)
    weights = dict(run.loop.state.weights)  # type: ignore[attr-defined]
    party, calls = run.engine.party("client-1"), 0
    real = party.invoke

    def leaves(call: Any) -> Any:
        nonlocal calls
        calls += call.handler == "send_backward"
        return Failure("unavailable", "gone") if calls > 1 else real(call)

    monkeypatch.setattr(party, "invoke", leaves)
    with pytest.raises(QuorumError, match="client-1: unavailable"):
        run.loop.play()
    assert run.loop.at.step == 3
    assert torch.equal(before, rows_of_s(run, where))
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.loop.state.weights.items())  # type: ignore[attr-defined]
    monkeypatch.undo()
    run.loop.play()
    assert run.loop.at.step == run.loop.steps


def test_two_owners_cannot_hide_in_a_sum() -> None:
    for protocol in ("streamed", "hardened"):
        with pytest.raises(ConfigError, match="let a third one take part"):
            experiment(graph(30, clients=2), structure_hops=2, secure_sum=True, protocol=protocol).loop.play()
    run = experiment(graph(30, clients=2), structure_hops=2)
    run.loop.play()
    assert run.loop.lines[-1]["test"] is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nsf": "walk"}, "protocol=hardened"),
        ({"nsf_at": "clients"}, "keeps every row of S at its owner"),
        ({"betas": (1.0, 2.0), "structure_hops": 3}, "one weight per power"),
        ({"structure_hops": 0}, "at least 1"),
        ({"forward_noise": -1.0}, "forward_noise must be at least 0"),
        ({"forward_noise": 1.0, "protocol": "hardened"}, "set protocol=streamed"),
        ({"forward_noise": 1.0, "execution": "cohort"}, "execution=each"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("fedstruct", {"dataset": "csbm", "preset": "fedstruct", **settings})


def test_the_sheet_says_what_remains(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for flags in (["--secure-sum"], ["--secure-sum", "--set", "withhold_exposed=true"], []):
        assert main(["disclose", "fedstruct", *flags]) == 0
        told.append(" ".join(capsys.readouterr().out.split()))
    assert "named 71 of 685 adjacent training nodes" in told[0] and "ClosedNodes" not in told[0]
    assert "named 0 of 685" in told[1] and "ClosedNodes" in told[1]
    assert "sender by sender" in told[2]


def test_noise_is_shared_out_among_the_senders() -> None:
    _, client = noisy()
    mail = client.send_forward(Hop(1))
    parts = torch.split(
        torch.from_numpy(client.arcs("forward") @ client.scratch.hops.values.numpy()),
        [*client.state.out_slots.values()],
    )
    noise = {name: mail[name].sums - part for name, part in zip(client.state.out_slots, parts, strict=True)}
    assert not torch.equal(noise["client-1"][:5], noise["client-2"][:5])
    everything = torch.cat([part.flatten() for part in noise.values()])
    assert float(everything.std()) == pytest.approx(2.0 / np.sqrt(2), rel=0.2)


def test_the_same_sums_get_the_same_noise_and_others_another() -> None:
    """Whoever asks for them again and again averages nothing away, in a prediction neither; a difference has noise."""
    run, client = noisy()
    sums = torch.ones(9, 3, dtype=torch.float64)
    first = client._noisy(sums, "client-1")
    run.loop.session.clock.begin("evaluation", 1, run.loop.at.step + 5)
    run.loop.session.call(StreamedClient.begin, Start(run.loop.state.weights, 1.0, False))  # type: ignore[attr-defined]
    assert torch.equal(client._noisy(sums, "client-1"), first)
    kept = kept_bytes(client)
    client.state = replace(client.state, secret=b"another")
    assert not torch.equal(client._noisy(sums, "client-1"), first)
    restore_kept(client, client.state.weights, kept, as_trained=True)
    assert torch.equal(client._noisy(sums, "client-1"), first)
    moved = sums + torch.eye(9, 3)
    assert float((client._noisy(moved, "client-1") - first - torch.eye(9, 3)).abs().min()) > 1e-6


def noisy() -> tuple[SimulatedRun, Any]:
    """A run with forward noise, and a client before its first hop."""
    run = experiment(graph(60, clients=3), structure_hops=2, rounds=1, forward_noise=2.0, nsf="degree")
    run.loop.play(until=1)
    state: Any = run.loop.state
    run.loop.session.clock.begin("train", 1, run.loop.at.step + 1)
    run.loop.session.call(StreamedClient.begin, Start(state.weights, state.total, True))
    return run, run.engine.party("client-0").client


def patterns(run: SimulatedRun, client: str) -> dict[int, frozenset[Any]]:
    """Foreign nodes by their edges to a client's slots, as the sums that it is sent are formed."""
    found: dict[int, list[Any]] = {}
    for sender, state in states(run).items():
        ids = run.engine.party(sender).client.data.node_id.tolist()
        for way in ("forward", "backward"):
            slots = state.out_slots if way == "forward" else state.in_slots
            if client not in slots:
                continue
            before = sum(count for name, count in slots.items() if name < client)
            block = run.engine.party(sender).client.arcs(way)[before : before + slots[client]].tocoo()
            for row, column, weight in zip(block.row, block.col, block.data, strict=True):
                found.setdefault(ids[column], []).append((way, int(row), float(weight)))
    return {node: frozenset(edges) for node, edges in found.items()}


@pytest.mark.parametrize("directed", [False, True])
def test_no_training_node_is_the_only_one_with_its_edges_to_a_client(directed: bool) -> None:
    where = graph(150, clients=4, directed=directed, train=0.5)
    runs = {close: experiment(where, structure_hops=2, rounds=1, withhold_exposed=close) for close in (False, True)}
    alone: dict[bool, int] = {}
    for close, run in runs.items():
        run.loop.play(until=1)
        training = {int(i) for c in where.parts for i in states(run)[c].trained_ids}
        alone[close] = 0
        for client in where.parts:
            seen = patterns(run, client)
            count = Counter(seen.values())
            alone[close] += sum(node in training and count[edges] == 1 for node, edges in seen.items())
    assert alone[False] > 10 and alone[True] == 0
    kept = [sum(run.engine.party(c).client.arcs("forward").nnz for c in where.parts) for run in runs.values()]  # type: ignore[attr-defined]
    assert 0.3 * kept[0] < kept[1] < kept[0], "only edges of training nodes that stand alone are left out"


@pytest.mark.parametrize("directed", [False, True])
def test_closed_edges_are_left_out_on_both_ways_and_at_both_ends(directed: bool) -> None:
    """What goes back is the transpose of what goes forth: together (one matrix) is each by itself (two)."""
    where = graph(60, clients=4, directed=directed)
    given = {"structure_hops": 3, "rounds": 3, "nsf": "degree", "withhold_exposed": True}
    runs = [experiment(where, execution=how, **given) for how in ("each", "cohort")]
    for run in runs:
        run.loop.play()
    first, second = (run.loop.state.weights for run in runs)  # type: ignore[attr-defined]
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-10


def test_nodes_that_share_their_edges_are_not_told_apart() -> None:
    """Own node 0 has edges to 10, 11 and 12; own node 1 to 12, 13; own node 2 to 14 with two weights."""
    ends = [(0, 10, 1.0), (0, 11, 1.0), (0, 12, 1.0), (1, 12, 1.0), (1, 13, 1.0), (2, 14, 1.0), (2, 15, 2.0)]
    own, other, weight = (torch.tensor(part) for part in zip(*ends, strict=True))
    ones = torch.ones(len(ends), dtype=torch.int64)
    arcs = {"client-1": ArcList(other, own + 100, ones, weight, ones, 3, 3)}
    ids, keep = told_apart(arcs)["client-1"]
    assert dict(zip(ids.tolist(), keep.tolist(), strict=True)) == {12: 100, 13: NOBODY, 14: NOBODY, 15: NOBODY}
    shut = closed_arcs(other, own + 100, torch.from_numpy(ids), torch.from_numpy(keep))
    assert other[~shut].tolist() == [10, 11, 12] and own[~shut].tolist() == [0, 0, 0]


def test_determined_unknowns_by_peeling_and_by_rank() -> None:
    matrix = sp.csr_matrix(
        np.array([[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 2, 0, 0], [0, 0, 0, 0, 1, 1.0]])
    )
    assert determined(matrix).tolist() == [True, True, True, True, False, False]
    assert determined(sp.csr_matrix((0, 3))).tolist() == [False] * 3


def test_peeling_and_parts_find_what_one_rank_of_all_equations_finds() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        shape = tuple(rng.integers(1, 12, size=2))
        dense = (rng.random(shape) < rng.uniform(0.05, 0.5)) * rng.choice([0.5, 1.0, 2.0], size=shape)
        equations, values = Equations(sp.csr_matrix(dense)), rng.normal(size=(shape[1], 3))
        inside = np.abs(scipy.linalg.null_space(dense)).max(axis=1, initial=0.0) < 1e-8
        assert np.array_equal(equations.determined, inside)
        np.testing.assert_allclose(equations.solve(dense @ values), values * inside[:, None], atol=1e-8)
