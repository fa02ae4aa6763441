"""What a graph learned by FedGGR's server is like, and how much of the lost edges it found again.

    fact                  meaning
    cross_share           share of its edges whose ends have different owners
    homophily             share of its edges whose ends have the same class; ``cross_homophily`` of those between owners
    deleted_recall        share of the edges lost with the partition that are in it
    deleted_precision     share of its edges between owners that are lost ones
    degree_*              neighbours of a node after symmetrisation: one that others choose often has many more than k

Where a fact has a twin ``*_by_chance``, that is its value in a random graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus.data.scenario import Scenario
from isthmus.graph.homophily import edge_homophily
from isthmus.nn.learned_graph import Pattern


def graph_facts(neighbours: Tensor, sizes: Sequence[int], scenario: Scenario | None) -> dict[str, Any]:
    """The facts.

    Args:
        neighbours: Of each node, clients one after another in sorted order (N, k + 1).
        sizes: Nodes of each client.
        scenario: Labels and lost edges, where they are known; without them only what the server itself can tell.
    """
    pattern = Pattern.of(neighbours)
    pairs = torch.stack([torch.from_numpy(pattern.low), torch.from_numpy(pattern.high)])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    cross = owner[pairs[0]] != owner[pairs[1]]
    count = pattern.num_nodes
    everything = count * (count - 1) / 2
    inside = sum(size * (size - 1) / 2 for size in sizes)
    degrees = pattern.degrees().double()
    facts: dict[str, Any] = {
        "edges": pattern.num_pairs,
        "cross_share": _share(cross),
        "cross_share_by_chance": 1.0 - inside / everything,
        **{
            f"degree_{name}": float(degrees.quantile(q))
            for name, q in (("min", 0.0), ("median", 0.5), ("p95", 0.95), ("max", 1.0))
        },
    }
    if scenario is None:
        return facts
    node_id = torch.cat([scenario.parts[client].node_id for client in sorted(scenario.parts)])
    everyone, order = scenario.whole.node_id.sort()
    place = order[torch.searchsorted(everyone, node_id)]  # row of each node in the whole graph
    y = scenario.whole.y[place]
    row = torch.empty_like(place)
    row[place] = torch.arange(count)
    ends = row[scenario.whole.edge_index].sort(dim=0).values
    lost = torch.unique(ends[:, owner[ends[0]] != owner[ends[1]]], dim=1)
    found = torch.isin(pairs[0] * count + pairs[1], lost[0] * count + lost[1])
    return facts | {
        "homophily": edge_homophily(pairs, y),
        "cross_homophily": edge_homophily(pairs[:, cross], y),
        "deleted_edges": lost.shape[1],
        "deleted_homophily": edge_homophily(lost, y),
        "deleted_recall": int(found.sum()) / lost.shape[1] if lost.shape[1] else None,
        "deleted_recall_by_chance": pattern.num_pairs / everything,
        "deleted_precision": _share(found[cross]),
    }


def _share(mask: Tensor) -> float | None:
    return float(mask.double().mean()) if mask.numel() else None
