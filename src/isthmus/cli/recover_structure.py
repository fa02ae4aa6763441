"""What FedStruct's messages tell: neighbour lists from hop products, reach and labels from gradients of S (FedStruct
spec, 13.1, 13.6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from isthmus.data.node_data import NodeData
from isthmus.federation.audit import LABELS, NEIGHBOURS, SUPPORT
from isthmus.federation.messages import SERVER, Message, PartyId
from isthmus.federation.roles import RoleTable
from isthmus.federation.secure import MailPlan
from isthmus.federation.transcript import Line, received
from isthmus.graph.powers import keep_largest_per_row
from isthmus.methods.fedstruct import Directory, Product, Step, block_of
from isthmus.privacy.attacks.labels import labels_from_signs
from isthmus.privacy.attacks.positions import Announced, edges_from_positions
from isthmus.privacy.attacks.structure import (
    neighbours_from_hop_products,
    reached_from_gradient,
    rows_from_summed_products,
)

Told = tuple[str, str, str, str, dict[str, float]]
"""Attack, who, on what, what came out, in numbers."""


def neighbour_lists(run: Path, parts: Mapping[PartyId, NodeData], table: RoleTable) -> Iterator[Told]:
    """Every client on the products of hop 2 it was sent, sender by sender; columns must be global ids, i.e. the
    published protocol.
    """
    truth = _neighbours(parts)
    found = right = adjacent = 0
    foreign: set[int] = set()
    for client, data in parts.items():
        seen = list(received(run, client, table))
        adjacent += 0 if data.cross is None else len(np.unique(data.cross.other.numpy()[data.cross.outgoing.numpy()]))
        ids = next(
            (message.ids.numpy() for _, message in seen if isinstance(message, Directory)), np.zeros(0, dtype=np.int64)
        )
        lists: dict[int, NDArray[np.int64]] = {}
        for line, message in seen:
            if isinstance(message, Product) and line.round == 2 and len(ids):
                edges, nodes = _edges(data, line.sender)
                rows = sp.csr_matrix(block_of(message.rows))
                read = neighbours_from_hop_products(edges, rows, np.searchsorted(ids, nodes))
                lists |= {int(ids[node]): ids[columns] for node, columns in read.neighbours.items()}
        found += len(lists)
        right += sum(np.array_equal(np.sort(columns), truth[node]) for node, columns in lists.items())
        foreign |= set(lists)
    if found:
        outcome = (
            f"read: {right} neighbour lists of adjacent foreign nodes exactly and {found - right} wrongly, by "
            f"{len(parts)} clients (of {adjacent})"
        )
        yield (
            NEIGHBOURS,
            "client",
            "products of hop 2",
            outcome,
            {"claimed": found, "correct": right, "of": adjacent, "nodes": len(foreign)},
        )


def summed_products(parts: Mapping[PartyId, NodeData], prune: int) -> Iterator[Told]:
    """Every client on the sums of hop 2 it received in the hardened protocol. They follow from the data whatever the
    masks and the order of columns, so they are made again here: the messages themselves cannot be opened.
    """
    ids = np.sort(np.concatenate([data.node_id.numpy() for data in parts.values()]))
    walk = _walk(parts, ids)
    second = keep_largest_per_row(walk, prune) if prune else walk
    claimed = correct = of = solved = degrees = 0
    for data in parts.values():
        edges, nodes = _all_edges(data, ids)
        own = np.zeros(len(ids), bool)
        own[np.searchsorted(ids, data.node_id.numpy())] = True
        known = sp.csr_matrix(walk[nodes].sign())
        sums = sp.csr_matrix((edges @ second[nodes]).astype(np.float32))
        read = rows_from_summed_products(edges, sums, sp.csr_matrix(known.multiply(own)), own, nodes)
        truth = sp.csr_matrix(known.multiply(~own))
        claimed, of = claimed + read.claimed.nnz, of + truth.nnz
        correct += int(read.claimed.multiply(truth).nnz)
        true_degrees = np.diff(known.indptr)
        solved += int((np.abs(read.degrees * true_degrees - 1) < 1e-6).sum())
        degrees += len(nodes)
    if not of:
        return
    precision, recall = correct / claimed if claimed else 0.0, correct / of
    outcome = (
        f"named: {claimed} neighbours of adjacent foreign nodes, precision {precision:.4f}, recall {recall:.3f} "
        f"(of {of}); degrees of {solved} of {degrees} such nodes"
    )
    numbers = {"claimed": claimed, "correct": correct, "of": of, "precision": precision, "recall": recall}
    yield NEIGHBOURS, "client", "sums of hop 2", outcome, numbers | {"degrees": solved, "nodes": degrees}


def announced_positions(
    server: Sequence[tuple[Line, Message]], parts: Mapping[PartyId, NodeData], clients: Sequence[PartyId]
) -> Iterator[Told]:
    """The server on the positions that clients announced for masked products: those it takes for edges. Which of them
    are right only the clients' secrets tell, so precision is bounded by the number of edges there are.
    """
    sizes = [parts[client].num_nodes for client in clients]
    columns = sum(sizes)
    owner = np.repeat(np.arange(len(clients)), sizes)
    announced: dict[tuple[PartyId, PartyId], dict[int, NDArray[np.int64]]] = {}
    for line, message in server:
        if isinstance(message, MailPlan) and line.phase == "powers":
            for receiver, lists in message.announced.items():
                powers = announced.setdefault((line.sender, receiver), {})
                powers[line.round] = np.union1d(powers.get(line.round, np.empty(0, np.int64)), lists[0].numpy())
    claimed = edges = 0
    for (sender, receiver), powers in announced.items():
        own = owner == clients.index(sender)
        claimed += len(edges_from_positions(Announced(powers, columns), own))
        edges += _edges(parts[receiver], sender)[0].nnz if sender in _owners(parts[receiver]) else 0
    if claimed:
        bound = min(1.0, edges / claimed)
        outcome = f"named: {claimed} positions for {edges} edges between clients: precision at most {bound:.3f}"
        on = "announced positions of two powers"
        yield SUPPORT, SERVER, on, outcome, {"claimed": claimed, "edges": edges, "precision_at_most": bound}


def reach(server: Sequence[tuple[Line, Message]], parts: Mapping[PartyId, NodeData]) -> Iterator[Told]:
    """The server on single clients' gradients of S: which nodes their labelled nodes reach, and rows that look like one
    node's residual.
    """
    steps = [
        (line, message)
        for line, message in server
        if isinstance(message, Step) and message.nsf is not None and line.sender in parts
    ]
    if not steps:
        return
    rows = certain = 0
    for _, message in steps:
        assert message.nsf is not None
        gradient = message.nsf.numpy()
        rows += len(reached_from_gradient(gradient).nodes)
        certain += int(labels_from_signs(gradient).certain.sum())
    total = sum(int(message.nsf.shape[0]) for _, message in steps if message.nsf is not None)
    outcome = (
        f"named: {rows} of {total} rows of gradients as within reach of a labelled node; {certain} rows look like one "
        "node's label"
    )
    yield LABELS, SERVER, "gradients of structure features", outcome, {"reached": rows, "of": total, "certain": certain}


def _edges(data: NodeData, owner: str) -> tuple[sp.csr_matrix, NDArray[np.int64]]:
    """The client's own edges to an owner: by slot, to the owner's nodes it knows."""
    assert data.cross is not None
    cross, out = data.cross, data.cross.outgoing.numpy()
    slots = np.unique(cross.own.numpy()[out])
    chosen = out & (cross.owner.numpy() == cross.owners.index(owner))
    nodes, columns = np.unique(cross.other.numpy()[chosen], return_inverse=True)
    rows = np.searchsorted(slots, cross.own.numpy()[chosen])
    return sp.csr_matrix((cross.weight.numpy()[chosen], (rows, columns)), shape=(len(slots), len(nodes))), nodes


def _owners(data: NodeData) -> tuple[str, ...]:
    return () if data.cross is None else tuple(data.cross.owners)


def _all_edges(data: NodeData, ids: NDArray[np.int64]) -> tuple[sp.csr_matrix, NDArray[np.int64]]:
    """The client's own edges to all foreign nodes it knows: by slot; and the positions of those nodes among ``ids``."""
    assert data.cross is not None
    own, other = (part.numpy()[data.cross.outgoing.numpy()] for part in (data.cross.own, data.cross.other))
    slots, rows = np.unique(own, return_inverse=True)
    nodes, columns = np.unique(other, return_inverse=True)
    matrix = sp.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(slots), len(nodes)))
    return matrix.sign().tocsr(), np.searchsorted(ids, nodes)


