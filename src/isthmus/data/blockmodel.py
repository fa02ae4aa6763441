"""Graphs whose edges depend on classes: the contextual block model, and the same with heavy-tailed degrees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.data.from_arrays import node_data, undirected
from isthmus.data.generators import GENERATORS
from isthmus.data.parameters import need
from isthmus.data.whole_graph import Loaded
from isthmus.seeds import Stream

ROWS, EDGES = 1 << 16, 1 << 22
"""Rows and edges that are worked on at a time, so that a large graph takes little more memory than it has."""


@GENERATORS.register("csbm")
@dataclass(frozen=True)
class ContextualBlockModel:
    r"""Contextual stochastic block model (Deshpande et al., 2018, https://arxiv.org/abs/1807.09596), with many classes.

    Classes are balanced. Every node starts ``degree / 2`` undirected edges on average; with probability ``homophily``
    the other end has the same class, else another. Features are :math:`x_v = \mathrm{signal} \cdot \mu_{y_v} + N(0, I)`
    with unit class means.

    Args:
        nodes: Number of nodes.
        classes: Number of classes.
        features: Feature width.
        homophily: Expected share of edges inside a class, in [0, 1]; below ``1 / classes`` the graph is heterophilic.
        degree: Mean degree.
        signal: Length of the class means: 0 leaves only the graph to learn from.
    """

    nodes: int = 600
    classes: int = 4
    features: int = 32
    homophily: float = 0.8
    degree: float = 6.0
    signal: float = 1.0

    def __post_init__(self) -> None:
        _check("csbm", self.nodes, self.classes, self.features, self.homophily, self.degree)

    def draw(self, stream: Stream) -> Loaded:
        y = stream.child("classes").numpy().permutation(np.arange(self.nodes) % self.classes)
        x = class_features(y, self.classes, self.features, self.signal, stream.child("features").numpy())
        weight = np.ones(self.nodes)
        edges = class_edges(
            y, self.classes, self.homophily, weight, round(self.nodes * self.degree / 2), stream.child("edges").numpy()
        )
        return Loaded(node_data(x, undirected(edges, self.nodes), y, self.classes), "generated")


@GENERATORS.register("powerlaw")
@dataclass(frozen=True)
class PowerLaw:
    r"""A graph with power-law degrees (Chung & Lu, 2002), classes and homophily; millions of edges take seconds.

    Node :math:`i` has weight :math:`(i + i_0)^{-1 / (\gamma - 1)}`; both ends of an edge are drawn in proportion to
    weight, the second one among nodes of the class that ``homophily`` chose. Features as in `ContextualBlockModel`.

    Args:
        nodes: Number of nodes.
        degree: Mean degree, before duplicate edges are dropped.
        exponent: :math:`\gamma > 2` of the degree distribution.
        classes, features, homophily, signal: As in `ContextualBlockModel`.
    """

    nodes: int = 100_000
    degree: float = 10.0
    exponent: float = 2.5
    classes: int = 4
    features: int = 16
    homophily: float = 0.6
    signal: float = 1.0

    def __post_init__(self) -> None:
        _check("powerlaw", self.nodes, self.classes, self.features, self.homophily, self.degree)
        need("powerlaw", "exponent", self.exponent > 2.0, "above 2")

    def draw(self, stream: Stream) -> Loaded:
        order = stream.child("classes").numpy().permutation(self.nodes)
        y = order % self.classes
        slope = 1.0 / (self.exponent - 1.0)
        offset = self.nodes ** (1.0 - slope)  # keeps the expected degree of the largest hub below sqrt(n) or so
        weight = (stream.child("weights").numpy().permutation(self.nodes) + offset) ** -slope
        edges = class_edges(
            y, self.classes, self.homophily, weight, round(self.nodes * self.degree / 2), stream.child("edges").numpy()
        )
        x = class_features(y, self.classes, self.features, self.signal, stream.child("features").numpy())
        return Loaded(node_data(x, undirected(edges, self.nodes), y, self.classes), "generated")


def class_features(
    y: NDArray[np.int64], classes: int, width: int, signal: float, rng: np.random.Generator
) -> NDArray[np.float32]:
    """``signal`` times the unit mean of the class, plus standard normal noise (n, width)."""
    means = rng.normal(size=(classes, width))
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    features = np.empty((len(y), width), dtype=np.float32)
    for begin in range(0, len(y), ROWS):  # drawn in pieces: the same numbers, without all of them in float64
        rows = y[begin : begin + ROWS]
        features[begin : begin + ROWS] = signal * means[rows] + rng.normal(size=(len(rows), width))
    return features


def class_edges(
    y: NDArray[np.int64],
    classes: int,
    homophily: float,
    weight: NDArray[np.float64],
    count: int,
    rng: np.random.Generator,
) -> NDArray[np.int32]:
    """``count`` edges (2, count): a source by weight, a class by homophily, a target of that class by weight."""
    members = np.argsort(y, kind="stable")  # members of a class lie together
    heap = np.cumsum(weight[members])
    size = np.bincount(y, minlength=classes)
    end = np.cumsum(size)
    upper = heap[end - 1]
    lower = np.concatenate([[0.0], upper[:-1]])
    edges = np.empty((2, count), dtype=np.int32)
    pieces = [slice(begin, begin + EDGES) for begin in range(0, count, EDGES)]
    draw = rng.random(count)
    for piece in pieces:
        position = np.searchsorted(heap, draw[piece] * heap[-1], side="right").clip(max=len(y) - 1)
        edges[0, piece] = members[position]
    elsewhere = rng.random(count) >= homophily
    step = rng.integers(1, classes, count)
    step *= elsewhere
    draw = rng.random(count)
    for piece in pieces:
        wanted = (y[edges[0, piece]] + step[piece]) % classes
        value = lower[wanted] + draw[piece] * (upper - lower)[wanted]
        position = np.searchsorted(heap, value, side="right").clip((end - size)[wanted], end[wanted] - 1)
        edges[1, piece] = members[position]
    return edges


def _check(kind: str, nodes: int, classes: int, features: int, homophily: float, degree: float) -> None:
    need(kind, "classes", classes >= 2, "at least 2")
    need(kind, "nodes", 2 * classes <= nodes < 2**31, "at least 2 per class, and below 2^31")
    need(kind, "features", features >= 1, "at least 1")
    need(kind, "homophily", 0.0 <= homophily <= 1.0, "in [0, 1]")
    need(kind, "degree", 0.0 <= degree < nodes / classes, "at least 0 and below nodes / classes")
