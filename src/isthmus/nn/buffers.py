"""Memory for the largest tensors of local training, and arithmetic without denormals (subnormal floats)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_LARGE = 1 << 20  # bytes


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor. Large ones come from numpy, which asks the system for large pages: a pass over moments
    of many clients then takes about half as long, and fresh memory costs a fraction."""
    if dtype not in (torch.float32, torch.float64) or 4 * math.prod(shape) < _LARGE:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(shape, dtype=np.float32 if dtype == torch.float32 else np.float64))


@contextmanager
def without_subnormals() -> Iterator[None]:
    """Denormals, float32 numbers below 1.2e-38, count as zero inside.

    Weight decay takes dead units there after some dozen rounds, and a processor handles such numbers a hundred times
    slower than others: a round of NCI1 would take four times as long from round 80 on. They are far below what float32
    can add to anything that matters.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class Workspace:
    """Memory that is kept between calls.

    Training a thousand clients writes gigabytes; asking the system for them anew in every round costs more than the
    training.
    Whoever passes a workspace accepts that the weights of a result live in it: they are overwritten by the next call
    with it.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def empty(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor kept under ``key``, made anew where shape or type changed; its contents are whatever they are."""
        tensor = self._tensors.get(key)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            tensor = self._tensors[key] = empty(shape, dtype)
        return tensor
