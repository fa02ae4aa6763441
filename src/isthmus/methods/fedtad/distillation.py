r"""What FedTAD's server does after averaging: a generator makes a pseudo graph, and the average learns from every
client's model on it, class by class as far as the client is reliable there.

    paper / code     here
    G                generator weights: (embedding of the class, noise) -> 64 -> 128 -> 256 -> features, tanh between
    X~, A~           `pseudo_features`, `pseudo_graph`: each node linked with its ``neighbours`` most similar ones
    r_kc             reliability (K, C), columns add up to 1

.. math::
    L_G = \sum_k \Bigl[ \lambda_1 \sum_c r_{kc} CE_c(f(W_k; \tilde X, \tilde A)) - \sum_c r_{kc} D_{kc} + \lambda_2 Div
    \Bigr], \qquad L_W = \sum_k \sum_c r_{kc} D_{kc}

with :math:`D_{kc}` the mean absolute difference between logits of the average and of client k over the pseudo nodes of
class c, and :math:`Div = \exp(-\mathrm{mean}_{ij} (|\tilde X_i - \tilde X_j| (z_i - z_j)^2))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from isthmus.nn.backbone import Backbone
from isthmus.nn.inputs import Inputs, build_inputs
from isthmus.nn.optim import OptimizerState, fresh_state, step_plan, take_step
from isthmus.seeds import Stream
from isthmus.tensors import Weights

WIDTHS = (64, 128, 256)


class PseudoGraph(NamedTuple):
    """A pseudo graph: its features X~, what layers after the first read, M of the first as a dense matrix, and M X~,
    which is the same for every model (a layer norm, which is not, forms its own)."""

    x: Tensor
    inputs: Inputs
    first: Tensor
    mixed: Tensor


class _Nodes(NamedTuple):
    """Nodes as `build_inputs` reads them; their features are given later."""

    x: Tensor
    edge_index: Tensor
    y: Tensor
    num_nodes: int
    edge_weight: Tensor | None = None


def first_generator(num_features: int, num_classes: int, noise: int, stream: Stream, dtype: torch.dtype) -> Weights:
    """First weights: linear layers as torch draws them, the embedding of classes from N(0, 1)."""
    generator = stream.torch()
    weights = {"classes": torch.randn(num_classes, num_classes, generator=generator)}
    widths = [num_classes + noise, *WIDTHS, num_features]
    for layer, (a, b) in enumerate(pairwise(widths)):
        bound = a**-0.5
        weights[f"layers.{layer}.weight"] = torch.empty(a, b).uniform_(-bound, bound, generator=generator)
        weights[f"layers.{layer}.bias"] = torch.empty(b).uniform_(-bound, bound, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def pseudo_features(weights: Weights, noise: Tensor, classes: Tensor) -> Tensor:
    """X~ = G(z, c)."""
    h = torch.cat([weights["classes"][classes], noise], dim=1)
    for layer in range(len(WIDTHS) + 1):
        h = h @ weights[f"layers.{layer}.weight"] + weights[f"layers.{layer}.bias"]
        if layer < len(WIDTHS):
            h = torch.tanh(h)
    return h


def pseudo_labels(count: int, num_classes: int) -> Tensor:
    """The same number of nodes for each class, what is left over to the last."""
    return (torch.arange(count) // max(1, count // num_classes)).clamp(max=num_classes - 1)


def pseudo_graph(model: Backbone, x: Tensor, neighbours: int) -> PseudoGraph:
    """A~: arcs both ways between a node and the most similar others; no gradient goes through the choice."""
    count = len(x)
    rows = torch.nn.functional.normalize(x.detach().double(), dim=1)
    similar = (rows @ rows.T).fill_diagonal_(-2.0)
    nearest = similar.topk(min(neighbours, count - 1), dim=1).indices
    source = torch.arange(count).repeat_interleave(nearest.shape[1])
    arcs = torch.cat([torch.stack([source, nearest.flatten()]), torch.stack([nearest.flatten(), source])], dim=1)
    arcs = torch.unique(arcs, dim=1)
    empty = torch.zeros(count, x.shape[1], dtype=x.dtype)
    inputs = build_inputs(_Nodes(empty, arcs, torch.zeros(count, dtype=torch.int64), count), model, dtype=x.dtype)
    first = torch.eye(count, dtype=x.dtype)
    if model.propagation is not None:
        first = torch.from_numpy(model.propagation(arcs, count).toarray()).to(x.dtype)
    return PseudoGraph(x, inputs, first, first @ x)


def pseudo_logits(model: Backbone, weights: Weights, graph: PseudoGraph) -> Tensor:
    """f(W; X~, A~) without dropout, differentiable in W and X~."""
    x, mixed = graph.x, graph.mixed
    if model.norm_names:
        gamma, beta = (weights[name] for name in model.norm_names)
        x = torch.nn.functional.layer_norm(x, x.shape[1:], gamma, beta)
        mixed = graph.first @ x
    products = {name: (mixed if propagated else x) @ weights[name] for name, propagated in model.first_terms.items()}
    outside = {*products, *model.norm_names}
    rest = {name: tensor for name, tensor in weights.items() if name not in outside}
    logits: Tensor = functional_call(model, rest, (graph.inputs, None, products))
    return logits


def by_class(values: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Mean of a value over the nodes of each class. (C,)"""
    sums = torch.zeros(num_classes, dtype=values.dtype).index_add(0, classes, values)
    return sums / torch.bincount(classes, minlength=num_classes).clamp(min=1)


