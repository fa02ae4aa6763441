"""What a framework makes of the graph, and what its cross edges give away (HiFGL spec, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def graph_information_gain(accuracy: float, local_mlp: float, global_gnn: float) -> float | None:
    """``(ACC - ACC(Local-MLP)) / (ACC(Global) - ACC(Local-MLP))``: 0 = no graph, 1 = the whole graph; may lie outside.
    None where Global is not above Local-MLP: there is no gain to have a share of.
    """
    return (accuracy - local_mlp) / (global_gnn - local_mlp) if global_gnn > local_mlp else None


@dataclass(frozen=True)
class Scored:
    """A method's row in a comparison: its name, its backbone (empty where it has none) and its pooled test score."""

    method: str
    backbone: str
    accuracy: float | None

    @property
    def name(self) -> str:
        return f"{self.method} ({self.backbone})" if self.backbone else self.method


@dataclass(frozen=True)
class Gain:
    """Graph information gain of a row, and what counts as 0 and as 1 in it, e.g. ``local (mlp)`` and ``central
    (gcn)``.
    """

    value: float | None
    zero: str
    one: str


def gains(rows: Sequence[Scored]) -> list[Gain | None]:
    """Gain of each row, in order; None where the rows hold no local and no pooled run to measure it by.

    0 is Local-MLP, as HiFGL defines it, or where there is none Local with the row's backbone; 1 is the pooled run with
    the row's backbone.
    """
    locals_, pooled = ([row for row in rows if row.method in names] for names in (("local",), ("central", "global")))
    blind = [row for row in locals_ if row.backbone == "mlp"]
    found: list[Gain | None] = []
    for row in rows:
        zero, one = _matching(blind or locals_, row), _matching(pooled, row)
        if zero is None or one is None:
            found.append(None)
            continue
        value = None
        if row.accuracy is not None and zero.accuracy is not None and one.accuracy is not None:
            value = graph_information_gain(row.accuracy, zero.accuracy, one.accuracy)
        found.append(Gain(value, zero.name, one.name))
    return found


def _matching(candidates: Sequence[Scored], row: Scored) -> Scored | None:
    """The one with the row's backbone, else the only one."""
    same = [each for each in candidates if each.backbone == row.backbone]
    chosen = same or candidates
    return chosen[0] if len(chosen) == 1 else None


def boundary_nodes(edge_index: Tensor, owner: Tensor) -> Tensor:
    """Nodes with a neighbour at another owner, in either direction (n,)."""
    mask = torch.zeros(owner.numel(), dtype=torch.bool)
    for arcs in torch.split(edge_index, 1 << 22, dim=1):  # a large graph is not copied for this
        mask[arcs[:, owner[arcs[0]] != owner[arcs[1]]].flatten()] = True
    return mask


def subgraph_leakage(edge_index: Tensor, owner: Tensor) -> float | None:
    """eps_p: mean over owners of the share of their nodes that have a neighbour outside. None without nodes."""
    if not owner.numel():
        return None
    sizes = torch.bincount(owner)
    exposed = torch.bincount(owner[boundary_nodes(edge_index, owner)], minlength=sizes.numel())
    held = sizes > 0
    return float((exposed[held].double() / sizes[held].double()).mean())
