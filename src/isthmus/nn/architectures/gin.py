r"""GIN -- Xu, Hu, Leskovec & Jegelka, ICLR 2019, https://arxiv.org/abs/1810.00826.

.. math:: h_v' = \mathrm{ReLU}\big((h_v + \textstyle\sum_{u \in N(v)} h_u) W_1 + b_1\big) W_2 + b_2

PyG's ``GINConv`` with eps = 0 and a two-layer perceptron; N(v) are the sources of arcs into v, counted as often as they
occur. W_1, b_1 are ``inner``, W_2, b_2 ``outer``.
Shapes: x (n, F), edges (2, E) -> logits (n, C); W_1 (in, out), W_2 (out, out), initialised as ``torch.nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.graph.normalise import adjacency
from isthmus.nn.architecture import Architecture
from isthmus.nn.dense import activate, add_bias, matmul
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.layers import Conv, Hop, LinearLayer
from isthmus.tensors import Weights


def sum_with_itself(edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None = None) -> sp.csr_matrix:
    r""":math:`A^\top + I`: the node and the sum over its neighbours."""
    into = adjacency(edge_index.flip(0), num_nodes, edge_weight)
    return sp.csr_matrix(into + sp.eye(num_nodes, format="csr", dtype=np.float32))


class GINConv(Conv):
    """The node and its neighbours summed up, then a two-layer perceptron."""

    weight_terms: ClassVar[Mapping[str, bool]] = {"inner.weight": True}
    propagation = staticmethod(sum_with_itself)

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = LinearLayer(in_channels, out_channels, generator)
        self.outer = LinearLayer(out_channels, out_channels, generator)

    def finish(
        self, weights: Weights, products: Mapping[str, Tensor], hop: Hop, dropout: DropoutSource | None = None
    ) -> Tensor:
        inner = activate(add_bias(products["inner.weight"], weights["inner.bias"]))
        return add_bias(matmul(inner, weights["outer.weight"]), weights["outer.bias"])


@dataclass(frozen=True)
class GIN(Architecture):
    """Sums of neighbourhoods through perceptrons."""

    conv_type: ClassVar[type[Conv]] = GINConv
    edge_weights: ClassVar[bool] = True
