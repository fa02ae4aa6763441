"""Totals that give a party away, and uploads under a mask used twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
