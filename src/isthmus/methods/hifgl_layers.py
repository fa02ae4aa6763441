r"""HiFGL's layers at the devices of one silo: neighbour-agnostic GCN and GraphSAGE, forward and exact backward (spec
3.1, 11.4).

A layer needs from others only sums over neighbours. Which arcs exist, how values are scaled on either side, and what is
done with a sum once it arrives stands here; how sums come about without showing their parts is `isthmus.privacy.secmp`.

    spec                     here
    h_v^(l-1), p_v^(l)       Tape.inputs[l], Tape.outputs[l]
    1 / sqrt|N_v|            Scales.source      times 1 on the target's side: neither learns the other's degree
    1 / sqrt|N_u|            Scales.target
    h_u / dt                 Scales.own         the device's own term, added after decoding
    delta_u^(l)              Tape.deltas[l]
    eps_v                    the sum a backward exchange gives

A layer goes in one of three ways. ``aggregate``: values travel, then W; ``project``: W first, so that the narrower
thing travels, and the gradient too (exact as well: A (h W) = (A h) W); ``cached``: the first layer's sums of raw
features never change, so they travel once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.nn.kernels import spmm
from isthmus.tensors import Weights

Way = Literal["cached", "project", "aggregate"]
Rows = NDArray[np.int64]
Matrix = Tensor | sp.csr_matrix


@dataclass(frozen=True)
class Pairs:
    """Neighbours of one's devices at one peer: an own device and a foreign one, once per pair, whichever way arcs run.

    Args:
        source, source_id, target_id: (E,), own rows and both ids, in the order in which one sends.
        along, against: (E,), arcs from the own device and to it, in that order: what counts forward and backward.
        target: (E,), own rows in the order in which the peer sends (by its id first).
        sender_id, receiver_id: (E,), ids in that order.
        heard: (E,), arcs from the peer's device in that order.
    """

    source: Rows
    source_id: Rows
    target_id: Rows
    along: Rows
    against: Rows
    target: Rows
    sender_id: Rows
    receiver_id: Rows
    heard: Rows

    @property
    def count(self) -> int:
        return int(self.source.size)


@dataclass(frozen=True)
class Scales:
    """Factors of each device, (n, 1).

    Args:
        source, own: On what it sends, and on its own term.
        target, back: On what arrives forward and backward; 0 where that is thrown away (too few neighbours).
        inner: On what arrives over arcs that need no protection.
    """

    source: Tensor
    own: Tensor
    target: Tensor
    back: Tensor
    inner: Tensor

    def to(self, dtype: torch.dtype) -> Scales:
        return Scales(*(getattr(self, field.name).to(dtype) for field in fields(self)))


@dataclass(frozen=True)
class Neighbourhood:
    """What the devices of one silo know of their edges.

    Args:
        pairs: By peer, sorted; with ``inside=False`` without the silo itself.
        inner: Arcs between own devices that are summed at once, row = target; None where they go through SecMP like all
            others.
        loops: (n,), self-loops.
        arcs: (n,), arcs into each device, loops apart.
        neighbours, listeners: (n,), different devices whose values (gradients) reach it through SecMP.
    """

    count: int
    pairs: Mapping[str, Pairs]
    inner: sp.csr_matrix | None
    loops: Rows
    arcs: Rows
    neighbours: Rows
    listeners: Rows

    @property
    def terms(self) -> int:
        """Most values ever added up for one device, in either direction."""
        total = np.zeros(self.count, np.int64)
        back = np.zeros(self.count, np.int64)
        for pair in self.pairs.values():
            np.add.at(total, pair.source, pair.against)
            np.add.at(back, pair.source, pair.along)
        return int(max(total.max(initial=0), back.max(initial=0)))

    @property
    def targets(self) -> Rows:
        """Own row of every message that arrives in one exchange, peer after peer."""
        return np.concatenate([np.empty(0, np.int64), *(pair.target for pair in self.pairs.values())])


def neighbourhood(data: NodeData, me: str, *, inside: bool = True) -> Neighbourhood:
    """Read a silo's part of the graph. ``inside``: edges between devices of the silo go through SecMP too."""
    count, ids = data.num_nodes, data.node_id.numpy()
    arcs = data.edge_index.numpy()
    loop = arcs[0] == arcs[1]
    loops = np.bincount(arcs[0, loop], minlength=count).astype(np.int64)
    source, target = arcs[:, ~loop]
    columns: dict[str, list[tuple[Rows, Rows, Rows, Rows]]] = {}
    one, none = np.ones(source.size, np.int64), np.zeros(source.size, np.int64)
    columns[me] = [(source, ids[target], one, none), (target, ids[source], none, one)]
    if data.cross is not None:
        for number in np.unique(data.cross.owner.numpy()):
            mine = data.cross.owner.numpy() == number
            leaving = data.cross.outgoing.numpy()[mine].astype(np.int64)
            ends = data.cross.own.numpy()[mine], data.cross.other.numpy()[mine]
            columns.setdefault(data.cross.owners[number], []).append((*ends, leaving, 1 - leaving))
    pairs = {peer: _pairs(ids, columns[peer]) for peer in sorted(columns)}
    own = np.zeros(count, np.int64)
    for pair in pairs.values():
        np.add.at(own, pair.source, pair.against)
    inner = None if inside else sp.csr_matrix((np.ones(source.size), (target, source)), shape=(count, count))
    kept = {peer: pair for peer, pair in pairs.items() if pair.count and (inside or peer != me)}
    heard, told = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for pair in kept.values():
        np.add.at(heard, pair.source, pair.against > 0)
        np.add.at(told, pair.source, pair.along > 0)
    return Neighbourhood(count, kept, inner, loops, own, heard, told)


