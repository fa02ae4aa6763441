"""Fixed point: round trips, clip counts, and overflow that is seen (HiFGL spec, section 12: 1 and 4)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import ConfigError, ProtocolError, RunError
from isthmus.privacy.field import P31, P61, Field
from isthmus.privacy.fixedpoint import FixedPoint

SMALL = FixedPoint(Field(P31), fraction=16, bound=63.0, terms=256)  # HiFGL spec, section 11.1
LARGE = FixedPoint(Field(P61), fraction=30, bound=1000.0, terms=500)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-63, 63), min_size=1, max_size=30))
def test_round_trip_error(numbers: list[float]) -> None:
    x = np.array(numbers)
    for format in (SMALL, LARGE):
        encoded = format.encode(x)
        assert encoded.clipped == 0
        assert np.abs(format.decode(encoded.values) - x).max() <= format.error() == 2.0 ** -(format.fraction + 1)


def test_out_of_range_is_clipped_and_counted_never_wrapped() -> None:
    encoded = SMALL.encode(np.array([1e30, -64.0, 63.0, 0.5]))
    assert encoded.clipped == 2
    assert SMALL.decode(encoded.values).tolist() == [63.0, -63.0, 63.0, 0.5]
    with pytest.raises(RunError, match="exceed the bound"):
        SMALL.encode(np.array([64.0]), clip=False)


def test_sums_are_exact_integers_up_to_the_last_term() -> None:
    generator = np.random.default_rng(0)
    for format in (SMALL, LARGE):
        x = generator.uniform(-format.bound, format.bound, (format.terms, 20))
        x[:, 0], x[:, 1] = format.bound, -format.bound  # the largest sums there are
        encoded = format.encode(x).values
        exact = [sum(int(np.rint(v * 2.0**format.fraction)) for v in x[:, d]) for d in range(20)]
        total = format.field.sum(encoded)
        assert format.field.signed(total).tolist() == exact
        assert np.abs(format.decode(total, format.terms) - x.sum(0)).max() <= format.error(format.terms) + 1e-9


def test_overflow_is_detected() -> None:
    encoded = SMALL.encode(np.full((262, 1), 63.0)).values
    wrapped = SMALL.field.sum(encoded)
    assert SMALL.field.signed(wrapped)[0] < 0  # it did wrap
    with pytest.raises(ProtocolError, match="overflow"):
        SMALL.decode(wrapped, 256)
    with pytest.raises(ProtocolError, match="more terms"):
        SMALL.decode(wrapped, 262)


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(RunError, match="NaN or infinite"):
        SMALL.encode(np.array([1.0, value], dtype=np.float32))


def test_formats_that_cannot_hold_the_sum_are_refused() -> None:
    FixedPoint(Field(P31), 16, 63.9, 256)
    with pytest.raises(ConfigError, match=r"at most 15 fractional bits"):
        FixedPoint(Field(P31), 16, 64.0, 256)
    with pytest.raises(ConfigError, match="overflow"):
        FixedPoint(Field(11), 1, 1.0, 3)
    for fraction, bound, terms in (
        (-1, 1.0, 1),
        (16, 0.0, 1),
        (16, float("nan"), 1),
        (16, float("inf"), 1),
        (16, 1.0, 0),
        (900, 1.0, 1),
    ):
        with pytest.raises(ConfigError):
            FixedPoint(Field(P61), fraction, bound, terms)
    with pytest.raises(TypeError):
        SMALL.encode(np.array([1, 2]))
    with pytest.raises(ProtocolError, match="modulus"):
        SMALL.decode(np.array([P31], np.uint64))
