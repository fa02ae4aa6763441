"""Scores on counts one can work out by hand."""

from __future__ import annotations

import pytest

from isthmus.errors import ConfigError
from isthmus.metrics.scores import Count, accuracy, client_mean, pooled, weighted_mean
from isthmus.metrics.spread import mean_of_client_stds, spread

COUNTS = {"a": Count(9, 10), "b": Count(0, 2), "c": Count(0, 0)}
SCORES = {client: accuracy(count) for client, count in COUNTS.items()}


def test_three_readings_differ() -> None:
    assert pooled(COUNTS.values()) == 9 / 12
    assert client_mean(SCORES.values()) == pytest.approx(0.45)  # the client without test nodes does not count as zero
    assert weighted_mean(SCORES, {"a": 1, "b": 3, "c": 100}) == pytest.approx(0.9 / 4)


def test_undefined_is_none() -> None:
    assert pooled([Count(0, 0)]) is None
    assert client_mean([None]) is None
    assert weighted_mean({"a": 1.0}, {"a": 0.0}) is None


def test_bad_counts_and_weights() -> None:
    with pytest.raises(ConfigError, match="correct <= total"):
        Count(3, 2)
    with pytest.raises(ConfigError, match="no weight for b, c"):
        weighted_mean(SCORES, {"a": 1.0})


def test_spread_is_population_std() -> None:
    summary = spread([1.0, 3.0])
    assert summary is not None and (summary.mean, summary.std, summary.runs) == (2.0, 1.0, 2)
    one = spread([5.0])
    assert one is not None and one.std is None
    assert spread([]) is None
    assert spread([1.0, None]) is None


def test_mean_of_client_stds() -> None:
    scores = [[0.0, 2.0], [2.0, 0.0]]  # the mean over clients never moves, every client does
    assert mean_of_client_stds([[1.0, 2.0, 3.0], [4.0, 4.0, 10.0]]) == pytest.approx((1 + 12**0.5) / 2)
    assert mean_of_client_stds(scores) == pytest.approx(2**0.5)
    assert mean_of_client_stds([[1.0]]) is None
