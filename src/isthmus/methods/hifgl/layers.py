"""What a layer of HiFGL needs at the devices of one silo: who their neighbours are, the propagation matrix split into a
source and a target side (spec 3.1), the loss, and products with dense or sparse features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.graph.normalise import from_torch_csr
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.kernels import spmm
from isthmus.seeds import Stream

Rows = NDArray[np.int64]
Matrix = Tensor | sp.csr_matrix


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
class Arrivals:
    """Whether messages of neighbours in a device's own silo, and of foreign ones, reach it: (n,)."""

    own: NDArray[np.bool_]
    foreign: NDArray[np.bool_]

    def of(self, peer: str, silo: str) -> NDArray[np.bool_]:
        return self.own if peer == silo else self.foreign


@dataclass(frozen=True)
class Neighbourhood:
    """The edges of one silo's devices.

    Args:
        silo: Whose devices they are.
        pools: They pool what they receive, as one organisation does.
        count: Devices, n.
        pairs: By peer, sorted; with ``inside=False`` without the silo itself.
        inner: Edges between own devices that are summed in the clear, row = target; None where they go through SecMP
            like all others.
        loops: (n,), self-loops.
        degree, foreign_degree: (n,), edges into each device, without loops; those of them from other silos.
        neighbours, gradient_sources: (n,), different devices that have values (gradients) for it through SecMP.
    """

    silo: str
    pools: bool
    count: int
    pairs: Mapping[str, Pairs]
    inner: sp.csr_matrix | None
    loops: Rows
    degree: Rows
    foreign_degree: Rows
    neighbours: Rows
    gradient_sources: Rows

    def arrivals(self, k_min: int, *, gradients: bool = False) -> Arrivals:
        """To whom something is sent. An organisation that pools its devices' sums subtracts what its own devices sent,
        so a sum hides foreign values only among each other: ``k_min`` of them, or none is sent. What then arrives of a
        device's own silo counts too.
        """
        name, total = ("along", self.gradient_sources) if gradients else ("against", self.neighbours)
        others = [pair for peer, pair in self.pairs.items() if not self.pools or peer != self.silo]
        foreign = _per_device(self.count, others, name, different=True)
        enough = foreign >= k_min
        return Arrivals(own=total - foreign * ~enough >= k_min, foreign=enough)

    @property
    def terms(self) -> int:
        """Most values ever added up for one device, in either direction."""
        pairs = self.pairs.values()
        forward, backward = (_per_device(self.count, pairs, name) for name in ("against", "along"))
        return int(max(forward.max(initial=0), backward.max(initial=0)))

    @cached_property
    def targets(self) -> Rows:
        """Own row of every message that arrives in one exchange, peer after peer."""
        return np.concatenate([np.empty(0, np.int64), *(pair.target for pair in self.pairs.values())])


def neighbourhood(data: NodeData, silo: str, *, inside: bool = True, pools: bool = True) -> Neighbourhood:
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
    foreign = _per_device(count, [pair for peer, pair in pairs.items() if peer != silo], "against")
    neighbours, gradient_sources = (
        _per_device(count, kept.values(), name, different=True) for name in ("against", "along")
    )
    return Neighbourhood(silo, pools, count, kept, inner, loops, degree, foreign, neighbours, gradient_sources)


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


@dataclass(frozen=True)
class Propagation:
    """The rows of the propagation matrix A that belong to a silo's devices: A_uv = target_u source_v.

    The two factors are applied at the two ends of an edge, so that neither learns the other's degree. All are (n, 1).

    Args:
        edges: Edges inside the silo that need no protection, row = target; None if there are none.
        source, target: On what a device sends, and on the sum that arrives; ``target`` is 0 where nothing is sent to it
            (too few neighbours).
        own: A_uu, the device's own term, which is added after decoding.
        returned: On the sum that arrives backward: ``source``, or 0 where nothing is sent.
        inner: ``target`` for ``edges``.
    """

    edges: sp.csr_matrix | None
    source: Tensor
    target: Tensor
    own: Tensor
    returned: Tensor
    inner: Tensor

    def forward(self, values: Tensor, sums: Tensor) -> Tensor:
        """Rows of A h, from own values h (n, d) and the sums over neighbours of what they sent."""
        whole = self.target * sums + self.own * values
        if self.edges is not None:
            whole = whole + self.inner * spmm(self.edges, (self.source * values).contiguous())
        return whole

    def backward(self, values: Tensor, sums: Tensor) -> Tensor:
        """Rows of A^T e, the same with reversed edges."""
        whole = self.returned * sums + self.own * values
        if self.edges is not None:
            whole = whole + self.source * spmm(self._reversed, (self.inner * values).contiguous())
        return whole

    @cached_property
    def _reversed(self) -> sp.csr_matrix:
        assert self.edges is not None
        return self.edges.T.tocsr()

    def to(self, dtype: torch.dtype) -> Propagation:
        factors = {f.name: getattr(self, f.name).to(dtype) for f in fields(self) if f.name != "edges"}
        return replace(self, **factors, edges=None if self.edges is None else self.edges.astype(numpy_type(dtype)))


