r"""Compiled loops for the two operations that decide how fast local training is.

`spmm` is a sparse-dense product. torch's own goes through a solver handle, a zero fill and a copy per call, which for a client's few
hundred rows costs several times the product.

`adam_rows` takes the gradient of a first-layer weight matrix and Adam's step in one pass: row f of the gradient :math:`S^\top G` is
summed up in a cache-sized buffer and used at once, so the (clients, features, width) gradient never exists. Rows of features that a
client's training nodes never see have no gradient at all: what moves them is weight decay and momentum only, which needs no
forward pass, so the first step of a call advances them by all its steps at once, while they are in cache. Both are exact.

All loops are sequential and release the interpreter lock; `split` runs them on stretches of rows in as many threads as torch uses. Every
output row is computed by one thread in one order: the number of threads does not change a bit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

_WORK_PER_THREAD = 1 << 20
"""Values a thread must have to work on before starting it pays."""

# "contract" lets a * b + c become one instruction; nothing else about rounding is relaxed. The numpy error model drops the
# division-by-zero branch that would keep the loops from being vectorised.
_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}


def spmm(matrix: sp.csr_matrix, dense: Tensor, values: Array | None = None) -> Tensor:
    """``matrix @ dense``: (m, n) x (n, H) -> (m, H). ``values`` replaces the values of the matrix."""
    out = torch.empty(matrix.shape[0], dense.shape[1], dtype=dense.dtype)
    spmm_into(matrix, dense, out, values)
    return out


def spmm_into(matrix: sp.csr_matrix, dense: Tensor, out: Tensor, values: Array | None = None) -> None:
    """`spmm` into memory the caller has."""
    data = matrix.data if values is None else values
    source, target = dense.detach().contiguous().numpy(), out.numpy()

    def work(begin: int, end: int) -> None:
        _spmm(begin, end, matrix.indptr, matrix.indices, data, source, target)

    split(work, int(matrix.shape[0]), (matrix.nnz + int(matrix.shape[0])) * dense.shape[1])


@dataclass(frozen=True)
class AdamPlan:
    """The constants of a run of Adam steps, worked out once per call.

    Args:
        table: Step size with bias correction, ``lr / (1 - beta1^t)``, and ``1 / sqrt(1 - beta2^t)``, for every step of every client
            (steps, K, 2).
        common: beta1, 1 - beta1, beta2, 1 - beta2, eps, weight decay.
        step: The step taken now, from 0.
    """

    table: Array
    common: Array
    step: int = 0

    @property
    def idle_steps(self) -> int:
        """Rows without gradient take all steps in the first one."""
        return len(self.table) if self.step == 0 else 0


def adam_rows(
    transposed: sp.csr_matrix, grad: Tensor, source: Tensor, weight: Tensor, first: Tensor, second: Tensor, plan: AdamPlan
) -> None:
    r"""One step of Adam on a weight matrix whose gradient is :math:`S^\top G`.

    Args:
        transposed: :math:`S^\top` (K F, R).
        grad: G (R, H).
        source: Weights before the step, (K, F, H), or (F, H) where all clients start from the same.
        weight: Weights after the step (K, F, H); may be ``source`` itself.
        first, second: Moments (K, F, H), changed in place.
        plan: Constants, and which step this is.
    """
    rows, features, apart, arrays = _layout(grad, source, weight, first, second, plan)

    def work(begin: int, end: int) -> None:
        _adam_rows(
            begin, end, features, plan.step, plan.idle_steps, apart, transposed.indptr, transposed.indices, transposed.data,
            *arrays, plan.table, plan.common,
        )  # fmt: skip

    split(work, rows, weight.numel())


def adam_rows_normed(
    transposed: sp.csr_matrix,
    grad: Tensor,
    source: Tensor,
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    plan: AdamPlan,
    gamma: Tensor,
    beta: Tensor,
    u_grad: Tensor,
    v_grad: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""`adam_rows` behind an input norm (see `isthmus.nn.operand`): the gradient of row f is
    :math:`\gamma_f ((S^\top G)_f - u^\top G) + \beta_f v^\top G`, which leaves no row without one.

    Args:
        gamma, beta: (K, F), or (F,) for one client.
        u_grad, v_grad: :math:`u^\top G` and :math:`v^\top G` of each client (K, H).

    Returns:
        Gradients of gamma and beta, shaped as they are.
    """
    rows, features, apart, arrays = _layout(grad, source, weight, first, second, plan)
    norm = [tensor.reshape(-1).numpy() for tensor in (gamma, beta)]
    sums = [tensor.reshape(-1, weight.shape[-1]).numpy() for tensor in (u_grad, v_grad)]
    out = torch.empty(2, *gamma.shape, dtype=gamma.dtype)
    target = out.view(2, -1).numpy()

    def work(begin: int, end: int) -> None:
        _adam_rows_normed(
            begin, end, features, plan.step, apart, transposed.indptr, transposed.indices, transposed.data,
            *arrays, plan.table, plan.common, *norm, *sums, target,
        )  # fmt: skip

    split(work, rows, weight.numel())
    return out[0], out[1]


