"""Features of a whole graph brought to one scale (``scale``), for data sets that come as they are.

    scale      what every value becomes
    none       itself
    row        itself divided by the root mean square of its row: bags of words, which stay sparse
    standard   (value - mean) / deviation of its column, over all nodes
    auto       none where all values are 0 or 1; row where none is negative and most are zero; else standard

What came of it is kept with the model (`Scaling`) and applied to the data it predicts for later. Owners of tables agree
on means and deviations by sums before the first round (`isthmus.data.tables.scaling`); here one process holds all nodes
anyway. Labels and parts of the split play no role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.graph.normalise import from_torch_csr, to_torch_csr

Scale = Literal["none", "row", "standard", "auto"]
Kind = Literal["none", "row", "standard"]


@dataclass(frozen=True)
class Scaling:
    """What a scale came to on one graph.

    Args:
        kind: Never ``auto``.
        mean, deviation: Of every column (F,), for ``standard``.
    """

    kind: Kind = "none"
    mean: Tensor | None = None
    deviation: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Features (n, F) on this scale, in the layout they have; ``standard`` makes them dense."""
        if self.kind == "none" or not x.numel():
            return x
        if self.kind == "row":
            return _by_row(x)
        assert self.mean is not None and self.deviation is not None
        return ((x.to_dense().to(torch.float64) - self.mean) / self.deviation).to(torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        """What must be kept beside the kind."""
        return {} if self.mean is None or self.deviation is None else {"mean": self.mean, "deviation": self.deviation}

    @classmethod
    def of(cls, kind: Kind, tensors: Mapping[str, Tensor]) -> Scaling:
        """The reverse of `tensors`."""
        return cls(kind, tensors.get("mean"), tensors.get("deviation"))


UNSCALED = Scaling()


def scaling_of(x: Tensor, scale: Scale) -> Scaling:
    """What a scale is for these features."""
    kind = _suitable(x) if scale == "auto" else scale
    if kind != "standard" or not x.numel():
        return Scaling("none" if kind == "standard" else kind)
    dense = x.to_dense().to(torch.float64)
    deviation = dense.std(0, correction=0)
    deviation = torch.where(deviation > 1e-12 * dense.abs().amax(0).clamp(min=1.0), deviation, 1.0)  # constant columns
    return Scaling(kind, dense.mean(0), deviation)


def scaled(x: Tensor, scale: Scale) -> Tensor:
    """Features (n, F) on the scale asked for."""
    return scaling_of(x, scale).apply(x)


def _suitable(x: Tensor) -> Kind:
    """What ``auto`` stands for."""
    values = x.values() if x.layout == torch.sparse_csr else x
    if bool(((values == 0) | (values == 1)).all()):
        return "none"
    return "row" if x.layout == torch.sparse_csr and not bool((values < 0).any()) else "standard"


def _by_row(x: Tensor) -> Tensor:
    if x.layout != torch.sparse_csr:
        mean = x.square().mean(1, keepdim=True)
        return x / torch.where(mean > 0.0, mean, 1.0).sqrt()
    matrix = from_torch_csr(x)
    mean_square = np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel() / x.shape[1]
    return to_torch_csr(sp.csr_matrix(sp.diags(1.0 / np.sqrt(np.where(mean_square > 0.0, mean_square, 1.0))) @ matrix))
