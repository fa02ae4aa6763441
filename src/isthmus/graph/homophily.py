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


def node_homophily(edge_index: Tensor, y: Tensor) -> Tensor:
    """Of each node, the share of its neighbours with its label (n,); NaN without neighbours. Arcs are read towards
    their target.
    """
    source, target = edge_index
    same = torch.zeros(len(y), dtype=torch.float64).index_add_(0, target, (y[source] == y[target]).double())
    return same / torch.bincount(target, minlength=len(y))
