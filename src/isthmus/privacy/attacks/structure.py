"""Neighbour lists from FedStruct's hop products (FedStruct spec, section 13.1), nodes in reach from rows of a gradient
that are not zero (FedStruct spec, section 13.6), and entries from an announced support.

At hop 2 client i receives, from client k, the product of its edges into k with k's normalised adjacency. A node v of i
with a single
neighbour w in k receives row w as it is: the exact neighbour list of w and its degree. Known rows can be subtracted
from others, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from isthmus.privacy.attacks.result import Recovery

_TINY = 1e-6
"""Below every entry of a row (one over a degree), above what rounding of 32-bit products leaves."""


@dataclass(frozen=True)
class NeighbourLists:
    """Neighbours (columns of the products, i.e. global ids) of foreign nodes, by global id. Only lists that are
    consistent are here: all entries of a row of the normalised adjacency are one over their number, and the node itself
    is among them."""

    neighbours: Mapping[int, NDArray[np.int64]]

    def score(self, truth: Mapping[int, NDArray[np.int64]], party: str) -> Recovery:
        """Lists against the true ones of all foreign nodes that could have leaked."""
        right = sum(
            np.array_equal(found, np.sort(truth[node])) for node, found in self.neighbours.items() if node in truth
        )
        return Recovery("neighbours_from_hop_products", party, len(self.neighbours), int(right), len(truth))

    def edges(self) -> frozenset[tuple[int, int]]:
        """Undirected edges read, as (smaller, larger)."""
        return frozenset((min(a, int(b)), max(a, int(b))) for a, found in self.neighbours.items() for b in found)


def neighbours_from_hop_products(
    own_edges: sp.csr_matrix, products: sp.csr_matrix, foreign_id: NDArray[np.int64], *, peel: bool = True
) -> NeighbourLists:
    """What a client reads from the products it was sent.

    Args:
        own_edges: (n_i, m), edges of own nodes to m foreign nodes: those of client k, or all foreign ones for summed
            products.
        products: (n_i, n), what arrived: own_edges times the rows of those m nodes in the normalised adjacency, over
            all n nodes.
        foreign_id: (m,), column of ``products`` that belongs to each foreign node.
        peel: Subtract rows once they are known and go on; False reads only nodes with a single foreign neighbour.
    """
    edges, rows = sp.csr_matrix(own_edges), sp.csr_matrix(products)
    unknown = {v: set(edges.indices[edges.indptr[v] : edges.indptr[v + 1]].tolist()) for v in range(edges.shape[0])}
    single = [v for v, left in unknown.items() if len(left) == 1]
    touching: dict[int, list[int]] = {}
    for v, left in unknown.items():
        for w in left:
            touching.setdefault(w, []).append(v)
    remainder = {v: dict(_row(rows, v)) for v in unknown if unknown[v]}
    found: dict[int, NDArray[np.int64]] = {}
    while single:
        v = single.pop()
        if len(unknown[v]) != 1:
            continue
        w = next(iter(unknown[v]))
        weight = float(edges[v, w])
        row = {column: value / weight for column, value in remainder[v].items() if abs(value) > _TINY}
        if not _is_walk_row(row, int(foreign_id[w])):
            continue
        found[int(foreign_id[w])] = np.sort(
            np.array([column for column in row if column != foreign_id[w]], dtype=np.int64)
        )
        for other in touching[w]:
            unknown[other].discard(w)
            if peel:
                _subtract(remainder[other], float(edges[other, w]), row)
                if len(unknown[other]) == 1:
                    single.append(other)
    return NeighbourLists(found)


@dataclass(frozen=True)
class Reached:
    """Nodes (rows of the gradient) within reach of a client's labelled nodes."""

    nodes: NDArray[np.int64]

    def score(self, truth: NDArray[np.int64], party: str) -> Recovery:
        """Against the nodes that really are within reach."""
        return Recovery(
            "reached_from_gradient", party, self.nodes.size, int(np.isin(self.nodes, truth).sum()), truth.size
        )


def reached_from_gradient(gradient: NDArray[np.floating]) -> Reached:
    """What the server reads from one client's gradient of the structure features, (n, d): dL/dS = Abar^T R, so a row
    that is not zero belongs to a node within L_s hops of a labelled one. `labels.labels_from_signs` reads classes from
    rows that one node alone reaches."""
    return Reached(np.flatnonzero(np.abs(gradient).max(axis=1) > 0))


def entries_from_support(announced: NDArray[np.int64], truth: NDArray[np.int64], party: str) -> Recovery:
    """Whoever is shown an announced support takes every position for an entry."""
    return Recovery(
        "entries_from_support", party, announced.size, int(np.isin(announced, truth).sum()), np.unique(truth).size
    )


def _row(matrix: sp.csr_matrix, v: int) -> zip[tuple[int, float]]:
    begin, end = matrix.indptr[v], matrix.indptr[v + 1]
    return zip(matrix.indices[begin:end].tolist(), matrix.data[begin:end].tolist(), strict=True)


def _is_walk_row(row: Mapping[int, float], own: int) -> bool:
    return own in row and all(abs(value * len(row) - 1) < 1e-4 for value in row.values())


def _subtract(remainder: dict[int, float], weight: float, row: Mapping[int, float]) -> None:
    for column, value in row.items():
        remainder[column] = remainder.get(column, 0.0) - weight * value
