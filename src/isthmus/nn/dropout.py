"""Dropout whose draws belong to a client.

Srivastava et al., JMLR 2014. Every client draws from its own generator, for its own rows only: a cohort of K clients
draws exactly what the K clients draw one by one, so the two agree with dropout too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.nn.kernels import scaled_mask

_LEVELS = 2**16


class DropoutSource:
    """One generator per client of the inputs, in the same order; pass it to ``forward`` in training, None in
    evaluation.

    A mask element takes 16 random bits: four times as fast as a float each, and dropout draws as many numbers as a
    layer has outputs. The drop rate is thereby rounded to a multiple of 2^-16; kept values are scaled by the rounded
    rate, so the mean is kept exactly.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = tuple(generators)

    def mask(self, rows: Sequence[int], padded: int, width: int, rate: float, dtype: torch.dtype) -> Tensor:
        """What to multiply with: 0 or 1 / (1 - rate).

        Args:
            rows: Real rows of each client.
            padded: Rows per client with padding; padding gets no draws.
            width: Columns.
            rate: Share of values dropped.

        Returns:
            (K * padded, width)
        """
        if len(rows) != len(self.generators):
            raise ConfigError(
                f"dropout needs one generator per client: {len(self.generators)} given, {len(rows)} clients"
            )
        words = -(-width // 4)
        bits = torch.zeros(len(rows) * padded, words, dtype=torch.int64)
        for k, (count, generator) in enumerate(zip(rows, self.generators, strict=True)):
            bits[k * padded : k * padded + count].random_(-(2**63), None, generator=generator)
        return scaled_mask(bits.view(torch.int16), width, _threshold(rate), self.scale(rate), dtype)

    def draw(self, words: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """So many times 64 random bits of each client as 16-bit values, client after client, and where each begins:
        the same that `mask` draws call after call.
        """
        if len(words) != len(self.generators):
            raise ConfigError(
                f"dropout needs one generator per client: {len(self.generators)} given, {len(words)} clients"
            )
        ends = np.cumsum(words)
        drawn = torch.empty(max(1, int(ends[-1])), dtype=torch.int64)
        for generator, end, count in zip(self.generators, ends.tolist(), words.tolist(), strict=True):
            drawn[end - count : end].random_(-(2**63), None, generator=generator)
        return drawn.view(torch.int16).numpy(), 4 * (ends - words)

    def bits(self, rows: int, width: int, rate: float) -> tuple[Tensor, int]:
        """`mask` of a single client before it is one: a value is kept where its 16 bits (rows, >= width) reach the
        threshold.
        """
        if len(self.generators) != 1:
            raise ConfigError(f"dropout needs one generator per client: {len(self.generators)} given, 1 client")
        drawn = torch.empty(rows, -(-width // 4), dtype=torch.int64).random_(
            -(2**63), None, generator=self.generators[0]
        )
        return drawn.view(torch.int16), _threshold(rate)

    @staticmethod
    def threshold(rate: float) -> int:
        """What 16 bits must reach for their value to be kept."""
        return _threshold(rate)

    @staticmethod
    def scale(rate: float) -> float:
        """What kept values are multiplied by."""
        return _LEVELS / (_LEVELS - _dropped(rate))


def dropout_mask(
    dropout: DropoutSource | None, rows: Sequence[int], padded: int, z: Tensor, rate: float
) -> Tensor | None:
    """`DropoutSource.mask` of the values ``z``; None where nothing is dropped."""
    return None if dropout is None or not rate else dropout.mask(rows, padded, z.shape[-1], rate, z.dtype)


def _dropped(rate: float) -> int:
    return min(round(rate * _LEVELS), _LEVELS - 1)


def _threshold(rate: float) -> int:
    return _dropped(rate) - _LEVELS // 2  # int16 runs from -2^15
