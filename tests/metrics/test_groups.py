"""Minority, degree and gain on examples one can count."""

from __future__ import annotations

import pytest
import torch

from isthmus.metrics.gain import Scored, boundary_nodes, gains, graph_information_gain, subgraph_leakage
from isthmus.metrics.groups import majority_class, minority_mask

Y = torch.tensor([0, 1, 1, 2, 2, 2, -1])
TRAIN = torch.tensor([True, True, True, True, False, False, False])


def test_majority_comes_from_training_nodes() -> None:
    assert majority_class(Y, TRAIN) == 1  # class 2 is more frequent, but not among the training nodes
    assert minority_mask(Y, TRAIN).tolist() == [True, False, False, True, True, True, False]
    assert majority_class(Y, torch.zeros(7, dtype=torch.bool)) is None
    assert not minority_mask(Y, torch.zeros(7, dtype=torch.bool)).any()


def test_graph_information_gain() -> None:
    assert graph_information_gain(0.5, 0.5, 0.9) == 0.0
    assert graph_information_gain(0.9, 0.5, 0.9) == 1.0
    assert graph_information_gain(0.5, 0.6, 0.6) is None
    assert graph_information_gain(0.7, 0.6, 0.5) is None  # not -1: Central lies below Local


@pytest.mark.parametrize(
    ("mlp", "whole", "rows"),
    [  # HiFGL spec, section 9: accuracy and printed gain in percent, against Global-GCN and Global-GraphSAGE
        (0.5698, 0.8689, [(0.8095, 80.14), (0.8358, 88.93), (0.8555, 95.52)]),
        (0.6450, 0.7742, [(0.7429, 75.77), (0.7601, 89.09), (0.7724, 98.61)]),
        (0.8051, 0.8583, [(0.8525, 89.10), (0.8603, 103.76), (0.8626, 108.08)]),
        (0.5698, 0.8686, [(0.6207, 17.03), (0.8095, 80.22), (0.8642, 98.53)]),
        (0.6450, 0.7748, [(0.6125, -25.04), (0.7656, 92.91), (0.7791, 103.31)]),
        (0.8051, 0.8623, [(0.8221, 29.72), (0.8444, 68.71), (0.8504, 79.20)]),
    ],
)
def test_gains_of_the_published_table(mlp: float, whole: float, rows: list[tuple[float, float]]) -> None:
    for accuracy, printed in rows:
        gain = graph_information_gain(accuracy, mlp, whole)
        assert gain is not None and 100 * gain == pytest.approx(printed, abs=0.05)


def test_leakage_counts_either_direction() -> None:
    edges = torch.tensor([[0, 1, 4], [1, 2, 3]])  # 1 -> 2 crosses
    owner = torch.tensor([0, 0, 1, 1, 1])
    assert boundary_nodes(edges, owner).tolist() == [False, True, True, False, False]
    assert subgraph_leakage(edges, owner) == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert subgraph_leakage(torch.empty(2, 0, dtype=torch.long), owner) == 0.0


def test_gains_of_a_comparison() -> None:
    """0 is Local-MLP, 1 the pooled run with the row's own backbone."""
    blind, central = Scored("local", "mlp", 0.5), Scored("central", "gcn", 0.9)
    rows = [blind, Scored("local", "gcn", 0.6), Scored("fedavg", "gcn", 0.7), central, Scored("fedavg", "sage", None)]
    found = gains(rows)
    assert [None if gain is None or gain.value is None else round(gain.value, 9) for gain in found] == [
        0.0,
        0.25,
        0.5,
        1.0,
        None,
    ]
    assert {(gain.zero, gain.one) for gain in found if gain is not None} == {("local (mlp)", "central (gcn)")}
    # Without Local-MLP: Local with the row's backbone, and the row says so.
    by_own = gains([Scored("local", "gcn", 0.6), Scored("fedavg", "gcn", 0.75), central])
    assert by_own[1] is not None and by_own[1].zero == "local (gcn)" and by_own[1].value == pytest.approx(0.5)
    # Nothing to measure by, or no telling which.
    assert gains([blind, Scored("fedavg", "gcn", 0.7)]) == [None, None]
    two = gains(
        [blind, central, Scored("central", "sage", 0.8), Scored("fedavg", "gat", 0.7), Scored("fedavg", "sage", 0.65)]
    )
    assert two[3] is None and two[4] is not None and two[4].value == pytest.approx(0.5)
