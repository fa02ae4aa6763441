"""FedGGR: the testable properties of its spec (section 11), its controls, and what it does with bad input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from faults import Fault, FaultyEngine
from torch import Tensor
from torch.func import functional_call

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.ledger import differences
from isthmus.methods.fedggr import FedGGRConfig, ServerState
from isthmus.methods.fedggr.algorithm import chosen, joined_gradient
from isthmus.methods.fedggr.controls import NoGraph, SelfSupervised
from isthmus.methods.fedggr.diagnostics import graph_facts
from isthmus.methods.fedggr.global_graph import GlobalModule
from isthmus.methods.fedggr.messages import Returned
from isthmus.methods.fedggr.protections import quantised
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import build_inputs
from isthmus.nn.loss import get_loss
from isthmus.nn.registry import build_backbone
from isthmus.nn.train import gradients
from isthmus.nn.two_input_head import HEAD, Joined, classify, first_head
from isthmus.seeds import Stream
from isthmus.tensors import get_weights
from isthmus.testing import check_method

SMALL: dict[str, Any] = {
    "hidden": (8,),
    "local_width": 6,
    "global_width": 5,
    "server_hidden": 7,
    "embedding_width": 6,
    "encoder_hidden": 8,
    "encoder_epochs": 4,
    "k": 4,
    "dropout": 0.0,
    "rounds": 3,
    "lr": 0.05,
}
EXACT = {**SMALL, "precision": "float64", "optimizer": "sgd", "weight_decay": 0.0, "rounds": 1, "selection": "last"}
REASONS = {
    "one_client_equals_local": "one client alone still has the server's channel",
    "identical_clients_stay_identical": "copies of a node tie at the k-th place, and ties go to the lower row",
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(dataset="csbm:nodes=90,classes=3,features=12,degree=4", clients=3, split="40/20/40", seed=1)


def experiment(scenario: Scenario, *, plan: tuple[Fault, ...] = (), **settings: Any) -> SimulatedRun:
    flags = {"dataset": "csbm", "preset": "fedggr", "clients": len(scenario.parts), "seed": 1, **SMALL, **settings}
    options = {"engine": FaultyEngine, "plan": plan} if plan else {}
    return SimulatedRun(resolve("fedggr", flags), scenario, **options)  # type: ignore[arg-type]


def play(scenario: Scenario, **settings: Any) -> SimulatedRun:
    run = experiment(scenario, **settings)
    run.loop.play()
    return run


def server(run: SimulatedRun) -> ServerState:
    assert isinstance(run.loop.state, ServerState)
    return run.loop.state


def ready(run: SimulatedRun) -> int:
    """Steps of the setup."""
    return int(run.settings.method_config.encoder_rounds) + 1  # type: ignore[attr-defined]


def clients(run: SimulatedRun) -> dict[str, Any]:
    return {name: run.engine.party(name).client for name in run.engine.parties("client")}


# -- general properties ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"backbone": "gat"}, {"backbone": "gprgnn"}, {"joint_dropout": 0.4, "refresh": 1}, {"encoder": "projection"}],
    ids=str,
)
def test_general_properties(settings: dict[str, Any]) -> None:
    small = {key: value for key, value in SMALL.items() if key not in ("dropout", "rounds")}
    calm = {"dprate": 0.0} if settings.get("backbone") == "gprgnn" else {}
    skip = REASONS | ({"order_does_not_matter": "dropout"} if "joint_dropout" in settings else {})
    # Wide encoders: nodes that are alike tie, and whom others then choose does depend on the order.
    wide = {"embedding_width": 24, "encoder_hidden": 32, "preset": "fedggr", "selection": "last"}
    check_method("fedggr", settings={**small, **wide, **settings, **calm}, skip=skip)


@pytest.mark.parametrize("encoder", ["independent", "common_start"])
def test_encoders_that_are_not_federated_send_no_weights(scenario: Scenario, encoder: str) -> None:
    """Property 11: only E_i leaves, once; the sheet lists the auto-encoder's weights for the federated one alone."""
    run = play(scenario, encoder=encoder)
    federated = sheet_of(run.settings.method)
    travelling = [
        line for line in federated if line.phase == "setup" and line.message.__name__ in ("Encoder", "Update")
    ]
    assert len(travelling) == 2
    assert not differences(run.loop.sheet, [line for line in federated if line not in travelling])
    rows = [row for row in run.loop.sheet.rows() if row["message"] == "Uploaded"]
    assert [row["times"] for row in rows] == [3]
    assert all(
        bool(client.state.encoder) and not client.state.encoder_optimizer.first for client in clients(run).values()
    )


