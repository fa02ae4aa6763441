r"""SGC -- Wu et al., ICML 2019, https://arxiv.org/abs/1902.07153, as FedSpray uses it.

.. math:: h' = \hat A^K h W + b, \qquad \hat A = D^{-1/2} (A + I) D^{-1/2}

K is ``hops``. One layer, from the features (for graphs, the map before) to the last width: widths between are not used.
:math:`\hat A^K` does not change, so it is multiplied out once per client, and with X too where that leaves less to do.
Initialised as PyG's ``SGConv``: uniform +-1/sqrt(fan_in).
Shapes: x (n, F), edges (2, E) -> logits (n, C); W (F, C), b (C,).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.graph.normalise import gcn_norm
from isthmus.nn.architecture import Architecture
from isthmus.nn.layers import Conv, LinearLayer


@dataclass(frozen=True)
class Power:
    r""":math:`\hat A^K`."""

    hops: int

    def __call__(self, edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None = None, /) -> sp.csr_matrix:
        once = gcn_norm(edge_index, num_nodes, edge_weight).astype(np.float64)
        matrix = once
        for _ in range(1, self.hops):
            matrix = matrix @ once
        return sp.csr_matrix(matrix)


class SGConv(LinearLayer):
    """An affine map of propagated values."""

    weight_terms: ClassVar[Mapping[str, bool]] = {"weight": True}

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator, *, hops: int) -> None:
        super().__init__(in_channels, out_channels, generator)
        self.propagation = Power(hops)


@dataclass(frozen=True)
class SGC(Architecture):
    """Logistic regression on values of the K-hop neighbourhood.

    Args:
        hops: K, at least 1.
    """

    linear: ClassVar[bool] = True
    edge_weights: ClassVar[bool] = True
    hops: int = 2

    def __post_init__(self) -> None:
        if self.hops < 1:
            raise ConfigError(f"hops must be at least 1, got {self.hops}")

    def conv(self, in_channels: int, out_channels: int, generator: torch.Generator, *, classes: bool = False) -> Conv:
        return SGConv(in_channels, out_channels, generator, hops=self.hops)
