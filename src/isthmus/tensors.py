"""Weights as named tensors: read from a module, average, measure, compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from isthmus.errors import ProtocolError

Weights = Mapping[str, Tensor]
"""A model's numbers, by parameter name. Treated as immutable: whoever changes weights makes new ones."""


def get_weights(module: nn.Module) -> dict[str, Tensor]:
    """Detached copies of a module's parameters."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def check_same_names(expected: Iterable[str], given: Iterable[str]) -> None:
    """Raise unless both hold the same parameter names."""
    missing, extra = set(expected) - set(given), set(given) - set(expected)
    if missing or extra:
        raise ProtocolError(f"weights do not fit the model: missing {sorted(missing)}, unexpected {sorted(extra)}")


def check_same_shape(name: str, expected: Tensor, given: Tensor) -> None:
    """Raise unless both have the same shape: torch would stretch the smaller one without a word."""
    if expected.shape != given.shape:
        raise ProtocolError(f"weight {name!r} has shape {tuple(given.shape)}, expected {tuple(expected.shape)}")


def scaled(weights: Weights, factor: float) -> dict[str, Tensor]:
    """``factor * W``, tensor by tensor."""
    return {name: tensor * factor for name, tensor in weights.items()}


def weighted_mean(items: Sequence[Weights], shares: Sequence[float]) -> dict[str, Tensor]:
    """``sum_k share_k W_k`` in the given order, one at a time so that only one sum is held in memory."""
    if not items:
        raise ProtocolError("a mean needs at least one set of weights")
    total = {name: tensor * shares[0] for name, tensor in items[0].items()}
    for weights, share in zip(items[1:], shares[1:], strict=True):
        check_same_names(total, weights)
        for name, tensor in weights.items():
            check_same_shape(name, total[name], tensor)
            total[name].add_(tensor, alpha=share)
    return total


def num_values(weights: Weights) -> int:
    """How many numbers the weights hold."""
    return sum(tensor.numel() for tensor in weights.values())


def equal_weights(a: Weights, b: Weights) -> bool:
    """Bit equality, names included: NaN equals itself, 0.0 and -0.0 differ."""
    return a.keys() == b.keys() and all(_same_bits(a[name], b[name]) for name in a)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # `torch.equal` compares across types and calls -0.0 and 0.0 equal.
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def max_difference(a: Weights, b: Weights) -> float:
    """Largest absolute difference of two weights with the same names; NaN if there is one."""
    check_same_names(a, b)
    for name in a:
        check_same_shape(name, a[name], b[name])
    largest = [(a[name] - b[name]).abs().max().double() for name in a if a[name].numel()]
    return float(torch.stack(largest).max()) if largest else 0.0  # Python's max would lose a NaN
