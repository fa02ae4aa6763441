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
from isthmus.nn.architecture import Architecture
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.graph_batch import Batch
from isthmus.nn.graph_models import GraphModel, activated, run_on_inputs
from isthmus.nn.layers import LinearLayer, convs_of
from isthmus.nn.registry import find_architecture
from isthmus.seeds import Stream

STRUCTURE_ENCODERS = ("gcn", "gin", "sage")
FEATURE_ENCODERS = (*STRUCTURE_ENCODERS, "sgc")
"""SGC is GCN without anything between the layers, so as a feature encoder only."""


class StructureEncoder(nn.Module):
    """w_g: the embedding of s and the structure convolutions. Its shape does not depend on any client's data."""

    def __init__(self, architecture: Architecture, width: int, hidden: Sequence[int], stream: Stream) -> None:
        super().__init__()
        self.embed = LinearLayer(width, hidden[0], stream.child("embed").torch())
        widths = pairwise([hidden[0], *hidden])
        self.convs = nn.ModuleList(
            architecture.conv(a, b, stream.child("convs", i).torch()) for i, (a, b) in enumerate(widths)
        )

    def states(self, batch: Batch) -> list[Tensor]:
        """g^{(1)} to g^{(L)}, (m, H) each."""
        first, *others = convs_of(self.convs)
        states = [torch.tanh(run_on_inputs(first, batch, {"s": self.embed.stacked}))]
        for conv in others:
            states.append(torch.tanh(conv(states[-1], batch.hop(conv.propagation))))
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
        features = _encoder("feature encoder", feature_conv, FEATURE_ENCODERS)
        structure = _encoder("structure encoder", structure_conv, STRUCTURE_ENCODERS)
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout must lie in [0, 1), got {dropout}")
        if not hidden or min((num_features, num_classes, num_structure, *hidden)) < 1:
            raise ConfigError(
                f"a two-channel model needs at least one hidden layer and widths of at least 1, got features "
                f"{num_features}, "
                f"structure {num_structure}, hidden {tuple(hidden)}, classes {num_classes}"
            )
        self.architecture, self.dropout, self.pooled, self.plain = features, dropout, pooled, feature_conv == "sgc"
        last = hidden[-1]
        self.structure = StructureEncoder(structure, num_structure, hidden, (common or stream).child("structure"))
        self.pre = LinearLayer(num_features, hidden[0], stream.child("pre").torch())
        widths = pairwise([hidden[0], *hidden])
        self.convs = nn.ModuleList(
            features.conv(2 * a, b, stream.child("convs", i).torch()) for i, (a, b) in enumerate(widths)
        )
        self.mix = LinearLayer(2 * last, last, stream.child("mix").torch())
        self.post = LinearLayer(last, last, stream.child("post").torch())
        self.readout = LinearLayer(last, num_classes, stream.child("readout").torch())

    @property
    def shared_groups(self) -> tuple[str, ...]:
        """Prefixes of parameter names, from input to output."""
        return ("pre.", *self.structure_part, *self.conv_groups, "mix.", "post.", "readout.")

    def forward(self, batch: Batch, dropout: DropoutSource | None = None) -> Tensor:
        """Logits (B, C), or (m, C) where nothing is pooled."""
        first, *others = convs_of(self.convs)
        structure = self.structure.states(batch)  # g^{(1)} to g^{(L)}: never reads h
        maps = {"x": self.pre.stacked, "s": self.structure.embed.stacked}
        h = self._activate(run_on_inputs(first, batch, maps), dropout)
        for conv, before in zip(others, structure, strict=False):
            both = torch.cat([h, before], dim=1)  # FE_l reads g^{(l-1)}
            h = self._activate(conv(both, batch.hop(conv.propagation)), dropout)
        g = structure[-1]
        if self.pooled:
            both = torch.cat([batch.pool(h), batch.pool(g)], dim=1)  # (B, 2H)
            z = torch.addmm(batch.sizes(h.dtype) * self.mix.bias, both, self.mix.weight)
        else:
            z = self.mix(torch.cat([h, g], dim=1))
        u = activated(self.post(z), self.dropout, dropout)
        logits: Tensor = self.readout(u)
        return logits

    def _activate(self, z: Tensor, dropout: DropoutSource | None) -> Tensor:
        return z if self.plain else activated(z, self.dropout, dropout)


def _encoder(kind: str, name: str, allowed: Sequence[str]) -> Architecture:
    """What a channel is made of."""
    known = {alias: each for each in allowed for alias in (each, *find_architecture(each).aliases)}
    if name not in known:
        raise unknown(kind, name, allowed)
    return find_architecture("gcn" if known[name] == "sgc" else known[name])()
