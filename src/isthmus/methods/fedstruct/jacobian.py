"""Jacobians of structure embeddings, as appendices G.1 and H send them."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.tensors import Weights, num_values

LARGEST_JACOBIAN = 2**26
"""Numbers that a round may send: all that the server sends, or a client to one other."""


def check_size(values: int, learned: Weights) -> None:
    """Refuse Jacobians of so many values that would not fit."""
    size = values * num_values(learned)
    if size > LARGEST_JACOBIAN:
        raise ConfigError(
            f"gradients=jacobian would send {size:,} numbers a round ({values:,} embedding values x parameters), more "
            f"than {LARGEST_JACOBIAN:,}: use gradients=residuals, or a smaller graph and model"
        )


def jacobian(values: Tensor, learned: Weights) -> dict[str, Tensor]:
    """d values_vc / d theta_q of every parameter (t, C, ...), value by value."""
    parts = {name: tensor.new_zeros(*values.shape, *tensor.shape) for name, tensor in learned.items()}
    for v in range(values.shape[0]):
        for c in range(values.shape[1]):
            grads = torch.autograd.grad(values[v, c], list(learned.values()), retain_graph=True)
            for name, grad in zip(learned, grads, strict=True):
                parts[name][v, c] = grad
    return parts


def pulled_back(residual: Tensor, parts: Weights) -> dict[str, Tensor]:
    """sum_v (d z_v / d theta_q)^T r_v of every parameter."""
    return {name: torch.tensordot(residual, part, dims=2) for name, part in parts.items()}
