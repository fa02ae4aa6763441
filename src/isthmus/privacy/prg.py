"""A party's own source of secret randomness, and the streams that a shared secret key expands to.

Masks, shares, noise and dummies come from here: 32 bytes of the operating system, expanded by AES-256 in counter mode.
Nothing depends on the seed of a run.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from isthmus.privacy import aes_blocks

logger = logging.getLogger(__name__)

Words = NDArray[np.uint64]

KEY_BYTES, SHORT_KEY_BYTES = 32, 16
_BLOCK = 1 << 15
"""Words made at a time (256 KiB): they are added while still in the cache."""
_ZEROS = bytes(8 * _BLOCK)


class Keystream:
    """The stream of one key, of 32 bytes (AES-256) or 16 (AES-128). Each key has one stream; the caller never uses a
    key for two purposes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) not in (KEY_BYTES, SHORT_KEY_BYTES):
            raise ValueError(f"a stream key has {KEY_BYTES} or {SHORT_KEY_BYTES} bytes, got {len(key)}")
        # The counter starts at zero: safe because a key serves one stream only.
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self.fill: Callable[[memoryview, bytearray], int] = self._encryptor.update_into
        """The next bytes of the stream, as many as there are zeros, into a buffer that is 16 bytes longer."""

    @staticmethod
    def fresh() -> Keystream:
        """A stream nobody else can know or repeat."""
        return Keystream(secrets.token_bytes(KEY_BYTES))

    def words(self, count: int) -> Words:
        """The next ``count`` uniform 64-bit words."""
        buffer = bytearray(8 * count + 16)
        view, done = memoryview(buffer), 0
        while done < 8 * count:
            size = min(8 * _BLOCK, 8 * count - done)
            done += self._encryptor.update_into(memoryview(_ZEROS)[:size], view[done:])
        return np.frombuffer(buffer, "<u8", count).astype(np.uint64, copy=False)

    def below(self, bound: int, count: int) -> Words:
        """``count`` uniform integers in [0, bound), without bias: words that would cause one are thrown away."""
        if not 0 < bound <= 2**64:
            raise ValueError(f"a bound lies in [1, 2^64], got {bound}")
        shift = np.uint64(64 - max(1, (bound - 1).bit_length()))
        found, missing = [], count
        while missing:
            words = self.words(missing) >> shift
            found.append(words[words <= np.uint64(bound - 1)])
            missing -= found[-1].size
        return np.concatenate(found) if found else np.empty(0, np.uint64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Numbers in (0, 1], 53 bits each."""
        return ((self.words(count) >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53

    def normal(self, count: int) -> NDArray[np.float64]:
        """Standard normal numbers (Box and Muller), cut at 8.5 deviations by the 53 bits they are made of."""
        half = (count + 1) // 2
        radius, angle = np.sqrt(-2.0 * np.log(self.uniform(half))), (2.0 * math.pi) * self.uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def laplace(self, count: int) -> NDArray[np.float64]:
        """Laplace numbers of scale 1."""
        words = self.words(count)
        size = -np.log(((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53)
        return np.where(words & np.uint64(1), size, -size)


def add_streams(target: Words, add: Sequence[bytes], subtract: Sequence[bytes] = ()) -> None:
    """Add the streams of some keys to ``target`` and subtract those of others, modulo 2^64, in place."""
    short = all(len(key) == SHORT_KEY_BYTES for key in (*add, *subtract))
    if short and target.flags.c_contiguous and _processor_agrees():
        aes_blocks.add_streams(target, add, subtract)
    else:
        _add_by_library(target, add, subtract)


@cache
def _processor_agrees() -> bool:
    """Whether there is a faster way to the same streams. Compared once per process: masks made by a wrong cipher would
    cancel all the same, and hide nothing.
    """
    if not aes_blocks.WIDTH:
        return False
    keys = [secrets.token_bytes(SHORT_KEY_BYTES) for _ in range(3)]
    ours, theirs = np.zeros(1001, np.uint64), np.zeros(1001, np.uint64)
    aes_blocks.add_streams(ours, keys[:2], keys[2:])
    _add_by_library(theirs, keys[:2], keys[2:])
    if not np.array_equal(ours, theirs):
        logger.warning("this processor's AES instructions give other streams than the library: masks use the library")
        return False
    return True


def _add_by_library(target: Words, add: Sequence[bytes], subtract: Sequence[bytes]) -> None:
    fills = [(Keystream(key).fill, np.add) for key in add] + [(Keystream(key).fill, np.subtract) for key in subtract]
    buffer = bytearray(8 * min(_BLOCK, target.size) + 16)
    for begin in range(0, target.size, _BLOCK):
        part = target[begin : begin + _BLOCK]
        zeros, mask = memoryview(_ZEROS)[: 8 * part.size], np.frombuffer(buffer, "<u8", part.size)
        for fill, apply in fills:
            fill(zeros, buffer)
            apply(part, mask, part)