def _pairs(ids: Rows, columns: Sequence[tuple[Rows, Rows, Rows, Rows]]) -> Pairs:
    own, other, along, against = (np.concatenate(part) for part in zip(*columns, strict=True))
    order = np.lexsort((other, ids[own]))
    own, other, along, against = own[order], other[order], along[order], against[order]
    fresh = np.ones(own.size, bool)
    fresh[1:] = (own[1:] != own[:-1]) | (other[1:] != other[:-1])
    group = np.cumsum(fresh) - 1
    size = int(fresh.sum())
    along, against = (np.bincount(group, part, size).astype(np.int64) for part in (along, against))
    own, other = own[fresh], other[fresh]
    turned = np.lexsort((ids[own], other))
    return Pairs(own, ids[own], other, along, against, own[turned], other[turned], ids[own][turned], against[turned])


def scales(kind: str, where: Neighbourhood, k_min: int) -> Scales:
    r"""Factors of `kind` (``gcn``: :math:`1/\sqrt{\tilde d}` on both sides, ``sage``: a mean) with devices of fewer
    than ``k_min``
    neighbours hearing nothing: such a device goes on as if it had none, but others hear it as before."""
    hears, told = where.neighbours >= k_min, where.listeners >= k_min
    inner = np.zeros(where.count) if where.inner is None else np.asarray(where.inner.sum(axis=1)).ravel()
    heard = np.where(hears, where.arcs, inner)
    if kind == "gcn":  # a self-loop in the data stands for the one every node gets (Kipf & Welling)
        source = 1.0 / np.sqrt(where.arcs + 1.0)
        target = 1.0 / np.sqrt(heard + 1.0)
        own = 1.0 / (heard + 1.0)
    else:
        total = heard + where.loops
        target = np.divide(1.0, total, out=np.zeros(where.count), where=total > 0)
        source, own = np.ones(where.count), where.loops * target
    parts = (source, own, target * hears, source * told, target)
    return Scales(*(torch.from_numpy(np.asarray(part, dtype=np.float64)).reshape(-1, 1) for part in parts))


