"""Local training on a pack of graphs: the graph task's counterpart of `isthmus.nn.train`, with the same types.

    train_graphs      mini-batch steps
    graph_gradients   the gradient of the mean loss over all given graphs (FedSGD)
    predict_graphs    logits
    train_batch, batch_gradients, predict_batch   the same on one batch whole, e.g. the nodes of one graph
                                                  (`node_batch`)

All of them leave the module's own parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

from isthmus.errors import ConfigError, ProtocolError
from isthmus.nn.buffers import without_subnormals
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.graph_batch import Batch, Pack, batches
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.graph_steps import gradients, written_out
from isthmus.nn.inputs import Inputs
from isthmus.nn.loss import Loss, get_loss
from isthmus.nn.optim import OptimizerState, fresh_state, step_plan, take_step
from isthmus.nn.train import ExtraGradient, TrainResult
from isthmus.tensors import Weights, check_same_names, check_same_shape

Step = tuple[Iterable[tuple[Batch, Tensor]], float]
"""A mini-batch in pieces, each with what its rows count in the loss, and what all of it counts in the epoch's mean."""

NODES_AT_ONCE = 1 << 13
"""Losses and gradients add up over graphs, so many graphs go by pieces of about this many nodes. That changes rounding
alone (and which draw of dropout meets which node), bounds memory, and is faster: 128 proteins of DD are 37,000 nodes,
whose 300 MB of intermediate values would be asked of the system anew in every step, a third of its time. Smaller pieces
cost more calls than they save."""