def _layout(
    grad: Tensor, source: Tensor, weight: Tensor, first: Tensor, second: Tensor, plan: AdamPlan
) -> tuple[int, int, bool, list[Array]]:
    """Number of rows, rows per client, whether the source is other memory than the weight, and all tensors as (rows, H)."""
    width = weight.shape[-1]
    rows = weight.numel() // width
    arrays = [tensor.view(-1, width).numpy() for tensor in (grad.contiguous(), source, weight, first, second)]
    return rows, rows // plan.table.shape[1], source.data_ptr() != weight.data_ptr(), arrays


def split(work: Callable[[int, int], None], rows: int, cost: int) -> None:
    """Run ``work(begin, end)`` over all rows, in several threads where the work is worth it."""
    threads = max(1, min(torch.get_num_threads(), cost // _WORK_PER_THREAD))
    if threads == 1:
        work(0, rows)
        return
    bounds = [rows * part // threads for part in range(threads + 1)]
    others = [threading.Thread(target=work, args=(bounds[part], bounds[part + 1])) for part in range(1, threads)]
    for thread in others:
        thread.start()
    work(bounds[0], bounds[1])
    for thread in others:
        thread.join()


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _spmm(begin: int, end: int, indptr: Array, indices: Array, values: Array, dense: Array, out: Array) -> None:
    width = dense.shape[1]
    for row in range(begin, end):
        total = out[row]
        _weighted_rows(indptr[row], indptr[row + 1], width, indices, values, dense, total)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _weighted_rows(begin: int, end: int, width: int, indices: Array, values: Array, dense: Array, total: Array) -> None:
    """total = sum_j values[j] * dense[indices[j]]"""
    for h in range(width):
        total[h] = 0
    for j in range(begin, end):
        value, row = values[j], dense[indices[j]]
        for h in range(width):
            total[h] += value * row[h]


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _adam(width: int, grad: Array, weight: Array, first: Array, second: Array, size: float, scale: float, common: Array) -> None:
    """One step on one row."""
    beta1, rest1, beta2, rest2, eps, decay = common[0], common[1], common[2], common[3], common[4], common[5]
    for h in range(width):
        g = grad[h] + decay * weight[h]
        m = beta1 * first[h] + rest1 * g
        v = beta2 * second[h] + rest2 * g * g
        first[h] = m
        second[h] = v
        weight[h] -= size * m / (math.sqrt(v) * scale + eps)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _fetch(width: int, row: int, features: int, source: Array, weight: Array) -> None:
    """Bring a row of the source over; a source of one client serves all."""
    start = source[row % len(source)] if len(source) == features else source[row]
    target = weight[row]
    for h in range(width):
        target[h] = start[h]


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _adam_rows(
    begin: int, end: int, features: int, now: int, idle_steps: int, apart: bool, indptr: Array, indices: Array, values: Array,
    grad: Array, source: Array, weight: Array, first: Array, second: Array, table: Array, common: Array,
) -> None:  # fmt: skip
    width = weight.shape[1]
    total = np.zeros(width, dtype=weight.dtype)
    for row in range(begin, end):
        idle = indptr[row] == indptr[row + 1]
        if idle and idle_steps == 0:
            continue
        if apart:
            _fetch(width, row, features, source, weight)
        client = row // features
        w, m, v = weight[row], first[row], second[row]
        _weighted_rows(indptr[row], indptr[row + 1], width, indices, values, grad, total)
        for step in range(now, now + (idle_steps if idle else 1)):
            _adam(width, total, w, m, v, table[step, client, 0], table[step, client, 1], common)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _adam_rows_normed(
    begin: int, end: int, features: int, now: int, apart: bool, indptr: Array, indices: Array, values: Array,
    grad: Array, source: Array, weight: Array, first: Array, second: Array, table: Array, common: Array,
    gamma: Array, beta: Array, u_grad: Array, v_grad: Array, out: Array,
) -> None:  # fmt: skip
    width = weight.shape[1]
    total = np.zeros(width, dtype=weight.dtype)
    for row in range(begin, end):
        if apart:
            _fetch(width, row, features, source, weight)
        client = row // features
        w, u, v = weight[row], u_grad[client], v_grad[client]
        gain, shift = gamma[row], beta[row]
        _weighted_rows(indptr[row], indptr[row + 1], width, indices, values, grad, total)
        out[0, row], out[1, row] = _norm_grads(width, total, u, v, w)
        for h in range(width):
            total[h] = gain * (total[h] - u[h]) + shift * v[h]
        _adam(width, total, w, first[row], second[row], table[now, client, 0], table[now, client, 1], common)


# Here sums may be reordered: a chain of dependent additions would take as long as the rest of the step.
@njit(**(_OPTIONS | {"fastmath": {"contract", "reassoc"}}))  # type: ignore[untyped-decorator]
def _norm_grads(width: int, total: Array, u: Array, v: Array, weight: Array) -> tuple[Any, Any]:
    gain_grad, shift_grad = total[0] * 0, total[0] * 0
    for h in range(width):
        gain_grad += (total[h] - u[h]) * weight[h]
        shift_grad += v[h] * weight[h]
    return gain_grad, shift_grad
