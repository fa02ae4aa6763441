"""Dense operations of a layer, with or without a client dimension.

Shapes: h (R, in) with R = K p rows of K clients; weight (in, out) and bias (out,), or one of each per client: (K, in,
out) and (K, out).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from isthmus.nn import kernels
from isthmus.nn.kernels import add_rows, sum_rows

_SMALL = 1 << 23
"""Multiplications below which a product is left to numpy, which takes a thread for it. torch wakes all its threads for
a batch of matrices of any size, and where cores are busy waiting for them takes a hundred times as long as the
product."""


def matmul(h: Tensor, weight: Tensor) -> Tensor:
    """``h W``, client by client where the weight has a client dimension. (R, out)"""
    if not (h.requires_grad or weight.requires_grad) and h.numel() * weight.shape[-1] < _SMALL:
        return _numpy_matmul(h.view(*weight.shape[:-2], -1, h.shape[-1]), weight).view(-1, weight.shape[-1])
    if weight.dim() == 2:
        return h @ weight
    return torch.bmm(h.view(weight.shape[0], -1, h.shape[-1]), weight).view(-1, weight.shape[-1])


def matmul_grads(h: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of h (R, in) and of the weight, given that of ``matmul(h, weight)`` (R, out)."""
    rows, values = grad.view(*weight.shape[:-2], -1, grad.shape[-1]), h.view(*weight.shape[:-2], -1, h.shape[-1])
    product = _numpy_matmul if h.numel() * weight.shape[-1] < _SMALL else torch.matmul
    return product(rows, weight.mT).view(-1, h.shape[-1]), product(values.mT, rows)


def _numpy_matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


def add_bias(h: Tensor, bias: Tensor) -> Tensor:
    """``h + b``, client by client where the bias has a client dimension. (R, out) Without autograd in place of
    ``h``.
    """
    if not (h.requires_grad or bias.requires_grad):
        add_rows(h, bias)
        return h
    if bias.dim() == 1:
        return h + bias
    return (h.view(bias.shape[0], -1, h.shape[-1]) + bias.unsqueeze(1)).view(-1, h.shape[-1])


def bias_grad(grad: Tensor, bias: Tensor) -> Tensor:
    """Gradient of the bias given that of ``add_bias(h, bias)``."""
    return sum_rows(grad, bias.numel() // bias.shape[-1]).view(bias.shape)


def add_up(tensors: Iterable[Tensor]) -> Tensor:
    """The sum; of one tensor, itself."""
    total, *others = tensors
    for tensor in others:
        total = total + tensor
    return total


def first_rows(h: Tensor, clients: int, padded: int) -> Tensor:
    """The first ``padded`` rows of every client: the rows of the next level (`isthmus.nn.inputs` orders them so)."""
    if h.shape[0] == clients * padded:
        return h
    return h.view(clients, -1, h.shape[-1])[:, :padded].reshape(-1, h.shape[-1])


def activate(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """``relu(z) * mask``. ``z`` may be overwritten: no layer needs it again."""
    if z.requires_grad and z._is_view():  # to change a view in place costs autograd more than a copy
        return torch.relu(z) if mask is None else torch.relu(z) * mask
    activated: Tensor = _Activate.apply(z, mask)  # type: ignore[no-untyped-call]
    return activated


class _Activate(torch.autograd.Function):
    """In place; one pass forward, one backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor, mask: Tensor | None) -> Tensor:
        ctx.mark_dirty(z)
        kernels.activate(z.detach(), mask)
        ctx.save_for_backward(z, *(() if mask is None else (mask,)))
        return z

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        h, *mask = (tensor.detach() for tensor in ctx.saved_tensors)  # type: ignore[attr-defined]
        return kernels.activate_grad(grads[0].contiguous(), h, mask[0] if mask else None), None
