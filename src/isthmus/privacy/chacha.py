"""ChaCha20 (RFC 8439) for many keys at once: uniform field elements from one 32-byte key per message.

`prg.Keystream` serves one long stream; here thousands of short ones are wanted, one per edge, and a Python call for
each would cost more than all the arithmetic. Keys are worked on in lanes, so that the compiler fills vector registers.
Tested against `cryptography`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.compiling import machine_code
from isthmus.privacy.field import Elements, Field
from isthmus.privacy.kernels import inlined

KEY_BYTES = 32
Keys = NDArray[np.uint8]
"""(n, 32)"""
Nonce = tuple[int, int, int]
"""96 bits as three words. A key and a nonce belong to one message: the caller never uses the pair twice."""

_LANES = 32
_7, _8, _12, _16, _20, _24, _25 = (np.uint32(bits) for bits in (7, 8, 12, 16, 20, 24, 25))
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4").astype(np.uint32)


def expand(field: Field, keys: Keys, nonce: Nonce, width: int) -> Elements:
    """``width`` uniform elements per key: (n, 32) -> (n, width). Words that would cause a bias are thrown away."""
    out = np.empty((keys.shape[0], width), np.uint64)
    _expand(key_words(keys), _nonce(nonce), *_shape_of(field), np.uint64(field.prime), out)
    return out


def expand_sum(field: Field, keys: Keys, sizes: NDArray[np.int64], nonce: Nonce, width: int) -> Elements:
    """Sums of the streams of consecutive keys, ``sizes`` of them each: (n, 32), (H,) -> (H, width). No single stream is
    kept.
    """
    if int(sizes.sum()) != keys.shape[0] or (sizes.size and int(sizes.min()) < 0):
        raise ValueError(f"{keys.shape[0]} keys do not fall into groups of {sizes.tolist()[:5]}...")
    out = np.zeros((sizes.size, width), np.uint64)
    segment = np.repeat(np.arange(sizes.size), sizes)
    for begin in range(0, keys.shape[0], _ROWS):
        part = expand(field, keys[begin : begin + _ROWS], nonce, width)
        rows = segment[begin : begin + _ROWS]
        first = int(rows[0])
        summed = field.segment_sum(part, rows - first, int(rows[-1]) - first + 1)
        out[first : first + len(summed)] = field.add(out[first : first + len(summed)], summed)
    return out


_ROWS = 1 << 14
"""Streams expanded at a time: few enough to stay near the processor."""


def blocks(keys: Keys, nonce: Nonce, counter: int) -> NDArray[np.uint32]:
    """One block of the key stream of every key: (n, 32) -> (n, 16)."""
    words, count = key_words(keys), keys.shape[0]
    out = np.empty((count, 16), np.uint32)
    state, start = np.empty((16, _LANES), np.uint32), np.empty((16, _LANES), np.uint32)
    for begin in range(0, count, _LANES):
        _blocks(words, begin, min(_LANES, count - begin), _nonce(nonce), counter, start, state)
        out[begin : begin + _LANES] = state[:, : min(_LANES, count - begin)].T
    return out


def key_words(keys: Keys) -> NDArray[np.uint32]:
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        raise ValueError(f"stream keys have {KEY_BYTES} bytes each, got {keys.dtype} {keys.shape}")
    return np.ascontiguousarray(keys).view("<u4").astype(np.uint32, copy=False)


def _nonce(nonce: Nonce) -> NDArray[np.uint32]:
    return np.array(nonce, dtype=np.uint32)


def _shape_of(field: Field) -> tuple[Any, Any]:
    """Words per element, and how far they are shifted down to the bits of the prime."""
    bits = max(1, (field.prime - 1).bit_length())
    return (1, np.uint64(32 - bits)) if bits <= 32 else (2, np.uint64(64 - bits))


@inlined
def _quarter(x: Any, a: int, b: int, c: int, d: int) -> None:
    """The quarter round on all lanes. Everything is cut to 32 bits at once: numba would go on in 64 and fill half the
    registers.
    """
    row_a, row_b, row_c, row_d = x[a], x[b], x[c], x[d]
    for i in range(len(row_a)):
        p, q, r, s = row_a[i], row_b[i], row_c[i], row_d[i]
        p = np.uint32(p + q)
        s = np.uint32(s ^ p)
        s = np.uint32(np.uint32(s << _16) | (s >> _16))
        r = np.uint32(r + s)
        q = np.uint32(q ^ r)
        q = np.uint32(np.uint32(q << _12) | (q >> _20))
        p = np.uint32(p + q)
        s = np.uint32(s ^ p)
        s = np.uint32(np.uint32(s << _8) | (s >> _24))
        r = np.uint32(r + s)
        q = np.uint32(q ^ r)
        q = np.uint32(np.uint32(q << _7) | (q >> _25))
        row_a[i], row_b[i], row_c[i], row_d[i] = p, q, r, s


@machine_code
def _blocks(keys: Any, begin: int, count: int, nonce: Any, counter: int, start: Any, x: Any) -> None:
    """Blocks of ``count`` keys from row ``begin`` into the columns of ``x`` (16, lanes); unused lanes repeat the last
    key.
    """
    for i in range(_LANES):
        row = begin + min(i, count - 1)
        for j in range(4):
            start[j, i] = _CONSTANTS[j]
        for j in range(8):
            start[4 + j, i] = keys[row, j]
        start[12, i] = counter
        for j in range(3):
            start[13 + j, i] = nonce[j]
    for j in range(16):
        for i in range(_LANES):
            x[j, i] = start[j, i]
    for _ in range(10):
        _quarter(x, 0, 4, 8, 12)
        _quarter(x, 1, 5, 9, 13)
        _quarter(x, 2, 6, 10, 14)
        _quarter(x, 3, 7, 11, 15)
        _quarter(x, 0, 5, 10, 15)
        _quarter(x, 1, 6, 11, 12)
        _quarter(x, 2, 7, 8, 13)
        _quarter(x, 3, 4, 9, 14)
    for j in range(16):
        for i in range(_LANES):
            x[j, i] += start[j, i]


@machine_code
def _expand(keys: Any, nonce: Any, words: int, shift: Any, prime: Any, out: Any) -> None:
    """Elements of all keys. A stream is read word by word; what is not below the prime is passed over."""
    count, width = out.shape
    x, start = np.empty((16, _LANES), np.uint32), np.empty((16, _LANES), np.uint32)
    filled = np.zeros(_LANES, np.int64)
    for begin in range(0, count, _LANES):
        lanes = min(_LANES, count - begin)
        filled[:] = 0
        left, counter = lanes if width > 0 else 0, 0
        while left > 0:
            _blocks(keys, begin, lanes, nonce, counter, start, x)
            counter += 1
            for i in range(lanes):
                at = filled[i]
                if at == width:
                    continue
                for j in range(0, 16, words):
                    value = np.uint64(x[j, i])
                    if words == 2:
                        value |= np.uint64(x[j + 1, i]) << np.uint64(32)
                    value >>= shift
                    if value < prime and at < width:
                        out[begin + i, at] = value
                        at += 1
                filled[i] = at
                if at == width:
                    left -= 1
