r"""GCN -- Kipf & Welling, ICLR 2017, https://arxiv.org/abs/1609.02907.

.. math:: H^{(l+1)} = \hat A\, \mathrm{ReLU}(H^{(l)})\, W^{(l)} + b^{(l)}, \qquad \hat A = D^{-1/2} (A + I) D^{-1/2}

Glorot weights, zero bias and normalisation as in PyG's ``GCNConv``.
Shapes: x (n, F), edges (2, E) -> logits (n, C); W (in, out), b (out,).
"""

from __future__ import annotations

from typing import ClassVar

import scipy.sparse as sp
import torch
from torch import Tensor, nn

from isthmus.graph.normalise import gcn_norm
from isthmus.nn.backbone import Backbone
from isthmus.nn.inputs import Inputs
from isthmus.nn.layers import Layer, add_bias, bias_grad, glorot_, propagate_and_map, propagate_and_map_grads
from isthmus.tensors import Weights


class GCNLayer(Layer):
    r""":math:`\hat A h W + b`."""

    terms: ClassVar[dict[str, bool]] = {"weight": True}
    written_out: ClassVar[bool] = True

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        with torch.no_grad():
            glorot_(self.weight, generator)

    @staticmethod
    def run(own: Weights, h: Tensor, inputs: Inputs, level: int) -> Tensor:
        return add_bias(propagate_and_map(h, own["weight"], inputs, level), own["bias"])

    @staticmethod
    def run_grads(
        own: Weights, h: Tensor, grad: Tensor, inputs: Inputs, level: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        h_grad, weight_grad = propagate_and_map_grads(h, own["weight"], grad, inputs, level)
        return h_grad, {"weight": weight_grad, "bias": bias_grad(grad, own["bias"])}


class GCN(Backbone):
    """Graph convolutions with ReLU and dropout between."""

    layer_type: ClassVar[type[Layer]] = GCNLayer

    @classmethod
    def make_layer(cls, in_channels: int, out_channels: int, generator: torch.Generator) -> Layer:
        return GCNLayer(in_channels, out_channels, generator)

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        return gcn_norm(edge_index, num_nodes)
