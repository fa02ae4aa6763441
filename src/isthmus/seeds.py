"""Named random streams.

Every draw comes from a generator whose seed is a hash of *where* and *why* it is drawn:
``(seed, party, phase, round, sequence, purpose)``. Nothing depends on the order in which parties run, so engines agree
bit for bit, a replayed round draws the same numbers, and two methods share partition, split and first weights.

Secrets (masks, noise, pseudonyms) never come from here: they come from the party's own ``secrets``.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

Key = str | int


@lru_cache(maxsize=1 << 14)
def _encoded(key: Key) -> bytes:
    # By value, not by class: a StrEnum or a numpy integer draws what the plain string or int draws.
    data = (f"str:{str.__str__(key)}" if isinstance(key, str) else f"int:{operator.index(key)}").encode()
    return len(data).to_bytes(4, "big") + data


@dataclass(frozen=True)
class Stream:
    """A point in the tree of random streams.

    Example:
        >>> Stream(7).child("client-0", "train", 3).child("dropout").integer() == Stream(
        ...     7, ("client-0", "train", 3, "dropout")).integer()
        True
    """

    seed: int
    path: tuple[Key, ...] = ()

    def child(self, *keys: Key) -> Stream:
        """The stream below this one; distinct keys give independent streams."""
        return Stream(self.seed, self.path + keys)

    def integer(self) -> int:
        """A 63-bit seed. Keys are length-prefixed and typed, so ``("ab",)``, ``("a", "b")``, ``(1,)``, ``("1",)``
        differ.
        """
        digest = hashlib.sha256(b"".join([b"isthmus/stream", *map(_encoded, (self.seed, *self.path))])).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def torch(self) -> torch.Generator:
        """A fresh torch generator at the start of this stream."""
        return torch.Generator().manual_seed(self.integer())

    def numpy(self) -> np.random.Generator:
        """A fresh numpy generator at the start of this stream."""
        return np.random.default_rng(self.integer())

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Seed the *process* generator inside a ``with`` block, for layers that take no generator; restored on exit."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.integer())
            yield
