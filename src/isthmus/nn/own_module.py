"""A model of the user's own: a plain ``nn.Module`` with ``forward(x, edge_index)``, trained by autograd.

Nothing of it is known but its parameters and its logits, so clients are trained each by itself, on the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from isthmus.errors import ConfigError
from isthmus.nn.inputs import Inputs
from isthmus.nn.loss import get_loss
from isthmus.nn.optim import OptimizerState, Stepper
from isthmus.nn.train import TrainResult, TrainSettings, check_epochs, local_epochs, starting_state
from isthmus.seeds import Stream
from isthmus.tensors import Weights, check_same_names

BackboneFactory = Callable[[int, int], nn.Module]
"""(number of features, number of classes) -> a module with ``forward(x, edge_index)`` that gives one row per node."""


@dataclass(frozen=True)
class ModuleData:
    """What such a module is trained on.

    Args:
        x: Features (n, F), dense.
        edge_index: (2, E).
        y: Classes (n,).
        share: What each node counts in the loss (n,).
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    share: Tensor


def build_module(
    name: str, factory: BackboneFactory, *, num_features: int, num_classes: int, stream: Stream, dtype: torch.dtype
) -> nn.Module:
    """The module with its first weights: what torch draws while it is built comes from ``stream`` only."""
    with stream.scope():
        try:
            module: object = factory(num_features, num_classes)
        except TypeError as error:
            raise ConfigError(
                f"backbone {name!r} is called as factory(num_features, num_classes): {error}; change its arguments"
            ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"backbone {name!r} gives a {type(module).__name__}: it must give a torch.nn.Module with "
            "forward(x, edge_index)"
        )
    if buffers := [buffer for buffer, _ in module.named_buffers()]:
        raise ConfigError(
            f"backbone {name!r} keeps state that is no parameter ({', '.join(buffers[:3])}), which clients do not "
            "share: use e.g. LayerNorm instead of BatchNorm"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"backbone {name!r} has no parameters to train: create its layers in __init__")
    return module.to(dtype)


def layer_prefixes(module: nn.Module) -> tuple[str, ...]:
    """Prefixes of parameter names, in the order the module creates its parts."""
    return tuple(dict.fromkeys(f"{name.split('.')[0]}{'.' * ('.' in name)}" for name, _ in module.named_parameters()))


def train_module(
    module: nn.Module,
    weights: Weights,
    optimizer_state: OptimizerState | None,
    data: ModuleData,
    randomness: Stream,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Full-batch steps. Without any training node no step is taken.

    Args:
        randomness: Where dropout and the like draw from.
    """
    epochs = settings["epochs"]
    check_epochs(epochs)
    check_same_names(dict(module.named_parameters()), weights)
    current = {name: tensor.detach().clone() for name, tensor in weights.items()}
    frozen = settings.get("frozen", ())
    trained = [name for name, tensor in module.named_parameters() if name not in frozen and tensor.requires_grad]
    optimizer, loss = settings.get("optimizer", "adam"), settings.get("loss", "ce")
    state = starting_state(optimizer, optimizer_state, current, trained)
    steps = epochs if bool((data.share > 0).any()) else 0
    stepper = Stepper(
        optimizer, current, state, steps=steps, lr=settings["lr"], weight_decay=settings.get("weight_decay", 0.0)
    )
    with randomness.scope():
        mean_loss = local_epochs(
            lambda _: _gradients(module, current, trained, data, loss),
            stepper,
            steps,
            extra_gradient=settings.get("extra_gradient"),
        )
    return TrainResult(current, stepper.state, mean_loss.to(data.x.dtype))


def module_gradients(
    module: nn.Module, weights: Weights, data: ModuleData, randomness: Stream, loss: str = "ce"
) -> dict[str, Tensor]:
    """Gradients of the training loss, zero without training nodes."""
    check_same_names(dict(module.named_parameters()), weights)
    with randomness.scope():
        return _gradients(module, weights, list(weights), data, loss)[0]


@torch.no_grad()
def predict_module(module: nn.Module, weights: Weights, data: ModuleData) -> Tensor:
    """Logits of all nodes in evaluation mode."""
    module.eval()
    return _logits(module, weights, data)


def _gradients(
    module: nn.Module, weights: Weights, trained: Collection[str], data: ModuleData, loss: str
) -> tuple[dict[str, Tensor], Tensor]:
    module.train()
    leaves = {name: weights[name].detach().requires_grad_() for name in trained}
    logits = _logits(module, {**weights, **leaves}, data)
    value = get_loss(loss).value(logits, Inputs.labels(data.y, data.share))
    found = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    grads = {
        name: torch.zeros_like(leaf) if grad is None else grad.contiguous()
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
    return grads, value.detach().double()


def _logits(module: nn.Module, weights: Weights, data: ModuleData) -> Tensor:
    logits: object = functional_call(module, dict(weights), (data.x, data.edge_index))
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != data.x.shape[0]:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"forward(x, edge_index) of {type(module).__name__} must give logits ({data.x.shape[0]}, classes), one row "
            f"per node, got {shape}"
        )
    return logits
