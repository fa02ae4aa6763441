r"""The feature-structure decoupled GNN of FedStar -- Tan et al., AAAI 2023, for graphs, and without pooling for nodes.

.. math::
    h^{(0)} = x W_{pre} + b_{pre}, \quad g^{(0)} = s W_{emb} + b_{emb}, \quad
    h^{(l)} = \mathrm{Dropout}(\mathrm{ReLU}(FE_l([h^{(l-1)} \| g^{(l-1)}]))), \quad g^{(l)} = \tanh(SE_l(g^{(l-1)})),

    z_v = [h_v^{(L)} \| g_v^{(L)}]\, W_{mix} + b_{mix}, \quad
    u = \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{post}(\textstyle\sum_v z_v))), \quad \mathrm{logits} =
    \mathrm{readout}(u)

    paper              here
    s_v                the node input "s" of the pack        constant, of `isthmus.data.embeddings`
    structure encoder  ``structure.embed``, ``structure.convs``   what FedStar shares; reads s and the edges alone
    feature encoder    ``pre``, ``convs``                    reads the structure state from before this layer's update
    Whp                ``mix``

The sum over nodes comes before ``mix``, which is linear: :math:`\sum_v z_v = (\sum_v [h_v \| g_v])\, W_{mix} + n_G\,
b_{mix}`, the same numbers up to rounding with one product per graph in place of one per node. No norm anywhere, no
dropout in the structure channel.
Shapes: batch of B graphs with m nodes, channels of width H.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from isthmus.errors import ConfigError, unknown
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.graph_batch import Batch
from isthmus.nn.graph_models import Affine, Conv, GCNConv, GINConv, GraphModel, SAGEConv, activate
from isthmus.nn.options import ALIASES
from isthmus.seeds import Stream

LAYERS: dict[str, type[GINConv] | type[GCNConv] | type[SAGEConv]] = {
    "gcn": GCNConv,
    "gin": GINConv,
    "sage": SAGEConv,
    "sgc": GCNConv,
}
"""What a channel can be made of. SGC is GCN without anything between the layers, so as a feature encoder only."""


class StructureEncoder(nn.Module):
    """w_g: the embedding of s and the structure convolutions. Its shape does not depend on any client's data."""

    def __init__(self, conv: str, width: int, hidden: Sequence[int], stream: Stream) -> None:
        super().__init__()
        self.embed = Affine(width, hidden[0], stream.child("embed").torch())
        widths = pairwise([hidden[0], *hidden])
        self.convs = nn.ModuleList(
            LAYERS[conv](a, b, stream.child("convs", i).torch()) for i, (a, b) in enumerate(widths)
        )

    def states(self, batch: Batch) -> list[Tensor]:
        """g^{(1)} to g^{(L)}, (m, H) each."""
        first, *others = self.convs
        assert isinstance(first, Conv)
        states = [torch.tanh(first.start(batch, "s", self.embed.stacked))]
        for conv in others:
            states.append(torch.tanh(conv(batch, states[-1])))
        return states


