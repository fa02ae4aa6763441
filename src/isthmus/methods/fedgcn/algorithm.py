"""FedGCN -- Yao, Jin, Ravi & Joe-Wong, NeurIPS 2023, https://arxiv.org/abs/2201.12433: one exchange between clients
before training, then FedAvg.

    paper                      here
    Ahat                       D^-1/2 (A + I) D^-1/2 with the degrees of the whole graph
    a_i = sum_j Ahat_ij x_j    `exact.NeighbourSums.own`    of own nodes, from 1 hop on
    a_j, j in N(V_k)           `exact.NeighbourSums.far`    of direct neighbours at other clients, 2 hops
    0 / 1 / 2 hop              ``hops``

With 0 hops this is FedAvg on induced subgraphs. With 1 hop the first layer is exact and the second aggregates over own
edges; with 2 hops both are: logits of own nodes equal the central two-layer GCN's. Local steps, optimiser and averaging
are those of `isthmus.methods.fedavg`; they run on the inputs that the exchange makes.

The exchange has two forms, a file each with its messages, handlers and script: `exact` (the definition above)
and `published` (``legacy=true``: what published simulations do).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import ConfigError, DataError
from isthmus.federation.interface import Federation, View
from isthmus.federation.roles import Cohort, Role
from isthmus.federation.script import Script, ScriptLine
from isthmus.methods import fedavg
from isthmus.methods.fedavg import FedAvgCohort, FedAvgConfig, ServerState
from isthmus.methods.fedgcn import exact, published
from isthmus.methods.learners import PARTS, NodeLearner, balanced, node_groups
from isthmus.methods.registry import Log, Phase, register
from isthmus.methods.training import NoisyState
from isthmus.nn.backbone import Backbone
from isthmus.nn.inputs import Inputs
from isthmus.records import Record


@dataclass(frozen=True)
class FedGCNConfig(FedAvgConfig):
    """Settings of FedGCN.

    Args:
        hops: How far a client's knowledge reaches: 0, 1 or 2.
        legacy: The published form: raw features and edges of the neighbourhood in place of exact sums.
    """

    scores_after_local: ClassVar[bool] = False
    hops: int | None = 2
    legacy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hops not in (0, 1, 2):
            raise ConfigError(f"hops must be 0, 1 or 2, got {self.hops}")
        if self.form == "published" or not self.hops:
            return
        if self.backbone != "gcn":
            raise ConfigError(
                f"exact sums are those of a GCN's layers: use backbone=gcn, or legacy=true for {self.backbone}"
            )
        layers = len(self.hidden) + (0 if self.head else 1)
        if layers > 2:
            raise ConfigError(
                f"sums of 2 hops are exact for at most 2 layers, hidden={list(self.hidden)} makes {layers}: use fewer, "
                "or legacy=true"
            )

    @property
    def form(self) -> Literal["exact", "published"]:
        return "published" if self.legacy else "exact"

    def why_not_weighted(self) -> str:
        if self.legacy and self.hops:
            return "legacy=true hands edges out without weights: set edge_weights=ignore, or leave legacy out"
        return super().why_not_weighted()

    @property
    def options(self) -> dict[str, Any]:
        """``hops`` is the exchange's, not the backbone's."""
        return {name: value for name, value in super().options.items() if name != "hops"}


@dataclass(frozen=True)
class FedGCNState(exact.ExactState, published.PublishedState, NoisyState):
    """A model, the secret of its noise, and what the exchange of either form left."""


class Form(NamedTuple):
    """One form of the exchange: its messages and their script for a number of hops, and the inputs it leaves."""

    exchange: Callable[[Federation, int], None]
    script: Callable[[int], tuple[ScriptLine, ...]]
    inputs: Callable[[NodeData, Backbone, Any, torch.dtype, Tensor], Inputs]


FORMS = {
    "exact": Form(exact.exchange, exact.script, exact.inputs),
    "published": Form(published.exchange, published.script, published.inputs),
}


class NeighbourLearner(NodeLearner):
    """Own nodes, trained and scored with inputs that know the neighbourhood."""

    def __init__(self, data: NodeData, model: Backbone, config: FedGCNConfig, known: Record) -> None:
        self.data, self.model, self.config = data, model, config
        self.y, self.num_samples, self.num_train = data.y, data.num_nodes, data.num_train
        self.masks = {part: getattr(data, part) for part in PARTS} | node_groups(data)
        self._build = partial(FORMS[config.form].inputs, data, model, known, config.dtype)
        self.inputs = balanced(self._build(data.train), data, config)

    @cached_property
    def everything(self) -> Inputs:
        return self._build(torch.ones(self.data.num_nodes, dtype=torch.bool))


class FedGCNCohort(FedAvgCohort):
    """FedAvg's cohort on inputs that exist only after the exchange."""

    def __init__(self, clients: Sequence[Any]) -> None:
        super().__init__(clients)
        self._learners = [client.learner for client in clients]

    @classmethod
    def worthwhile(cls, clients: Sequence[Any]) -> bool:
        model = clients[0].own_learner.model
        return len(clients) > 1 and not clients[0].config.one_by_one and getattr(model, "cohort", True)

    def load(self) -> None:
        learners = [client.learner for client in self.clients]
        if list(map(id, learners)) != list(map(id, self._learners)):
            self._learners = learners
            self.forget_inputs()
        super().load()

    def store(self) -> None:
        before = [client.state for client in self.clients]
        super().store()
        for client, kept in zip(self.clients, before, strict=True):
            client.state = replace(kept, weights=client.state.weights, optimizer=client.state.optimizer)


