r"""NeighGen, the generator of missing neighbours of FedSage+: its networks, its losses, and the graphs it reads.

    paper        here
    H^e          `encode`              two layers relu(D^-1 (A + I) X W + b)
    dGen, d^_v   `missing_counts`      relu(linear(z_v)): how many neighbours a node misses
    fGen, X^_v   `generated_rows`      linear maps of z_v + noise, tanh at the end: candidates 1 .. P of a node
    \bar V_i     `Impaired`            the client's graph without some nodes, which serve as missing neighbours
    L^d, L^f     `generator_loss`, `residuals`

.. math::
    L^d = \frac{1}{|T|} \sum_{v \in T} \mathrm{smoothL1}(\hat d_v - d_v), \qquad L^f = \frac{1}{|T|} \sum_{v \in T}
    \sum_{p \le \hat d_v} \min_{u \in N_v} \tfrac{1}{F} \|\hat x_{vp} - x_u\|^2

over training nodes T that were left in the graph; N_v are the hidden neighbours of v, at most P of them.

What is not used is not computed: only nodes with a generated neighbour pass fGen, and of its last layer only the
columns of the candidates they use; features stay sparse; nearest hidden neighbours are found for all rows at once; what
does not change while fGen alone learns is computed once (`Fixed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.graph.normalise import row_norm
from isthmus.nn.sparse import Sparse, as_csr, canonical, stored
from isthmus.seeds import Stream

Named = Mapping[str, Tensor]
Draw = Callable[[int], tuple[Tensor, Tensor | None]]
"""Number of nodes -> noise of their codes, and what dropout multiplies by."""
ROWS = "rows."
"""Prefix of fGen's weights: all that is trained across clients."""


class Slots(NamedTuple):
    """Which generated rows are used: row i is candidate ``place[i]`` of node ``node[i]``. By candidate, then node."""

    node: Tensor
    place: Tensor


@dataclass(frozen=True)
class Sizes:
    """Widths of NeighGen, and what its rows are like.

    Args:
        features, classes: Of the data.
        hidden, code: Of the encoder's two layers; the classifier's first is as wide as the encoder's.
        widths: Of fGen's layers.
        rank: Width of a linear map before fGen's last layer, 0 for none.
        most: P, candidates of a node.
        output: Of fGen: ``tanh``, or ``linear`` for features beyond [-1, 1].
    """

    features: int
    classes: int
    hidden: int
    code: int
    widths: tuple[int, ...]
    rank: int
    most: int
    output: Literal["tanh", "linear"] = "tanh"

    @property
    def row_layers(self) -> tuple[int, ...]:
        """Widths from a code to all candidates."""
        low = (self.rank,) if self.rank else ()
        return (self.code, *self.widths, *low, self.most * self.features)


