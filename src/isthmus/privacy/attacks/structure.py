"""Neighbour lists from FedStruct's hop products (FedStruct spec, section 13.1), nodes in reach from rows of a gradient
that are not zero (FedStruct spec, section 13.6), and entries from an announced support.

At hop 2 client i receives, from client k, the product of its edges into k with k's normalised adjacency. A node v of i
with a single
neighbour w in k receives row w as it is: the exact neighbour list of w and its degree. Known rows can be subtracted
from others, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class SummedRows:
    """What a client solves from the sums of hop 2.

    Args:
        degrees: (m,), 1 / d_w of the foreign nodes next to it, NaN where it is not determined.
        claimed: (m, n), neighbours it names, by column.
    """

    degrees: NDArray[np.float64]
    claimed: sp.csr_matrix


def rows_from_summed_products(
    own_edges: sp.csr_matrix,
    sums: sp.csr_matrix,
    known: sp.csr_matrix,
    own_columns: NDArray[np.bool_],
    columns: NDArray[np.int64],
) -> SummedRows:
    """Neighbours of foreign nodes from sums alone: an entry of the second power is the sum of 1 / d_w over those w next
    to the slot that are next to the column. In the client's own columns it knows which these are, and solves for the
    degrees; then it finds, for every other entry, the subsets of 1 / d_w that add up to it.

    Args:
        own_edges: (s, m), the client's edges from slots to foreign nodes, ones.
        sums: (s, n), what arrived: own_edges times rows of those m nodes in the normalised adjacency.
        known: (m, n), which of the m nodes are next to the client's own columns: its own edges.
        own_columns: (n,)
        columns: (m,), column of each of the m nodes; the first power shows them.
    """
    edges, rows = sp.csr_matrix(own_edges), sp.csr_matrix(sums)
    degrees = _solved_degrees(edges, rows, sp.csr_matrix(known), own_columns, columns)
    slots = np.diff(edges.tocsc().indptr)
    possible = (edges.T @ abs(rows).sign()).tocsr()  # an entry of zero at one slot of w: w is not next to that column
    possible.data = (possible.data == np.repeat(slots, np.diff(possible.indptr))).astype(np.float64)
    claims: set[tuple[int, int]] = set()
    for slot in range(edges.shape[0]):
        around = edges.indices[edges.indptr[slot] : edges.indptr[slot + 1]]
        values = rows[[slot]]
        foreign = values.indices[~own_columns[values.indices]]
        candidates = possible[around][:, foreign].toarray() > 0  # (k, columns)
        for column, fits, value in zip(foreign, candidates.T, values.data[~own_columns[values.indices]], strict=True):
            claims |= {(int(w), int(column)) for w in _certain(around[fits], degrees, float(value))}
    pairs = np.array(sorted(claims), dtype=np.int64).reshape(-1, 2)
    shape = (edges.shape[1], rows.shape[1])
    return SummedRows(degrees, sp.csr_matrix((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=shape))


def _certain(nodes: NDArray[np.int32], degrees: NDArray[np.float64], value: float) -> NDArray[np.int32]:
    """Those of the nodes that are in every subset whose 1 / d adds up to the value."""
    if nodes.size == 1:
        return nodes
    if nodes.size > _MOST_NEIGHBOURS or np.isnan(degrees[nodes]).any():
        return nodes[:0]
    members = (np.arange(1 << nodes.size)[:, None] >> np.arange(nodes.size)) & 1
    fits = np.abs(members @ degrees[nodes] - value) < _CLOSE
    return nodes[members[fits].all(axis=0)] if fits.any() else nodes[:0]


_MOST_NEIGHBOURS = 12
_CLOSE = 1e-5


def _solved_degrees(
    edges: sp.csr_matrix,
    rows: sp.csr_matrix,
    known: sp.csr_matrix,
    own_columns: NDArray[np.bool_],
    columns: NDArray[np.int64],
) -> NDArray[np.float64]:
    """1 / d_w. Some entry beside w is 1 / d_w alone, which leaves few candidates; the client's own columns are sums it
    knows the terms of, and candidates that fit none of them go.
    """
    own = np.flatnonzero(own_columns)
    sums, beside = rows[:, own].tocsr(), known[:, own].tocsc()
    candidates: dict[int, NDArray[np.float64]] = {}
    lowest = dict.fromkeys(range(edges.shape[1]), np.inf)
    equations: list[tuple[NDArray[np.int32], list[tuple[NDArray[np.bool_], float]]]] = []
    for slot in range(edges.shape[0]):
        around = edges.indices[edges.indptr[slot] : edges.indptr[slot + 1]]
        seen = rows.data[rows.indptr[slot] : rows.indptr[slot + 1]]
        whole = np.rint(1.0 / np.maximum(seen, 1e-9))
        degrees = np.unique(whole[(whole >= 2) & (np.abs(seen - 1.0 / np.maximum(whole, 1.0)) < _CLOSE)])
        for w, at_itself in zip(around.tolist(), rows[slot, columns[around]].toarray().ravel(), strict=True):
            candidates[w] = np.intersect1d(candidates[w], degrees) if w in candidates else degrees
            lowest[w] = min(lowest[w], float(at_itself))
        terms = []
        for column, value in _row(sums, slot):
            of = np.isin(around, beside.indices[beside.indptr[column] : beside.indptr[column + 1]])
            if of.any():
                terms.append((of, value))
        equations.append((around, terms))
    for _ in range(_PASSES):
        for around, terms in equations:
            for of, value in terms:  # one equation at a time has few unknowns
                _keep_fitting(candidates, around[of], [(np.ones(int(of.sum()), bool), value)])
            _keep_fitting(candidates, around, terms)
    solved = np.full(edges.shape[1], np.nan)
    for w, left in candidates.items():
        if len(left) > 1:  # a node is its own neighbour: at a slot whose other nodes are not next to w it reads 1 / d_w
            smallest = np.rint(1.0 / max(lowest[w], 1e-9))
            left = left[(left == smallest) & (abs(lowest[w] - 1.0 / max(smallest, 1.0)) < _CLOSE)]
        if len(left) == 1:
            solved[w] = 1.0 / left[0]
    return solved


def _keep_fitting(
    candidates: dict[int, NDArray[np.float64]],
    nodes: NDArray[np.int32],
    terms: Sequence[tuple[NDArray[np.bool_], float]],
) -> None:
    """Leave only candidates of these nodes that are part of some solution of the equations, where all can be tried."""
    lists = [candidates[w] for w in nodes.tolist()]
    combinations = float(np.prod([float(len(each)) for each in lists]))
    if not terms or not 1 < combinations <= _MOST_COMBINATIONS:
        return
    tried = np.stack(np.meshgrid(*lists, indexing="ij"), axis=-1).reshape(-1, len(lists))
    fits = np.ones(len(tried), bool)
    for of, value in terms:
        fits &= np.abs((of / tried).sum(axis=1) - value) < _CLOSE
    if fits.any():
        for w, column in zip(nodes.tolist(), tried[fits].T, strict=True):
            candidates[w] = np.unique(column)


_PASSES = 4
_MOST_COMBINATIONS = 100_000
