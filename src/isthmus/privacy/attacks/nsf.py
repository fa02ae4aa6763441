"""What structure features tell whoever holds them (FedStruct spec, 6.2, 13.8): labels by matching foreign rows of S
with own ones, and rows of S from answered queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.privacy.attacks.result import Recovery

Reals = NDArray[np.floating]
CERTAIN = 1.0 - 1e-6
"""Leverage from which on a node counts as determined."""


def labels_by_matching(own: Reals, labels: NDArray[np.integer], foreign: Reals) -> NDArray[np.int64]:
    """A label for every foreign row: that of the own labelled node whose row points the same way most nearly."""
    unit = [rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12) for rows in (own, foreign)]
    return np.asarray(labels[(unit[1] @ unit[0].T).argmax(axis=1)], dtype=np.int64)


def score_labels(guessed: NDArray[np.integer], truth: NDArray[np.integer], party: str) -> Recovery:
    """Every foreign node gets a guess, so precision and recall are the same."""
    return Recovery("labels_by_matching_nsf", party, len(guessed), int((guessed == truth).sum()), len(truth))


@dataclass(frozen=True)
class SolvedRows:
    """Rows of S that answers determine: which nodes, and their values."""

    nodes: NDArray[np.int64]
    values: NDArray[np.float64]

    def score(self, truth: Reals, party: str, tolerance: float = 1e-6) -> Recovery:
        right = np.abs(self.values - truth[self.nodes]).max(axis=1, initial=0.0) <= tolerance
        return Recovery("rows_from_queries", party, len(self.nodes), int(right.sum()), len(truth))


def rows_from_queries(queries: Reals, answers: Reals) -> SolvedRows:
    """s_u of every node u whose unit vector lies in the row space of the queries: answers = queries S.

    Args:
        queries: Coefficients, one row per answered query (k, m).
        answers: Sums (k, d).
    """
    solved, *_ = np.linalg.lstsq(queries.astype(np.float64), answers.astype(np.float64), rcond=1e-10)
    _, values, basis = np.linalg.svd(queries.astype(np.float64), full_matrices=False)
    kept = basis[values > 1e-10 * max(1.0, values.max(initial=0.0))]
    nodes = np.flatnonzero((kept * kept).sum(axis=0) >= CERTAIN)
    return SolvedRows(nodes, np.asarray(solved[nodes], dtype=np.float64))
