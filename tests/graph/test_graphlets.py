"""Graphlet degrees against a count of every induced subgraph (FedStruct spec, section 14: 15)."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from isthmus.errors import DataError
from isthmus.graph.graphlets import ORBITS, Orbit, _canonical, graphlet_degrees, orbits, standardised


def by_hand(adjacent: np.ndarray) -> np.ndarray:
    """Every set of 2 to 5 nodes, looked at."""
    n = len(adjacent)
    place = {orbit: column for column, orbit in enumerate(orbits())}
    counts = np.zeros((n, ORBITS), dtype=np.int64)
    for size in range(2, 6):
        for nodes in combinations(range(n), size):
            for root in nodes:
                order = [root, *(v for v in nodes if v != root)]
                edges = frozenset((a, b) for a, b in combinations(range(size), 2) if adjacent[order[a], order[b]])
                column = place.get(Orbit(size, _canonical(size, edges)))
                if column is not None:  # connected
                    counts[root, column] += 1
    return counts


def arcs_of(adjacent: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.argwhere(adjacent).T.copy())


@pytest.mark.parametrize(("density", "seed"), [(0.25, 0), (0.5, 1), (0.75, 2), (0.9, 3), (1.0, 4)])
def test_counts_equal_those_by_hand(density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.random((9, 9)) < density, 1)
    adjacent = upper | upper.T
    counts = graphlet_degrees(arcs_of(adjacent), 9)
    np.testing.assert_array_equal(counts, by_hand(adjacent))
    np.testing.assert_array_equal(counts[:, 0], adjacent.sum(1))  # orbit 0 is the degree
    np.testing.assert_array_equal(graphlet_degrees(arcs_of(upper), 9), counts)  # an arc is an edge
    assert counts[:, 1:].any() or density < 0.3


def test_there_are_73_places() -> None:
    assert len(orbits()) == ORBITS
    assert [sum(orbit.nodes == size for orbit in orbits()) for size in (2, 3, 4, 5)] == [1, 3, 11, 58]


def test_hubs_are_counted_without_enumeration_and_exactly() -> None:
    """A star of 3,000 leaves has more subgraphs of five nodes than 32 bits hold."""
    leaves = 3000
    arcs = torch.stack([torch.zeros(leaves, dtype=torch.int64), torch.arange(1, leaves + 1)])
    counts = graphlet_degrees(arcs, leaves + 2)
    expected = [leaves * (leaves - 1) // 2, leaves * (leaves - 1) * (leaves - 2) // 6]
    expected.append(expected[1] * (leaves - 3) // 4)
    assert all(number in counts[0] for number in expected) and expected[-1] > 2**32
    assert not counts[-1].any()  # an isolated node


def test_a_loop_is_no_edge_and_an_arc_twice_is_refused() -> None:
    arcs = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 2]])
    assert graphlet_degrees(arcs, 3)[:, 0].tolist() == [1, 2, 1]
    with pytest.raises(DataError, match="lists an arc twice: remove duplicates"):
        graphlet_degrees(torch.cat([arcs, arcs[:, :1]], dim=1), 3)


def test_standardised_columns_have_mean_0_and_variance_1() -> None:
    counts = np.array([[1, 5], [3, 5], [5, 5]])
    values, mean, deviation = standardised(counts)
    np.testing.assert_allclose(values[:, 0].mean(), 0, atol=1e-15)
    np.testing.assert_allclose(values[:, 0].std(), 1)
    assert not values[:, 1].any() and mean.tolist() == [3, 5] and deviation[1] == 1
