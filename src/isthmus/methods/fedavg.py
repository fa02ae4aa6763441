"""FedAvg -- McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, Algorithm 1.

    paper      here
    w_t        ServerState.weights      what every client starts round t from
    C          FedAvgConfig.fraction    share of the clients drawn in a round
    E          local_epochs             full-batch steps, as in all five systems' papers (B = infinity)
    n_k        WeightedClient.samples   by ``weighting``: training nodes, all nodes, or 1
    n          ServerState.total        learnt once, as a sum
    n_k / n    Update.share

A client multiplies its weights by n_k / n before sending, so the server needs only the sum (``federation.sum``): it
never sees one client's update, and with secure sums nobody does. Optimiser state stays with the client over rounds
(``reset_optimizer=true`` starts it afresh in each round, as FederatedScope does). With ``dp_clip`` what leaves is
``w_t`` plus the clipped and noisy ``w_{t+1}^k - w_t`` (`noise`), with ``dp_noise_in=total`` the step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, Stacked, View
from isthmus.federation.messages import Count, Message, Model, PartyId
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask, total
from isthmus.methods.averaging import AveragingConfig, bounded_step, groups_of_draws, parties_of_sum, update_line
from isthmus.methods.cohort_training import ModelCohort
from isthmus.methods.learners import NodeLearner
from isthmus.methods.noise import updates_statement
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import (
    ModelState,
    WeightedClient,
    total_samples,
)
from isthmus.nn.backbone import NORM, Backbone
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.optim import fresh_state
from isthmus.nn.registry import OWN_BACKBONES
from isthmus.nn.train import parameter_shapes
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, scaled


@dataclass(frozen=True)
class FedAvgConfig(AveragingConfig):
    """Settings of FedAvg.

    Args:
        fraction: Share C of the clients drawn in a round, in (0, 1]. With secure sums a round takes one of the fixed
            groups of at least that share, and of at least 3 clients (`averaging`).
        reset_optimizer: Start the clients' optimiser afresh in every round.
        share_input_norm: ``false`` keeps the input LayerNorm at the client, as FedStruct's reference code does.
        score_model: Which model a client scores: the one it ``received``, or what its own epochs made of the previous
            one (``after_local``), as some published tables do; the two differ by points in the same run. ``dropped``
            scores the received one with dropout left on, a mistake of published code, to compare with it.
    """

    forgets: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = True
    scores_after_local: ClassVar[bool] = True
    """Whether ``score_model`` has a meaning; not where a client's own model is scored in any case."""

    scores_dropped: ClassVar[bool] = True
    """Whether ``score_model=dropped`` has a meaning: where one model is scored on the client's own graph. A method says
    so itself.
    """

    mini_batches: ClassVar[bool] = True
    fraction: float = 1.0
    reset_optimizer: bool = False
    share_input_norm: bool = True
    score_model: Literal["received", "after_local", "dropped"] = "received"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"fraction must lie in (0, 1], got {self.fraction}")
        if self.score_model == "after_local" and (self.fraction < 1.0 or not self.scores_after_local):
            raise ConfigError(
                "score_model=after_local is for fedavg, fedprox, fedper, fedsage, fedsageplus, moon, fedpub and fedtad "
                "with fraction=1: leave it out"
            )
        if self.score_model == "dropped" and not (vars(type(self)).get("scores_dropped") and self.dropout):
            raise ConfigError(
                "score_model=dropped is for fedavg, fedprox, moon, gcfl, gcflplus, fedgta, fedpub and fedtad with "
                "dropout above 0: leave it out"
            )
        if self.dp_noise_in == "total" and self.fraction < 1.0:
            # The server knows which group it asks, so drawing one makes nothing more private.
            raise ConfigError("dp_noise_in=total is for rounds of all clients: leave fraction at 1")
        if self.groups and self.fraction < 1.0:
            raise ConfigError("all groups take part in every round: leave fraction at 1, or groups out")

    def idle(self) -> dict[str, str]:
        found = super().idle()
        if not self.input_norm:
            return found | {"share_input_norm": "only input_norm=true has one"}
        if not self.share_input_norm:
            found.pop("first_weights", None)
        return found

    @property
    def one_by_one(self) -> bool:
        return super().one_by_one or self.score_model == "dropped"

    def why_all_clients(self) -> str:
        if why := super().why_all_clients():  # no setting changes that
            return why
        if self.fraction < 1.0:
            return "with fraction below 1 a round is of one group"
        if not (self.reset_optimizer and self.share_input_norm):
            return "its clients remember earlier rounds: set reset_optimizer=true and share_input_norm=true"
        if self.score_model == "after_local":
            return "its clients score models of their own: set score_model=received"
        return ""

    def check_clients(self, view: View) -> None:
        super().check_clients(replace(view, clients=view.clients[: drawn(len(view.clients), self.fraction)]))
        if self.score_model == "dropped" and (view.task == "graph" or self.backbone in OWN_BACKBONES):
            raise ConfigError("score_model=dropped is for Isthmus' backbones in node tasks: leave it out")

    def personal_prefixes(self, model: Backbone | GraphModel) -> tuple[str, ...]:
        """Parameters that never leave the client, by prefix of their names."""
        return () if self.share_input_norm else (f"{NORM}.",)

    def may_share(self, model: Backbone | GraphModel) -> tuple[str, ...]:
        """Parameters a client gives away at all, whoever asks."""
        personal = self.personal_prefixes(model)
        return tuple(name for name in parameter_shapes(model) if not (personal and name.startswith(personal)))

    def shared_names(self, model: Backbone | GraphModel, view: View) -> tuple[str, ...]:
        """Parameters that are averaged. Where clients differ in features or classes, what depends on those stays at
        home (FedStar).
        """
        bound = model.shape_bound if isinstance(model, GraphModel) and not view.alike else ()
        return tuple(name for name in self.may_share(model) if not (bound and name.startswith(bound)))


