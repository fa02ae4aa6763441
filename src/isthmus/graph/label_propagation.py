"""Label propagation, of which FedGTA makes what its clients report and AdaFGL its homophily."""

from __future__ import annotations

import scipy.sparse as sp
import torch
from torch import Tensor


def propagated(matrix: sp.csr_matrix, start: Tensor, known: Tensor, *, steps: int, mix: float) -> Tensor:
    r"""Y after so many steps of :math:`Y \leftarrow mix \, \hat A Y + (1 - mix) Y^0`, each followed by
    :math:`Y_{known} \leftarrow Y_{known} + Y^0_{known}`. (n, C)

    Args:
        matrix: :math:`\hat A` (n, n).
        start: :math:`Y^0` (n, C), float64: labels in the rows of known nodes.
        known: Those nodes, as a mask or as positions.
        mix: Share of the neighbours in a step.
    """
    spread, y = matrix.astype("float64"), start.clone()
    for _ in range(steps):
        y = mix * torch.from_numpy(spread @ y.numpy()) + (1.0 - mix) * start
        y[known] += start[known]
    return y
