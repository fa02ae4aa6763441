"""How often neighbours share a label."""

from __future__ import annotations

import torch
from torch import Tensor

ARCS = 1 << 22
"""Arcs that are looked at a time: a large graph is not copied for a count."""


def edge_homophily(edge_index: Tensor, y: Tensor) -> float | None:
    """Share of arcs whose ends have the same label; arcs with an unlabelled end (y < 0) do not count. None without
    arcs.
    """
    same = total = 0
    for arcs in torch.split(edge_index, ARCS, dim=1):
        source, target = y[arcs]
        known = (source >= 0) & (target >= 0)
        total += int(known.sum())
        same += int(((source == target) & known).sum())
    return same / total if total else None
