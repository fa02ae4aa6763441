"""FedLit -- Xie, Xiong & Yang, Federated Node Classification over Graphs with Latent Link-type Heterogeneity, WWW 2023.

Every client sorts its edges into latent types and runs one channel per type (`isthmus.nn.typed_edges`); the server
finds out which types of different clients are the same, and averages channels accordingly.

    paper            here
    K (link types)   FedLitConfig.types
    centroids        FedLitState.centroids (T, 2 h)   mean embedding of the client's edges of each type
    centres          ServerState.centres (T, 2 h)     their means over clients, type by type
    alignment        `typed_edges.align`              greedy by cosine, a permutation per client

A round: every client takes the common weights and centres, and in every local epoch re-types its edges by one EM step
(k-means the first time) and takes one step on all weights. Centroids go to the server, which answers each client with
its order of types; the client puts all it has into that order, and only then sends its weights, to be summed: branches
count once per client that has a training node at an edge of the type, the rest by training size. The centroids are seen
one by one, the weights only as a sum.

# Differs from the reference code: it hands every client the last client's alignment and builds the similarity matrix
transposed; empty types become NaN there (here they restart at the least typical edge), nodes that no edge of a type
touches get zero there (here each has a self loop), and its "validation" uses the training nodes.
# Differs from the reference code: before there are centres, the clients are aligned to the client most like all others,
in place of the first one, so that the order of clients does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, PerClient, View
from isthmus.federation.messages import Count, Embedding, Message, Model, Structure
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ask, total
from isthmus.methods.learners import PARTS, Learner, node_groups
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import ModelState, WeightedClient, WeightedConfig, total_samples
from isthmus.nn.loss import class_weights
from isthmus.nn.optim import OptimizerState, fresh_state, step_plan, take_step
from isthmus.nn.sparse import Sparse
from isthmus.nn.typed_edges import (
    BRANCH,
    CONVOLUTIONS,
    align,
    assign,
    edge_embedding,
    em_step,
    features,
    first_centres,
    first_typed,
    propagation,
    reorder,
    typed_forward,
    typed_inputs,
)
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights


@dataclass(frozen=True)
class FedLitConfig(WeightedConfig):
    """Settings of FedLit. ``backbone`` is the convolution of the channels, the first of ``hidden`` their width; other
    layers are its own, so ``input_norm`` and ``head`` change nothing.

    Args:
        types: Latent types of edges.
    """

    types: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.types < 1:
            raise ConfigError(f"types must be at least 1, got {self.types}")
        if self.backbone not in CONVOLUTIONS:
            raise ConfigError(
                f"fedlit's channels are {', '.join(CONVOLUTIONS)}: choose one with --set backbone=..., got "
                f"{self.backbone!r}"
            )
        if not self.hidden:
            raise ConfigError("fedlit needs a hidden width, e.g. hidden=[64]")
        if self.init != "standard":
            raise ConfigError(f"fedlit draws first weights of its own: leave init out, got {self.init}")
        if self.dp_clip:
            raise ConfigError(
                "fedlit sends centroids of edges as they are, so dp_clip would promise too much: leave it out"
            )

    def first(self, num_features: int, num_classes: int, stream: Stream) -> dict[str, Tensor]:
        """First weights, common to all."""
        weights = first_typed(self.backbone, num_features, self.hidden[0], num_classes, self.types, stream)
        return {name: tensor.to(self.dtype) for name, tensor in weights.items()}


@dataclass(frozen=True)
class Common(Message):
    """Weights in the global order of types, the centres of the types (T, 2 h; none before the first round), and n."""

    weights: Model[Weights]
    centres: Embedding[Tensor]
    total: Count[float]


@dataclass(frozen=True)
class Centroids(Message):
    """Mean edge embeddings (T, 2 h), and whether the client has any edge."""

    centroids: Embedding[Tensor]
    edges: Structure[bool]


@dataclass(frozen=True)
class Order(Message):
    """``types[g]`` is the client's type that all call g; with n to weight by."""

    types: Structure[Tensor]
    total: Count[float]


@dataclass(frozen=True)
class Update(Message):
    """Pre-weighted: n_k / n times the common layers, branches where the client has training nodes at edges of the type,
    and there a 1.
    """

    weights: Model[Weights]
    active: Count[Tensor]


@dataclass(frozen=True)
class ServerState(Record):
    weights: Weights
    centres: Tensor
    total: float


@dataclass(frozen=True)
class FedLitState(ModelState):
    """Also the client's centroids (T, 2 h), and the type of each edge (E,)."""

    centroids: Tensor
    types: Tensor