# -- one pass --------------------------------------------------------------------------------------


class Tape:
    """Values of one forward and backward pass of a silo's devices. Layers count from 1.

    Args:
        kind: ``gcn`` or ``sage``.
        ways: How each layer goes.
        x: Features, dense or CSR.
        cached: Sums of the first layer's neighbours, scaled, with the own term: (n, F).
        inner: Sums that need no protection, as a matrix (row = target).
    """

    def __init__(
        self,
        kind: str,
        ways: Sequence[Way],
        weights: Weights,
        x: Matrix,
        factors: Scales,
        *,
        cached: Matrix | None = None,
        inner: sp.csr_matrix | None = None,
        masks: Sequence[Tensor | None] = (),
    ) -> None:
        self.kind, self.ways, self.weights, self.factors = kind, tuple(ways), weights, factors
        self.cached, self.inner, self.masks = cached, inner, tuple(masks)
        self.layers = len(self.ways)
        self.inputs: dict[int, Matrix] = {1: x}
        self.sums: dict[int, Matrix] = {}  # A h where a layer aggregates first
        self.projected: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.deltas: dict[int, Tensor] = {}
        self.received: dict[int, Tensor] = {}  # scaled sums over neighbours, forward
        self.returned: dict[int, Tensor] = {}  # and backward
        self.gradients: dict[str, Tensor] = {}

    def weight(self, layer: int, root: bool = False) -> Tensor:
        return self.weights[f"layers.{layer - 1}.{'root' if root else 'weight' if self.kind == 'gcn' else 'neighbour'}"]

    # forward

    def message(self, layer: int) -> Tensor:
        """What every device sends to its neighbours: source-scaled, (n, d)."""
        return self.factors.source * self._carried(layer)

    def _carried(self, layer: int) -> Tensor:
        if self.ways[layer - 1] == "project":
            if layer not in self.projected:
                self.projected[layer] = multiply(self.inputs[layer], self.weight(layer))
            return self.projected[layer]
        return dense(self.inputs[layer])

    def receive(self, layer: int, sums: Tensor | None) -> None:
        """Finish a layer with the sums over neighbours (None for a cached one) and prepare the next."""
        way = self.ways[layer - 1]
        if sums is not None:
            self.received[layer] = self.factors.target * sums
        own = self.inputs[layer]
        if way == "cached":
            assert self.cached is not None
            self.sums[layer] = self.cached
        elif way == "aggregate":
            self.sums[layer] = self._whole(layer, dense(own))
        if way == "project":
            out = self._whole(layer, self._carried(layer))
        else:
            out = multiply(self.sums[layer], self.weight(layer))
        if self.kind == "sage":
            out = out + multiply(own, self.weight(layer, root=True))
        out = out + self.weights[f"layers.{layer - 1}.bias"]
        self.outputs[layer] = out
        if layer < self.layers:
            hidden = torch.relu(out)
            mask = self.masks[layer - 1] if layer <= len(self.masks) else None
            self.inputs[layer + 1] = hidden if mask is None else hidden * mask

    def _whole(self, layer: int, carried: Tensor) -> Tensor:
        """Neighbours (scaled already), inner arcs, the device itself."""
        whole = self.received[layer] + self.factors.own * carried
        if self.inner is not None:
            whole = whole + self.factors.inner * spmm(self.inner, (self.factors.source * carried).contiguous())
        return whole

    @property
    def logits(self) -> Tensor:
        return self.outputs[self.layers]

    # backward

    def start_backward(self, delta: Tensor) -> None:
        self.deltas = {self.layers: delta}
        self.gradients = {}

    def needs_return(self, layer: int) -> bool:
        return needs_return(self.ways, layer)

    def back_message(self, layer: int) -> Tensor:
        """What every device sends against the arcs: target-scaled."""
        return self.factors.target * self._back_carried(layer)

    def _back_carried(self, layer: int) -> Tensor:
        delta = self.deltas[layer]
        return delta if self.ways[layer - 1] == "project" else multiply(delta, self.weight(layer).T)

    def back_receive(self, layer: int, sums: Tensor | None) -> None:
        """Gradients of a layer and, below it, the next delta; ``sums`` over those who heard the device."""
        way, delta, own = self.ways[layer - 1], self.deltas[layer], self.inputs[layer]
        if sums is not None:
            self.returned[layer] = self.factors.back * sums
        name = f"layers.{layer - 1}"
        below: Tensor | None = None
        if way == "project":
            through = self._back_whole(layer, delta)
            main = multiply_transposed(own, through)
            below = multiply(through, self.weight(layer).T) if layer > 1 else None
        else:
            main = multiply_transposed(self.sums[layer], delta)
            below = self._back_whole(layer, self._back_carried(layer)) if layer > 1 else None
        self.gradients[f"{name}.{'weight' if self.kind == 'gcn' else 'neighbour'}"] = main
        self.gradients[f"{name}.bias"] = delta.sum(0)
        if self.kind == "sage":
            self.gradients[f"{name}.root"] = multiply_transposed(own, delta)
            below = below + multiply(delta, self.weight(layer, root=True).T) if below is not None else None
        if below is not None:
            mask = self.masks[layer - 2] if layer - 1 <= len(self.masks) else None
            below = below if mask is None else below * mask
            self.deltas[layer - 1] = below * (self.outputs[layer - 1] > 0)

    def _back_whole(self, layer: int, carried: Tensor) -> Tensor:
        whole = self.returned[layer] + self.factors.own * carried
        if self.inner is not None:
            back = (self.factors.inner * carried).contiguous()
            whole = whole + self.factors.source * spmm(self.inner.T.tocsr(), back)
        return whole

    def again(self, weights: Weights) -> Tape:
        """Forward with other weights on the sums this pass received: a further local step of the same round."""
        tape = Tape(
            self.kind,
            self.ways,
            weights,
            self.inputs[1],
            self.factors,
            cached=self.cached,
            inner=self.inner,
            masks=self.masks,
        )
        tape.received, tape.returned = self.received, self.returned
        for layer in range(1, self.layers + 1):
            tape.receive(layer, None)
        return tape


