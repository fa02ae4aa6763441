"""What the classic methods share: a model at each client, trained by the local loop."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from isthmus.data.graph_set import GraphSetData
from isthmus.errors import ConfigError, ProtocolError, RunError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Count, Message, Model
from isthmus.federation.roles import Client, handler
from isthmus.methods.evaluation import Counter, Detail, Evaluation, ScoreBins, WantedMetric, bin_scores, detail
from isthmus.methods.learners import EmbeddingTerm, GraphLearner, Learner, need_features, node_learner
from isthmus.methods.schedule import Schedule, check_schedule, rate_factor
from isthmus.metrics.registry import ACCURACY
from isthmus.nn.backbone import Backbone
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.layers import uniform01_
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.nn.registry import (
    OWN_BACKBONES,
    backbones,
    build_backbone,
    build_graph_model,
    build_own_backbone,
    find_architecture,
)
from isthmus.nn.train import ExtraGradient
from isthmus.privacy.dp import Mechanism
from isthmus.privacy.shared_noise import SharedNoise
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights

OPTIONS = ("hops", "heads", "alpha", "dprate", "attention_dropout")


@dataclass(frozen=True)
class TrainConfig:
    """Model and local training, common to all classic methods.

    Args:
        backbone: Graph neural network: ``gcn``, ``sage``, ``dirsage``, ``mlp``, ``gat``, ``gin``, ``sgc``, ``gprgnn``
            or ``dgcn``.
        hidden: Widths of the hidden layers.
        dropout: Share of hidden values dropped in training.
        input_norm: Learnable LayerNorm on the input features.
        head: Linear classifier on top of the last hidden layer.
        hops: Propagations of dgcn, sgc (default 2) and gprgnn (10).
        heads: Attention heads of gat (default 1).
        alpha: Return probability gprgnn starts from (default 0.1).
        dprate: Share of values gprgnn drops before it propagates (default 0.5).
        attention_dropout: Share of attention weights gat drops (default 0).
        lr: Learning rate of each step.
        schedule: How learning rates change over rounds: ``constant``, ``decay`` (times ``lr_decay`` every ``lr_step``
            rounds) or ``cosine`` (to nearly 0 over ``schedule_rounds``).
        lr_decay: Factor of ``schedule=decay``.
        lr_step: Rounds between two reductions of ``schedule=decay``.
        schedule_rounds: Rounds over which ``schedule=cosine`` runs; not given = the run's rounds.
        weight_decay: This many times the weights is added to each gradient; with ``adamw`` it is decoupled.
        optimizer: Optimiser: ``adam``, ``adamw`` or ``sgd``.
        loss: Loss: cross-entropy (``ce``), or ``double_softmax`` (what FedStruct's reference code trains).
        class_weight: ``balanced`` makes every class count the same in a client's loss, for rare classes.
        batches: What one step of a node task uses: ``full`` (all training nodes), ``neighbours`` (some, with a sample
            of their neighbours) or ``clusters`` (those of some clusters of the client's graph); docs/training.md
            explains them.
        batch_size: Graphs per step in graph tasks; training nodes per step with ``batches`` other than ``full``.
        fanout: With ``batches=neighbours``, how many neighbours are drawn for a node, last layer first; the last number
            holds for the remaining layers. The first layer uses all neighbours.
        score_train: Whether evaluation in graph tasks also scores training graphs, for curves of the training loss;
            evaluation then takes several times as long. Node tasks always score training nodes.
        local_epochs: Passes over its training samples a client makes in a round (E): one step each with full batches.
        precision: Floating-point type of weights and features.
        init: ``standard``: first weights as each layer's authors draw them; ``uniform01``: every number of a node
            model, biases included, from U(0, 1), as FedSpray's reference code does.
        first_weights: ``common``: all clients start from the same weights; ``own``: every client draws its own, except
            for those it receives before the first step.
    """

    mini_batches: ClassVar[bool] = True
    """Whether a method trains by `batches` too. A method says so itself: it is not inherited."""

    backbone: str = "gcn"
    hidden: tuple[int, ...] = (64,)
    dropout: float = 0.5
    input_norm: bool = False
    head: bool = False
    hops: int | None = None
    heads: int | None = None
    alpha: float | None = None
    dprate: float | None = None
    attention_dropout: float | None = None
    lr: float = 0.01
    schedule: Schedule = "constant"
    lr_decay: float = 0.9
    lr_step: int = 10
    schedule_rounds: int | None = None
    weight_decay: float = 5e-4
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    loss: Literal["ce", "double_softmax"] = "ce"
    class_weight: Literal["none", "balanced"] = "none"
    local_epochs: int = 1
    batches: Literal["full", "neighbours", "clusters"] = "full"
    batch_size: int = 128
    fanout: tuple[int, ...] = (10,)
    score_train: bool = False
    precision: Literal["float32", "float64"] = "float32"
    init: Literal["standard", "uniform01"] = "standard"
    first_weights: Literal["common", "own"] = "common"

    def __post_init__(self) -> None:
        if self.lr <= 0.0:
            raise ConfigError(f"lr must be above 0, got {self.lr}")
        check_schedule(self)
        if self.weight_decay < 0.0:
            raise ConfigError(f"weight_decay must be at least 0, got {self.weight_decay}")
        for name in ("local_epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.fanout or min(self.fanout) < 1:
            raise ConfigError(f"fanout needs numbers of at least 1, got {','.join(map(str, self.fanout)) or 'none'}")
        if self.batches != "full" and "mini_batches" not in vars(type(self)):
            raise ConfigError("this method trains on all nodes of a client at once: leave batches at full")
        if any(width < 1 for width in self.hidden):
            raise ConfigError(f"hidden: every layer needs a width of at least 1, got {','.join(map(str, self.hidden))}")
        self.build(num_features=1, num_classes=2, stream=Stream(0))  # names and widths are checked where they are used

    @property
    def one_by_one(self) -> bool:
        """Whether clients must be run each by itself."""
        return False

    def why_not_masked(self) -> str:
        """Why these settings cannot go with secure sums; empty where they can."""
        return ""

    def why_not_unmasked(self) -> str:
        """Why organisations do not run these settings without secure sums; empty where they may."""
        return ""

    def remains(self, secure: bool) -> str:
        """What messages of these settings were seen to tell beyond their kinds, with its figure; for the sheet."""
        return ""

    def check_clients(self, view: View) -> None:
        """Refuse settings that these clients cannot have."""

    def idle(self) -> dict[str, str]:
        """Settings that change nothing beside the others, and why; who gives one is told so."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        return self.lr * rate_factor(self, round)

    def build(self, *, num_features: int, num_classes: int, stream: Stream) -> Backbone:
        """The model; same stream, same first weights."""
        if self.backbone in OWN_BACKBONES:
            sizes: Any = {"num_features": num_features, "num_classes": num_classes}
            own: Any = build_own_backbone(self.backbone, **sizes, stream=stream, dtype=self.dtype)
            return own  # type: ignore[no-any-return]
        model = build_backbone(
            self.backbone,
            num_features=num_features,
            num_classes=num_classes,
            hidden=self.hidden,
            dropout=self.dropout,
            input_norm=self.input_norm,
            head=self.head,
            stream=stream,
            **self.options,
        )
        if self.init == "uniform01":
            uniform01_(model, stream)
        return model.to(self.dtype)

    def why_not_weighted(self) -> str:
        """Why the model cannot use weights of edges; empty where it can."""
        if self.backbone not in OWN_BACKBONES and find_architecture(self.backbone).edge_weights:
            return ""
        able = ", ".join(name for name in backbones() if find_architecture(name).edge_weights)
        return f"backbone={self.backbone} reads no weights of edges: set edge_weights=ignore, or take one of {able}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the backbone that were given."""
        return {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}

    def build_graphs(self, *, num_features: int, num_classes: int, stream: Stream) -> GraphModel:
        """The model of a graph task; weights that do not depend on the client's data are the same at every client."""
        for name in ("input_norm", "head"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name}=true is for node tasks: graph models have a linear map before and after; set {name}=false"
                )
        model = build_graph_model(
            self.backbone,
            num_features=num_features,
            num_classes=num_classes,
            hidden=self.hidden,
            dropout=self.dropout,
            stream=stream,
            **self.options,
        )
        return model.to(self.dtype)

    def first_model(self, view: View, common: Stream) -> Backbone | GraphModel:
        """The model every party starts from; methods that share a seed share it."""
        build = self.build_graphs if view.task == "graph" else self.build
        return build(num_features=view.num_features, num_classes=view.num_classes, stream=common.child("init"))


WHOLE_MODEL = "clients receive every weight before their first step"
"""Why ``first_weights`` changes nothing."""


@dataclass(frozen=True)
class WeightedConfig(TrainConfig):
    """Training whose results are averaged over clients.

    Args:
        weighting: What a client's weight n_k counts: ``train`` (its training nodes), ``nodes`` (all its nodes) or
            ``uniform`` (every client the same).
        dp_clip: L2 norm to which each client clips what it sends in training; 0 = no differential privacy.
        dp_noise: Standard deviation of the Gaussian noise each client adds to every number, in units of ``dp_clip``.
        dp_delta: The delta for which the result states epsilon.
    """

    weighting: Literal["train", "nodes", "uniform"] = "train"
    dp_clip: float = 0.0
    dp_noise: float = 0.0
    dp_delta: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dp_clip", "dp_noise"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0.0 < self.dp_delta < 1.0:
            raise ConfigError(f"dp_delta must lie in (0, 1), got {self.dp_delta}")
        if self.dp_noise and not self.dp_clip:
            raise ConfigError("dp_noise counts in units of dp_clip: set dp_clip above 0 too, e.g. dp_clip=1")
        # n_k would itself tell about the data, and scale noise down where a client counts little.
        if self.dp_clip and self.weighting != "uniform":
            raise ConfigError(
                f"dp_clip protects clients that count the same: set weighting=uniform, got {self.weighting}"
            )

    def idle(self) -> dict[str, str]:
        return super().idle() | ({} if self.dp_noise else {"dp_delta": "only dp_noise has an epsilon"})

    @property
    def one_by_one(self) -> bool:
        return self.dp_clip > 0.0

    @property
    def shared_noise(self) -> SharedNoise | None:
        """The noise of which each client adds a share; None where each update has its own, or none."""
        return None


ConfigT = TypeVar("ConfigT", bound=TrainConfig)
WeightedT = TypeVar("WeightedT", bound=WeightedConfig)


@dataclass(frozen=True)
class ModelState(Record):
    """What a client remembers: its model and its optimiser."""

    weights: Weights
    optimizer: OptimizerState


@dataclass(frozen=True)
class NoisyState(ModelState):
    """The same, and the secret its noise comes from: kept in the party's own checkpoints, so that a replayed round adds
    the same noise.
    """

    secret: bytes


@dataclass(frozen=True)
class Deployed(Message):
    """The common model, sent to be used."""

    weights: Model[Weights]


@dataclass(frozen=True)
class Familiar(Message):
    """Whether a client predicts for the data it was trained on, or for others."""

    as_trained: Count[bool]


def all_familiar(federation: Federation) -> bool:
    """Whether every client predicts for the data it was trained on."""
    return all(reply.as_trained for reply in federation.call(ModelClient.familiar).values())


class ModelClient(Client[ConfigT, ModelState], Generic[ConfigT]):
    """A client with a model of its nodes or of its graphs. Sub-classes add what it says to others."""

    plain_model: ClassVar[bool] = True
    """Whether its prediction is the model's output on its own graph (`isthmus.methods.plain_model`)."""
    _counter: tuple[Any, Counter] | None = None
    """Of a learner."""

    def setup(self) -> None:
        data: Any = self.data
        stream = (self.common if self.config.first_weights == "common" else self._stream).child("init")
        self.learner: Learner
        need_features(data)
        if isinstance(data, GraphSetData):
            model = self.config.build_graphs(
                num_features=data.num_features, num_classes=data.num_classes, stream=stream
            )
            self.learner = GraphLearner(data, model, self.config)
        else:
            backbone = self.config.build(num_features=data.num_features, num_classes=data.num_classes, stream=stream)
            self.learner = node_learner(data, backbone, self.config)

    def initial_state(self) -> ModelState:
        weights = get_weights(self.learner.model)
        return ModelState(weights, fresh_state(self.config.optimizer, weights))

    def export(self) -> Weights:
        return self.state.weights

    def extra_gradient(self, received: Weights) -> ExtraGradient | None:
        """Gradient of a further loss term, e.g. FedProx's."""
        return None

    def term(self) -> EmbeddingTerm | None:
        """A further loss term of embeddings, e.g. MOON's."""
        return None

    def frozen(self) -> Collection[str]:
        """Names of weights this client does not train."""
        return ()

    def may_share(self) -> Collection[str]:
        """Names of weights this client takes from the server, and gives to it."""
        return self.state.weights

    def allowed(self, received: Weights) -> Weights:
        """What was received, unless it names weights that this client keeps to itself: what is named would be sent
        back.
        """
        if extra := sorted(set(received) - set(self.may_share())):
            names = ", ".join(extra)
            raise ProtocolError(
                f"the server names weights that never leave this client ({names}): both sides need the same settings"
            )
        return received

    def train(self, weights: Weights, received: Weights) -> ModelState:
        """The client's epochs of this round from ``weights``; ``received`` is the part that came from the server."""
        result = self.learner.train(
            weights,
            self.state.optimizer,
            self.stream,
            self.extra_gradient(received),
            self.frozen(),
            lr=self.config.rate(self.round),
            term=self.term(),
        )
        return replace(self.state, weights=result.weights, optimizer=result.optimizer_state)

    def logits(self) -> Tensor:
        """What the client's own model says of its samples, one row each."""
        return self.learner.logits(self.state.weights)

    def scored_logits(self) -> Tensor:
        """What is scored: `logits`, where a method does not say otherwise."""
        return self.logits()

    @handler
    def evaluate(self) -> Evaluation:
        """Score the client's own model on its own data."""
        learner = self.learner
        with learner.scoring() as parts:
            if self._counter is None or self._counter[0] is not learner:
                self._counter = learner, Counter([learner.y], [parts])
            logits = self.scored_logits()
            evaluation = self._counter[1].evaluation(logits)
        self.scratch.scored, self.scratch.logits = lambda: evaluation, logits
        return evaluation

    @handler
    def deploy(self, common: Deployed) -> Evaluation:
        """Take the common model, keep what is personal, and score it."""
        self.state = replace(self.state, weights={**self.state.weights, **self.allowed(common.weights)})
        return self.evaluate()

    @handler
    def familiar(self) -> Familiar:
        """Whether what this client kept of the training is still true."""
        return Familiar(self.as_trained)

    @handler
    def forget_data(self) -> None:
        """Drop what was true of the data of the training only: somebody's data are others now."""
        first = self.initial_state()
        self.state = replace(self.state, **{name: getattr(first, name) for name in type(self).keeps_of_data})

    @handler
    def detail(self) -> Detail:
        """Counts for scores beyond accuracy, of the model scored last."""
        with self.learner.scoring() as parts:
            logits = getattr(self.scratch, "logits", None)  # of `evaluate` in this round: a forward pass less
            logits = self.scored_logits() if logits is None else logits
        return detail(logits, self.learner.y, {part: parts[part] for part in ("val", "test")})

    @handler
    def score_bins(self, wanted: WantedMetric) -> ScoreBins:
        """In which bin the scores of the model scored last lie."""
        if not hasattr(self.scratch, "scored"):
            raise ProtocolError(f"{self.party} has scored no model in this round: evaluate first")
        found = None if wanted.metric == ACCURACY else self.detail()
        return bin_scores(self.scratch.scored(), wanted.metric, found)


@dataclass(frozen=True)
class Size(Message):
    """How much a client counts."""

    samples: Count[float]


class WeightedClient(ModelClient[WeightedT], Generic[WeightedT]):
    """A client that knows its weight in an average."""

    def samples(self) -> float:
        """n_k."""
        if self.config.weighting == "uniform":
            return 1.0
        return float(self.learner.num_train if self.config.weighting == "train" else self.learner.num_samples)

    def initial_state(self) -> ModelState:
        state = super().initial_state()
        return NoisyState(state.weights, state.optimizer, secrets.token_bytes(32)) if self.config.dp_noise else state

    def forgotten(self, first: ModelState) -> ModelState:
        now = self.state
        if isinstance(first, NoisyState) and isinstance(now, NoisyState):
            return replace(first, secret=now.secret)
        return first

    def released(self, update: Weights) -> Weights:
        """What may leave of an update or a gradient where ``dp_clip`` is set: clipped over all its tensors, with
        noise; with a share of it, in whole steps of a grid, where only the total is to have it in full.
        """
        secret = (
            (self.state.secret or None) if isinstance(self.state, NoisyState) else None
        )  # b"" where no noise is asked
        purpose = self.stream("noise").path
        if self.config.shared_noise is not None:
            assert secret is not None
            return self.config.shared_noise.release_update(update, secret=secret, purpose=purpose).weights
        mechanism = Mechanism(self.config.dp_clip, self.config.dp_noise)
        return mechanism.release_update(update, secret=secret, purpose=purpose).weights

    @handler
    def size(self) -> Size:
        return Size(self.samples())


def total_samples(federation: Federation) -> float:
    """n = sum_k n_k. With secure sums the server does not learn who holds how much; without, it reads what it adds."""
    total = federation.sum(WeightedClient.size).samples
    if total <= 0.0:
        raise RunError("no client has a training node: choose a split with a training part")
    return total


def drops_nothing(config: Any) -> bool:
    """Whether the node model that is built has nothing to drop: a single layer, or one layer below a linear head."""
    build = getattr(config, "build", None)
    if build is None or getattr(config, "structure_hidden", None) or hasattr(config, "joint_dropout"):
        return False
    try:
        model = build(num_features=2, num_classes=2, stream=Stream(0))
    except TypeError:  # a method with a builder of its own
        return False
    if not isinstance(model, Backbone) or model.architecture.own_dropout or model.architecture.drops_output:
        return False
    return not any(placed.activated for placed in model.layers_after_input)
