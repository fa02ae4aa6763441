"""Ranking scores from added-up counts agree with the exact ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as exact

from isthmus.metrics.histogram import (
    auprc_of,
    auroc,
    auroc_of,
    balanced_accuracy,
    macro_f1,
    recall_at_k_of,
    recall_at_precision_of,
    score_histogram,
)


def sample(seed: int, n: int = 3000, classes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = (
        (torch.rand(n, generator=generator) < 0.06).long()
        if classes == 2
        else torch.randint(classes, (n,), generator=generator)
    )
    logits = torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), y] += 1.0
    return logits, y


@pytest.mark.parametrize("seed", range(4))
def test_scores_of_a_rare_class_equal_the_exact_ones_to_a_thousandth(seed: int) -> None:
    logits, y = sample(seed)
    score, counts = (logits[:, 1] - logits[:, 0]).numpy(), score_histogram(logits, y)[1]
    assert auroc_of(counts) == pytest.approx(exact.roc_auc_score(y, score), abs=1e-3)
    assert auprc_of(counts) == pytest.approx(exact.average_precision_score(y, score), abs=2e-3)
    found = y.numpy()[np.argsort(-score, kind="stable")[:100]].sum() / int(y.sum())
    assert recall_at_k_of(counts, 100) == pytest.approx(found, abs=5e-3)
    precision, recall, _ = exact.precision_recall_curve(y, score)
    assert recall_at_precision_of(counts, 0.3) == pytest.approx(recall[precision >= 0.3].max(), abs=2e-2)


def test_counts_of_clients_add_up_to_the_counts_of_all() -> None:
    logits, y = sample(9, classes=4)
    whole = score_histogram(logits, y)
    assert torch.equal(whole, score_histogram(logits[:1000], y[:1000]) + score_histogram(logits[1000:], y[1000:]))
    assert whole.sum() == 4 * len(y) and whole[:, 0].sum() == len(y)
    assert auroc(torch.empty(0), whole) == pytest.approx(sum(float(auroc_of(whole[c]) or 0.0) for c in range(4)) / 4)


def test_perfect_and_random_and_absent() -> None:
    y = torch.tensor([0, 0, 0, 1])
    perfect = score_histogram(torch.tensor([[3.0, 0.0]] * 3 + [[0.0, 3.0]]), y)[1]
    assert (
        auroc_of(perfect)
        == auprc_of(perfect)
        == recall_at_k_of(perfect, 1)
        == recall_at_precision_of(perfect, 1.0)
        == 1.0
    )
    tied = score_histogram(torch.zeros(4, 2), y)[1]
    assert auroc_of(tied) == 0.5 and auprc_of(tied) == 0.25
    none = score_histogram(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))[1]
    assert auroc_of(none) is None and auprc_of(none) is None and recall_at_k_of(none, 5) is None
    assert score_histogram(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)).sum() == 0


@pytest.mark.parametrize("seed", range(3))
def test_scores_from_a_confusion_matrix_equal_the_exact_ones(seed: int) -> None:
    logits, y = sample(seed, classes=5)
    guess = logits.argmax(1)
    confusion = torch.bincount(y * 5 + guess, minlength=25).view(5, 5)
    nothing = torch.empty(0)
    assert balanced_accuracy(confusion, nothing) == pytest.approx(exact.balanced_accuracy_score(y, guess), abs=1e-6)
    assert macro_f1(confusion, nothing) == pytest.approx(exact.f1_score(y, guess, average="macro"), abs=1e-6)