# -- split learning (properties 1, 2, 10)
# ----------------------------------------------------------------------------------------------


def joint_loss(
    before: SimulatedRun, state: ServerState, module: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> Tensor:
    """sum_i (|V_i| / |V|) L_i of the joined computation, in one process, by autograd alone."""
    config: FedGGRConfig = before.settings.method_config
    z = config.module.rows(
        module, state.embeddings, config.module.adjacency(module, state.embeddings, state.neighbours)
    )
    total = torch.zeros((), dtype=torch.float64)
    for (_, client), rows in zip(clients(before).items(), torch.split(z, list(state.sizes)), strict=True):
        data: NodeData = client.data
        model = client.learner.model
        own = {name: tensor for name, tensor in weights.items() if name not in HEAD}
        local = functional_call(model, own, (build_inputs(data, model, dtype=torch.float64),))
        logits = classify(weights, local, rows, activate=config.activate_local)
        loss = torch.nn.functional.cross_entropy(logits[data.train], data.y[data.train])
        total = total + data.num_nodes / state.embeddings.shape[0] * loss
    return total


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activate_local": True},
        {"backbone": "gat"},
        {"backbone": "gprgnn", "dprate": 0.0},
        {"backbone": "sage"},
        {"channel": "knn"},
        {"channel": "embeddings"},
        {"channel": "zeros"},
        {"returned": "first"},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 3])
def test_one_round_is_one_centralised_step(settings: dict[str, Any], count: int) -> None:
    scenario = build_scenario(
        dataset="csbm:nodes=70,classes=3,features=12,degree=4", clients=count, split="40/20/40", seed=4
    )
    run = experiment(scenario, **EXACT, **settings)
    run.loop.play(until=ready(run))
    state = server(run)
    module = {name: tensor.clone().requires_grad_() for name, tensor in state.module.items()}
    weights = {name: tensor.clone().requires_grad_() for name, tensor in state.weights.items()}
    leaves = [*module.values(), *weights.values()]
    found = torch.autograd.grad(joint_loss(run, state, module, weights), leaves, allow_unused=True)
    expected = dict(zip([*module, *weights], found, strict=True))
    run.loop.play()
    new = server(run)
    trained = set(run.settings.method_config.module.trained(state.module))
    for name, tensor in {**new.module, **new.weights}.items():
        start = {**state.module, **state.weights}[name]
        grad = expected[name]
        moved = grad is not None and (name in state.weights or name in trained)
        torch.testing.assert_close(
            tensor, start - 0.05 * grad if moved else start, atol=1e-10, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    if settings.get("channel", "learned") == "learned":
        assert all(float(expected[name].abs().max()) > 0 for name in state.module)  # the generator too is reached


def test_the_gradient_goes_through_the_pass_that_was_sent(scenario: Scenario) -> None:
    """Dropout at the server: pulling the gradients back through another pass would give other weights."""
    run = experiment(scenario, **{**EXACT, "dropout": 0.5})
    run.loop.play(until=ready(run))
    state = server(run)
    config: FedGGRConfig = run.settings.method_config
    sent: dict[str, Tensor] = {}
    returned: dict[str, Tensor] = {}
    for name, client in clients(run).items():
        client.turn, plain = (lambda turn, n=name, c=client: _spied(c, turn, n, sent, returned)), client.turn
        client.plain_turn = plain
    run.loop.play()
    from isthmus.nn.dropout import DropoutSource

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.module.items()}
    dropout = DropoutSource([Stream(1, ("server", "train", 1, "dropout")).torch()])
    z = config.module.rows(
        leaves, state.embeddings, config.module.adjacency(leaves, state.embeddings, state.neighbours), dropout
    )
    torch.testing.assert_close(z.detach(), torch.cat([sent[name] for name in sorted(sent)]), atol=0, rtol=0)
    shares = [size / 90 for size in state.sizes]
    z.backward(torch.cat([returned[name] * share for name, share in zip(sorted(returned), shares, strict=True)]))
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        torch.testing.assert_close(server(run).module[name], state.module[name] - 0.05 * leaf.grad, atol=1e-12, rtol=0)


