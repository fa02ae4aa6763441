"""Features of a whole graph brought to one scale (``scale``), for data sets that come as they are.

    scale      what every value becomes
    none       itself
    row        itself divided by the root mean square of its row: bags of words, which stay sparse
    standard   (value - mean) / deviation of its column, over all nodes
    auto       none where all values are 0 or 1; row where none is negative and most are zero; else standard

Owners of tables agree on means and deviations by sums before the first round (`isthmus.data.tables.scaling`); here one
process holds all nodes anyway. Labels and parts of the split play no role.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.graph.normalise import from_torch_csr, to_torch_csr

Scale = Literal["none", "row", "standard", "auto"]


def scaled(x: Tensor, scale: Scale) -> Tensor:
    """Features (n, F) on the scale asked for, in the layout they have; ``standard`` makes them dense."""
    if scale == "auto":
        scale = _suitable(x)
    if scale == "none" or not x.numel():
        return x
    if scale == "row":
        return _by_row(x)
    dense = x.to_dense().to(torch.float64)
    deviation = dense.std(0, correction=0)
    deviation = torch.where(deviation > 1e-12 * dense.abs().amax(0).clamp(min=1.0), deviation, 1.0)  # constant columns
    return ((dense - dense.mean(0)) / deviation).to(torch.float32)


def _suitable(x: Tensor) -> Scale:
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
