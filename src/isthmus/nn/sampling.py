r"""Mini-batches of a client's training nodes: what a step computes on where the whole graph would be too much.

    neighbours   Hamilton, Ying & Leskovec, NeurIPS 2017, https://arxiv.org/abs/1706.02216: a batch of training nodes;
                 of the neighbours of every row at most ``fanout`` are drawn, without replacement
    clusters     Chiang et al., KDD 2019, https://arxiv.org/abs/1905.07953: the training nodes of some clusters of the
                 graph, which hear only from nodes of these clusters

The first propagation is part of the constant input of every node (`isthmus.nn.first_layer_input`), worked out once, so
it is exact in both; only later propagations are sampled. A row :math:`i` of a later propagation,
:math:`(M h)_i = \sum_j M_{ij} h_j`, is estimated from the drawn neighbours :math:`D_i` as

.. math:: M_{ii} h_i + \frac{d_i}{|D_i|} \sum_{j \in D_i} M_{ij} h_j,

:math:`d_i` neighbours other than :math:`i` itself: the mean over draws is :math:`(M h)_i`. In clusters :math:`D_i` are
the neighbours inside, which are no random draw: that estimate is biased, and costs less memory traffic.

PyG's NeighborLoader needs a compiled extension that is not on the package index for every Python; these loops are
numba's, as all others here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.nn.first_layer_input import operand_rows
from isthmus.nn.graph_batch import batches
from isthmus.nn.inputs import Inputs
from isthmus.nn.kernels import Array, compiled
from isthmus.nn.sparse import Sparse, canonical
from isthmus.seeds import Stream

CLUSTERS_PER_BATCH = 8
"""So many clusters make up a batch, drawn anew every epoch: one alone would always bring the same nodes together."""
SWEEPS = 4
"""Passes over the nodes in which clusters form; more change little."""


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws the batches of one client.

    Args:
        everything: Inputs of all its nodes in node order, the loss weights of its training nodes set (sum 1).
        batch_size: Training nodes per step.
        fanout: Neighbours drawn of a row, last propagation first; the last number goes on. None: cluster batches.
        weighted: Whether values of the propagation matrix are factors of a sum, which are scaled up for what is left
            out; False where a layer reads them as counts of arcs.
    """

    everything: Inputs
    batch_size: int
    fanout: tuple[int, ...] | None
    weighted: bool = True

    @cached_property
    def train(self) -> Tensor:
        """Rows of the training nodes, ascending."""
        return self.everything.weight.nonzero().flatten()

    @property
    def steps(self) -> Sparse | None:
        """The propagation matrix of all nodes; None where the first propagation is the only one."""
        return self.everything.hidden[0] if self.everything.hidden else None

    @cached_property
    def clusters(self) -> NDArray[np.int32]:
        """The cluster of every node; a few hold the training nodes of a batch. They are the client's in all rounds."""
        assert self.steps is not None
        nodes = self.everything.counts[0]
        largest = round(nodes / max(1, len(self.train)) * self.batch_size / CLUSTERS_PER_BATCH)
        return form_clusters(self.steps.csr, max(1, largest), Stream(0, ("clusters",)).integer())

    def epoch(self, stream: Stream) -> list[NDArray[np.int64]]:
        """The training nodes of every step of an epoch; each node is in one."""
        generator = stream.child("order").torch()
        if self.fanout is not None or self.steps is None:
            return [rows.numpy() for rows in batches(self.train, self.batch_size, generator)]
        train = self.train.numpy()
        owner = self.clusters[train]
        order = np.argsort(owner, kind="stable")
        pieces = np.split(train[order], np.flatnonzero(np.diff(owner[order])) + 1)
        found: list[NDArray[np.int64]] = []
        held: list[NDArray[np.int64]] = []
        for piece in torch.randperm(len(pieces), generator=generator).tolist():
            held.append(pieces[piece])
            if sum(map(len, held)) >= self.batch_size:
                found.append(np.concatenate(held))
                held = []
        return [*found, np.concatenate(held)] if held else found

    def batch(self, rows: NDArray[np.int64], stream: Stream) -> Inputs:
        """The inputs of a step on these training nodes."""
        orders, hidden = self._drawn(rows, stream) if self.fanout is not None else self._inside(rows)
        full, out = self.everything, torch.from_numpy(rows)
        return Inputs(
            clients=1,
            first={name: operand_rows(operand, orders[0]) for name, operand in full.first.items()},
            hidden=tuple(hidden),
            rows=tuple((len(order),) for order in orders),
            padded=tuple(len(order) for order in orders),
            y=full.y[out],
            # A batch stands for all training nodes: its loss is scaled so that the mean over batches is the client's.
            weight=full.weight[out] * (len(self.train) / len(rows)),
        )

    def _drawn(self, rows: NDArray[np.int64], stream: Stream) -> tuple[list[NDArray[np.int64]], list[Sparse]]:
        """The nodes of every level, first level first, and the propagations between them."""
        orders: list[NDArray[np.int64]] = [rows]
        hidden: list[Sparse] = []
        for level in range(len(self.everything.hidden)):
            assert self.steps is not None and self.fanout is not None
            fanout, seed = self.fanout[min(level, len(self.fanout) - 1)], stream.child("neighbours", level).integer()
            matrix, order = draw_neighbours(self.steps.csr, orders[0], fanout, seed, weighted=self.weighted)
            orders.insert(0, order)
            hidden.insert(0, Sparse(matrix))
        return orders, hidden

    def _inside(self, rows: NDArray[np.int64]) -> tuple[list[NDArray[np.int64]], list[Sparse]]:
        """The same where every propagation is among the nodes of the batch's clusters."""
        levels = len(self.everything.hidden)
        if self.steps is None:
            return [rows], []
        wanted = np.zeros(int(self.clusters.max()) + 1, dtype=bool)
        wanted[self.clusters[rows]] = True
        others = wanted[self.clusters]
        others[rows] = False
        nodes = np.concatenate([rows, np.flatnonzero(others)])
        among = Sparse(arcs_inside(self.steps.csr, nodes, weighted=self.weighted))
        last = Sparse(canonical(among.csr[: len(rows)]))
        return [nodes] * levels + [rows], [among] * (levels - 1) + [last]