class TwoChannel(GraphModel):
    """See the module docstring.

    Args:
        feature_conv, structure_conv: ``gin``, ``gcn`` or ``sage``; features also ``sgc``, without ReLU and dropout
            between the layers.
        num_features, num_classes: Of the client's data.
        num_structure: Width of s.
        hidden: Widths of the layers, the same in both channels.
        dropout: In the feature channel and after ``post``, in training.
        pooled: False puts out a row per node in place of one per graph.
        stream: Where the first weights of all but the structure encoder come from.
        common: Where those of the structure encoder come from; ``stream`` by default.
    """

    shape_bound: ClassVar[tuple[str, ...]] = ("pre.", "readout.")
    structure_part: ClassVar[tuple[str, ...]] = ("structure.",)
    """w_g."""
    feature_part: ClassVar[tuple[str, ...]] = ("convs.", "mix.", "post.")
    """What of w_h fits all clients."""
    conv_part: ClassVar[tuple[str, ...]] = ("convs.", "structure.convs.")
    """The convolutions of both channels."""

    def __init__(
        self,
        feature_conv: str,
        structure_conv: str,
        *,
        num_features: int,
        num_classes: int,
        num_structure: int,
        hidden: Sequence[int] = (64, 64, 64),
        dropout: float = 0.5,
        pooled: bool = True,
        stream: Stream,
        common: Stream | None = None,
    ) -> None:
        nn.Module.__init__(self)
        feature_conv, structure_conv = (ALIASES.get(name, name) for name in (feature_conv, structure_conv))
        if feature_conv not in LAYERS:
            raise unknown("feature encoder", feature_conv, LAYERS)
        if structure_conv not in LAYERS or structure_conv == "sgc":
            raise unknown("structure encoder", structure_conv, [name for name in LAYERS if name != "sgc"])
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout must lie in [0, 1), got {dropout}")
        if not hidden or min((num_features, num_classes, num_structure, *hidden)) < 1:
            raise ConfigError(
                f"a two-channel model needs at least one hidden layer and widths of at least 1, got features "
                f"{num_features}, "
                f"structure {num_structure}, hidden {tuple(hidden)}, classes {num_classes}"
            )
        self.dropout, self.pooled, self.structure_conv, self.plain = (
            dropout,
            pooled,
            structure_conv,
            feature_conv == "sgc",
        )
        last = hidden[-1]
        self.structure = StructureEncoder(structure_conv, num_structure, hidden, (common or stream).child("structure"))
        self.pre = Affine(num_features, hidden[0], stream.child("pre").torch())
        widths = pairwise([hidden[0], *hidden])
        self.convs = nn.ModuleList(
            LAYERS[feature_conv](2 * a, b, stream.child("convs", i).torch()) for i, (a, b) in enumerate(widths)
        )
        self.mix = Affine(2 * last, last, stream.child("mix").torch())
        self.post = Affine(last, last, stream.child("post").torch())
        self.readout = Affine(last, num_classes, stream.child("readout").torch())

    @property
    def shared_groups(self) -> tuple[str, ...]:
        """Prefixes of parameter names, from input to output."""
        return ("pre.", *self.structure_part, *self.conv_groups, "mix.", "post.", "readout.")

    def forward(self, batch: Batch, dropout: DropoutSource | None = None) -> Tensor:
        """Logits (B, C), or (m, C) where nothing is pooled."""
        first, *others = self.convs
        assert isinstance(first, Conv)
        structure = self.structure.states(batch)  # g^{(1)} to g^{(L)}: never reads h
        h = self._activate(_start(first, batch, self.pre.stacked, self.structure.embed.stacked), dropout)
        for conv, before in zip(others, structure, strict=False):
            assert isinstance(conv, Conv)
            h = self._activate(_joined(conv, batch, h, before), dropout)  # FE_l reads g^{(l-1)}
        g = structure[-1]
        if self.pooled:
            both = torch.cat([batch.pool(h), batch.pool(g)], dim=1)  # (B, 2H)
            z = torch.addmm(batch.sizes(h.dtype) * self.mix.bias, both, self.mix.weight)
        else:
            z = self.mix(torch.cat([h, g], dim=1))
        u = activate(self.post(z), self.dropout, dropout)
        logits: Tensor = self.readout(u)
        return logits

    def _activate(self, z: Tensor, dropout: DropoutSource | None) -> Tensor:
        return z if self.plain else activate(z, self.dropout, dropout)


def _start(conv: Conv, batch: Batch, pre: Tensor, embed: Tensor) -> Tensor:
    """``conv([h0 | g0])`` of constant x and s, neither of them mapped first: the affine maps before a convolution join
    its own.
    """
    width = pre.shape[1]
    if isinstance(conv, GINConv):
        weight = conv.inner.weight
        z = batch.affine("x", pre @ weight[:width], "sum") + batch.affine("s", embed @ weight[width:], "sum")
        return conv._after(z + conv.inner.bias)
    if isinstance(conv, GCNConv):
        return (
            batch.affine("x", pre @ conv.weight[:width], "gcn")
            + batch.affine("s", embed @ conv.weight[width:], "gcn")
            + conv.bias
        )
    if isinstance(conv, SAGEConv):
        neighbour, root = conv.neighbour, conv.root
        near = batch.affine("x", pre @ neighbour[:width], "mean") + batch.affine("s", embed @ neighbour[width:], "mean")
        return near + batch.affine("x", pre @ root[:width]) + batch.affine("s", embed @ root[width:]) + conv.bias
    raise TypeError(f"no two-channel form of {type(conv).__name__}")


def _joined(conv: Conv, batch: Batch, h: Tensor, g: Tensor) -> Tensor:
    """``conv([h | g])`` without putting the two side by side."""
    width = h.shape[1]
    if isinstance(conv, GINConv):
        return conv._after(
            _two(batch.propagate("sum", h), batch.propagate("sum", g), conv.inner.weight, conv.inner.bias, width)
        )
    if isinstance(conv, GCNConv):
        return _two(batch.propagate("gcn", h), batch.propagate("gcn", g), conv.weight, conv.bias, width)
    if isinstance(conv, SAGEConv):
        root = _two(h, g, conv.root, conv.bias, width)
        near = torch.addmm(root, batch.propagate("mean", h), conv.neighbour[:width])
        return torch.addmm(near, batch.propagate("mean", g), conv.neighbour[width:])
    raise TypeError(f"no two-channel form of {type(conv).__name__}")


def _two(h: Tensor, g: Tensor, weight: Tensor, bias: Tensor, width: int) -> Tensor:
    """``[h | g] W + b``"""
    return torch.addmm(torch.addmm(bias, h, weight[:width]), g, weight[width:])
