"""Weights and optimiser states of many clients as stacked tensors (K, ...), and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.nn.optim import OptimizerState
from isthmus.tensors import Weights, check_same_names


def stack_weights(items: Sequence[Weights]) -> dict[str, Tensor]:
    """Weights of K clients with a leading client dimension. No copy where they are `unstack_weights` of one stack, in
    order.
    """
    for item in items[1:]:
        check_same_names(items[0], item)
    return {name: _join([item[name] for item in items]) for name in items[0]}


def unstack_weights(weights: Weights) -> list[dict[str, Tensor]]:
    """The weights of each client, as views."""
    parts = {name: tensor.unbind(0) for name, tensor in weights.items()}
    clients = len(next(iter(parts.values())))
    return [{name: views[k] for name, views in parts.items()} for k in range(clients)]


def stack_states(items: Sequence[OptimizerState]) -> OptimizerState:
    """Optimiser states of single clients as one of all; no copy where they are views of one stack, in order."""
    return OptimizerState(
        tuple(step for item in items for step in item.steps),
        stack_weights([item.first for item in items]),
        stack_weights([item.second for item in items]),
    )


def unstack_states(state: OptimizerState) -> list[OptimizerState]:
    """The optimiser state of each client, as views."""
    if not state.first:
        return [OptimizerState((step,), {}, {}) for step in state.steps]
    parts = zip(state.steps, unstack_weights(state.first), unstack_weights(state.second), strict=True)
    return [OptimizerState((step,), first, second) for step, first, second in parts]


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """A stack of the tensors, without copying where they lie one behind the other in one piece of memory."""
    head = tensors[0]
    size = head.numel()
    storage = head.untyped_storage().data_ptr()
    behind = all(
        tensor.untyped_storage().data_ptr() == storage
        and tensor.storage_offset() == head.storage_offset() + k * size
        and tensor.shape == head.shape
        and tensor.dtype == head.dtype
        and tensor.is_contiguous()
        for k, tensor in enumerate(tensors)
    )
    if not behind or not size:
        return torch.stack(list(tensors))
    return torch.as_strided(head, (len(tensors), *head.shape), (size, *head.stride()), head.storage_offset())
