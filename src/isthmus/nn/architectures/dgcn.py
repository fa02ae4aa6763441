r"""Decoupled GCN: learn first, propagate after -- FedStruct's feature branch (Aliakbari, Östman & Graell i Amat, 2024,
https://arxiv.org/abs/2402.19163), after Dong et al., WWW 2021, https://arxiv.org/abs/2010.12408.

.. math:: H = \hat A^{L}\, \mathrm{MLP}(X), \qquad \hat A = \tilde D^{-1} (A + I), \text{ row = source}

L is ``hops``. The power is never formed: L sparse products on as many columns as the MLP puts out. Only rows that
training nodes reach take part.
Shapes: x (n, F), edges (2, E) -> logits (n, C); MLP weights (in, out), initialised as ``torch.nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.graph.normalise import row_norm
from isthmus.nn.architecture import Architecture, Drop
from isthmus.nn.layers import Conv, Hop, LinearLayer, Propagation
from isthmus.tensors import Weights


@dataclass(frozen=True)
class DGCN(Architecture):
    """The decoupled GCN.

    Args:
        hops: L, number of propagations.
    """

    aliases: ClassVar[tuple[str, ...]] = ("decoupled-gcn",)
    conv_type: ClassVar[type[Conv]] = LinearLayer
    edge_weights: ClassVar[bool] = True
    hops: int = 2

    def __post_init__(self) -> None:
        if self.hops < 0:
            raise ConfigError(f"hops must be at least 0, got {self.hops}")

    @property
    def propagation_after(self) -> Propagation:
        return row_norm

    @property
    def hops_after(self) -> int:
        return self.hops

    def after_layers(self, weights: Weights, z: Tensor, hops: Sequence[Hop], drop: Drop) -> Tensor:
        for hop in hops:
            z = hop.propagator @ z
        return z
