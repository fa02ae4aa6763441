"""Mean and spread over repeated runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Mean and population standard deviation (ddof 0) of ``runs`` numbers; ``std`` is None for a single run."""

    mean: float
    std: float | None
    runs: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """Summary over seeds. None if any run has no score: a mean over the lucky seeds would flatter."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return Spread(mean, None, 1)
    return Spread(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in known) / len(known)), len(known))


def mean_of_client_stds(scores: Sequence[Sequence[float]]) -> float | None:
    """Mean over clients of each client's *sample* std (ddof 1) over repeats, as FedStar prints it;
    ``scores[client][repeat]``.

    Not the spread of the averaged score, which is several times smaller: report both.
    """
    if not scores or any(len(row) < 2 for row in scores):
        return None
    return sum(_sample_std(row) for row in scores) / len(scores)


def client_stds(runs: Sequence[Sequence[Mapping[str, Any]] | None], key: str) -> float | None:
    """`mean_of_client_stds` of ``key`` in the rows that results have per client, run by run; None where a client lacks
    it in some run, or a run shows no client's score (secure sums).
    """
    columns = [{row["client"]: row.get(key) for row in rows or ()} for rows in runs]
    scores: list[list[Any]] = [[column.get(client) for column in columns] for client in columns[0]] if columns else []
    return None if any(score is None for row in scores for score in row) else mean_of_client_stds(scores)


def _sample_std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
