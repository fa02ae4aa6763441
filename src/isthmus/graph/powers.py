r"""Powers of a row-normalised adjacency, one owner's rows at a time, and what may be cut from them.

    FedStruct                  here
    Z = sum_l beta_l Ah^l G    `propagate`, without forming a power
    top-k of a block           `keep_largest_by_owner`
    top-k of every row         `keep_largest_per_row`
    top-k over all owners      `Selection`: every owner counts, nobody sees another's entries

A block is scipy CSR, sorted and without duplicates, or a dense array where most of it is filled (`stored`). Entries are
not negative, so cutting only removes mass. Ties are broken by value, then row, then column, so that every party and
every machine cuts the same entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from isthmus.compiling import machine_code

Block = sp.csr_matrix | NDArray[np.floating[Any]]

DENSE_ABOVE = 0.1
"""Share of entries above which a block is kept dense."""

DIGIT_BITS = 11
"""Bits that one question of `Selection` decides."""


def stored(block: Block) -> Block:
    """Dense where more than `DENSE_ABOVE` of it is filled, else sparse."""
    if isinstance(block, np.ndarray):
        return block
    size = block.shape[0] * block.shape[1]
    return block.toarray() if size and block.nnz > DENSE_ABOVE * size else block


def as_csr(block: Block) -> sp.csr_matrix:
    """The block as canonical CSR."""
    matrix = sp.csr_matrix(block)
    matrix.sum_duplicates()
    return matrix


def entries(block: Block) -> int:
    """How many entries are not zero."""
    return int(np.count_nonzero(block) if isinstance(block, np.ndarray) else block.nnz)


def row_mass(block: Block) -> NDArray[np.float64]:
    """Sum of every row; 1 for a full power of a row-stochastic matrix."""
    return np.asarray(block.sum(axis=1, dtype=np.float64)).ravel()


def scaled_rows(block: Block, scale: NDArray[np.floating[Any]]) -> Block:
    """Row r times ``scale[r]``, of the block's own type."""
    if isinstance(block, np.ndarray):
        return block * scale[:, None].astype(block.dtype)
    values = block.data * np.repeat(scale, np.diff(block.indptr)).astype(block.dtype)
    return sp.csr_matrix((values, block.indices, block.indptr), shape=block.shape)


