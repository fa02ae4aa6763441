"""What the sums of FedStruct's hops tell a client (``protocol=streamed``): values of single foreign nodes, edges
between foreign nodes, labels of foreign training nodes.

A client is given, for each of its boundary nodes v, the sum of Z_u over foreign neighbours u. It knows its own edges,
so M x = y with a known M: values that M determines are *exposed* (`isthmus.privacy.determined`). The next hop is
Z_u' = (Z_u + sum over neighbours of Z) / d_u for every node u, so a regression of exposed values of one hop on those of
the hop before finds edges between exposed nodes. In the backward pass the first sums are of residuals yhat - y over d,
which are negative at the label alone.

Whoever reads messages sender by sender (without secure sums) has the same with one M per sender, and so more exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from isthmus.privacy.attacks.labels import Labels, labels_from_signs
from isthmus.privacy.determined import Equations

Reals = NDArray[np.float64]
MOST_NEIGHBOURS = 8
"""Neighbours that a regression names of one node at most."""


@dataclass(frozen=True)
class SumsOfHops:
    """What a client was given by one sender, or by all together.

    Args:
        edges: (s, m), weights of its edges from slots to the m foreign nodes these sums are over.
        nodes: (m,), those nodes, by any number.
    """

    edges: sp.csr_matrix
    nodes: NDArray[np.int64]

    @cached_property
    def _equations(self) -> Equations:
        return Equations(self.edges)

    @property
    def exposed(self) -> NDArray[np.bool_]:
        """(m,), nodes whose single values follow from the sums."""
        return self._equations.determined

    def solved(self, sums: Reals) -> Reals:
        """Values of the exposed nodes, from sums (s, c). (exposed, c)"""
        return self._equations.solve(sums)[self.exposed]


def edges_by_regression(
    values: Sequence[Reals], before: Sequence[Reals], own: Sequence[Reals], *, tolerance: float = 0.3
) -> NDArray[np.bool_]:
    """Edges between exposed nodes, by greedy regression: (e, e), row = the node whose value is explained.

    Args:
        values: Of each hop of each round, exposed values after the hop (e, c).
        before: The same before the hop.
        own: What the client knows of each node's sum before the hop: its own nodes next to it, and the node itself.
        tolerance: How far, relative to it, the weight of a neighbour may lie from the node's own weight 1 / d.
    """
    count = values[0].shape[0]
    found = np.zeros((count, count), dtype=bool)
    after, past, known = (np.concatenate([part.T for part in series]) for series in (values, before, own))
    length = np.maximum(np.linalg.norm(past, axis=0), 1e-300)
    for node in range(count):
        chosen = _explained(after[:, node], known[:, node], past, length, node)
        columns = np.column_stack([known[:, node], past[:, chosen]])
        weights = np.linalg.lstsq(columns, after[:, node], rcond=None)[0]
        if weights[0] > 0:
            close = np.abs(weights[1:] / weights[0] - 1.0) < tolerance
            found[node, np.array(chosen, dtype=np.int64)[close]] = True
    return found


def _explained(after: Reals, known: Reals, past: Reals, length: Reals, node: int) -> list[int]:
    """Columns that explain a value best, one after the other, until it is explained or they are `MOST_NEIGHBOURS`."""
    chosen: list[int] = []
    for _ in range(MOST_NEIGHBOURS):
        columns = np.column_stack([known, past[:, chosen]])
        rest = after - columns @ np.linalg.lstsq(columns, after, rcond=None)[0]
        if np.linalg.norm(rest) < 1e-4 * np.linalg.norm(after):
            break
        fit = (past.T @ rest) / length
        fit[[node, *chosen]] = -np.inf
        if not np.isfinite(fit).any() or fit.max() <= 0:
            break
        chosen.append(int(fit.argmax()))
    return chosen


def labels_from_first_hop_back(sums: SumsOfHops, first: Reals) -> tuple[NDArray[np.int64], Labels]:
    """Nodes whose residual can be singled out, and the labels these show; -1 where there is none.

    Most nodes are no training nodes and send zero, so more can be singled out than by the equations alone: nodes in a
    sum of zero have no label; two sums that are equal are the residual of the one node they have in common; what is
    known is subtracted, and the rest looked at again.

    Args:
        first: (s, c), what the first hop of the backward pass brought.
    """
    noise = 1e-5 * float(np.abs(first).max(initial=0.0))
    edges, rest = sums.edges.astype(np.float64).tolil(copy=True).tocsr(), first.astype(np.float64).copy()
    known, values = np.zeros(len(sums.nodes), dtype=bool), np.zeros((len(sums.nodes), first.shape[1]))
    while True:
        left = sp.csr_matrix(edges @ sp.diags((~known).astype(np.float64)))
        left.eliminate_zeros()
        zero = np.abs(rest).max(axis=1, initial=0.0) <= noise
        silent = ~known & (np.asarray(left[zero].sum(axis=0)).ravel() > 0)
        equations = Equations(left)
        alone = ~known & ~silent & equations.determined
        if not silent.any() and not alone.any():
            alone, values = _in_two_sums(left, rest, zero, noise, values)
        elif alone.any():
            values[alone] = equations.solve(rest)[alone]
        if not silent.any() and not alone.any():
            break
        known |= silent | alone
        rest -= edges[:, np.flatnonzero(alone)] @ values[alone]
    found = np.flatnonzero(known)
    return sums.nodes[found], labels_from_signs(np.where(np.abs(values[found]) > noise, values[found], 0.0))


def _in_two_sums(
    left: sp.csr_matrix, rest: Reals, zero: NDArray[np.bool_], noise: float, values: Reals
) -> tuple[NDArray[np.bool_], Reals]:
    """Nodes that are the only one two equal sums have in common, and values with theirs."""
    found, rows = np.zeros(left.shape[1], dtype=bool), np.flatnonzero(~zero)
    member = sp.csr_matrix(left[rows].sign())
    common = sp.triu(member @ member.T, k=1).tocoo()
    once = common.data == 1
    one, other = rows[common.row[once]], rows[common.col[once]]
    equal = np.abs(rest[one] - rest[other]).max(axis=1, initial=0.0) <= noise
    for first, second in zip(one[equal], other[equal], strict=True):
        node = int(np.intersect1d(left[[first]].indices, left[[second]].indices)[0])
        found[node], values[node] = True, rest[first] / left[first, node]
    return found, values


def single_residuals(first: Reals) -> Labels:
    """Slots whose sum looks like one training node's residual: the label of one of the slot's foreign neighbours, of
    which is not known.
    """
    noise = 1e-5 * float(np.abs(first).max(initial=0.0))
    return labels_from_signs(np.where(np.abs(first) > noise, first, 0.0))
