r"""Optimisers as functions on named tensors.

State is a plain value, so it goes into checkpoints and messages like any other. Tensors may carry a leading client
dimension: then every client has its own moments and its own number of steps, and one pass over contiguous memory
updates all of them.

Adam -- Kingma & Ba, ICLR 2015, https://arxiv.org/abs/1412.6980, with torch's conventions: betas (.9, .999), eps 1e-8,
weight decay added to the gradient. AdamW -- Loshchilov & Hutter, ICLR 2019, https://arxiv.org/abs/1711.05101: the same,
but weights shrink by ``lr * weight_decay`` beside the gradient's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import unknown
from isthmus.nn.buffers import empty
from isthmus.nn.fused_optimizer import StepPlan, StepTensors, step_dense
from isthmus.records import Record
from isthmus.tensors import Weights

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
_OPTIMIZERS = ("adam", "adamw", "sgd")


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

    def copy(self) -> OptimizerState:
        """The same with tensors of its own, for `take_step` to change."""
        first, second = (
            {name: empty(tuple(tensor.shape), tensor.dtype).copy_(tensor) for name, tensor in part.items()}
            for part in (self.first, self.second)
        )
        return OptimizerState(self.steps, first, second)


def step_plan(
    optimizer: str, steps: Sequence[int], epochs: int, lr: float, weight_decay: float, dtype: torch.dtype
) -> StepPlan:
    """The constants of the next ``epochs`` steps of clients that have taken ``steps``: step size, bias corrections,
    weight decay. Clients that have taken as many share them.
    """
    return _step_plan(optimizer, tuple(steps), epochs, lr, weight_decay, dtype)


@lru_cache(maxsize=64)
def _step_plan(
    optimizer: str, steps: tuple[int, ...], epochs: int, lr: float, weight_decay: float, dtype: torch.dtype
) -> StepPlan:
    if optimizer not in _OPTIMIZERS:
        raise unknown("optimizer", optimizer, _OPTIMIZERS)
    number = np.asarray(steps, dtype=np.float64) + np.arange(1, epochs + 1, dtype=np.float64)[:, None]  # (epochs, K)
    moments = optimizer != "sgd"
    correction = (1.0 - BETA1**number, 1.0 - BETA2**number) if moments else (np.ones_like(number),) * 2
    table = np.stack([lr / correction[0], 1.0 / np.sqrt(correction[1])], axis=-1)
    in_gradient, keep = (weight_decay, 1.0) if optimizer == "adam" else (0.0, 1.0 - lr * weight_decay)
    common = np.array([BETA1, 1.0 - BETA1, BETA2, 1.0 - BETA2, EPS, in_gradient, keep])
    kind = np.float32 if dtype == torch.float32 else np.float64
    return StepPlan(table.astype(kind), common.astype(kind))


def take_step(weights: Weights, grads: Weights, state: OptimizerState, plan: StepPlan) -> OptimizerState:
    """One step on every parameter that has a gradient.

    Weights and moments are changed in place: the caller must own them.

    Args:
        plan: From `step_plan` with the optimiser and this state's steps.
    """
    for name, grad in grads.items():
        step_dense(grad, StepTensors(weights[name], weights[name], state.first.get(name), state.second.get(name)), plan)
    return replace(state, steps=tuple(step + 1 for step in state.steps))


def stepped(
    weights: Weights, grads: Weights, state: OptimizerState, *, optimizer: str, lr: float, weight_decay: float
) -> tuple[dict[str, Tensor], OptimizerState]:
    """One step that leaves what it was given as it is: new weights, new state."""
    fresh = {name: tensor.clone() for name, tensor in weights.items()}
    plan = step_plan(optimizer, state.steps, 1, lr, weight_decay, next(iter(fresh.values())).dtype)
    return fresh, take_step(fresh, grads, state.copy(), plan)


class Stepper:
    """An optimiser at work, step after step.

    Args:
        weights: By name; those that get a gradient are changed in place. All of one type.
        state: Before the first step; its moments are changed in place.
        steps: Number of steps that will be taken.
    """

    def __init__(
        self,
        optimizer: str,
        weights: dict[str, Tensor],
        state: OptimizerState,
        *,
        steps: int,
        lr: float,
        weight_decay: float = 0.0,
    ) -> None:
        self.weights, self.state, self.taken = weights, state, 0
        dtype = next((tensor.dtype for tensor in weights.values()), torch.float32)
        self.plan = step_plan(optimizer, state.steps, steps, lr, weight_decay, dtype)
        """The constants of the next step."""

    def tensors(self, name: str, source: Tensor | None = None, pull: tuple[float, Tensor] | None = None) -> StepTensors:
        """What a step on one weight works on, for gradients that take it themselves.

        Args:
            source: The weight before the step where it is kept elsewhere.
            pull: (mu, anchor) of a proximal term.
        """
        weight = self.weights[name]
        moments = self.state.first.get(name), self.state.second.get(name)
        return StepTensors(weight if source is None else source, weight, *moments, *(pull or ()))

    def take(self, grads: Weights) -> None:
        """The next step on every weight that has a gradient."""
        self.state = take_step(self.weights, grads, self.state, self.plan)
        self.taken += 1
        self.plan = replace(self.plan, step=self.taken)


def fresh_state(optimizer: str, weights: Weights, *, clients: int = 1, frozen: Sequence[str] = ()) -> OptimizerState:
    """The state before the first step, for the parameters that are trained."""
    if optimizer not in _OPTIMIZERS:
        raise unknown("optimizer", optimizer, _OPTIMIZERS)
    if optimizer == "sgd":
        return OptimizerState((0,) * clients, {}, {})
    trained = {name: tensor for name, tensor in weights.items() if name not in frozen}
    return OptimizerState(
        (0,) * clients,
        {name: empty(tuple(tensor.shape), tensor.dtype).zero_() for name, tensor in trained.items()},
        {name: empty(tuple(tensor.shape), tensor.dtype).zero_() for name, tensor in trained.items()},
    )
