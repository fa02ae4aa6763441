r"""FedGGR's server module W_S: from all nodes' embeddings E a graph, and from graph and E the global embeddings of all
nodes.

    spec 2.3   here
    E          embeddings (N, p), clients one after another in sorted order
    w1, w2     ``generator.0``, ``generator.1``   MLP-D, ones at the start
    A*         `isthmus.nn.learned_graph.Adjacency`
    f_phi      ``gnn.0.*``, ``gnn.1.*``           :math:`Z_{glob} = A^* (\mathrm{drop}(\mathrm{relu}(A^* (E W_1 + b_1)))
                                                  W_2 + b_2)`
    -          ``denoiser.0.*``, ``denoiser.1.*`` a second GCN over the same A*, SLAPS' self-supervision; only where it
               is asked for

The channel says what the graph is: ``learned`` (the method), ``knn`` (that of E itself, its generator never trained),
``embeddings`` (no
edges: an MLP of E), ``zeros`` (no information: Z_glob = 0). The last three are controls.

Self-supervision (SLAPS' denoising auto-encoder, not part of FedGGR): labels reach few edges of a learned graph. Hide a
share of the
entries of E, let the denoiser guess them from the neighbours, and add the error to the loss: a good graph joins nodes
that tell about each other.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from isthmus.errors import ConfigError
from isthmus.graph.ann import approximate
from isthmus.graph.knn import exact
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.layers import glorot_
from isthmus.nn.learned_graph import Adjacency, Pattern, generate
from isthmus.seeds import Stream
from isthmus.tensors import Weights

Channel = Literal["learned", "knn", "embeddings", "zeros"]
GENERATOR = ("generator.0", "generator.1")
SEARCHES: dict[str, Callable[[Tensor, int], Tensor]] = {"exact": exact, "approximate": approximate}


@dataclass(frozen=True)
class GlobalModule:
    """The shape of W_S; weights are handed in.

    Args:
        channel: What the graph is made of.
        k: Neighbours each node chooses.
        search: How they are found.
        dropout: Share of hidden values dropped in training.
        input_dropout: Share of E dropped before the GNN in training; the graph is made of all of it.
        hidden_share: Share of the entries of E the denoiser has to guess; 0 = there is none.
    """

    channel: Channel
    k: int
    search: Literal["exact", "approximate"]
    dropout: float
    input_dropout: float = 0.0
    hidden_share: float = 0.0

    def first_weights(self, width: int, hidden: int, out: int, stream: Stream, dtype: torch.dtype) -> dict[str, Tensor]:
        """p, hidden and F_g -> weights; MLP-D starts as the identity on non-negative embeddings."""
        if min(width, hidden, out) < 1:
            raise ConfigError(
                f"widths must be at least 1, got embedding_width {width}, server_hidden {hidden}, global_width {out}"
            )
        generator = stream.torch()
        weights = {name: torch.ones(width) for name in GENERATOR}
        for name, last in (("gnn", out), *([("denoiser", width)] if self.hidden_share else [])):
            for i, (a, b) in enumerate(((width, hidden), (hidden, last))):
                weights[f"{name}.{i}.weight"] = torch.empty(a, b)
                glorot_(weights[f"{name}.{i}.weight"], generator)
                weights[f"{name}.{i}.bias"] = torch.zeros(b)
        return {name: tensor.to(dtype) for name, tensor in weights.items()}

    @property
    def has_graph(self) -> bool:
        return self.channel in ("learned", "knn")

    def trained(self, weights: Weights) -> list[str]:
        """Names of what the server trains."""
        if self.channel == "zeros":
            return []
        return [name for name in weights if self.channel == "learned" or name not in GENERATOR]

    def neighbours(self, weights: Weights, embeddings: Tensor) -> Tensor:
        """Each node's k nearest others by the generator's cosine, itself first (N, k + 1); without a graph (N, 0)."""
        if not self.has_graph:
            return torch.empty(embeddings.shape[0], 0, dtype=torch.int64)
        with torch.no_grad():
            rows = generate(embeddings, *(weights[name] for name in GENERATOR))
        return SEARCHES[self.search](rows, self.k)

    def adjacency(self, weights: Weights, embeddings: Tensor, neighbours: Tensor) -> Adjacency | None:
        """A*, differentiable with respect to the generator; None for a channel without edges."""
        if not self.has_graph:
            return None
        return Adjacency.of(pattern_of(neighbours), generate(embeddings, *(weights[name] for name in GENERATOR)))

    def rows(
        self, weights: Weights, embeddings: Tensor, graph: Adjacency | None, dropout: DropoutSource | None = None
    ) -> Tensor:
        """Z_glob (N, F_g), over the graph of `adjacency`."""
        if self.channel == "zeros":
            return torch.zeros(embeddings.shape[0], weights["gnn.1.weight"].shape[1], dtype=embeddings.dtype)
        return self._gcn("gnn", weights, _dropped(embeddings, dropout, self.input_dropout), graph, dropout)

    def guess_error(
        self, weights: Weights, embeddings: Tensor, graph: Adjacency | None, dropout: DropoutSource
    ) -> Tensor:
        """Squared error of the denoiser on hidden entries, in units of the variance of E: 1 is what the mean of E would
        reach.
        """
        count, width = embeddings.shape
        seen = dropout.mask((count,), count, width, self.hidden_share, embeddings.dtype) > 0
        guess = self._gcn("denoiser", weights, embeddings * seen, graph, dropout)
        error = torch.where(seen, 0.0, (guess - embeddings) ** 2).sum() / (~seen).sum().clamp(min=1)
        return error / embeddings.var(correction=0).clamp(min=torch.finfo(embeddings.dtype).tiny)

    def _gcn(
        self, name: str, weights: Weights, h: Tensor, graph: Adjacency | None, dropout: DropoutSource | None
    ) -> Tensor:
        for i in (0, 1):
            h = h @ weights[f"{name}.{i}.weight"] + weights[f"{name}.{i}.bias"]
            h = h if graph is None else graph @ h
            h = _dropped(torch.relu(h), dropout, self.dropout) if i == 0 else h
        return h


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
