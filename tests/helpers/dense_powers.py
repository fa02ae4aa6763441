"""FedStruct's combined adjacency of a whole graph, dense: what protocols over several owners are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray


def combined_adjacency(adjacency: sp.csr_matrix, betas: Sequence[float], beta0: float = 0.0) -> NDArray[np.float64]:
    """``beta0 I + sum_l betas[l-1] Ah^l``; ``adjacency`` is Ah, row-normalised."""
    dense = adjacency.toarray().astype(np.float64)
    total = beta0 * np.eye(len(dense))
    for power, beta in enumerate(betas, start=1):
        total = total + beta * np.linalg.matrix_power(dense, power)
    return np.asarray(total)
