r"""Losses of node classification, per client.

    name             loss of one row with logits q and class y
    ce               :math:`-\log \mathrm{softmax}(q)_y`
    double_softmax   :math:`-\log \mathrm{softmax}(\mathrm{softmax}(q))_y`, what FedStruct's published code minimises: bounded away from
                     0, with damped gradients

A client's loss is the mean over its training rows; with none it is exactly zero, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.errors import unknown
from isthmus.nn.inputs import Inputs

Loss = Callable[[Tensor, Inputs], Tensor]
"""(logits (K p, C), inputs) -> loss of each client (K,). The sum over clients gives every client its own gradient."""


def ce(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross entropy of each client. (K,)"""
    rows = torch.nn.functional.cross_entropy(logits, inputs.y, reduction="none")
    return (rows * inputs.weight).view(inputs.clients, -1).sum(1)


def double_softmax(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross entropy with the softmax applied twice. (K,)"""
    return ce(torch.softmax(logits, dim=-1), inputs)


_LOSSES: dict[str, Loss] = {"ce": ce, "double_softmax": double_softmax}


def losses() -> tuple[str, ...]:
    """Names `get_loss` knows."""
    return tuple(sorted(_LOSSES))


def get_loss(name: str) -> Loss:
    """The loss called ``name``."""
    if name not in _LOSSES:
        raise unknown("loss", name, _LOSSES)
    return _LOSSES[name]
