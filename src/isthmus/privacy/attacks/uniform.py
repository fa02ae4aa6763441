"""Does what a party saw look like noise? A chi-square test on high and low bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

_BINS = 256


def uniformity(values: NDArray[np.uint64], modulus: int = 2**64) -> float:
    """Probability that uniform values modulo ``modulus`` look at least as uneven; below 1e-6 they are not uniform.

    Equal stretches of the range are counted, and the lowest byte where the modulus is large enough for it to be even.
    The smaller of the two probabilities counts, twice.
    """
    flat = values.ravel()
    if flat.size < 20 * _BINS:
        raise ValueError(f"the test needs at least {20 * _BINS} values, got {flat.size}")
    bins = min(_BINS, modulus)
    stretch = -(-modulus // bins)
    expected = (
        np.array([min(modulus, (i + 1) * stretch) - min(modulus, i * stretch) for i in range(bins)], dtype=np.float64)
        / modulus
    )
    high = np.bincount((flat // np.uint64(stretch)).astype(np.int64), minlength=bins)
    kept = expected > 0
    results = [float(stats.chisquare(high[kept], expected[kept] / expected[kept].sum() * flat.size).pvalue)]
    if modulus > 2**24:
        low = np.bincount((flat & np.uint64(_BINS - 1)).astype(np.int64), minlength=_BINS)
        results.append(float(stats.chisquare(low).pvalue))
    return min(1.0, min(results) * len(results))
