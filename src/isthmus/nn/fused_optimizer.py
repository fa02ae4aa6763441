r"""Optimiser steps as compiled loops, and gradient and step of a first-layer weight matrix in one pass.

Row f of the gradient :math:`S^\top G` is summed up in a cache-sized buffer and used at once, so the (clients, features,
width) gradient never exists. Rows of features that a client's training nodes never see have no gradient at all: what
moves them is weight decay, momentum and the pull of a proximal term, which need no forward pass, so the first step of a
call advances them by all its steps at once, while they are in cache. Both are exact.

    optimiser   step on one row, g the gradient with the pull mu (w - anchor) of a proximal term
    sgd         w = (1 - lr wd) w - lr g
    adam        g += wd w; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
                w -= lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

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
        common: beta1, 1 - beta1, beta2, 1 - beta2, eps, weight decay, and for SGD ``1 - lr wd``.
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

    def arrays(self, grad: Tensor) -> list[Array | None]:
        """All as (rows, H): gradient, source, weight, moments, anchor."""
        tensors = (
            grad.contiguous(),
            self.source,
            self.weight,
            self.first,
            self.second,
            self.anchor if self.pull else None,
        )
        return [None if tensor is None else tensor.view(-1, self.weight.shape[-1]).numpy() for tensor in tensors]


def step_rows(transposed: sp.csr_matrix, grad: Tensor, tensors: StepTensors, plan: StepPlan) -> None:
    r"""One step on weights whose gradient is :math:`S^\top G`.

    Args:
        transposed: :math:`S^\top` (K F, R).
        grad: G (R, H).
    """
    rows = tensors.weight.numel() // tensors.weight.shape[-1]
    features, apart, arrays = (
        rows // plan.table.shape[1],
        tensors.source.data_ptr() != tensors.weight.data_ptr(),
        tensors.arrays(grad),
    )
    pull = plan.common.dtype.type(tensors.pull)

    def work(begin: int, end: int) -> None:
        _step_rows(
            begin,
            end,
            features,
            plan.step,
            plan.idle_steps,
            apart,
            transposed.indptr,
            transposed.indices,
            transposed.data,
            *arrays,
            pull,
            plan.table,
            plan.common,
        )

    split(work, rows, tensors.weight.numel())


def step_dense(grad: Tensor, tensors: StepTensors, plan: StepPlan) -> None:
    """One step on weights of any shape (K, ...) whose gradient is given, shaped as they are."""
    clients = plan.table.shape[1]
    # Rows are those of the tensor, not clients: a large tensor of one client can then be shared among threads too.
    width = max(1, tensors.weight.shape[-1])
    rows = tensors.weight.numel() // width
    parts = (grad.contiguous(), tensors.weight, tensors.first, tensors.second)
    arrays = [None if part is None else part.view(-1, width).numpy() for part in parts]

    def work(begin: int, end: int) -> None:
        _step_dense(begin, end, rows // clients, plan.step, *arrays, plan.table, plan.common)

    split(work, rows, tensors.weight.numel())


def step_rows_normed(
    transposed: sp.csr_matrix,
    grad: Tensor,
    tensors: StepTensors,
    plan: StepPlan,
    gamma: Tensor,
    beta: Tensor,
    u_grad: Tensor,
    v_grad: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""`step_rows` behind an input norm (see `isthmus.nn.first_layer_input`): the gradient of row f is
    :math:`\gamma_f ((S^\top G)_f - u^\top G) + \beta_f v^\top G`, which leaves no row without one.

    Args:
        gamma, beta: (K, F), or (F,) for one client.
        u_grad, v_grad: :math:`u^\top G` and :math:`v^\top G` of each client (K, H).

    Returns:
        Gradients of gamma and beta, shaped as they are.
    """
    width = tensors.weight.shape[-1]
    rows = tensors.weight.numel() // width
    features, apart, arrays = (
        rows // plan.table.shape[1],
        tensors.source.data_ptr() != tensors.weight.data_ptr(),
        tensors.arrays(grad),
    )
    pull = plan.common.dtype.type(tensors.pull)
    norm = [tensor.reshape(-1).numpy() for tensor in (gamma, beta)]
    sums = [tensor.reshape(-1, width).numpy() for tensor in (u_grad, v_grad)]
    out = torch.empty(2, *gamma.shape, dtype=gamma.dtype)
    target = out.view(2, -1).numpy()

    def work(begin: int, end: int) -> None:
        _step_rows_normed(
            begin,
            end,
            features,
            plan.step,
            apart,
            transposed.indptr,
            transposed.indices,
            transposed.data,
            *arrays,
            pull,
            plan.table,
            plan.common,
            *norm,
            *sums,
            target,
        )

    split(work, rows, tensors.weight.numel())
    return out[0], out[1]


# The compiler makes a version of each loop for what is None, without the branches that fall away: a choice made inside
# the loop would keep it from being vectorised.


