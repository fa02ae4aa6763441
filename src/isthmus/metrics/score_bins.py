"""Scores of many clients as a histogram: how far they lie apart, and not whose is whose.

Each client puts its own score into one of `BINS` equal bins of [0, 1]; only the sum of the clients' histograms is seen.
A sum of the scores themselves would say more than their mean: fractions with different denominators can be told apart
in an exact sum. Mean and standard deviation are those of the middles of the bins, so that the mean is wrong by at most
half a bin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BINS = 20
WIDTH = 1.0 / BINS
LEAST_CLIENTS = 5
"""Fewer clients have no histogram: it would nearly be the list of their scores."""


def bin_score(score: float | None) -> list[int]:
    """One client's part of the histogram (B,): a 1 in the bin of its score, nothing where it has none.

    Example:
        >>> bin_score(0.52).index(1)
        10
    """
    counts = [0] * BINS
    if score is not None:
        counts[min(BINS - 1, max(0, math.floor(score * BINS + 1e-9)))] = 1  # 0.15 * 20 is a hair below 3
    return counts


def mean_of_bins(counts: Sequence[int]) -> float | None:
    """Mean of the middles of the bins; None without scores."""
    total = sum(counts)
    return sum(count * _middle(bin) for bin, count in enumerate(counts)) / total if total else None


def std_of_bins(counts: Sequence[int]) -> float | None:
    """Population standard deviation of the middles of the bins; None without scores."""
    mean = mean_of_bins(counts)
    if mean is None:
        return None
    return math.sqrt(sum(count * (_middle(bin) - mean) ** 2 for bin, count in enumerate(counts)) / sum(counts))


def _middle(bin: int) -> float:
    return (bin + 0.5) * WIDTH