def propagation(kind: str, where: Neighbourhood, k_min: int) -> Propagation:
    r"""A of ``gcn`` (:math:`1/\sqrt{\tilde d}` on both sides) or ``sage`` (a mean). A device to which neighbours send
    nothing (fewer than ``k_min``) computes as if it did not have them, but still sends to others.
    """
    values, gradients = where.arrivals(k_min), where.arrivals(k_min, gradients=True)
    receives, receives_gradients = (each.own | each.foreign for each in (values, gradients))
    inside = (where.degree - where.foreign_degree) * (values.own if where.inner is None else 1)
    degree = inside + where.foreign_degree * values.foreign
    if kind == "gcn":  # a self-loop in the data stands for the one every node gets (Kipf & Welling)
        source = 1.0 / np.sqrt(where.degree + 1.0)
        target = 1.0 / np.sqrt(degree + 1.0)
        own = 1.0 / (degree + 1.0)
    else:
        total = degree + where.loops
        target = np.divide(1.0, total, out=np.zeros(where.count), where=total > 0)
        source, own = np.ones(where.count), where.loops * target
    factors = (source, target * receives, own, source * receives_gradients, target)
    columns = [torch.from_numpy(np.asarray(factor, dtype=np.float64)).reshape(-1, 1) for factor in factors]
    return Propagation(where.inner, *columns)


def residuals(
    logits: Tensor, y: Tensor, train: Tensor, weight: float, class_weights: Tensor | None = None
) -> tuple[Tensor, float]:
    """delta_u^(k) = weight (softmax(p_u) - y_u) [u labelled], times the weight of u's class where there are any;
    and the summed cross entropy of labelled devices.
    """
    delta = torch.zeros_like(logits)
    rows = train.nonzero().flatten()
    if not rows.numel():
        return delta, 0.0
    chosen = torch.log_softmax(logits[rows], dim=1)
    labels = y[rows]
    loss = -float(chosen.gather(1, labels[:, None]).double().sum())
    part = chosen.exp()
    part[torch.arange(len(rows)), labels] -= 1.0
    delta[rows] = part * weight if class_weights is None else part * (weight * class_weights[labels, None])
    return delta, loss


def multiply(a: Matrix, b: Tensor) -> Tensor:
    return spmm(a, b.contiguous()) if isinstance(a, sp.csr_matrix) else a @ b


def multiply_t(a: Matrix, b: Tensor) -> Tensor:
    """``a^T b``."""
    if not isinstance(a, sp.csr_matrix):
        return a.T @ b
    out: Any = a.T @ b.numpy()
    return torch.from_numpy(np.ascontiguousarray(out))


def dense(a: Matrix) -> Tensor:
    return torch.from_numpy(a.toarray()) if isinstance(a, sp.csr_matrix) else a


def matrix_of(values: Tensor, dtype: torch.dtype) -> Matrix:
    """In the form that is multiplied fastest."""
    sparse = values.layout == torch.sparse_csr
    return from_torch_csr(values).astype(numpy_type(dtype)) if sparse else values.to(dtype)


def numpy_type(dtype: torch.dtype) -> Any:
    return np.float64 if dtype == torch.float64 else np.float32


def dropout_masks(stream: Stream, rows: int, widths: Sequence[int], share: float, dtype: torch.dtype) -> list[Tensor]:
    """One (rows, width) per hidden layer; none without dropout."""
    source = DropoutSource([stream.torch()]) if share else None
    return [source.mask([rows], rows, width, share, dtype) for width in widths] if source else []
