"""Entries from positions announced before a masked sum (FedStruct's powers): what whoever sees the announcements takes
for an edge.

True entries of the first power lie in the sender's own columns, and a node is its own neighbour, so they return in the
second power. Dummies that do not do the same stand out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Announced:
    """What one sender announced for one receiver's slots, power by power: flat positions, and how many columns there
    are.
    """

    powers: Mapping[int, Positions]
    columns: int


def edges_from_positions(announced: Announced, own: NDArray[np.bool_], *, filtered: bool = True) -> Positions:
    """Positions (slot, column) taken for edges between the receiver's slots and the sender's nodes.

    Args:
        own: (n,), which columns are the sender's.
        filtered: Only positions in its columns that return in the second power; otherwise all of the first.
    """
    first = np.asarray(announced.powers.get(1, np.empty(0, np.int64)))
    if not filtered:
        return first
    first = first[own[first % max(1, announced.columns)]]
    return np.intersect1d(first, announced.powers[2]) if 2 in announced.powers else first