def _spied(client: Any, turn: Any, name: str, sent: dict[str, Tensor], returned: dict[str, Tensor]) -> Returned:
    sent[name] = turn.rows.clone()
    reply: Returned = client.plain_turn(turn)
    returned[name] = reply.rows.clone()
    return reply


def test_gradient_options() -> None:
    found = [torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.tensor([[6.0]])]
    assert {which: float(chosen(found, which)) for which in ("last", "first", "mean", "sum")} == {
        "last": 6.0,
        "first": 1.0,
        "mean": 3.0,
        "sum": 9.0,
    }


@pytest.mark.parametrize("returned", ["last", "mean", "sum"])
def test_options_differ_only_where_a_client_takes_several_steps(scenario: Scenario, returned: str) -> None:
    for epochs, same in ((1, True), (3, False)):
        first, other = (
            server(play(scenario, **EXACT, local_epochs=epochs, returned=r)).module for r in ("first", returned)
        )
        assert torch.equal(first["gnn.0.weight"], other["gnn.0.weight"]) is same


# -- bookkeeping (properties 3, 8, 9, 12, 16)
# ------------------------------------------------------------------------------------------


def permuted(data: NodeData, order: Tensor) -> NodeData:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    rows = {name: getattr(data, name)[order] for name in ("y", "train", "val", "test", "node_id")}
    x = data.x.to_dense() if data.x.layout == torch.sparse_csr else data.x
    return replace(data, x=x[order], edge_index=back[data.edge_index], cross=None, **rows)


def test_permuting_a_clients_nodes_permutes_its_rows(scenario: Scenario) -> None:
    parts = dict(scenario.parts)
    order = torch.randperm(parts["client-1"].num_nodes, generator=torch.Generator().manual_seed(0))
    parts["client-1"] = permuted(parts["client-1"], order)
    # Without hops no two nodes are alike. With them both nodes of a pair without other neighbours are, and of two alike
    # the first counts.
    settings = {**EXACT, "rounds": 3, "embedding_width": 24, "encoder_hidden": 32, "encoder_hops": False}
    plain, turned = play(scenario, **settings), play(replace(scenario, parts=parts), **settings)
    before, after = clients(plain), clients(turned)
    torch.testing.assert_close(after["client-1"].state.rows, before["client-1"].state.rows[order], atol=1e-9, rtol=0)
    torch.testing.assert_close(after["client-0"].state.rows, before["client-0"].state.rows, atol=1e-9, rtol=0)
    assert turned.loop.lines[-1]["val_loss"] == pytest.approx(plain.loop.lines[-1]["val_loss"], abs=1e-9)


def test_zero_rows_and_zero_columns_leave_a_gcn_with_a_linear_head(scenario: Scenario) -> None:
    data = scenario.parts["client-0"]
    common: dict[str, Any] = {"num_features": 12, "dropout": 0.0, "input_norm": False, "stream": Stream(0)}
    whole = build_backbone("gcn", num_classes=3, hidden=(8, 6), head=True, **common)
    local = build_backbone("gcn", num_classes=6, hidden=(8,), head=False, **common)
    weights = get_weights(whole)
    own = {name: weights[name] for name in get_weights(local)}
    head = {"head.weight": torch.cat([weights["head.weight"], torch.zeros(5, 3)]), "head.bias": weights["head.bias"]}
    inputs = build_inputs(data, whole, data.train)
    joined = Joined(get_loss("ce"), head, torch.zeros(data.num_train, 5))
    grads, loss = gradients(local, own, build_inputs(data, local, data.train), loss=joined.as_loss())
    expected, expected_loss = gradients(whole, weights, inputs)
    torch.testing.assert_close(loss, expected_loss, atol=1e-6, rtol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=0)
    torch.testing.assert_close(joined.head_grads["head.weight"][:6], expected["head.weight"], atol=1e-6, rtol=0)
    assert not bool(joined.head_grads["head.weight"][6:].any()) and not bool(joined.rows_grad.any())


def test_what_travels_in_a_round(scenario: Scenario) -> None:
    """Property 12, in bytes by kind: W_C and |V_i| x F_g down; W_C and |V_i| x F_g up; E_i once."""
    run = play(scenario, rounds=2)
    model = sum(tensor.numel() for tensor in server(run).weights.values()) * 4
    rows = {(row["phase"], row["message"]): row["bytes_by_kind"] for row in run.loop.sheet.rows()}
    assert rows["train", "Turn"] == {"model": 2 * 3 * model, "embedding": 2 * 90 * 5 * 4}
    assert rows["train", "Returned"] == {"gradient": 2 * 90 * 5 * 4}
    assert rows["train", "Update"]["model"] == 2 * 3 * model
    assert rows["setup", "Uploaded"] == {"embedding": 90 * 6 * 4}


