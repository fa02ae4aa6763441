"""Scores by name, for ``--metric``. All of them: the higher, the better.

accuracy             right answers over all answers
balanced_accuracy    mean over classes of the share found
macro_f1             mean over classes of F1
auroc, auprc         of class 1 in a two-class task, mean over classes in others
recall@K             share of class 1 among the K highest scores, e.g. recall@100
recall@pP            largest recall of class 1 at precision P or better, e.g. recall@p0.9
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from isthmus.errors import ConfigError, unknown
from isthmus.metrics.histogram import balanced_accuracy_of, macro, macro_f1_of, recall_at_k_of, recall_at_precision_of

NAMES = ("accuracy", "auprc", "auroc", "balanced_accuracy", "macro_f1", "recall@100", "recall@p0.9")


@dataclass(frozen=True)
class NamedMetric:
    """A score formed from counts that add up over clients: ``of(confusion, histogram)``, see
    `isthmus.metrics.histogram`.
    """

    name: str
    of: Callable[[Tensor, Tensor], float | None]


def parse_metric(name: str) -> NamedMetric | None:
    """The score of this name; None for accuracy, which needs no more than right and all answers."""
    if name == "accuracy":
        return None
    simple: dict[str, Callable[[Tensor, Tensor], float | None]] = {
        "balanced_accuracy": lambda confusion, _: balanced_accuracy_of(confusion),
        "macro_f1": lambda confusion, _: macro_f1_of(confusion),
        "auroc": lambda _, histogram: macro(histogram, "auroc"),
        "auprc": lambda _, histogram: macro(histogram, "auprc"),
    }
    if name in simple:
        return NamedMetric(name, simple[name])
    match = re.fullmatch(r"recall@(p?)([0-9.]+)", name)
    if match is None:
        raise unknown("metric", name, NAMES)
    try:
        return _recall(name, precision=float(match[2])) if match[1] else _recall(name, k=int(match[2]))
    except ValueError:
        raise unknown("metric", name, NAMES) from None


def _recall(name: str, *, k: int = 0, precision: float = 0.0) -> NamedMetric:
    if precision:
        if not 0.0 < precision <= 1.0:
            raise ConfigError(f"metric {name}: the precision must lie in (0, 1]")
        return NamedMetric(name, lambda _, histogram: recall_at_precision_of(_positive(histogram), precision))
    if k < 1:
        raise ConfigError(f"metric {name}: write recall@K with K at least 1, or recall@pP with P in (0, 1]")
    return NamedMetric(name, lambda _, histogram: recall_at_k_of(_positive(histogram), k))


def _positive(histogram: Tensor) -> Tensor:
    if histogram.shape[0] != 2:
        raise ConfigError(
            f"recall at a threshold is for two-class tasks; this one has {histogram.shape[0]} classes: use macro_f1 or "
            "auprc"
        )
    return histogram[1]
