"""Arithmetic modulo a prime, on arrays.

Elements are ``uint64`` arrays with entries below the prime; other types are refused, because numpy turns ``uint64``
with ``int64`` into floats without a word. What comes from another party goes through :meth:`Field.check` first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError, ProtocolError
from isthmus.privacy import kernels
from isthmus.privacy.prg import Keystream

Elements = NDArray[np.uint64]

P31 = 2**31 - 1
P61 = 2**61 - 1
_SUMMANDS = 1 << 16
"""Rows summed at a time, so that halves of a sum stay far below 2^64 and temporary arrays stay small."""


@dataclass(frozen=True)
class Field:
    """The integers modulo ``prime``: any prime up to 2^31 - 1, or 2^61 - 1.

    Example:
        >>> field = Field(P31)
        >>> int(field.mul(field.elements([P31 - 1]), field.elements([2]))[0])
        2147483645
    """

    prime: int = P61

    def __post_init__(self) -> None:
        if self.prime != P61 and not (2 <= self.prime <= P31 and _is_prime(self.prime)):
            raise ConfigError(
                f"a field needs a prime up to 2^31 - 1, or 2^61 - 1; got {self.prime}: use {P31} or {P61}"
            )

    # -- elements ----------------------------------------------------------------------------------

    def elements(self, values: Sequence[int] | NDArray[np.integer]) -> Elements:
        """Integers, reduced into the field. Public constants and encodings; never a value of another party."""
        if isinstance(values, np.ndarray) and values.dtype == np.int64:
            reduced: Elements = np.mod(values, np.int64(self.prime)).astype(np.uint64)
            return reduced
        listed = [int(value) % self.prime for value in np.asarray(values, dtype=object).ravel()]
        return np.array(listed, dtype=np.uint64).reshape(np.shape(values))

    def check(self, values: Elements, what: str = "field elements") -> Elements:
        """``values``, if they are elements of this field; what another party sent under a larger modulus is not."""
        if values.dtype != np.uint64:
            raise ProtocolError(f"{what} must be unsigned 64-bit words, got {values.dtype}")
        if values.size and int(values.max()) >= self.prime:
            raise ProtocolError(
                f"{what} reach {int(values.max())}, but the modulus is {self.prime}: the sender used another one"
            )
        return values

    def random(self, shape: int | tuple[int, ...], stream: Keystream | None = None) -> Elements:
        """Uniform elements, from a fresh stream unless one is given."""
        shape = (shape,) if isinstance(shape, int) else shape
        return (stream or Keystream.fresh()).below(self.prime, math.prod(shape)).reshape(shape)

    def signed(self, a: Elements) -> NDArray[np.int64]:
        """Representatives in -(p-1)/2 .. (p-1)/2."""
        values = _words(a).astype(np.int64)
        return np.where(values > (self.prime - 1) // 2, values - self.prime, values)

    # -- arithmetic --------------------------------------------------------------------------------

    def add(self, a: Elements, b: Elements) -> Elements:
        return self._once(_words(a) + _words(b))

    def sub(self, a: Elements, b: Elements) -> Elements:
        return self._once(_words(a) + (np.uint64(self.prime) - _words(b)))

    def mul(self, a: Elements, b: Elements) -> Elements:
        a, b = _words(a), _words(b)
        if self.prime != P61:
            return a * b % np.uint64(self.prime)
        a, b = np.broadcast_arrays(a, b)
        out = np.empty(a.shape, np.uint64)
        kernels.mul61(a.ravel(), b.ravel(), out.reshape(-1))
        return out

    def inverse(self, a: Elements) -> Elements:
        """1 / a by Fermat: a^(p - 2). Zero has none."""
        if not _words(a).all():
            raise ZeroDivisionError("zero has no inverse")
        result, power, exponent = np.ones_like(a), a, self.prime - 2
        while exponent:
            result = self.mul(result, power) if exponent & 1 else result
            power, exponent = self.mul(power, power), exponent >> 1
        return result

    def sum(self, a: Elements, axis: int = 0) -> Elements:
        """Sum along an axis. Exact for any length: halves of 32 bits are summed apart and joined in the field."""
        rows = np.moveaxis(_words(a), axis, 0)
        total = np.zeros(rows.shape[1:], np.uint64)
        for begin in range(0, rows.shape[0], _SUMMANDS):
            part = rows[begin : begin + _SUMMANDS]
            low = (part & np.uint64(2**32 - 1)).sum(0, dtype=np.uint64) % np.uint64(self.prime)
            high = (part >> np.uint64(32)).sum(0, dtype=np.uint64) % np.uint64(self.prime)
            total = self.add(total, self.add(low, self.mul(high, self.elements([2**32])[0])))
        return total

    def segment_sum(self, values: Elements, segment: NDArray[np.int64], count: int) -> Elements:
        """Rows summed by segment, e.g. messages by target node: (E, d), (E,) -> (count, d)."""
        if segment.size and not (int(segment.min()) >= 0 and int(segment.max()) < count):
            raise ValueError(f"segments lie in [0, {count})")
        if segment.shape != values.shape[:1]:
            raise ValueError(f"{values.shape[0]} rows need as many segments, got {segment.shape}")
        out = np.zeros((count, *values.shape[1:]), np.uint64)
        if values.size:
            flat = np.ascontiguousarray(_words(values).reshape(values.shape[0], -1))
            kernels.segment_sum(flat, segment.astype(np.int64), np.uint64(self.prime), out.reshape(count, -1))
        return out

    def combine(self, coefficients: Sequence[Sequence[int]], arrays: Elements) -> Elements:
        """Public linear combinations: ``out[m] = sum_k coefficients[m][k] arrays[k]``, (M, K), (K, ...) -> (M, ...)."""
        factors = self.elements(np.array(coefficients, dtype=object))
        flat = np.ascontiguousarray(_words(arrays).reshape(arrays.shape[0], -1))
        if factors.ndim != 2 or factors.shape[1] != flat.shape[0]:
            raise ValueError(f"{flat.shape[0]} arrays cannot be combined by coefficients of shape {factors.shape}")
        out = np.zeros((factors.shape[0], flat.shape[1]), np.uint64)
        if self.prime in _COMBINE:
            _COMBINE[self.prime](factors, flat, out)
        else:
            for k in range(flat.shape[0]):
                out = (out + factors[:, k : k + 1] * flat[k]) % np.uint64(self.prime)
        return out.reshape(factors.shape[0], *arrays.shape[1:])

    def _once(self, total: Elements) -> Elements:
        """A number below 2p, reduced: if it is below p already, subtracting p wraps to something larger."""
        with np.errstate(over="ignore"):
            reduced: Elements = np.minimum(total, total - np.uint64(self.prime))
        return reduced


_COMBINE = {P31: kernels.combine31, P61: kernels.combine61}


def _words(values: Elements) -> Elements:
    if values.dtype != np.uint64:
        raise TypeError(f"field elements are uint64, got {values.dtype}: numpy would turn the mixture into floats")
    return values


def _is_prime(number: int) -> bool:
    return number >= 2 and all(number % factor for factor in range(2, math.isqrt(number) + 1))