def test_an_optimiser_that_is_reset_moves_every_weight_by_the_rate() -> None:
    scenario = build_scenario(
        dataset="csbm:nodes=60,classes=3,features=12,degree=4", clients=1, split="40/20/40", seed=4
    )
    run = experiment(scenario, reset_optimizer=True, weight_decay=0.0, precision="float64", rounds=3, selection="last")
    run.loop.play(until=2)
    for _ in range(2):
        before = server(run).weights
        run.loop.play(until=run.loop.at.step + 1)
        for name, tensor in server(run).weights.items():
            moved = (tensor - before[name]).abs()
            assert bool((moved[moved > 1e-9] > 0.04).all()) and float(moved.max()) <= 0.05 + 1e-9, name


# -- clients that are missing ----------------------------------------------------------------------


def test_a_missing_client_counts_with_zeros_and_the_rest_is_not_reweighted(scenario: Scenario) -> None:
    run = experiment(scenario)
    run.loop.play(until=ready(run))
    state, config = server(run), run.settings.method_config
    replies = {
        name: Returned(torch.ones(size, 5))
        for name, size in zip(run.engine.parties("client"), state.sizes, strict=True)
    }
    everyone = joined_gradient(state, replies, run.engine.parties("client"), config)
    del replies["client-1"]
    some = joined_gradient(state, replies, run.engine.parties("client"), config)
    begin, end = state.sizes[0], state.sizes[0] + state.sizes[1]
    assert not bool(some[begin:end].any())
    assert torch.equal(some[:begin], everyone[:begin]) and torch.equal(some[end:], everyone[end:])


def test_a_round_goes_on_without_a_client_where_the_quorum_allows(scenario: Scenario) -> None:
    plan = (Fault("client-1", "train", 2, "turn", times=9),)
    run = experiment(scenario, plan=plan, quorum=0.5)
    run.loop.play()
    assert len(run.loop.lines) == 3 and all(line["val_loss"] < 10 for line in run.loop.lines)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in server(run).weights.values())


# -- controls and diagnostics ----------------------------------------------------------------------


def test_controls(scenario: Scenario) -> None:
    start = experiment(scenario).loop.state
    assert isinstance(start, ServerState)
    fixed = server(play(scenario, channel="knn"))
    assert torch.equal(fixed.module["generator.0"], torch.ones(6))
    assert not torch.equal(fixed.module["gnn.0.weight"], start.module["gnn.0.weight"])
    for channel in ("embeddings", "zeros"):
        assert server(play(scenario, channel=channel)).neighbours.shape == (90, 0)
    nothing = play(scenario, channel="zeros")
    assert all(not bool(client.state.rows.any()) for client in clients(nothing).values())
    assert torch.equal(server(nothing).module["gnn.0.weight"], start.module["gnn.0.weight"])


def test_facts_against_a_count_by_hand(scenario: Scenario) -> None:
    run = play(scenario)
    state = server(run)
    facts = run.settings.method.facts
    assert facts is not None
    output = facts(state, run.settings.method_config, scenario)["learned_graph"]
    ids = torch.cat([scenario.parts[name].node_id for name in sorted(scenario.parts)]).tolist()
    owner = {int(node): name for name, data in scenario.parts.items() for node in data.node_id}
    learned = {frozenset((ids[i], ids[j])) for i, row in enumerate(state.neighbours.tolist()) for j in row if i != j}
    true = {frozenset(pair) for pair in scenario.whole.edge_index.T.tolist() if pair[0] != pair[1]}
    lost = {pair for pair in true if len({owner[node] for node in pair}) == 2}
    cross = {pair for pair in learned if len({owner[node] for node in pair}) == 2}
    alike = [len({int(scenario.whole.y[node]) for node in pair}) == 1 for pair in learned]
    assert output["edges"] == len(learned) and output["deleted_edges"] == len(lost)
    assert output["cross_share"] == pytest.approx(len(cross) / len(learned))
    assert output["deleted_recall"] == pytest.approx(len(lost & learned) / len(lost))
    assert output["deleted_precision"] == pytest.approx(len(lost & cross) / len(cross))
    assert output["homophily"] == pytest.approx(sum(alike) / len(alike))
    assert output["degree_min"] >= 4 and output["degree_max"] >= output["degree_p95"] >= output["degree_median"]
    alone = facts(state, run.settings.method_config, None)["learned_graph"]
    assert alone["cross_share"] == output["cross_share"] and "deleted_recall" not in alone


