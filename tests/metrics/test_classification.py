"""Scores beyond accuracy, against scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from isthmus.errors import ConfigError
from isthmus.metrics.classification import auprc, auroc, balanced_accuracy, macro_f1, recall_at_k, recall_at_precision

Case = list[tuple[int, int, int]]
CASES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=60)


@given(CASES)
def test_equals_scikit_learn(case: Case) -> None:
    y, predicted, _ = np.array(case).T
    assert macro_f1(y, predicted) == pytest.approx(metrics.f1_score(y, predicted, average="macro"))
    present = [metrics.recall_score(y == label, predicted == label) for label in np.unique(y)]
    assert balanced_accuracy(y, predicted) == pytest.approx(np.mean(present))


@given(CASES)
def test_ranking_scores_equal_scikit_learn_with_ties(case: Case) -> None:
    y, _, score = np.array(case).T
    y = (y == 1).astype(int)
    if 0 < y.sum() < len(y):
        assert auroc(y, score) == pytest.approx(metrics.roc_auc_score(y, score))
    else:
        assert auroc(y, score) is None
    if y.sum():
        assert auprc(y, score) == pytest.approx(metrics.average_precision_score(y, score))
        precision, recall, _thresholds = metrics.precision_recall_curve(y, score)
        assert recall_at_precision(y, score, 0.5) == pytest.approx(recall[:-1][precision[:-1] >= 0.5].max(initial=0.0))
    else:
        assert auprc(y, score) is None and recall_at_precision(y, score, 0.5) is None


def test_recall_at_k_by_hand() -> None:
    y, score = [1, 0, 1, 1, 0], [0.9, 0.8, 0.7, 0.1, 0.2]
    assert [recall_at_k(y, score, k) for k in (1, 2, 3, 9)] == [1 / 3, 1 / 3, 2 / 3, 1.0]
    assert recall_at_precision(y, score, 1.0) == 1 / 3
    assert recall_at_k([0, 0], [1, 2], 1) is None


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="2 labels but 1"):
        auroc([0, 1], [0.5])
    with pytest.raises(ConfigError, match="k >= 1"):
        recall_at_k([1], [1], 0)
    with pytest.raises(ConfigError, match="not a number"):
        auprc([0, 1], [0.5, float("nan")])
    assert macro_f1([], []) is None and balanced_accuracy([], []) is None
