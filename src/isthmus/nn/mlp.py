r"""Multi-layer perceptron: the graph-free control.

.. math:: h^{(l+1)} = \mathrm{ReLU}(h^{(l)}) W^{(l)} + b^{(l)}

Shapes: x (n, F) -> logits (n, C). Initialised as ``torch.nn.Linear``: uniform +-1/sqrt(fan_in).
"""

from __future__ import annotations

from typing import ClassVar

import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.nn.backbone import Backbone
from isthmus.nn.layers import Layer, LinearLayer


class MLP(Backbone):
    """Linear layers with ReLU and dropout between; blind to edges."""

    activate_head: ClassVar[bool] = True
    layer_type: ClassVar[type[Layer]] = LinearLayer

    @classmethod
    def make_layer(cls, in_channels: int, out_channels: int, generator: torch.Generator) -> Layer:
        return LinearLayer(in_channels, out_channels, generator)

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        return sp.csr_matrix((num_nodes, num_nodes))  # never asked for: an MLP has no hops