def _walk(parts: Mapping[PartyId, NodeData], ids: NDArray[np.int64]) -> sp.csr_matrix:
    """The normalised adjacency of the whole graph, self-loops included, from everybody's data."""
    rows, columns = [np.arange(len(ids))], [np.arange(len(ids))]
    for data in parts.values():
        assert data.cross is not None
        own, out = np.searchsorted(ids, data.node_id.numpy()), data.cross.outgoing.numpy()
        rows += [own[data.edge_index[0].numpy()], own[data.cross.own.numpy()[out]]]
        columns += [own[data.edge_index[1].numpy()], np.searchsorted(ids, data.cross.other.numpy()[out])]
    where = np.concatenate(rows), np.concatenate(columns)
    whole = sp.csr_matrix((np.ones(len(where[0])), where), shape=(len(ids), len(ids)))
    mass = np.asarray(whole.sum(axis=1)).ravel()
    return sp.csr_matrix(sp.diags(1.0 / mass) @ whole)


def _neighbours(parts: Mapping[PartyId, NodeData]) -> dict[int, NDArray[np.int64]]:
    """Everybody's true lists, from everybody's data."""
    truth: dict[int, NDArray[np.int64]] = {}
    for data in parts.values():
        assert data.cross is not None
        ids, out = data.node_id.numpy(), data.cross.outgoing.numpy()
        source = np.concatenate([data.edge_index[0].numpy(), data.cross.own.numpy()[out]])
        target = np.concatenate([ids[data.edge_index[1].numpy()], data.cross.other.numpy()[out]])
        for row, node in enumerate(ids.tolist()):
            truth[node] = np.unique(target[(source == row) & (target != node)])
    return truth
