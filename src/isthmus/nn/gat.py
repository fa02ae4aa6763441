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
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Unpack

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from isthmus.errors import ConfigError
from isthmus.graph.normalise import adjacency
from isthmus.nn.backbone import Backbone, Common
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import Inputs
from isthmus.nn.kernels import Array, compiled
from isthmus.nn.layers import Layer, add_bias, first_rows, glorot_, matmul

SLOPE = 0.2


class Arcs(Protocol):
    """A matrix in CSR form, scipy's or bare arrays."""

    @property
    def indptr(self) -> Array: ...
    @property
    def indices(self) -> Array: ...
    @property
    def data(self) -> Array: ...


def in_adjacency(edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
    """Who listens to whom: entry (v, u) counts the arcs u -> v, with one loop at every node."""
    arcs = edge_index[:, edge_index[0] != edge_index[1]]
    return sp.csr_matrix(adjacency(arcs.flip(0), num_nodes) + sp.eye(num_nodes, format="csr", dtype=np.float32))


def check_heads(heads: int, hidden: Sequence[int], attention_dropout: float) -> None:
    """Refuse what no attention layer can have."""
    if heads < 1 or any(width % heads for width in hidden):
        raise ConfigError(f"heads must be at least 1 and divide the hidden widths {tuple(hidden)}, got {heads}")
    if not 0.0 <= attention_dropout < 1.0:
        raise ConfigError(f"attention_dropout must lie in [0, 1), got {attention_dropout}")


class GATLayer(Layer):
    """Attention over in-neighbours.

    Args:
        out_channels: Of one head.
        average: Heads are averaged, not put side by side.
    """

    terms: ClassVar[dict[str, bool]] = {"weight": False}

    def __init__(
        self, in_channels: int, out_channels: int, generator: torch.Generator, *, heads: int = 1, average: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.average = heads, average
        self.weight = nn.Parameter(torch.empty(in_channels, heads * out_channels))
        self.source = nn.Parameter(torch.empty(heads, out_channels))
        self.target = nn.Parameter(torch.empty(heads, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels if average else heads * out_channels))
        with torch.no_grad():
            for tensor in (self.weight, self.source, self.target):
                glorot_(tensor, generator)

    def attend(self, z: Tensor, listeners: Tensor, matrix: Arcs, mask: Tensor | None) -> Tensor:
        """The layer from ``z = h W`` on. (R, heads * out) -> (R', ...)

        Args:
            z: Of all nodes that are listened to.
            listeners: Of the nodes that listen (R', heads * out), one for every row of the matrix.
            matrix: Who listens to whom (R', R), see `in_adjacency`.
            mask: Dropout of the arcs (E, heads), None for none.
        """
        scores = self._scores(z, self.source)  # (R, heads)
        own = self._scores(listeners, self.target)  # (R', heads)
        h: Tensor = _Attention.apply(z, scores, own, matrix, mask)  # type: ignore[no-untyped-call]
        if self.average:
            h = h.view(h.shape[0], self.heads, -1).mean(1)
        return add_bias(h, self.bias)

    def _scores(self, z: Tensor, attention: Tensor) -> Tensor:
        """a^T z of every row and head; ``attention`` (heads, out), or (K, heads, out)."""
        clients = attention.shape[0] if attention.dim() == 3 else 1
        rows = z.view(clients, -1, self.heads, z.shape[-1] // self.heads)
        return (rows * attention.view(clients, 1, *rows.shape[2:])).sum(-1).view(-1, self.heads)


class GAT(Backbone):
    """Attention layers with ReLU and dropout between.

    Args:
        heads: Heads of every layer; hidden widths are those of all heads together.
        attention_dropout: Share of attention weights dropped in training, in [0, 1).
    """

    layer_type: ClassVar[type[Layer]] = GATLayer

    def __init__(self, *, heads: int = 1, attention_dropout: float = 0.0, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        hidden = common["hidden"]
        check_heads(heads, hidden, attention_dropout)
        self.attention_dropout = attention_dropout
        if heads > 1:
            generator = common["stream"].child("heads").torch()
            widths = [common["num_features"], *hidden]
            layers = [GATLayer(a, b // heads, generator, heads=heads) for a, b in pairwise(widths)]
            if not common["head"]:
                layers.append(GATLayer(widths[-1], common["num_classes"], generator, heads=heads, average=True))
            self.layers = nn.ModuleList(layers)

    @classmethod
    def make_layer(cls, in_channels: int, out_channels: int, generator: torch.Generator) -> Layer:
        return GATLayer(in_channels, out_channels, generator)

    @property
    def hops(self) -> int:
        """One level more than propagations: none of them is multiplied into the features."""
        return len(self.layers) + 1

    @property
    def later(self) -> tuple[tuple[str, Layer], ...]:
        """With the first layer, which is not over with its first product."""
        first: Layer = self.layers[0]  # type: ignore[assignment]
        return (("layers.0.", first), *super().later)

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        return in_adjacency(edge_index, num_nodes)

    def forward(
        self, inputs: Inputs, dropout: DropoutSource | None = None, products: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        products = self.products(inputs) if products is None else products
        h = products["layers.0.weight"]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, GATLayer)
            z = matmul(self._activate(h, inputs, i, dropout), layer.weight) if i else h
            matrix, mask = inputs.hidden[i].csr, None
            if dropout is not None and self.attention_dropout:
                mask = _edge_mask(matrix, inputs, i + 1, layer.heads, self.attention_dropout, dropout, z.dtype)
            h = layer.attend(z, first_rows(z, inputs.clients, inputs.padded[i + 1]), matrix, mask)
        if self.head is not None:
            h = self.head(self.before_head(h, inputs, len(self.layers), dropout), inputs, -1)
        return h


def _edge_mask(
    matrix: sp.csr_matrix,
    inputs: Inputs,
    level: int,
    heads: int,
    rate: float,
    dropout: DropoutSource,
    dtype: torch.dtype,
) -> Tensor:
    """Dropout of attention weights: every client draws for its own arcs only. (E, heads)"""
    bounds = matrix.indptr[:: inputs.padded[level]]  # first arc of every client
    counts = tuple(int(count) for count in np.diff(bounds))
    padded = max(1, *counts)
    mask = dropout.mask(counts, padded, heads, rate, dtype)
    return torch.cat([mask[k * padded : k * padded + count] for k, count in enumerate(counts)])


class _Attention(torch.autograd.Function):
    """Softmax over the arcs into each row and the weighted sum, every arc visited once forward and once back."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        z: Tensor,
        scores: Tensor,
        own: Tensor,
        matrix: Arcs,
        mask: Tensor | None,
    ) -> Tensor:
        z, scores, own = (tensor.detach().contiguous() for tensor in (z, scores, own))
        alpha = torch.empty(len(matrix.indices), scores.shape[1], dtype=z.dtype)
        out = torch.zeros(own.shape[0], z.shape[1], dtype=z.dtype)
        kept = alpha if mask is None else mask
        _attend(
            matrix.indptr,
            matrix.indices,
            matrix.data,
            z.numpy(),
            scores.numpy(),
            own.numpy(),
            alpha.numpy(),
            kept.numpy(),
            mask is not None,
            out.numpy(),
        )
        ctx.matrix, ctx.masked = matrix, mask is not None  # type: ignore[attr-defined]
        ctx.save_for_backward(z, scores, own, alpha, kept)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        z, scores, own, alpha, kept = (tensor.detach() for tensor in ctx.saved_tensors)  # type: ignore[attr-defined]
        matrix: Arcs = ctx.matrix  # type: ignore[attr-defined]
        found = torch.zeros_like(z), torch.zeros_like(scores), torch.zeros_like(own)
        _attend_grad(
            matrix.indptr,
            matrix.indices,
            z.numpy(),
            scores.numpy(),
            own.numpy(),
            alpha.numpy(),
            kept.numpy(),
            ctx.masked,  # type: ignore[attr-defined]
            grads[0].contiguous().numpy(),
            *(tensor.numpy() for tensor in found),
        )
        return *found, None, None


@compiled
def _attend(
    indptr: Array,
    indices: Array,
    count: Array,
    z: Array,
    scores: Array,
    own: Array,
    alpha: Array,
    mask: Array,
    masked: bool,
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
    indptr: Array,
    indices: Array,
    z: Array,
    scores: Array,
    own: Array,
    alpha: Array,
    mask: Array,
    masked: bool,
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