@compiled
def _adam(
    width: int, grad: Array, weight: Array, first: Array, second: Array, size: float, scale: float, common: Array
) -> None:
    """One step of Adam on one row."""
    beta1, rest1, beta2, rest2, eps, decay = common[0], common[1], common[2], common[3], common[4], common[5]
    for h in range(width):
        g = grad[h] + decay * weight[h]
        m = beta1 * first[h] + rest1 * g
        v = beta2 * second[h] + rest2 * g * g
        first[h] = m
        second[h] = v
        weight[h] -= size * m / (math.sqrt(v) * scale + eps)


@compiled
def _sgd(width: int, grad: Array, weight: Array, size: float, common: Array) -> None:
    """One step of SGD on one row."""
    keep = common[6]
    for h in range(width):
        weight[h] = keep * weight[h] - size * grad[h]


@compiled
def _pulled(width: int, grad: Array, weight: Array, anchor: Array, pull: float, out: Array) -> None:
    """The gradient with that of a proximal term."""
    for h in range(width):
        out[h] = grad[h] + pull * (weight[h] - anchor[h])


@compiled
def _fetch(width: int, source: Array, weight: Array) -> None:
    for h in range(width):
        weight[h] = source[h]


@compiled
def _step_dense(
    begin: int,
    end: int,
    per_client: int,
    now: int,
    grad: Array,
    weight: Array,
    first: Any,
    second: Any,
    table: Array,
    common: Array,
) -> None:
    width = weight.shape[1]
    for row in range(begin, end):
        client = row // per_client
        if first is None:
            _sgd(width, grad[row], weight[row], table[now, client, 0], common)
        else:
            _adam(
                width,
                grad[row],
                weight[row],
                first[row],
                second[row],
                table[now, client, 0],
                table[now, client, 1],
                common,
            )


@compiled
def _step_rows(
    begin: int,
    end: int,
    features: int,
    now: int,
    idle_steps: int,
    apart: bool,
    indptr: Array,
    indices: Array,
    values: Array,
    grad: Array,
    source: Array,
    weight: Array,
    first: Any,
    second: Any,
    anchor: Any,
    pull: float,
    table: Array,
    common: Array,
) -> None:
    width = weight.shape[1]
    total = np.zeros(width, dtype=weight.dtype)
    pulled = np.zeros(width, dtype=weight.dtype)
    for row in range(begin, end):
        idle = indptr[row] == indptr[row + 1]
        if idle and idle_steps == 0:
            continue
        client = row // features
        w = weight[row]
        if apart:
            _fetch(width, source[row % len(source)], w)  # a source of one client serves all
        weighted_rows(indptr[row], indptr[row + 1], width, indices, values, grad, total)
        for step in range(now, now + (idle_steps if idle else 1)):
            size, scale = table[step, client, 0], table[step, client, 1]
            if anchor is None:
                if first is None:
                    _sgd(width, total, w, size, common)
                else:
                    _adam(width, total, w, first[row], second[row], size, scale, common)
            else:
                _pulled(width, total, w, anchor[row % len(anchor)], pull, pulled)
                if first is None:
                    _sgd(width, pulled, w, size, common)
                else:
                    _adam(width, pulled, w, first[row], second[row], size, scale, common)


@compiled
def _step_rows_normed(
    begin: int,
    end: int,
    features: int,
    now: int,
    apart: bool,
    indptr: Array,
    indices: Array,
    values: Array,
    grad: Array,
    source: Array,
    weight: Array,
    first: Any,
    second: Any,
    anchor: Any,
    pull: float,
    table: Array,
    common: Array,
    gamma: Array,
    beta: Array,
    u_grad: Array,
    v_grad: Array,
    out: Array,
) -> None:
    width = weight.shape[1]
    total = np.zeros(width, dtype=weight.dtype)
    for row in range(begin, end):
        client = row // features
        w, u, v = weight[row], u_grad[client], v_grad[client]
        if apart:
            _fetch(width, source[row % len(source)], w)
        weighted_rows(indptr[row], indptr[row + 1], width, indices, values, grad, total)
        out[0, row], out[1, row] = _norm_grads(width, total, u, v, w)
        gain, shift = gamma[row], beta[row]
        for h in range(width):
            total[h] = gain * (total[h] - u[h]) + shift * v[h]
        if anchor is not None:
            _pulled(width, total, w, anchor[row % len(anchor)], pull, total)
        if first is None:
            _sgd(width, total, w, table[now, client, 0], common)
        else:
            _adam(width, total, w, first[row], second[row], table[now, client, 0], table[now, client, 1], common)


# Here sums may be reordered: a chain of dependent additions would take as long as the rest of the step.
@partial(compiled, fastmath={"contract", "reassoc"})
def _norm_grads(width: int, total: Array, u: Array, v: Array, weight: Array) -> tuple[Any, Any]:
    gain_grad, shift_grad = total[0] * 0, total[0] * 0
    for h in range(width):
        gain_grad += (total[h] - u[h]) * weight[h]
        shift_grad += v[h] * weight[h]
    return gain_grad, shift_grad
