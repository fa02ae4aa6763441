"""Server modules to compare FedGGR's with; none of them is in the paper.

    channel       what Z_glob is made of                      what a difference to it shows
    learned       the learned graph (`GlobalModule`)          -
    knn           the fixed nearest-neighbour graph of E      what learning the graph adds
    embeddings    E alone, through an MLP                     what a graph adds
    zeros         nothing: Z_glob = 0                         what the channel adds at all

``self_supervision`` adds a loss of the server's own to the learned graph (`SelfSupervised`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isthmus.methods.fedggr.global_graph import GlobalModule
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.learned_graph import Adjacency
from isthmus.tensors import Weights


class FixedGraph(GlobalModule):
    """The graph of E itself: its generator is never trained, its neighbours are searched once."""

    learns_graph: ClassVar[bool] = False


class NoGraph(FixedGraph):
    """No edges: an MLP of E."""

    has_graph: ClassVar[bool] = False

    def neighbours(self, weights: Weights, embeddings: Tensor) -> Tensor:
        return torch.empty(embeddings.shape[0], 0, dtype=torch.int64)

    def adjacency(self, weights: Weights, embeddings: Tensor, neighbours: Tensor) -> None:
        return None


class NoInformation(NoGraph):
    """Z_glob = 0: the classifier is as wide as FedGGR's and learns nothing from others."""

    def trained(self, weights: Weights) -> list[str]:
        return []

    def rows(
        self, weights: Weights, embeddings: Tensor, graph: Adjacency | None, dropout: DropoutSource | None = None
    ) -> Tensor:
        return torch.zeros(embeddings.shape[0], weights["gnn.1.weight"].shape[1], dtype=embeddings.dtype)


MODULES: dict[str, type[GlobalModule]] = {
    "learned": GlobalModule,
    "knn": FixedGraph,
    "embeddings": NoGraph,
    "zeros": NoInformation,
}


@dataclass(frozen=True)
class SelfSupervised(GlobalModule):
    """With SLAPS' denoising auto-encoder: labels reach few edges of a learned graph, so hide a share of the entries of
    E, let a second GCN over the same A* (``denoiser.0.*``, ``denoiser.1.*``) guess them from the neighbours, and add
    the error to the loss. A good graph joins nodes that tell about each other.

    Args:
        strength: Weight of the error.
        hidden_share: Share of the entries of E that are hidden.
    """

    strength: float = 1.0
    hidden_share: float = 0.2

    def networks(self, width: int, out: int) -> dict[str, int]:
        return {**super().networks(width, out), "denoiser": width}

    def further_losses(
        self, weights: Weights, embeddings: Tensor, graph: Adjacency | None, dropout: DropoutSource
    ) -> list[tuple[Tensor, Tensor]]:
        error = self.guess_error(weights, embeddings, graph, dropout)
        return [(error, torch.full_like(error, self.strength))]

    def guess_error(
        self, weights: Weights, embeddings: Tensor, graph: Adjacency | None, dropout: DropoutSource
    ) -> Tensor:
        """Squared error of the denoiser on hidden entries, in units of the variance of E: 1 is what the mean of E would
        reach.
        """
        count, width = embeddings.shape
        seen = dropout.mask((count,), count, width, self.hidden_share, embeddings.dtype) > 0
        guess = self.gcn("denoiser", weights, embeddings * seen, graph, dropout)
        error = torch.where(seen, 0.0, (guess - embeddings) ** 2).sum() / (~seen).sum().clamp(min=1)
        return error / embeddings.var(correction=0).clamp(min=torch.finfo(embeddings.dtype).tiny)
