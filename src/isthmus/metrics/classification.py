"""Scores beyond accuracy, for skewed classes and rare positives. Each is None where it is not defined."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.errors import ConfigError


def balanced_accuracy(y: ArrayLike, predicted: ArrayLike) -> float | None:
    """Mean over the classes present in ``y`` of the share found. None without nodes."""
    truth, guess = _pair(y, predicted)
    if not len(truth):
        return None
    classes, label = np.unique(truth, return_inverse=True)
    found = np.bincount(label, weights=guess == truth, minlength=len(classes))
    return float((found / np.bincount(label)).mean())


def macro_f1(y: ArrayLike, predicted: ArrayLike) -> float | None:
    """Mean over the classes in ``y`` or ``predicted`` of 2 TP / (2 TP + FP + FN). None without nodes."""
    truth, guess = _pair(y, predicted)
    if not len(truth):
        return None
    scores = []
    for label in np.union1d(truth, guess):
        hit = int(((truth == label) & (guess == label)).sum())
        scores.append(2 * hit / int((truth == label).sum() + (guess == label).sum()))
    return float(np.mean(scores))


def auroc(y: ArrayLike, score: ArrayLike) -> float | None:
    """Chance that a positive (y = 1) scores above a negative, ties counting half. None unless both kinds are there."""
    truth, value = _pair(y, score)
    positive = truth == 1
    hits, total = int(positive.sum()), len(truth)
    if hits in (0, total):
        return None
    rank = _mean_rank(value)
    return float((rank[positive].sum() - hits * (hits + 1) / 2) / (hits * (total - hits)))


def auprc(y: ArrayLike, score: ArrayLike) -> float | None:
    """Average precision: sum over thresholds of precision times recall gained; equal scores share a threshold. None
    without positives.
    """
    curve = _curve(y, score)
    if curve is None:
        return None
    precision, recall = curve
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def recall_at_k(y: ArrayLike, score: ArrayLike, k: int) -> float | None:
    """Share of the positives among the ``k`` highest scores (ties: the earlier first). None without positives."""
    if k < 1:
        raise ConfigError(f"recall at k needs k >= 1, got {k}")
    truth, value = _pair(y, score)
    hits = int((truth == 1).sum())
    top = np.argsort(-value, kind="stable")[:k]
    return float((truth[top] == 1).sum() / hits) if hits else None


def recall_at_precision(y: ArrayLike, score: ArrayLike, precision: float) -> float | None:
    """Largest recall of a threshold whose precision is at least the given one; 0 if no threshold reaches it. None
    without positives.
    """
    if not 0.0 < precision <= 1.0:
        raise ConfigError(f"recall at precision needs a precision in (0, 1], got {precision}")
    curve = _curve(y, score)
    if curve is None:
        return None
    return float(curve[1][curve[0] >= precision].max(initial=0.0))


def _curve(y: ArrayLike, score: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Precision and recall at every distinct score, from the highest down."""
    truth, value = _pair(y, score)
    positive = truth == 1
    if not positive.any():
        return None
    order = np.argsort(-value, kind="stable")
    last = np.append(np.flatnonzero(np.diff(value[order])), len(order) - 1)  # last of every run of equal scores
    hits = np.cumsum(positive[order])[last].astype(np.float64)
    return hits / (last + 1), hits / hits[-1]


def _mean_rank(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank from 1 up, equal values sharing their mean rank."""
    _, label, count = np.unique(value, return_inverse=True, return_counts=True)
    end = np.cumsum(count)
    ranks: NDArray[np.float64] = (end - (count - 1) / 2)[label]
    return ranks


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    first, second = np.asarray(a, dtype=np.float64).ravel(), np.asarray(b, dtype=np.float64).ravel()
    if len(first) != len(second):
        raise ConfigError(f"{len(first)} labels but {len(second)} predictions: give one for each")
    if np.isnan(second).any():
        raise ConfigError("a prediction is not a number: the model has diverged, lower its learning rate")
    return first, second
