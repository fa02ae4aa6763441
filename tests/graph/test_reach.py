"""Reach equals the support of matrix powers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.graph.normalise import gcn_norm, mean_norm
from isthmus.graph.reach import reach


@pytest.mark.parametrize("hops", [0, 1, 2, 5])
def test_reach_is_the_support_of_the_power(hops: int) -> None:
    edge_index = torch.randint(0, 40, (2, 50), generator=torch.Generator().manual_seed(0))
    matrix = gcn_norm(edge_index, 40)
    seeds = np.zeros(40, dtype=bool)
    seeds[[0, 7]] = True
    power = np.linalg.matrix_power(matrix.toarray().astype(np.float64), hops)
    assert (reach(matrix, seeds, hops) == (power[seeds] > 0).any(axis=0)).all()


def test_seeds_stay_needed_without_self_loops() -> None:
    matrix = mean_norm(torch.tensor([[0, 1], [1, 2]]), 3)  # a path 0 -> 1 -> 2
    assert reach(matrix, np.array([False, False, True]), 1).tolist() == [False, True, True]
    assert reach(matrix, np.array([False, False, True]), 9).tolist() == [True, True, True]


def test_pruned_rows_do_not_change_the_output() -> None:
    edge_index = torch.randint(0, 40, (2, 50), generator=torch.Generator().manual_seed(1))
    matrix, seeds = gcn_norm(edge_index, 40), np.zeros(40, dtype=bool)
    seeds[3] = True
    h = np.random.default_rng(0).normal(size=(40, 2))
    needed = reach(matrix, seeds, 2)
    np.testing.assert_allclose((matrix @ (matrix @ (h * needed[:, None])))[seeds], (matrix @ (matrix @ h))[seeds])
