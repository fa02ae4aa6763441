"""Powers of an adjacency: cutting, ties, and the search for the largest entries of several owners."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.graph.powers import (
    Selection,
    add,
    entries,
    find_bin,
    keep_largest_by_owner,
    keep_largest_per_row,
    propagate,
    row_mass,
    scaled_rows,
    stored,
)


def sparse(seed: int, rows: int = 7, columns: int = 9, levels: int = 4) -> sp.csr_matrix:
    """Few different values, so that there are ties."""
    rng = np.random.default_rng(seed)
    dense = rng.integers(0, levels, (rows, columns)) / np.float32(8)
    return sp.csr_matrix(dense.astype(np.float32))


def order(matrix: sp.csr_matrix, row_id: np.ndarray | None = None) -> list[tuple[float, int, int]]:
    """All entries by value, then row, then column."""
    coo = matrix.tocoo()
    rows = coo.row if row_id is None else row_id[coo.row]
    return sorted(zip((-coo.data).tolist(), rows.tolist(), coo.col.tolist(), strict=True))


def as_set(matrix: sp.csr_matrix, row_id: np.ndarray | None = None) -> set[tuple[float, int, int]]:
    return set(order(matrix, row_id))


@given(seed=st.integers(0, 100), count=st.integers(0, 70))
@settings(max_examples=60, deadline=None)
def test_the_largest_entries_stay_and_ties_go_by_row_then_column(seed: int, count: int) -> None:
    matrix = sparse(seed)
    assert as_set(keep_largest_by_owner(matrix, np.zeros(matrix.shape[1], dtype=np.int64), count)) == set(
        order(matrix)[:count]
    )


@given(seed=st.integers(0, 100), count=st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_the_largest_entries_of_each_owners_columns_stay(seed: int, count: int) -> None:
    matrix, owner = sparse(seed), np.array([0, 2, 1, 1, 0, 2, 2, 0, 1])
    expected = set()
    for one in range(3):
        expected |= set([entry for entry in order(matrix) if owner[entry[2]] == one][:count])
    assert as_set(keep_largest_by_owner(matrix, owner, count)) == expected


@given(seed=st.integers(0, 100), count=st.integers(0, 10))
@settings(max_examples=40, deadline=None)
def test_the_largest_entries_of_each_row_stay(seed: int, count: int) -> None:
    matrix = sparse(seed)
    expected = set()
    for row in range(matrix.shape[0]):
        expected |= set([entry for entry in order(matrix) if entry[1] == row][:count])
    assert as_set(keep_largest_per_row(matrix, count)) == expected


@given(seed=st.integers(0, 1000), wanted=st.integers(0, 150), owners=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_owners_who_only_count_keep_exactly_the_largest_of_all(seed: int, wanted: int, owners: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.array_split(rng.permutation(5 * owners), owners)
    blocks = [sparse(seed + k, rows=len(own)) for k, own in enumerate(ids)]
    selections = [Selection(block, own) for block, own in zip(blocks, ids, strict=True)]
    everything = sorted(entry for block, own in zip(blocks, ids, strict=True) for entry in order(block, own))
    if wanted >= len(everything):
        for selection in selections:
            selection.decide(0, 1 << 11, True)
    else:
        left, whole = wanted, False
        for digit in range(Selection.DIGITS):
            if whole:
                break
            bin, left, whole = find_bin(np.sum([selection.counts(digit) for selection in selections], axis=0), left)
            for selection in selections:
                selection.decide(digit, bin, whole)
        assert whole or wanted == 0
    kept = {entry for selection, own in zip(selections, ids, strict=True) for entry in as_set(selection.kept(), own)}
    assert kept == set(everything[:wanted])


def test_propagation_is_the_product_with_the_polynomial() -> None:
    walk = sparse(3, 6, 6)
    walk = sp.csr_matrix(sp.diags(1 / np.maximum(row_mass(walk), 1e-9)) @ walk)
    dense, values = walk.toarray().astype(np.float64), np.random.default_rng(0).normal(size=(6, 2))
    expected = 0.5 * np.eye(6) + 0.3 * dense + 0.2 * np.linalg.matrix_power(dense, 3)
    np.testing.assert_allclose(
        propagate(walk.astype(np.float64), values, (0.3, 0.0, 0.2), 0.5), expected @ values, atol=1e-12
    )


@pytest.mark.parametrize("dense", [False, True])
def test_blocks_are_the_same_sparse_or_dense(dense: bool) -> None:
    matrix = sparse(1)
    block = matrix.toarray() if dense else matrix
    scale = np.arange(7) / 4
    np.testing.assert_array_equal(row_mass(block), matrix.toarray().sum(1))
    scaled = scaled_rows(block, scale)
    scaled_array = scaled if isinstance(scaled, np.ndarray) else scaled.toarray()
    np.testing.assert_array_equal(scaled_array, matrix.toarray() * scale[:, None].astype(np.float32))
    total = add(block, matrix)
    np.testing.assert_array_equal(total if isinstance(total, np.ndarray) else total.toarray(), 2 * matrix.toarray())
    assert entries(block) == matrix.nnz
    assert isinstance(stored(block), np.ndarray)  # more than a tenth is filled
    assert not isinstance(stored(sp.csr_matrix((7, 9), dtype=np.float32)), np.ndarray)
