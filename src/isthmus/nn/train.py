"""Local training: `local_epochs` is the only loop; `train_locally` is the one of nodes.

It trains one client, or a cohort of clients side by side, with the same code: weights, gradients and moments of a
cohort carry a leading client dimension and `Inputs` are stacked. Clients of a cohort never influence each other; a
cohort ends where its clients end one by one.

A step of a node model works in two halves. The product of the constant features with the first weight matrix and its
gradient are written by hand, because they are the bulk of the work: with sparse features, gradient and step are one
pass over the weights (`isthmus.nn.fused_optimizer`), otherwise the gradient goes to memory we keep. Everything after
the first product is written by hand too for layers that allow it (`isthmus.nn.manual_gradients`), and left to autograd
for others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from isthmus.errors import ConfigError, ProtocolError
from isthmus.nn.backbone import Backbone
from isthmus.nn.buffers import Workspace
from isthmus.nn.client_program import Program, program_of
from isthmus.nn.client_training import aim_of, known_loss, pull_fits, train_client
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.first_layer_input import Norm
from isthmus.nn.inputs import Inputs
from isthmus.nn.loss import Loss, get_loss
from isthmus.nn.manual_gradients import Gradients, forward, has_manual_gradient, manual_gradients
from isthmus.nn.optim import OptimizerState, Stepper, fresh_state, step_plan
from isthmus.tensors import Weights, check_same_names

ExtraGradient = Callable[[Weights, Mapping[str, Tensor]], None]
"""(weights, gradients) -> None: adds a term's gradient to ``gradients`` in place."""


class TrainSettings(TypedDict, total=False):
    """What every local training takes; see `train_locally`."""

    epochs: Required[int]
    lr: Required[float]
    weight_decay: float
    optimizer: str
    loss: str
    extra_gradient: ExtraGradient | None
    frozen: Collection[str]
    dropout: DropoutSource | None


@dataclass(frozen=True)
class TrainResult:
    """What local training ends with.

    Args:
        weights: Trained weights, stacked (K, ...) for a cohort.
        optimizer_state: To hand in next time.
        loss: Loss of each client at the last step, before it (K,); with mini-batches their mean over the last epoch.
    """

    weights: dict[str, Tensor]
    optimizer_state: OptimizerState
    loss: Tensor


@dataclass(frozen=True)
class Proximal:
    """The gradient of FedProx's term ``(mu / 2) ||W - W_anchor||^2``: ``mu (W - W_anchor)``, for the names the anchor
    holds.

    Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127. Used as ``extra_gradient``.

    Args:
        mu: Strength of the pull.
        anchor: What to stay near to: the received weights. May be plain where the weights are stacked.
    """

    mu: float
    anchor: Weights

    def __call__(self, weights: Weights, grads: Mapping[str, Tensor]) -> None:
        for name, received in self.anchor.items():
            if name in grads:
                # One difference first: mu W - mu W_anchor rounds twice and is not exactly zero at the anchor.
                grads[name].add_(weights[name] - received, alpha=self.mu)

    def pulls(self, names: Collection[str], weights: Weights) -> dict[str, tuple[float, Tensor]]:
        """(mu, anchor) by name, for steps that add the term themselves."""
        found = {name: (self.mu, self.anchor[name].detach().contiguous()) for name in names if name in self.anchor}
        for name, (_, anchor) in found.items():
            shape = weights[name].shape
            if anchor.shape not in (shape, shape[-2:]) or anchor.dtype != weights[name].dtype:
                raise ProtocolError(
                    f"anchor of {name!r} is {anchor.dtype} {tuple(anchor.shape)}, the weight {tuple(shape)}"
                )
        return found


def full_batch() -> Iterable[tuple[Any, float]]:
    """An epoch of a single step on everything."""
    return ((None, 1.0),)


