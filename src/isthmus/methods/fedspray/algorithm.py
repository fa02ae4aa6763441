"""FedSpray -- Fu et al., Federated Graph Learning with Structure Proxy Alignment, KDD 2024.

Every client keeps a GNN of its own. Besides, all clients train a small network that sees features only and, for each
class, a *structure proxy*: a learnt stand-in for what the neighbourhood of a node of this class should look like. Its
soft labels guide the personal GNNs where neighbours mislead, at nodes of a client's minority classes; the GNNs'
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

A round: `fedspray_round` sends omega and S; every client does `LocalTraining.learn` (phase 1 `teach`, phase 2 `align`);
the server adds up. Settings where paper and reference code differ are in `config`.

# Differs from the paper: a class without training nodes at any client keeps its s_j; dividing by a_j = 0 would spread
NaN to every node.
# Differs from the paper: a client multiplies its part by a_j^k / a_j and N^k / N itself, so that the server needs only
sums, and with secure sums no party reads another's proxies or label counts. ``min_class_count`` also keeps back the
proxies of classes of which the client has few training nodes: the mean over one node is that node's proxy. `published`
(the method ``fedspray-published``) sends both as published.

What remains visible with secure sums: a_j over all clients; of a class that one client alone has, that client's mean
proxy; and the common encoder, an MLP trained on raw features, with all that can be read off such a model. Scores of
evaluation are sent client by client, and they count test nodes of the client's majority class and of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.federation.interface import Federation, Stacked, View
from isthmus.federation.messages import Count, Embedding, LabelStatistic, Message, Model, PartyId
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask, total
from isthmus.methods.cohort_training import ModelCohort
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedspray.config import FedSprayConfig
from isthmus.methods.learners import NodeLearner, dropout_source
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.schedule import rate_factor
from isthmus.methods.training import ModelState, WeightedClient
from isthmus.metrics.groups import majority_class, minority_mask
from isthmus.nn.backbone import Backbone
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import Inputs, stack_inputs
from isthmus.nn.loss import Loss, class_weights, distilled
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
class LocalTraining:
    """A round at one client, or at a cohort of them side by side; its fields are constant over rounds.

    Args:
        model: The GNN's shape.
        student: What the GNN trains on: inputs of all nodes, with the loss weights of the training nodes; without a
            teacher ``labelled``, the rows its loss depends on.
        labelled: GNN inputs whose output rows are the training nodes.
        encoder: Encoder inputs.
    """

    config: FedSprayConfig
    model: Backbone
    student: Inputs
    labelled: Inputs
    encoder: EncoderInputs

    def learn(
        self,
        state: SprayState,
        common: Weights,
        classes: Tensor,
        dropout: DropoutSource | None,
        round: int,
    ) -> tuple[SprayState, dict[str, Tensor], Tensor]:
        """Both phases from omega and S; the next state, omega^k and the class proxies S^k (K, C, d_s)."""
        config, optimizer, moments = self.config, state.optimizer, state.encoder
        factor = rate_factor(config, round)
        if config.reset_optimizer:
            optimizer, moments = _restarted(optimizer), _restarted(moments)
        proxies = self.first_proxies(state.proxies, classes)
        taught = self.teach(state.weights, optimizer, common, classes, proxies, dropout, factor)
        result = self.align(taught.weights, common, proxies, moments, factor)
        after = SprayState(taught.weights, taught.optimizer_state, result.proxies, result.optimizer_state)
        return after, result.weights, class_means(result.proxies, self.encoder, len(classes))

    def teach(
        self,
        weights: Weights,
        optimizer: OptimizerState,
        common: Weights,
        classes: Tensor,
        proxies: Tensor,
        dropout: DropoutSource | None,
        factor: float = 1.0,
    ) -> TrainResult:
        """Phase 1: E steps of theta^k on L_G = CE(y_i, yhat_i) + lambda1 mean KL(p_i || yhat_i), p_i computed once."""
        config = self.config
        loss = self.taught_loss(common, classes, proxies)
        return train_locally(
            self.model,
            weights,
            optimizer,
            self.student,
            epochs=config.local_epochs,
            lr=config.lr * factor,
            weight_decay=config.weight_decay,
            optimizer=config.optimizer,
            loss=config.loss if loss is None else loss,
            dropout=dropout,
        )

    def first_proxies(self, before: Tensor, classes: Tensor) -> Tensor:
        """What the s_i start a round from: s_j of their class j, or where they were."""
        return classes[self.encoder.y] if self.config.proxy_reset == "all" and self.config.proxies else before

    def taught_loss(self, common: Weights, classes: Tensor, proxies: Tensor) -> Loss | None:
        """L_G on the rows of ``student``; None without a teacher."""
        config = self.config
        if not config.lambda1:
            return None
        p, q = soft_labels(common, classes, proxies, self.encoder)
        weight = teaching_weight(q, self.encoder, config.kd_confidence, config.lambda1)
        return distilled(p, weight, self.student, config.loss)

    def align(
        self, weights: Weights, common: Weights, proxies: Tensor, moments: OptimizerState, factor: float = 1.0
    ) -> EncoderResult:
        """Phase 2: E steps of omega^k and s_i on L_F = CE(y_i, q_i) + lambda2 mean KL(yhat_i || p_i), yhat_i computed
        once.
        """
        config, inputs = self.config, self.encoder
        if config.projector_init == "classifier" and config.classifier:
            common = {**common, **{f"project.{part}": common[f"classify.{part}"] for part in ("weight", "bias")}}
        if inputs.clients > 1:
            common = {name: tensor.expand(inputs.clients, *tensor.shape) for name, tensor in common.items()}
        logits = predict(self.model, weights, self.labelled)
        predicted = logits.new_zeros(len(inputs.y), logits.shape[1])
        predicted[inputs.slot] = torch.softmax(logits, dim=-1)  # yhat_i
        return train_encoder(
            common,
            proxies,
            moments,
            inputs,
            predicted,
            epochs=config.local_epochs,
            lr=config.encoder_lr * factor,
            proxy_lr=config.proxy_lr * factor,
            lambda2=config.lambda2,
            optimizer=config.optimizer,
            weight_decay=config.weight_decay,
            train_proxies=config.proxies,
        )


class FedSprayCohort(ModelCohort):
    """FedSpray's clients, trained together: `LocalTraining` on stacked inputs, and how their states are stacked."""

    def __init__(self, clients: Sequence[Any]) -> None:
        super().__init__(clients)
        labelled = stack_inputs([client.training.labelled for client in clients])
        encoders = stack_encoder_inputs([client.training.encoder for client in clients])
        self.training = LocalTraining(self.config, self.model, self.inputs, labelled, encoders)
        self.class_shares = torch.stack([client.class_shares for client in clients])
        self.proxies: Tensor
        self.moments: OptimizerState

    def training_inputs(self) -> list[Inputs]:
        return [client.training.student for client in self.clients]

    def local_update(self, common: Common) -> Stacked[Update]:
        """`LocalTraining.learn`, phase 1 as every cohort trains."""
        training, moments = self.training, self.moments
        if self.config.reset_optimizer:
            self.restart_optimizer()
            moments = _restarted(moments)
        proxies = training.first_proxies(self.proxies, common.proxies)
        self.train_together({}, loss=training.taught_loss(common.encoder, common.proxies, proxies))
        factor = rate_factor(self.config, self.clients[0].round)
        result = training.align(self.weights, common.encoder, proxies, moments, factor)
        self.proxies, self.moments = result.proxies, result.optimizer_state
        classes = class_means(result.proxies, training.encoder, len(common.proxies))
        weighted = classes * proxy_weights(self.class_shares, common).unsqueeze(2)
        return Stacked(Update(self.scaled(result.weights, self.shares(common.total)), weighted), self.parties)

    def load(self) -> None:
        super().load()
        states = [client.state for client in self.clients]
        self.proxies = self.stacked([state.proxies for state in states])
        first, second = (
            self.stacked_moments([getattr(state.encoder, part) for state in states]) for part in ("first", "second")
        )
        self.moments = OptimizerState(tuple(step for state in states for step in state.encoder.steps), first, second)

    def store(self) -> None:
        super().store()
        rows = len(self.training.encoder.y) // len(self.clients)
        for k, client in enumerate(self.clients):
            own = slice(k * rows, k * rows + len(client.training.encoder.y))
            first, second = (
                {name: (tensor[own] if name == PROXIES else tensor[k]).clone() for name, tensor in part.items()}
                for part in (self.moments.first, self.moments.second)
            )
            moments = OptimizerState((self.moments.steps[k],), first, second)
            client.state = SprayState(client.state.weights, client.state.optimizer, self.proxies[own].clone(), moments)

    def stacked(self, rows: Sequence[Tensor]) -> Tensor:
        """Rows of every client's training nodes, padded (K m, d_s)."""
        padded = rows[0].new_zeros(len(rows), len(self.training.encoder.y) // len(rows), rows[0].shape[1])
        for k, own in enumerate(rows):
            padded[k, : len(own)] = own
        return padded.view(-1, rows[0].shape[1])

    def stacked_moments(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            name: (self.stacked if name == PROXIES else torch.stack)([part[name] for part in parts])
            for name in parts[0]
        }


class FedSprayClient(WeightedClient[ConfigT], Generic[ConfigT]):
    """One client: its GNN and its nodes' proxies stay; encoder and class means leave."""

    plain_model: ClassVar[bool] = True  # proxies teach, the GNN alone predicts
    state: SprayState
    learner: NodeLearner
    cohort: ClassVar[type[Cohort[Any]] | None] = FedSprayCohort

    def setup(self) -> None:
        super().setup()
        data, learner = self.data, self.learner
        self.class_counts = torch.bincount(data.y[data.train], minlength=data.num_classes)
        balanced = self.config.class_weight == "balanced"
        weights = class_weights(self.class_counts, self.config.dtype) if balanced else None
        inputs = encoder_inputs(data, data.train, self.config.dtype, weights)
        student = learner.whole if self.config.lambda1 else learner.inputs
        self.training = LocalTraining(self.config, learner.model, student, learner.inputs, inputs)

    def initial_state(self) -> SprayState:
        state, config, data = super().initial_state(), self.config, self.data
        shape, start = (len(self.training.encoder.y), config.proxy_width), NODE_START if config.proxies else 0.0
        proxies = torch.full(shape, start, dtype=config.dtype)
        encoder = first_omega(data.num_features, data.num_classes, config, Stream(0))  # for its shapes
        moments = fresh_state(config.optimizer, {**encoder, PROXIES: proxies})
        return SprayState(state.weights, state.optimizer, proxies, moments)

    @property
    def class_shares(self) -> Tensor:
        """a_j^k (C,); zero for a class of which there are too few training nodes to tell (`min_class_count`)."""
        counts = self.class_counts.double()
        if not self.config.proxies:  # then not needed
            return torch.zeros_like(counts)
        return torch.where(self.class_counts >= self.config.min_class_count, counts / counts.sum().clamp(min=1.0), 0.0)

    @handler
    def census(self) -> Census:
        return Census(self.samples(), self.class_shares)

    @handler
    def local_update(self, common: Common) -> Update:
        """Both phases; leaves pre-weighted."""
        encoder, classes = self.learn(common.encoder, common.proxies)
        weight = proxy_weights(self.class_shares, common).unsqueeze(1)
        return Update(scaled(encoder, self.samples() / common.total), classes * weight)

    def learn(self, common: Weights, classes: Tensor) -> tuple[Weights, Tensor]:
        """Both phases from omega and S; omega^k and S^k (C, d_s)."""
        dropout = dropout_source(self.config, [self.stream])
        self.state, encoder, means = self.training.learn(self.state, common, classes, dropout, self.round)
        return encoder, means[0]


def proxy_weights(class_shares: Tensor, common: Common) -> Tensor:
    """a_j^k / a_j; zero for a class no client has enough training nodes of. (.., C)"""
    return torch.where(common.class_shares > 0.0, class_shares / common.class_shares, 0.0).to(common.proxies.dtype)


def first_omega(num_features: int, num_classes: int, config: FedSprayConfig, stream: Stream) -> dict[str, Tensor]:
    """omega_0."""
    encoder = first_encoder(num_features, config.proxy_width, num_classes, stream, classifier=config.classifier)
    return {name: tensor.to(config.dtype) for name, tensor in encoder.items()}


def first_proxies(num_classes: int, config: FedSprayConfig, stream: Stream) -> Tensor:
    """S_0 (C, d_s)."""
    shape = num_classes, config.proxy_width
    if not config.proxies:
        return torch.zeros(shape, dtype=config.dtype)
    if config.proxy_start == "ramp":
        return (0.01 * torch.arange(num_classes, dtype=config.dtype)).unsqueeze(1).repeat(1, config.proxy_width)
    return 0.01 * torch.randn(shape, generator=stream.torch()).to(config.dtype)


def init(view: View, config: FedSprayConfig, common: Stream) -> ServerState:
    """omega_0 and S_0."""
    if not view.alike:
        raise ConfigError(
            "fedspray shares an encoder of features and a proxy per class: all clients need the same features and "
            "classes"
        )
    encoder = first_omega(view.num_features, view.num_classes, config, common.child("encoder"))
    proxies = first_proxies(view.num_classes, config, common.child("proxies"))
    return ServerState(encoder, proxies, 0.0, torch.zeros(view.num_classes, dtype=torch.float64))


def census_round(state: ServerState, federation: Federation, config: FedSprayConfig) -> tuple[ServerState, Log]:
    """N and a_j, once, as sums."""
    total = federation.sum(FedSprayClient.census)
    if total.samples <= 0.0:
        raise RunError("no client has a training node: choose a split with a training part")
    return replace(state, total=total.samples, class_shares=total.class_shares), {}


def fedspray_round(state: ServerState, federation: Federation, config: FedSprayConfig) -> tuple[ServerState, Log]:
    """Every client learns in two phases; the server adds up."""
    common = Common(state.encoder, state.proxies, state.total, state.class_shares)
    total = federation.sum(FedSprayClient.local_update, common)
    encoder = total.encoder  # omega = sum_k (N^k / N) omega^k
    return aggregated(state, encoder, total.proxies, config)  # s_j = sum_k (a_j^k / a_j) s_j^k


def aggregated(
    state: ServerState, encoder: Weights, proxies: Tensor, config: FedSprayConfig
) -> tuple[ServerState, Log]:
    """The next state; a class no client has enough training nodes of keeps its proxy."""
    present = (state.class_shares > 0.0).unsqueeze(1)
    after = torch.where(present, proxies, state.proxies) if config.proxies else state.proxies
    return replace(state, encoder=encoder, proxies=after), {"proxy_shift": float((after - state.proxies).norm())}


def evaluate(state: ServerState, federation: Federation, config: FedSprayConfig) -> Mapping[PartyId, Evaluation]:
    """Every client scores its own GNN."""
    return scores_of(federation, FedSprayClient.evaluate)


def facts(state: ServerState, config: FedSprayConfig, scenario: Any) -> Mapping[str, Any]:
    """What minority scores rest on: each client's majority class and how many test nodes are of another."""
    if scenario is None:
        return {}
    clients = {
        client: {
            "majority_class": majority_class(data.y, data.train),
            "minority_test_nodes": int((minority_mask(data.y, data.train) & data.test).sum()),
        }
        for client, data in scenario.parts.items()
    }
    absent = [j for j, share in enumerate(state.class_shares.tolist()) if share == 0.0] if config.proxies else []
    return {"clients": clients, "classes_without_proxy": absent}


def _restarted(state: OptimizerState) -> OptimizerState:
    """Before the first step."""
    first, second = ({name: torch.zeros_like(t) for name, t in part.items()} for part in (state.first, state.second))
    return OptimizerState((0,) * len(state.steps), first, second)


def script(config: FedSprayConfig, view: View) -> Script:
    """Sums alone; GNNs stay at home."""
    return {
        "setup": (total(FedSprayClient.census),),
        "train": (total(FedSprayClient.local_update),),
        "evaluation": (ask(FedSprayClient.evaluate),),
    }


METHOD = register(
    Method(
        name="fedspray",
        summary="personal GNNs guided by a common feature encoder with a structure proxy per class",
        reference="Fu et al., Federated Graph Learning with Structure Proxy Alignment, KDD 2024",
        config=FedSprayConfig,
        edge_weights=True,
        tasks=("node",),
        init=init,
        phases=(Phase("setup", census_round, rounds=1, setup=True), Phase("train", fedspray_round)),
        evaluate=evaluate,
        roles={"client": Role(FedSprayClient)},
        script=script,
        preset="fedspray",
        shared_values=lambda state: num_values(state.encoder) + state.proxies.numel(),
        facts=facts,
    )
)
