r"""Graph classifiers: every backbone in the frame of FedStar's baselines (Tan et al., AAAI 2023, section "Baselines"),
also GCFL's.

.. math::
    h^{(0)} = x W_{pre} + b_{pre}, \quad h^{(l)} = \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{conv}_l(h^{(l-1)}))), \quad
    u = \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{post}(\textstyle\sum_{v} z_v))), \quad \mathrm{logits} =
    \mathrm{readout}(u)

    name     one layer                                                        z
             reference
    gin      :math:`\mathrm{ReLU}((h_v + \sum_u h_u) W_1 + b_1) W_2 + b_2`    :math:`h^{(L)}`
             Xu, 2019, eps 0
    gcn      :math:`\hat A h W + b`                                           :math:`h^{(L)}`
             Kipf, 2017
    sage     :math:`\mathrm{mean}_u(h_u) W_{nb} + h_v W_{root} + b`           :math:`h^{(L)}`
             Hamilton, 2017
    gat      :math:`\sum_u \alpha_{vu} h_u W + b`                             :math:`h^{(L)}`
             Veličković, 2018
    mlp      :math:`h W + b`                                                  :math:`h^{(L)}`
             blind to edges
    gprgnn   :math:`h W + b`                                                  :math:`\sum_k \gamma_k \hat A^k h^{(L)}`
             Chien, 2021
    dgcn     :math:`h W + b`                                                  :math:`(\tilde D^{-1} (A + I))^K h^{(L)}`
             Dong, 2021
    sgc      :math:`\hat A^K h W + b`, once; no ReLU, no dropout behind it    :math:`h^{(1)}`
             Wu, 2019

Each as PyG's layer of that name, first weights too. ``pre`` and ``readout`` depend on the client's features and
classes, so clients with different data share the rest. Every sub-module draws from its own stream: what clients have in
common starts equal whatever their features are.
Shapes: batch of B graphs with m nodes; W (in, out), b (out,).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn

from isthmus.errors import ConfigError, unknown
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.gat import GATLayer, check_heads
from isthmus.nn.gcn import GCNLayer
from isthmus.nn.gprgnn import check_gpr, first_gamma
from isthmus.nn.graph_batch import Batch
from isthmus.nn.kernels import Array, compiled, split
from isthmus.nn.kernels import activate as relu_and_mask
from isthmus.nn.layers import LinearLayer
from isthmus.nn.options import ALIASES, check_options, own_options
from isthmus.nn.sage import SAGELayer
from isthmus.seeds import Stream


class Affine(nn.Module):
    """``h W + b``, initialised as ``torch.nn.Linear``."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        start = LinearLayer(in_channels, out_channels, generator)
        self.weight, self.bias = start.weight, start.bias

    @property
    def stacked(self) -> Tensor:
        """[W; b] (in + 1, out), for inputs with a column of ones."""
        return torch.cat([self.weight, self.bias.unsqueeze(0)])

    def forward(self, h: Tensor) -> Tensor:
        return torch.addmm(self.bias, h, self.weight)