def test_facts_do_not_depend_on_what_node_ids_look_like(scenario: Scenario) -> None:
    """Ids are names, not rows: large ones, and in another order than the rows."""
    state = server(play(scenario))
    names = torch.randperm(90, generator=torch.Generator().manual_seed(0)) * (1 << 55) + 12345
    parts = {name: replace(data, node_id=names[data.node_id]) for name, data in scenario.parts.items()}
    renamed = replace(scenario, parts=parts, whole=replace(scenario.whole, node_id=names))
    assert graph_facts(state.neighbours, state.sizes, renamed) == graph_facts(state.neighbours, state.sizes, scenario)


def test_encoders_trained_apart_find_fewer_edges_between_clients(scenario: Scenario) -> None:
    """Property 15: near to chance with one space for all, far below with a space for each. (Without hops: in graphs
    this small, what a node shares with its neighbours at home would outweigh the rest.)"""
    shares = {}
    for encoder in ("federated", "projection", "independent"):
        run = play(
            scenario, encoder=encoder, encoder_epochs=40, encoder_hops=False, embedding_width=24, encoder_hidden=32
        )
        output = run.settings.method.facts(server(run), run.settings.method_config, None)["learned_graph"]  # type: ignore[misc]
        shares[encoder] = output["cross_share"]
        chance = output["cross_share_by_chance"]
    assert abs(shares["federated"] - chance) < 0.1 and abs(shares["projection"] - chance) < 0.1
    assert shares["independent"] < 0.5 * chance


def test_embeddings_only_is_an_mlp_of_the_embeddings() -> None:
    module = NoGraph(3)
    weights = module.first_weights(4, 5, 2, Stream(0), torch.float64)
    e = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.relu(e @ weights["gnn.0.weight"]) @ weights["gnn.1.weight"]
    graph = module.adjacency(weights, e, module.neighbours(weights, e))
    torch.testing.assert_close(module.rows(weights, e, graph), expected, atol=1e-12, rtol=0)


def test_self_supervision_guesses_hidden_entries_from_neighbours() -> None:
    module = SelfSupervised(3, hidden_share=0.3)
    weights = module.first_weights(4, 5, 2, Stream(0), torch.float64)
    e = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    graph = module.adjacency(leaves, e, module.neighbours(weights, e))
    assert graph is not None
    error = module.guess_error(leaves, e, graph, DropoutSource([Stream(3).torch()]))
    seen = DropoutSource([Stream(3).torch()]).mask((9,), 9, 4, 0.3, torch.float64) > 0
    a = graph.to_dense().detach()
    guess = a @ torch.relu(a @ (e * seen) @ weights["denoiser.0.weight"]) @ weights["denoiser.1.weight"]
    assert 0 < (~seen).sum() < 36
    torch.testing.assert_close(error, ((guess - e)[~seen] ** 2).mean() / e.var(correction=0), atol=1e-12, rtol=0)
    error.backward()  # type: ignore[no-untyped-call]
    generator, gnn = leaves["generator.0"].grad, leaves["gnn.0.weight"].grad
    assert generator is not None
    assert generator.abs().max() > 0, "the graph learns from it"
    assert gnn is None, "Z_glob's own weights do not"


def test_self_supervision_changes_only_what_the_server_trains(scenario: Scenario) -> None:
    plain, helped = (server(play(scenario, **{**EXACT, "self_supervision": weight})) for weight in (0.0, 5.0))
    assert not any(name.startswith("denoiser") for name in plain.module)
    assert not torch.equal(plain.module["generator.0"], helped.module["generator.0"])
    for name in ("gnn.0.weight", "gnn.1.weight"):
        torch.testing.assert_close(plain.module[name], helped.module[name], atol=1e-12, rtol=0)
    for name, tensor in plain.weights.items():
        assert torch.equal(tensor, helped.weights[name])


