r"""Graph classifiers: the model of FedStar's baselines (Tan et al., AAAI 2023, section "Baselines"), also GCFL's.

.. math::
    h^{(0)} = x W_{pre} + b_{pre}, \quad h^{(l)} = \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{conv}_l(h^{(l-1)}))), \quad
    u = \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{post}(\textstyle\sum_{v} h_v^{(L)}))), \quad \mathrm{logits} = \mathrm{readout}(u)

    conv   one layer                                                                          reference
    gin    :math:`\mathrm{ReLU}((h_v + \sum_u h_u) W_1 + b_1) W_2 + b_2`                      Xu et al., ICLR 2019, eps 0
    gcn    :math:`\hat A h W + b`                                                             Kipf & Welling, ICLR 2017
    sage   :math:`\mathrm{mean}_u(h_u) W_{nb} + h_v W_{root} + b`                             Hamilton et al., NeurIPS 2017

Each as PyG's layer of that name, first weights too. ``pre`` and ``readout`` depend on the client's features and classes, so clients with
different data share the rest. Every sub-module draws from its own stream: what clients have in common starts equal whatever their
features are.
Shapes: batch of B graphs with m nodes; W (in, out), b (out,).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from isthmus.errors import ConfigError, unknown
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.kernels import Array, compiled, split
from isthmus.nn.kernels import activate as relu_and_mask
from isthmus.nn.layers import fan_in_, glorot_
from isthmus.nn.packed import Batch
from isthmus.seeds import Stream


class Affine(nn.Module):
    """``h W + b``, initialised as ``torch.nn.Linear``."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        with torch.no_grad():
            fan_in_(self.weight, in_channels, generator)
            fan_in_(self.bias, in_channels, generator)

    @property
    def stacked(self) -> Tensor:
        """[W; b] (in + 1, out), for inputs with a column of ones."""
        return torch.cat([self.weight, self.bias.unsqueeze(0)])

    def forward(self, h: Tensor) -> Tensor:
        return torch.addmm(self.bias, h, self.weight)


class Conv(nn.Module):
    """A graph convolution on a `Batch`, without activation."""

    def start(self, batch: Batch, name: str, pre: Tensor) -> Tensor:
        """The layer on ``[f | 1] pre`` of constant node inputs f: the same as ``forward`` there, with less to multiply.

        Args:
            name: Of the inputs.
            pre: [W; b] of the map before (F + 1, in).
        """
        raise NotImplementedError

    def forward(self, batch: Batch, h: Tensor) -> Tensor:
        """(m, in) -> (m, out)"""
        raise NotImplementedError


class GINConv(Conv):
    """The node and its neighbours summed up, then a two-layer perceptron."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = Affine(in_channels, out_channels, generator)
        self.outer = Affine(out_channels, out_channels, generator)

    def start(self, batch: Batch, name: str, pre: Tensor) -> Tensor:
        z = batch.affine(name, pre @ self.inner.weight, "sum") + self.inner.bias
        return self._after(z)

    def forward(self, batch: Batch, h: Tensor) -> Tensor:
        return self._after(self.inner(batch.propagate("sum", h)))

    def _after(self, z: Tensor) -> Tensor:
        outer: Tensor = self.outer(activate(z))
        return outer


class GCNConv(Conv):
    """Normalised neighbourhood, then a linear map."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        with torch.no_grad():
            glorot_(self.weight, generator)

    def start(self, batch: Batch, name: str, pre: Tensor) -> Tensor:
        return batch.affine(name, pre @ self.weight, "gcn") + self.bias

    def forward(self, batch: Batch, h: Tensor) -> Tensor:
        return torch.addmm(self.bias, batch.propagate("gcn", h), self.weight)


class SAGEConv(Conv):
    """Mean over neighbours and the node itself, with a weight matrix each."""

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.neighbour = nn.Parameter(torch.empty(in_channels, out_channels))
        self.root = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        with torch.no_grad():
            for tensor in (self.neighbour, self.bias, self.root):
                fan_in_(tensor, in_channels, generator)

    def start(self, batch: Batch, name: str, pre: Tensor) -> Tensor:
        root = pre @ self.root
        root = torch.cat([root[:-1], root[-1:] + self.bias])
        return batch.affine(name, pre @ self.neighbour, "mean") + batch.affine(name, root)

    def forward(self, batch: Batch, h: Tensor) -> Tensor:
        return torch.addmm(torch.addmm(self.bias, h, self.root), batch.propagate("mean", h), self.neighbour)


