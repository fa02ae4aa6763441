r"""Graphlet degree vectors -- Pržulj, Bioinformatics 2007: how often a node takes each place in small induced
subgraphs.

The connected graphs of 2 to 5 nodes have 73 kinds of places (orbits); column o of row v counts the induced subgraphs in
which v is at place o. Columns are ordered by nodes, edges and adjacency of the graphlet (`orbits`), not by Pržulj's
numbers; column 0 is the degree.

Nothing is enumerated. A *rooted homomorphism* maps a pattern's root to v and edges to edges; nodes may fall together.
Its image induces one connected subgraph of at most 5 nodes, so

    hom_F(v) = sum_H s(F, H) ind_H(v),     s(F, H) = homomorphisms of F onto all nodes of H that keep the root,

and ordered by nodes, then by falling number of edges, this system is triangular: counts follow one after the other, in
integers, exactly. hom_F comes from products of sparse matrices: a node of F with one neighbour left is summed into a
vector, one with two into a matrix. The six patterns that contain a subdivided K4 need one node fixed first
(`_fixing_one`).

Why not a library: the two on the package index count up to 4 nodes only (pyfglt), or overflow 32 bits on Chameleon
(orbit-count).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations, permutations, product

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from torch import Tensor

from isthmus.compiling import machine_code
from isthmus.errors import DataError

ORBITS = 73
Counts = NDArray[np.int64]
Edges = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Orbit:
    """A connected graph on nodes 0 ... nodes - 1 whose root is node 0."""

    nodes: int
    edges: Edges


@lru_cache(maxsize=1)
def orbits() -> tuple[Orbit, ...]:
    """All 73, in the order of the columns."""
    found: list[Orbit] = []
    for nodes in range(2, 6):
        pairs = list(combinations(range(nodes), 2))
        rooted = {
            _canonical(nodes, frozenset(edges))
            for size in range(nodes - 1, len(pairs) + 1)
            for edges in combinations(pairs, size)
            if _connected(nodes, edges)
        }
        found += [Orbit(nodes, edges) for edges in sorted(rooted, key=lambda e: (len(e), sorted(e)))]
    return tuple(found)


def graphlet_degrees(edge_index: Tensor, num_nodes: int) -> Counts:
    """Orbit counts of every node (n, 73).

    An arc stands for an edge, whichever way it points; loops are no edges. The same arc twice is refused: an induced
    subgraph of a multigraph is not defined here.
    """
    adjacency = _simple(edge_index, num_nodes)
    homs = _homomorphisms(adjacency)
    onto = _onto()
    found: dict[int, Counts] = {}
    degrees = np.zeros((num_nodes, ORBITS), dtype=np.int64)
    everything = orbits()
    for f in sorted(range(ORBITS), key=lambda o: (everything[o].nodes, -len(everything[o].edges))):
        left = homs[everything[f]].copy()
        for h, counts in found.items():
            if onto[f, h]:
                left -= onto[f, h] * counts
        # A pattern of several nodes may fall onto fewer, never onto one: it has an edge.
        found[f] = degrees[:, f] = left // onto[f, f]
    return degrees


def standardised(counts: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Columns with mean 0 and variance 1 over all nodes, and the means and deviations; a constant column is 0."""
    values = counts.astype(np.float64)
    mean, deviation = values.mean(0), values.std(0)
    return (values - mean) / np.where(deviation > 0, deviation, 1.0), mean, np.where(deviation > 0, deviation, 1.0)


