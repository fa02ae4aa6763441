"""How often neighbours share a label."""

from __future__ import annotations

from torch import Tensor


def edge_homophily(edge_index: Tensor, y: Tensor) -> float | None:
    """Share of arcs whose ends have the same label; arcs with an unlabelled end (y < 0) do not count. None without
    arcs.
    """
    source, target = y[edge_index[0]], y[edge_index[1]]
    known = (source >= 0) & (target >= 0)
    total = int(known.sum())
    return float((source[known] == target[known]).sum()) / total if total else None