def local_epochs(
    gradients: Callable[[Any], tuple[dict[str, Tensor], Tensor]],
    stepper: Stepper,
    epochs: int,
    batches: Callable[[], Iterable[tuple[Any, float]]] = full_batch,
    extra_gradient: ExtraGradient | None = None,
) -> Tensor:
    """Train for ``epochs`` passes over the batches; the loop of every local training.

    Args:
        gradients: Batch -> gradients at ``stepper.weights`` and the loss of each client (K,). It may take the step on
            some weights itself (`Stepper.tensors`) and leave their gradients out.
        stepper: What takes the steps.
        batches: Makes the batches of an epoch, each with what it counts in the epoch's mean loss.
        extra_gradient: Adds the gradient of a further term.

    Returns:
        The loss over the last epoch, each batch's taken before its step (K,).
    """
    none = torch.zeros(len(stepper.state.steps), dtype=torch.float64)
    loss = none
    for _ in range(epochs):
        loss = none
        for batch, share in batches():
            grads, value = gradients(batch)
            if extra_gradient is not None:
                extra_gradient(stepper.weights, grads)
            stepper.take(grads)
            loss = value if share == 1.0 else loss + share * value
    return loss


def train_locally(
    model: Backbone,
    weights: Weights,
    optimizer_state: OptimizerState | None,
    inputs: Inputs,
    *,
    epochs: int,
    lr: float,
    weight_decay: float = 0.0,
    optimizer: str = "adam",
    loss: str | Loss = "ce",
    extra_gradient: ExtraGradient | None = None,
    frozen: Collection[str] = (),
    dropout: DropoutSource | None = None,
    donate: bool = False,
    workspace: Workspace | None = None,
) -> TrainResult:
    """Train for ``epochs`` full-batch steps.

    Args:
        model: Gives the shape of the computation; its own parameters are neither read nor changed.
        weights: To start from. For a cohort stacked (K, ...), or plain where all clients start from the same.
        optimizer_state: What the last call returned, or None to start afresh.
        inputs: Training inputs of one client, or `stack_inputs` of many.
        epochs: Number of steps, at least 0.
        lr: Step size.
        weight_decay: L2 term, added to the gradient.
        optimizer: ``adam``, ``adamw`` or ``sgd``.
        loss: ``ce`` or ``double_softmax``, or a loss of the caller's own (`isthmus.nn.loss.distilled`).
        extra_gradient: Adds the gradient of a further term, as `Proximal` does.
        frozen: Names of parameters that stay as they are.
        dropout: Generators of the clients; None trains without dropout.
        donate: The caller gives ``weights`` and ``optimizer_state`` away: they may be overwritten. Otherwise they are
            never changed.
        workspace: Memory to use; the weights of the result then live in it until the next call (see `Workspace`).
    """
    check_epochs(epochs)
    space = Workspace() if workspace is None else workspace
    stacked = _for_clients(model, weights, inputs)
    one_pass = _GradientPass(
        model, inputs, loss, dropout, trained={name for name in stacked if name not in set(frozen)}
    )
    state = starting_state(optimizer, optimizer_state, stacked, one_pass.trained, clients=inputs.clients, donate=True)
    program = _whole_call(model, stacked, inputs, one_pass.trained, extra_gradient, loss, epochs)
    if program is not None:
        pull = (extra_gradient.mu, extra_gradient.anchor) if isinstance(extra_gradient, Proximal) else None
        plan = step_plan(optimizer, state.steps, epochs, lr, weight_decay, inputs.weight.dtype)
        options: dict[str, Any] = {"pull": pull, "trained": one_pass.trained, "dropout": dropout}
        aim, constant = aim_of(loss, program, inputs.unpad)
        trained, state, value = train_client(program, stacked, state, plan, aim=aim, **options)
        return TrainResult(trained, state, value if constant is None else value + constant)
    state = state if donate else state.copy()

    # Weights whose gradient and step are one pass: no gradient is stored, and the first step reads them where the
    # caller has them.
    simple = epochs > 0 and (extra_gradient is None or isinstance(extra_gradient, Proximal))
    fused = [
        name
        for name, operand in inputs.first.items()
        if simple and name in one_pass.trained and operand.blocks is not None
    ]
    current: dict[str, Tensor] = {}
    start: dict[str, Tensor] = {}
    for name, tensor in stacked.items():
        if donate and tensor.is_contiguous():
            current[name] = tensor
            continue
        current[name] = space.empty(name, tuple(tensor.shape), tensor.dtype)
        if name in fused and not model.norm_names:  # behind a norm, weights and norm must both be per client
            start[name] = weights[name].detach().contiguous()
        else:
            current[name].copy_(tensor)
    buffers = {
        name: space.empty(f"gradient of {name}", tuple(current[name].shape), current[name].dtype)
        for name in inputs.first
        if name in one_pass.trained and name not in fused
    }
    pulls = extra_gradient.pulls(fused, current) if isinstance(extra_gradient, Proximal) else {}
    stepper = Stepper(optimizer, current, state, steps=epochs, lr=lr, weight_decay=weight_decay)

    def step_gradients(_: None) -> tuple[dict[str, Tensor], Tensor]:
        before = current if stepper.taken else current | start
        grads, product_grads, client_loss = one_pass.after_products(before)
        norm = _norm(model, before)
        for name in fused:
            tensors = stepper.tensors(name, before[name], pulls.get(name))
            one_pass.add_norm(grads, inputs.first[name].step(product_grads[name], tensors, stepper.plan, norm))
        one_pass.add_first(grads, product_grads, current, skip=fused, buffers=buffers)
        return grads, client_loss

    client_loss = local_epochs(step_gradients, stepper, epochs, extra_gradient=extra_gradient)
    return TrainResult(current, stepper.state, client_loss.to(inputs.weight.dtype))


