"""node2vec: its walks have the probabilities of the paper, its embeddings tell communities apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from isthmus.errors import ConfigError
from isthmus.graph.node2vec import Node2Vec, _walks
from isthmus.graph.normalise import adjacency
from isthmus.seeds import Stream


def both_ways(*edges: tuple[int, int]) -> torch.Tensor:
    return torch.tensor([*edges, *((b, a) for a, b in edges)]).T.contiguous()


def second_steps(p: float, q: float) -> np.ndarray:
    """Where walks 0 -> 1 go on to: 0 is where they come from, 2 a neighbour of 0, 3 and 4 are not."""
    arcs = adjacency(both_ways((0, 1), (1, 2), (0, 2), (1, 3), (1, 4)), 5)
    starts = np.zeros(60_000, dtype=np.int64)
    weights = np.cumsum(arcs.data.astype(np.float64))
    walks = _walks(arcs.indptr.astype(np.int64), arcs.indices.astype(np.int64), weights, starts, 3, 1 / p, 1 / q,
                   np.random.default_rng(0))  # fmt: skip
    onward = walks[walks[:, 1] == 1][:, 2]
    return np.bincount(onward, minlength=5) / len(onward)


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (10.0, 0.2), (0.25, 4.0)])
def test_walks_have_the_probabilities_of_the_paper(p: float, q: float) -> None:
    wanted = np.array([1 / p, 0.0, 1.0, 1 / q, 1 / q])
    np.testing.assert_allclose(second_steps(p, q), wanted / wanted.sum(), atol=0.01)


def test_communities_are_apart_and_isolated_nodes_are_zero() -> None:
    rng = np.random.default_rng(1)
    block = np.arange(60) // 20
    near = np.triu(rng.random((60, 60)) < np.where(block[:, None] == block, 0.4, 0.01), 1)
    edges = torch.from_numpy(np.argwhere(near | near.T).T.copy())
    rows = Node2Vec(dim=16).embed(edges, 62, Stream(3))
    assert not rows[60:].any() and bool(rows[:60].any(dim=1).all()) and bool(torch.isfinite(rows).all())
    unit = torch.nn.functional.normalize(rows[:60])
    alike = (unit @ unit.T).numpy()
    same = block[:, None] == block
    assert alike[same].mean() > alike[~same].mean() + 0.4
    assert torch.equal(rows, Node2Vec(dim=16).embed(edges, 62, Stream(3)))  # same stream, same bits


def test_a_graph_without_edges_and_a_walk_that_ends() -> None:
    assert not Node2Vec(dim=4).embed(torch.zeros(2, 0, dtype=torch.int64), 3, Stream(0)).any()
    ends = Node2Vec(dim=4, epochs=1).embed(torch.tensor([[0], [1]]), 3, Stream(0))
    assert ends[:2].any() and not ends[2].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p": 0.0}, "p must be above 0, got 0.0"),
        ({"q": -1.0}, "q must be above 0"),
        ({"q": float("nan")}, "q must be above 0, got nan"),
        ({"dim": 0}, "dim must be at least 1"),
        ({"walk_length": 1}, "walk_length must be at least 2"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Node2Vec(**settings)