class Conv(nn.Module):
    """A graph convolution on a `Batch`, without activation."""

    def start(self, batch: Batch, name: str, pre: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        """The layer on ``[f | 1] pre`` of constant node inputs f: the same as ``forward`` there, with less to multiply.

        Args:
            name: Of the inputs.
            pre: [W; b] of the map before (F + 1, in).
            dropout: For layers that drop something inside (gat).
        """
        raise NotImplementedError

    def forward(self, batch: Batch, h: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        """(m, in) -> (m, out)"""
        raise NotImplementedError


class GINConv(Conv):
    """The node and its neighbours summed up, then a two-layer perceptron."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = Affine(in_channels, out_channels, generator)
        self.outer = Affine(out_channels, out_channels, generator)

    def start(self, batch: Batch, name: str, pre: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        z = batch.affine(name, pre @ self.inner.weight, "sum") + self.inner.bias
        return self._after(z)

    def forward(self, batch: Batch, h: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        return self._after(self.inner(batch.propagate("sum", h)))

    def _after(self, z: Tensor) -> Tensor:
        outer: Tensor = self.outer(activate(z))
        return outer


class GCNConv(Conv):
    """Normalised neighbourhood, then a linear map."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        start = GCNLayer(in_channels, out_channels, generator)
        self.weight, self.bias = start.weight, start.bias

    def start(self, batch: Batch, name: str, pre: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        return batch.affine(name, pre @ self.weight, "gcn") + self.bias

    def forward(self, batch: Batch, h: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        return torch.addmm(self.bias, batch.propagate("gcn", h), self.weight)


class SAGEConv(Conv):
    """Mean over neighbours and the node itself, with a weight matrix each."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        start = SAGELayer(in_channels, out_channels, generator)
        self.neighbour, self.root, self.bias = start.neighbour, start.root, start.bias

    def start(self, batch: Batch, name: str, pre: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        root = pre @ self.root
        root = torch.cat([root[:-1], root[-1:] + self.bias])
        return batch.affine(name, pre @ self.neighbour, "mean") + batch.affine(name, root)

    def forward(self, batch: Batch, h: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        return torch.addmm(torch.addmm(self.bias, h, self.root), batch.propagate("mean", h), self.neighbour)


class LinearConv(Conv):
    """No neighbours: an affine map of the node itself."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.map = Affine(in_channels, out_channels, generator)

    def start(self, batch: Batch, name: str, pre: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        return batch.affine(name, pre @ self.map.weight) + self.map.bias

    def forward(self, batch: Batch, h: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        mapped: Tensor = self.map(h)
        return mapped


class SGConv(Conv):
    """``hops`` normalised propagations, then a linear map."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator, *, hops: int) -> None:
        super().__init__()
        self.hops = hops
        self.map = Affine(in_channels, out_channels, generator)

    def start(self, batch: Batch, name: str, pre: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        h = batch.affine(name, pre @ self.map.weight, "gcn")
        for _ in range(1, self.hops):
            h = batch.propagate("gcn", h)
        return h + self.map.bias

    def forward(self, batch: Batch, h: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        for _ in range(self.hops):
            h = batch.propagate("gcn", h)
        mapped: Tensor = self.map(h)
        return mapped


class GATConv(Conv):
    """Attention over the neighbours and the node itself; heads side by side."""

    def __init__(
        self, in_channels: int, out_channels: int, generator: torch.Generator, *, heads: int, attention_dropout: float
    ) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        self.attention = GATLayer(in_channels, out_channels // heads, generator, heads=heads)

    def start(self, batch: Batch, name: str, pre: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        return self._attend(batch, batch.affine(name, pre @ self.attention.weight), dropout)

    def forward(self, batch: Batch, h: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        return self._attend(batch, h @ self.attention.weight, dropout)

    def _attend(self, batch: Batch, z: Tensor, dropout: DropoutSource | None) -> Tensor:
        matrix, mask = batch.matrix("arcs"), None
        if dropout is not None and self.attention_dropout:
            arcs = len(matrix.indices)
            mask = dropout.mask((arcs,), arcs, self.attention.heads, self.attention_dropout, z.dtype)
        return self.attention.attend(z, z, matrix, mask)


class Common(TypedDict):
    """What every graph model is built from; one with options of its own passes these on."""

    num_features: int
    num_classes: int
    hidden: Sequence[int]
    dropout: float
    stream: Stream


class GraphModel(nn.Module):
    """pre -> convolutions -> [spread] -> sum over the nodes -> post -> readout. See the module docstring.

    Args:
        num_features, num_classes: Of the client's data.
        hidden: Widths of the convolutions, one number each; ``pre`` has the first width and ``post`` the last.
        dropout: Share of values dropped after each convolution and after ``post`` in training, in [0, 1).
        stream: Where all first weights come from.
    """

    shape_bound: ClassVar[tuple[str, ...]] = ("pre.", "readout.")
    """Prefixes of parameters whose shape depends on the client's features or classes: clients with different data
    cannot share them.
    """
    cohort: ClassVar[bool] = False
    """Clients of a graph task train one by one: mini-batches of different graphs leave nothing to stack."""
    linear: ClassVar[bool] = False
    """Whether convolutions are followed by nothing, instead of ReLU and dropout."""

    def __init__(
        self, *, num_features: int, num_classes: int, hidden: Sequence[int], dropout: float, stream: Stream
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout must lie in [0, 1), got {dropout}")
        if not hidden or min((num_features, num_classes, *hidden)) < 1:
            raise ConfigError(
                f"a graph model needs at least one hidden layer and widths of at least 1, got features {num_features}, "
                f"hidden {tuple(hidden)}, classes {num_classes}"
            )
        self.dropout = dropout
        self.pre = Affine(num_features, hidden[0], stream.child("pre").torch())
        widths = pairwise(self.widths(hidden))
        self.convs = nn.ModuleList(
            self.make_conv(a, b, stream.child("convs", i).torch()) for i, (a, b) in enumerate(widths)
        )
        self.post = Affine(hidden[-1], hidden[-1], stream.child("post").torch())
        self.readout = Affine(hidden[-1], num_classes, stream.child("readout").torch())

    def widths(self, hidden: Sequence[int]) -> Sequence[int]:
        """Of what goes into the first convolution and comes out of each."""
        return (hidden[0], *hidden)

    def make_conv(self, in_channels: int, out_channels: int, generator: torch.Generator) -> Conv:
        """One convolution with its first weights drawn."""
        raise NotImplementedError

    def spread(self, batch: Batch, h: Tensor) -> Tensor:
        """What is summed up over the nodes, from the last convolution's output. (m, H) -> (m, H)"""
        return h

    @property
    def conv_groups(self) -> tuple[str, ...]:
        """Prefixes of the convolutions: what FedPer shares."""
        return tuple(f"convs.{i}." for i in range(len(self.convs)))

    @property
    def shared_groups(self) -> tuple[str, ...]:
        """Prefixes of parameter names, layer by layer from input to output."""
        return ("pre.", *self.conv_groups, "post.", "readout.")

    @property
    def drops(self) -> tuple[float, ...]:
        """Share dropped after each convolution in training."""
        return (self.dropout,) * len(self.convs)

    def forward(self, batch: Batch, dropout: DropoutSource | None = None) -> Tensor:
        """Logits (B, C).

        Args:
            batch: Of `Pack.batch`.
            dropout: The client's generator in training; None in evaluation.
        """
        h = self.pre.stacked  # the first convolution takes the map, not its product
        for i, (conv, rate) in enumerate(zip(self.convs, self.drops, strict=True)):
            assert isinstance(conv, Conv)
            h = conv(batch, h, dropout) if i else conv.start(batch, "x", h, dropout)  # (m, H)
            h = h if self.linear else activate(h, rate, dropout)
        u = activate(self.post(batch.pool(self.spread(batch, h))), self.dropout, dropout)  # (B, H)
        logits: Tensor = self.readout(u)
        return logits


class GraphGIN(GraphModel):
    """Sums of neighbourhoods through perceptrons."""

    def make_conv(self, in_channels: int, out_channels: int, generator: torch.Generator) -> Conv:
        return GINConv(in_channels, out_channels, generator)


class GraphGCN(GraphModel):
    """Normalised neighbourhoods."""

    def make_conv(self, in_channels: int, out_channels: int, generator: torch.Generator) -> Conv:
        return GCNConv(in_channels, out_channels, generator)


class GraphSAGE(GraphModel):
    """Means of neighbourhoods."""

    def make_conv(self, in_channels: int, out_channels: int, generator: torch.Generator) -> Conv:
        return SAGEConv(in_channels, out_channels, generator)


class GraphMLP(GraphModel):
    """The control that sees a graph as a bag of nodes."""

    def make_conv(self, in_channels: int, out_channels: int, generator: torch.Generator) -> Conv:
        return LinearConv(in_channels, out_channels, generator)


class GraphGAT(GraphModel):
    """Attention over neighbourhoods.

    Args:
        heads: Of every layer; hidden widths are those of all heads together.
        attention_dropout: Share of attention weights dropped in training, in [0, 1).
    """

    def __init__(self, *, heads: int = 1, attention_dropout: float = 0.0, **common: Unpack[Common]) -> None:
        check_heads(heads, common["hidden"], attention_dropout)
        self.heads, self.attention_dropout = heads, attention_dropout
        super().__init__(**common)

    def make_conv(self, in_channels: int, out_channels: int, generator: torch.Generator) -> Conv:
        return GATConv(in_channels, out_channels, generator, heads=self.heads, attention_dropout=self.attention_dropout)


class GraphSGC(GraphModel):
    """Propagated features, mapped once; of several hidden widths the first is that of ``pre`` and the last that of the
    map.

    Args:
        hops: K, at least 1.
    """

    linear: ClassVar[bool] = True

    def __init__(self, *, hops: int = 2, **common: Unpack[Common]) -> None:
        if hops < 1:
            raise ConfigError(f"hops must be at least 1, got {hops}")
        self.hops = hops
        super().__init__(**common)

    def widths(self, hidden: Sequence[int]) -> Sequence[int]:
        return hidden[0], hidden[-1]

    def make_conv(self, in_channels: int, out_channels: int, generator: torch.Generator) -> Conv:
        return SGConv(in_channels, out_channels, generator, hops=self.hops)


class GraphDGCN(GraphMLP):
    """Learn first, propagate after.

    Args:
        hops: Number of propagations.
    """

    def __init__(self, *, hops: int = 2, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        if hops < 0:
            raise ConfigError(f"hops must be at least 0, got {hops}")
        self.hops = hops

    def spread(self, batch: Batch, h: Tensor) -> Tensor:
        for _ in range(self.hops):
            h = batch.propagate("row", h)
        return h


class GraphGPRGNN(GraphMLP):
    """Generalised PageRank on the output of an MLP.

    Args:
        hops: K, at least 0.
        alpha: Return probability of the first weights, in [0, 1].
        dprate: Share of the last hidden values dropped before propagation in training, in [0, 1); there in place of
            ``dropout``.
    """

    def __init__(self, *, hops: int = 10, alpha: float = 0.1, dprate: float = 0.5, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        check_gpr(hops, alpha, dprate)
        self.dprate = dprate
        self.gamma = nn.Parameter(first_gamma(hops, alpha))

    @property
    def conv_groups(self) -> tuple[str, ...]:
        return (*super().conv_groups, "gamma")

    @property
    def drops(self) -> tuple[float, ...]:
        return (*super().drops[:-1], self.dprate)

    def spread(self, batch: Batch, h: Tensor) -> Tensor:
        total = h * self.gamma[0]
        for k in range(1, len(self.gamma)):
            h = batch.propagate("gcn", h)
            total = total + h * self.gamma[k]
        return total


_MODELS: dict[str, type[GraphModel]] = {
    "dgcn": GraphDGCN,
    "gat": GraphGAT,
    "gcn": GraphGCN,
    "gin": GraphGIN,
    "gprgnn": GraphGPRGNN,
    "mlp": GraphMLP,
    "sage": GraphSAGE,
    "sgc": GraphSGC,
}


def graph_models() -> tuple[str, ...]:
    """Names `build_graph_model` knows, sorted; aliases left out."""
    return tuple(sorted(_MODELS))


def graph_model_options(name: str) -> dict[str, Any]:
    """What `build_graph_model` takes for this model besides the common arguments, with defaults."""
    return own_options(_find(name), GraphModel)


def build_graph_model(
    name: str,
    *,
    num_features: int,
    num_classes: int,
    hidden: Sequence[int] = (64, 64, 64),
    dropout: float = 0.5,
    stream: Stream,
    **options: Any,
) -> GraphModel:
    """A graph classifier with its first weights, drawn from ``stream`` only; see `GraphModel`.

    Args:
        options: Of this model alone (`graph_model_options`), the same as of the node backbone of that name.
    """
    kind = _find(name)
    check_options(name, options, graph_model_options(name))
    return kind(
        num_features=num_features,
        num_classes=num_classes,
        hidden=tuple(hidden),
        dropout=dropout,
        stream=stream,
        **options,
    )


def _find(name: str) -> type[GraphModel]:
    kind = _MODELS.get(ALIASES.get(name, name))
    if kind is None:
        raise unknown("graph model", name, [*_MODELS, *ALIASES])
    return kind


def activate(z: Tensor, rate: float = 0.0, dropout: DropoutSource | None = None) -> Tensor:
    """ReLU, then dropout where a source is given. ``z`` is overwritten: no layer here needs it again."""
    mask = None
    if dropout is not None and rate:
        mask = dropout.mask((z.shape[0],), z.shape[0], z.shape[1], rate, z.dtype)
    activated: Tensor = _Activate.apply(z, mask)  # type: ignore[no-untyped-call]
    return activated


class _Activate(torch.autograd.Function):
    """``relu(z) * mask`` in place; one pass forward, one back."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor, mask: Tensor | None) -> Tensor:
        ctx.mark_dirty(z)
        relu_and_mask(z.detach(), mask)
        ctx.save_for_backward(z, *(() if mask is None else (mask,)))
        return z

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        h, *mask = (tensor.detach().numpy() for tensor in ctx.saved_tensors)  # type: ignore[attr-defined]
        grad = grads[0].contiguous()
        out = torch.empty_like(grad)
        source, target, scale = grad.numpy(), out.numpy(), mask[0] if mask else h

        def work(begin: int, end: int) -> None:
            _pass_back(begin, end, source, h, scale, bool(mask), target)

        split(work, out.shape[0], out.numel())
        return out, None


@compiled
def _pass_back(begin: int, end: int, grad: Array, h: Array, mask: Array, masked: bool, out: Array) -> None:
    """The gradient goes where the result is above zero: where neither ReLU nor dropout stopped it."""
    zero = out.dtype.type(0)
    for row in range(begin, end):
        source, kept, scale, target = grad[row], h[row], mask[row], out[row]
        if masked:
            for i in range(len(target)):
                passed = source[i] * scale[i]
                target[i] = passed if kept[i] > zero else zero
        else:
            for i in range(len(target)):
                target[i] = source[i] if kept[i] > zero else zero
