r"""FedGGR's server module W_S: from all nodes' embeddings E a graph, and from graph and E the global embeddings of all
nodes.

    paper      here
    E          embeddings (N, p), clients one after another in sorted order
    w1, w2     ``generator.0``, ``generator.1``   MLP-D, ones at the start
    A*         `isthmus.nn.learned_graph.Adjacency`
    f_phi      ``gnn.0.*``, ``gnn.1.*``           two-layer GCN over A*
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from isthmus.graph.ann import approximate
from isthmus.graph.knn import exact
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.layers import glorot_
from isthmus.nn.learned_graph import Adjacency, Pattern, generate
from isthmus.seeds import Stream
from isthmus.tensors import Weights

GENERATOR = ("generator.0", "generator.1")
SEARCHES: dict[str, Callable[[Tensor, int], Tensor]] = {"exact": exact, "approximate": approximate}


@dataclass(frozen=True)
class GlobalModule:
    """The shape of W_S; weights are handed in.

    Args:
        k: Neighbours each node chooses.
        search: How they are found.
        dropout: Share of hidden values dropped in training.
        input_dropout: Share of E dropped before the GNN in training; the graph is made of all of it.
    """

    k: int
    search: Literal["exact", "approximate"] = "exact"
    dropout: float = 0.0
    input_dropout: float = 0.0
    has_graph: ClassVar[bool] = True
    learns_graph: ClassVar[bool] = True

    def networks(self, width: int, out: int) -> dict[str, int]:
        """Names of the GCNs over A* and what each puts out."""
        return {"gnn": out}

    def first_weights(self, width: int, hidden: int, out: int, stream: Stream, dtype: torch.dtype) -> dict[str, Tensor]:
        """p, hidden and F_g -> weights; MLP-D starts as the identity on non-negative embeddings."""
        generator = stream.torch()
        weights = {name: torch.ones(width) for name in GENERATOR}
        for name, last in self.networks(width, out).items():
            for i, (a, b) in enumerate(((width, hidden), (hidden, last))):
                weights[f"{name}.{i}.weight"] = torch.empty(a, b)
                glorot_(weights[f"{name}.{i}.weight"], generator)
                weights[f"{name}.{i}.bias"] = torch.zeros(b)
        return {name: tensor.to(dtype) for name, tensor in weights.items()}

    def trained(self, weights: Weights) -> list[str]:
        """Names of what the server trains."""
        return [name for name in weights if self.learns_graph or name not in GENERATOR]

    def neighbours(self, weights: Weights, embeddings: Tensor) -> Tensor:
        """Each node's k nearest others by the generator's cosine, itself first (N, k + 1)."""
        with torch.no_grad():
            h = generate(embeddings, *(weights[name] for name in GENERATOR))  # H = relu(E * w1) * w2, rows of length 1
        return SEARCHES[self.search](h, self.k)  # top k + 1 of each row of H H^T

    def adjacency(self, weights: Weights, embeddings: Tensor, neighbours: Tensor) -> Adjacency | None:
        """A*, differentiable with respect to the generator; None where there is no graph."""
        h = generate(embeddings, *(weights[name] for name in GENERATOR))
        return Adjacency.of(pattern_of(neighbours), h)  # A* = 1/2 D^-1/2 (P(A~) + P(A~)^T) D^-1/2

    def rows(
        self, weights: Weights, embeddings: Tensor, graph: Adjacency | None, dropout: DropoutSource | None = None
    ) -> Tensor:
        """Z_glob (N, F_g), over the graph of `adjacency`."""
        return self.gcn("gnn", weights, _dropped(embeddings, dropout, self.input_dropout), graph, dropout)

    def gcn(
        self, name: str, weights: Weights, h: Tensor, graph: Adjacency | None, dropout: DropoutSource | None
    ) -> Tensor:
        """A* (drop(relu(A* (h W_1 + b_1))) W_2 + b_2); without a graph an MLP."""
        for i in (0, 1):
            h = torch.addmm(weights[f"{name}.{i}.bias"], h, weights[f"{name}.{i}.weight"])
            h = h if graph is None else graph @ h
            h = _dropped(torch.relu(h), dropout, self.dropout) if i == 0 else h
        return h

    def further_losses(
        self, weights: Weights, embeddings: Tensor, graph: Adjacency | None, dropout: DropoutSource
    ) -> list[tuple[Tensor, Tensor]]:
        """Losses of the server's own, each with its weight; none in the paper."""
        return []


def _dropped(h: Tensor, dropout: DropoutSource | None, rate: float) -> Tensor:
    if dropout is None or not rate:
        return h
    return h * dropout.mask((h.shape[0],), h.shape[0], h.shape[1], rate, h.dtype)


_PATTERNS: MutableMapping[Tensor, Pattern] = WeakTensorKeyDictionary()


def pattern_of(neighbours: Tensor) -> Pattern:
    """The pattern of these neighbours, worked out once for as long as the tensor lives: they stay the same over many
    rounds.
    """
    if neighbours not in _PATTERNS:
        _PATTERNS[neighbours] = Pattern.of(neighbours)
    return _PATTERNS[neighbours]
