"""Distance of short series of numbers.

Dynamic time warping (Sakoe & Chiba, 1978), as GCFL+ compares clients with it: the cheapest way to walk through both
series at once, point cost the squared difference, root of the sum. Own code: series have five to ten numbers, and the
packages that offer it bring compilers or tens of megabytes along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def dtw(a: Sequence[float], b: Sequence[float]) -> float:
    """Dynamic time warping distance; 0 for equal series, also where one only lingers longer at its values."""
    if not a or not b:
        raise ValueError("a series without values has no distance to another")
    row = [0.0, *[math.inf] * len(b)]  # row[j]: cheapest way to the pair (values of a so far, first j of b)
    for value in a:
        before, row = row, [math.inf] * (len(b) + 1)
        for j, other in enumerate(b, start=1):
            row[j] = (value - other) ** 2 + min(before[j - 1], before[j], row[j - 1])
    return math.sqrt(row[-1])
