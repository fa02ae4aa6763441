"""Local training of a single client by the compiled loop of `isthmus.nn.client_kernel`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ProtocolError
from isthmus.nn.buffers import empty
from isthmus.nn.client_kernel import Aim, Plan, idle_rows
from isthmus.nn.client_program import Program, padded
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.fused_optimizer import StepPlan
from isthmus.nn.kernels import Array
from isthmus.nn.loss import Loss
from isthmus.nn.optim import OptimizerState
from isthmus.tensors import Weights

Pull = tuple[float, Weights]
"""mu and the anchor of a proximal term."""

LOSSES = ("ce", "double_softmax")
"""Losses the compiled loop knows by name."""


def known_loss(loss: str | Loss) -> bool:
    """Whether the compiled loop knows this loss: one of the labels, or a cross entropy to soft labels."""
    return loss in LOSSES if isinstance(loss, str) else loss.soft is not None and loss.of_embedding is None


def aim_of(loss: str | Loss, program: Program, unpad: Callable[[Tensor], Tensor]) -> tuple[Aim, Tensor | None]:
    """What the loop minimises, and what the value of the loss has besides (K,).

    Args:
        unpad: `Inputs.unpad` of the inputs that soft labels are for.
    """
    if isinstance(loss, str):
        return Aim(loss != "ce", *program.no_targets), None
    assert loss.soft is not None
    targets, total = (unpad(part).contiguous() for part in (loss.soft.targets, loss.soft.total))
    if targets.shape != (len(program.layout.y), program.classes) or {targets.dtype, total.dtype} != {program.dtype}:
        raise ProtocolError(  # the compiled loop checks no bounds
            f"soft labels are {targets.dtype} {tuple(targets.shape)}, the model's output rows {program.dtype} "
            f"{(len(program.layout.y), program.classes)}"
        )
    return Aim(False, targets.numpy(), total.numpy()), loss.soft.constant


def pull_fits(program: Program, pull: Pull | None) -> bool:
    """Whether the compiled loop knows this proximal term: on all first weights or on none, the same for all clients."""
    if pull is None:
        return True
    named = [name in pull[1] for name in program.first]
    shapes = {name: shape for name, (_, shape) in program.flat.items()}
    return all(named) and all(
        tensor.dtype == program.dtype and (name in program.first or tuple(tensor.shape) == shapes[name])
        for name, tensor in pull[1].items()
        if name in program.first or name in shapes
    )


def make_plan(program: Program, steps: StepPlan, pull: Pull | None) -> Plan:
    """The plan of a call, with the proximal term laid out."""
    kind = steps.common.dtype
    if pull is None or not pull[0]:
        none = np.zeros((1, 1), dtype=kind)
        return Plan(steps.table, steps.common, kind.type(0), none, none[0], none[0])
    mu, anchor = pull
    flat, mask = (torch.zeros(1, program.width, dtype=program.dtype) for _ in range(2))
    program.flatten(anchor, flat)
    program.flatten({name: torch.full_like(tensor, mu) for name, tensor in anchor.items()}, mask)
    rows = torch.cat([anchor[name].detach().reshape(program.features, -1) for name in program.first])
    return Plan(steps.table, steps.common, kind.type(mu), rows.numpy(), mask[0].numpy(), flat[0].numpy())


def train_client(
    program: Program,
    weights: Weights,
    state: OptimizerState,
    steps: StepPlan,
    *,
    pull: Pull | None,
    trained: Collection[str],
    dropout: DropoutSource | None,
    aim: Aim,
) -> tuple[dict[str, Tensor], OptimizerState, Tensor]:
    """All steps of one client. Nothing that is given is changed: weights, state, loss after them."""
    adam, epochs, features = bool(state.first), len(steps.table), program.features
    plan = make_plan(program, steps, pull)
    sources = (weights, state.first, state.second) if adam else (weights,)
    shape = (len(program.first) * features, program.layout.first_width)
    rows = [empty(shape, program.dtype) for _ in sources]
    flat = [empty((1, program.width), program.dtype) for _ in sources]
    for source, other in zip(sources, flat, strict=True):
        _lay_out(program, source, other[0].numpy())
    none = np.zeros((0, 0), dtype=plan.common.dtype)
    for t, (name, idle) in enumerate(zip(program.first, program.idle_masks, strict=True)):
        own = slice(t * features, (t + 1) * features)
        idle_rows(
            idle,
            *padded([source[name].contiguous() for source in sources]),
            plan.table[:, 0],
            plan.common,
            plan.pull,
            plan.anchor[own] if plan.pull else plan.anchor,
            *padded([part[own] for part in rows]),
            none.reshape(-1),
            none,
            False,
        )
    loss = program.run(rows, flat, plan, program.draw(dropout, epochs), program.trained(trained), aim)
    ended = [_named(program, part, other, source) for part, other, source in zip(rows, flat, sources, strict=True)]
    moments = ended[1:] if adam else [{}, {}]
    return ended[0], OptimizerState(tuple(step + epochs for step in state.steps), *moments), loss


def _lay_out(program: Program, source: Weights, flat: Array) -> None:
    """Copy a client's tensors after the first. In numpy: torch takes several times as long to find a part of one."""
    for name, (place, shape) in program.flat.items():
        # Moments of what is frozen are not read and not kept.
        flat[place : place + math.prod(shape)] = source[name].numpy().reshape(-1) if name in source else 0


def _named(program: Program, rows: Tensor, flat: Tensor, like: Weights) -> dict[str, Tensor]:
    """By name, in the order of ``like``, without a client dimension."""
    features = program.features
    found = {name: rows[t * features : (t + 1) * features] for t, name in enumerate(program.first)}
    for name, (place, shape) in program.flat.items():
        found[name] = flat[0, place : place + math.prod(shape)].view(shape)
    return {name: found[name] for name in like}