class _Nodes:
    """What is scored; the model is in the client's state."""

    model = None
    scoring = Learner.scoring

    def __init__(self, data: NodeData) -> None:
        self.y, self.num_samples, self.num_train = data.y, data.num_nodes, data.num_train
        self.masks: dict[str, Tensor] = {part: getattr(data, part) for part in PARTS} | node_groups(data)


class FedLitClient(WeightedClient[FedLitConfig]):
    """One client: types its edges, trains all channels."""

    state: FedLitState
    keeps: ClassVar[tuple[str, ...]] = ("centroids",)
    keeps_of_data: ClassVar[tuple[str, ...]] = ("types",)

    def setup(self) -> None:
        self.learner: Any = _Nodes(self.data)
        self.inputs = typed_inputs(self.data, self.config.dtype)
        self._matrix: tuple[Tensor, Sparse] | None = None
        self.row_weight: Tensor | None = None
        if self.config.class_weight == "balanced":
            labels = self.data.y[self.data.train]
            counts = torch.bincount(labels, minlength=self.data.num_classes)
            self.row_weight = class_weights(counts, self.config.dtype)[labels]

    def initial_state(self) -> FedLitState:
        config, data = self.config, self.data
        weights = config.first(data.num_features, data.num_classes, self.common.child("init"))
        none = torch.zeros(0, 2 * config.hidden[0], dtype=config.dtype)
        types = torch.zeros(self.inputs.edges.shape[1], dtype=torch.int64)
        return FedLitState(weights, fresh_state(config.optimizer, weights), none, types)

    def restore(self, weights: Weights, kept: Mapping[str, Any], *, as_trained: bool) -> None:
        """Edges of other data are typed by the client's centroids."""
        super().restore(weights, kept, as_trained=as_trained)
        if not as_trained and len(self.state.centroids) and self.inputs.edges.shape[1]:
            with torch.no_grad():
                embedding = edge_embedding(features(weights, self.inputs), self.inputs)
            self.state = replace(self.state, types=assign(embedding, self.state.centroids))

    def matrix(self, types: Tensor) -> Sparse:
        """The channels' propagation; made anew only when an edge changed its type."""
        if self._matrix is None or not torch.equal(self._matrix[0], types):
            config = self.config
            self._matrix = types, propagation(config.backbone, self.inputs, types, config.types, config.dtype)
        return self._matrix[1]

    @handler
    def local_update(self, common: Common) -> Centroids:
        """E epochs: re-type the edges, take one step."""
        config, data, moments = self.config, self.data, self.state.optimizer.copy()
        weights = {name: tensor.clone() for name, tensor in common.weights.items()}
        centroids, types = common.centres, torch.zeros(self.inputs.edges.shape[1], dtype=torch.int64)
        epochs, decay = config.local_epochs, config.weight_decay
        plans = step_plan(config.optimizer, moments.steps, epochs, config.rate(self.round), decay, config.dtype)
        kind, rate, generator = config.backbone, config.dropout, self.stream("dropout").torch()
        # Not isthmus.nn.train.local_epochs: edges are typed anew in every epoch, even with nothing to train on.
        for epoch in range(epochs):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
            f = features(leaves, self.inputs)
            if len(types):
                embedding = edge_embedding(f.detach(), self.inputs)
                if not len(centroids):
                    centroids = first_centres(embedding, config.types)
                types, centroids = em_step(embedding, centroids)
            if not data.num_train:
                continue
            logits = typed_forward(kind, leaves, f, self.matrix(types), rate=rate, generator=generator)
            if config.loss == "double_softmax":
                logits = torch.softmax(logits, dim=-1)
            rows = torch.nn.functional.cross_entropy(logits[data.train], data.y[data.train], reduction="none")
            loss = rows.mean() if self.row_weight is None else (rows * self.row_weight).mean()
            grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            moments = take_step(weights, grads, moments, replace(plans, step=epoch))  # on all weights
        if not len(centroids):
            centroids = torch.zeros(config.types, 2 * config.hidden[0], dtype=config.dtype)
        self.state = FedLitState(weights, moments, centroids, types)
        return Centroids(centroids, bool(len(types)))

    @handler
    def put_in_order(self, order: Order) -> Update:
        """Everything the client has in the global order of types, then what it adds to the sums."""
        state, own = self.state, order.types
        place = torch.empty_like(own)
        place[own] = torch.arange(len(place))  # global type of each own type
        first, second = (reorder(part, own) for part in (state.optimizer.first, state.optimizer.second))
        moments = OptimizerState(state.optimizer.steps, first, second)
        self.state = FedLitState(reorder(state.weights, own), moments, state.centroids[own], place[state.types])
        active, share = self.active(), self.samples() / order.total
        weights = {
            name: tensor * (by_type(active, tensor) if name.startswith(BRANCH) else share)
            for name, tensor in self.state.weights.items()
        }
        return Update(weights, active)

    def active(self) -> Tensor:
        """1 for types with a training node at one of their edges (T,); always with a single type."""
        if self.config.types == 1:
            return torch.ones(1, dtype=torch.float64)
        ends = self.data.train[self.inputs.edges].any(dim=0)
        return (torch.bincount(self.state.types[ends], minlength=self.config.types) > 0).double()

    def logits(self) -> Tensor:
        weights, matrix = self.state.weights, self.matrix(self.state.types)
        with torch.no_grad():
            return typed_forward(self.config.backbone, weights, features(weights, self.inputs), matrix)


