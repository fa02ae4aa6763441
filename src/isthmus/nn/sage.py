r"""GraphSAGE, mean aggregator -- Hamilton, Ying & Leskovec, NeurIPS 2017, https://arxiv.org/abs/1706.02216.

.. math:: h_v' = W_{nb}\, \mathrm{mean}_{u \in N(v)} h_u + b + W_{root}\, h_v

N(v) are the sources of arcs into v; a node without any uses only the root term. Full neighbourhoods, no output
normalisation, as PyG's ``SAGEConv``; initialised uniform +-1/sqrt(fan_in).
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
from isthmus.nn.layers import (
    Layer,
    add_bias,
    bias_grad,
    fan_in_,
    first_rows,
    matmul,
    matmul_grads,
    propagate_and_map,
    propagate_and_map_grads,
)
from isthmus.tensors import Weights


class SAGELayer(Layer):
    """Mean over neighbours and the node itself, with a weight matrix each."""

    terms: ClassVar[dict[str, bool]] = {"neighbour": True, "root": False}
    written_out: ClassVar[bool] = True

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.neighbour = nn.Parameter(torch.empty(in_channels, out_channels))
        self.root = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        with torch.no_grad():
            for tensor in (self.neighbour, self.bias, self.root):
                fan_in_(tensor, in_channels, generator)

    @staticmethod
    def run(own: Weights, h: Tensor, inputs: Inputs, level: int) -> Tensor:
        itself = first_rows(h, inputs.clients, inputs.padded[level])
        return add_bias(
            propagate_and_map(h, own["neighbour"], inputs, level) + matmul(itself, own["root"]), own["bias"]
        )

    @staticmethod
    def run_grads(
        own: Weights, h: Tensor, grad: Tensor, inputs: Inputs, level: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        itself = first_rows(h, inputs.clients, inputs.padded[level])
        h_grad, neighbour_grad = propagate_and_map_grads(h, own["neighbour"], grad, inputs, level)
        itself_grad, root_grad = matmul_grads(itself, own["root"], grad)
        rows = h_grad.view(inputs.clients, -1, h.shape[-1])[:, : inputs.padded[level]]
        rows += itself_grad.view(rows.shape)
        return h_grad, {"neighbour": neighbour_grad, "root": root_grad, "bias": bias_grad(grad, own["bias"])}


class SAGE(Backbone):
    """GraphSAGE layers with ReLU and dropout between."""

    layer_type: ClassVar[type[Layer]] = SAGELayer

    @classmethod
    def make_layer(cls, in_channels: int, out_channels: int, generator: torch.Generator) -> Layer:
        return SAGELayer(in_channels, out_channels, generator)

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        return mean_norm(edge_index, num_nodes)
