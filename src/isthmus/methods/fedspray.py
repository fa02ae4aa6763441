"""FedSpray -- Fu et al., Federated Graph Learning with Structure Proxy Alignment, KDD 2024.

Every client keeps a GNN of its own. Besides, all clients train a small network that sees features only and, for each class, a *structure
proxy*: a learnt stand-in for what the neighbourhood of a node of this class should look like. Its soft labels steady the personal GNNs
where neighbours mislead, at nodes of a client's minority classes; the GNNs' predictions teach it in turn.

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
    proxy_reset        all              unlabelled     training nodes' proxies restart from S[y_i], or go on from their last value
    projector_init     projector        classifier     what the local projector starts from in phase 2
    kd_confidence      0                0.7            teach all nodes, or besides training nodes only those with max_j q_ij above it
    init               standard         uniform01      first weights of the GNN
    proxy_start        gaussian         ramp           s_j drawn small, or 0.01 j in every coordinate with 0.1 for every s_i

# Differs from the paper: a class nobody has training nodes of keeps its s_j; dividing by a_j = 0 would spread NaN to every node.
# Differs from the paper: a client multiplies its part by a_j^k / a_j and N^k / N itself, so that the server needs only sums, and with
# secure sums nobody reads a client's proxies or label counts. ``min_class_count`` also keeps back the proxies of classes of which the
# client has few training nodes: the mean over one node is that node's proxy. `fedspray-published` sends both as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from isthmus.data.graphs import GraphSetData
from isthmus.errors import ConfigError, RunError
from isthmus.federation.interface import Federation, Replies, View
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import Count, Embedding, LabelStatistic, Message, Model
from isthmus.federation.roles import Role, handler
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import ModelState, WeightedClient, WeightedConfig
from isthmus.metrics.groups import majority_class, minority_mask
from isthmus.nn.loss import distilled
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.nn.structure_encoder import PROXIES, class_means, encoder_inputs, first_encoder, soft_labels, taught, train_encoder
from isthmus.nn.train import predict, train_locally
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
        if self.loss != "ce":
            raise ConfigError(f"fedspray adds its term to plain cross entropy: set loss=ce, got {self.loss}")
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


class FedSprayClient(WeightedClient[ConfigT], Generic[ConfigT]):
    """One client: its GNN and its nodes' proxies stay; encoder and class means leave."""

    def setup(self) -> None:
        data: Any = self.data
        if isinstance(data, GraphSetData):
            raise ConfigError("fedspray classifies nodes: choose a data set of one graph (isthmus datasets lists them)")
        super().setup()
        self.encoder_inputs = encoder_inputs(data, data.train, self.config.dtype)
        self.class_counts = torch.bincount(data.y[data.train], minlength=data.num_classes)

    def initial_state(self) -> SprayState:
        state = super().initial_state()
        config, rows = self.config, len(self.encoder_inputs.y)
        start = NODE_START if config.proxies else 0.0
        proxies = torch.full((rows, config.proxy_width), start, dtype=config.dtype)
        return SprayState(state.weights, state.optimizer, proxies, self.fresh_moments(proxies))

    def fresh_moments(self, proxies: Tensor) -> OptimizerState:
        """Moments of the encoder and the proxies before their first step."""
        data, config = self.data, self.config
        encoder = first_encoder(data.num_features, config.proxy_width, data.num_classes, Stream(0), classifier=config.classifier)
        return fresh_state(config.optimizer, {**_typed(encoder, config.dtype), PROXIES: proxies})

    @cached_property
    def student(self) -> Any:
        """Inputs of all nodes with the training nodes' loss weights; without teaching only training rows are needed (`learner.inputs`)."""
        learner: Any = self.learner
        return learner.whole

    @property
    def class_shares(self) -> Tensor:
        """a_j^k (C,); zero for a class of which there are too few training nodes to speak of (`min_class_count`)."""
        counts = self.class_counts.double()
        return torch.where(self.class_counts >= self.config.min_class_count, counts / counts.sum().clamp(min=1.0), 0.0)

    @handler
    def census(self) -> Census:
        return Census(self.samples(), self.class_shares)

    @handler
    def local_update(self, common: Common) -> Update:
        """Both phases; leaves pre-weighted."""
        encoder, classes = self.learn(common.encoder, common.proxies)
        weight = torch.where(common.class_shares > 0.0, self.class_shares / common.class_shares, 0.0)  # a_j^k / a_j
        return Update(scaled(encoder, self.samples() / common.total), classes * weight.to(classes.dtype).unsqueeze(1))

    def learn(self, encoder: Weights, classes: Tensor) -> tuple[Weights, Tensor]:
        """Phase 1 on theta^k, phase 2 on omega^k and s_i; returns omega^k and the class means S^k (C, d_s)."""
        config, state = self.config, self.state
        assert isinstance(state, SprayState)
        if config.reset_optimizer:
            state = replace(state, optimizer=fresh_state(config.optimizer, state.weights), encoder=self.fresh_moments(state.proxies))
        if config.proxy_reset == "all" and config.proxies:
            state = replace(state, proxies=classes[self.encoder_inputs.y])  # s_i = s_j
        self.state = state
        self.teach(encoder, classes, state.proxies)
        return self.align(encoder)

    def teach(self, encoder: Weights, classes: Tensor, proxies: Tensor) -> None:
        """Phase 1: E steps on L_G = CE + lambda1 mean KL(p_i || yhat_i), p_i computed once."""
        config = self.config
        if not config.lambda1:
            self.state = self.train(self.state.weights, received={})  # Local, on the rows its loss depends on
            return
        p, q = soft_labels(encoder, classes, proxies, self.encoder_inputs)
        rows = taught(q, self.encoder_inputs, config.kd_confidence).to(p.dtype)
        loss = distilled(p, rows * (config.lambda1 / rows.sum().clamp(min=1.0)), self.student)
        learner: Any = self.learner
        result = train_locally(
            learner.model, self.state.weights, self.state.optimizer, self.student, epochs=config.local_epochs, lr=config.lr,
            weight_decay=config.weight_decay, optimizer=config.optimizer, loss=loss, dropout=learner.dropout(self.stream),
        )  # fmt: skip
        self.state = replace(self.state, weights=result.weights, optimizer=result.optimizer_state)

    def align(self, encoder: Weights) -> tuple[Weights, Tensor]:
        """Phase 2: E steps on L_F = CE(y_i, q_i) + lambda2 mean KL(yhat_i || p_i), yhat_i computed once; then s_j^k."""
        config, state, inputs = self.config, self.state, self.encoder_inputs
        assert isinstance(state, SprayState)
        if not self.learner.num_train:
            return encoder, state.proxies.new_zeros(self.data.num_classes, config.proxy_width)
        if config.projector_init == "classifier" and config.classifier:
            encoder = {**encoder, **{f"project.{part}": encoder[f"classify.{part}"] for part in ("weight", "bias")}}
        predicted = torch.softmax(predict(self.learner.model, state.weights, self.labelled), dim=-1)
        result = train_encoder(
            encoder, state.proxies, state.encoder, inputs, predicted, epochs=config.local_epochs, lr=config.encoder_lr,
            proxy_lr=config.proxy_lr, lambda2=config.lambda2, optimizer=config.optimizer, weight_decay=config.weight_decay,
            train_proxies=config.proxies,
        )  # fmt: skip
        self.state = replace(state, proxies=result.proxies, encoder=result.optimizer_state)
        return result.weights, class_means(result.proxies, inputs, self.data.num_classes)[0]

    @property
    def labelled(self) -> Any:
        """GNN inputs whose output rows are the training nodes."""
        learner: Any = self.learner
        return learner.inputs


def init(view: View, config: FedSprayConfig, common: Stream) -> ServerState:
    """omega_0 and S_0."""
    if view.task == "graph":
        raise ConfigError("fedspray classifies nodes: choose a data set of one graph (isthmus datasets lists them)")
    if not view.alike:
        raise ConfigError("fedspray shares an encoder of features and a proxy per class: all clients need the same features and classes")
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
    total = federation.sum(FedSprayClient.local_update, Common(state.encoder, state.proxies, state.total, state.class_shares))
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
        clients[client] = {"majority_class": majority_class(data.y, data.train), "minority_test_nodes": int((minority & data.test).sum())}
    silent = [j for j, share in enumerate(state.class_shares.tolist()) if share == 0.0]
    return {"clients": clients, "classes_without_proxy": silent}


def _typed(weights: Weights, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


METHOD = register(
    Method(
        name="fedspray",
        summary="personal GNNs steadied by a common feature encoder with a structure proxy per class",
        reference="Fu et al., Federated Graph Learning with Structure Proxy Alignment, KDD 2024",
        config=FedSprayConfig,
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
