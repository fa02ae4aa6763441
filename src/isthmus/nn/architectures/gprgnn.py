r"""GPR-GNN -- Chien, Peng, Li & Milenkovic, ICLR 2021, https://arxiv.org/abs/2006.07988.

.. math:: Z = \sum_{k=0}^{K} \gamma_k \hat A^k H, \qquad H = \mathrm{MLP}(X), \qquad \hat A = D^{-1/2} (A + I) D^{-1/2}

    paper      here
    K          hops
    alpha      alpha    of the start: :math:`\gamma_k = \alpha (1 - \alpha)^k`, :math:`\gamma_K = (1 - \alpha)^K`
                        (personalised PageRank)
    dprate     dprate   share of H dropped before propagation in training
    gamma      ``gamma`` (K + 1,), learnable; negative ones make the filter high-pass

With gamma at its start this is APPNP. Dropout acts on hidden values, not on the input features; for graphs ``dprate``
stands in place of the dropout after the last layer.
Shapes: x (n, F), edges (2, E) -> logits (n, C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.graph.normalise import gcn_norm
from isthmus.nn.architecture import Architecture, Drop
from isthmus.nn.layers import Conv, Hop, LinearLayer, Propagation
from isthmus.tensors import Weights


@dataclass(frozen=True)
class GPRGNN(Architecture):
    """Generalised PageRank on the output of an MLP.

    Args:
        hops: K.
        alpha: Return probability of the first weights, in [0, 1].
        dprate: Share of the MLP's outputs dropped in training, in [0, 1).
    """

    aliases: ClassVar[tuple[str, ...]] = ("gpr-gnn",)
    conv_type: ClassVar[type[Conv]] = LinearLayer
    edge_weights: ClassVar[bool] = True
    own_dropout: ClassVar[bool] = True
    drops_output: ClassVar[bool] = True
    hops: int = 10
    alpha: float = 0.1
    dprate: float = 0.5

    def __post_init__(self) -> None:
        if self.hops < 0:
            raise ConfigError(f"hops must be at least 0, got {self.hops}")
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha must lie in [0, 1], got {self.alpha}")
        if not 0.0 <= self.dprate < 1.0:
            raise ConfigError(f"dprate must lie in [0, 1), got {self.dprate}")

    @property
    def propagation_after(self) -> Propagation:
        return gcn_norm

    @property
    def hops_after(self) -> int:
        return self.hops

    def first_weights(self) -> dict[str, Tensor]:
        """Weights of personalised PageRank."""
        gamma = self.alpha * (1.0 - self.alpha) ** torch.arange(self.hops + 1, dtype=torch.float64)
        gamma[self.hops] = (1.0 - self.alpha) ** self.hops
        return {"gamma": gamma.float()}

    def after_layers(self, weights: Weights, z: Tensor, hops: Sequence[Hop], drop: Drop) -> Tensor:
        gamma = weights["gamma"]
        z = drop(z, self.dprate)
        total = _weighted(z, gamma, 0)
        for k, hop in enumerate(hops, start=1):
            z = hop.propagator @ z
            total = hop.itself(total) + _weighted(z, gamma, k)
        return total


def _weighted(z: Tensor, gamma: Tensor, k: int) -> Tensor:
    """gamma_k z, client by client where gamma has a client dimension."""
    if gamma.dim() == 1:
        return z * gamma[k]
    return (z.view(gamma.shape[0], -1) * gamma[:, k : k + 1]).view(z.shape)
