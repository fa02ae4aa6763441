r"""GPR-GNN -- Chien, Peng, Li & Milenkovic, ICLR 2021, https://arxiv.org/abs/2006.07988.

.. math:: Z = \sum_{k=0}^{K} \gamma_k \hat A^k H, \qquad H = \mathrm{MLP}(X), \qquad \hat A = D^{-1/2} (A + I) D^{-1/2}

    paper      here
    K          hops
    alpha      alpha    of the start: :math:`\gamma_k = \alpha (1 - \alpha)^k`, :math:`\gamma_K = (1 - \alpha)^K`
                        (personalised PageRank)
    dprate     dprate   share of H dropped before propagation in training
    gamma      ``gamma`` (K + 1,), learnable; negative ones make the filter high-pass

With gamma at its start this is APPNP. Dropout acts on hidden values, not on the input features.
Shapes: x (n, F), edges (2, E) -> logits (n, C).
"""

from __future__ import annotations

from typing import Unpack

import scipy.sparse as sp
import torch
from torch import Tensor, nn

from isthmus.errors import ConfigError
from isthmus.graph.normalise import gcn_norm
from isthmus.nn.backbone import Common
from isthmus.nn.dgcn import Decoupled
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import Inputs
from isthmus.nn.layers import first_rows


def check_gpr(hops: int, alpha: float, dprate: float) -> None:
    """Refuse what no GPR-GNN can have."""
    if hops < 0:
        raise ConfigError(f"hops must be at least 0, got {hops}")
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"alpha must lie in [0, 1], got {alpha}")
    if not 0.0 <= dprate < 1.0:
        raise ConfigError(f"dprate must lie in [0, 1), got {dprate}")


def first_gamma(hops: int, alpha: float) -> Tensor:
    """Weights of personalised PageRank (K + 1,)."""
    gamma = alpha * (1.0 - alpha) ** torch.arange(hops + 1, dtype=torch.float64)
    gamma[hops] = (1.0 - alpha) ** hops
    return gamma.float()


class GPRGNN(Decoupled):
    """Generalised PageRank on the output of an MLP.

    Args:
        hops: K.
        alpha: Return probability of the first weights, in [0, 1].
        dprate: Share of the MLP's outputs dropped in training, in [0, 1).
    """

    def __init__(self, *, hops: int = 10, alpha: float = 0.1, dprate: float = 0.5, **common: Unpack[Common]) -> None:
        super().__init__(num_steps=hops, **common)
        check_gpr(hops, alpha, dprate)
        self.dprate = dprate
        self.gamma = nn.Parameter(first_gamma(hops, alpha))

    @property
    def shared_groups(self) -> tuple[str, ...]:
        return (*super().shared_groups, "gamma")

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        return gcn_norm(edge_index, num_nodes)

    def spread(self, z: Tensor, inputs: Inputs, dropout: DropoutSource | None) -> Tensor:
        if dropout is not None and self.dprate:
            z = z * dropout.mask(inputs.rows[0], inputs.padded[0], z.shape[-1], self.dprate, z.dtype)
        total = self._weighted(z, 0)
        for k, matrix in enumerate(inputs.hidden, start=1):
            z = matrix @ z
            total = first_rows(total, inputs.clients, inputs.padded[k]) + self._weighted(z, k)
        return total

    def _weighted(self, z: Tensor, k: int) -> Tensor:
        """gamma_k z, client by client where gamma has a client dimension."""
        if self.gamma.dim() == 1:
            return z * self.gamma[k]
        return (z.view(self.gamma.shape[0], -1) * self.gamma[:, k : k + 1]).view(z.shape)
