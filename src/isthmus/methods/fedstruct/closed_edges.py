"""Which edges of the streamed protocol are left out so that no client can tell a foreign training node apart.

A client is given one sum for each of its boundary nodes (slot), over foreign nodes with an edge to it. Foreign nodes
with the same edges to its slots always stand in the same sums with the same weight: whatever the client works out, it
learns their sum and never which of them sent what. A node that is the only one with its edges can be told apart, by
linear equations or because others turn out to send nothing. So a training node must share its edges to a client with
another node, or keep only those to one slot that two other nodes or more have their only edges to, or none. An edge
that is left out is left out for both its ends, which may leave others alone: owners repeat it until nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.federation.messages import PartyId
from isthmus.methods.fedstruct.streamed_hops import ArcList

NOBODY = -1
Ids = NDArray[np.int64]


def told_apart(arcs: Mapping[PartyId, ArcList]) -> dict[PartyId, tuple[Ids, Ids]]:
    """For each owner its nodes that no other foreign node shares its edges with, and for each of them the client's own
    node whose edges to it can stay: there are two others or more with edges to that node alone. `NOBODY` where there is
    none.

    Args:
        arcs: The client's edges to nodes of each owner, as the owner lists them.
    """
    if not arcs:
        return {}
    lists = arcs.values()
    far, node = np.unique(np.concatenate([edges.own.numpy() for edges in lists]), return_inverse=True)
    near, own = np.unique(np.concatenate([edges.other.numpy() for edges in lists]), return_inverse=True)
    outgoing = np.concatenate([edges.outgoing.numpy() for edges in lists]).astype(np.int64)
    weights, weight = np.unique(np.concatenate([edges.weight.numpy() for edges in lists]), return_inverse=True)
    # A 64-bit key for every (own node, direction, weight): edges of a node are told by the sum of their keys.
    kinds, kind = np.unique((own * 2 + outgoing) * len(weights) + weight, return_inverse=True)
    keys = np.random.default_rng(0).integers(1, 2**63, len(kinds), dtype=np.uint64)[kind]  # a hash, no secret
    pairs, pair = np.unique(node * len(near) + own, return_inverse=True)  # (foreign node, own node)
    beside, edges_of = np.zeros(len(pairs), dtype=np.uint64), np.zeros(len(far), dtype=np.uint64)
    np.add.at(beside, pair, keys)
    np.add.at(edges_of, node, keys)
    patterns, shared_by = np.unique(edges_of, return_counts=True)
    alone = shared_by[np.searchsorted(patterns, edges_of)] == 1
    crowded = pairs[np.isin(beside, patterns[shared_by > 1])]
    keep = np.full(len(far), NOBODY, dtype=np.int64)
    keep[crowded // max(len(near), 1)] = near[crowded % max(len(near), 1)]
    found = {}
    for client, edges in arcs.items():
        chosen = alone & np.isin(far, edges.own.numpy())
        found[client] = far[chosen], keep[chosen]
    return found


def closed_arcs(node: Tensor, towards: Tensor, closed: Tensor, keep: Tensor) -> Tensor:
    """Arcs between a closed node and a client that are left out: all but those to the node that is kept.

    Args:
        node, towards: Ends of each arc: the node, and the client's node.
        closed, keep: Closed nodes, and the client's node that each may keep.
    """
    order = torch.argsort(closed)
    closed, keep = closed[order], keep[order]
    if not len(closed):
        return torch.zeros(len(node), dtype=torch.bool)
    place = torch.searchsorted(closed, node).clamp(max=len(closed) - 1)
    return (closed[place] == node) & (keep[place] != towards)
