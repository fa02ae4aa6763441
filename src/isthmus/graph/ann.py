"""Approximate nearest neighbours for large graphs, through faiss (extra ``ann``): the interface of `isthmus.graph.knn`.

An inverted file: rows are grouped around centres, and a row is compared with the groups nearest to it only. With n
rows, about 4 sqrt(n) centres and a fixed number of groups looked at, a search costs about n^1.5 instead of n^2. A fixed
seed gives the same neighbours every time with one thread, as runs have by default.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.graph.knn import check_rows, exact

SMALL = 1000
"""Rows below which groups make no sense and the search is exact."""


def approximate(rows: Tensor, k: int, *, groups: int = 32) -> Tensor:
    """Nearly the k nearest other rows of every row, as `isthmus.graph.knn.exact`.

    Args:
        rows: (n, d), each of length one or zero.
        k: Neighbours, from 0 to n - 1.
        groups: How many groups a row is compared with; more finds more of the true neighbours and takes longer.
    """
    rows = check_rows(rows, k)
    count, width = rows.shape
    centres = int(4 * math.sqrt(count))
    if count < SMALL or k == 0 or (k + 1) * centres > groups * count // 2:  # the groups looked at must hold enough rows
        return exact(rows, k)
    faiss = _faiss()
    values = rows.float().numpy()
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, centres, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed, index.cp.niter = 1, 10
    index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, 64  # faiss prints where a centre has fewer
    index.train(values)
    index.add(values)
    index.nprobe = min(groups, centres)
    _, found = index.search(values, k + 1)
    return torch.from_numpy(_self_first(found, k))


def _self_first(found: np.ndarray[Any, np.dtype[np.int64]], k: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Column 0 is the row itself: where the search ranked it elsewhere (ties) it moves, where it missed it the last one
    found goes.
    """
    own = np.arange(len(found), dtype=np.int64)
    others = found.copy()
    others[found == own[:, None]] = -1
    order = np.argsort(others < 0, axis=1, kind="stable")  # those found first, in their order
    others = np.take_along_axis(others, order, axis=1)[:, :k]
    short = np.flatnonzero((others < 0).any(axis=1))
    for row in short:  # too few rows in the groups looked at: the next rows by number
        taken = {int(row), *(int(j) for j in others[row] if j >= 0)}
        spare = (j for j in range(len(found)) if j not in taken)
        others[row] = [j if j >= 0 else next(spare) for j in others[row]]
    return np.concatenate([own[:, None], others], axis=1)


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError:
        raise ConfigError(
            "search=approximate needs faiss: install it with `pip install 'isthmus[ann]'`, or set search=exact"
        ) from None
