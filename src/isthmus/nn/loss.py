r"""Losses of node classification, per client.

    name             loss of one row with logits q and class y
    ce               :math:`-\log \mathrm{softmax}(q)_y`
    double_softmax   :math:`-\log \mathrm{softmax}(\mathrm{softmax}(q))_y`, what FedStruct's published code minimises:
                     bounded away from
                     0, with damped gradients
    `distilled`      ce, and on any row a divergence from given soft labels

A client's loss is the mean over its training rows; with none it is exactly zero, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import DataError, unknown
from isthmus.nn.inputs import Inputs
from isthmus.nn.kernels import Array, compiled
from isthmus.nn.loss_kernels import label_loss, soft_loss, softmax


@dataclass(frozen=True, eq=False)
class SoftLabels:
    """A loss :math:`c - \\sum_i t_i^\\top \\log \\mathrm{softmax}(q_i)`.

    Args:
        targets: t (K p, C), constants.
        total: The sum of each row of t (K p,).
        constant: c of each client (K,).
    """

    targets: Tensor
    total: Tensor
    constant: Tensor


@dataclass(frozen=True)
class Loss:
    """A loss in two forms that agree.

    Args:
        value: (logits (K p, C), inputs) -> loss of each client (K,), differentiable. The sum over clients gives every
            client its own gradient.
        value_and_grad: The same without autograd, with the gradient of that sum for the logits (K p, C).
        of_embedding: A further term (embedding (K p, d), inputs) -> (K,), differentiable, of what the last layer is
            given (`Backbone.with_embedding`); gradients then come from autograd.
        soft: The loss as a cross entropy to constants, where it is one.
    """

    value: Callable[[Tensor, Inputs], Tensor]
    value_and_grad: Callable[[Tensor, Inputs], tuple[Tensor, Tensor]]
    of_embedding: Callable[[Tensor, Inputs], Tensor] | None = None
    soft: SoftLabels | None = None


def ce(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross entropy of each client. (K,)"""
    rows = torch.nn.functional.cross_entropy(logits, inputs.y, reduction="none")
    return (rows * inputs.weight).view(inputs.clients, -1).sum(1)


