"""The arithmetic of HiFGL's layers at the devices of one silo: the propagation matrix, split into a source and a target
side (spec 3.1), the loss, and products with dense or sparse features.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.methods.hifgl.neighbours import Neighbourhood
from isthmus.nn.kernels import spmm

Matrix = Tensor | sp.csr_matrix


@dataclass(frozen=True)
class Propagation:
    """The rows of the propagation matrix A that belong to a silo's devices: A_uv = target_u source_v.

    The two factors are applied at the two ends of an edge, so that neither learns the other's degree. All are (n, 1).

    Args:
        edges: Edges inside the silo that need no protection, row = target; None if there are none.
        source, target: On what a device sends, and on the sum that arrives; ``target`` is 0 where that sum is discarded
            (too few neighbours).
        own: A_uu, the device's own term, which is added after decoding.
        returned: On the sum that arrives backward: ``source``, or 0 where it is discarded.
        inner: ``target`` for ``edges``.
    """

    edges: sp.csr_matrix | None
    source: Tensor
    target: Tensor
    own: Tensor
    returned: Tensor
    inner: Tensor

    def forward(self, values: Tensor, sums: Tensor) -> Tensor:
        """Rows of A h, from own values h (n, d) and the sums over neighbours of what they sent."""
        whole = self.target * sums + self.own * values
        if self.edges is not None:
            whole = whole + self.inner * spmm(self.edges, (self.source * values).contiguous())
        return whole

    def backward(self, values: Tensor, sums: Tensor) -> Tensor:
        """Rows of A^T e, the same with reversed edges."""
        whole = self.returned * sums + self.own * values
        if self.edges is not None:
            whole = whole + self.source * spmm(self._reversed, (self.inner * values).contiguous())
        return whole

    @cached_property
    def _reversed(self) -> sp.csr_matrix:
        assert self.edges is not None
        return self.edges.T.tocsr()

    def to(self, dtype: torch.dtype) -> Propagation:
        factors = {f.name: getattr(self, f.name).to(dtype) for f in fields(self) if f.name != "edges"}
        kind: Any = numpy_type(dtype)
        return replace(self, **factors, edges=None if self.edges is None else self.edges.astype(kind))


def propagation(kind: str, where: Neighbourhood, k_min: int) -> Propagation:
    r"""A of ``gcn`` (:math:`1/\sqrt{\tilde d}` on both sides) or ``sage`` (a mean). Devices of fewer than ``k_min``
    neighbours discard what they receive: such a device computes as if it had none, but still sends to others.
    """
    receives, listened_to = where.neighbours >= k_min, where.listeners >= k_min
    inner = np.zeros(where.count) if where.inner is None else np.asarray(where.inner.sum(axis=1)).ravel()
    degree = np.where(receives, where.degree, inner)
    if kind == "gcn":  # a self-loop in the data stands for the one every node gets (Kipf & Welling)
        source = 1.0 / np.sqrt(where.degree + 1.0)
        target = 1.0 / np.sqrt(degree + 1.0)
        own = 1.0 / (degree + 1.0)
    else:
        total = degree + where.loops
        target = np.divide(1.0, total, out=np.zeros(where.count), where=total > 0)
        source, own = np.ones(where.count), where.loops * target
    factors = (source, target * receives, own, source * listened_to, target)
    columns = [torch.from_numpy(np.asarray(factor, dtype=np.float64)).reshape(-1, 1) for factor in factors]
    return Propagation(where.inner, *columns)


def residuals(logits: Tensor, y: Tensor, train: Tensor, weight: float) -> tuple[Tensor, float]:
    """delta_u^(k) = weight (softmax(p_u) - y_u) [u labelled], and the summed cross entropy of labelled devices."""
    delta = torch.zeros_like(logits)
    rows = train.nonzero().flatten()
    if not rows.numel():
        return delta, 0.0
    chosen = torch.log_softmax(logits[rows], dim=1)
    labels = y[rows]
    loss = -float(chosen.gather(1, labels[:, None]).double().sum())
    part = chosen.exp()
    part[torch.arange(len(rows)), labels] -= 1.0
    delta[rows] = part * weight
    return delta, loss


def multiply(a: Matrix, b: Tensor) -> Tensor:
    return spmm(a, b.contiguous()) if isinstance(a, sp.csr_matrix) else a @ b


def multiply_transposed(a: Matrix, b: Tensor) -> Tensor:
    """``a^T b``."""
    if not isinstance(a, sp.csr_matrix):
        return a.T @ b
    out: Any = a.T @ b.numpy()
    return torch.from_numpy(np.ascontiguousarray(out))


def dense(a: Matrix) -> Tensor:
    return torch.from_numpy(a.toarray()) if isinstance(a, sp.csr_matrix) else a


def numpy_type(dtype: torch.dtype) -> type[np.float32] | type[np.float64]:
    return np.float64 if dtype == torch.float64 else np.float32