def draw_neighbours(
    matrix: sp.csr_matrix, rows: NDArray[np.int64], fanout: int, seed: int, *, weighted: bool = True
) -> tuple[sp.csr_matrix, NDArray[np.int64]]:
    """Some neighbours of every row, drawn uniformly without replacement; the row itself is kept where it is one.

    Args:
        matrix: Propagation matrix M (n, n).
        rows: Rows of M to estimate, no one twice.
        fanout: Neighbours other than the row itself that are drawn at most.
        seed: Of the draws.
        weighted: Scale the drawn values up for those left out.

    Returns:
        The estimate (rows, m) of these rows of M on the m nodes they read, and these nodes, ``rows`` first.
    """
    degrees = np.diff(matrix.indptr)[rows]
    size = int(np.minimum(degrees, fanout + 1).sum())
    indptr, indices = np.zeros(len(rows) + 1, dtype=np.int32), np.empty(size, dtype=np.int32)
    values, order = np.empty(size, dtype=matrix.data.dtype), np.empty(len(rows) + size, dtype=np.int64)
    place, seen = np.full(matrix.shape[0], -1, dtype=np.int32), np.zeros(int(degrees.max(initial=0)), dtype=np.int64)
    arrays = (matrix.indptr, matrix.indices, matrix.data, rows, place, seen, indptr, indices, values, order)
    count = _draw(fanout, np.uint64(seed), weighted, *arrays)
    filled = int(indptr[-1])
    shape = (len(rows), count)
    return canonical(sp.csr_matrix((values[:filled], indices[:filled], indptr), shape=shape)), order[:count].copy()


def arcs_inside(matrix: sp.csr_matrix, nodes: NDArray[np.int64], *, weighted: bool = True) -> sp.csr_matrix:
    """M among some nodes, in their order (m, m); with ``weighted`` its values are scaled up for what lies outside."""
    place = np.full(matrix.shape[0], -1, dtype=np.int32)
    place[nodes] = np.arange(len(nodes), dtype=np.int32)
    size = int(np.diff(matrix.indptr)[nodes].sum())
    indptr, indices = np.zeros(len(nodes) + 1, dtype=np.int32), np.empty(size, dtype=np.int32)
    values = np.empty(size, dtype=matrix.data.dtype)
    filled = _inside(weighted, matrix.indptr, matrix.indices, matrix.data, nodes, place, indptr, indices, values)
    shape = (len(nodes), len(nodes))
    return canonical(sp.csr_matrix((values[:filled], indices[:filled], indptr), shape=shape))


