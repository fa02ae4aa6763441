r"""SGC -- Wu et al., ICML 2019, https://arxiv.org/abs/1902.07153, as FedSpray uses it.

.. math:: \mathrm{logits} = \hat A^K X W + b, \qquad \hat A = D^{-1/2} (A + I) D^{-1/2}

K is ``hops``. No hidden layer: widths given for other backbones are not used. :math:`\hat A^K` does not change, so it
is multiplied out once per client, and with X too where that leaves less to do (`isthmus.nn.first_layer_input`).
Initialised as PyG's ``SGConv``: uniform +-1/sqrt(F).
Shapes: x (n, F), edges (2, E) -> logits (n, C); W (F, C), b (C,).
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.graph.normalise import gcn_norm
from isthmus.nn.backbone import Backbone, Common
from isthmus.nn.layers import Layer, LinearLayer


class SGCLayer(LinearLayer):
    """An affine map of propagated features."""

    terms: ClassVar[dict[str, bool]] = {"weight": True}


class SGC(Backbone):
    """Logistic regression on features of the K-hop neighbourhood.

    Args:
        hops: K, at least 1.
    """

    layer_type: ClassVar[type[Layer]] = SGCLayer

    def __init__(self, *, hops: int = 2, **common: Unpack[Common]) -> None:
        if common["head"]:
            raise ConfigError("sgc is one linear map, there is no hidden layer for a head; set head=false")
        if hops < 1:
            raise ConfigError(f"hops must be at least 1, got {hops}")
        common["hidden"] = ()
        super().__init__(**common)
        self.power = hops

    @classmethod
    def make_layer(cls, in_channels: int, out_channels: int, generator: torch.Generator) -> Layer:
        return SGCLayer(in_channels, out_channels, generator)

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        once = gcn_norm(edge_index, num_nodes).astype(np.float64)
        matrix = once
        for _ in range(1, self.power):
            matrix = matrix @ once
        return sp.csr_matrix(matrix, dtype=np.float32)