def init(view: View, config: FedLitConfig, common: Stream) -> ServerState:
    if not view.alike or view.task == "graph":
        raise ConfigError(
            "fedlit shares whole models of nodes: all clients need one graph each, with the same features and classes"
        )
    weights = config.first(view.num_features, view.num_classes, common.child("init"))
    return ServerState(weights, torch.zeros(0, 2 * config.hidden[0], dtype=config.dtype), 0.0)


def count_round(state: ServerState, federation: Federation, config: FedLitConfig) -> tuple[ServerState, Log]:
    """n, once."""
    return replace(state, total=total_samples(federation)), {}


def fedlit_round(state: ServerState, federation: Federation, config: FedLitConfig) -> tuple[ServerState, Log]:
    """Train and type; align; average."""
    replies = federation.call(FedLitClient.local_update, Common(state.weights, state.centres, state.total))
    sent = {client: reply.centroids for client, reply in replies.items() if reply.edges}
    centres = state.centres if len(state.centres) or not sent else most_alike(sent)
    same = list(range(config.types))
    orders = {client: torch.tensor(align(sent[client], centres) if client in sent else same) for client in replies}
    if sent:
        centres = torch.stack([sent[client][orders[client]] for client in sent]).mean(0)
    requests = PerClient({client: Order(order, state.total) for client, order in orders.items()})
    total = federation.sum(FedLitClient.put_in_order, requests)
    weights = {}
    for name, tensor in total.weights.items():
        if name.startswith(BRANCH):  # the mean over clients where the type is active
            count = by_type(total.active, tensor)
            tensor = torch.where(count > 0, tensor / count.clamp(min=1.0), state.weights[name])
        weights[name] = tensor
    moved = sum(int((order != torch.arange(len(order))).sum()) for order in orders.values())
    return replace(state, weights=weights, centres=centres), {"types_reordered": float(moved)}


def by_type(values: Tensor, branches: Tensor) -> Tensor:
    """A value for each type (T,), shaped to multiply the branches' weights (T, ...)."""
    return values.to(branches.dtype).view(-1, *[1] * (branches.dim() - 1))


def most_alike(sent: Mapping[str, Tensor]) -> Tensor:
    """The centroids of the client most like all others: the first reference, whatever the order of clients."""
    unit = {client: torch.nn.functional.normalize(centroids, dim=1) for client, centroids in sent.items()}
    fit = {
        client: sum(float((own @ other.T).max(dim=1).values.sum()) for other in unit.values())
        for client, own in unit.items()
    }
    return sent[max(sorted(fit), key=lambda client: fit[client])]


def script(config: FedLitConfig, view: View) -> Script:
    """Centroids of every client, so that types can be aligned; then an average."""
    return {
        "setup": (total(FedLitClient.size),),
        "train": (ask(FedLitClient.local_update), total(FedLitClient.put_in_order, each=True)),
        "evaluation": (ask(FedLitClient.deploy),),
    }


METHOD = register(
    Method(
        name="fedlit",
        summary="clients type their edges, one channel per type; types are aligned before averaging",
        reference=(
            "Xie, Xiong & Yang, Federated Node Classification over Graphs with Latent Link-type Heterogeneity, WWW 2023"
        ),
        config=FedLitConfig,
        tasks=("node",),
        init=init,
        phases=(Phase("setup", count_round, rounds=1, setup=True), Phase("train", fedlit_round)),
        roles={"client": Role(FedLitClient)},
        script=script,
        preset="fedspray",
    )
)
