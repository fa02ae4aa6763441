"""Which rows a propagation needs."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray


def reach(matrix: sp.csr_matrix, seeds: NDArray[np.bool_], hops: int) -> NDArray[np.bool_]:
    """Rows of ``h`` needed for the seed rows after ``hops`` products with ``matrix`` (seeds themselves included).

    Args:
        matrix: A propagation matrix (n, n): row i lists the nodes whose values reach i.
        seeds: Rows wanted in the end (n,).
        hops: Number of propagations, 0 or more.
    """
    needed = np.array(seeds, dtype=bool)
    frontier = np.flatnonzero(needed)
    for _ in range(hops):
        sources = np.unique(matrix[frontier].indices)
        frontier = sources[~needed[sources]]  # rows seen before have been expanded already
        if not len(frontier):
            break
        needed[frontier] = True
    return needed
