"""Homophily on a graph one can count by hand."""

from __future__ import annotations

import torch

from isthmus.graph.homophily import edge_homophily

EDGES = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 1]])


def test_edge_homophily() -> None:
    assert edge_homophily(EDGES, torch.tensor([0, 0, 1, 0])) == 3 / 5
    assert edge_homophily(EDGES, torch.tensor([0, 0, -1, 0])) == 1.0
    assert edge_homophily(torch.empty(2, 0, dtype=torch.long), torch.tensor([0])) is None