class FedGCNClient(exact.ExactClient, published.PublishedClient):
    """FedAvg's client; after the exchange it trains on what it then knows."""

    config: FedGCNConfig
    state: FedGCNState
    cohort: ClassVar[type[Cohort[Any]] | None] = FedGCNCohort

    def setup(self) -> None:
        self._derived: tuple[Record, NeighbourLearner] | None = None
        super().setup()
        if self.data.cross is None:
            raise DataError("fedgcn needs the cross edges of every client: give them, or use fedavg")
        self.cross = self.data.cross

    def initial_state(self) -> FedGCNState:
        state = super().initial_state()
        return FedGCNState(state.weights, state.optimizer, secrets.token_bytes(32))

    @property
    def learner(self) -> Any:
        """On the induced subgraph until the neighbourhood is known; then on that, made once."""
        state: FedGCNState | None = getattr(self, "state", None)
        known = state and (state.sums or state.surroundings)
        if not known:
            return self.own_learner
        if self._derived is None or self._derived[0] is not known:
            self._derived = known, NeighbourLearner(self.data, self.own_learner.model, self.config, known)
        return self._derived[1]

    @learner.setter
    def learner(self, learner: Any) -> None:
        self.own_learner = learner


def exchange_round(state: ServerState, federation: Federation, config: FedGCNConfig) -> tuple[ServerState, Log]:
    """What comes before FedAvg; nothing with 0 hops."""
    if config.hops:
        FORMS[config.form].exchange(federation, config.hops)
    return state, {}


def predict(state: ServerState, federation: Federation, config: FedGCNConfig) -> None:
    """Neighbour sums of the data of now; every client has the trained weights."""
    exchange_round(state, federation, config)


def script(config: FedGCNConfig, view: View) -> Script:
    """The exchange, then FedAvg."""
    exchanged = FORMS[config.form].script(config.hops) if config.hops else ()
    return {**fedavg.script(config, view), "exchange": exchanged}


def predict_script(config: FedGCNConfig, view: View) -> tuple[ScriptLine, ...]:
    """Calls of :func:`predict`."""
    return FORMS[config.form].script(config.hops) if config.hops else ()


def privacy(state: ServerState, config: FedGCNConfig, rounds: int, clients: int, masked: bool) -> dict[str, Any] | None:
    """FedAvg's: of the updates, not of what is exchanged before them."""
    stated = fedavg.privacy(state, config, rounds, clients, masked)
    if stated is not None and config.hops:
        stated["not_covered"] = f"what clients exchange before training; {stated['not_covered']}"
    return stated


setup_phase, train_phase = fedavg.METHOD.phases

METHOD = register(
    replace(
        fedavg.METHOD,
        name="fedgcn",
        summary="neighbour sums exchanged once, exact over 0, 1 or 2 hops, then FedAvg",
        reference="Yao et al., FedGCN: Convergence-Communication Tradeoffs in Federated Training of GCNs, NeurIPS 2023",
        own_backbones=False,
        config=FedGCNConfig,
        tasks=("node",),
        phases=(setup_phase, Phase("exchange", exchange_round, rounds=1, setup=True), train_phase),
        roles={"client": Role(FedGCNClient)},
        script=script,
        cross_edges=True,
        predict=predict,
        predict_script=predict_script,
        privacy=privacy,
    )
)
