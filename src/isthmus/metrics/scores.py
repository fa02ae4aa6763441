"""Accuracy of many clients as one number.

Three readings of the same counts, all in use in the literature, so each has its name:

    pooled        correct nodes of all clients / test nodes of all clients
    client mean   plain mean of the clients' accuracies
    weighted      mean of the clients' accuracies with given weights (FedStruct: all nodes of a client, not only test nodes)

A client without test nodes has no accuracy: it is left out of the means. Where nothing is left the score is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.errors import ConfigError


@dataclass(frozen=True)
class Count:
    """Correct answers among ``total``.

    Example:
        >>> Count(3, 4).accuracy
        0.75
    """

    correct: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.total:
            raise ConfigError(f"a count needs 0 <= correct <= total, got {self.correct} of {self.total}")

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.total if self.total else None


def pooled_accuracy(counts: Mapping[str, Count]) -> float | None:
    """All clients' correct answers over all clients' test nodes."""
    total = sum(count.total for count in counts.values())
    return sum(count.correct for count in counts.values()) / total if total else None


def client_mean(counts: Mapping[str, Count]) -> float | None:
    """Unweighted mean of the accuracies of clients that have test nodes."""
    return weighted_mean_accuracy(counts, dict.fromkeys(counts, 1.0))


def weighted_mean_accuracy(counts: Mapping[str, Count], weights: Mapping[str, float]) -> float | None:
    """``sum_k w_k acc_k / sum_k w_k`` over clients that have test nodes; weights by client id, e.g. node counts."""
    if missing := sorted(set(counts) - set(weights)):
        raise ConfigError(f"no weight for {', '.join(missing)}: give one weight per client")
    scored = [(client, accuracy) for client in sorted(counts) if (accuracy := counts[client].accuracy) is not None]
    total = sum(weights[client] for client, _ in scored)
    return sum(weights[client] * accuracy for client, accuracy in scored) / total if total > 0 else None
