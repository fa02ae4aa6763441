"""Nearest neighbours: FedGGR spec, section 11: 4; ties and bad input."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import ConfigError, DataError
from isthmus.graph import knn
from isthmus.graph.ann import approximate
from isthmus.graph.knn import exact


def unit_rows(count: int, width: int, seed: int = 0) -> Tensor:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).relu()
    return torch.nn.functional.normalize(rows, dim=1)


def dense(rows: Tensor, k: int) -> Tensor:
    """All similarities at once; a stable sort gives ties to the lower index, the row itself comes first.

    Summed column by column: a product of matrices rounds the same pair of rows differently in different places, so its
    ties are not ties (products of float32 are exact in float64, which leaves the order of the sum).
    """
    columns = rows.double().unbind(1)
    similar = sum(
        (torch.outer(column, column) for column in columns), torch.zeros(len(rows), len(rows), dtype=torch.float64)
    )
    similar.fill_diagonal_(2.0)
    return similar.sort(dim=1, descending=True, stable=True).indices[:, : k + 1]


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 40), width=st.integers(1, 6), block=st.integers(1, 50), data=st.data())
def test_any_block_size_gives_the_dense_top_k(count: int, width: int, block: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, count - 1))
    # Rows drawn from few different ones: ties everywhere.
    kinds = data.draw(st.integers(1, 8))
    rows = unit_rows(kinds, width, seed=count)[
        torch.randint(kinds, (count,), generator=torch.Generator().manual_seed(k))
    ]
    found = exact(rows, k, block=block)
    assert found.shape == (count, k + 1)
    assert torch.equal(found, dense(rows, k))


def test_block_size_changes_nothing_where_rounding_could() -> None:
    rows = unit_rows(700, 48)
    rows[350:] = rows[:350]  # every row has a twin: similarities equal but for the rounding of a product
    found = [exact(rows, 9, block=block) for block in (1, 7, 128, 700)]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert torch.equal(found[0], dense(rows, 9))


def test_every_row_holds_itself_once() -> None:
    found = exact(unit_rows(50, 4), 12)
    assert torch.equal(found[:, 0], torch.arange(50))
    assert all(len(set(row)) == 13 for row in found.tolist())


def test_zero_rows_get_the_first_others() -> None:
    rows = unit_rows(12, 4)
    rows[5] = 0.0
    assert exact(rows, 3)[5].tolist() == [5, 0, 1, 2]


def test_k_and_rows_are_checked() -> None:
    rows = unit_rows(5, 3)
    with pytest.raises(ConfigError, match="below the number of nodes 5"):
        exact(rows, 5)
    with pytest.raises(ConfigError, match="at least 0"):
        exact(rows, -1)
    rows[2, 1] = float("nan")
    with pytest.raises(DataError, match="NaN or infinity"):
        exact(rows, 2)


def test_approximate_has_the_same_shape_and_finds_most() -> None:
    pytest.importorskip("faiss")
    centres = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(4000, 16, generator=torch.Generator().manual_seed(2))
    rows = torch.nn.functional.normalize(centres[torch.arange(4000) % 40] + 0.3 * noise, dim=1)
    found, right = approximate(rows, 10), exact(rows, 10)
    assert found.shape == right.shape and torch.equal(found[:, 0], torch.arange(4000))
    assert all(len(set(row)) == 11 and min(row) >= 0 for row in found.tolist())
    recall = sum(len(set(a) & set(b)) for a, b in zip(found.tolist(), right.tolist(), strict=True)) / right.numel()
    assert recall > 0.9
    assert torch.equal(found, approximate(rows, 10))


def test_approximate_is_exact_on_few_rows() -> None:
    rows = unit_rows(60, 5)
    assert torch.equal(approximate(rows, 4), exact(rows, 4))


def test_without_faiss_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"isthmus\[ann\]"):
        approximate(unit_rows(2000, 4), 5)


def test_no_more_than_a_block_of_similarities_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, plain, held = unit_rows(300, 8), torch.mm, list[int]()
    whole = exact(rows, 5, block=300)

    def watched(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        held.append(out.numel())
        return plain(a, b, out=out)

    monkeypatch.setattr(knn, "BLOCK_VALUES", 5000)
    monkeypatch.setattr(torch, "mm", watched)
    assert torch.equal(exact(rows, 5), whole)
    assert len(held) > 1 and max(held) <= 5000
