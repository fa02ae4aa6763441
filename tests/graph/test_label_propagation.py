"""Label propagation beside a program that loops over nodes."""

from __future__ import annotations

import pytest
import torch

from isthmus.graph.label_propagation import propagated
from isthmus.graph.normalise import gcn_norm


@pytest.mark.parametrize("as_mask", [True, False])
def test_labels_spread_as_in_a_loop_over_nodes(as_mask: bool) -> None:
    edges = [(0, 1), (1, 2), (2, 3), (1, 3), (4, 0)]
    arcs = torch.tensor([*edges, *((b, a) for a, b in edges)]).T
    start = torch.tensor([[1.0, 0.0], [0.3, 0.7], [0.5, 0.5], [0.0, 1.0], [0.6, 0.4]], dtype=torch.float64)
    known, mix = [0, 3], 0.3
    near = {v: [v, *(b for a, b in edges if a == v), *(a for a, b in edges if b == v)] for v in range(5)}
    rows = start.tolist()
    for _ in range(3):
        spread = [[0.0, 0.0] for _ in range(5)]
        for v, neighbours in near.items():
            for u in neighbours:
                for c in range(2):
                    spread[v][c] += rows[u][c] / (len(near[u]) * len(neighbours)) ** 0.5
        rows = [[mix * spread[v][c] + (1 - mix) * float(start[v, c]) for c in range(2)] for v in range(5)]
        for v in known:
            rows[v] = [rows[v][c] + float(start[v, c]) for c in range(2)]
    mask = torch.zeros(5, dtype=torch.bool)
    mask[known] = True
    found = propagated(gcn_norm(arcs, 5), start, mask if as_mask else torch.tensor(known), steps=3, mix=mix)
    assert torch.allclose(found, torch.tensor(rows, dtype=torch.float64), atol=1e-6)
