r"""GCN -- Kipf & Welling, ICLR 2017, https://arxiv.org/abs/1609.02907.

.. math:: H^{(l+1)} = \hat A\, \mathrm{ReLU}(H^{(l)})\, W^{(l)} + b^{(l)}, \qquad \hat A = D^{-1/2} (A + I) D^{-1/2}

Glorot weights, zero bias and normalisation as in PyG's ``GCNConv``.
Shapes: x (n, F), edges (2, E) -> logits (n, C); W (in, out), b (out,).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from isthmus.graph.normalise import gcn_norm
from isthmus.nn.architecture import Architecture
from isthmus.nn.layers import Conv, glorot


class GCNConv(Conv):
    r""":math:`\hat A h W + b`."""

    weight_terms: ClassVar[Mapping[str, bool]] = {"weight": True}
    propagation = staticmethod(gcn_norm)

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = glorot((in_channels, out_channels), generator)
        self.bias = nn.Parameter(torch.zeros(out_channels))


@dataclass(frozen=True)
class GCN(Architecture):
    """Normalised neighbourhoods."""

    conv_type: ClassVar[type[Conv]] = GCNConv
    edge_weights: ClassVar[bool] = True
