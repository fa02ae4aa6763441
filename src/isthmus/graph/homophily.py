"""How often neighbours share a label."""

from __future__ import annotations

import torch
from torch import Tensor


def edge_homophily(edge_index: Tensor, y: Tensor) -> float | None:
    """Share of arcs whose ends have the same label; arcs with an unlabelled end (y < 0) do not count. None without
    arcs.
    """
    source, target = y[edge_index[0]], y[edge_index[1]]
    known = (source >= 0) & (target >= 0)
    total = int(known.sum())
    return float((source[known] == target[known]).sum()) / total if total else None


def node_homophily(edge_index: Tensor, y: Tensor) -> Tensor:
    """Share of each node's in-neighbours with its own label (n,), float64; NaN for nodes without (labelled)
    neighbours.
    """
    source, target = edge_index
    known = (y[source] >= 0) & (y[target] >= 0)
    source, target = source[known], target[known]
    same = torch.zeros(y.numel(), dtype=torch.float64).index_add_(0, target, (y[source] == y[target]).double())
    degree = torch.zeros(y.numel(), dtype=torch.float64).index_add_(
        0, target, torch.ones(target.numel(), dtype=torch.float64)
    )
    return same / degree  # 0 / 0 is NaN, on purpose