def _whole_call(
    model: Backbone,
    weights: Weights,
    inputs: Inputs,
    trained: Collection[str],
    extra_gradient: ExtraGradient | None,
    loss: str | Loss,
    epochs: int,
) -> Program | None:
    """The program that does all steps of the call in one compiled loop, where there is one."""
    if inputs.clients != 1 or not epochs or not known_loss(loss):
        return None
    if any(weights[name].shape != shape for name, shape in parameter_shapes(model).items()):
        return None  # stacked, of one client
    if extra_gradient is not None and not isinstance(extra_gradient, Proximal):
        return None
    program = program_of(model, inputs)
    if program is None or any(name not in trained for name in program.first):
        return None
    pull = None if extra_gradient is None else (extra_gradient.mu, extra_gradient.anchor)
    return program if pull_fits(program, pull) else None


def train_batches(
    model: Backbone,
    weights: Weights,
    optimizer_state: OptimizerState | None,
    epochs_of_batches: Sequence[Sequence[tuple[Callable[[], Inputs], float]]],
    *,
    lr: float,
    weight_decay: float = 0.0,
    optimizer: str = "adam",
    loss: str | Loss = "ce",
    extra_gradient: ExtraGradient | None = None,
    frozen: Collection[str] = (),
    dropout: DropoutSource | None = None,
) -> TrainResult:
    """Train one client by mini-batches; nothing that is given is changed.

    Args:
        epochs_of_batches: Of every epoch its batches, each made when its turn comes, and what it counts in the epoch's
            mean loss.
        lr, weight_decay, optimizer, loss, extra_gradient, frozen, dropout: As in `train_locally`.
    """
    current = {name: tensor.detach().clone() for name, tensor in weights.items()}
    trained = {name for name in current if name not in set(frozen)}
    state = starting_state(optimizer, optimizer_state, current, trained)
    steps = sum(len(epoch) for epoch in epochs_of_batches)
    stepper = Stepper(optimizer, current, state, steps=steps, lr=lr, weight_decay=weight_decay)
    coming = iter(epochs_of_batches)

    def step_gradients(batch: Callable[[], Inputs]) -> tuple[dict[str, Tensor], Tensor]:
        return gradients(model, current, batch(), loss=loss, frozen=frozen, dropout=dropout)

    mean = local_epochs(step_gradients, stepper, len(epochs_of_batches), lambda: next(coming), extra_gradient)
    return TrainResult(current, stepper.state, mean.to(next(iter(current.values())).dtype))