def test_global_rows_equal_the_formula() -> None:
    """Spec 2.3 c: biases are added before A*, whose rows do not sum to one."""
    module = GlobalModule(3, dropout=0.5, input_dropout=0.4)
    weights = module.first_weights(4, 5, 2, Stream(0), torch.float64)
    generator = torch.Generator().manual_seed(1)
    for name in ("gnn.0.bias", "gnn.1.bias"):
        weights[name].normal_(generator=generator)
    e = torch.randn(9, 4, dtype=torch.float64, generator=generator)
    graph = module.adjacency(weights, e, module.neighbours(weights, e))
    assert graph is not None
    a, source = graph.to_dense(), DropoutSource([Stream(3).torch()])
    seen = source.mask((9,), 9, 4, 0.4, torch.float64)
    kept = source.mask((9,), 9, 5, 0.5, torch.float64)
    ones = torch.ones((), dtype=torch.float64)
    for dropout, i, h in ((None, ones, ones), (DropoutSource([Stream(3).torch()]), seen, kept)):
        hidden = torch.relu(a @ ((e * i) @ weights["gnn.0.weight"] + weights["gnn.0.bias"])) * h
        expected = a @ (hidden @ weights["gnn.1.weight"] + weights["gnn.1.bias"])
        torch.testing.assert_close(module.rows(weights, e, graph, dropout), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("activate", [False, True])
def test_gradients_behind_joint_dropout_equal_autograd(scenario: Scenario, activate: bool) -> None:
    data, generator = scenario.parts["client-0"], torch.Generator().manual_seed(0)
    model = build_backbone(
        "gcn", num_features=12, num_classes=6, hidden=(8,), dropout=0.0, input_norm=False, head=False, stream=Stream(0)
    ).double()
    own, head = get_weights(model), first_head(6, 5, 3, Stream(1), torch.float64)
    inputs = build_inputs(data, model, data.train, dtype=torch.float64)
    rows = torch.randn(data.num_train, 5, dtype=torch.float64, generator=generator)
    mask = 2.0 * (torch.rand(data.num_train, 11, generator=generator) < 0.5).double()
    joined = Joined(get_loss("ce"), head, rows, activate=activate, mask=mask)
    grads, loss = gradients(model, own, inputs, loss=joined.as_loss())
    found = {**grads, **joined.head_grads, "rows": joined.rows_grad}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in {**own, **head, "rows": rows}.items()}
    local = functional_call(model, {name: leaves[name] for name in own}, (inputs,))
    logits = classify(leaves, local, leaves["rows"], activate=activate, mask=mask)
    value = torch.nn.functional.cross_entropy(logits, data.y[data.train])
    torch.testing.assert_close(loss.sum(), value.detach(), atol=1e-12, rtol=0)
    for name, expected in zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True):
        torch.testing.assert_close(found[name], expected, atol=1e-12, rtol=0)


def test_gradients_are_scaled_by_the_share_of_nodes_unless_told_not_to(scenario: Scenario) -> None:
    run = experiment(scenario)
    run.loop.play(until=ready(run))
    state, config, names = server(run), run.settings.method_config, run.engine.parties("client")
    assert isinstance(config, FedGGRConfig)
    replies = {name: Returned(torch.ones(size, 5)) for name, size in zip(names, state.sizes, strict=True)}
    assert bool((joined_gradient(state, replies, names, replace(config, scale_gradients=False)) == 1).all())
    shares = torch.repeat_interleave(torch.tensor(state.sizes) / 90, torch.tensor(state.sizes))
    torch.testing.assert_close(joined_gradient(state, replies, names, config), shares[:, None].expand(-1, 5))


@pytest.mark.parametrize(
    ("settings", "searches"),
    [({"refresh": 1}, 7), ({"refresh": 4}, 2), ({"refresh": 10}, 1), ({"refresh": 1, "channel": "knn"}, 1)],
    ids=str,
)
def test_neighbours_are_searched_again_every_few_rounds(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], searches: int
) -> None:
    found: list[Tensor] = []
    plain = GlobalModule.neighbours

    def counted(self: GlobalModule, weights: Mapping[str, Tensor], embeddings: Tensor) -> Tensor:
        found.append(plain(self, weights, embeddings))
        return found[-1]

    monkeypatch.setattr(GlobalModule, "neighbours", counted)
    state = server(play(scenario, rounds=6, selection="last", **settings))
    assert len(found) == searches and torch.equal(state.neighbours, found[-1])


