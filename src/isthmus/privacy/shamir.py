"""Shamir's secret sharing: any ``threshold`` shares of a secret give it back, fewer say nothing about it.

A secret is a number below the Mersenne prime 2^127 - 1: in one piece what `field` and `lagrange`, made for long vectors
of 61-bit numbers, would hold in three.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from isthmus.errors import ProtocolError

PRIME = 2**127 - 1
SECRET_BYTES = 16


def fresh_secret() -> int:
    """A uniform secret from the operating system."""
    return secrets.randbelow(PRIME)


def share(secret: int, points: Sequence[int], threshold: int) -> list[int]:
    """The shares of a secret at these points, which are positive and differ."""
    if not 1 <= threshold <= len(points):
        raise ProtocolError(f"a secret in {len(points)} shares cannot need {threshold} of them")
    if len(set(points)) != len(points) or min(points) < 1:
        raise ProtocolError("shares of a secret need different positive points")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return [evaluate([secret, *coefficients], point) for point in points]


def evaluate(coefficients: Sequence[int], point: int) -> int:
    """The polynomial with these coefficients, constant first."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value


def recover(shares: Mapping[int, int], threshold: int) -> int:
    """The secret from shares by point; the first ``threshold`` of them are used."""
    if len(shares) < threshold:
        raise ProtocolError(f"{len(shares)} shares of a secret are too few: {threshold} are needed")
    points = tuple(sorted(shares)[:threshold])
    return sum(factor * shares[point] for factor, point in zip(_factors(points), points, strict=True)) % PRIME


@lru_cache(maxsize=4096)
def _factors(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's factors at zero. The same parties answer for many secrets, so they are kept."""
    found = []
    for own in points:
        above, below = 1, 1
        for other in points:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
