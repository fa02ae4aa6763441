"""Minority, degree and gain on examples one can count."""

from __future__ import annotations

import pytest
import torch

from isthmus.errors import ConfigError
from isthmus.metrics.gain import boundary_nodes, graph_information_gain, subgraph_leakage
from isthmus.metrics.groups import (
    by_degree,
    group_mean,
    majority_accuracy,
    majority_class,
    minority_accuracy,
    minority_counts,
    minority_mask,
)
from isthmus.metrics.scores import Count

Y = torch.tensor([0, 1, 1, 2, 2, 2, -1])
TRAIN = torch.tensor([True, True, True, True, False, False, False])
TEST = torch.tensor([False, False, True, False, True, True, False])


def test_majority_comes_from_training_nodes() -> None:
    assert majority_class(Y, TRAIN) == 1  # class 2 is more frequent, but not among the training nodes
    assert minority_mask(Y, TRAIN).tolist() == [True, False, False, True, True, True, False]
    assert majority_class(Y, torch.zeros(7, dtype=torch.bool)) is None
    assert not minority_mask(Y, torch.zeros(7, dtype=torch.bool)).any()


def test_minority_accuracy_is_pooled() -> None:
    predicted = torch.tensor([0, 0, 1, 0, 2, 0, 0])
    counts = {
        "a": minority_counts(predicted, Y, TRAIN, TEST),
        "b": minority_counts(torch.tensor([1]), torch.tensor([1]), *[torch.tensor([True])] * 2),
    }
    assert counts["a"].minority == Count(1, 2) and counts["a"].majority == Count(1, 1)
    assert minority_accuracy(counts) == 0.5 and majority_accuracy(counts) == 1.0
    assert minority_accuracy({"b": counts["b"]}) is None


def test_group_mean_skips_unknown() -> None:
    values = torch.tensor([1.0, float("nan"), 0.5, 0.0])
    assert group_mean(values, torch.tensor([True, True, True, False])) == 0.75
    assert group_mean(values, torch.tensor([False, True, False, False])) is None


def test_by_degree() -> None:
    y, predicted = torch.zeros(4, dtype=torch.long), torch.tensor([0, 1, 0, 0])
    buckets = by_degree(predicted, y, torch.tensor([True, True, True, False]), torch.tensor([0, 1, 9, 1]), bounds=(0, 1, 4))
    assert [(b.low, b.high, b.count) for b in buckets] == [(0, 1, Count(1, 1)), (1, 4, Count(0, 1)), (4, None, Count(1, 1))]
    with pytest.raises(ConfigError, match="start at 0"):
        by_degree(predicted, y, y.bool(), y, bounds=(1, 2))


def test_graph_information_gain() -> None:
    assert graph_information_gain(0.5, 0.5, 0.9) == 0.0
    assert graph_information_gain(0.9, 0.5, 0.9) == 1.0
    # HiFGL's Cora row: Local-MLP 56.98, Global-GCN 86.89, HiFGL-GCN 85.55
    assert graph_information_gain(85.55, 56.98, 86.89) == pytest.approx(0.9552, abs=5e-4)
    assert graph_information_gain(0.5, 0.6, 0.6) is None


def test_leakage_counts_either_direction() -> None:
    edges = torch.tensor([[0, 1, 4], [1, 2, 3]])  # 1 -> 2 crosses
    owner = torch.tensor([0, 0, 1, 1, 1])
    assert boundary_nodes(edges, owner).tolist() == [False, True, True, False, False]
    assert subgraph_leakage(edges, owner) == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert subgraph_leakage(torch.empty(2, 0, dtype=torch.long), owner) == 0.0