def test_without_a_client_the_mean_is_over_the_rest(scenario: Scenario) -> None:
    run = experiment(scenario, plan=(Fault("client-1", "train", 1, "turn", times=9),), **EXACT, quorum=0.5)
    sent: dict[str, Any] = {}

    def spied(name: str, handler: Any) -> Any:
        return lambda common: sent.setdefault(name, handler(common))

    for name, client in clients(run).items():
        client.update = spied(name, client.update)
    run.loop.play()
    share = sum(reply.share for reply in sent.values())
    assert sorted(sent) == ["client-0", "client-2"] and share < 0.9
    for name, tensor in server(run).weights.items():
        torch.testing.assert_close(
            tensor, sum(reply.weights[name] for reply in sent.values()) / share, atol=1e-12, rtol=0
        )


def test_answers_without_training_nodes_leave_the_weights_alone(scenario: Scenario) -> None:
    idle = scenario.parts["client-0"]
    parts = {**scenario.parts, "client-0": replace(idle, train=torch.zeros_like(idle.train))}
    plan = tuple(Fault(name, "train", 1, "turn", times=9) for name in ("client-1", "client-2"))
    run = experiment(replace(scenario, parts=parts), plan=plan, **EXACT, weighting="train", quorum=0.3)
    run.loop.play(until=ready(run))
    before = server(run).weights
    run.loop.play()
    assert all(torch.equal(tensor, before[name]) for name, tensor in server(run).weights.items())


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"local_width": 0}, "local_width must be at least 1"),
        ({"global_width": 0}, "global_width"),
        ({"server_hidden": 0}, "server_hidden"),
        ({"embedding_width": 0}, "embedding_width"),
        ({"k": 0}, "k must be at least 1"),
        ({"refresh": 0}, "refresh"),
        ({"quorum": 0.0}, "quorum"),
        ({"gradient_noise": 1.0}, "set gradient_clip"),
        ({"embedding_bits": 9}, "embedding_bits"),
        ({"joint_dropout": 1.0}, "joint_dropout"),
        ({"encoder_lr": 0.0}, "encoder_lr must be above 0"),
        ({"server_lr": 0.0}, "server_lr"),
        ({"encoder_epochs": 5, "encoder_every": 2}, "multiple of encoder_every"),
        ({"init": "uniform01"}, "leave init out"),
        ({"dummy_gradients": True, "class_weight": "balanced"}, "leave class_weight out"),
        ({"self_supervision": -1.0}, "self_supervision"),
        ({"hidden_share": 0.0}, "hidden_share"),
        ({"self_supervision": 1.0, "channel": "knn"}, "leave it out with channel=knn"),
    ],
    ids=str,
)
def test_settings_are_checked(scenario: Scenario, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        experiment(scenario, **settings)


def test_k_beyond_the_nodes_says_so(scenario: Scenario) -> None:
    with pytest.raises(ConfigError, match="k must be below the number of nodes 90, got 90; set a smaller k"):
        play(scenario, k=90)


def test_clients_of_one_node() -> None:
    dataset = "csbm:nodes=6,classes=2,features=5,degree=2"
    scenario = build_scenario(dataset=dataset, clients=6, partition="random-equal", split="50/20/30", seed=0)
    assert all(data.num_nodes == 1 for data in scenario.parts.values())
    run = play(scenario, k=2)
    assert all(bool(torch.isfinite(client.state.rows).all()) for client in clients(run).values())


def test_nodes_without_features() -> None:
    scenario = build_scenario(
        dataset="csbm:nodes=40,classes=2,features=5,degree=3", clients=2, split="50/20/30", seed=0
    )
    parts = {name: replace(data, x=torch.zeros_like(data.x)) for name, data in scenario.parts.items()}
    run = play(replace(scenario, parts=parts), k=3)
    assert all(bool(torch.isfinite(client.state.rows).all()) for client in clients(run).values())


def test_quantised_columns_have_few_values() -> None:
    rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(quantised(rows, 0), rows)
    assert [len(column.unique()) for column in quantised(rows, 2).T] == [4, 4, 4]
    assert float((quantised(rows, 8) - rows).abs().max()) <= float((rows.amax(0) - rows.amin(0)).max()) / 255 / 2 + 1e-6
    assert torch.equal(quantised(torch.ones(4, 2), 3), torch.ones(4, 2))
