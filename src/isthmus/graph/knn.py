r"""Nearest neighbours by cosine: for every row the k other rows of largest :math:`\langle h_i, h_j \rangle`, found
without an n x n matrix.

`exact` takes the rows in blocks: one product gives the similarities of a block to all rows, one pass over each row
finds the k-th largest, a second computes what may belong to the first k again, pair by pair in double precision, and
sorts it. A product of matrices rounds differently for different shapes, the sum of one pair does not, so the result is
the same for every block size; ties go to the lower index.
Memory: block x n similarities.

`isthmus.graph.ann` offers the same interface for graphs too large for that. Both only choose; values and gradients of
the chosen pairs are the caller's (the choice is a constant there, so they equal those of a dense computation).

Shapes: rows (n, d), of length one or zero -> (n, k + 1), int64; column 0 is the row itself, the others from nearest on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.compiling import machine_code
from isthmus.errors import ConfigError, DataError

BLOCK_VALUES = 1 << 24
"""Similarities held at a time (64 MB) where no block size is given."""


def exact(rows: Tensor, k: int, *, block: int | None = None) -> Tensor:
    """The k nearest other rows of every row.

    Args:
        rows: (n, d), each of length one, or zero: a zero row is as near to everything, so it gets the first k others.
        k: Neighbours, from 0 to n - 1.
        block: Rows taken at a time; memory only, the result does not depend on it.
    """
    rows = check_rows(rows, k)
    count = rows.shape[0]
    found = np.empty((count, k + 1), dtype=np.int64)
    step = block or max(1, BLOCK_VALUES // max(1, count))
    # Twice what rounding can change in a product of unit rows: whoever is that near to the k-th is looked at again.
    margin = 4.0 * max(8, rows.shape[1]) * torch.finfo(rows.dtype).eps
    memory = torch.empty(min(step, count), count, dtype=rows.dtype)
    values = rows.numpy()
    for begin in range(0, count, step):
        end = min(begin + step, count)
        similar = torch.mm(rows[begin:end], rows.mT, out=memory[: end - begin])
        _nearest(begin, similar.numpy(), values, k, margin, found)
    return torch.from_numpy(found)


def check_rows(rows: Tensor, k: int) -> Tensor:
    """Contiguous rows that can be searched."""
    if rows.dim() != 2:
        raise DataError(f"neighbours are searched among rows of a matrix, got {rows.dim()} dimensions")
    if not 0 <= k < max(1, rows.shape[0]):
        raise ConfigError(
            f"k must be at least 0 and below the number of nodes {rows.shape[0]}, got {k}; set a smaller k"
        )
    rows = rows.detach().contiguous()
    if not bool(torch.isfinite(rows).all()):
        raise DataError(
            "embeddings hold NaN or infinity, which is near to nothing: check the features, or lower the encoder's lr"
        )
    return rows


@partial(machine_code, error_model="numpy")
def _nearest(
    begin: int, similar: NDArray[Any], rows: NDArray[Any], k: int, margin: float, found: NDArray[np.int64]
) -> None:
    count, width = rows.shape
    top = np.empty(k + 1, dtype=np.float64)
    for r in range(similar.shape[0]):
        own, line = begin + r, similar[r]
        found[own, 0] = own
        if k == 0:
            continue
        top[:] = -np.inf
        for j in range(count):  # the k-th largest, self left out
            if line[j] > top[k - 1] and j != own:
                place = k - 1
                while place > 0 and top[place - 1] < line[j]:
                    top[place] = top[place - 1]
                    place -= 1
                top[place] = line[j]
        least = top[k - 1] - margin
        top[:] = -np.inf
        for j in range(count):
            if line[j] >= least and j != own:
                value = 0.0
                for h in range(width):
                    value += np.float64(rows[own, h]) * np.float64(rows[j, h])
                if value > top[k - 1]:  # an equal one of higher index stays out
                    place = k - 1
                    while place > 0 and top[place - 1] < value:
                        top[place] = top[place - 1]
                        found[own, place + 1] = found[own, place]
                        place -= 1
                    top[place] = value
                    found[own, place + 1] = j
