"""Features brought to the scale of the training, as the first step of a plain module."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn


class InputScale(nn.Module):
    """Columns of the training's mean 0 and deviation 1, or without those every row of mean square 1.

    Args:
        mean, deviation: Of every column (F,); None for ``row``.
    """

    def __init__(self, kind: Literal["row", "standard"], mean: Tensor | None, deviation: Tensor | None) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "row":
            square = x.square().mean(1, keepdim=True)
            return x / torch.where(square > 0.0, square, torch.ones_like(square)).sqrt()
        mean: Any = self.mean
        scaled: Tensor = ((x.to(mean.dtype) - mean) / self.deviation).to(x.dtype)
        return scaled


class ScaleInput:
    """The same before the forward pass of a module of the user's own."""

    def __init__(self, scale: InputScale) -> None:
        self.scale = scale

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.scale(given[0]), *given[1:])
