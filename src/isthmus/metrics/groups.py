"""Scores of parts of the test nodes: minority and majority classes, degrees (FedSpray, sections 1 and 7).

The majority class of a client is the most frequent label among its *training* nodes; nodes of another class are its minority nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.metrics.scores import Count, pooled


def majority_class(y: Tensor, train: Tensor) -> int | None:
    """Most frequent class among training nodes, the lowest of equals; None without labelled training nodes."""
    labels = y[train]
    labels = labels[labels >= 0]
    return int(torch.bincount(labels).argmax()) if labels.numel() else None


def minority_mask(y: Tensor, train: Tensor) -> Tensor:
    """Labelled nodes of another class than the majority class (n,); all False where there is no majority class."""
    majority = majority_class(y, train)
    return torch.zeros_like(train) if majority is None else (y != majority) & (y >= 0)


def count_correct(predicted: Tensor, y: Tensor, mask: Tensor) -> Count:
    """Correct predictions among the nodes of a mask."""
    return Count(int((predicted[mask] == y[mask]).sum()), int(mask.sum()))


@dataclass(frozen=True)
class MinorityCounts:
    """Test counts of one client, apart by its majority class."""

    majority: Count
    minority: Count


def minority_counts(predicted: Tensor, y: Tensor, train: Tensor, test: Tensor) -> MinorityCounts:
    """Correct test predictions of one client among majority and minority nodes. Without a majority class both are empty."""
    if majority_class(y, train) is None:
        return MinorityCounts(Count(0, 0), Count(0, 0))
    minority = minority_mask(y, train)
    return MinorityCounts(count_correct(predicted, y, test & ~minority), count_correct(predicted, y, test & minority))


def minority_accuracy(counts: Mapping[str, MinorityCounts]) -> float | None:
    """Pooled over clients, as FedSpray reports it (the mean of client scores is up to ten points lower)."""
    return pooled(count.minority for count in counts.values())


def majority_accuracy(counts: Mapping[str, MinorityCounts]) -> float | None:
    """Pooled over clients."""
    return pooled(count.majority for count in counts.values())


def group_mean(values: Tensor, mask: Tensor) -> float | None:
    """Mean of the known (not NaN) values of a group, e.g. of node homophily; None where there are none."""
    known = values[mask & ~values.isnan()]
    return float(known.double().mean()) if known.numel() else None


@dataclass(frozen=True)
class DegreeBucket:
    """Test nodes whose degree lies in [low, high); ``high`` is None for the last bucket."""

    low: int
    high: int | None
    count: Count


def by_degree(
    predicted: Tensor, y: Tensor, mask: Tensor, degree: Tensor, bounds: Sequence[int] = (0, 1, 2, 4, 8, 16)
) -> list[DegreeBucket]:
    """Correct predictions by degree; ``bounds`` are the lower ends of the buckets, ascending from 0."""
    if not bounds or bounds[0] != 0 or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise ConfigError(f"degree buckets must start at 0 and ascend, got {list(bounds)}")
    ends: list[int | None] = [*bounds[1:], None]
    buckets = []
    for low, high in zip(bounds, ends, strict=True):
        inside = mask & (degree >= low) & (degree < high if high is not None else torch.ones_like(mask))
        buckets.append(DegreeBucket(low, high, count_correct(predicted, y, inside)))
    return buckets
