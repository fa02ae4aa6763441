"""FedSpray -- Fu et al., Federated Graph Learning with Structure Proxy Alignment, KDD 2024.

Every client keeps a GNN of its own. Besides, all clients train a small network that sees features only and, for each
class, a *structure proxy*: a learnt stand-in for what the neighbourhood of a node of this class should look like. Its
soft labels steady the personal GNNs where neighbours mislead, at nodes of a client's minority classes; the GNNs'
predictions teach it in turn.

    paper              here
    theta^k            SprayState.weights              personal GNN, never leaves
    omega              ServerState.encoder             feature-structure encoder (`isthmus.nn.structure_encoder`)
    S, s_j             ServerState.proxies (C, d_s)    structure proxies
    s_i                SprayState.proxies (m, d_s)     of training nodes only; of others sum_j q_ij s_j, never stored
    a_j^k              FedSprayClient.class_shares     share of class j among the client's training nodes
    a_j                ServerState.class_shares        sum over clients, learnt once
    N^k / N            samples / ServerState.total     by ``weighting``; training nodes, as the reference code has it
    p_i, q_i           soft_labels                     classifier and projector
    lambda1, lambda2   of the config
    E                  local_epochs                    full-batch steps in each of the two phases

Where paper and reference code part ways (``--profile paper`` and ``reference`` pick one side of all):

    setting            paper            reference code
    proxy_reset        all              unlabelled     training nodes' proxies restart from S[y_i], or go on from their
                                                       last value
    projector_init     projector        classifier     what the local projector starts from in phase 2
    kd_confidence      0                0.7            teach all nodes, or besides training nodes only those with max_j
                                                       q_ij above it
    init               standard         uniform01      first weights of the GNN
    proxy_start        gaussian         ramp           s_j drawn small, or 0.01 j in every coordinate with 0.1 for every
                                                       s_i

# Differs from the paper: a class nobody has training nodes of keeps its s_j; dividing by a_j = 0 would spread NaN to
every node. # Differs from the paper: a client multiplies its part by a_j^k / a_j and N^k / N itself, so that the server
needs only sums, and with secure sums nobody reads a client's proxies or label counts. ``min_class_count`` also keeps
back the proxies of classes of which the client has few training nodes: the mean over one node is that node's proxy.
`fedspray-published` sends both as published.

What remains visible with secure sums: a_j over all clients; of a class that one client alone has, that client's mean
proxy; and the common encoder, an MLP trained on raw features, with all that can be read off such a model. Scores of
evaluation are sent client by client, and they count test nodes of the client's majority class and of the others: that
share of a label histogram is told whatever sums hide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.federation.interface import Federation, Replies, Stacked, View
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import Count, Embedding, LabelStatistic, Message, Model
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.learners import dropout_source
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import ModelCohort, ModelState, WeightedClient, WeightedConfig
from isthmus.metrics.groups import majority_class, minority_mask
from isthmus.nn.backbone import Backbone
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import Inputs, stack_inputs
from isthmus.nn.loss import distilled
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.nn.structure_encoder import (
    PROXIES,
    EncoderInputs,
    EncoderResult,
    class_means,
    encoder_inputs,
    first_encoder,
    soft_labels,
    stack_encoder_inputs,
    teaching_weight,
    train_encoder,
)
from isthmus.nn.train import TrainResult, predict, train_locally
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, num_values, scaled

NODE_START = 0.1
"""What every node proxy starts from."""


@dataclass(frozen=True)
class FedSprayConfig(WeightedConfig):
    """Knobs of FedSpray.

    Args:
        lambda1: Weight of the encoder's teaching in the GNN's loss; 0 is Local.
        lambda2: Weight of the GNN's teaching in the encoder's loss.
        proxy_width: d_s, width of proxies and encoder.
        encoder_lr, proxy_lr: Step sizes of the encoder and of the proxies.
        proxies: False fixes all proxies at zero (S = 0).
        proxy_reset, projector_init, kd_confidence, proxy_start: See the table above.
        reset_optimizer: Start all optimiser states afresh in each round.
        min_class_count: Training nodes of a class a client must have before its proxy of that class counts.
    """

    lambda1: float = 5.0
    lambda2: float = 1.0
    proxy_width: int = 64
    encoder_lr: float = 0.003
    proxy_lr: float = 0.02
    proxies: bool = True
    proxy_reset: Literal["all", "unlabelled"] = "all"
    projector_init: Literal["projector", "classifier"] = "projector"
    kd_confidence: float = 0.0
    proxy_start: Literal["gaussian", "ramp"] = "gaussian"
    reset_optimizer: bool = False
    min_class_count: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("lambda1", 0.0), ("lambda2", 0.0), ("proxy_width", 1), ("min_class_count", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low:g}, got {getattr(self, name)}")
        for name in ("encoder_lr", "proxy_lr"):
            if getattr(self, name) <= 0.0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0.0 <= self.kd_confidence <= 1.0:
            raise ConfigError(f"kd_confidence is a probability and must lie in [0, 1], got {self.kd_confidence}")
        if self.dp_clip:
            raise ConfigError("fedspray adds no noise of its own: leave dp_clip out (fedavg and fedsgd have it)")

    @property
    def classifier(self) -> bool:
        """Whether the encoder has the classifier p; the control without one teaches by q."""
        return True


ConfigT = TypeVar("ConfigT", bound=FedSprayConfig)


@dataclass(frozen=True)
class Census(Message):
    """How much a client counts in the two means: N^k, and a_j^k by class (C,)."""

    samples: Count[float]
    class_shares: LabelStatistic[Tensor]


@dataclass(frozen=True)
class Common(Message):
    """omega_{r-1} and S_{r-1}, with the totals clients weight by."""

    encoder: Model[Weights]
    proxies: Embedding[Tensor]
    total: Count[float]
    class_shares: LabelStatistic[Tensor]


@dataclass(frozen=True)
class Update(Message):
    """(N^k / N) omega^k and (a_j^k / a_j) s_j^k: ready to be summed."""

    encoder: Model[Weights]
    proxies: Embedding[Tensor]


@dataclass(frozen=True)
class ServerState(Record):
    """All the server remembers between rounds."""

    encoder: Weights
    proxies: Tensor
    total: float
    class_shares: Tensor


@dataclass(frozen=True)
class SprayState(ModelState):
    """The personal GNN, the proxies s_i of the training nodes (m, d_s), and the moments of encoder and proxies."""

    proxies: Tensor
    encoder: OptimizerState


@dataclass(frozen=True, eq=False)
class Stage:
    """What one client, or a cohort of them, computes on; constant over rounds.

    Args:
        model: The GNN's shape.
        student: GNN inputs of all nodes, with the loss weights of the training nodes.
        labelled: GNN inputs whose output rows are the training nodes.
        encoder: Encoder inputs.
    """

    config: FedSprayConfig
    model: Backbone
    student: Inputs
    labelled: Inputs
    encoder: EncoderInputs

    def teach(
        self,
        weights: Weights,
        optimizer: OptimizerState,
        common: Weights,
        classes: Tensor,
        proxies: Tensor,
        dropout: DropoutSource | None,
        **memory: Any,
    ) -> TrainResult:
        """Phase 1: E steps on L_G = CE + lambda1 mean KL(p_i || yhat_i), p_i computed once."""
        config = self.config
        p, q = soft_labels(common, classes, proxies, self.encoder)
        loss = distilled(
            p, teaching_weight(q, self.encoder, config.kd_confidence, config.lambda1), self.student, config.loss
        )
        return train_locally(
            self.model,
            weights,
            optimizer,
            self.student,
            epochs=config.local_epochs,
            lr=config.lr,
            weight_decay=config.weight_decay,
            optimizer=config.optimizer,
            loss=loss,
            dropout=dropout,
            **memory,
        )

    def align(self, weights: Weights, common: Weights, proxies: Tensor, moments: OptimizerState) -> EncoderResult:
        """Phase 2: E steps on L_F = CE(y_i, q_i) + lambda2 mean KL(yhat_i || p_i), yhat_i computed once."""
        config, inputs = self.config, self.encoder
        if config.projector_init == "classifier" and config.classifier:
            common = {**common, **{f"project.{part}": common[f"classify.{part}"] for part in ("weight", "bias")}}
        if inputs.clients > 1:
            common = {name: tensor.expand(inputs.clients, *tensor.shape) for name, tensor in common.items()}
        logits = predict(self.model, weights, self.labelled)
        predicted = logits.new_zeros(len(inputs.y), logits.shape[1])
        predicted[inputs.slot] = torch.softmax(logits, dim=-1)
        return train_encoder(
            common,
            proxies,
            moments,
            inputs,
            predicted,
            epochs=config.local_epochs,
            lr=config.encoder_lr,
            proxy_lr=config.proxy_lr,
            lambda2=config.lambda2,
            optimizer=config.optimizer,
            weight_decay=config.weight_decay,
            train_proxies=config.proxies,
        )

    def start(self, proxies: Tensor, classes: Tensor) -> Tensor:
        """s_i at the start of a round: s_j of its class, or where it was."""
        return classes[self.encoder.y] if self.config.proxy_reset == "all" and self.config.proxies else proxies


class FedSprayCohort(ModelCohort):
    """FedSpray's clients, trained together."""

    def __init__(self, clients: Sequence[Any]) -> None:
        super().__init__(clients)
        stages = [client.stage for client in clients]
        self.stage = Stage(
            self.config,
            self.model,
            stack_inputs([stage.student for stage in stages]),
            self.inputs,
            stack_encoder_inputs([stage.encoder for stage in stages]),
        )
        self.class_shares = torch.stack([client.class_shares for client in clients])
        self.proxies: Tensor
        self.moments: OptimizerState

    def load(self) -> None:
        super().load()
        states = [client.state for client in self.clients]
        self.proxies = self.stacked([state.proxies for state in states])
        steps = tuple(step for state in states for step in state.encoder.steps)
        first, second = (
            self.stacked_moments([getattr(state.encoder, part) for state in states]) for part in ("first", "second")
        )
        self.moments = OptimizerState(steps, first, second)

    def store(self) -> None:
        super().store()
        rows = len(self.stage.encoder.y) // len(self.clients)
        for k, client in enumerate(self.clients):
            own = slice(k * rows, k * rows + len(client.stage.encoder.y))
            first, second = (
                {name: (tensor[own] if name == PROXIES else tensor[k]).clone() for name, tensor in part.items()}
                for part in (self.moments.first, self.moments.second)
            )
            moments = OptimizerState((self.moments.steps[k],), first, second)
            client.state = SprayState(client.state.weights, client.state.optimizer, self.proxies[own].clone(), moments)

    def stacked(self, rows: Sequence[Tensor]) -> Tensor:
        """Rows of every client's training nodes, padded (K m, d_s)."""
        padded = rows[0].new_zeros(len(rows), len(self.stage.encoder.y) // len(rows), rows[0].shape[1])
        for k, own in enumerate(rows):
            padded[k, : len(own)] = own
        return padded.view(-1, rows[0].shape[1])

    def stacked_moments(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            name: self.stacked([part[name] for part in parts])
            if name == PROXIES
            else torch.stack([part[name] for part in parts])
            for name in parts[0]
        }

    def local_update(self, common: Common) -> Stacked[Update]:
        if self.config.reset_optimizer:
            self.optimizer = fresh_state(self.config.optimizer, self.weights, clients=len(self.clients))
            self.moments = OptimizerState(
                (0,) * len(self.clients), _zeros(self.moments.first), _zeros(self.moments.second)
            )
        proxies = self.stage.start(self.proxies, common.proxies)
        if self.config.lambda1:
            taught = self.stage.teach(
                self.weights,
                self.optimizer,
                common.encoder,
                common.proxies,
                proxies,
                self.dropout(),
                donate=True,
                workspace=self.workspace,
            )
            self.weights, self.optimizer = taught.weights, taught.optimizer_state
        else:
            self.train_together(received={})
        result = self.stage.align(self.weights, common.encoder, proxies, self.moments)
        self.proxies, self.moments = result.proxies, result.optimizer_state
        classes = class_means(result.proxies, self.stage.encoder, common.proxies.shape[0]) * spoken(
            self.class_shares, common
        ).unsqueeze(2)
        return Stacked(Update(self.scaled(result.weights, self.shares(common.total)), classes), self.parties)


class FedSprayClient(WeightedClient[ConfigT], Generic[ConfigT]):
    """One client: its GNN and its nodes' proxies stay; encoder and class means leave."""

    cohort: ClassVar[type[Cohort[Any]] | None] = FedSprayCohort

    def setup(self) -> None:
        data: Any = self.data
        super().setup()
        learner: Any = self.learner
        inputs = encoder_inputs(data, data.train, self.config.dtype)
        self.stage = Stage(self.config, learner.model, learner.whole, learner.inputs, inputs)
        self.class_counts = torch.bincount(data.y[data.train], minlength=data.num_classes)

    def initial_state(self) -> SprayState:
        state = super().initial_state()
        config, rows = self.config, len(self.stage.encoder.y)
        start = NODE_START if config.proxies else 0.0
        proxies = torch.full((rows, config.proxy_width), start, dtype=config.dtype)
        return SprayState(state.weights, state.optimizer, proxies, self.fresh_moments(proxies))

    def fresh_moments(self, proxies: Tensor) -> OptimizerState:
        """Moments of the encoder and the proxies before their first step."""
        data, config = self.data, self.config
        encoder = first_encoder(
            data.num_features, config.proxy_width, data.num_classes, Stream(0), classifier=config.classifier
        )
        return fresh_state(config.optimizer, {**_typed(encoder, config.dtype), PROXIES: proxies})

    @property
    def class_shares(self) -> Tensor:
        """a_j^k (C,); zero for a class of which there are too few training nodes to speak of (`min_class_count`)."""
        counts = self.class_counts.double()
        if not self.config.proxies:  # then nobody needs it
            return torch.zeros_like(counts)
        return torch.where(self.class_counts >= self.config.min_class_count, counts / counts.sum().clamp(min=1.0), 0.0)

    @handler
    def census(self) -> Census:
        return Census(self.samples(), self.class_shares)

    @handler
    def local_update(self, common: Common) -> Update:
        """Both phases; leaves pre-weighted."""
        encoder, classes = self.learn(common.encoder, common.proxies)
        weight = spoken(self.class_shares, common)
        return Update(scaled(encoder, self.samples() / common.total), classes * weight.unsqueeze(1))

    def learn(self, common: Weights, classes: Tensor) -> tuple[Weights, Tensor]:
        """Phase 1 on theta^k, phase 2 on omega^k and s_i; returns omega^k and the class means S^k (C, d_s)."""
        config, state, stage = self.config, self.state, self.stage
        assert isinstance(state, SprayState)
        if config.reset_optimizer:
            state = replace(
                state, optimizer=fresh_state(config.optimizer, state.weights), encoder=self.fresh_moments(state.proxies)
            )
        self.state = state
        proxies = stage.start(state.proxies, classes)
        if config.lambda1:
            dropout = dropout_source(config, [self.stream])
            taught = stage.teach(state.weights, state.optimizer, common, classes, proxies, dropout)
            weights, optimizer = taught.weights, taught.optimizer_state
        else:
            alone = self.train(state.weights, received={})  # Local, on the rows its loss depends on
            weights, optimizer = dict(alone.weights), alone.optimizer
        result = stage.align(weights, common, proxies, state.encoder)
        self.state = SprayState(weights, optimizer, result.proxies, result.optimizer_state)
        return result.weights, class_means(result.proxies, stage.encoder, self.data.num_classes)[0]


def spoken(class_shares: Tensor, common: Common) -> Tensor:
    """a_j^k / a_j; zero for a class nobody speaks of. (.., C)"""
    return torch.where(common.class_shares > 0.0, class_shares / common.class_shares, 0.0).to(common.proxies.dtype)


def init(view: View, config: FedSprayConfig, common: Stream) -> ServerState:
    """omega_0 and S_0."""
    if not view.alike:
        raise ConfigError(
            "fedspray shares an encoder of features and a proxy per class: all clients need the same features and "
            "classes"
        )
    width, stream = config.proxy_width, common.child("encoder")
    encoder = first_encoder(view.num_features, width, view.num_classes, stream, classifier=config.classifier)
    proxies = first_proxies(view.num_classes, config, common.child("proxies"))
    return ServerState(_typed(encoder, config.dtype), proxies, 0.0, torch.zeros(view.num_classes, dtype=torch.float64))


def first_proxies(num_classes: int, config: FedSprayConfig, stream: Stream) -> Tensor:
    """S_0 (C, d_s)."""
    shape = num_classes, config.proxy_width
    if not config.proxies:
        return torch.zeros(shape, dtype=config.dtype)
    if config.proxy_start == "ramp":
        return (0.01 * torch.arange(num_classes, dtype=config.dtype)).unsqueeze(1).repeat(1, config.proxy_width)
    return 0.01 * torch.randn(shape, generator=stream.torch()).to(config.dtype)


def census_round(state: ServerState, federation: Federation, config: FedSprayConfig) -> tuple[ServerState, Log]:
    """N and a_j, once, as sums."""
    total = federation.sum(FedSprayClient.census)
    if total.samples <= 0.0:
        raise RunError("no client has a training node: choose a split with a training part")
    return replace(state, total=total.samples, class_shares=total.class_shares), {}


def fedspray_round(state: ServerState, federation: Federation, config: FedSprayConfig) -> tuple[ServerState, Log]:
    """Everybody learns in two phases; the server adds up."""
    total = federation.sum(
        FedSprayClient.local_update, Common(state.encoder, state.proxies, state.total, state.class_shares)
    )
    encoder = total.encoder  # omega = sum_k (N^k / N) omega^k
    return aligned(state, encoder, total.proxies, config)  # s_j = sum_k (a_j^k / a_j) s_j^k


def aligned(state: ServerState, encoder: Weights, proxies: Tensor, config: FedSprayConfig) -> tuple[ServerState, Log]:
    """The next state; a class nobody speaks of keeps its proxy."""
    spoken = (state.class_shares > 0.0).unsqueeze(1)
    after = torch.where(spoken, proxies, state.proxies) if config.proxies else state.proxies
    return replace(state, encoder=encoder, proxies=after), {"proxy_shift": float((after - state.proxies).norm())}


def evaluate(state: ServerState, federation: Federation, config: FedSprayConfig) -> Replies[Evaluation]:
    """Every client scores its own GNN."""
    return federation.call(FedSprayClient.evaluate)


def facts(state: ServerState, config: FedSprayConfig, scenario: Any) -> Mapping[str, Any]:
    """What minority scores rest on: each client's majority class and how many test nodes are of another."""
    if scenario is None:
        return {}
    clients = {}
    for client, data in scenario.parts.items():
        minority = minority_mask(data.y, data.train)
        clients[client] = {
            "majority_class": majority_class(data.y, data.train),
            "minority_test_nodes": int((minority & data.test).sum()),
        }
    silent = [j for j, share in enumerate(state.class_shares.tolist()) if share == 0.0] if config.proxies else []
    return {"clients": clients, "classes_without_proxy": silent}


def _zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def _typed(weights: Weights, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


METHOD = register(
    Method(
        name="fedspray",
        summary="personal GNNs steadied by a common feature encoder with a structure proxy per class",
        reference="Fu et al., Federated Graph Learning with Structure Proxy Alignment, KDD 2024",
        config=FedSprayConfig,
        tasks=("node",),
        init=init,
        phases=(Phase("setup", census_round, rounds=1, setup=True), Phase("train", fedspray_round)),
        evaluate=evaluate,
        roles={"client": Role(FedSprayClient)},
        discloses=(
            Disclosure("setup", "client", "server", Census, "summed"),
            Disclosure("train", "server", "client", Common),
            Disclosure("train", "client", "server", Update, "summed"),
            Disclosure("evaluation", "client", "server", Evaluation),
        ),
        preset="fedspray",
        shared_values=lambda state: num_values(state.encoder) + state.proxies.numel(),
        facts=facts,
    )
)