def add(a: Block, b: Block) -> Block:
    """``a + b``, dense if one of them is."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        left, right = (x if isinstance(x, np.ndarray) else x.toarray() for x in (a, b))
        return np.asarray(left + right)
    return sp.csr_matrix(a + b)


def keep_largest_by_owner(block: sp.csr_matrix, owner: NDArray[np.integer[Any]], count: int) -> sp.csr_matrix:
    """The ``count`` largest entries among the columns of each owner.

    Args:
        owner: Owner of every column.
    """
    owners = owner[block.indices]
    kept = np.ones(block.nnz, dtype=bool)
    for one in np.flatnonzero(np.bincount(owners) > count) if block.nnz > count else ():
        places = np.flatnonzero(owners == one)
        kept[places] = _largest(block.data[places], count)
    return _select(block, kept)


def keep_largest_per_row(block: sp.csr_matrix, count: int) -> sp.csr_matrix:
    """The ``count`` largest entries of every row."""
    if not block.nnz or int(np.diff(block.indptr).max()) <= count:
        return block
    kept = np.ones(block.nnz, dtype=bool)
    _mark_rows(block.indptr, block.data, count, kept)
    return _select(block, kept)


class Selection:
    """One owner's part in keeping the k largest entries over the blocks of all owners.

    Entries are ordered by (value descending, row, column), written as digits of `DIGIT_BITS` bits. Digit by digit every
    owner counts its entries that are still undecided (`counts`); whoever adds the counts up knows in which bin the k-th
    entry lies and says so (`decide`). After the last digit, or as soon as a bin is kept whole, every owner knows which
    of its entries stay.

    Args:
        block: The owner's rows, float32.
        row_id: Number of each row among all owners' rows.
    """

    DIGITS = 9

    def __init__(self, block: sp.csr_matrix, row_id: NDArray[np.integer[Any]]) -> None:
        rows = np.repeat(np.asarray(row_id, dtype=np.int64), np.diff(block.indptr))
        # Positive floats are ordered as their bits are.
        descending = 0xFFFFFFFF - np.ascontiguousarray(block.data, dtype=np.float32).view(np.uint32).astype(np.int64)
        self.block = block
        self._parts = (descending, rows, block.indices.astype(np.int64))
        self._kept = np.zeros(block.nnz, dtype=bool)
        self._open = np.arange(block.nnz)

    def counts(self, digit: int) -> NDArray[np.int64]:
        """How many undecided entries have each value of a digit."""
        return np.bincount(self._digit(digit), minlength=1 << DIGIT_BITS)

    def decide(self, digit: int, bin: int, whole: bool) -> None:
        """Entries below ``bin`` stay, entries above go; those in it stay if ``whole``, else the next digit decides."""
        value = self._digit(digit)
        self._kept[self._open[value < bin]] = True
        self._open = self._open[value == bin]
        if whole:
            self._kept[self._open] = True
            self._open = self._open[:0]

    def kept(self) -> sp.csr_matrix:
        return _select(self.block, self._kept)

    def _digit(self, digit: int) -> NDArray[np.int64]:
        part, place = divmod(digit, 3)
        return (self._parts[part][self._open] >> (DIGIT_BITS * (2 - place))) & ((1 << DIGIT_BITS) - 1)


def find_bin(counts: NDArray[np.integer[Any]], wanted: int) -> tuple[int, int, bool]:
    """The bin in which the ``wanted``-th entry lies, how many of that bin are wanted, and whether that is all of it."""
    before = np.concatenate([[0], np.cumsum(counts)])
    bin = int(np.searchsorted(before, wanted, side="left")) - 1
    left = wanted - int(before[bin])
    return bin, left, left == int(counts[bin])


def propagate(
    adjacency: sp.csr_matrix, values: NDArray[np.floating[Any]], betas: Sequence[float], beta0: float = 0.0
) -> NDArray[np.floating[Any]]:
    """``Abar @ values`` without forming a power."""
    total = beta0 * values
    for beta in betas:
        values = adjacency @ values
        total = total + beta * values
    return total


def _largest(values: NDArray[np.floating[Any]], count: int) -> NDArray[np.bool_]:
    """Which of ``values`` are the ``count`` largest; of equal ones the first."""
    if count <= 0:
        return np.zeros(len(values), dtype=bool)
    if count >= len(values):
        return np.ones(len(values), dtype=bool)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    kept = values > threshold
    kept[np.flatnonzero(values == threshold)[: count - int(kept.sum())]] = True
    return np.asarray(kept)


def _select(block: sp.csr_matrix, kept: NDArray[np.bool_]) -> sp.csr_matrix:
    before = np.concatenate([[0], np.cumsum(kept)])
    return sp.csr_matrix((block.data[kept], block.indices[kept], before[block.indptr]), shape=block.shape)


@machine_code
def _mark_rows(indptr: Any, values: Any, count: int, kept: Any) -> None:
    for row in range(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        if end - begin <= count:
            continue
        threshold = np.sort(values[begin:end])[end - begin - count] if count > 0 else np.inf
        left = count
        for j in range(begin, end):
            if values[j] > threshold:
                left -= 1
        for j in range(begin, end):
            if values[j] == threshold and left > 0:
                left -= 1
            elif not values[j] > threshold:
                kept[j] = False


def walk_diagonals(walk: sp.csr_matrix, steps: int, block: int = 256) -> NDArray[np.float64]:
    """(Ah^l)_vv for l = 1 ... steps (n, steps), a block of columns at a time: memory grows with nodes x block."""
    nodes = walk.shape[0]
    found = np.zeros((nodes, steps))
    for begin in range(0, nodes, block):
        columns = np.arange(begin, min(begin + block, nodes))
        reached = np.zeros((nodes, len(columns)))
        reached[columns, np.arange(len(columns))] = 1.0
        for step in range(steps):
            reached = walk @ reached
            found[columns, step] = reached[columns, np.arange(len(columns))]
    return found
