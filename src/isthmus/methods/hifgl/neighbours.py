"""What the devices of one silo know of their edges: who their neighbours are, and in which order messages travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from isthmus.data.nodes import NodeData

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """Neighbours of a silo's devices at one peer: an own device and one of the peer's, once per pair, whatever the
    direction of the edges between them.

    Args:
        source, source_id, target_id: (E,), own rows and both ids, in the order in which messages are sent.
        along, against: (E,), edges from the own device and to it, in that order: how often a value counts forward and
            backward.
        target: (E,), own rows in the order in which the peer sends (by its id first).
        sender_id, receiver_id: (E,), ids in that order.
    """

    source: Rows
    source_id: Rows
    target_id: Rows
    along: Rows
    against: Rows
    target: Rows
    sender_id: Rows
    receiver_id: Rows

    @property
    def count(self) -> int:
        return int(self.source.size)


@dataclass(frozen=True)
class Neighbourhood:
    """The edges of one silo's devices.

    Args:
        count: Devices, n.
        pairs: By peer, sorted; with ``inside=False`` without the silo itself.
        inner: Edges between own devices that are summed in the clear, row = target; None where they go through SecMP
            like all others.
        loops: (n,), self-loops.
        degree: (n,), edges into each device, without loops.
        neighbours, listeners: (n,), different devices whose values (gradients) reach it through SecMP.
    """

    count: int
    pairs: Mapping[str, Pairs]
    inner: sp.csr_matrix | None
    loops: Rows
    degree: Rows
    neighbours: Rows
    listeners: Rows

    @property
    def terms(self) -> int:
        """Most values ever added up for one device, in either direction."""
        pairs = self.pairs.values()
        forward, backward = (_per_device(self.count, pairs, name) for name in ("against", "along"))
        return int(max(forward.max(initial=0), backward.max(initial=0)))

    @cached_property
    def sources(self) -> tuple[Rows, Rows, Rows]:
        """Own row of every message that leaves in one exchange, peer after peer, and how often it counts forward and
        backward.
        """
        none = np.empty((3, 0), np.int64)
        pairs = ((pair.source, pair.along, pair.against) for pair in self.pairs.values())
        source, along, against = np.concatenate([none, *map(np.stack, pairs)], axis=1)
        return source, along, against

    @cached_property
    def targets(self) -> Rows:
        """Own row of every message that arrives in one exchange, peer after peer."""
        return np.concatenate([np.empty(0, np.int64), *(pair.target for pair in self.pairs.values())])


def neighbourhood(data: NodeData, silo: str, *, inside: bool = True) -> Neighbourhood:
    """Read a silo's part of the graph. ``inside``: edges between devices of the silo go through SecMP too."""
    count, ids = data.num_nodes, data.node_id.numpy()
    edges = data.edge_index.numpy()
    loop = edges[0] == edges[1]
    loops = np.bincount(edges[0, loop], minlength=count).astype(np.int64)
    source, target = edges[:, ~loop]
    columns: dict[str, list[tuple[Rows, Rows, Rows, Rows]]] = {}
    one, none = np.ones(source.size, np.int64), np.zeros(source.size, np.int64)
    columns[silo] = [(source, ids[target], one, none), (target, ids[source], none, one)]
    if data.cross is not None:
        for number in np.unique(data.cross.owner.numpy()):
            mine = data.cross.owner.numpy() == number
            leaving = data.cross.outgoing.numpy()[mine].astype(np.int64)
            ends = data.cross.own.numpy()[mine], data.cross.other.numpy()[mine]
            columns.setdefault(data.cross.owners[number], []).append((*ends, leaving, 1 - leaving))
    pairs = {peer: _pairs(ids, columns[peer]) for peer in sorted(columns)}
    inner = None if inside else sp.csr_matrix((np.ones(source.size), (target, source)), shape=(count, count))
    kept = {peer: pair for peer, pair in pairs.items() if pair.count and (inside or peer != silo)}
    degree = _per_device(count, pairs.values(), "against")
    heard, told = (_per_device(count, kept.values(), name, different=True) for name in ("against", "along"))
    return Neighbourhood(count, kept, inner, loops, degree, heard, told)


def _per_device(count: int, pairs: Iterable[Pairs], name: str, *, different: bool = False) -> Rows:
    """Edges of one direction (``along`` or ``against``) of each device, or ``different`` neighbours they lead to."""
    total = np.zeros(count, np.int64)
    for pair in pairs:
        edges: Rows = getattr(pair, name)
        np.add.at(total, pair.source, edges > 0 if different else edges)
    return total


def _pairs(ids: Rows, columns: Sequence[tuple[Rows, Rows, Rows, Rows]]) -> Pairs:
    own, other, along, against = (np.concatenate(part) for part in zip(*columns, strict=True))
    order = np.lexsort((other, ids[own]))
    own, other, along, against = own[order], other[order], along[order], against[order]
    first = np.ones(own.size, bool)
    first[1:] = (own[1:] != own[:-1]) | (other[1:] != other[:-1])
    group, size = np.cumsum(first) - 1, int(first.sum())
    along, against = (np.bincount(group, part, size).astype(np.int64) for part in (along, against))
    own, other = own[first], other[first]
    turned = np.lexsort((ids[own], other))
    return Pairs(own, ids[own], other, along, against, own[turned], other[turned], ids[own][turned])
