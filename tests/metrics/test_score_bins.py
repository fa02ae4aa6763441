"""Histograms of clients' scores."""

from __future__ import annotations

import random
import statistics

import pytest

from isthmus.metrics.score_bins import BINS, WIDTH, bin_score, mean_of_bins, std_of_bins


def summed(scores: list[float | None]) -> list[int]:
    return [sum(column) for column in zip(*(bin_score(score) for score in scores), strict=True)]


def test_a_score_is_in_one_bin_and_no_score_in_none() -> None:
    assert bin_score(0.15).index(1) == 3, "0.15 * 20 is a hair below 3"
    assert [bin_score(score).index(1) for score in (0.0, 0.0499, 0.05, 0.999, 1.0)] == [0, 0, 1, BINS - 1, BINS - 1]
    assert sum(bin_score(None)) == 0 and mean_of_bins(bin_score(None)) is None and std_of_bins(bin_score(None)) is None


def test_the_mean_is_wrong_by_half_a_bin_at_most() -> None:
    draw = random.Random(3)
    for _ in range(200):
        scores = [draw.random() for _ in range(draw.randint(1, 12))]
        counts = summed([*scores, None])
        mean, std = mean_of_bins(counts), std_of_bins(counts)
        assert mean is not None and std is not None and sum(counts) == len(scores)
        assert abs(mean - statistics.fmean(scores)) <= WIDTH / 2 + 1e-12
        assert abs(std - statistics.pstdev(scores)) <= WIDTH / 2 + 1e-12


def test_by_hand() -> None:
    counts = summed([0.51, 0.52, 0.91])
    assert mean_of_bins(counts) == pytest.approx((0.525 + 0.525 + 0.925) / 3)
    assert std_of_bins(counts) == pytest.approx(statistics.pstdev([0.525, 0.525, 0.925]))