ConfigT = TypeVar("ConfigT", bound=FedAvgConfig)


@dataclass(frozen=True)
class Broadcast(Message):
    """w_t, and n for the clients to weight by."""

    weights: Model[Weights]
    total: Count[float]


@dataclass(frozen=True)
class Update(Message):
    """(n_k / n) w_{t+1}^k and n_k / n: ready to be summed. Where noise is shared (``dp_noise_in=total``), ``weights``
    is the clipped step w_{t+1}^k - w_t in whole steps of a grid, with a share of the noise.
    """

    weights: Model[Weights]
    share: Count[float]


@dataclass(frozen=True)
class ServerState(Record):
    """All the server remembers between rounds; a checkpoint is exactly this."""

    round: int
    weights: Weights
    total: float


class FedAvgCohort(ModelCohort):
    """FedAvg's clients, trained together."""

    pads_less = True

    def local_update(self, common: Broadcast) -> Stacked[Update]:
        if self.config.reset_optimizer:
            self.restart_optimizer()
        shares = self.shares(common.total)
        self.train_together(self.clients[0].allowed(common.weights), shares)
        return Stacked(Update(self.scaled_weights(common.weights, shares), shares), self.parties)


class FedAvgClient(WeightedClient[ConfigT]):
    """One client. Its graph stays in ``self.data``; only return values leave."""

    cohort: ClassVar[type[Cohort[Any]] | None] = FedAvgCohort

    def may_share(self) -> Collection[str]:
        return self.config.may_share(self.learner.model)

    def train(self, weights: Weights, received: Weights) -> ModelState:
        """The client's epochs, from a fresh optimiser where that is asked for."""
        if self.config.reset_optimizer:
            self.state = replace(self.state, optimizer=fresh_state(self.config.optimizer, self.state.weights))
        return super().train(weights, received)

    def scored_logits(self) -> Tensor:
        if self.config.score_model != "dropped":
            return super().scored_logits()
        assert isinstance(self.learner, NodeLearner)  # `FedAvgConfig.check_clients`
        return self.learner.dropped_logits(self.export(), lambda purpose: self.stream(f"scored, {purpose}"))

    @handler
    def local_update(self, common: Broadcast) -> Update:
        """ClientUpdate(k, w) of Algorithm 1."""
        self.state = self.train({**self.state.weights, **self.allowed(common.weights)}, received=common.weights)
        weights: Weights = {name: self.state.weights[name] for name in common.weights}
        share = self.samples() / common.total
        if self.config.dp_clip:
            update = self.released({name: weights[name] - received for name, received in common.weights.items()})
            if self.config.shared_noise:
                return Update(update, share)
            weights = {name: received + update[name] for name, received in common.weights.items()}
        return Update(scaled(weights, share), share)


def scored(config: FedAvgConfig, client: type[FedAvgClient[Any]]) -> Callable[..., Any]:
    """The handler by which clients score: with the common model, or with what they have after their epochs."""
    return client.evaluate if config.score_model == "after_local" else client.deploy


