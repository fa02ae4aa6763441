"""Scores of many clients as one number.

Three readings of the same counts, all in use in the literature, so each has its name:

    pooled        correct nodes of all clients / test nodes of all clients
    client mean   plain mean of the clients' scores
    weighted      mean of the clients' scores with given weights (FedStruct: all nodes of a client, not only test nodes)

A client without test nodes has no score: it is left out of the means. Where nothing is left the score is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from isthmus.errors import ConfigError


@dataclass(frozen=True)
class Count:
    """Correct answers among ``total``.

    Example:
        >>> accuracy(Count(3, 4))
        0.75
    """

    correct: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.total:
            raise ConfigError(f"a count needs 0 <= correct <= total, got {self.correct} of {self.total}")


class Answers(Protocol):
    """Anything that counts correct answers among a total, such as `Count`."""

    @property
    def correct(self) -> int: ...
    @property
    def total(self) -> int: ...


def accuracy(answers: Answers) -> float | None:
    """Correct over all; None without any."""
    return answers.correct / answers.total if answers.total else None


def pooled(answers: Iterable[Answers]) -> float | None:
    """All clients' correct answers over all their answers."""
    counted = list(answers)
    return accuracy(Count(sum(each.correct for each in counted), sum(each.total for each in counted)))


def client_mean(scores: Iterable[float | None]) -> float | None:
    """Unweighted mean over the clients that have a score."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else None


def weighted_mean(scores: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """``sum_k w_k score_k / sum_k w_k`` over the clients that have a score; weights by client id, e.g. node counts."""
    if missing := sorted(set(scores) - set(weights)):
        raise ConfigError(f"no weight for {', '.join(missing)}: give one weight per client")
    known = {client: score for client, score in scores.items() if score is not None}
    total = sum(weights[client] for client in known)
    return sum(weights[client] * score for client, score in known.items()) / total if total > 0 else None


def at_score_round(result: Mapping[str, object], key: str = "test") -> str:
    """The key of a result that holds ``key`` at the round at which its score is read: a table shows one round in a
    row. Results of older versions say it in words only.
    """
    last = str(result.get("score_rule", "")).split(" (")[0].split(", from a histogram")[0].endswith("last round")
    if "score_round" in result:
        last = result["score_round"] != result.get("selected_round")
    return f"{key}_last" if last else key
