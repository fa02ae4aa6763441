"""Local training on a pack of graphs: the graph task's counterpart of `isthmus.nn.train`, with the same loop and types.

    train_graphs      mini-batch steps
    graph_gradients   the gradient of the mean loss over all given graphs (FedSGD)
    predict_graphs    logits
    train_batch, batch_gradients, predict_batch   the same on one batch whole, e.g. the nodes of one graph
                                                  (`node_batch`)

All of them leave the module's own parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.func import functional_call

from isthmus.errors import ConfigError, ProtocolError
from isthmus.nn.buffers import without_subnormals
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.gin_gradients import gin_gradients, gin_logits, has_manual_gradient
from isthmus.nn.graph_batch import Batch, Pack, batches
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.inputs import Inputs
from isthmus.nn.loss import Loss, get_loss
from isthmus.nn.optim import OptimizerState, Stepper
from isthmus.nn.train import ExtraGradient, TrainResult, TrainSettings, check_epochs, local_epochs, starting_state
from isthmus.tensors import Weights, check_same_names, check_same_shape

Pieces = Iterable[tuple[Batch, Tensor]]
"""A mini-batch in pieces, each with what its rows count in the loss."""

NODES_AT_ONCE = 1 << 13
"""Losses and gradients add up over graphs, so many graphs go by pieces of about this many nodes. That changes rounding
alone (and which draw of dropout meets which node), bounds memory, and is faster: 128 proteins of DD are 37,000 nodes,
whose 300 MB of intermediate values would be allocated anew in every step, a third of its time. Smaller pieces cost more
calls than they save."""


def train_graphs(
    model: GraphModel,
    weights: Weights,
    optimizer_state: OptimizerState | None,
    pack: Pack,
    rows: Tensor,
    *,
    batch_size: int = 128,
    generator: torch.Generator | None = None,
    sample_weight: Tensor | None = None,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Train for a number of passes over the graphs ``rows``; a step for every mini-batch, the last one may be smaller.

    Args:
        model: Gives the shape of the computation; its own parameters are neither read nor changed.
        weights: To start from; not changed.
        optimizer_state: What the last call returned, or None to start afresh; not changed.
        pack: The client's graphs.
        rows: Positions of the training graphs (or a mask). Without any, no step is taken.
        batch_size: Graphs per step.
        generator: Shuffles the graphs in every epoch; None takes them in order.
        sample_weight: What each graph of the pack counts in the loss (G,), for rare classes; scaled to mean 1 over
            ``rows``.

    Returns:
        Weights, state, and the mean loss over the graphs of the last epoch, each taken before its step (1,).
    """
    rows = _positions(rows, pack)
    importance = _importance(sample_weight, rows, pack)

    def epoch() -> Iterator[tuple[Pieces, float]]:
        for graphs in batches(rows, batch_size, generator):
            yield _pieces(pack, graphs, importance / graphs.numel()), graphs.numel() / rows.numel()

    steps = -(-rows.numel() // max(1, batch_size))
    return _train(model, weights, optimizer_state, pack, epoch, steps, **settings)


def train_batch(
    model: GraphModel,
    weights: Weights,
    optimizer_state: OptimizerState | None,
    batch: Batch,
    share: Tensor,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Train on one batch, a step an epoch. Without any share, no step is taken.

    Args:
        batch: Its ``y`` has the class of each row of the logits: a graph, or a node where the model does not pool.
        share: What each row counts in the loss.
    """
    steps: list[tuple[Pieces, float]] = [([(batch, share)], 1.0)] if bool((share > 0).any()) else []
    return _train(model, weights, optimizer_state, batch.pack, lambda: steps, len(steps), **settings)


@without_subnormals()
def _train(
    model: GraphModel,
    weights: Weights,
    optimizer_state: OptimizerState | None,
    pack: Pack,
    epoch: Callable[[], Iterable[tuple[Pieces, float]]],
    steps: int,
    *,
    epochs: int,
    lr: float,
    weight_decay: float = 0.0,
    optimizer: str = "adam",
    loss: str = "ce",
    extra_gradient: ExtraGradient | None = None,
    frozen: Collection[str] = (),
    dropout: DropoutSource | None = None,
) -> TrainResult:
    """Take the ``steps`` steps of each ``epoch()``."""
    check_epochs(epochs)
    loss_function, given = get_loss(loss), _checked(model, weights, pack)
    trained = [name for name in given if name not in set(frozen)]
    state = starting_state(optimizer, optimizer_state, given, trained, donate=True)
    stepper = _FlatStepper(optimizer, given, state, trained, steps=epochs * steps, lr=lr, weight_decay=weight_decay)

    def gradients(pieces: Pieces) -> tuple[dict[str, Tensor], Tensor]:
        return _gradients(model, stepper.weights, trained, pieces, loss_function, dropout)

    mean_loss = local_epochs(gradients, stepper, epochs, epoch, extra_gradient)
    return TrainResult(*stepper.result(), mean_loss.to(pack.dtype))


class _FlatStepper(Stepper):
    """Steps on the trained weights in one stretch of memory: on thirty small tensors they take longer to call than to
    compute.
    """

    ALL = "all"

    def __init__(
        self,
        optimizer: str,
        weights: dict[str, Tensor],
        state: OptimizerState,
        trained: Sequence[str],
        *,
        steps: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        self._shapes = {name: weights[name].shape for name in trained}
        self._given = state
        self._flat = {self.ALL: self._join(weights)}
        moments = ({self.ALL: self._join(part)} if part else {} for part in (state.first, state.second))
        flat_state = OptimizerState(state.steps, *moments)
        super().__init__(optimizer, self._flat, flat_state, steps=steps, lr=lr, weight_decay=weight_decay)
        self.weights = weights | self._parts(self._flat)

    def take(self, grads: Weights) -> None:
        named, self.weights = self.weights, self._flat
        super().take({self.ALL: self._join(grads)})
        self.weights = named

    def result(self) -> tuple[dict[str, Tensor], OptimizerState]:
        """Weights and state by name, each tensor in memory of its own."""
        first, second = (
            self._given.first | self._parts(self.state.first),
            self._given.second | self._parts(self.state.second),
        )
        state = OptimizerState(self.state.steps, first, second).copy()
        return {name: tensor.clone() for name, tensor in self.weights.items()}, state

    def _join(self, tensors: Weights) -> Tensor:
        """A copy, end to end."""
        return torch.cat([tensors[name].reshape(-1) for name in self._shapes]) if self._shapes else torch.zeros(0)

    def _parts(self, flat: Weights) -> dict[str, Tensor]:
        """The tensors by name, as views."""
        if not flat or not self._shapes:
            return {}
        pieces = torch.split(flat[self.ALL], [shape.numel() for shape in self._shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}


@without_subnormals()
def batch_gradients(
    model: GraphModel,
    weights: Weights,
    batch: Batch,
    share: Tensor,
    *,
    loss: str = "ce",
    dropout: DropoutSource | None = None,
) -> dict[str, Tensor]:
    """Gradients of ``sum of share * loss`` over the rows of one batch."""
    checked = _checked(model, weights, batch.pack)
    return _gradients(model, checked, list(checked), [(batch, share)], get_loss(loss), dropout)[0]


@without_subnormals()
@torch.no_grad()
def predict_batch(model: GraphModel, weights: Weights, batch: Batch) -> Tensor:
    """Logits of one batch, without dropout."""
    logits: Tensor = functional_call(model, _checked(model, weights, batch.pack), (batch,))
    return logits


@without_subnormals()
def graph_gradients(
    model: GraphModel,
    weights: Weights,
    pack: Pack,
    rows: Tensor,
    *,
    loss: str = "ce",
    frozen: Collection[str] = (),
    dropout: DropoutSource | None = None,
    sample_weight: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the mean loss over the graphs ``rows``, and that loss (1,); both zero where there are none.

    ``sample_weight`` (G,) makes it a weighted mean.
    """
    rows, weights = _positions(rows, pack), _checked(model, weights, pack)
    trained = [name for name in weights if name not in set(frozen)]
    share = _importance(sample_weight, rows, pack) / max(1, rows.numel())
    grads, value = _gradients(model, weights, trained, _pieces(pack, rows, share), get_loss(loss), dropout)
    return grads, value.to(pack.dtype)


@without_subnormals()
@torch.no_grad()
def predict_graphs(model: GraphModel, weights: Weights, pack: Pack, rows: Tensor | None = None) -> Tensor:
    """Logits of the graphs ``rows`` in their order, all by default, without dropout. (G, C)"""
    rows = torch.arange(pack.num_graphs) if rows is None else _positions(rows, pack)
    return predict_batches(model, weights, pack, (pack.batch(graphs) for graphs in pack.pieces(rows, NODES_AT_ONCE)))


def batches_to_predict(pack: Pack, rows: Tensor) -> list[Batch]:
    """The batches of `predict_graphs`, to be kept: making them takes a fifth of its time."""
    return [pack.batch(graphs) for graphs in pack.pieces(_positions(rows, pack), NODES_AT_ONCE)]


@without_subnormals()
@torch.no_grad()
def predict_batches(model: GraphModel, weights: Weights, pack: Pack, batches: Iterable[Batch]) -> Tensor:
    """Logits of the graphs of some batches, without dropout, in their order. (G, C)"""
    weights = _checked(model, weights, pack)
    parts = [
        gin_logits(model, weights, batch)
        if has_manual_gradient(model, batch)
        else functional_call(model, weights, (batch,))
        for batch in batches
    ]
    return torch.cat(parts) if parts else torch.zeros(0, pack.data.num_classes, dtype=pack.dtype)


def _pieces(pack: Pack, graphs: Tensor, share: Tensor) -> Iterator[tuple[Batch, Tensor]]:
    """The graphs piece by piece, each made when it is asked for; ``share`` is of all graphs of the pack."""
    for piece in pack.pieces(graphs, NODES_AT_ONCE):
        yield pack.batch(piece), share[piece]


def _gradients(
    model: GraphModel,
    weights: Weights,
    trained: Collection[str],
    pieces: Pieces,
    loss: Loss,
    dropout: DropoutSource | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of ``sum over all pieces of share * loss``, and its value (1,); zero without any piece."""
    grads: dict[str, Tensor] = {}
    total = torch.zeros(1, dtype=torch.float64)
    for batch, share in pieces:
        if has_manual_gradient(model, batch):
            found, value = gin_gradients(model, weights, batch, share, loss, dropout)
            found = {name: found[name] for name in trained}
        else:
            found, value = autograd_gradients(model, weights, trained, batch, share, loss, dropout)
        grads = {name: grads[name] + grad for name, grad in found.items()} if grads else found
        total += value
    return grads or {name: torch.zeros_like(weights[name]) for name in trained}, total


def autograd_gradients(
    model: GraphModel,
    weights: Weights,
    trained: Collection[str],
    batch: Batch,
    share: Tensor,
    loss: Loss,
    dropout: DropoutSource | None,
) -> tuple[dict[str, Tensor], float]:
    """The plain definition, for any model: its ``forward``."""
    leaves = {name: weights[name].detach().requires_grad_() for name in trained}
    logits = functional_call(model, {**weights, **leaves}, (batch, dropout))
    value, grad = loss.value_and_grad(logits.detach(), Inputs.labels(batch.y, share))
    found = torch.autograd.grad(logits, list(leaves.values()), grad) if leaves else ()
    return {name: tensor.contiguous() for name, tensor in zip(leaves, found, strict=True)}, float(value)


def _positions(rows: Tensor, pack: Pack) -> Tensor:
    rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < pack.num_graphs:
        raise ConfigError(
            f"graphs are numbered 0 to {pack.num_graphs - 1}, asked for {int(rows.min())} to {int(rows.max())}"
        )
    return rows


def _importance(sample_weight: Tensor | None, rows: Tensor, pack: Pack) -> Tensor:
    """Weights of all graphs with mean 1 over ``rows`` (G,)."""
    if sample_weight is None or not rows.numel():
        return torch.ones(pack.num_graphs, dtype=pack.dtype)
    if (
        sample_weight.shape != (pack.num_graphs,)
        or bool((sample_weight[rows] < 0).any())
        or not bool((sample_weight[rows] > 0).any())
    ):
        raise ConfigError(
            f"sample_weight needs one number of at least 0 for each of the {pack.num_graphs} graphs, not all of them 0"
        )
    return (sample_weight / sample_weight[rows].mean()).to(pack.dtype)


def _checked(model: GraphModel, weights: Weights, pack: Pack) -> dict[str, Tensor]:
    """The weights, checked against the model and the pack."""
    parameters = dict(model.named_parameters())
    check_same_names(parameters, weights)
    for name, tensor in weights.items():
        check_same_shape(name, parameters[name], tensor)
        if tensor.dtype != pack.dtype:
            raise ProtocolError(
                f"weight {name!r} is {tensor.dtype}, the pack is {pack.dtype}; pack_graphs takes a dtype"
            )
    return {name: tensor.detach() for name, tensor in weights.items()}
