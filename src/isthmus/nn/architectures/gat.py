r"""GAT -- Veličković et al., ICLR 2018, https://arxiv.org/abs/1710.10903.

.. math::
    e_{vu} = \mathrm{LeakyReLU}_{0.2}(a_{src}^\top W h_u + a_{dst}^\top W h_v), \qquad
    \alpha_{vu} = \mathrm{softmax}_{u \in N(v) \cup \{v\}}(e_{vu}), \qquad h_v' = \textstyle\sum_u \alpha_{vu} W h_u + b

N(v) are the sources of arcs into v; every node has exactly one self-loop; a repeated arc counts as often as it occurs.
Heads are put side by side, in the layer that puts out the classes they are averaged. Glorot weights, zero bias: PyG's
``GATConv``.
Shapes: x (n, F), edges (2, E) -> logits (n, C); W (in, heads * out), a (heads, out).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from isthmus.errors import ConfigError
from isthmus.graph.normalise import adjacency
from isthmus.nn.architecture import Architecture
from isthmus.nn.dense import add_bias
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.kernels import Array, Csr, compiled
from isthmus.nn.layers import Conv, Hop, glorot
from isthmus.seeds import Stream
from isthmus.tensors import Weights

SLOPE = 0.2


def in_adjacency(edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None = None) -> sp.csr_matrix:
    """Entry (v, u) counts the arcs u -> v, with one loop at every node."""
    if edge_weight is not None:
        raise ConfigError("gat reads edges without weights: set edge_weights=ignore")
    arcs = edge_index[:, edge_index[0] != edge_index[1]]
    return sp.csr_matrix(adjacency(arcs.flip(0), num_nodes) + sp.eye(num_nodes, format="csr", dtype=np.float32))


class GATConv(Conv):
    """Attention over in-neighbours.

    Args:
        out_channels: Of one head.
        heads: Number of them.
        average: Heads are averaged, not put side by side.
        attention_dropout: Share of attention weights dropped in training.
    """

    weight_terms: ClassVar[Mapping[str, bool]] = {"weight": False}
    attends: ClassVar[bool] = True
    propagation = staticmethod(in_adjacency)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        generator: torch.Generator,
        *,
        heads: int,
        average: bool,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.heads, self.average, self.attention_dropout = heads, average, attention_dropout
        self.weight = glorot((in_channels, heads * out_channels), generator)
        self.source = glorot((heads, out_channels), generator)
        self.target = glorot((heads, out_channels), generator)
        self.bias = nn.Parameter(torch.zeros(out_channels if average else heads * out_channels))

    def finish(
        self, weights: Weights, products: Mapping[str, Tensor], hop: Hop, dropout: DropoutSource | None = None
    ) -> Tensor:
        z = products["weight"]  # (R, heads * out), of all nodes that are read
        scores = self._scores(z, weights["source"])  # (R, heads)
        own = self._scores(hop.itself(z), weights["target"])  # (R', heads), of the nodes that read
        mask = hop.arc_mask(self.heads, self.attention_dropout, dropout, z.dtype)
        h: Tensor = _Attention.apply(z, scores, own, hop.propagator.forward, mask)  # type: ignore[no-untyped-call]
        if self.average:
            h = h.view(h.shape[0], self.heads, -1).mean(1)
        return add_bias(h, weights["bias"])

    def _scores(self, z: Tensor, attention: Tensor) -> Tensor:
        """a^T z of every row and head; ``attention`` (heads, out), or (K, heads, out)."""
        clients = attention.shape[0] if attention.dim() == 3 else 1
        rows = z.view(clients, -1, self.heads, z.shape[-1] // self.heads)
        return (rows * attention.view(clients, 1, *rows.shape[2:])).sum(-1).view(-1, self.heads)


@dataclass(frozen=True)
class GAT(Architecture):
    """Attention over neighbourhoods.

    Args:
        heads: Heads of every layer; hidden widths are those of all heads together.
        attention_dropout: Share of attention weights dropped in training, in [0, 1).
    """

    own_dropout: ClassVar[bool] = True
    heads: int = 1
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ConfigError(f"heads must be at least 1, got {self.heads}")
        if not 0.0 <= self.attention_dropout < 1.0:
            raise ConfigError(f"attention_dropout must lie in [0, 1), got {self.attention_dropout}")

    def conv(self, in_channels: int, out_channels: int, generator: torch.Generator, *, classes: bool = False) -> Conv:
        if not classes and out_channels % self.heads:
            raise ConfigError(f"heads must divide the hidden widths, got {self.heads} heads and width {out_channels}")
        return GATConv(
            in_channels,
            out_channels if classes else out_channels // self.heads,
            generator,
            heads=self.heads,
            average=classes and self.heads > 1,
            attention_dropout=self.attention_dropout,
        )

    def layer_stream(self, stream: Stream) -> Stream:
        return stream if self.heads == 1 else stream.child("heads")


class _Attention(torch.autograd.Function):
    """Softmax over the arcs into each row and the weighted sum, every arc visited once forward and once backward."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        z: Tensor,
        scores: Tensor,
        own: Tensor,
        matrix: Csr,
        mask: Tensor | None,
    ) -> Tensor:
        z, scores, own = (tensor.detach().contiguous() for tensor in (z, scores, own))
        alpha = torch.empty(len(matrix.indices), scores.shape[1], dtype=z.dtype)
        out = torch.zeros(own.shape[0], z.shape[1], dtype=z.dtype)
        kept = alpha if mask is None else mask
        arrays = (tensor.numpy() for tensor in (z, scores, own, alpha, kept, out))
        _attend(mask is not None, matrix.indptr, matrix.indices, matrix.data, *arrays)
        ctx.matrix, ctx.masked = matrix, mask is not None  # type: ignore[attr-defined]
        ctx.save_for_backward(z, scores, own, alpha, kept)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        z, scores, own, alpha, kept = (tensor.detach() for tensor in ctx.saved_tensors)  # type: ignore[attr-defined]
        matrix: Csr = ctx.matrix  # type: ignore[attr-defined]
        found = torch.zeros_like(z), torch.zeros_like(scores), torch.zeros_like(own)
        arrays = (tensor.numpy() for tensor in (z, scores, own, alpha, kept, grads[0].contiguous(), *found))
        _attend_grad(ctx.masked, matrix.indptr, matrix.indices, *arrays)  # type: ignore[attr-defined]
        return *found, None, None


