"""What a framework makes of the graph, and what its cross edges give away (HiFGL, section 6)."""

from __future__ import annotations

import torch
from torch import Tensor


def graph_information_gain(accuracy: float, local_mlp: float, global_gnn: float) -> float | None:
    """``(ACC - ACC(Local-MLP)) / (ACC(Global) - ACC(Local-MLP))``: 0 = no graph, 1 = the whole graph; may lie outside. None if equal."""
    return (accuracy - local_mlp) / (global_gnn - local_mlp) if global_gnn != local_mlp else None


def boundary_nodes(edge_index: Tensor, owner: Tensor) -> Tensor:
    """Nodes with a neighbour at another owner, in either direction (n,)."""
    source, target = edge_index[:, owner[edge_index[0]] != owner[edge_index[1]]]
    mask = torch.zeros(owner.numel(), dtype=torch.bool)
    mask[source] = True
    mask[target] = True
    return mask


def subgraph_leakage(edge_index: Tensor, owner: Tensor) -> float | None:
    """eps_p: mean over owners of the share of their nodes that have a neighbour outside. None without nodes."""
    if not owner.numel():
        return None
    sizes = torch.bincount(owner)
    exposed = torch.bincount(owner[boundary_nodes(edge_index, owner)], minlength=sizes.numel())
    held = sizes > 0
    return float((exposed[held].double() / sizes[held].double()).mean())