def train_graphs(
    model: GraphModel,
    weights: Weights,
    optimizer_state: OptimizerState | None,
    pack: Pack,
    rows: Tensor,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: float,
    weight_decay: float = 0.0,
    optimizer: str = "adam",
    loss: str = "ce",
    extra_gradient: ExtraGradient | None = None,
    frozen: Collection[str] = (),
    generator: torch.Generator | None = None,
    dropout: DropoutSource | None = None,
    sample_weight: Tensor | None = None,
) -> TrainResult:
    """Train for ``epochs`` passes over the graphs ``rows``; a step for every mini-batch, the last one may be smaller.

    Args:
        model: Gives the shape of the computation; its own parameters are neither read nor changed.
        weights: To start from; not changed.
        optimizer_state: What the last call returned, or None to start afresh; not changed.
        pack: The client's graphs.
        rows: Positions of the training graphs (or a mask). Without any, no step is taken.
        epochs: At least 0.
        batch_size: Graphs per step.
        lr, weight_decay, optimizer, loss, extra_gradient, frozen: As in `isthmus.nn.train.train_locally`.
        generator: Shuffles the graphs in every epoch; None takes them in order.
        dropout: The client's generator; None trains without dropout.
        sample_weight: What each graph of the pack counts in the loss (G,), for rare classes; scaled to mean 1 over
            ``rows``.

    Returns:
        Weights, state, and the mean loss over the graphs of the last epoch, each taken before its step (1,).
    """
    rows = _positions(rows, pack)
    importance = _importance(sample_weight, rows, pack)

    def epoch() -> Iterator[Step]:
        for graphs in batches(rows, batch_size, generator):
            yield _pieces(pack, graphs, importance / graphs.numel()), graphs.numel() / rows.numel()

    return _train(
        model,
        weights,
        optimizer_state,
        pack,
        epoch,
        -(-rows.numel() // max(1, batch_size)),
        epochs=epochs,
        lr=lr,
        weight_decay=weight_decay,
        optimizer=optimizer,
        loss=loss,
        extra_gradient=extra_gradient,
        frozen=frozen,
        dropout=dropout,
    )


def train_batch(
    model: GraphModel,
    weights: Weights,
    optimizer_state: OptimizerState | None,
    batch: Batch,
    share: Tensor,
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
    """Train for ``epochs`` steps on one batch. Without any share, no step is taken.

    Args:
        batch: Its ``y`` has the class of each row of the logits: a graph, or a node where the model does not pool.
        share: What each row counts in the loss.
    """
    steps: list[Step] = [([(batch, share)], 1.0)] if bool((share > 0).any()) else []
    return _train(
        model,
        weights,
        optimizer_state,
        batch.pack,
        lambda: iter(steps),
        len(steps),
        epochs=epochs,
        lr=lr,
        weight_decay=weight_decay,
        optimizer=optimizer,
        loss=loss,
        extra_gradient=extra_gradient,
        frozen=frozen,
        dropout=dropout,
    )


@without_subnormals()
def _train(
    model: GraphModel,
    weights: Weights,
    optimizer_state: OptimizerState | None,
    pack: Pack,
    epoch: Callable[[], Iterator[Step]],
    per_epoch: int,
    *,
    epochs: int,
    lr: float,
    weight_decay: float,
    optimizer: str,
    loss: str,
    extra_gradient: ExtraGradient | None,
    frozen: Collection[str],
    dropout: DropoutSource | None,
) -> TrainResult:
    """Take the steps each ``epoch()`` gives."""
    if epochs < 0:
        raise ConfigError(f"epochs must be at least 0, got {epochs}")
    loss_function = get_loss(loss)
    given = _checked(model, weights, pack)
    trained = [name for name in given if name not in set(frozen)]
    start = fresh_state(optimizer, given, frozen=tuple(frozen)) if optimizer_state is None else optimizer_state
    layout = _EndToEnd(given, trained)
    flat = layout.join(given)
    current = given | layout.parts(flat)
    state = OptimizerState(
        start.steps, *({_ALL: layout.join(part)} if part else {} for part in (start.first, start.second))
    )
    plan = step_plan(optimizer, state.steps, epochs * per_epoch, lr, weight_decay, pack.dtype)
    taken, total = 0, 0.0
    for _ in range(epochs):
        total = 0.0
        for pieces, part in epoch():
            grads, value = _gradients(model, current, trained, pieces, loss_function, dropout)
            if extra_gradient is not None:
                extra_gradient(current, grads)
            state = take_step({_ALL: flat}, {_ALL: layout.join(grads)}, state, replace(plan, step=taken))
            taken += 1
            total += value * part
    moved = (
        {name: tensor.clone() for name, tensor in (before | layout.parts(after[_ALL]) if after else before).items()}
        for before, after in ((start.first, state.first), (start.second, state.second))
    )
    made = {name: tensor.clone() for name, tensor in current.items()}
    return TrainResult(made, OptimizerState(state.steps, *moved), torch.tensor([total], dtype=pack.dtype))


_ALL = "all"


class _EndToEnd:
    """Some of the weights in one stretch of memory: a step on thirty small tensors takes longer to call than to
    compute.
    """

    def __init__(self, weights: Weights, names: Sequence[str]) -> None:
        self._shapes = {name: weights[name].shape for name in names}

    def join(self, tensors: Weights) -> Tensor:
        """A copy, end to end."""
        return torch.cat([tensors[name].reshape(-1) for name in self._shapes]) if self._shapes else torch.zeros(0)

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as views."""
        pieces = torch.split(flat, [shape.numel() for shape in self._shapes.values()]) if self._shapes else ()
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
    return grads, torch.tensor([value], dtype=pack.dtype)


@without_subnormals()
@torch.no_grad()
def predict_graphs(model: GraphModel, weights: Weights, pack: Pack, rows: Tensor | None = None) -> Tensor:
    """Logits of the graphs ``rows`` in their order, all by default, without dropout. (G, C)"""
    weights = _checked(model, weights, pack)
    rows = torch.arange(pack.num_graphs) if rows is None else _positions(rows, pack)
    parts = [functional_call(model, weights, (pack.batch(graphs),)) for graphs in pack.pieces(rows, NODES_AT_ONCE)]
    return torch.cat(parts) if parts else torch.zeros(0, pack.data.num_classes, dtype=pack.dtype)


def _pieces(pack: Pack, graphs: Tensor, share: Tensor) -> Iterator[tuple[Batch, Tensor]]:
    """The graphs piece by piece, each made when it is asked for; ``share`` is of all graphs of the pack."""
    for piece in pack.pieces(graphs, NODES_AT_ONCE):
        yield pack.batch(piece), share[piece]


def _gradients(
    model: GraphModel,
    weights: Weights,
    trained: Collection[str],
    pieces: Iterable[tuple[Batch, Tensor]],
    loss: Loss,
    dropout: DropoutSource | None,
) -> tuple[dict[str, Tensor], float]:
    """Gradients of ``sum over all pieces of share * loss``, and its value; zero without any piece."""
    grads: dict[str, Tensor] = {}
    total = 0.0
    for batch, share in pieces:
        found, value = _piece_gradients(model, weights, trained, batch, share, loss, dropout)
        grads = {name: grads[name] + grad for name, grad in found.items()} if grads else found
        total += value
    return grads or {name: torch.zeros_like(weights[name]) for name in trained}, total


def _piece_gradients(
    model: GraphModel,
    weights: Weights,
    trained: Collection[str],
    batch: Batch,
    share: Tensor,
    loss: Loss,
    dropout: DropoutSource | None,
) -> tuple[dict[str, Tensor], float]:
    if written_out(model, batch):
        every, value = gradients(model, weights, batch, share, loss, dropout)
        return {name: every[name] for name in trained}, value
    return _by_autograd(model, weights, trained, batch, share, loss, dropout)


def _by_autograd(
    model: GraphModel,
    weights: Weights,
    trained: Collection[str],
    batch: Batch,
    share: Tensor,
    loss: Loss,
    dropout: DropoutSource | None,
) -> tuple[dict[str, Tensor], float]:
    """The same for any model."""
    leaves = {name: weights[name].detach().requires_grad_() for name in trained}
    logits = functional_call(model, {**weights, **leaves}, (batch, dropout))
    size = (batch.y.numel(),)
    value, grad = loss.value_and_grad(logits.detach(), Inputs(1, {}, (), (size,), size, batch.y, share))
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
    """The weights, fit for the model and the pack."""
    parameters = dict(model.named_parameters())
    check_same_names(parameters, weights)
    for name, tensor in weights.items():
        check_same_shape(name, parameters[name], tensor)
        if tensor.dtype != pack.dtype:
            raise ProtocolError(
                f"weight {name!r} is {tensor.dtype}, the pack is {pack.dtype}; pack_graphs takes a dtype"
            )
    return {name: tensor.detach() for name, tensor in weights.items()}
