"""Secure sums of sparse vectors: masks destroy sparsity, so parties first announce where they have entries.

Each announces its positions among dummies; the union is the common support, over which everybody masks a dense vector.
The announcement shows at most *that* an entry may be there, the masked sum shows only totals.

    announce(positions, size) -> receiver;   support = union_support([...], size) -> everybody;   place(positions,
                                             values, support): masked

What remains visible: how many positions a party announced (padded to a power of two), and, since dummies are uniform,
statistics of positions that are far from uniform: a method whose entries cannot be anywhere adds dummies of its own
(`Client.dummy_positions`). A position announced by one party alone and not zero in the total is
that party's value.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError, ProtocolError
from isthmus.privacy.prg import Keystream

Positions = NDArray[np.int64]
DUMMIES = 1.0
"""Default: at least one dummy for every entry."""


def announce(positions: Positions, size: int, dummies: float = DUMMIES) -> Positions:
    """Own positions hidden among uniform dummies, sorted.

    Args:
        size: Positions lie in [0, size).
        dummies: At least so many dummies per entry; the total is the next power of two, or everything.
    """
    own = np.unique(_checked(positions, size, "own positions"))
    if not dummies >= 0:
        raise ConfigError(f"dummies per entry cannot be negative, got {dummies}")
    if dummies == 0:
        return own
    wanted = min(size, 1 << max(1, int(np.ceil(own.size * (1 + dummies))) - 1).bit_length())
    stream = Keystream.fresh()
    announced = own
    if 2 * wanted > size:  # drawing one by one would repeat itself: choose from what is left
        rest = np.setdiff1d(np.arange(size), own, assume_unique=True)
        order = np.argsort(stream.words(rest.size))
        return np.sort(np.concatenate([own, rest[order[: wanted - own.size]]]))
    while announced.size < wanted:
        drawn = np.setdiff1d(stream.below(size, wanted - announced.size).astype(np.int64), announced)
        announced = np.union1d(announced, drawn)
    return announced


def union_support(announcements: Iterable[Positions], size: int) -> Positions:
    """The common support of all announcements, sorted."""
    lists = [_checked(np.asarray(positions), size, "announced positions") for positions in announcements]
    return np.unique(np.concatenate(lists)) if lists else np.empty(0, np.int64)


def place(positions: Positions, values: NDArray[np.float64], support: Positions) -> NDArray[np.float64]:
    """A party's entries over the common support, zero elsewhere; entries at one position add up."""
    if positions.shape != values.shape or positions.ndim != 1:
        raise ValueError(f"{positions.shape} positions do not fit {values.shape} values")
    at = np.searchsorted(support, positions)
    if positions.size and not (support.size and np.array_equal(support[np.minimum(at, support.size - 1)], positions)):
        raise ProtocolError("the common support lacks positions this party announced: the sum would lose them")
    out = np.zeros(support.size)
    np.add.at(out, at, values)
    return out


def _checked(positions: Positions, size: int, what: str) -> Positions:
    if positions.dtype != np.int64 or positions.ndim != 1:
        raise ProtocolError(
            f"{what} must be a list of 64-bit integers, got {positions.dtype} of shape {positions.shape}"
        )
    if positions.size and not (int(positions.min()) >= 0 and int(positions.max()) < size):
        raise ProtocolError(f"{what} must lie in [0, {size})")
    return positions