def diversity(x: Tensor, noise: Tensor) -> Tensor:
    """Div: small where different noise gives different nodes."""
    apart, noise_apart = torch.pdist(x, p=1) / x.shape[1], torch.pdist(noise).square() / noise.shape[1]
    return torch.exp(-2.0 * (apart * noise_apart).sum() / len(x) ** 2)  # each pair once, twice in the mean over i, j


@dataclass(frozen=True)
class Distillation:
    """Settings of the server's part.

    Args:
        epochs: Pseudo graphs in a round.
        generator_steps, model_steps: Steps of the generator and of the average on each.
        nodes: Pseudo nodes.
        noise: Width of z.
        neighbours: Of a pseudo node.
        accuracy, spread: lambda_1 and lambda_2.
        lr, weight_decay: Of Adam for both.
    """

    epochs: int
    generator_steps: int
    model_steps: int
    nodes: int
    noise: int
    neighbours: int
    accuracy: float
    spread: float
    lr: float
    weight_decay: float


class Distilled(NamedTuple):
    weights: Weights
    optimizer: OptimizerState
    generator: Weights
    generator_optimizer: OptimizerState
    distance: float


def distil(
    model: Backbone,
    average: Weights,
    optimizer: OptimizerState,
    teachers: Sequence[Weights],
    reliability: Tensor,
    generator: Weights,
    generator_optimizer: OptimizerState,
    settings: Distillation,
    stream: Stream,
) -> Distilled:
    """All of a round's distillation. ``distance`` is L_W before the last step."""
    num_classes = reliability.shape[1]
    classes = pseudo_labels(settings.nodes, num_classes)
    draws, dtype, distance = stream.torch(), next(iter(average.values())).dtype, 0.0
    reliability = reliability.to(dtype)
    for _ in range(settings.epochs):
        noise = torch.randn(settings.nodes, settings.noise, generator=draws).to(dtype)
        for _ in range(settings.generator_steps):

            def of_generator(weights: Weights, noise: Tensor = noise, average: Weights = average) -> Tensor:
                x = pseudo_features(weights, noise, classes)
                return generator_loss(model, x, noise, classes, average, teachers, reliability, settings)

            generator, generator_optimizer, _ = adam_step(generator, generator_optimizer, of_generator, settings)
        x = pseudo_features(generator, noise, classes).detach()
        graph = pseudo_graph(model, x, settings.neighbours)
        # Teachers go the way of the average, which needs gradients: a forward pass without them rounds differently, and
        # the gradient of |a - b| is as large at a difference of one rounding as at any other.
        answers = [pseudo_logits(model, trainable(teacher), graph).detach() for teacher in teachers]
        for _ in range(settings.model_steps):

            def of_average(weights: Weights, graph: PseudoGraph = graph, answers: list[Tensor] = answers) -> Tensor:
                return model_loss(pseudo_logits(model, weights, graph), answers, classes, reliability)

            average, optimizer, distance = adam_step(average, optimizer, of_average, settings)
    return Distilled(average, optimizer, generator, generator_optimizer, distance)


def generator_loss(
    model: Backbone,
    x: Tensor,
    noise: Tensor,
    classes: Tensor,
    average: Weights,
    teachers: Sequence[Weights],
    reliability: Tensor,
    settings: Distillation,
) -> Tensor:
    """L_G of pseudo nodes X~."""
    graph, loss = pseudo_graph(model, x, settings.neighbours), x.new_zeros(())
    ours = pseudo_logits(model, average, graph)
    for row, teacher in zip(reliability, teachers, strict=True):
        theirs = pseudo_logits(model, teacher, graph)
        wrong = torch.nn.functional.cross_entropy(theirs, classes, reduction="none")
        loss = loss + settings.accuracy * (row * by_class(wrong, classes, len(row))).sum()
        loss = loss - (row * by_class((ours - theirs).abs().mean(1), classes, len(row))).sum()
    # Div is in the sum over clients, too, and the same for each: formed once, it is a tenth of the work.
    return loss + settings.spread * len(teachers) * diversity(x, noise)


def model_loss(ours: Tensor, answers: Sequence[Tensor], classes: Tensor, reliability: Tensor) -> Tensor:
    """L_W of the average's logits beside every client's."""
    count = reliability.shape[1]
    far = torch.stack([by_class((ours - theirs).abs().mean(1), classes, count) for theirs in answers])
    return (reliability * far).sum()


def adam_step(
    weights: Weights, state: OptimizerState, loss: Callable[[Mapping[str, Tensor]], Tensor], settings: Distillation
) -> tuple[Weights, OptimizerState, float]:
    """One step of Adam down a loss; the loss is that before it."""
    leaves = trainable(weights)
    value = loss(leaves)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    after = {name: leaf.detach() for name, leaf in leaves.items()}
    dtype = next(iter(after.values())).dtype
    plan = step_plan("adam", state.steps, 1, settings.lr, settings.weight_decay, dtype)
    return after, take_step(after, gradients, state.copy(), replace(plan, step=0)), float(value.detach())


def trainable(weights: Weights) -> dict[str, Tensor]:
    """A copy that gradients are asked for."""
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in weights.items()}


def fresh_adam(weights: Weights) -> OptimizerState:
    return fresh_state("adam", weights)
