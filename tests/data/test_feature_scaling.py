"""Features on one scale, whatever they are: what stays as it is, what stays sparse, what is standardised."""

from __future__ import annotations

import torch

from isthmus.data.feature_scaling import scaled


def test_columns_of_numbers_get_mean_0_and_deviation_1_and_constant_ones_0() -> None:
    x = torch.tensor([[1.0, 1000.0, 7.0], [3.0, -2000.0, 7.0], [5.0, 4000.0, 7.0]])
    found = scaled(x, "auto")
    torch.testing.assert_close(found.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]))


def test_a_sparse_bag_of_words_stays_sparse_with_rows_of_mean_square_1() -> None:
    x = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 4.0, 0.0]]).to_sparse_csr()
    found = scaled(x, "auto")
    assert found.layout == torch.sparse_csr
    torch.testing.assert_close(found.to_dense().square().mean(1), torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(scaled(x.to_dense(), "row"), found.to_dense())


def test_zeros_and_ones_stay_as_they_are() -> None:
    x = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert scaled(x, "auto") is x and scaled(x, "none") is x
    assert scaled(x.to_sparse_csr(), "auto").layout == torch.sparse_csr
