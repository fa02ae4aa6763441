"""Homophily on a graph one can count by hand."""

from __future__ import annotations

import torch

from isthmus.graph.homophily import edge_homophily, node_homophily

EDGES = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 1]])


def test_edge_homophily() -> None:
    assert edge_homophily(EDGES, torch.tensor([0, 0, 1, 0])) == 3 / 5
    assert edge_homophily(EDGES, torch.tensor([0, 0, -1, 0])) == 1.0
    assert edge_homophily(torch.empty(2, 0, dtype=torch.long), torch.tensor([0])) is None


def test_node_homophily_reads_arcs_towards_their_target() -> None:
    found = node_homophily(EDGES, torch.tensor([0, 0, 1, 0]))
    assert found[:3].tolist() == [1.0, 2 / 3, 0.0]  # node 1 hears 0, 2 and 3
    assert bool(found[3].isnan())