def form_clusters(matrix: sp.csr_matrix, largest: int, seed: int) -> NDArray[np.int32]:
    """Clusters of at most ``largest`` nodes with many arcs inside: label propagation with a bound on sizes.

    Meyerhenke, Sanders & Schulz, SEA 2014, https://arxiv.org/abs/1402.3281: every node joins the cluster that most of
    its neighbours are in, among those that have room; time grows with the number of arcs.

    Returns:
        The cluster of every node, numbered from 0 (n,).
    """
    nodes = int(matrix.shape[0])
    labels, sizes = np.arange(nodes, dtype=np.int32), np.ones(nodes, dtype=np.int64)
    votes = np.zeros(nodes, dtype=np.int32)
    for sweep in range(SWEEPS):
        order = np.random.default_rng((seed, sweep)).permutation(nodes)
        _join(largest, order, matrix.indptr, matrix.indices, labels, sizes, votes)
    found: NDArray[np.int32] = np.unique(labels, return_inverse=True)[1].astype(np.int32)
    return found


@compiled
def _random(state: Any) -> Any:
    """The next state of a sequence of 64-bit numbers (Steele, Lea & Flood's SplitMix, OOPSLA 2014)."""
    return state + np.uint64(0x9E3779B97F4A7C15)


@compiled
def _mixed(state: Any) -> Any:
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def _draw(
    fanout: int,
    state: Any,
    weighted: bool,
    m_indptr: Array,
    m_indices: Array,
    m_values: Array,
    rows: Array,
    place: Array,
    seen: Array,
    indptr: Array,
    indices: Array,
    values: Array,
    order: Array,
) -> int:
    for i in range(len(rows)):
        place[rows[i]] = i
        order[i] = rows[i]
    count, at = len(rows), 0
    for i in range(len(rows)):
        row = rows[i]
        begin, end = m_indptr[row], m_indptr[row + 1]
        itself = -1
        for j in range(begin, end):
            if m_indices[j] == row:
                itself = j
                break
        others = end - begin - (1 if itself >= 0 else 0)
        drawn = min(others, fanout)
        scale = values.dtype.type(others / drawn if weighted and drawn else 1.0)
        if itself >= 0:
            indices[at] = i
            values[at] = m_values[itself]
            at += 1
        for k in range(drawn):
            position = k
            if drawn < others:  # Floyd's: the k-th draw is among the first others - drawn + k + 1, or the last of them
                last = others - drawn + k
                state = _random(state)
                share = (_mixed(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)
                position = min(int(share * (last + 1)), last)
                if seen[position] == i + 1:
                    position = last
                seen[position] = i + 1
            j = begin + position
            if itself >= 0 and j >= itself:
                j += 1
            column = m_indices[j]
            if place[column] < 0:
                place[column] = count
                order[count] = column
                count += 1
            indices[at] = place[column]
            values[at] = m_values[j] * scale
            at += 1
        indptr[i + 1] = at
    return count


@compiled
def _inside(
    weighted: bool,
    m_indptr: Array,
    m_indices: Array,
    m_values: Array,
    nodes: Array,
    place: Array,
    indptr: Array,
    indices: Array,
    values: Array,
) -> int:
    at = 0
    for i in range(len(nodes)):
        row = nodes[i]
        first, others = at, 0
        for j in range(m_indptr[row], m_indptr[row + 1]):
            column = m_indices[j]
            others += column != row
            if place[column] >= 0:
                indices[at] = place[column]
                values[at] = m_values[j]
                at += 1
        kept = 0
        for j in range(first, at):
            kept += indices[j] != i
        if weighted and kept:
            scale = values.dtype.type(others / kept)
            for j in range(first, at):
                if indices[j] != i:
                    values[j] *= scale
        indptr[i + 1] = at
    return at


@compiled
def _join(largest: int, order: Array, indptr: Array, indices: Array, labels: Array, sizes: Array, votes: Array) -> None:
    for node in order:
        own = labels[node]
        for j in range(indptr[node], indptr[node + 1]):
            if indices[j] != node:
                votes[labels[indices[j]]] += 1
        best, most = own, votes[own]
        for j in range(indptr[node], indptr[node + 1]):
            label = labels[indices[j]]
            if votes[label] > most and sizes[label] < largest:
                best, most = label, votes[label]
        for j in range(indptr[node], indptr[node + 1]):
            votes[labels[indices[j]]] = 0
        if best != own:
            sizes[own] -= 1
            sizes[best] += 1
            labels[node] = best