def init(view: View, config: FedAvgConfig, common: Stream) -> ServerState:
    """w_0: the shared part of the common first model."""
    model = config.first_model(view, common)
    weights = get_weights(model)
    return ServerState(0, {name: weights[name] for name in config.shared_names(model, view)}, 0.0)


def count_round(state: ServerState, federation: Federation, config: FedAvgConfig) -> tuple[ServerState, Log]:
    """n, once."""
    return replace(state, total=total_samples(federation)), {}


def drawn(clients: int, fraction: float) -> int:
    """How many clients a round has."""
    return max(1, round(fraction * clients))


def draw(clients: Iterable[PartyId], fraction: float, stream: Stream) -> list[PartyId]:
    """S_t: max(C K, 1) clients, uniformly."""
    everyone = sorted(clients)
    count = drawn(len(everyone), fraction)
    chosen = torch.randperm(len(everyone), generator=stream.torch())[:count].tolist()
    return sorted(everyone[i] for i in chosen)


def chosen_clients(federation: Federation, fraction: float) -> tuple[PartyId, ...]:
    """S_t; behind masks one of the fixed groups, because totals over changing groups give single clients away."""
    if fraction == 1.0:
        return federation.clients
    stream = federation.stream("draw")
    if not federation.secure:
        return tuple(draw(federation.clients, fraction, stream))
    groups = groups_of_draws(federation.clients, drawn(len(federation.clients), fraction))
    return groups[int(torch.randint(len(groups), (1,), generator=stream.torch()))]


def fedavg_round(state: ServerState, federation: Federation, config: FedAvgConfig) -> tuple[ServerState, Log]:
    """One turn of the server loop of Algorithm 1."""
    chosen = chosen_clients(federation, config.fraction)
    if config.bounds:
        return bounded_round(state, federation, config, FedAvgClient.local_update, to=chosen)
    request = Broadcast(state.weights, state.total)
    total = federation.sum(FedAvgClient.local_update, request, to=chosen, at_least=federation.least)
    if config.shared_noise:  # the total is of steps, and all clients count the same
        step = config.shared_noise.mean(total.weights, round(total.share * state.total), like=state.weights)
        moved = {name: tensor + step[name] for name, tensor in state.weights.items()}
        return replace(state, round=state.round + 1, weights=moved), {}
    weights = total.weights  # w_{t+1} = sum_k (n_k / n) w_{t+1}^k
    if federation.absent or len(chosen) < len(federation.clients):
        if total.share <= 0.0:
            return replace(state, round=state.round + 1), {}  # nobody drawn holds a training node
        weights = scaled(weights, 1.0 / total.share)  # shares of those in the sum, made to sum to 1
    return replace(state, round=state.round + 1, weights=weights), {}


def bounded_round(
    state: ServerState,
    federation: Federation,
    config: FedAvgConfig,
    local_update: Callable[..., Update],
    to: tuple[PartyId, ...] | None = None,
) -> tuple[ServerState, Log]:
    """w_{t+1} = w_t + a step that no client can move far."""
    request = Broadcast(state.weights, state.total)
    found = bounded_step(
        federation, local_update, request, config, to=to, read=lambda part: part.weights, before=state.weights
    )
    if found is None:
        return replace(state, round=state.round + 1), {}
    step, length = found
    weights = {name: tensor + step[name] for name, tensor in state.weights.items()}
    return replace(state, round=state.round + 1, weights=weights), {"step_norm": length}


def privacy(state: ServerState, config: FedAvgConfig, rounds: int, clients: int, masked: bool) -> dict[str, Any] | None:
    """One release per round and client."""
    parties = parties_of_sum(config, drawn(clients, config.fraction), clients, masked)
    return updates_statement(config, state.weights, releases=rounds, parties=parties, masked=masked)


def script(config: FedAvgConfig, view: View) -> Script:
    """n, then an average in every round."""
    in_a_round = drawn(len(view.clients), config.fraction)
    return {
        "setup": (total(FedAvgClient.size),),
        "train": (update_line(FedAvgClient.local_update, config, view, drawn=in_a_round, survivors=True),),
        "evaluation": (ask(scored(config, FedAvgClient)),),
    }


METHOD = register(
    Method(
        name="fedavg",
        summary="clients train, the server averages their weights",
        reference=(
            "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
        ),
        config=FedAvgConfig,
        init=init,
        phases=(Phase("setup", count_round, rounds=1, setup=True), Phase("train", fedavg_round)),
        edge_weights=True,
        own_backbones=True,
        roles={"client": Role(FedAvgClient)},
        script=script,
        bounded=True,
        privacy=privacy,
    )
)
