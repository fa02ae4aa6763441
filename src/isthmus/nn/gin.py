r"""GIN -- Xu, Hu, Leskovec & Jegelka, ICLR 2019, https://arxiv.org/abs/1810.00826, for node tasks.

.. math:: h_v' = \mathrm{ReLU}\big((h_v + \textstyle\sum_{u \in N(v)} h_u) W + b\big) W_{outer} + b_{outer}

PyG's ``GINConv`` with eps = 0 and a two-layer perceptron; N(v) are the sources of arcs into v, counted as often as they
occur. ReLU and dropout between layers. For graph tasks see `isthmus.nn.graph_models`.
Shapes: x (n, F), edges (2, E) -> logits (n, C); W (in, out), W_outer (out, out), initialised as ``torch.nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from isthmus.graph.normalise import adjacency
from isthmus.nn.backbone import Backbone
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import Inputs
from isthmus.nn.layers import Layer, add_bias, fan_in_, matmul, propagate_and_map
from isthmus.tensors import Weights


class GINLayer(Layer):
    """The node and its neighbours summed up, then a two-layer perceptron."""

    terms: ClassVar[dict[str, bool]] = {"weight": True}

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.outer = nn.Parameter(torch.empty(out_channels, out_channels))
        self.outer_bias = nn.Parameter(torch.empty(out_channels))
        with torch.no_grad():
            for tensor in (self.weight, self.bias):
                fan_in_(tensor, in_channels, generator)
            for tensor in (self.outer, self.outer_bias):
                fan_in_(tensor, out_channels, generator)

    @staticmethod
    def run(own: Weights, h: Tensor, inputs: Inputs, level: int) -> Tensor:
        return GINLayer.finish(own, propagate_and_map(h, own["weight"], inputs, level))

    @staticmethod
    def finish(own: Weights, z: Tensor) -> Tensor:
        """The layer from its first product on."""
        inner = torch.relu(add_bias(z, own["bias"]))
        return add_bias(matmul(inner, own["outer"]), own["outer_bias"])


class GIN(Backbone):
    """GIN layers with ReLU and dropout between."""

    layer_type: ClassVar[type[Layer]] = GINLayer

    @classmethod
    def make_layer(cls, in_channels: int, out_channels: int, generator: torch.Generator) -> Layer:
        return GINLayer(in_channels, out_channels, generator)

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        return sp.csr_matrix(
            adjacency(edge_index.flip(0), num_nodes) + sp.eye(num_nodes, format="csr", dtype=np.float32)
        )

    @property
    def later(self) -> tuple[tuple[str, Layer], ...]:
        """With the first layer, which is not over with its first product."""
        first: Layer = self.layers[0]  # type: ignore[assignment]
        return (("layers.0.", first), *super().later)

    def forward(
        self, inputs: Inputs, dropout: DropoutSource | None = None, products: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        products = self.products(inputs) if products is None else products
        h = GINLayer.finish(dict(self.layers[0].named_parameters()), products["layers.0.weight"])
        for i in range(1, len(self.layers)):
            h = self.layers[i](self._activate(h, inputs, inputs.level(i - 1), dropout), inputs, inputs.level(i))
        if self.head is not None:
            h = self.head(self.before_head(h, inputs, inputs.level(len(self.layers) - 1), dropout), inputs, -1)
        return h
