r"""Optimiser steps as compiled loops, and gradient and step of a first-layer weight matrix in one pass.

Row f of the gradient :math:`S^\top G` is summed up in a cache-sized buffer and used at once, so the (clients, features,
width) gradient never exists. Rows of features that a client's training nodes never see have no gradient at all: what
moves them is weight decay, momentum and the pull of a proximal term, which need no forward pass, so the first step of a
call advances them by all its steps at once, while they are in cache. Both are exact.

    optimiser   step on one row, g the gradient with the pull mu (w - anchor) of a proximal term
    sgd         w = (1 - lr wd) w - lr g
    adam        g += wd w; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
                w -= lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
    adamw       w = (1 - lr wd) w, then as adam with wd = 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.nn.kernels import Array, compiled, split, weighted_rows


@dataclass(frozen=True)
class StepPlan:
    """The constants of a run of steps, worked out once per call.

    Args:
        table: Step size (with Adam's bias correction, ``lr / (1 - beta1^t)``) and ``1 / sqrt(1 - beta2^t)`` for every
            step of every client (steps, K, 2).
        common: beta1, 1 - beta1, beta2, 1 - beta2, eps, weight decay in the gradient (Adam), and what is kept of a
            weight beside it (``1 - lr wd`` of SGD and AdamW, 1 of Adam).
        step: The step taken now, from 0.
    """

    table: Array
    common: Array
    step: int = 0

    @property
    def idle_steps(self) -> int:
        """Rows without gradient take all steps in the first one."""
        return len(self.table) if self.step == 0 else 0


@dataclass(frozen=True)
class StepTensors:
    """The tensors a step works on.

    Args:
        source: Weights before the step, (K, F, H), or (F, H) where all clients start from the same.
        weight: Weights after the step, (K, F, H), or (F, H) for one client; may be ``source`` itself.
        first, second: Adam's moments, shaped as ``weight``, changed in place; None takes a step of SGD.
        pull: mu of a proximal term.
        anchor: What it pulls to, shaped as ``source`` may be; None where there is no such term.
    """

    source: Tensor
    weight: Tensor
    first: Tensor | None = None
    second: Tensor | None = None
    pull: float = 0.0
    anchor: Tensor | None = None


class _Arrays(NamedTuple):
    """The tensors of a step as rows (.., H). Handed to compiled loops one by one: for each that is None the compiler
    makes a version without the branches that fall away, which it does not for a field.
    """

    grad: Array
    source: Array
    weight: Array
    first: Array | None
    second: Array | None
    anchor: Array | None


class _Now(NamedTuple):
    """The step taken: its number, steps of rows without gradient, rows of each client, whether weights are read
    elsewhere than they are written, and constants.
    """

    step: int
    idle_steps: int
    per_client: int
    apart: bool
    pull: Any
    table: Array
    common: Array


class _Matrix(NamedTuple):
    """A CSR matrix."""

    indptr: Array
    indices: Array
    values: Array


class _InputNorm(NamedTuple):
    """gamma and beta of every row, u^T G and v^T G of every client, and where gradients of the first two go (2, ..)."""

    gamma: Array
    beta: Array
    u_grad: Array
    v_grad: Array
    out: Array


def step_dense(grad: Tensor, tensors: StepTensors, plan: StepPlan) -> None:
    """One step on weights of any shape (K, ...) whose gradient is given, shaped as they are."""
    # Rows are those of the tensor, not clients: a large tensor of one client can then be shared among threads too.
    table, width = plan.table[plan.step], max(1, tensors.weight.shape[-1])
    parts = (grad.contiguous(), tensors.weight, tensors.first, tensors.second)
    arrays = [None if part is None else part.view(-1, width).numpy() for part in parts]
    rows = tensors.weight.numel() // width
    split(lambda begin, end: _step_dense(begin, end, table, plan.common, *arrays), rows, rows * width)


def step_rows(transposed: sp.csr_matrix, grad: Tensor, tensors: StepTensors, plan: StepPlan) -> None:
    r"""One step on weights whose gradient is :math:`S^\top G`.

    Args:
        transposed: :math:`S^\top` (K F, R).
        grad: G (R, H).
    """
    now, arrays = _prepared(grad, tensors, plan)
    matrix = _Matrix(transposed.indptr, transposed.indices, transposed.data)
    split(lambda begin, end: _step_rows(begin, end, now, matrix, *arrays), len(arrays.weight), tensors.weight.numel())


def step_rows_normed(
    transposed: sp.csr_matrix,
    grad: Tensor,
    tensors: StepTensors,
    plan: StepPlan,
    norm: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    r"""`step_rows` behind an input norm (see `isthmus.nn.first_layer_input`): the gradient of row f is
    :math:`\gamma_f ((S^\top G)_f - u^\top G) + \beta_f v^\top G`, which leaves no row without one.

    Args:
        norm: gamma and beta (K, F), or (F,) for one client.
        sums: :math:`u^\top G` and :math:`v^\top G` of each client (K, H).

    Returns:
        Gradients of gamma and beta, shaped as they are.
    """
    now, arrays = _prepared(grad, tensors, plan)
    matrix = _Matrix(transposed.indptr, transposed.indices, transposed.data)
    gamma, beta = (tensor.reshape(-1).numpy() for tensor in norm)
    u_grad, v_grad = (tensor.reshape(-1, tensors.weight.shape[-1]).numpy() for tensor in sums)
    out = torch.empty(2, *norm[0].shape, dtype=norm[0].dtype)
    behind = _InputNorm(gamma, beta, u_grad, v_grad, out.view(2, -1).numpy())

    def work(begin: int, end: int) -> None:
        _step_rows_normed(begin, end, now, matrix, behind, *arrays)

    split(work, len(arrays.weight), tensors.weight.numel())
    return out[0], out[1]


def _prepared(grad: Tensor, tensors: StepTensors, plan: StepPlan) -> tuple[_Now, _Arrays]:
    width = max(1, tensors.weight.shape[-1])
    anchor = tensors.anchor if tensors.pull else None
    parts = (grad.contiguous(), tensors.source, tensors.weight, tensors.first, tensors.second, anchor)
    arrays = _Arrays(*(None if part is None else part.view(-1, width).numpy() for part in parts))  # type: ignore[arg-type]
    apart = tensors.source.data_ptr() != tensors.weight.data_ptr()
    pull = plan.common.dtype.type(tensors.pull)
    per_client = len(arrays.weight) // plan.table.shape[1]
    return _Now(plan.step, plan.idle_steps, per_client, apart, pull, plan.table, plan.common), arrays


# Fields are taken out of their tuples before a loop: each access counts references.


@compiled
def _row(array: Any, row: int) -> Any:
    """A row, None of none; an array of one client serves all."""
    return None if array is None else array[row % len(array)]


@compiled
def _update(
    grad: Array,
    weight: Array,
    first: Any,
    second: Any,
    anchor: Any,
    pull: float,
    size: float,
    scale: float,
    common: Array,
) -> None:
    """A step on one row, of Adam where there are moments, else of SGD."""
    beta1, rest1, beta2, rest2, eps = common[0], common[1], common[2], common[3], common[4]
    decay, keep = common[5], common[6]
    for h in range(len(weight)):
        g = grad[h]
        if anchor is not None:
            g += pull * (weight[h] - anchor[h])
        if first is None:
            weight[h] = keep * weight[h] - size * g
        else:
            g += decay * weight[h]
            m = beta1 * first[h] + rest1 * g
            v = beta2 * second[h] + rest2 * g * g
            first[h] = m
            second[h] = v
            weight[h] = keep * weight[h] - size * m / (math.sqrt(v) * scale + eps)


@compiled
def _fetch(source: Array, weight: Array) -> None:
    for h in range(len(weight)):
        weight[h] = source[h]


@compiled
def _step_dense(
    begin: int, end: int, table: Array, common: Array, grad: Array, weight: Array, first: Any, second: Any
) -> None:
    per_client, no_pull = len(weight) // len(table), common[0]
    for row in range(begin, end):
        client, moments = row // per_client, (_row(first, row), _row(second, row))
        _update(grad[row], weight[row], *moments, None, no_pull, table[client, 0], table[client, 1], common)


@compiled
def _step_rows(
    begin: int,
    end: int,
    now: _Now,
    matrix: _Matrix,
    grad: Array,
    source: Array,
    weight: Array,
    first: Any,
    second: Any,
    anchor: Any,
) -> None:
    """Gradient and step, one row of weights after the other; rows without gradient take all their steps at once."""
    indptr, indices, values = matrix
    now_step, idle_steps, per_client, apart, pull, table, common = now
    width = weight.shape[1]
    total = np.zeros(width, dtype=weight.dtype)
    for row in range(begin, end):
        idle = indptr[row] == indptr[row + 1]
        if idle and idle_steps == 0:
            continue
        client, w, m, v, a = row // per_client, weight[row], _row(first, row), _row(second, row), _row(anchor, row)
        if apart:
            _fetch(source[row % len(source)], w)  # a source of one client serves all
        weighted_rows(indptr[row], indptr[row + 1], width, indices, values, grad, total)
        for step in range(now_step, now_step + (idle_steps if idle else 1)):
            _update(total, w, m, v, a, pull, table[step, client, 0], table[step, client, 1], common)


@compiled
def _step_rows_normed(
    begin: int,
    end: int,
    now: _Now,
    matrix: _Matrix,
    norm: _InputNorm,
    grad: Array,
    source: Array,
    weight: Array,
    first: Any,
    second: Any,
    anchor: Any,
) -> None:
    indptr, indices, values = matrix
    gamma, beta, u_grad, v_grad, out = norm
    table, common, width = now.table[now.step], now.common, weight.shape[1]
    total = np.zeros(width, dtype=weight.dtype)
    for row in range(begin, end):
        client = row // now.per_client
        w, u, v = weight[row], u_grad[client], v_grad[client]
        if now.apart:
            _fetch(source[row % len(source)], w)
        weighted_rows(indptr[row], indptr[row + 1], width, indices, values, grad, total)
        out[0, row], out[1, row] = _norm_grads(width, total, u, v, w)
        gain, shift = gamma[row], beta[row]
        for h in range(width):
            total[h] = gain * (total[h] - u[h]) + shift * v[h]
        moments = _row(first, row), _row(second, row)
        _update(total, w, *moments, _row(anchor, row), now.pull, table[client, 0], table[client, 1], common)


# Here sums may be reordered: a chain of dependent additions would take as long as the rest of the step.
@partial(compiled, fastmath={"contract", "reassoc"})
def _norm_grads(width: int, total: Array, u: Array, v: Array, weight: Array) -> tuple[Any, Any]:
    gain_grad, shift_grad = total[0] * 0, total[0] * 0
    for h in range(width):
        gain_grad += (total[h] - u[h]) * weight[h]
        shift_grad += v[h] * weight[h]
    return gain_grad, shift_grad