def gradients(
    model: Backbone,
    weights: Weights,
    inputs: Inputs,
    *,
    loss: str | Loss = "ce",
    frozen: Collection[str] = (),
    dropout: DropoutSource | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of each client's loss and the loss itself (K,), for methods that send gradients (FedSGD).

    Weights of a cohort may be stacked or plain, as in `train_locally`; its gradients come stacked. ``loss`` may be a
    loss of the caller's own, e.g. `isthmus.nn.loss.Shifted`.
    """
    weights = _for_clients(model, weights, inputs)
    one_pass = _GradientPass(
        model, inputs, loss, dropout, trained={name for name in weights if name not in set(frozen)}
    )
    grads, product_grads, client_loss = one_pass.after_products(weights)
    one_pass.add_first(grads, product_grads, weights)
    return {name: grads[name] for name in weights if name in one_pass.trained}, client_loss


@torch.no_grad()
def predict(model: Backbone, weights: Weights, inputs: Inputs) -> Tensor:
    """Logits without dropout, padding removed, client after client (sum n_k, C); ``inputs.split`` parts them by client.

    Weights of a cohort may be stacked, or plain where all clients use the same.
    """
    check_same_names(parameter_shapes(model), weights)
    if not has_manual_gradient(model):
        logits: Tensor = functional_call(model, dict(weights), (inputs,))
        return inputs.unpad(logits)
    weights = {name: tensor.detach() for name, tensor in weights.items()}
    norm = _norm(model, weights)
    products = {name: operand.forward(weights[name], norm) for name, operand in inputs.first.items()}
    return inputs.unpad(forward(model, weights, products, inputs)[0])


class _WithEmbedding(nn.Module):
    """A backbone whose ``forward`` gives the embedding too, since ``functional_call`` knows only ``forward``."""

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        return self.model.with_embedding(*arguments)


def call_with_embedding(
    model: Backbone,
    weights: Weights,
    inputs: Inputs,
    dropout: DropoutSource | None = None,
    products: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits and embedding (`Backbone.with_embedding`) with these weights, padding included."""
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    found: tuple[Tensor, Tensor] = functional_call(_WithEmbedding(model), named, (inputs, dropout, products))
    return found


class _GradientPass:
    """Forward and backward pass of one model on one set of inputs."""

    def __init__(
        self,
        model: Backbone,
        inputs: Inputs,
        loss: str | Loss,
        dropout: DropoutSource | None,
        *,
        trained: Collection[str],
    ) -> None:
        self.model, self.inputs, self.dropout, self.trained = model, inputs, dropout, trained
        self.loss = get_loss(loss) if isinstance(loss, str) else loss
        manual = has_manual_gradient(model) and self.loss.of_embedding is None
        self._backward = manual_gradients if manual else autograd_gradients

    def after_products(self, weights: Weights) -> Gradients:
        """Everything after the first product: gradients of the weights there, gradients of the products, loss of each
        client.
        """
        norm = _norm(self.model, weights)
        products = {name: operand.forward(weights[name], norm) for name, operand in self.inputs.first.items()}
        grads, product_grads, client_loss = self._backward(
            self.model, weights, products, self.inputs, self.loss, self.dropout
        )
        return {name: grad for name, grad in grads.items() if name in self.trained}, product_grads, client_loss

    def add_first(
        self,
        grads: dict[str, Tensor],
        product_grads: Mapping[str, Tensor],
        weights: Weights,
        *,
        skip: Collection[str] = (),
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add the gradients of the first weight matrices, except those in ``skip``, and of the input norm."""
        norm = _norm(self.model, weights)
        norm_trained = any(name in self.trained for name in self.model.norm_names)
        for name, operand in self.inputs.first.items():
            if name in skip or not (name in self.trained or norm_trained):
                continue
            grad, *found = operand.backward(product_grads[name], weights[name], norm, out=(buffers or {}).get(name))
            if name in self.trained:
                grads[name] = grad
            self.add_norm(grads, found)

    def add_norm(self, grads: dict[str, Tensor], found: Sequence[Tensor | None] | None) -> None:
        """Add what one operand contributes to the gradients of gamma and beta."""
        for name, grad in zip(self.model.norm_names, found or (), strict=False):
            if name in self.trained and grad is not None:
                grads[name] = grads[name] + grad if name in grads else grad


def autograd_gradients(
    model: Backbone,
    weights: Weights,
    products: Mapping[str, Tensor],
    inputs: Inputs,
    loss: Loss,
    dropout: DropoutSource | None,
) -> Gradients:
    """The plain definition, for any backbone: `Backbone.forward` from its first products on."""
    products = {name: product.requires_grad_() for name, product in products.items()}
    outside = {*products, *model.norm_names}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items() if name not in outside}
    if loss.of_embedding is None:
        client_loss = loss.value(functional_call(model, leaves, (inputs, dropout, products)), inputs)
    else:
        logits, embedding = call_with_embedding(model, leaves, inputs, dropout, products)
        client_loss = loss.value(logits, inputs) + loss.of_embedding(embedding, inputs)
    found = torch.autograd.grad(client_loss.sum(), [*products.values(), *leaves.values()])
    product_grads = dict(zip(products, found, strict=False))
    return dict(zip(leaves, found[len(products) :], strict=True)), product_grads, client_loss.detach()


def _norm(model: Backbone, weights: Weights) -> Norm | None:
    names = model.norm_names
    return (weights[names[0]], weights[names[1]]) if names else None


_SHAPES: WeakKeyDictionary[nn.Module, dict[str, torch.Size]] = WeakKeyDictionary()


def parameter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Shape of each parameter; looked up once, since a walk over modules takes as long as a small client's epoch."""
    if model not in _SHAPES:
        _SHAPES[model] = {name: parameter.shape for name, parameter in model.named_parameters()}
    return _SHAPES[model]


def _for_clients(model: Backbone, weights: Weights, inputs: Inputs) -> dict[str, Tensor]:
    """The weights, checked against the model; plain ones seen by every client of a cohort (no copy)."""
    shapes = parameter_shapes(model)
    check_same_names(shapes, weights)
    clients, dtype = inputs.clients, inputs.weight.dtype
    result = {}
    for name, tensor in weights.items():
        if tensor.shape == shapes[name] and clients > 1:
            tensor = tensor.expand(clients, *tensor.shape)
        if tensor.shape not in (shapes[name], (clients, *shapes[name])):
            raise ProtocolError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(shapes[name])}"
                + (f", stacked for {clients} clients" if clients > 1 else "")
            )
        if tensor.dtype != dtype:
            raise ProtocolError(
                f"weight {name!r} is {tensor.dtype}, the inputs are {dtype}; build_inputs takes a dtype"
            )
        result[name] = tensor.detach()
    return result


