"""Scores by name, for ``--metric``. All of them: the higher, the better.

A score is a function of counts that add up over clients, the confusion matrix and the histogram of predicted scores
(`isthmus.metrics.histogram`). A new one needs nothing but its function, in any file of this package or of your own::

    @METRICS.register("balanced_accuracy")
    def balanced_accuracy(confusion: Tensor, histogram: Tensor) -> float | None: ...

A score with a parameter, such as ``recall@100``, is a function of what follows the ``@`` that returns such a function.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from isthmus.errors import unknown
from isthmus.registry import Registry

Metric = Callable[[Tensor, Tensor], float | None]
"""``(confusion, histogram) -> score``; None where the score is not defined."""

METRICS: Registry[Metric] = Registry("metric", "isthmus.metrics")
METRIC_FORMS: Registry[Callable[[str], Metric]] = Registry("metric", "isthmus.metrics")
"""Scores with a parameter, by an example of their form; what precedes the ``@`` is the name."""

ACCURACY = "accuracy"


def parse_metric(name: str) -> Metric | None:
    """The score of this name; None for accuracy, which needs no more than right and all answers."""
    if name == ACCURACY:
        return None
    if name in METRICS:
        return METRICS[name]
    kind, at, parameter = name.partition("@")
    forms = {example.partition("@")[0]: form for example, form in METRIC_FORMS.items()}
    if not at or kind not in forms:
        raise unknown("metric", name, [ACCURACY, *METRICS, *METRIC_FORMS])
    return forms[kind](parameter)