def needs_return(ways: Sequence[Way], layer: int) -> bool:
    """Whether a layer has a backward exchange: below it, or in its own weight's gradient, stand others' losses."""
    return ways[layer - 1] == "project" or (ways[layer - 1] == "aggregate" and layer > 1)


def residuals(logits: Tensor, y: Tensor, train: Tensor, weight: float) -> tuple[Tensor, float]:
    """delta^(k) = (softmax(p_u) - y_u) [u labelled] weight, and the summed loss of labelled devices."""
    delta = torch.zeros_like(logits)
    rows = train.nonzero().flatten()
    if not rows.numel():
        return delta, 0.0
    chosen = torch.log_softmax(logits[rows], dim=1)
    labels = y[rows]
    loss = -float(chosen.gather(1, labels[:, None]).double().sum())
    part = chosen.exp()
    part[torch.arange(len(rows)), labels] -= 1.0
    delta[rows] = part * weight
    return delta, loss


def multiply(a: Matrix, b: Tensor) -> Tensor:
    return spmm(a, b.contiguous()) if isinstance(a, sp.csr_matrix) else a @ b


def multiply_transposed(a: Matrix, b: Tensor) -> Tensor:
    """``a^T b``."""
    if not isinstance(a, sp.csr_matrix):
        return a.T @ b
    out: Any = a.T @ b.numpy()
    return torch.from_numpy(np.ascontiguousarray(out))


def dense(a: Matrix) -> Tensor:
    return torch.from_numpy(a.toarray()) if isinstance(a, sp.csr_matrix) else a
