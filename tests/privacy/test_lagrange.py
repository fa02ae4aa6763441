"""Lagrange coding (HiFGL spec, section 12: 2, 3, 5, 6, 7)."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from isthmus.errors import ConfigError, ProtocolError
from isthmus.privacy.attacks.uniform import uniformity
from isthmus.privacy.field import P31, P61, Field
from isthmus.privacy.fixedpoint import FixedPoint
from isthmus.privacy.lagrange import LagrangeCode


@pytest.mark.parametrize("prime", (11, P31, P61))
@pytest.mark.parametrize("threshold", (1, 2, 4))
def test_basis_identities(prime: int, threshold: int) -> None:
    code = LagrangeCode(Field(prime), threshold)
    for x in range(11):
        assert sum(code.basis(x)) % prime == 1
    for i, beta in enumerate(code.betas):
        assert code.basis(beta) == [int(i == j) for j in range(threshold + 1)]


def test_bad_points_are_refused() -> None:
    field = Field(11)
    for alphas, betas in (
        ((4, 4), (1, 2)),
        ((3, 4), (1, 1)),
        ((2, 3), (1, 2)),
        ((12, 4), (1, 2)),
        ((3, 4, 5), (1, 2)),
        ((3,), (1, 2)),
    ):
        with pytest.raises(ConfigError, match=r"differ|points"):
            LagrangeCode(field, 1, alphas, betas)
    LagrangeCode(field, 4)  # 10 points of 11
    with pytest.raises(ConfigError, match="larger prime"):
        LagrangeCode(field, 5)
    with pytest.raises(ConfigError, match="below 1"):
        LagrangeCode(field, 0)


@pytest.mark.parametrize("prime", (11, P31, P61))
@pytest.mark.parametrize("threshold", (1, 2, 3, 4))
def test_shares_are_the_polynomial_in_exact_integers(prime: int, threshold: int) -> None:
    field = Field(prime)
    code = LagrangeCode(field, threshold)
    secret, masks = field.random(5), field.random((threshold, 5))
    shares = code.encode_with(secret, masks)
    points = [secret, *masks]
    for i, alpha in enumerate(code.alphas):
        basis = code.basis(alpha)
        assert shares[i].tolist() == [
            sum(b * int(p[d]) for b, p in zip(basis, points, strict=True)) % prime for d in range(5)
        ]
    assert np.array_equal(code.decode(shares), secret)
    for j in range(threshold):
        assert np.array_equal(code.evaluate(shares, code.betas[j + 1]), masks[j])


@pytest.mark.parametrize("threshold", (1, 2))
def test_any_t_shares_tell_nothing_exhaustively(threshold: int) -> None:
    """For every secret and every T shares, each tuple of values occurs exactly once over all masks."""
    field = Field(11)
    code = LagrangeCode(field, threshold)
    masks = field.elements(list(itertools.product(range(11), repeat=threshold))).T  # (T, 11^T)
    for secret in range(11):
        shares = code.encode_with(np.full(masks.shape[1], secret, np.uint64), masks)
        for holders in itertools.combinations(range(threshold + 1), threshold):
            seen = Counter(zip(*(shares[h].tolist() for h in holders), strict=True))
            assert len(seen) == 11**threshold and set(seen.values()) == {1}
        # The test can fail: T + 1 shares take one value per mask and determine the secret.
        assert np.array_equal(code.decode(shares), np.full(masks.shape[1], secret))


@pytest.mark.parametrize("prime", (P31, P61))
def test_shares_are_uniform_whatever_the_secret(prime: int) -> None:
    field = Field(prime)
    for threshold in (1, 3):
        code = LagrangeCode(field, threshold)
        for secret in (np.zeros(60_000, np.uint64), np.full(60_000, prime - 1, np.uint64)):
            shares = code.encode(secret)
            assert all(uniformity(share, prime) > 1e-6 for share in shares)
            first, seeds = code.encode_seeded(secret)
            assert uniformity(first, prime) > 1e-6 and len(seeds) == threshold


@pytest.mark.parametrize("threshold", (1, 2, 3, 5))
@pytest.mark.parametrize(("prime", "fraction", "bound"), ((P31, 16, 30.0), (P61, 24, 1000.0)))
def test_decoded_sum_is_the_plain_sum(threshold: int, prime: int, fraction: int, bound: float) -> None:
    format = FixedPoint(Field(prime), fraction, bound, terms=500)
    code = LagrangeCode(format.field, threshold)
    generator = np.random.default_rng(threshold)
    for degree in (0, 1, 2, 17, 500):
        x = generator.uniform(-bound, bound, (degree, 8))
        shares = np.zeros((threshold + 1, degree, 8), np.uint64)
        for v, row in enumerate(format.encode(x).values):
            shares[:, v] = code.encode(row)
        summed = np.stack([code.sum(held) for held in shares])
        assert np.abs(format.decode(code.decode(summed), degree) - x.sum(0)).max() <= format.error(degree) + 1e-9


@pytest.mark.parametrize("prime", (11, P31, P61))
@pytest.mark.parametrize("threshold", (1, 3))
def test_seeds_stand_for_shares(prime: int, threshold: int) -> None:
    field = Field(prime)
    code = LagrangeCode(field, threshold)
    long = field.random((2, 70_000))  # more than a block
    first, seeds = code.encode_seeded(long)
    assert np.array_equal(code.decode(np.stack([first, *(code.expand(seed, long.shape) for seed in seeds)])), long)
    assert np.array_equal(code.decode(code.encode(long)), long)
    secrets = field.random((6, 40))
    parts = [code.encode_seeded(secret) for secret in secrets]
    holders = [np.stack([first for first, _ in parts])]
    holders += [np.stack([code.expand(seeds[h], (40,)) for _, seeds in parts]) for h in range(threshold)]
    assert np.array_equal(code.decode(np.stack([code.sum(held) for held in holders])), field.sum(secrets))
    assert len({seed for _, seeds in parts for seed in seeds}) == 6 * threshold


def test_masks_are_fresh() -> None:
    field = Field(P61)
    code = LagrangeCode(field, 1)
    secret = field.random((30, 200))
    masks = np.concatenate([code.evaluate(code.encode(secret), code.betas[1]).ravel() for _ in range(3)])
    assert np.unique(masks).size == masks.size  # 18000 of 2^61: a repetition is reuse, not chance


def test_bad_shares_are_refused() -> None:
    code = LagrangeCode(Field(P31), 2)
    shares = code.encode(code.field.random(10))
    with pytest.raises(ProtocolError, match="holder is missing"):
        code.decode(shares[:2])
    with pytest.raises(ProtocolError, match="modulus"):
        code.decode(shares + np.uint64(P31))
    with pytest.raises(ProtocolError, match="32 bytes"):
        code.expand(b"short", (10,))