def first_weights(sizes: Sizes, stream: Stream, dtype: torch.dtype) -> dict[str, Tensor]:
    """First weights, as torch draws linear layers."""
    generator = stream.torch()
    layers = {
        "encoder": (sizes.features, sizes.hidden, sizes.code),
        "count": (sizes.code, 1),
        "rows": sizes.row_layers,
        "classifier": (sizes.features, sizes.hidden, sizes.classes),
    }
    weights: dict[str, Tensor] = {}
    for name, widths in layers.items():
        for layer, (a, b) in enumerate(pairwise(widths)):
            bound = a**-0.5
            weights[f"{name}.{layer}.weight"] = torch.empty(a, b).uniform_(-bound, bound, generator=generator)
            weights[f"{name}.{layer}.bias"] = torch.empty(b).uniform_(-bound, bound, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


class Graph:
    """Features and D^-1 (A + I) of a graph, as constants of the networks."""

    def __init__(self, x: sp.csr_matrix, edge_index: Tensor, dtype: torch.dtype) -> None:
        self.count, self.edge_index = x.shape[0], edge_index
        features = stored(x, dtype)
        self.x = features if isinstance(features, Tensor) else Sparse(features)
        self.steps = Sparse(canonical(row_norm(edge_index.flip(0), self.count), dtype))  # from source to target
        self.dtype = dtype


class Impaired(NamedTuple):
    """The client's graph without its hidden nodes.

    graph: Of the nodes that are left. kept: Their rows in the whole graph. train, y: Of them. hidden_of: For the i-th
    training node in ``train`` up to P hidden neighbours as rows of the whole graph, padded with -1 (T, P). missing:
    d_v, how many it has in truth (T,). near: Nodes whose generated neighbours the losses depend on, training nodes and
    their neighbours: what is attached to others is more than two layers away (n,).
    """

    graph: Graph
    kept: Tensor
    train: Tensor
    y: Tensor
    hidden_of: Tensor
    missing: Tensor
    near: Tensor


def impair(data: NodeData, hidden: Tensor, most: int, dtype: torch.dtype) -> Impaired:
    """Take ``hidden`` nodes (n,) out of a graph and remember whose neighbours they were."""
    kept = torch.nonzero(~hidden).flatten()
    place = torch.full((data.num_nodes,), -1, dtype=torch.int64)
    place[kept] = torch.arange(len(kept))
    source, target = data.edge_index
    inside = ~hidden[source] & ~hidden[target]
    graph = Graph(as_csr(data.x)[kept.numpy()], place[data.edge_index[:, inside]], dtype)
    train = torch.nonzero(data.train[kept] & (data.y[kept] >= 0)).flatten()
    lost = hidden[source] & ~hidden[target]
    hidden_of, missing = _lists(place[target[lost]], source[lost], len(kept), most)
    near = torch.zeros(len(kept), dtype=torch.bool)
    near[train] = True
    source, target = graph.edge_index
    near[source[near[target]]] = True
    return Impaired(graph, kept, train, data.y[kept], hidden_of[train], missing[train], near)


def _lists(owner: Tensor, item: Tensor, owners: int, most: int) -> tuple[Tensor, Tensor]:
    """Up to ``most`` items of every owner, padded with -1 (owners, most), and how many each has (owners,)."""
    order = torch.argsort(owner, stable=True)
    owner, item = owner[order], item[order]
    number = torch.bincount(owner, minlength=owners)
    rank = torch.arange(len(owner)) - (number.cumsum(0) - number)[owner]
    lists = torch.full((owners, most), -1, dtype=torch.int64)
    first = rank < most
    lists[owner[first], rank[first]] = item[first]
    return lists, number


def encode(weights: Named, graph: Graph) -> Tensor:
    """z, the codes of all nodes (n, code): relu(D^-1 (A + I) X W + b), twice."""
    h = torch.relu(graph.steps @ (graph.x @ weights["encoder.0.weight"]) + weights["encoder.0.bias"])
    return torch.relu(graph.steps @ (h @ weights["encoder.1.weight"]) + weights["encoder.1.bias"])


def missing_counts(weights: Named, codes: Tensor) -> Tensor:
    """d^ = relu(linear(z)). (n,)"""
    return torch.relu(codes @ weights["count.0.weight"] + weights["count.0.bias"]).squeeze(1)


def used_slots(counts: Tensor, most: int, among: Tensor | None = None) -> Slots:
    """The first round(d^_v) candidates of every node, or of every node ``among`` all; P at most."""
    number = counts.detach().round().clamp(max=most)
    if among is not None:
        number = number * among
    place, node = torch.nonzero(torch.arange(most)[:, None] < number, as_tuple=True)
    return Slots(node, place)


def generated_rows(weights: Named, sizes: Sizes, noisy: Tensor, slots: Slots, drop: Tensor | None = None) -> Tensor:
    """X^ of the slots (S, F).

    Args:
        noisy: Codes with noise added, of the nodes that have slots, in order.
        drop: What dropout multiplies their last wide layer by.
    """
    position = torch.unique(slots.node, return_inverse=True)[1]
    h, last = noisy, len(sizes.row_layers) - 2
    for layer in range(last):
        h = h @ weights[f"{ROWS}{layer}.weight"] + weights[f"{ROWS}{layer}.bias"]
        if layer < len(sizes.widths):
            h = torch.relu(h)
        if layer == len(sizes.widths) - 1 and drop is not None:
            h = h * drop
    by_place = torch.split(position, torch.bincount(slots.place, minlength=sizes.most).tolist())
    columns = torch.split(weights[f"{ROWS}{last}.weight"], sizes.features, dim=1)
    biases = torch.split(weights[f"{ROWS}{last}.bias"], sizes.features)
    x = torch.cat([torch.addmm(b, h[rows], w) for rows, w, b in zip(by_place, columns, biases, strict=True)])
    return torch.tanh(x) if sizes.output == "tanh" else x


def compared(slots: Slots, impaired: Impaired) -> tuple[Tensor, Tensor]:
    """Which slots L^f compares, those of training nodes with hidden neighbours, and the training node of each."""
    number = torch.full((impaired.graph.count,), -1, dtype=torch.int64)
    number[impaired.train[impaired.missing > 0]] = torch.nonzero(impaired.missing > 0).flatten()
    which = torch.nonzero(number[slots.node] >= 0).flatten()
    return which, number[slots.node[which]]


class Targets:
    """Nodes that generated rows are compared with.

    Args:
        nodes: Of every row up to P, as rows of ``x``; -1 where there is none (S, P).
    """

    def __init__(self, nodes: Tensor, x: sp.csr_matrix) -> None:
        self.count, self.most = nodes.shape
        wanted = nodes.numpy().ravel()
        self.there, self.x = wanted >= 0, x[np.maximum(wanted, 0)]
        self.owner = np.repeat(np.arange(len(wanted)), np.diff(self.x.indptr))
        self.length = np.bincount(self.owner, np.square(self.x.data, dtype=np.float64), minlength=len(wanted))

    def residuals(self, rows: Tensor) -> Tensor:
        """x^ - x_u for the nearest of each row's targets; a row without any has 0. (S, F) A function of sparse rows:
        |x^ - x_u|^2 = |x^|^2 - 2 <x^, x_u> + |x_u|^2.
        """
        values, count, most = rows.detach().numpy(), self.count, self.most
        if not count or not most:
            return torch.zeros_like(rows)
        products = self.x.data * values[self.owner // most, self.x.indices]
        together = np.bincount(self.owner, products, minlength=count * most)
        distance = np.where(self.there, self.length - 2.0 * together, np.inf).reshape(count, most)
        nearest = np.arange(count) * most + distance.argmin(1)
        found = values - self.x[nearest].toarray().astype(values.dtype, copy=False)
        found[~self.there[nearest]] = 0.0
        return torch.from_numpy(found)


def residuals(rows: Tensor, targets: Tensor, x: sp.csr_matrix) -> Tensor:
    """`Targets.residuals`, where the targets are needed once."""
    return Targets(targets, x).residuals(rows)


def square_loss(rows: Tensor, away: Tensor, over: int) -> Tensor:
    """b L^f of rows whose residuals are known: its value and gradient are those of sum |x^ - x_u|^2 / (F ``over``)."""
    nearest = rows.detach() - away
    return (rows - nearest).square().sum() / (rows.shape[1] * max(1, over))


class Fixed(NamedTuple):
    """What the losses read besides weights and rows.

    slots: Which rows there are. steps: D^-1 (A + I) with generated neighbours attached, arcs both ways. which, number:
    The slots L^f compares, and the training node of each. near: The hidden neighbours they are compared with.
    """

    slots: Slots
    steps: Sparse
    which: Tensor
    number: Tensor
    near: Targets


def fixed(impaired: Impaired, slots: Slots, x: sp.csr_matrix) -> Fixed:
    """``x``: features of the whole graph."""
    graph = impaired.graph
    arcs = attached(graph.edge_index, graph.count, slots)
    steps = Sparse(canonical(row_norm(arcs.flip(0), graph.count + len(slots.node)), graph.dtype))
    which, number = compared(slots, impaired)
    return Fixed(slots, steps, which, number, Targets(impaired.hidden_of[number], x))


def classify(weights: Named, graph: Graph, steps: Sparse, rows: Tensor, own: Tensor | None = None) -> Tensor:
    """Logits of a graph's own nodes with generated neighbours attached. (n, C)

    Args:
        own: `first_products`, where they are known.
    """
    first = weights["classifier.0.weight"]
    own = first_products(weights, graph) if own is None else own
    h = torch.relu(steps @ torch.cat([own, rows @ first]) + weights["classifier.0.bias"])
    logits = steps @ (h @ weights["classifier.1.weight"]) + weights["classifier.1.bias"]
    return logits[: graph.count]


def first_products(weights: Named, graph: Graph) -> Tensor:
    """What the classifier's first layer makes of the own nodes' features. (n, hidden)"""
    return graph.x @ weights["classifier.0.weight"]


def attached(edge_index: Tensor, count: int, slots: Slots, *, both: bool = True) -> Tensor:
    """Edges with those between nodes and their generated neighbours, which follow the ``count`` own nodes. ``both``:
    otherwise arcs run to the generated nodes only.
    """
    new = torch.arange(count, count + len(slots.node))
    outward = torch.stack([slots.node, new])
    return torch.cat([edge_index, outward, *([outward.flip(0)] if both else [])], dim=1)


def local_loss(weights: Named, sizes: Sizes, impaired: Impaired, x: sp.csr_matrix, draw: Draw) -> Tensor:
    """L^d + L^f + CE of one client's NeighGen on its impaired graph. ``x``: features of the whole graph."""
    codes = encode(weights, impaired.graph)
    counts = missing_counts(weights, codes)
    wrong = torch.nn.functional.smooth_l1_loss(
        counts[impaired.train], impaired.missing.to(counts.dtype), reduction="sum"
    )
    slots = used_slots(counts, sizes.most, impaired.near)
    nodes = torch.unique(slots.node)
    noise, drop = draw(len(nodes))
    rows = generated_rows(weights, sizes, codes[nodes] + noise, slots, drop)
    return wrong / max(1, len(impaired.train)) + row_loss(weights, impaired, fixed(impaired, slots, x), rows)


def row_loss(weights: Named, impaired: Impaired, known: Fixed, rows: Tensor, own: Tensor | None = None) -> Tensor:
    """L^f + CE: what fGen is trained by at home."""
    compared_rows, train = rows[known.which], impaired.train
    features = square_loss(compared_rows, known.near.residuals(compared_rows), len(train))
    logits = classify(weights, impaired.graph, known.steps, rows, own)[train]
    right = torch.nn.functional.cross_entropy(logits, impaired.y[train], reduction="sum")
    return features + right / max(1, len(train))


class Neighbours:
    """Neighbours of every node of a graph, to draw from."""

    def __init__(self, edge_index: Tensor, count: int) -> None:
        self.source = edge_index[0][torch.argsort(edge_index[1], stable=True)]
        self.degree = torch.bincount(edge_index[1], minlength=count)
        self.start = self.degree.cumsum(0) - self.degree
        self.linked = torch.nonzero(self.degree).flatten()

    def of_random_nodes(self, missing: Tensor, most: int, stream: Stream) -> Tensor:
        """For every asked node some neighbours of a random node of this graph, as many as it misses: P at most, -1
        where there are none. (V, P)
        """
        generator, linked = stream.torch(), self.linked
        if not len(linked):
            return torch.full((len(missing), most), -1, dtype=torch.int64)
        node = linked[torch.randint(len(linked), (len(missing),), generator=generator)]
        turn = torch.randint(1 << 30, (len(missing), 1), generator=generator)
        place, degree = torch.arange(most), self.degree[node]
        drawn = self.source[self.start[node][:, None] + (turn + place) % degree[:, None]]
        return torch.where(place < torch.minimum(missing, degree)[:, None], drawn, -1)
