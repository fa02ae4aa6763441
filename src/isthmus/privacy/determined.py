"""Which unknowns of a linear system are determined by it: what somebody can work out who is told sums over known sets.

Unknown j of M x = y is determined for every y if and only if its unit vector lies in the row space of M. A row with a
single unknown determines it; taken out of the other rows, it may leave others alone (peeling, linear in the entries).
What peeling leaves falls into connected parts, each decided by its rank. Values are found the same way: by substitution
where rows were peeled, by a pseudo-inverse in the parts, so that no matrix of all rows and unknowns is formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.linalg
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

LARGEST = 3000
"""Unknowns of a connected part up to which its rank is computed; of a larger one only peeling counts."""


@dataclass(frozen=True)
class _Part:
    """A connected part of what peeling leaves, and which of its unknowns are determined."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    dense: NDArray[np.float64]
    found: NDArray[np.bool_]

    @cached_property
    def inverse(self) -> NDArray[np.float64]:
        """From the rows' sums to the determined unknowns."""
        inverse: NDArray[np.float64] = np.asarray(np.linalg.pinv(self.dense)[self.found], dtype=np.float64)
        return inverse


class Equations:
    """M x = y: which unknowns it determines, and their values.

    Of a connected part with more than `LARGEST` unknowns left after peeling, some that are determined may be missed.
    """

    def __init__(self, matrix: sp.csr_matrix) -> None:
        rows = sp.csr_matrix(matrix, dtype=np.float64, copy=True)
        rows.sum_duplicates()
        rows.eliminate_zeros()
        self._columns = sp.csc_matrix(rows)
        self._peeled = _peel(rows, self._columns)
        self.determined: NDArray[np.bool_] = np.zeros(rows.shape[1], dtype=bool)
        """Unknowns that y determines. (n,)"""
        self.determined[[column for _, column in self._peeled]] = True
        self._parts = [part for part in _parts(rows, self.determined) if part.found.any()]
        for part in self._parts:
            self.determined[part.columns[part.found]] = True

    def solve(self, sums: NDArray[np.floating]) -> NDArray[np.float64]:
        """Values of the determined unknowns from y (rows, c); zeros for the others. (n, c)"""
        rest, columns = sums.astype(np.float64), self._columns
        values = np.zeros((columns.shape[1], sums.shape[1]))
        for row, column in self._peeled:
            entries = slice(columns.indptr[column], columns.indptr[column + 1])
            touched, weights = columns.indices[entries], columns.data[entries]
            values[column] = rest[row] / weights[touched == row]
            rest[touched] -= weights[:, None] * values[column]
        for part in self._parts:
            values[part.columns[part.found]] = part.inverse @ rest[part.rows]
        return values


def determined(matrix: sp.csr_matrix) -> NDArray[np.bool_]:
    """Columns of a matrix whose unknowns are determined (`Equations`). (n,)"""
    return Equations(matrix).determined


def _parts(matrix: sp.csr_matrix, found: NDArray[np.bool_]) -> list[_Part]:
    """Connected parts of the unknowns that peeling did not find, but for those above `LARGEST`."""
    left = np.flatnonzero(~found & (np.bincount(matrix.indices, minlength=matrix.shape[1]) > 0))
    rest = sp.csr_matrix(matrix[:, left])
    kept = np.flatnonzero(np.diff(rest.indptr) > 0)
    rest = sp.csr_matrix(rest[kept])
    entries, size = rest.tocoo(), len(kept) + len(left)
    joined = sp.csr_matrix((np.ones(entries.nnz), (entries.row, entries.col + len(kept))), shape=(size, size))
    count, label = connected_components(joined, directed=False)
    order, ends = np.argsort(label, kind="stable"), np.cumsum(np.bincount(label, minlength=count))
    parts = []
    for members in np.split(order, ends[:-1]) if size else ():
        rows, columns = members[members < len(kept)], members[members >= len(kept)] - len(kept)
        if columns.size <= LARGEST:
            dense = rest[rows][:, columns].toarray()
            parts.append(_Part(kept[rows], left[columns], dense, _in_row_space(dense)))
    return parts


def _peel(matrix: sp.csr_matrix, columns: sp.csc_matrix) -> list[tuple[int, int]]:
    """Rows with one unknown left, each with that unknown, in the order in which they are found."""
    left, alone = np.diff(matrix.indptr).copy(), np.zeros(matrix.shape[0], dtype=np.int64)
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    np.add.at(alone, rows, matrix.indices)  # sum of the columns that are left: of one column, that column
    found = np.zeros(matrix.shape[1], dtype=bool)
    order: list[tuple[int, int]] = []
    waiting = list(np.flatnonzero(left == 1))
    while waiting:
        row = int(waiting.pop())
        if left[row] != 1 or found[alone[row]]:
            continue
        column = int(alone[row])
        found[column] = True
        order.append((row, column))
        for touched in columns.indices[columns.indptr[column] : columns.indptr[column + 1]]:
            left[touched] -= 1
            alone[touched] -= column
            if left[touched] == 1:
                waiting.append(touched)
    return order


def _in_row_space(dense: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Unit vectors that are sums of rows: those without a part in the null space."""
    null = scipy.linalg.null_space(dense)
    inside: NDArray[np.bool_] = np.abs(null).max(axis=1, initial=0.0) < 1e-8
    return inside