def _simple(edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
    source, target = edge_index.numpy()
    arcs = source.astype(np.int64) * max(num_nodes, 1) + target
    if len(np.unique(arcs)) < len(arcs):
        raise DataError(
            "graphlets are counted in a graph without parallel edges, and this one lists an arc twice: remove "
            "duplicates, or choose another structure feature (nsf=degree, hop2vec)"
        )
    apart = source != target
    rows, columns = np.append(source[apart], target[apart]), np.append(target[apart], source[apart])
    matrix = sp.csr_matrix((np.ones(len(rows), dtype=np.int64), (rows, columns)), shape=(num_nodes, num_nodes))
    matrix.sum_duplicates()
    matrix.data[:] = 1
    return matrix


# -- patterns --------------------------------------------------------------------------------------


def _connected(nodes: int, edges: Sequence[tuple[int, int]]) -> bool:
    seen, grew = {0}, True
    while grew:
        more = {a for a, b in edges if b in seen} | {b for a, b in edges if a in seen}
        grew = not more <= seen
        seen |= more
    return len(seen) == nodes


@cache
def _canonical(nodes: int, edges: Edges) -> Edges:
    """The smallest of all drawings that keep node 0."""
    drawings = (
        tuple(sorted(tuple(sorted((order[a], order[b]))) for a, b in edges))
        for order in ((0, *rest) for rest in permutations(range(1, nodes)))
    )
    return frozenset(min(drawings))  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def _onto() -> NDArray[np.int64]:
    """s(F, H) of all pairs of orbits."""
    everything = orbits()
    table = np.zeros((ORBITS, ORBITS), dtype=np.int64)
    adjacent = []
    for orbit in everything:
        matrix = np.zeros((5, 5), dtype=bool)
        for a, b in orbit.edges:
            matrix[a, b] = matrix[b, a] = True
        adjacent.append(matrix)
    for k in range(2, 6):
        for nodes in range(k, 6):
            maps = np.array([(0, *rest) for rest in product(range(k), repeat=nodes - 1)])
            maps = maps[[len(set(row)) == k for row in maps.tolist()]]
            for f, pattern in enumerate(everything):
                if pattern.nodes != nodes:
                    continue
                for h, target in enumerate(everything):
                    if target.nodes == k:
                        kept = np.ones(len(maps), dtype=bool)
                        for a, b in pattern.edges:
                            kept &= adjacent[h][maps[:, a], maps[:, b]]
                        table[f, h] = kept.sum()
    return table


# -- homomorphisms ---------------------------------------------------------------------------------


def _homomorphisms(adjacency: sp.csr_matrix) -> dict[Orbit, Counts]:
    """hom_F of every node, of every orbit F."""
    engine = _Elimination(adjacency)
    by_hand = _fixing_one(adjacency)
    return {orbit: by_hand[orbit] if orbit in by_hand else engine.count(orbit) for orbit in orbits()}


class _Elimination:
    """Sums out the nodes of a pattern, one after the other, the root last. Products are made once for all patterns: a
    matrix is known by the expression that made it, and by the node its rows stand for.
    """

    def __init__(self, adjacency: sp.csr_matrix) -> None:
        self.ones = np.ones(adjacency.shape[0], dtype=np.int64)
        self._matrices = {"A": adjacency, "A^T": adjacency}
        self._vectors: dict[str, Counts] = {"": self.ones}

    def count(self, orbit: Orbit) -> Counts:
        """hom_F."""
        between = {frozenset(edge): ("A", edge[0]) for edge in orbit.edges}  # pair -> matrix, node of its rows
        at: dict[int, list[str]] = {node: [] for node in range(orbit.nodes)}  # node -> names of its vectors
        left = set(range(1, orbit.nodes))
        while left:
            node = min(left, key=lambda v: (sum(v in pair for pair in between), v))
            pairs = [pair for pair in between if node in pair]
            others = [next(iter(pair - {node})) for pair in pairs]
            factors = [between.pop(pair) for pair in pairs]
            here = self._product(at[node])
            left.remove(node)
            if len(others) == 1:
                at[others[0]].append(self._summed(_rows_are(others[0], *factors[0]), here))
                continue
            a, both = others[0], frozenset(others)
            known = _rows_are(a, *between[both]) if both in between else ""
            between[both] = self._joined(_rows_are(a, *factors[0]), here, _rows_are(node, *factors[1]), known), a
        return self._vectors[self._product(at[0])]

    def _matrix(self, name: str) -> sp.csr_matrix:
        if name not in self._matrices:
            self._matrices[name] = sp.csr_matrix(self._matrices[name.removesuffix("^T")].T)
        return self._matrices[name]

    def _product(self, names: list[str]) -> str:
        name = "*".join(sorted(names))
        if name not in self._vectors:
            self._vectors[name] = np.prod([self._vectors[one] for one in names], axis=0)
        return name

    def _summed(self, matrix: str, vector: str) -> str:
        name = f"({matrix} {vector})"
        if name not in self._vectors:
            self._vectors[name] = np.asarray(self._matrix(matrix) @ self._vectors[vector])
        return name

    def _joined(self, first: str, vector: str, second: str, known: str) -> str:
        """first diag(vector) second, times what is between these two nodes already."""
        name = f"[{first} {vector} {second} {known}]"
        if name not in self._matrices:
            left = self._matrix(first)
            scaled = left @ sp.diags(self._vectors[vector], dtype=np.int64) if vector else left
            joined = scaled @ self._matrix(second)
            self._matrices[name] = sp.csr_matrix(joined.multiply(self._matrix(known)) if known else joined)
        return name


def _rows_are(node: int, name: str, rows: int) -> str:
    return name if rows == node else name.removesuffix("^T") if name.endswith("^T") else name + "^T"


def _fixing_one(adjacency: sp.csr_matrix) -> dict[Orbit, Counts]:
    """hom_F of the patterns with K4, whole or with one edge subdivided: one node is fixed, the others are counted
    around it. B is the adjacency among its neighbours N, T = B B.
    """
    nodes = adjacency.shape[0]
    degree = np.diff(adjacency.indptr)
    real = adjacency.astype(np.float64)
    names = [
        *("k4", "tail other", "wheel hub", "wheel rim", "diamond core", "diamond tip"),
        *("ear base", "ear other", "ear", "split end", "split side", "split middle"),
    ]
    count = {name: np.zeros(nodes) for name in names}
    for h in range(nodes):
        near = adjacency.indices[adjacency.indptr[h] : adjacency.indptr[h + 1]]
        if len(near) < 2:
            continue
        beside = real[:, near].tocsr()  # (n, d)
        b = beside[near].toarray()
        t = b @ b
        triangles, inner = (b * t).sum(1), b.sum(1)
        # e between c and d, with a ~ b both beside c and d: c is fixed, a, b and e are in N, d is anywhere.
        reached = np.flatnonzero(np.diff(beside.indptr))
        rows = beside[reached]  # of d
        edges = rows @ b  # how many b beside a, of each d and a
        both = rows.multiply(edges).tocsr()  # a beside d
        ends, middles = np.asarray(both.sum(1)).ravel(), np.asarray(rows.sum(1)).ravel()
        count["split end"][h] += ends @ middles
        count["split side"][near] += both.T @ middles
        count["split middle"][near] += rows.T @ ends
        if not inner.any():
            continue
        count["k4"][h] = triangles.sum()
        count["tail other"][h] = triangles @ degree[near]
        square = t * t
        count["wheel hub"][h] = square.sum()
        count["wheel rim"][near] += square.sum(1)
        q = b * t
        count["diamond core"][h] = (b * square).sum()
        count["diamond tip"][near] += ((b @ q) * b).sum(1)
        count["ear base"][h] = triangles @ inner
        count["ear other"][near] += q @ inner
        count["ear"][near] += b @ triangles
    whole = {name: np.rint(values).astype(np.int64) for name, values in count.items()}
    whole["tail base"], whole["tail"] = whole["k4"] * degree, np.asarray(adjacency @ whole["k4"])
    whole["k5"] = 24 * _count_k5(adjacency)
    return {_named(pattern): values for pattern, values in whole.items()}


def _named(pattern: str) -> Orbit:
    """Patterns by name: edges as pairs of letters, the root first."""
    k4 = "ab ac ad bc bd cd"
    drawn = {
        "k4": (k4, "a"),
        "tail base": (k4 + " ae", "a"),
        "tail other": (k4 + " ae", "b"),
        "tail": (k4 + " ae", "e"),
        "wheel hub": ("ha hb hc hd ab bc cd da", "h"),
        "wheel rim": ("ha hb hc hd ab bc cd da", "a"),
        "diamond core": ("xy yz xz px py pz qx qy qz", "x"),
        "diamond tip": ("xy yz xz px py pz qx qy qz", "p"),
        "ear base": (k4 + " ea eb", "a"),
        "ear other": (k4 + " ea eb", "c"),
        "ear": (k4 + " ea eb", "e"),
        "split end": ("ab ac ad bc bd ce de", "c"),
        "split side": ("ab ac ad bc bd ce de", "a"),
        "split middle": ("ab ac ad bc bd ce de", "e"),
        "k5": (k4 + " ae be ce de", "a"),
    }
    text, root = drawn[pattern]
    letters = [root, *sorted(set(text) - {" ", root})]
    edges = frozenset((min(p), max(p)) for p in ((letters.index(e[0]), letters.index(e[1])) for e in text.split()))
    return Orbit(len(letters), _canonical(len(letters), edges))


def _count_k5(adjacency: sp.csr_matrix) -> Counts:
    """How many complete graphs of 5 nodes each node is in: each is found once, along an order by degree."""
    nodes = adjacency.shape[0]
    degree = np.diff(adjacency.indptr)
    rank = np.empty(nodes, dtype=np.int64)
    rank[np.lexsort((np.arange(nodes), degree))] = np.arange(nodes)
    rows = np.repeat(np.arange(nodes), degree)
    later = rank[adjacency.indices] > rank[rows]
    indptr = np.append(0, np.cumsum(np.bincount(rows[later], minlength=nodes)))
    found: Counts = _k5(indptr.astype(np.int64), adjacency.indices[later].astype(np.int64), nodes)
    return found


@machine_code
def _k5(indptr: Counts, indices: Counts, nodes: int) -> Counts:  # pragma: no cover -- compiled
    found = np.zeros(nodes, dtype=np.int64)
    level = np.zeros(nodes, dtype=np.int64)  # how many of the chosen nodes each node follows, along the chain
    widest = 0
    for v in range(nodes):
        widest = max(widest, indptr[v + 1] - indptr[v])
    second, third, fourth = np.empty(widest, np.int64), np.empty(widest, np.int64), np.empty(widest, np.int64)
    for a in range(nodes):
        for i in range(indptr[a], indptr[a + 1]):
            level[indices[i]] = 1
        for i in range(indptr[a], indptr[a + 1]):
            b, m2 = indices[i], 0
            for j in range(indptr[b], indptr[b + 1]):
                if level[indices[j]] == 1:
                    second[m2] = indices[j]
                    level[indices[j]] = 2
                    m2 += 1
            for x in range(m2):
                c, m3 = second[x], 0
                for j in range(indptr[c], indptr[c + 1]):
                    if level[indices[j]] == 2:
                        third[m3] = indices[j]
                        level[indices[j]] = 3
                        m3 += 1
                for y in range(m3):
                    d, m4 = third[y], 0
                    for j in range(indptr[d], indptr[d + 1]):
                        if level[indices[j]] == 3:
                            fourth[m4] = indices[j]
                            m4 += 1
                    for z in range(m4):
                        found[fourth[z]] += 1
                    found[a] += m4
                    found[b] += m4
                    found[c] += m4
                    found[d] += m4
                for y in range(m3):
                    level[third[y]] = 2
            for x in range(m2):
                level[second[x]] = 1
        for i in range(indptr[a], indptr[a + 1]):
            level[indices[i]] = 0
    return found
