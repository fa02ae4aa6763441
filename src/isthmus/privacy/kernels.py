"""Compiled loops of the field. Every operand is an explicit ``uint64``: numba turns a mixture of signed and unsigned
into floats.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.compiling import machine_code

Elements = NDArray[np.uint64]

_P31, _P61 = np.uint64(2**31 - 1), np.uint64(2**61 - 1)
_ZERO, _3, _29, _32, _61 = np.uint64(0), np.uint64(3), np.uint64(29), np.uint64(32), np.uint64(61)
_LOW29, _LOW32 = np.uint64(2**29 - 1), np.uint64(2**32 - 1)
_ONE, _63, _2048, _ALL = np.uint64(1), np.uint64(63), np.uint64(2048), np.uint64(2**64 - 1)


inlined = partial(machine_code, inline="always")


@inlined
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


@machine_code
def mul61(a: Elements, b: Elements, out: Elements) -> None:
    """Products of flat arrays modulo 2^61 - 1."""
    for i in range(out.size):
        out[i] = _mul61(a[i], b[i])


@machine_code
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


@machine_code
def combine31(coefficients: Elements, arrays: Elements, out: Elements) -> None:
    """The same modulo 2^31 - 1, where products fit in a word."""
    for m in range(coefficients.shape[0]):
        for i in range(arrays.shape[1]):
            total = _ZERO
            for k in range(arrays.shape[0]):
                total = (total + coefficients[m, k] * arrays[k, i]) % _P31
            out[m, i] = total


@machine_code
def segment_sum(values: Elements, segment: NDArray[np.int64], prime: np.uint64, out: Elements) -> None:
    """``out[segment[e]] += values[e]`` modulo a prime below 2^63: (E, d), (E,) -> (n, d)."""
    for e in range(values.shape[0]):
        row = segment[e]
        for d in range(values.shape[1]):
            total = out[row, d] + values[e, d]
            out[row, d] = total - prime if total >= prime else total


@machine_code
def fixed_point(values: NDArray[Any], scale: float, out: NDArray[np.int64]) -> None:
    """``out = round(scale values)``, of numbers that the caller has found to be small enough."""
    for i in range(values.size):
        out[i] = np.int64(np.rint(np.float64(values[i]) * scale))


@machine_code
def odd_multiples(words: Elements, step: np.uint64) -> np.uint64:
    """``sum_k (2 k + 1) step words[k]`` modulo 2^64."""
    total, factor = _ZERO, step
    for i in range(words.size):
        total += factor * words[i]
        factor += step + step
    return total


# -- discrete Gaussians: algorithms 1 to 3 of Canonne, Kamath, Steinke, 2020, for standard deviations that are powers of
# two. Every draw takes the next word of a stream. A function gives its answer and where the stream is then, or, where
# it has run out of words, a place beyond its end.
# ------------------------------------------------------------------


@inlined
def _one_of(k: np.uint64, words: Elements, at: int) -> tuple[bool, int]:
    """True with probability 1 / k."""
    limit = _ALL - _ALL % k  # a multiple of k
    while at < words.size:
        word = words[at]
        at += 1
        if word < limit:
            return word % k == _ZERO, at
    return False, words.size + 1


@machine_code
def _exp_minus(numerator: np.uint64, bits: np.uint64, words: Elements, at: int) -> tuple[bool, int]:
    """True with probability exp(-numerator / 2^bits), of a fraction of at most 1 (algorithm 1)."""
    mask, k = (_ONE << bits) - _ONE, _ONE
    while at < words.size:
        chosen = (words[at] & mask) < numerator
        at += 1
        if chosen and k > _ONE:
            chosen, at = _one_of(k, words, at)
        if not chosen:
            return (k & _ONE) == _ONE, at
        k += _ONE
    return False, words.size + 1


@machine_code
def discrete_gaussians(out: NDArray[np.int64], done: int, words: Elements, bits: int) -> tuple[int, int]:
    """Draw ``out[done:]`` from a stream; returns how many are drawn, and how many words those took."""
    shift, scale = np.uint64(bits), _ONE << np.uint64(bits)
    double = np.uint64(2 * bits + 1)
    used = 0
    while done < out.size:
        at = used
        while at < words.size:
            low = words[at] & (scale - _ONE)  # discrete Laplace of the same scale: algorithm 2
            sign = words[at] >> _63
            at += 1
            chosen, at = _exp_minus(low, shift, words, at)
            if not chosen:
                continue
            high = _ZERO
            while chosen and high < _2048:
                chosen, at = _exp_minus(_ONE, _ZERO, words, at)
                if chosen:
                    high += _ONE
            size = low + (high << shift)
            if high == _2048 or (sign == _ONE and size == _ZERO):
                continue
            off = size - scale if size > scale else scale - size  # algorithm 3: exp(-(size - scale)^2 / (2 scale^2))
            whole, chosen = (off * off) >> double, True
            while chosen and whole > _ZERO:
                chosen, at = _exp_minus(_ONE, _ZERO, words, at)
                whole -= _ONE
            if chosen:
                chosen, at = _exp_minus((off * off) & ((_ONE << double) - _ONE), double, words, at)
            if chosen and at <= words.size:
                out[done] = -np.int64(size) if sign == _ONE else np.int64(size)
                done, used = done + 1, at
                break
        if at >= words.size:
            break
    return done, used
