"""What the sums of FedStruct's hops tell a client (``protocol=streamed``): values of single foreign nodes, edges
between foreign nodes, labels of foreign training nodes.

A client is given, for each of its boundary nodes v, the sum of Z_u over foreign neighbours u. It knows its own edges,
so M x = y with a known M: values that M determines are *exposed* (`isthmus.privacy.determined`). The next hop is
Z_u' = (Z_u + sum over neighbours of Z) / d_u for every node u, so a regression of exposed values after the first hop on
those before it, round after round, finds edges between exposed nodes. In the backward pass the first sums are of
residuals yhat - y over d, which are negative at the label alone; the second tell the same of nodes further away.

Whoever reads messages sender by sender (without secure sums) has the same with one M per sender, and so more exposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.optimize import nnls

from isthmus.privacy.attacks.labels import Labels, labels_from_signs
from isthmus.privacy.determined import Equations

Reals = NDArray[np.float64]


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


def edges_by_regression(after: Reals, before: Reals, own: Reals, *, both_ways: bool) -> NDArray[np.bool_]:
    """Edges between exposed nodes, by non-negative least squares: (e, e), row = the node whose value is explained.

    The weight of a neighbour is that of the node itself, 1 / d; one that is found with less than half of it is none.
    Nodes whose neighbours are not exposed have a part that is not explained. That is noise in many observations, which
    rarely makes one edge appear from both of its ends.

    Args:
        after: Values after the hop, of as many rounds as were seen, one below the other (rounds * c, e).
        before: The same before the hop.
        own: What the client knows of each node's sum before the hop: its own nodes next to it, and the node itself.
        both_ways: The graph is undirected: an edge is named where both of its ends show it.
    """
    count = after.shape[1]
    weights = np.zeros((count, count))
    for node in range(count):
        others = np.delete(np.arange(count), node)
        try:
            found = nnls(np.column_stack([own[:, node], before[:, others]]), after[:, node])[0]
        except RuntimeError:  # no convergence: this node names none
            continue
        if found[0] > 0:
            weights[node, others] = found[1:] / found[0]
    edges = weights > 0.5
    return edges & edges.T if both_ways else edges


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


def labels_present(sums: Reals) -> NDArray[np.bool_]:
    """(s, c), labels that some training node behind each sum has: residuals are negative at the label alone, so a sum
    of them is negative only where one has that label.
    """
    found: NDArray[np.bool_] = sums < -1e-5 * float(np.abs(sums).max(initial=0.0))
    return found
