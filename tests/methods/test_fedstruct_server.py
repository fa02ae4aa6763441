"""FedStruct with a server that knows the graph: gradients equal autograd (FedStruct spec, section 14: 13), features are
those of the whole graph, and what the server sees is on the sheet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fedstruct_helpers import graph, walk

from isthmus.data.scenario import Scenario
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.interface import View
from isthmus.graph.graphlets import graphlet_degrees, standardised
from isthmus.graph.normalise import row_norm
from isthmus.methods.fedstruct.server_graph import HEAD_H, HEAD_Z, graph_of, net_of, script
from isthmus.privacy.attacks.labels import labels_from_embedding_gradient, labels_from_signs
from isthmus.testing import check_method

SMALL = {
    "hidden": (8,),
    "structure_hidden": (8,),
    "gnn_hidden": (8,),
    "nsf_dim": 12,
    "precision": "float64",
    "dropout": 0.0,
}
SMALL |= {"structure_hops": 2, "loss": "ce", "optimizer": "sgd", "weight_decay": 0.0, "lr": 0.1}
VIEW = View(("client-0", "client-1", "client-2"), 6, 3)
SKIP = {
    "one_client_equals_local": "one client still has its structure branch",
    "identical_clients_stay_identical": "a node has one owner",
    "order_does_not_matter": "names of clients are in the cross edges",
}


def experiment(where: Scenario, **settings: Any) -> SimulatedRun:
    given = {"dataset": "csbm", "preset": "fedstruct", "clients": len(where.parts), "rounds": 1, "execution": "each"}
    return SimulatedRun(resolve("fedstruct-server", {**given, **SMALL, **settings}), where)


@pytest.mark.parametrize(
    "settings",
    [
        {"nsf": "hop2vec", "structure_model": "gnn", "join": "sum"},
        {"nsf": "gdv", "gradients": "jacobian"},
        {"nsf": "node2vec", "nsf_epochs": 1, "backbone": "sage"},
    ],
    ids=["gnn", "gdv", "node2vec"],
)
def test_general_properties(settings: dict[str, Any]) -> None:
    small = {"nsf_dim": 8, "structure_hidden": (6,), "gnn_hidden": (6, 5), "structure_hops": 2}
    assert "resume_is_bit_equal" in check_method("fedstruct-server", settings={**small, **settings}, skip=SKIP)


def pooled_gradients(run: SimulatedRun, where: Scenario, state: Any) -> dict[str, torch.Tensor]:
    """Of the pooled loss on the whole graph, by autograd alone."""
    config = run.settings.method_config
    theta = {name: tensor.clone().requires_grad_() for name, tensor in state.weights.items()}
    nsf = state.nsf.clone().requires_grad_()
    n = where.whole.num_nodes
    local = np.zeros((n, n))
    for data in where.parts.values():
        ids = data.node_id.numpy()
        local[np.ix_(ids, ids)] = row_norm(data.edge_index, data.num_nodes).toarray()
    x = where.whole.x.double()
    normed = torch.nn.functional.layer_norm(
        x, (x.shape[1],), theta["feature.input_norm.gamma"], theta["feature.input_norm.beta"]
    )
    h = torch.relu(normed @ theta["feature.layers.0.weight"] + theta["feature.layers.0.bias"])
    h = h @ theta["feature.layers.1.weight"] + theta["feature.layers.1.bias"]
    h = torch.from_numpy(np.linalg.matrix_power(local, config.hops)) @ h
    structure = {k.removeprefix("structure."): v for k, v in theta.items() if k.startswith("structure.")}
    z = net_of(state, config).embed(structure, nsf, graph_of(state, torch.float64), None)
    q = z @ theta[HEAD_Z] + h @ theta[HEAD_H] if HEAD_Z in theta else z + h
    train = where.whole.train
    torch.nn.functional.cross_entropy(q[train], where.whole.y[train]).backward()  # type: ignore[no-untyped-call]
    return {name: tensor.grad for name, tensor in {**theta, "nsf": nsf}.items()}  # type: ignore[misc]


@pytest.mark.parametrize("gradients", ["residuals", "jacobian"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"structure_model": "gnn"}, {"join": "sum", "betas": (0.3, 0.7), "beta0": 0.1}, {"nsf": "gdv"}],
    ids=["dgcn", "gnn", "sum", "gdv"],
)
def test_a_step_is_that_of_autograd_on_the_pooled_loss(settings: dict[str, Any], gradients: str) -> None:
    where = graph(30, clients=3, directed=True, isolated=2)
    run = experiment(where, gradients=gradients, **settings)
    run.loop.play(until=1)
    before: Any = run.loop.state
    wanted = pooled_gradients(run, where, before)
    run.loop.play()
    after: Any = run.loop.state
    for name, tensor in after.weights.items():
        torch.testing.assert_close(tensor, before.weights[name] - 0.1 * wanted[name], atol=1e-10, rtol=0)
    if run.settings.method_config.learns_nsf:
        torch.testing.assert_close(after.nsf, before.nsf - 0.1 * wanted["nsf"], atol=1e-10, rtol=0)
    else:
        assert torch.equal(after.nsf, before.nsf)


def test_z_is_that_of_the_dense_power() -> None:
    where = graph(30, clients=3, directed=True)
    run = experiment(where)
    run.loop.play(until=1)
    matrix = graph_of(run.loop.state, torch.float64).walk.csr.toarray()  # type: ignore[arg-type]
    np.testing.assert_allclose(matrix, walk(where).toarray(), atol=1e-15)


@pytest.mark.parametrize("nsf", ["degree", "walk", "gdv", "node2vec"])
def test_features_are_those_of_the_whole_graph(nsf: str) -> None:
    """Edges between clients count: with one client and with three S is the same."""
    kept = []
    for clients in (1, 3):
        run = experiment(graph(30, clients=clients, isolated=2), nsf=nsf, walk_steps=5)
        run.loop.play(until=1)
        kept.append(run.loop.state.nsf)  # type: ignore[attr-defined]
    torch.testing.assert_close(kept[0], kept[1])
    where = graph(30, clients=3, isolated=2)
    if nsf == "gdv":
        wanted = standardised(graphlet_degrees(where.whole.edge_index, 30))[0]
        np.testing.assert_allclose(kept[1].numpy(), wanted)
    if nsf == "walk":
        dense, power = walk(where).toarray(), np.eye(30)
        for step in range(5):
            power = power @ dense
            np.testing.assert_allclose(kept[1][:, step].numpy(), np.diag(power), atol=1e-12)
    if nsf == "node2vec":
        assert not kept[1][28:].any()


def test_a_client_without_labels_and_isolated_nodes() -> None:
    where = graph(40, clients=3, isolated=3)
    bare = replace(where.parts["client-1"], train=torch.zeros_like(where.parts["client-1"].train))
    run = experiment(replace(where, parts={**where.parts, "client-1": bare}), rounds=3, dropout=0.3, nsf="gdv")
    run.loop.play()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.loop.state.weights.values())  # type: ignore[attr-defined]


def test_the_sheet_says_that_the_server_sees_edges_and_residuals() -> None:
    def told(**settings: Any) -> dict[str, set[str]]:
        found = resolve("fedstruct-server", {"dataset": "csbm", "preset": "fedstruct", **settings})
        lines = sheet_of(found.method, config=found.method_config)
        return {line.message.__name__: {line.sender, line.receiver} for line in lines}

    assert told()["Subgraph"] == told()["Residuals"] == {"client", "server"}
    assert "Residuals" not in told(gradients="jacobian")


def test_the_published_form_is_refused_where_it_would_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"numbers a round .* use gradients=residuals"):
        experiment(graph(60, clients=2), gradients="jacobian", structure_hidden=(2000, 2000)).loop.play()


def test_owners_that_disagree_on_cross_edges_are_refused() -> None:
    where = graph(30, clients=3)
    data = where.parts["client-0"]
    assert data.cross is not None
    keep = torch.arange(1, data.cross.num_edges)
    cross = replace(
        data.cross,
        own=data.cross.own[keep],
        owner=data.cross.owner[keep],
        other=data.cross.other[keep],
        outgoing=data.cross.outgoing[keep],
        weight=data.cross.weight[keep],
    )
    with pytest.raises(DataError, match="1 are listed by one end only"):
        experiment(replace(where, parts={**where.parts, "client-0": replace(data, cross=cross)})).loop.play()


def test_graphlets_of_a_multigraph_are_refused() -> None:
    where = graph(30, clients=3)
    data = where.parts["client-0"]
    doubled = replace(data, edge_index=torch.cat([data.edge_index, data.edge_index[:, :1]], dim=1))
    with pytest.raises(DataError, match="without parallel edges"):
        experiment(replace(where, parts={**where.parts, "client-0": doubled}), nsf="gdv").loop.play()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"structure_hops": 0}, "structure_hops must be at least 1"),
        ({"structure_hops": 3, "betas": (1.0,)}, "betas must name one weight per power"),
        ({"structure_model": "gnn", "betas": (0.5, 0.5), "structure_hops": 2}, "betas weigh powers"),
        ({"p": 0.0}, "node2vec: p must be above 0"),
        ({"nsf": "walk", "walk_steps": 300}, "nsf_dim must be above"),
        ({"walk_steps": 0}, "walk_steps must be at least 1"),
        ({"nsf": "struc2vec"}, "unknown value for nsf"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("fedstruct-server", {"dataset": "csbm", "preset": "fedstruct", **settings})


@pytest.mark.parametrize("join", ["sum", "concat"])
def test_residuals_tell_labels_to_the_server(join: str) -> None:
    where = graph(40, clients=3)
    run = experiment(where, join=join)
    run.loop.play(until=1)
    weights = run.loop.state.weights  # type: ignore[attr-defined]
    seen: dict[str, Any] = {}
    ask = run.loop.session.call

    def watched(handler: Any, *arguments: Any, **more: Any) -> Any:
        replies = ask(handler, *arguments, **more)
        seen.setdefault(handler.__name__, replies)
        return replies

    run.loop.session.call = watched  # type: ignore[method-assign]
    run.loop.play()
    for client, data in where.parts.items():
        rows = seen["residuals"][client].z.numpy()
        told = (
            labels_from_signs(rows)
            if join == "sum"
            else labels_from_embedding_gradient(rows, weights[HEAD_Z].T.numpy())
        )
        assert told.score(data.y[data.train].numpy(), "server").exact
    published = replace(run.settings.method_config, gradients="jacobian")
    assert "residuals" not in {line.handler.__name__ for line in script(published, VIEW)["train"]}
