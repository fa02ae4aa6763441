"""Compiled loops of the field. Every operand is an explicit ``uint64``: numba turns a mixture of signed and unsigned
into floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Elements = NDArray[np.uint64]

_P31, _P61 = np.uint64(2**31 - 1), np.uint64(2**61 - 1)
_ZERO, _3, _29, _32, _61 = np.uint64(0), np.uint64(3), np.uint64(29), np.uint64(32), np.uint64(61)
_LOW29, _LOW32 = np.uint64(2**29 - 1), np.uint64(2**32 - 1)


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    try:
        compiled: Callable[..., Any] = njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # neither the package folder nor the user's cache folder can be written
        compiled = njit(nogil=True, **options)(function)
    return compiled


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    return _compiled(function, inline="always")


@_inlined
def _mul61(a: np.uint64, b: np.uint64) -> np.uint64:
    """a b mod 2^61 - 1 from four 32-bit products, with 2^64 = 8 and 2^61 = 1."""
    a_high, a_low, b_high, b_low = a >> _32, a & _LOW32, b >> _32, b & _LOW32
    middle = a_high * b_low + a_low * b_high  # < 2^62
    low = a_low * b_low  # < 2^64
    total = (
        ((a_high * b_high) << _3) + (middle >> _29) + ((middle & _LOW29) << _32) + (low & _P61) + (low >> _61)
    )  # < 2^63
    total = (total & _P61) + (total >> _61)
    return total - _P61 if total >= _P61 else total


@_compiled
def mul61(a: Elements, b: Elements, out: Elements) -> None:
    """Products of flat arrays modulo 2^61 - 1."""
    for i in range(out.size):
        out[i] = _mul61(a[i], b[i])


@_compiled
def combine61(coefficients: Elements, arrays: Elements, out: Elements) -> None:
    """``out[m] = sum_k coefficients[m, k] arrays[k]`` modulo 2^61 - 1: (M, K), (K, n) -> (M, n)."""
    for m in range(coefficients.shape[0]):
        for i in range(arrays.shape[1]):
            total = _ZERO
            for k in range(arrays.shape[0]):
                total += _mul61(coefficients[m, k], arrays[k, i])
                if total >= _P61:
                    total -= _P61
            out[m, i] = total


@_compiled
def combine31(coefficients: Elements, arrays: Elements, out: Elements) -> None:
    """The same modulo 2^31 - 1, where products fit in a word."""
    for m in range(coefficients.shape[0]):
        for i in range(arrays.shape[1]):
            total = _ZERO
            for k in range(arrays.shape[0]):
                total = (total + coefficients[m, k] * arrays[k, i]) % _P31
            out[m, i] = total


@_compiled
def segment_sum(values: Elements, segment: NDArray[np.int64], prime: np.uint64, out: Elements) -> None:
    """``out[segment[e]] += values[e]`` modulo a prime below 2^63: (E, d), (E,) -> (n, d)."""
    for e in range(values.shape[0]):
        row = segment[e]
        for d in range(values.shape[1]):
            total = out[row, d] + values[e, d]
            out[row, d] = total - prime if total >= prime else total


@_compiled
def fixed_point(values: NDArray[Any], scale: float, out: NDArray[np.int64]) -> None:
    """``out = round(scale values)``, of numbers that the caller has found to be small enough."""
    for i in range(values.size):
        out[i] = np.int64(np.rint(np.float64(values[i]) * scale))


@_compiled
def odd_multiples(words: Elements, step: np.uint64) -> np.uint64:
    """``sum_k (2 k + 1) step words[k]`` modulo 2^64."""
    total, factor = _ZERO, step
    for i in range(words.size):
        total += factor * words[i]
        factor += step + step
    return total
