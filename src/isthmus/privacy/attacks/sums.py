"""Totals that give a party away, and uploads under a mask used twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from isthmus.privacy.attacks.result import Recovery

Reals = NDArray[np.floating]


def difference_of_sums(totals: Sequence[tuple[Iterable[str], Reals]]) -> dict[str, NDArray[np.float64]]:
    """Single parties' values from totals over several rosters: all that linear algebra can get.

    A party's value is a combination of the totals iff its unit vector is one of the rosters' indicator vectors.
    """
    rosters = [frozenset(roster) for roster, _ in totals]
    parties = sorted(frozenset().union(*rosters))
    if not parties:
        return {}
    indicators = np.array([[float(party in roster) for party in parties] for roster in rosters])  # (q, n)
    values = np.stack([np.asarray(total, dtype=np.float64).ravel() for _, total in totals])
    weights = np.linalg.lstsq(indicators.T, np.eye(len(parties)), rcond=None)[0]  # (q, n)
    reached = np.abs(indicators.T @ weights - np.eye(len(parties))).max(0) < 1e-8
    shape = np.shape(totals[0][1])
    return {party: (weights[:, i] @ values).reshape(shape) for i, party in enumerate(parties) if reached[i]}


@dataclass(frozen=True)
class Determined:
    """What linear equations say of their unknowns.

    Args:
        unknowns: (m,), which of them the equations determine: their unit vectors are combinations of the rows.
        rank: Number of independent equations.
    """

    unknowns: NDArray[np.bool_]
    rank: int


def determined_by_sums(matrix: sp.csr_matrix) -> Determined:
    """Which of m values follow from q sums of them, (q, m): an unknown does iff its leverage is 1. Whoever knows the
    sums then computes it, however many values are in each.
    """
    rows = sp.csr_matrix(matrix, dtype=np.float64)
    found, rank = np.zeros(rows.shape[1], bool), 0
    equation, unknown = rows.nonzero()
    size = sum(rows.shape)
    whole = sp.csr_matrix((np.ones(equation.size), (equation, rows.shape[0] + unknown)), shape=(size, size))
    count, label = connected_components(whole, directed=False)
    by_component = np.argsort(label, kind="stable")
    for members in np.split(by_component, np.searchsorted(label[by_component], np.arange(1, count))):
        equations, unknowns = members[members < rows.shape[0]], members[members >= rows.shape[0]] - rows.shape[0]
        if not equations.size or not unknowns.size:
            continue
        part = rows[equations][:, unknowns].toarray()
        gram = part @ part.T if equations.size <= unknowns.size else part.T @ part
        values, vectors = np.linalg.eigh(gram)
        kept = values > 1e-9 * max(1.0, values[-1])
        basis = vectors[:, kept]
        rotated = basis.T @ part / np.sqrt(values[kept])[:, None] if equations.size <= unknowns.size else basis.T
        found[unknowns] = (rotated**2).sum(0) > 1 - 1e-6
        rank += int(kept.sum())
    return Determined(found, rank)


def mean_parts(totals: Sequence[tuple[Iterable[str], Reals]]) -> dict[str, NDArray[np.float64]]:
    """Every party's mean part, by least squares over totals of many rounds: what changes from round to round averages
    out, what a party always sends remains. Where rosters never change, parties of one roster get the same estimate.
    """
    rosters = [frozenset(roster) for roster, _ in totals]
    parties = sorted(frozenset().union(*rosters))
    indicators = np.array([[float(party in roster) for party in parties] for roster in rosters])  # (q, n)
    values = np.stack([np.asarray(total, dtype=np.float64).ravel() for _, total in totals])
    estimates = np.linalg.lstsq(indicators, values, rcond=None)[0]  # (n, d)
    return dict(zip(parties, estimates, strict=True))


def score_parties(
    recovered: Mapping[str, Reals], truth: Mapping[str, Reals], party: str, tolerance: float = 1e-6
) -> Recovery:
    """Values of single parties against the true ones."""
    right = sum(bool(np.allclose(value, truth[name], rtol=0, atol=tolerance)) for name, value in recovered.items())
    return Recovery("difference_of_sums", party, len(recovered), right, len(truth))


@dataclass(frozen=True)
class MaskDifference:
    """Difference of two uploads.

    Args:
        values: What the first party's numbers exceed the second's by, if both carry the same mask.
        plausible: They do: differences of real numbers are small, those of fresh masks fill all 64 bits.
    """

    values: NDArray[np.float64]
    plausible: bool


def difference_under_one_mask(
    first: NDArray[np.uint64], second: NDArray[np.uint64], fraction_bits: int
) -> MaskDifference:
    """Two uploads of one party under a mask used twice: the mask cancels and the change of its numbers is in the
    clear.
    """
    words = (first - second).view(np.int64)
    # Of uniform words every eighth lies in this middle part; a handful of numbers is enough to tell.
    inside = np.abs(words.astype(np.float64)) < 2.0**60
    return MaskDifference(
        words.astype(np.float64) * 2.0**-fraction_bits, bool(inside.mean() > 0.9) if words.size else False
    )
