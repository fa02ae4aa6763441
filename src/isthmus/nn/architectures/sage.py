r"""GraphSAGE, mean aggregator -- Hamilton, Ying & Leskovec, NeurIPS 2017, https://arxiv.org/abs/1706.02216.

.. math:: h_v' = W_{nb}\, \mathrm{mean}_{u \in N(v)} h_u + b + W_{root}\, h_v

N(v) are the sources of arcs into v; a node without any uses only the root term. Full neighbourhoods, no output
normalisation, as PyG's ``SAGEConv``; initialised uniform +-1/sqrt(fan_in).
Shapes: x (n, F), edges (2, E) -> logits (n, C); W (in, out), b (out,).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from isthmus.graph.normalise import mean_norm
from isthmus.nn.architecture import Architecture
from isthmus.nn.layers import Conv, fan_in


class SAGEConv(Conv):
    """Mean over neighbours and the node itself, with a weight matrix each."""

    weight_terms: ClassVar[Mapping[str, bool]] = {"neighbour": True, "root": False}
    propagation = staticmethod(mean_norm)

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        neighbour = fan_in((in_channels, out_channels), in_channels, generator)
        bias = fan_in((out_channels,), in_channels, generator)
        self.neighbour, self.root = neighbour, fan_in((in_channels, out_channels), in_channels, generator)
        self.bias = bias


@dataclass(frozen=True)
class SAGE(Architecture):
    """Means of neighbourhoods."""

    aliases: ClassVar[tuple[str, ...]] = ("graphsage",)
    conv_type: ClassVar[type[Conv]] = SAGEConv
    edge_weights: ClassVar[bool] = True
