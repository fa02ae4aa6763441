"""The learned graph against a dense computation (FedGGR spec, section 11: 4 to 7)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.graph.knn import exact
from isthmus.nn.learned_graph import SLOPE, Adjacency, Pattern, generate, non_negative

N, P, K = 40, 6, 5


@pytest.fixture
def embeddings() -> Tensor:
    rows = torch.randn(N, P, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rows[:, 0] = rows[:, 0].abs()  # no row that relu makes zero: those are a case of their own
    return rows


def ones() -> tuple[Tensor, Tensor]:
    return torch.ones(P, dtype=torch.float64), torch.ones(P, dtype=torch.float64)


def scales() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.rand(P, dtype=torch.float64, generator=generator) + 0.5 for _ in range(2))  # type: ignore[return-value]


def dense_processed(rows: Tensor, neighbours: Tensor) -> tuple[Tensor, Tensor]:
    """A* and (P(A~) + P(A~)^T) / 2 as the spec writes them, through N x N matrices."""
    mask = torch.zeros(N, N, dtype=torch.bool).scatter_(1, neighbours, True)
    similar = rows @ rows.mT
    chosen = torch.where(mask, non_negative(similar), torch.zeros_like(similar))
    symmetric = (chosen + chosen.mT) / 2
    scale = symmetric.sum(1).rsqrt()
    return scale[:, None] * symmetric * scale, symmetric


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_generated_rows_equal_the_formula_with_autograd(
    embeddings: Tensor, dtype: torch.dtype, tolerance: float
) -> None:
    embeddings[3], embeddings[5] = 0.0, -embeddings[5].abs()  # nothing to divide by, before and after relu
    target = torch.randn(N, P, dtype=dtype, generator=torch.Generator().manual_seed(6))
    w1, w2 = (
        torch.randn(P, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in (7, 8)
    )
    found = generate(embeddings.to(dtype), w1, w2)
    expected = torch.nn.functional.normalize(torch.relu(embeddings.to(dtype) * w1) * w2, dim=1)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    grads = (torch.autograd.grad((rows * target).sum(), (w1, w2)) for rows in (found, expected))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=10 * tolerance, rtol=0)
        assert float(b.abs().max()) > 1e-2


def test_values_and_gradients_equal_the_dense_version(embeddings: Tensor) -> None:
    h = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    target = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    w1, w2 = (w.requires_grad_() for w in scales())
    rows = generate(embeddings, w1, w2)
    neighbours = exact(rows, K)
    sparse = Adjacency.of(Pattern.of(neighbours), rows) @ h
    dense = dense_processed(rows, neighbours)[0] @ h
    torch.testing.assert_close(sparse, dense, atol=1e-12, rtol=0)
    found = torch.autograd.grad((sparse * target).sum(), (w1, w2, h), retain_graph=True)
    expected = torch.autograd.grad((dense * target).sum(), (w1, w2, h))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)
        assert float(b.abs().max()) > 1e-4  # the comparison is not one of zeros


def test_adjacency_is_symmetric_non_negative_and_contracts(embeddings: Tensor) -> None:
    rows = generate(embeddings, *scales())
    adjacency = Adjacency.of(Pattern.of(exact(rows, K)), rows).to_dense()
    assert torch.equal(adjacency, adjacency.mT) or float((adjacency - adjacency.mT).abs().max()) < 1e-15
    assert bool((adjacency >= 0).all()) and bool(torch.isfinite(adjacency).all())
    assert float(torch.linalg.eigvalsh(adjacency).abs().max()) <= 1 + 1e-12


def test_nothing_outside_the_chosen_pairs(embeddings: Tensor) -> None:
    rows = generate(embeddings, *scales())
    neighbours = exact(rows, K)
    adjacency = Adjacency.of(Pattern.of(neighbours), rows).to_dense()
    mask = torch.zeros(N, N, dtype=torch.bool).scatter_(1, neighbours, True)
    assert torch.equal(adjacency != 0, mask | mask.mT)


def test_twins_weigh_exactly_one(embeddings: Tensor) -> None:
    embeddings[7] = embeddings[3]
    rows = generate(embeddings, *ones())
    pattern = Pattern.of(exact(rows, K))
    weight = Adjacency.of(pattern, rows).weight
    pair = [i for i in range(pattern.num_pairs) if (pattern.low[i], pattern.high[i]) == (3, 7)]
    assert len(pair) == 1 and not pattern.half[pair[0]]
    assert float(weight[pair[0]]) == pytest.approx(1.0, abs=1e-12)


def test_ones_on_non_negative_embeddings_give_cosine_neighbours(embeddings: Tensor) -> None:
    positive = embeddings.abs()
    cosine = torch.nn.functional.normalize(positive, dim=1)
    assert torch.equal(exact(generate(positive, *ones()), K), exact(cosine, K))


def test_a_positive_factor_on_w2_changes_nothing(embeddings: Tensor) -> None:
    w1, w2 = scales()
    plain, scaled = generate(embeddings, w1, w2), generate(embeddings, w1, 7.0 * w2)
    torch.testing.assert_close(plain, scaled, atol=1e-14, rtol=0)
    assert torch.equal(exact(plain, K), exact(scaled, K))


def test_p_maps_one_to_one_and_is_positive_and_monotone() -> None:
    t = torch.linspace(-1, 1, 101, dtype=torch.float64)
    values = non_negative(t)
    assert float(values[-1]) == 1.0
    assert float(non_negative(torch.zeros(1, dtype=torch.float64))) == pytest.approx(2.718281828459045**-SLOPE)
    assert bool((values > 0).all()) and bool((values.diff() > 0).all())


def test_a_zero_row_keeps_to_itself(embeddings: Tensor) -> None:
    embeddings[0] = -1.0  # relu leaves nothing of it
    rows = generate(embeddings, *ones())
    assert not bool(rows[0].any())
    adjacency = Adjacency.of(Pattern.of(exact(rows, K)), rows)
    dense = adjacency.to_dense()
    assert bool(torch.isfinite(dense).all()) and float(dense[0, 0]) > 0.9


def test_degrees_count_both_directions(embeddings: Tensor) -> None:
    neighbours = exact(generate(embeddings, *ones()), K)
    mask = torch.zeros(N, N, dtype=torch.bool).scatter_(1, neighbours, True)
    assert torch.equal(Pattern.of(neighbours).degrees(), (mask | mask.mT).sum(1) - 1)
