r"""The graph model of every architecture, in the frame of FedStar's baselines (Tan et al., AAAI 2023, section
"Baselines"), also GCFL's.

.. math::
    h^{(0)} = x W_{pre} + b_{pre}, \quad h^{(l)} = \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{conv}_l(h^{(l-1)}))), \quad
    u = \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{post}(\textstyle\sum_{v} z_v))), \quad \mathrm{logits} =
    \mathrm{readout}(u)

    backbone                  convolutions                         z
    gcn, sage, gat, gin, mlp, one per hidden width                 :math:`h^{(L)}`
    dirsage
    gprgnn                    linear maps                          :math:`\sum_k \gamma_k \hat A^k h^{(L)}`
    dgcn                      linear maps                          :math:`(\tilde D^{-1} (A + I))^K h^{(L)}`
    sgc                       one, no ReLU and no dropout after    :math:`h^{(1)}`

Each convolution is that of the node model, first weights too. ``pre`` and ``readout`` depend on the client's features
and classes, so clients with different data share the rest. Every sub-module draws from its own stream: what clients
have in common starts equal whatever their features are.
Shapes: batch of B graphs with m nodes; W (in, out), b (out,).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from isthmus.errors import ConfigError
from isthmus.nn.architecture import Architecture
from isthmus.nn.dense import activate, add_up
from isthmus.nn.dropout import DropoutSource, dropout_mask
from isthmus.nn.graph_batch import Batch
from isthmus.nn.layers import Conv, LinearLayer, convs_of
from isthmus.seeds import Stream


class GraphModel(nn.Module):
    """pre -> convolutions -> [propagation] -> sum over the nodes -> post -> readout. See the module docstring.

    Args:
        architecture: What the convolutions are.
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

    def __init__(
        self,
        architecture: Architecture,
        *,
        num_features: int,
        num_classes: int,
        hidden: Sequence[int],
        dropout: float,
        stream: Stream,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout must lie in [0, 1), got {dropout}")
        if not hidden or min((num_features, num_classes, *hidden)) < 1:
            raise ConfigError(
                f"a graph model needs at least one hidden layer and widths of at least 1, got features {num_features}, "
                f"hidden {tuple(hidden)}, classes {num_classes}"
            )
        self.architecture, self.dropout = architecture, dropout
        self.pre = LinearLayer(num_features, hidden[0], stream.child("pre").torch())
        widths = (hidden[0], hidden[-1]) if architecture.linear else (hidden[0], *hidden)
        self.convs = nn.ModuleList(
            architecture.conv(a, b, stream.child("convs", i).torch()) for i, (a, b) in enumerate(pairwise(widths))
        )
        self.post = LinearLayer(hidden[-1], hidden[-1], stream.child("post").torch())
        self.readout = LinearLayer(hidden[-1], num_classes, stream.child("readout").torch())
        for name, tensor in architecture.first_weights().items():
            self.register_parameter(name, nn.Parameter(tensor))

    @property
    def conv_groups(self) -> tuple[str, ...]:
        """Prefixes of the convolutions and of what follows them: what FedPer shares."""
        return (*(f"convs.{i}." for i in range(len(self.convs))), *self.architecture.first_weights())

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
        first, *others = convs_of(self.convs)
        h = run_on_inputs(first, batch, {"x": self.pre.stacked}, dropout)  # (m, H)
        for conv in others:
            h = conv(activated(h, self.dropout, dropout), batch.hop(conv.propagation), dropout)
        if not self.architecture.linear:
            h = activated(h, 0.0 if self.architecture.drops_output else self.dropout, dropout)
        z = self.after_layers(batch, h, dropout)
        u = activated(self.post(batch.pool(z)), self.dropout, dropout)  # (B, H)
        logits: Tensor = self.readout(u)
        return logits

    def after_layers(self, batch: Batch, h: Tensor, dropout: DropoutSource | None = None) -> Tensor:
        """What is summed up over the nodes, from the last convolution's output. (m, H) -> (m, H)"""

        def drop(z: Tensor, rate: float) -> Tensor:
            mask = dropout_mask(dropout, (z.shape[0],), z.shape[0], z, rate)
            return z if mask is None else z * mask

        weights = {name: getattr(self, name) for name in self.architecture.first_weights()}
        hops = [batch.hop(self.architecture.propagation_after)] * self.architecture.hops_after
        return self.architecture.after_layers(weights, h, hops, drop)


def activated(z: Tensor, rate: float = 0.0, dropout: DropoutSource | None = None) -> Tensor:
    """ReLU, then dropout where a source is given; ``z`` is overwritten."""
    return activate(z, dropout_mask(dropout, (z.shape[0],), z.shape[0], z, rate))


def run_on_inputs(conv: Conv, batch: Batch, maps: Mapping[str, Tensor], dropout: DropoutSource | None = None) -> Tensor:
    """``conv`` on affine maps of constant node inputs, side by side: the same as `Conv.run` there, with less to
    multiply, because each map is joined to the layer's own first.

    Args:
        maps: Name of each input -> [W; b] of its map.
    """
    weights = dict(conv.named_parameters())
    ends = [0]
    for stacked in maps.values():
        ends.append(ends[-1] + stacked.shape[1])
    products = {
        term: add_up(
            batch.affine(name, stacked @ weights[term][begin:end], conv.propagation if propagated else None)
            for (name, stacked), (begin, end) in zip(maps.items(), pairwise(ends), strict=True)
        )
        for term, propagated in conv.weight_terms.items()
    }
    return conv.finish(weights, products, batch.hop(conv.propagation), dropout)
