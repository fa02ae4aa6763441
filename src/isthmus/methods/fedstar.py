"""FedStar -- Tan et al., Federated Learning on Non-IID Graphs via Structural Knowledge Sharing, AAAI 2023.

FedAvg on one of two encoders. Every node has a structure embedding s_v (degree, random walks) that a channel of its own
processes; only that channel is common. Feature encoder and classifier stay with the client, so clients may differ in
features, classes and graphs.

    paper        here
    s_v          `isthmus.data.embeddings`           computed once by its owner, never sent
    w_g          ``structure.`` of `TwoChannel`      embedding of s and structure convolutions: all that travels (14,592
                                                     numbers by default)
    w_h          everything else
    |D_m| / N    Update.share                        training graphs (nodes) of client m over all;
                                                     ``weighting=uniform`` counts clients
    L, H         len(hidden), hidden
    k_1, k_2     degrees, steps

    sharing      what is averaged (the ablation of the paper's table 2)
    se           the structure encoder: FedStar
    fe           feature convolutions, ``mix`` and ``post``
    all          both; ``pre`` and ``readout`` depend on the client's data and always stay
    convs        the convolutions of both channels: what the released code's filter for FedPer would pick on this model
    none         nothing, and no message passes

``decoupled=false`` takes the second channel away: s_v is put beside the raw features of a plain single-channel model.
Then ``all`` and ``none`` are what can be shared. For node tasks the same model without pooling, as FedSpray's
comparison has it; L is len(hidden) there too.

# Differs from the published code: exactly the averaged tensors are sent back. Its download routine copies every tensor
of the server, so that with ``fe`` the structure encoder would be reset to its first weights in every round.
Optimiser state stays with the client while the server overwrites weights, as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from isthmus.data.embeddings import Kind, beside, embedding_width, structure_embedding
from isthmus.data.graph_set import GraphSetData
from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask
from isthmus.graph.embedding import degree_embedding
from isthmus.methods import fedavg
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedavg import FedAvgClient, FedAvgConfig, ServerState, fedavg_round
from isthmus.methods.global_model import evaluate_models
from isthmus.methods.learners import GraphLearner, NodeBatchLearner, NodeLearner, need_features
from isthmus.methods.registry import Log, Phase, register
from isthmus.methods.training import OPTIONS
from isthmus.nn.backbone import Backbone
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.two_channel import TwoChannel
from isthmus.seeds import Stream


@dataclass(frozen=True)
class FedStarConfig(FedAvgConfig):
    """Settings of FedStar; ``backbone`` is the feature encoder.

    Args:
        backbone: The feature encoder: ``gin``, ``gcn``, ``sage`` or ``sgc``.
        structure_backbone: The structure encoder: ``gcn``, ``gin`` or ``sage``.
        sharing: What is averaged: the structure encoder (``se``, FedStar), the feature encoder (``fe``), both
            (``all``), only the convolutions of both (``convs``), or nothing (``none``).
        decoupled: ``false`` appends the structure embedding to the features of a single-channel model.
        se: Structure embedding: ``dse+rwse``, ``dse``, ``rwse`` or ``ones``.
        degrees: k_1, size of the degree part of the structure embedding.
        steps: k_2, size of the random-walk part of the structure embedding.
        first_weights: ``own``: the structure encoder starts the same everywhere, and each client draws the other
            weights itself, as published; ``common``: all weights start the same everywhere.
    """

    own_start: ClassVar[bool] = True
    scores_after_local: ClassVar[bool] = False
    backbone: str = "gin"
    hidden: tuple[int, ...] = (64, 64, 64)
    structure_backbone: str = "gcn"
    sharing: Literal["se", "fe", "all", "convs", "none"] = "se"
    decoupled: bool = True
    se: Kind = "dse+rwse"
    degrees: int = 16
    steps: int = 16
    first_weights: Literal["common", "own"] = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("degrees", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {getattr(self, name)}; se=dse or se=rwse leaves one of the two out"
                )
        if not self.decoupled and self.sharing not in ("all", "none"):
            raise ConfigError(
                f"decoupled=false has no channels to tell apart: use sharing=all or none, not {self.sharing}"
            )
        if self.sharing == "none" and (self.fraction < 1.0 or self.dp_clip or self.bounds):
            unused = ", ".join(("fraction", "dp_clip", *self.bounds))
            raise ConfigError(f"sharing=none sends nothing: leave {unused} out")
        if self.decoupled:
            if self.init != "standard":
                raise ConfigError(f"the two channels draw first weights of their own: leave init out, got {self.init}")
            if given := [name for name in ("input_norm", "head", *OPTIONS) if getattr(self, name) not in (None, False)]:
                raise ConfigError(
                    f"the two channels are as the paper has them, without {', '.join(given)}: leave that out"
                )
            self.build_channels(num_features=1, num_classes=2, pooled=True, stream=Stream(0), common=Stream(0))

    @property
    def num_structure(self) -> int:
        """Width of s."""
        return embedding_width(self.se, self.degrees, self.steps)

    def build_channels(
        self, *, num_features: int, num_classes: int, pooled: bool, stream: Stream, common: Stream
    ) -> TwoChannel:
        """The two-channel model."""
        model = TwoChannel(
            self.backbone,
            self.structure_backbone,
            num_features=num_features,
            num_classes=num_classes,
            num_structure=self.num_structure,
            hidden=self.hidden,
            dropout=self.dropout,
            pooled=pooled,
            stream=stream,
            common=common,
        )
        return model.to(self.dtype)

    def first_model(self, view: View, common: Stream) -> Backbone | GraphModel:
        start = common.child("init")
        if self.decoupled:
            return self.build_channels(
                num_features=view.num_features,
                num_classes=view.num_classes,
                pooled=view.task == "graph",
                stream=start,
                common=start,
            )
        build = self.build_graphs if view.task == "graph" else self.build
        return build(num_features=view.num_features + self.num_structure, num_classes=view.num_classes, stream=start)

    def may_share(self, model: Backbone | GraphModel) -> tuple[str, ...]:
        """Named parts of the model, never pieces of names."""
        names = tuple(name for name, _ in model.named_parameters())
        if self.sharing == "none":
            return ()
        if isinstance(model, TwoChannel):
            both = model.structure_part + model.feature_part
            parts = {"se": model.structure_part, "fe": model.feature_part, "all": both, "convs": model.conv_part}
            return tuple(name for name in names if name.startswith(parts[self.sharing]))
        bound = model.shape_bound if isinstance(model, GraphModel) else ()
        return tuple(name for name in names if not (bound and name.startswith(bound)))


class FedStarClient(FedAvgClient[FedStarConfig]):
    """One client: learns structure with the others, features on its own."""

    cohort: ClassVar[type[Cohort[Any]] | None] = None

    def setup(self) -> None:
        config, data = self.config, self.data
        s = structure_embedding(
            data, config.se, config.degrees, config.steps
        )  # depends on the edges alone: once, not per round
        common = self.common.child("init")
        own = common if config.first_weights == "common" else self.stream("init")
        graphs = isinstance(data, GraphSetData)
        shape: dict[str, Any] = {"num_features": data.num_features, "num_classes": data.num_classes, "stream": own}
        learner: Any
        model: Any
        if config.decoupled:
            need_features(data)
            learner, extra = GraphLearner if graphs else NodeBatchLearner, {"s": s}
            model = config.build_channels(**shape, pooled=graphs, common=common)
            self.learner = learner(data, model, config, extra)
        else:
            learner, build = (GraphLearner, config.build_graphs) if graphs else (NodeLearner, config.build)
            model = build(**shape | {"num_features": data.num_features + config.num_structure})
            self.learner = learner(replace(data, x=beside(data.x, s)), model, config)

    @handler
    def train_alone(self) -> None:
        """A round with nothing shared; nothing is returned."""
        self.state = self.train(self.state.weights, received={})


def count_round(state: ServerState, federation: Federation, config: FedStarConfig) -> tuple[ServerState, Log]:
    """N, once; where nothing is shared nobody needs it."""
    return fedavg.count_round(state, federation, config) if state.weights else (state, {})


def fedstar_round(state: ServerState, federation: Federation, config: FedStarConfig) -> tuple[ServerState, Log]:
    """Every client trains both encoders; the server averages structure encoders."""
    if not state.weights:
        federation.call(FedStarClient.train_alone)
        return replace(state, round=state.round + 1), {}
    return fedavg_round(state, federation, config)  # w_g = sum_m (|D_m| / N) w_g,m


def evaluate(state: ServerState, federation: Federation, config: FedStarConfig) -> Mapping[PartyId, Evaluation]:
    """Every client scores its own features with the common structure encoder on its own test data."""
    if not state.weights:
        return scores_of(federation, FedStarClient.evaluate)
    return evaluate_models(state, federation, config)


def facts(state: ServerState, config: FedStarConfig, scenario: Any) -> Mapping[str, Any]:
    """What was shared, and how full each degree class is: a client with all nodes in the last one learns nothing from
    DSE.
    """
    found: dict[str, Any] = {"shared_tensors": {name: list(tensor.shape) for name, tensor in state.weights.items()}}
    if scenario is not None and "dse" in config.se:
        found["degree_classes"] = {
            client: degree_embedding(data.edge_index, data.num_nodes, config.degrees).sum(0).int().tolist()
            for client, data in scenario.parts.items()
        }
    return found


def script(config: FedStarConfig, view: View) -> Script:
    """FedAvg's; where nothing is shared, scores alone leave a client."""
    if config.sharing != "none":
        return fedavg.script(config, view)
    return {"train": (ask(FedStarClient.train_alone),), "evaluation": (ask(FedStarClient.evaluate),)}


METHOD = register(
    replace(
        fedavg.METHOD,
        name="fedstar",
        summary="a structure channel common to all, features at home",
        reference="Tan et al., Federated Learning on Non-IID Graphs via Structural Knowledge Sharing, AAAI 2023",
        edge_weights=False,
        own_backbones=False,
        config=FedStarConfig,
        phases=(Phase("setup", count_round, rounds=1, setup=True), Phase("train", fedstar_round)),
        evaluate=evaluate,
        roles={"client": Role(FedStarClient)},
        script=script,
        preset="fedstar",
        facts=facts,
    )
)
