"""Which unknowns of a linear system are determined by it: what somebody can work out who is told sums over known sets.

Unknown j of M x = y is determined for every y if and only if its unit vector lies in the row space of M. A row with a
single unknown determines it; taken out of the other rows, it may leave others alone (peeling, linear in the entries).
What peeling leaves falls into connected parts, each decided by its rank.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

LARGEST = 3000
"""Unknowns of a connected part up to which its rank is computed; of a larger one only peeling counts."""


def determined(matrix: sp.csr_matrix) -> NDArray[np.bool_]:
    """Columns of a matrix whose unknowns are determined. (n,)

    Of a connected part with more than `LARGEST` unknowns left after peeling, some that are determined may be missed.
    """
    rest = sp.csr_matrix(matrix)
    rest.eliminate_zeros()
    found = _peeled(rest)
    left = np.flatnonzero(~found & (np.bincount(rest.indices, minlength=rest.shape[1]) > 0))
    if not left.size:
        return found
    part = sp.csr_matrix(rest[:, left])
    part = sp.csr_matrix(part[np.diff(part.indptr) > 0])
    rows = part.shape[0]
    entries = part.tocoo()
    size = rows + part.shape[1]
    joined = sp.csr_matrix((np.ones(entries.nnz), (entries.row, entries.col + rows)), shape=(size, size))
    count, label = connected_components(joined, directed=False)
    for number in range(count):
        own_rows, own = np.flatnonzero(label[:rows] == number), np.flatnonzero(label[rows:] == number)
        if 0 < own.size <= LARGEST and own_rows.size:
            found[left[own]] = _in_row_space(part[own_rows][:, own].toarray())
    return found


def _peeled(matrix: sp.csr_matrix) -> NDArray[np.bool_]:
    """Unknowns found by rows with one unknown left."""
    columns = sp.csc_matrix(matrix)
    left, alone = np.diff(matrix.indptr).copy(), np.zeros(matrix.shape[0], dtype=np.int64)
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    np.add.at(alone, rows, matrix.indices)  # sum of the columns that are left: of one column, that column
    found = np.zeros(matrix.shape[1], dtype=bool)
    waiting = list(np.flatnonzero(left == 1))
    while waiting:
        row = waiting.pop()
        if left[row] != 1 or found[alone[row]]:
            continue
        column = int(alone[row])
        found[column] = True
        for touched in columns.indices[columns.indptr[column] : columns.indptr[column + 1]]:
            left[touched] -= 1
            alone[touched] -= column
            if left[touched] == 1:
                waiting.append(touched)
    return found


def _in_row_space(dense: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Unit vectors that are sums of rows: those without a part in the null space."""
    null = scipy.linalg.null_space(dense)
    inside: NDArray[np.bool_] = np.abs(null).max(axis=1, initial=0.0) < 1e-8
    return inside
