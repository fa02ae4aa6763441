"""Real numbers as elements of a field: signed fixed point that never wraps without a word.

A number x becomes round(x 2^f) mod p. Sums of up to N numbers bounded by B come back exactly as long as N B 2^f < p /
2, which is checked when the format is made; only sums and products with public integers happen in between, so no
truncation is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError, ProtocolError, RunError
from isthmus.privacy.field import Elements, Field

Reals = NDArray[np.floating]


@dataclass(frozen=True)
class Encoded:
    """Encoded numbers, and how many of them had to be clipped to the bound."""

    values: Elements
    clipped: int


@dataclass(frozen=True)
class FixedPoint:
    """A format for sums.

    Args:
        fraction: f, bits after the point.
        bound: B, largest magnitude of one number; larger ones are clipped and counted.
        terms: N, most numbers that are ever added up.
    """

    field: Field
    fraction: int
    bound: float
    terms: int

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 60 or self.terms < 1 or not 0 < self.bound <= 2.0**60:
            raise ConfigError(
                f"a fixed-point format needs fraction in 0..60, bound in (0, 2^60], terms >= 1; got {self}"
            )
        if 2 * self.terms * self.limit >= self.field.prime:
            fits = self.field.prime / (2 * self.terms * self.bound)
            most = (
                f"at most {math.floor(math.log2(fits))} fractional bits fit"
                if fits > 1
                else "no number of fractional bits fits"
            )
            raise ConfigError(
                f"{self.terms} numbers up to {self.bound:g} with {self.fraction} fractional bits overflow modulo "
                f"{self.field.prime}: "
                f"{most}; lower fraction, bound or terms, or use the prime 2^61 - 1"
            )

    @property
    def limit(self) -> int:
        """Largest magnitude of one encoding."""
        return math.ceil(self.bound * 2.0**self.fraction)

    def error(self, terms: int = 1) -> float:
        """Largest error of a sum of so many numbers, none of them clipped."""
        return terms * 2.0 ** -(self.fraction + 1)

    def encode(self, x: Reals, *, clip: bool = True) -> Encoded:
        """Numbers into the field. Those beyond the bound are clipped and counted, or with ``clip=False`` refused."""
        finite(x)
        values = x.astype(np.float64)
        beyond = int(np.count_nonzero(np.abs(values) > self.bound))
        if beyond and not clip:
            largest = np.abs(values).max()
            raise RunError(
                f"{beyond} of {x.size} numbers exceed the bound {self.bound:g} (largest {largest:g}); raise the bound"
            )
        # Scaling by a power of two and rounding are exact in float64, and |result| <= limit < 2^60.
        scaled = np.rint(np.clip(values, -self.bound, self.bound) * 2.0**self.fraction).astype(np.int64)
        return Encoded(self.field.elements(scaled), beyond)

    def decode(self, values: Elements, terms: int = 1) -> NDArray[np.float64]:
        """A sum of ``terms`` encodings as numbers. A sum that no such terms can have is an overflow and refused."""
        if not 0 <= terms <= self.terms:
            raise ProtocolError(
                f"a sum of {terms} terms may have overflowed: this format holds {self.terms}; make it with more terms"
            )
        signed = self.field.signed(self.field.check(values, "encoded numbers"))
        if signed.size and int(np.abs(signed).max()) > terms * self.limit:
            raise ProtocolError(
                f"a decoded number exceeds what {terms} terms up to {self.bound:g} can sum to: overflow, or shares "
                "that do "
                "not belong together"
            )
        return signed.astype(np.float64) * 2.0**-self.fraction


def most_terms(field: Field, fraction: int, bound: float) -> int:
    """How many numbers up to ``bound`` add up without overflow; at least 1, which a format may still refuse."""
    limit = math.ceil(bound * 2.0**fraction) if 0 <= fraction <= 60 and 0 < bound <= 2.0**60 else 1
    return max(1, (field.prime - 1) // (2 * limit))


def finite(x: Reals) -> None:
    """Refuse what is not a number: there is no encoding of it that a sum would not hide."""
    if not np.issubdtype(x.dtype, np.floating):
        raise TypeError(f"fixed point encodes real numbers, got {x.dtype}")
    if not np.isfinite(x).all():
        raise RunError(
            f"{int(np.count_nonzero(~np.isfinite(x)))} of {x.size} numbers are NaN or infinite and cannot be "
            "protected: "
            "training has diverged; lower lr or check the features"
        )
