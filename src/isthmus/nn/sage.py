r"""GraphSAGE, mean aggregator -- Hamilton, Ying & Leskovec, NeurIPS 2017, https://arxiv.org/abs/1706.02216.

.. math:: h_v' = W_{nb}\, \mathrm{mean}_{u \in N(v)} h_u + b + W_{root}\, h_v

N(v) are the sources of arcs into v; a node without any uses only the root term. Full neighbourhoods, no output normalisation, as
PyG's ``SAGEConv``; initialised uniform +-1/sqrt(fan_in).
Shapes: x (n, F), edges (2, E) -> logits (n, C); W (in, out), b (out,).
"""

from __future__ import annotations

from typing import ClassVar

import scipy.sparse as sp
import torch
from torch import Tensor, nn

from isthmus.graph.normalise import mean_norm
from isthmus.nn.backbone import Backbone
from isthmus.nn.inputs import Inputs
from isthmus.nn.layers import Layer, add_bias, fan_in_, first_rows, matmul, propagate_and_map


class SAGELayer(Layer):
    """Mean over neighbours and the node itself, with a weight matrix each."""

    terms: ClassVar[dict[str, bool]] = {"neighbour": True, "root": False}

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.neighbour = nn.Parameter(torch.empty(in_channels, out_channels))
        self.root = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        with torch.no_grad():
            for tensor in (self.neighbour, self.bias, self.root):
                fan_in_(tensor, in_channels, generator)

    def forward(self, h: Tensor, inputs: Inputs, level: int) -> Tensor:
        own = first_rows(h, inputs.clients, inputs.padded[level])
        return add_bias(propagate_and_map(h, self.neighbour, inputs, level) + matmul(own, self.root), self.bias)


class SAGE(Backbone):
    """GraphSAGE layers with ReLU and dropout between."""

    layer_type: ClassVar[type[Layer]] = SAGELayer

    @classmethod
    def make_layer(cls, in_channels: int, out_channels: int, generator: torch.Generator) -> Layer:
        return SAGELayer(in_channels, out_channels, generator)

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        return mean_norm(edge_index, num_nodes)
