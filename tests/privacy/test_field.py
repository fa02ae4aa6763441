"""The field against exact Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import ConfigError, ProtocolError
from isthmus.privacy.attacks.uniform import uniformity
from isthmus.privacy.field import P31, P61, Field
from isthmus.privacy.prg import Keystream, add_streams

PRIMES = (2, 3, 11, 65537, P31, P61)
QUICK = settings(max_examples=60, deadline=None)


def _pairs(prime: int) -> tuple[list[int], list[int]]:
    """Random elements and all corners: 0, 1, p - 1, and neighbours of powers of two."""
    corners = sorted(
        {value % prime for k in range(62) for value in (2**k - 1, 2**k, 2**k + 1)} | {0, 1, prime - 1, (prime - 1) // 2}
    )
    generator = np.random.default_rng(prime % 1000)
    random = [int(value) for value in generator.integers(0, prime, 200)]
    a = [x for x in corners for _ in corners] + random
    b = [y for _ in corners for y in corners] + random[::-1]
    return a, b


@pytest.mark.parametrize("prime", PRIMES)
def test_arithmetic_equals_exact_integers(prime: int) -> None:
    field = Field(prime)
    a, b = _pairs(prime)
    x, y = field.elements(a), field.elements(b)
    assert field.add(x, y).tolist() == [(i + j) % prime for i, j in zip(a, b, strict=True)]
    assert field.sub(x, y).tolist() == [(i - j) % prime for i, j in zip(a, b, strict=True)]
    assert field.mul(x, y).tolist() == [i * j % prime for i, j in zip(a, b, strict=True)]
    units = [i for i in a if i]
    assert field.inverse(field.elements(units)).tolist() == [pow(i, -1, prime) for i in units]


@QUICK
@given(
    st.sampled_from([11, P31, P61]),
    st.lists(st.tuples(st.integers(0, P61), st.integers(0, P61)), min_size=1, max_size=20),
)
def test_products_and_combinations_of_any_elements(prime: int, pairs: list[tuple[int, int]]) -> None:
    field = Field(prime)
    x, y = field.elements([a for a, _ in pairs]), field.elements([b for _, b in pairs])
    assert field.mul(x, y).tolist() == [a * b % prime for a, b in pairs]
    combined = field.combine([[prime - 1, 5], [0, 2**60]], np.stack([x, y]))
    assert combined[0].tolist() == [(-a + 5 * b) % prime for a, b in pairs]
    assert combined[1].tolist() == [2**60 * b % prime for _, b in pairs]


@pytest.mark.parametrize("prime", (11, P31, P61))
def test_long_sums_do_not_overflow(prime: int) -> None:
    field = Field(prime)
    largest = np.full((200_000, 2), prime - 1, np.uint64)  # 2^61 * 2e5 is far beyond 64 bits
    assert field.sum(largest).tolist() == [200_000 * (prime - 1) % prime] * 2
    random = field.random((3, 500))
    assert field.sum(random, axis=1).tolist() == [sum(map(int, row)) % prime for row in random]
    assert field.sum(np.empty((0, 4), np.uint64)).tolist() == [0] * 4


@pytest.mark.parametrize("prime", (11, P31, P61))
def test_segment_sum(prime: int) -> None:
    field = Field(prime)
    values, segment = field.random((50, 3)), np.random.default_rng(0).integers(0, 7, 50)
    summed = field.segment_sum(values, segment, 8)
    for k in range(8):
        assert summed[k].tolist() == [sum(map(int, values[segment == k, d])) % prime for d in range(3)]
    assert field.segment_sum(values[:0], segment[:0], 2).tolist() == [[0] * 3] * 2
    with pytest.raises(ValueError, match="segments"):
        field.segment_sum(values, segment, 3)


def test_broadcast_scalars_and_signed() -> None:
    for prime in (11, P31, P61):
        field = Field(prime)
        x = field.random((4, 5))
        factor = field.elements([prime - 2])
        assert field.mul(x, factor).tolist() == [[int(v) * (prime - 2) % prime for v in row] for row in x]
        assert field.signed(field.elements([prime - 1, (prime - 1) // 2, (prime + 1) // 2])).tolist() == [
            -1,
            prime // 2,
            -(prime // 2),
        ]
        assert field.elements(np.array([-1, -prime, prime], dtype=np.int64)).tolist() == [prime - 1, 0, 0]


@pytest.mark.parametrize("modulus", (-7, 0, 1, 4, 2**31, 2**61 - 3, 2**61, 2**31 - 3, 3 * (2**31 - 1)))
def test_wrong_modulus_is_refused(modulus: int) -> None:
    with pytest.raises(ConfigError, match="prime"):
        Field(modulus)


def test_foreign_elements_are_checked_and_types_never_mixed() -> None:
    field = Field(P31)
    with pytest.raises(ProtocolError, match="modulus"):
        field.check(Field(P61).random(100))
    with pytest.raises(ProtocolError, match="unsigned"):
        field.check(np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="uint64"):
        field.add(np.zeros(3, np.int64), np.zeros(3, np.uint64))
    with pytest.raises(ZeroDivisionError):
        field.inverse(field.elements([1, 0]))


@pytest.mark.parametrize("prime", (11, P31, P61))
def test_random_elements_are_uniform_and_fresh(prime: int) -> None:
    field = Field(prime)
    assert uniformity(field.random(100_000), prime) > 1e-6
    assert not np.array_equal(field.random(100), field.random(100))
    key = bytes(range(32))
    assert np.array_equal(field.random(100, Keystream(key)), field.random(100, Keystream(key)))


def test_streams() -> None:
    stream = Keystream(bytes(32))
    whole = Keystream(bytes(32)).words(300_000)
    assert np.array_equal(np.concatenate([stream.words(3), stream.words(0), stream.words(299_997)]), whole)
    target = np.zeros(300_000, np.uint64)
    add_streams(target, [bytes(32)])
    assert np.array_equal(target, whole)
    add_streams(target, [], [bytes(32)])
    assert not target.any()
    drawn = Keystream.fresh().below(5, 10_000)
    assert set(drawn.tolist()) == {0, 1, 2, 3, 4}
    assert Keystream.fresh().below(1, 10).tolist() == [0] * 10
    assert Keystream.fresh().below(2**64, 10).size == 10
    normal, laplace = Keystream.fresh().normal(200_001), Keystream.fresh().laplace(200_000)
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02 and abs((normal**4).mean() - 3) < 0.2
    assert abs(laplace.mean()) < 0.03 and abs(laplace.var() - 2) < 0.1
    with pytest.raises(ValueError, match="32 or 16 bytes"):
        Keystream(b"short")
