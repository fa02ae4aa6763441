"""How well one client's model does, as counts: enough for pooled and per-client scores, and nothing about a single
node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.federation.messages import Count, LabelStatistic, Message, Metric
from isthmus.metrics.histogram import score_histogram


@dataclass(frozen=True)
class Tally(Message):
    """Right answers, all answers, and the summed loss, of some samples."""

    correct: Metric[int]
    total: Count[int]
    loss: Metric[float]


@dataclass(frozen=True)
class Evaluation(Message):
    """One client's tallies by part: ``train``, ``val``, ``test``, and groups of the test part such as
    ``test:minority``. Groups of classes make it a statistic of labels, beside the counts and scores in each tally.
    """

    parts: LabelStatistic[Mapping[str, Tally]]


@dataclass(frozen=True)
class Detail(Message):
    """What scores beyond accuracy need, by part (``val``, ``test``). It tells how many samples of each class a client
    has, so it is asked for only where such a score is wanted (``--metric``).

    confusion: (C, C) counts, row = true class. histogram: (C, 2, B) counts of predicted scores, see
    `isthmus.metrics.histogram`.
    """

    confusion: LabelStatistic[Mapping[str, Tensor]]
    histogram: LabelStatistic[Mapping[str, Tensor]]


def tally(logits: Tensor, y: Tensor, mask: Tensor) -> Tally:
    """Count over the rows in ``mask``. Loss is ordinary cross-entropy whatever the training loss, so curves can be
    compared.
    """
    rows, labels = logits[mask], y[mask]
    if labels.numel() == 0:
        return Tally(0, 0, 0.0)
    loss = torch.nn.functional.cross_entropy(rows, labels, reduction="sum")
    return Tally(int((rows.argmax(1) == labels).sum()), int(labels.numel()), float(loss))


def detail(logits: Tensor, y: Tensor, masks: Mapping[str, Tensor]) -> Detail:
    """Confusion and score histograms of each part."""
    classes = logits.shape[1]
    confusion, histogram = {}, {}
    for part, mask in masks.items():
        rows, labels = logits[mask], y[mask]
        confusion[part] = torch.bincount(labels * classes + rows.argmax(1), minlength=classes * classes).view(
            classes, classes
        )
        histogram[part] = score_histogram(rows, labels)
    return Detail(confusion, histogram)