class GraphModel(nn.Module):
    """pre -> convolutions -> sum over the nodes -> post -> readout. See the module docstring.

    Args:
        conv: ``gin``, ``gcn`` or ``sage``.
        num_features, num_classes: Of the client's data.
        hidden: Widths of the convolutions, one number each; ``pre`` has the first width and ``post`` the last.
        dropout: Share of values dropped after each convolution and after ``post`` in training, in [0, 1).
        stream: Where all first weights come from.
    """

    shape_bound: ClassVar[tuple[str, ...]] = ("pre.", "readout.")
    """Prefixes of parameters whose shape depends on the client's features or classes: clients with different data cannot share them."""
    cohort: ClassVar[bool] = False
    """Clients of a graph task train one by one: mini-batches of different graphs leave nothing to stack."""

    def __init__(
        self, conv: str, *, num_features: int, num_classes: int, hidden: Sequence[int] = (64, 64, 64), dropout: float = 0.5, stream: Stream
    ) -> None:
        super().__init__()
        if conv not in _CONVS:
            raise unknown("graph model", conv, _CONVS)
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout must lie in [0, 1), got {dropout}")
        if not hidden or min((num_features, num_classes, *hidden)) < 1:
            raise ConfigError(
                f"a graph model needs at least one hidden layer and widths of at least 1, got features {num_features}, "
                f"hidden {tuple(hidden)}, classes {num_classes}"
            )
        self.dropout = dropout
        self.pre = Affine(num_features, hidden[0], stream.child("pre").torch())
        widths = pairwise([hidden[0], *hidden])
        self.convs = nn.ModuleList(_CONVS[conv](a, b, stream.child("convs", i).torch()) for i, (a, b) in enumerate(widths))
        self.post = Affine(hidden[-1], hidden[-1], stream.child("post").torch())
        self.readout = Affine(hidden[-1], num_classes, stream.child("readout").torch())

    @property
    def conv_groups(self) -> tuple[str, ...]:
        """Prefixes of the convolutions: what FedPer shares."""
        return tuple(f"convs.{i}." for i in range(len(self.convs)))

    @property
    def shared_groups(self) -> tuple[str, ...]:
        """Prefixes of parameter names, layer by layer from input to output."""
        return ("pre.", *self.conv_groups, "post.", "readout.")

    def forward(self, batch: Batch, dropout: DropoutSource | None = None) -> Tensor:
        """Logits (B, C).

        Args:
            batch: Of `Pack.batch`.
            dropout: The client's generator in training; None in evaluation.
        """
        first, *others = self.convs
        assert isinstance(first, Conv)
        h = activate(first.start(batch, "x", self.pre.stacked), self.dropout, dropout)  # (m, H)
        for conv in others:
            h = activate(conv(batch, h), self.dropout, dropout)
        u = activate(self.post(batch.pool(h)), self.dropout, dropout)  # (B, H)
        logits: Tensor = self.readout(u)
        return logits


_CONVS: dict[str, type[GINConv] | type[GCNConv] | type[SAGEConv]] = {"gcn": GCNConv, "gin": GINConv, "sage": SAGEConv}
_ALIASES = {"graphsage": "sage"}


def graph_models() -> tuple[str, ...]:
    """Names `build_graph_model` knows, sorted; aliases left out."""
    return tuple(sorted(_CONVS))


def build_graph_model(
    name: str, *, num_features: int, num_classes: int, hidden: Sequence[int] = (64, 64, 64), dropout: float = 0.5, stream: Stream
) -> GraphModel:
    """A graph classifier with its first weights, drawn from ``stream`` only; see `GraphModel`."""
    if _ALIASES.get(name, name) not in _CONVS:
        raise unknown("graph model", name, [*_CONVS, *_ALIASES])
    return GraphModel(
        _ALIASES.get(name, name), num_features=num_features, num_classes=num_classes, hidden=hidden, dropout=dropout, stream=stream
    )


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