@compiled
def _attend(
    masked: bool,
    indptr: Array,
    indices: Array,
    count: Array,
    z: Array,
    scores: Array,
    own: Array,
    alpha: Array,
    mask: Array,
    out: Array,
) -> None:
    heads = scores.shape[1]
    width = z.shape[1] // heads
    for row in range(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        for head in range(heads):
            top = -math.inf
            for j in range(begin, end):
                e = scores[indices[j], head] + own[row, head]
                e = e if e > 0 else SLOPE * e
                alpha[j, head] = e
                top = max(top, alpha[j, head])  # as rounded: the largest must give exp(0)
            total = 0.0
            for j in range(begin, end):
                alpha[j, head] = count[j] * math.exp(alpha[j, head] - top)
                total += alpha[j, head]
            target = out[row, head * width : (head + 1) * width]
            for j in range(begin, end):
                alpha[j, head] /= total
                a = alpha[j, head] * mask[j, head] if masked else alpha[j, head]
                source = z[indices[j], head * width : (head + 1) * width]
                for h in range(width):
                    target[h] += a * source[h]


@compiled
def _attend_grad(
    masked: bool,
    indptr: Array,
    indices: Array,
    z: Array,
    scores: Array,
    own: Array,
    alpha: Array,
    mask: Array,
    grad: Array,
    z_grad: Array,
    scores_grad: Array,
    own_grad: Array,
) -> None:
    # One thread: rows add to the gradients of their sources.
    heads = scores.shape[1]
    width = z.shape[1] // heads
    longest = 0
    for row in range(len(indptr) - 1):
        longest = max(longest, indptr[row + 1] - indptr[row])
    alpha_grad = np.zeros(longest, dtype=z.dtype)
    for row in range(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        for head in range(heads):
            g = grad[row, head * width : (head + 1) * width]
            mean = 0.0
            for j in range(begin, end):
                alpha_grad[j - begin] = _dot(width, g, z[indices[j], head * width : (head + 1) * width])
                if masked:
                    alpha_grad[j - begin] *= mask[j, head]
                mean += alpha[j, head] * alpha_grad[j - begin]
            for j in range(begin, end):
                a = alpha[j, head] * mask[j, head] if masked else alpha[j, head]
                target = z_grad[indices[j], head * width : (head + 1) * width]
                for h in range(width):
                    target[h] += a * g[h]
                e_grad = alpha[j, head] * (alpha_grad[j - begin] - mean)
                if scores[indices[j], head] + own[row, head] <= 0:
                    e_grad *= SLOPE
                scores_grad[indices[j], head] += e_grad
                own_grad[row, head] += e_grad


# Here the sum may be reordered: a chain of dependent additions would take longer than all the rest.
@partial(compiled, fastmath={"contract", "reassoc"})
def _dot(width: int, a: Array, b: Array) -> Any:
    total = a[0] * 0
    for h in range(width):
        total += a[h] * b[h]
    return total
