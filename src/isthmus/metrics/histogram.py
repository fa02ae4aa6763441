"""Scores from counts that can be added up.

AUROC and AUPRC need the order of all scores, but no party may send its scores and labels one by one. Each sends, per
class, how many of its samples of that class and of the others fall into each of B bins of the predicted log-odds; bins
of different parties add up. With B = 4,096 equal steps of log-odds the result differs from the exact one only by ties
inside a bin (the tests bound it).

    confusion    (C, C)      row = true class
    histogram    (C, 2, B)   [c, 0] samples of class c, [c, 1] all others, by predicted log-odds of c
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.metrics.registry import METRIC_FORMS, METRICS, Metric

BINS = 4096
RANGE = 20.0


def score_histogram(logits: Tensor, y: Tensor) -> Tensor:
    """Counts (C, 2, B) of predicted log-odds, clipped to +-20."""
    classes = logits.shape[1]
    counts = torch.zeros(classes, 2, BINS, dtype=torch.int64)
    if not len(y):
        return counts
    log_p = torch.log_softmax(logits.double(), 1)
    for c in range(classes):
        others = torch.cat([log_p[:, :c], log_p[:, c + 1 :]], 1)
        odds = log_p[:, c] - torch.logsumexp(others, 1) if classes > 1 else log_p[:, c]
        bins = ((odds.clamp(-RANGE, RANGE) + RANGE) / (2 * RANGE) * (BINS - 1)).round().long()
        for row, chosen in ((0, y == c), (1, y != c)):
            counts[c, row] = torch.bincount(bins[chosen], minlength=BINS)
    return counts


def _curve(histogram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positives and negatives per bin from the highest score down, and positives in all."""
    positive, negative = histogram[0].flip(0).double(), histogram[1].flip(0).double()
    return positive, negative, positive.sum()


def auroc_of(histogram: Tensor) -> float | None:
    """Chance that a positive scores above a negative, ties counting half, from one class's (2, B) counts."""
    positive, negative, total = _curve(histogram)
    if not total or not negative.sum():
        return None
    above = positive.cumsum(0) - positive
    return float((negative * (above + positive / 2)).sum() / (total * negative.sum()))


def auprc_of(histogram: Tensor) -> float | None:
    """Average precision from one class's (2, B) counts."""
    positive, negative, total = _curve(histogram)
    if not total:
        return None
    found = positive.cumsum(0)
    precision = found / (found + negative.cumsum(0)).clamp(min=1)
    return float((precision * positive).sum() / total)


def recall_at_k_of(histogram: Tensor, k: int) -> float | None:
    """Share of the positives among the k highest scores; a bin that crosses k counts in proportion."""
    positive, negative, total = _curve(histogram)
    if not total:
        return None
    size = positive + negative
    before = size.cumsum(0) - size
    share = ((k - before) / size.clamp(min=1)).clamp(0, 1)
    return float((share * positive).sum() / total)


def recall_at_precision_of(histogram: Tensor, precision: float) -> float | None:
    """Largest recall of a threshold whose precision is at least the given one; 0 if none reaches it."""
    positive, negative, total = _curve(histogram)
    if not total:
        return None
    found = positive.cumsum(0)
    good = (found / (found + negative.cumsum(0)).clamp(min=1) >= precision) & (positive + negative > 0)
    return float(found[good].max() / total) if bool(good.any()) else 0.0


def mean_over_classes(histogram: Tensor, score: Callable[[Tensor], float | None]) -> float | None:
    """A ranking score of class 1 in a two-class task, of the mean over classes that have one in others."""
    if histogram.shape[0] == 2:
        return score(histogram[1])
    values = [value for value in (score(counts) for counts in histogram) if value is not None]
    return sum(values) / len(values) if values else None


@METRICS.register("auroc")
def auroc(confusion: Tensor, histogram: Tensor) -> float | None:
    """Area under the ROC curve."""
    return mean_over_classes(histogram, auroc_of)


@METRICS.register("auprc")
def auprc(confusion: Tensor, histogram: Tensor) -> float | None:
    """Average precision."""
    return mean_over_classes(histogram, auprc_of)


@METRICS.register("balanced_accuracy")
def balanced_accuracy(confusion: Tensor, histogram: Tensor) -> float | None:
    """Mean over the classes present of the share found."""
    size = confusion.sum(1)
    present = size > 0
    return float((confusion.diagonal()[present] / size[present]).mean()) if bool(present.any()) else None


@METRICS.register("macro_f1")
def macro_f1(confusion: Tensor, histogram: Tensor) -> float | None:
    """Mean over the classes present or predicted of 2 TP / (2 TP + FP + FN)."""
    hit, actual, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    there = actual + predicted > 0
    return float((2 * hit[there] / (actual + predicted)[there]).mean()) if bool(there.any()) else None


@METRIC_FORMS.register("recall@100")
@METRIC_FORMS.register("recall@p0.9")
def recall(parameter: str) -> Metric:
    """Share of class 1 among the K highest scores (``recall@K``), or the largest recall of class 1 at precision P or
    better (``recall@pP``).
    """
    at_precision = parameter.startswith("p")
    try:
        k, precision = (1, float(parameter[1:])) if at_precision else (int(parameter), 1.0)
    except ValueError:
        k, precision = 0, 0.0
    if k < 1 or not 0.0 < precision <= 1.0:
        raise ConfigError(
            f"metric recall@{parameter}: write recall@K with a whole K of at least 1, or recall@pP with P in (0, 1]"
        )

    def score(confusion: Tensor, histogram: Tensor) -> float | None:
        if histogram.shape[0] != 2:
            raise ConfigError(
                f"recall at a threshold is for two-class tasks; this one has {histogram.shape[0]} classes: use "
                "macro_f1 or auprc"
            )
        return recall_at_precision_of(histogram[1], precision) if at_precision else recall_at_k_of(histogram[1], k)

    return score