def double_softmax(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross entropy with the softmax applied twice. (K,)"""
    return ce(torch.softmax(logits, dim=-1), inputs)


def _value_and_grad(double: bool, logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    if inputs.num_labels > logits.shape[1]:  # the compiled loop checks no bounds
        raise DataError(
            f"labels go up to {inputs.num_labels - 1}, the model has {logits.shape[1]} classes; set num_classes "
            "accordingly"
        )
    loss, grad = torch.zeros(inputs.clients, dtype=logits.dtype), torch.empty_like(logits)
    arrays = (tensor.numpy() for tensor in (logits, inputs.y, inputs.weight, loss, grad))
    _label_losses(double, inputs.padded[-1], *arrays)
    return loss, grad


@compiled
def _label_losses(double: bool, padded: int, logits: Array, y: Array, weight: Array, loss: Array, grad: Array) -> None:
    for k in range(len(loss)):
        own = slice(k * padded, (k + 1) * padded)
        loss[k] = label_loss(double, logits[own], y[own], weight[own], grad[own])


def tallies(
    logits: Tensor, y: Tensor, owner: Tensor, parts: Tensor, num_parts: int, clients: int
) -> tuple[Tensor, Tensor]:
    """Right answers and summed cross entropy of each part of the nodes at each client (parts, K).

    Args:
        logits: (n, C).
        owner: Client of each node (n,).
        parts: Which parts a node is in, bit by bit (n,); nodes in any have a class.
    """
    correct = torch.zeros(num_parts, clients, dtype=torch.int64)
    losses = torch.zeros(num_parts, clients, dtype=torch.float64)
    arrays = (tensor.numpy() for tensor in (logits, y, owner, parts, correct, losses))
    _tallies(*arrays)
    return correct, losses


@compiled
def _tallies(logits: Array, y: Array, owner: Array, parts: Array, correct: Array, losses: Array) -> None:
    p = np.zeros(logits.shape[1], dtype=logits.dtype)
    for row in range(len(logits)):
        if parts[row] == 0:
            continue
        best = 0
        for c in range(1, logits.shape[1]):
            if logits[row, c] > logits[row, best]:
                best = c
        loss, right = -softmax(logits[row], y[row], p), int(best == y[row])
        for part in range(len(correct)):
            if (parts[row] >> part) & 1:
                correct[part, owner[row]] += right
                losses[part, owner[row]] += loss


def distilled(targets: Tensor, weight: Tensor, inputs: Inputs, labels: str = "ce") -> Loss:
    r"""The loss called ``labels`` plus :math:`\sum_i w_i\, KL(t_i \| \mathrm{softmax}(q_i))`: a student that also
    follows a teacher.

    With ``ce`` both are cross entropies to constants, so their targets are mixed once: :math:`m_i = w_i t_i + v_i\,
    \mathrm{onehot}(y_i)`, v the weights of the labels, and the gradient of row i is :math:`(w_i + v_i)\,
    \mathrm{softmax}(q_i) - m_i`.

    Args:
        targets: t, soft labels that sum to 1 (K p, C); constants.
        weight: w of each row (K p,); zero where there is no teacher.
        inputs: The inputs the loss will be used with.
    """
    entropy = (torch.xlogy(targets, targets).sum(dim=-1) * weight).view(inputs.clients, -1).sum(1)
    mixed = targets * weight.unsqueeze(1)
    total, beside = weight, None if labels == "ce" else get_loss(labels)
    if beside is None:
        mixed[torch.arange(len(inputs.y)), inputs.y] += inputs.weight
        total = total + inputs.weight

    def value(logits: Tensor, inputs: Inputs) -> Tensor:
        loss = entropy - (mixed * torch.log_softmax(logits, dim=-1)).view(inputs.clients, -1).sum(1)
        return loss if beside is None else loss + beside.value(logits, inputs)

    def value_and_grad(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        loss, grad = cross_entropies(logits, mixed, total, inputs.clients)
        loss += entropy
        if beside is None:
            return loss, grad
        other, other_grad = beside.value_and_grad(logits, inputs)
        return loss + other, grad.add_(other_grad)

    return Loss(value, value_and_grad, soft=SoftLabels(mixed, total, entropy) if beside is None else None)


def cross_entropies(logits: Tensor, targets: Tensor, total: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    r""":math:`-\sum_i t_i^\top \log \mathrm{softmax}(q_i)` over each client's rows (K,), and its gradient (K p, C).

    Args:
        targets: t (K p, C), constants.
        total: The sum of each row of t (K p,); rows with 0 are left out.
    """
    loss, grad = torch.zeros(clients, dtype=logits.dtype), torch.empty_like(logits)
    arrays = (tensor.numpy() for tensor in (logits, targets, total, loss, grad))
    _soft_losses(len(logits) // clients, *arrays)
    return loss, grad


@compiled
def _soft_losses(padded: int, logits: Array, targets: Array, total: Array, loss: Array, grad: Array) -> None:
    for k in range(len(loss)):
        own = slice(k * padded, (k + 1) * padded)
        loss[k] = soft_loss(logits[own], targets[own], total[own], grad[own])


def class_weights(counts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a training row counts by its class, so that every class counts the same; their mean over rows is 1. (C,)

    Args:
        counts: Training rows of each class (C,).
    """
    counts = counts.to(torch.float64)
    present = counts > 0
    return torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1.0)), 0.0).to(dtype)


_LOSSES = {
    "ce": Loss(ce, partial(_value_and_grad, False)),
    "double_softmax": Loss(double_softmax, partial(_value_and_grad, True)),
}


class Shifted:
    """A loss of logits to which something is added that does not come from the model: q = h + z (FedStruct, E1).

    After a backward pass ``residual`` holds dL/dq (K p, C), which is the gradient of z too.
    """

    def __init__(self, base: Loss, shift: Tensor) -> None:
        self.base, self.shift = base, shift
        self.residual: Tensor
        self.loss = Loss(self._value, self._value_and_grad)

    def _value(self, logits: Tensor, inputs: Inputs) -> Tensor:
        total = logits + self.shift
        total.register_hook(self._keep)  # type: ignore[no-untyped-call]
        return self.base.value(total, inputs)

    def _value_and_grad(self, logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        value, grad = self.base.value_and_grad(logits + self.shift, inputs)
        self._keep(grad.clone())  # the backward pass works in place
        return value, grad

    def _keep(self, grad: Tensor) -> None:
        self.residual = grad


def losses() -> tuple[str, ...]:
    """Names that `get_loss` accepts."""
    return tuple(sorted(_LOSSES))


def get_loss(name: str) -> Loss:
    """The loss called ``name``."""
    if name not in _LOSSES:
        raise unknown("loss", name, _LOSSES)
    return _LOSSES[name]
