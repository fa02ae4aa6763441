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
from isthmus.federation.audit import LABELS, NEIGHBOURS
from isthmus.federation.messages import SERVER, Message, PartyId
from isthmus.federation.roles import RoleTable
from isthmus.federation.transcript import Line, received
from isthmus.methods.fedstruct import Directory, Product, Step, block_of
from isthmus.privacy.attacks.labels import labels_from_signs
from isthmus.privacy.attacks.structure import neighbours_from_hop_products, reached_from_gradient

Told = tuple[str, str, str, str, dict[str, float]]
"""Attack, who, on what, what came out, in numbers."""


def neighbour_lists(run: Path, parts: Mapping[PartyId, NodeData], table: RoleTable) -> Iterator[Told]:
    """Every client on the products of hop 2 it was sent, sender by sender; columns must be global ids, i.e. the
    published protocol.
    """
    truth = _neighbours(parts)
    found = right = 0
    foreign: set[int] = set()
    for client, data in parts.items():
        seen = list(received(run, client, table))
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
            f"read: {right} neighbour lists of foreign nodes exactly and {found - right} wrongly, by {len(parts)} "
            "clients together"
        )
        yield (
            NEIGHBOURS,
            "client",
            "products of hop 2",
            outcome,
            {"claimed": found, "correct": right, "nodes": len(foreign)},
        )


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