def check_epochs(epochs: int) -> None:
    """Refuse a number of epochs that cannot be."""
    if epochs < 0:
        raise ConfigError(f"epochs must be at least 0, got {epochs}")


def starting_state(
    optimizer: str,
    state: OptimizerState | None,
    weights: Weights,
    trained: Collection[str],
    *,
    clients: int = 1,
    donate: bool = False,
) -> OptimizerState:
    """A state we may overwrite, of ``state`` or afresh. One of another optimiser, model or cohort must not be stepped
    on.
    """
    if state is None:
        frozen = tuple(name for name in weights if name not in trained)
        return fresh_state(optimizer, weights, clients=clients, frozen=frozen)
    if len(state.steps) != clients:
        raise ProtocolError(
            f"optimiser state of {len(state.steps)} clients given, inputs of {clients}; stack_states joins them"
        )
    if optimizer == "sgd" and state.first:
        raise ProtocolError("the optimiser state is Adam's, the optimiser is sgd; pass None to start afresh")
    for name in trained if optimizer != "sgd" else ():
        for moment in (state.first.get(name), state.second.get(name)):
            if moment is None or moment.shape != weights[name].shape or moment.dtype != weights[name].dtype:
                raise ProtocolError(
                    f"the optimiser state does not fit weight {name!r} of shape {tuple(weights[name].shape)}; pass None"
                )
    if not donate:
        return state.copy()
    first, second = (
        {name: tensor.contiguous() for name, tensor in part.items()} for part in (state.first, state.second)
    )
    return OptimizerState(state.steps, first, second)
