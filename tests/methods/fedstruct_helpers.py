"""Small graphs cut by hand, and what the clients of a FedStruct run hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.data.split_graph import split_graph
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.methods.fedstruct import block_of

SMALL = {"hidden": (8,), "structure_hidden": (8,), "nsf_dim": 12, "precision": "float64", "dropout": 0.0}


def graph(
    nodes: int = 40, clients: int = 3, *, directed: bool = False, seed: int = 0, isolated: int = 0, train: float = 0.4
) -> Scenario:
    """A random graph over ``clients`` owners; the last ``isolated`` nodes have no edge. Node 0 has a self-loop, as in
    Chameleon.
    """
    rng = np.random.default_rng(seed)
    arcs = rng.integers(0, nodes - isolated, (2, 2 * nodes))
    arcs = np.unique(np.column_stack([arcs[:, arcs[0] != arcs[1]], [[0], [0]]]), axis=1)
    if not directed:
        arcs = np.unique(np.column_stack([arcs, arcs[::-1]]), axis=1)
    part = rng.random(nodes)
    whole = NodeData(
        x=torch.from_numpy(rng.normal(size=(nodes, 6))).float(),
        edge_index=torch.from_numpy(arcs),
        y=torch.arange(nodes) % 3,
        train=torch.from_numpy(part < train),
        val=torch.from_numpy((part >= train) & (part < 0.7)),
        test=torch.from_numpy(part >= 0.7),
        node_id=torch.arange(nodes),
        num_classes=3,
    )
    owner = torch.from_numpy(rng.permutation(np.arange(nodes) % clients))
    return scenario(whole, owner, clients)


def same_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardened runs number columns by secrets; runs that are compared bit by bit must have the same ones."""
    monkeypatch.setattr("isthmus.methods.fedstruct.client.secrets.token_bytes", lambda size: b"7" * size)


def scenario(whole: NodeData, owner: Tensor, clients: int) -> Scenario:
    parts = split_graph(whole, owner, tuple(f"client-{i}" for i in range(clients)))
    some = build_scenario(dataset="csbm:nodes=30,classes=3", clients=2)
    return replace(some, parts=parts, whole=whole, clients=clients)


def opaque_ids(where: Scenario) -> Scenario:
    """The clients' parts with ids of 63 bits: good for comparison only, and too close to each other for a float. Their
    order is that of the old ones.
    """

    def opaque(ids: Tensor) -> Tensor:
        return 2**62 + 3 * ids

    parts = {}
    for client, data in where.parts.items():
        assert data.cross is not None
        cross = replace(data.cross, other=opaque(data.cross.other))
        parts[client] = replace(data, node_id=opaque(data.node_id), cross=cross)
    return replace(where, parts=parts)


def experiment(where: Scenario, method: str = "fedstruct", **settings: Any) -> SimulatedRun:
    """A small run; of FedStruct with powers unless told otherwise."""
    given = {"dataset": "csbm", "preset": "fedstruct", "clients": len(where.parts), "rounds": 2, "execution": "each"}
    given |= {**SMALL, **settings}
    if method == "fedstruct":
        return SimulatedRun(resolve(method, {"protocol": "hardened", **given}), opaque_ids(where))
    given = {key: value for key, value in given.items() if key not in ("structure_hidden", "nsf_dim")}
    return SimulatedRun(resolve(method, given), where)


def powers(where: Scenario, **settings: Any) -> SimulatedRun:
    """A run that stops when the powers are complete."""
    run = experiment(where, **settings)
    run.loop.play(until=1 + run.settings.method_config.structure_hops)
    return run


def states(run: SimulatedRun) -> Mapping[str, Any]:
    return {client: run.engine.party(client).client.state for client in run.engine.parties("client")}


def rows_of(run: SimulatedRun, where: Scenario, power: int = -1) -> np.ndarray:
    """Everybody's rows of Abar in one array by global ids, whatever the columns are called."""
    total = np.zeros((where.whole.num_nodes,) * 2)
    everyone = states(run)
    node = np.zeros(where.whole.num_nodes, dtype=np.int64)  # global id of each column: only all owners together know it
    for client, state in everyone.items():
        node[state.columns.numpy()] = where.parts[client].node_id.numpy()
    for client, state in everyone.items():
        block = block_of(state.combined[power])
        dense = block if isinstance(block, np.ndarray) else block.toarray()
        total[np.ix_(where.parts[client].node_id.numpy(), node)] = dense
    return total


def walk(where: Scenario) -> sp.csr_matrix:
    """Ah of the whole graph, in double precision: every node gets one more loop."""
    n = where.whole.num_nodes
    source, target = where.whole.edge_index.numpy()
    adjacency = sp.csr_matrix((np.ones(len(source)), (source, target)), shape=(n, n)) + sp.eye(n)
    return sp.csr_matrix(sp.diags(1.0 / np.asarray(adjacency.sum(1)).ravel()) @ adjacency)
