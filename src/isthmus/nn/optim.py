r"""Optimisers as functions on named tensors.

State is a plain value, so it goes into checkpoints and messages like any other. Tensors may carry a leading client dimension: then every
client has its own moments, and one pass over contiguous memory updates all of them.

Adam -- Kingma & Ba, ICLR 2015, https://arxiv.org/abs/1412.6980, with torch's conventions: betas (.9, .999), eps 1e-8, weight decay
added to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam as _torch_adam

from isthmus.errors import unknown
from isthmus.nn.kernels import AdamPlan
from isthmus.nn.memory import empty
from isthmus.records import Record
from isthmus.tensors import Weights

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class OptimizerState(Record):
    """What an optimiser remembers.

    Args:
        steps: Steps taken, one number per client: a client that sat out a round has taken fewer.
        first: Running mean of gradients by parameter name; empty for SGD.
        second: Running mean of squared gradients by parameter name; empty for SGD.
    """

    steps: tuple[int, ...]
    first: dict[str, Tensor]
    second: dict[str, Tensor]


Step = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], OptimizerState, float, float], OptimizerState]
"""(weights, gradients, state, lr, weight decay) -> state. Weights and moments are changed in place: the caller must own them.
Only parameters with a gradient move. Gradients may be used as scratch memory."""


def sgd_step(
    weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptimizerState, lr: float, weight_decay: float
) -> OptimizerState:
    """``w <- w - lr (g + wd w)``."""
    for name, grad in grads.items():
        weights[name].mul_(1.0 - lr * weight_decay).add_(grad, alpha=-lr)
    return replace(state, steps=tuple(step + 1 for step in state.steps))


def adam_plan(steps: Sequence[int], epochs: int, lr: float, weight_decay: float, dtype: torch.dtype) -> AdamPlan:
    """The constants of the next ``epochs`` steps of clients that have taken ``steps``, for the fused first-layer kernel."""
    number = np.asarray(steps, dtype=np.float64) + np.arange(1, epochs + 1, dtype=np.float64)[:, None]  # (epochs, K)
    table = np.stack([lr / (1.0 - BETA1**number), 1.0 / np.sqrt(1.0 - BETA2**number)], axis=-1)
    common = np.array([BETA1, 1.0 - BETA1, BETA2, 1.0 - BETA2, EPS, weight_decay])
    kind = np.float32 if dtype == torch.float32 else np.float64
    return AdamPlan(table.astype(kind), common.astype(kind))


def adam_step(
    weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptimizerState, lr: float, weight_decay: float
) -> OptimizerState:
    """One step of Adam by torch's fused kernel: one pass over weights, gradients and both moments."""
    steps = tuple(step + 1 for step in state.steps)
    lists: tuple[list[Tensor], ...] = ([], [], [], [])
    counters: list[Tensor] = []
    for name, grad in grads.items():
        tensors = (weights[name], grad, state.first[name], state.second[name])
        if len(set(steps)) == 1:
            groups: Sequence[tuple[Tensor, ...]] = [tensors]
        else:  # bias correction differs between clients: same kernel, a slice per client
            groups = [tuple(tensor[k] for tensor in tensors) for k in range(len(steps))]
        for k, group in enumerate(groups):
            for target, tensor in zip(lists, group, strict=True):
                target.append(tensor)
            counters.append(torch.tensor(float(steps[k] - 1)))  # the kernel counts up
    if counters:
        _torch_adam(
            lists[0], lists[1], lists[2], lists[3], [], counters, fused=True,
            amsgrad=False, beta1=BETA1, beta2=BETA2, lr=lr, weight_decay=weight_decay, eps=EPS, maximize=False,
        )  # fmt: skip
    return replace(state, steps=steps)


_STEPS: dict[str, Step] = {"adam": adam_step, "sgd": sgd_step}


def optimizers() -> tuple[str, ...]:
    """Names of the optimisers."""
    return tuple(sorted(_STEPS))


def get_step(name: str) -> Step:
    """The step function of the optimiser called ``name``."""
    if name not in _STEPS:
        raise unknown("optimizer", name, _STEPS)
    return _STEPS[name]


def fresh_state(optimizer: str, weights: Weights, *, clients: int = 1, frozen: Sequence[str] = ()) -> OptimizerState:
    """The state before the first step, for the parameters that are trained."""
    get_step(optimizer)
    if optimizer == "sgd":
        return OptimizerState((0,) * clients, {}, {})
    trained = {name: tensor for name, tensor in weights.items() if name not in frozen}
    return OptimizerState(
        (0,) * clients,
        {name: empty(tuple(tensor.shape), tensor.dtype).zero_() for name, tensor in trained.items()},
        {name: empty(tuple(tensor.shape), tensor.dtype).zero_() for name, tensor in trained.items()},
    )
