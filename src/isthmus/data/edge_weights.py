"""Weights of edges, where models use them (``edge_weights=use``): of a `Data`, of tables, or amounts transferred."""

from __future__ import annotations

import logging
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.from_arrays import both_ways
from isthmus.data.whole_graph import Loaded
from isthmus.errors import DataError

log = logging.getLogger(__name__)

EdgeWeights = Literal["ignore", "use"]


def weighted_arcs(graph: Loaded, use: EdgeWeights, *, undirected: bool) -> tuple[Tensor, Tensor | None]:
    """Arcs (2, E) as models read them, and with ``use`` their weights (E,).

    Used both ways, an edge has the larger of the weights of its two directions; rows that list one direction again add
    up. So an edge that is stored in both directions keeps its weight. An edge of weight 0 is none.
    """
    arcs, nodes = graph.data.edge_index, graph.data.num_nodes
    if use == "ignore":
        if graph.edge_weight is not None:
            log.warning(
                "edge_weight changes nothing here: set edge_weights=use, or make features of nodes of it, such as the "
                "sum and mean over a node's edges"
            )
        return (both_ways(arcs, nodes) if undirected else arcs), None
    weight = checked(_given(graph))
    arcs, weight = arcs[:, weight > 0], weight[weight > 0]
    if not undirected:
        return arcs, weight
    both = both_ways(arcs, nodes)
    forward, back = (_totals(both, ends, weight, nodes) for ends in (arcs, arcs.flip(0)))
    return both, torch.from_numpy(np.maximum(forward, back)).to(weight.dtype)


def checked(weight: Tensor) -> Tensor:
    """The weights as float32; raises unless all are finite and at least 0."""
    weight = weight.to(torch.float32)
    wrong = torch.nonzero(~(torch.isfinite(weight) & (weight >= 0))).flatten()
    if wrong.numel():
        first = int(wrong[0])
        raise DataError(
            f"{wrong.numel()} of {weight.numel()} edge weights are negative or not finite, the first is number {first} "
            f"({float(weight[first]):g}): correct them, or set edge_weights=ignore"
        )
    return weight


def _given(graph: Loaded) -> Tensor:
    if graph.edge_weight is not None:
        return graph.edge_weight
    if graph.transfers is None:
        raise DataError("these data have no edge weights: give edge_weight, or set edge_weights=ignore")
    known = graph.transfers.without_loops()
    listed = torch.stack([known.source, known.target])
    arcs, nodes = graph.data.edge_index, graph.data.num_nodes
    total = _totals(arcs, listed, known.amount, nodes)
    back = _totals(arcs, listed.flip(0), known.amount, nodes)  # of an arc that stands for a transfer the other way
    return torch.from_numpy(np.where(total > 0, total, back))


def _totals(arcs: Tensor, listed: Tensor, values: Tensor, nodes: int) -> NDArray[np.float64]:
    """Sum of the values listed for each arc, 0 where there are none."""
    codes, wanted = (ends[0].numpy() * nodes + ends[1].numpy() for ends in (arcs, listed))
    different, place = np.unique(codes, return_inverse=True)
    found = np.searchsorted(different, wanted).clip(max=max(0, len(different) - 1))
    known = different[found] == wanted if len(different) else np.zeros(len(wanted), dtype=bool)
    sums = np.bincount(found[known], weights=values.numpy()[known], minlength=len(different))
    total: NDArray[np.float64] = sums[place].astype(np.float64)
    return total
