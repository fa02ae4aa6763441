"""Ranking scores from added-up counts agree with the exact ones."""

from __future__ import annotations

import pytest
import torch

from isthmus.metrics import classification as exact
from isthmus.metrics.histogram import (
    auprc_of,
    auroc_of,
    balanced_accuracy_of,
    macro,
    macro_f1_of,
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
    assert auroc_of(counts) == pytest.approx(exact.auroc(y.numpy(), score), abs=1e-3)
    assert auprc_of(counts) == pytest.approx(exact.auprc(y.numpy(), score), abs=2e-3)
    assert recall_at_k_of(counts, 100) == pytest.approx(exact.recall_at_k(y.numpy(), score, 100), abs=5e-3)
    assert recall_at_precision_of(counts, 0.3) == pytest.approx(
        exact.recall_at_precision(y.numpy(), score, 0.3), abs=2e-2
    )


def test_counts_of_clients_add_up_to_the_counts_of_all() -> None:
    logits, y = sample(9, classes=4)
    whole = score_histogram(logits, y)
    assert torch.equal(whole, score_histogram(logits[:1000], y[:1000]) + score_histogram(logits[1000:], y[1000:]))
    assert whole.sum() == 4 * len(y) and whole[:, 0].sum() == len(y)
    assert macro(whole, "auroc") == pytest.approx(sum(float(auroc_of(whole[c]) or 0.0) for c in range(4)) / 4)


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
    assert balanced_accuracy_of(confusion) == pytest.approx(exact.balanced_accuracy(y.numpy(), guess.numpy()), abs=1e-6)
    assert macro_f1_of(confusion) == pytest.approx(exact.macro_f1(y.numpy(), guess.numpy()), abs=1e-6)
