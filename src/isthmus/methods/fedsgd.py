"""FedSGD -- McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629 (FedAvg with one step on the whole batch),
as FedStruct runs it.

    spec       here
    g_k        Step.gradients / Step.share   gradient of client k's mean loss at w_t
    n_k / n    Step.share                    by ``weighting``
    g          the sum                       g = sum_k (n_k / n) g_k
    w_t        ServerState.weights

One optimiser, at the server, steps on g. FedStruct's code steps an identical Adam at every party instead; the
trajectory is the same, and one place cannot drift from another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, Stacked, View
from isthmus.federation.messages import Count, Gradient, Message
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask, total
from isthmus.methods.averaging import AveragingConfig, bounded_step, parties_of_sum, update_line
from isthmus.methods.cohort_training import ModelCohort
from isthmus.methods.fedavg import Broadcast
from isthmus.methods.noise import updates_statement
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import WeightedClient, total_samples
from isthmus.nn.optim import OptimizerState, fresh_state, stepped
from isthmus.nn.train import gradients
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, scaled


@dataclass(frozen=True)
class Step(Message):
    """(n_k / n) g_k and n_k / n: ready to be summed. Where noise is shared (``dp_noise_in=total``), ``gradients`` is
    the clipped g_k in whole steps of a grid, with a share of the noise.
    """

    gradients: Gradient[Weights]
    share: Count[float]


@dataclass(frozen=True)
class ServerState(Record):
    """The common weights and the one optimiser."""

    weights: Weights
    optimizer: OptimizerState
    total: float


class FedSGDCohort(ModelCohort):
    """FedSGD's clients, differentiated together."""

    def gradient(self, common: Broadcast) -> Stacked[Step]:
        grads, _ = gradients(self.model, common.weights, self.inputs, loss=self.config.loss, dropout=self.dropout())
        shares = self.shares(common.total)
        return Stacked(Step(self.scaled({name: grads[name] for name in common.weights}, shares), shares), self.parties)


class FedSGDClient(WeightedClient[AveragingConfig]):
    """One client: answers weights with a gradient."""

    cohort: ClassVar[type[Cohort[Any]] | None] = FedSGDCohort

    @handler
    def gradient(self, common: Broadcast) -> Step:
        """g_k; zero at a client without training nodes."""
        grads = self.learner.gradients(common.weights, self.stream)
        gradient: Weights = {name: grads[name] for name in common.weights}
        share = self.samples() / common.total
        if self.config.dp_clip:
            gradient = self.released(gradient)
            if self.config.shared_noise:
                return Step(gradient, share)
        return Step(scaled(gradient, share), share)


def init(view: View, config: AveragingConfig, common: Stream) -> ServerState:
    if not view.alike:
        raise ConfigError(
            "fedsgd steps one common model: clients with different features or classes cannot use it; try fedavg"
        )
    weights = get_weights(config.first_model(view, common))
    return ServerState(weights, fresh_state(config.optimizer, weights), 0.0)


def count_round(state: ServerState, federation: Federation, config: AveragingConfig) -> tuple[ServerState, Log]:
    """n, once."""
    return replace(state, total=total_samples(federation)), {}


def common_gradient(state: ServerState, federation: Federation, config: AveragingConfig) -> Weights:
    """g = sum_k (n_k / n) g_k, or a gradient that no client can move far."""
    request = Broadcast(state.weights, state.total)
    if not config.bounds:
        total = federation.sum(FedSGDClient.gradient, request, at_least=federation.least)
        if config.shared_noise:  # all clients count the same
            return config.shared_noise.mean(total.gradients, round(total.share * state.total), like=state.weights)
        if federation.absent and total.share > 0.0:
            return scaled(total.gradients, 1.0 / total.share)  # shares of those in the sum, made to sum to 1
        return total.gradients
    zeros = scaled(state.weights, 0.0)
    handler = FedSGDClient.gradient
    found = bounded_step(federation, handler, request, config, read=lambda part: part.gradients, before=zeros)
    return zeros if found is None else found[0]


def fedsgd_round(state: ServerState, federation: Federation, config: AveragingConfig) -> tuple[ServerState, Log]:
    """``local_epochs`` common steps: g_t from everybody, then one step of the optimiser."""
    for _ in range(config.local_epochs):
        weights, optimizer = stepped(
            state.weights,
            common_gradient(state, federation, config),
            state.optimizer,
            optimizer=config.optimizer,
            lr=config.rate(federation.round),
            weight_decay=config.weight_decay,
        )
        state = replace(state, weights=weights, optimizer=optimizer)
    return state, {}


def privacy(
    state: ServerState, config: AveragingConfig, rounds: int, clients: int, masked: bool
) -> dict[str, Any] | None:
    """One release per step and client."""
    releases = rounds * config.local_epochs
    parties = parties_of_sum(config, clients, clients, masked)
    return updates_statement(config, state.weights, releases=releases, parties=parties, masked=masked)


def script(config: AveragingConfig, view: View) -> Script:
    """n, then a gradient for every common step."""
    return {
        "setup": (total(FedSGDClient.size),),
        "train": (update_line(FedSGDClient.gradient, config, view, most=config.local_epochs, survivors=True),),
        "evaluation": (ask(FedSGDClient.deploy),),
    }


METHOD = register(
    Method(
        name="fedsgd",
        summary="clients send gradients, the server steps one common optimiser",
        reference=(
            "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
        ),
        config=AveragingConfig,
        init=init,
        phases=(Phase("setup", count_round, rounds=1, setup=True), Phase("train", fedsgd_round)),
        edge_weights=True,
        own_backbones=True,
        roles={"client": Role(FedSGDClient)},
        script=script,
        bounded=True,
        privacy=privacy,
    )
)
