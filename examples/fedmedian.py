"""FedMedian -- Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498: the coordinate-wise median of the clients'
weights.

paper      here
w_t        ServerState.weights
w_t^k      Trained.weights
"""

from dataclasses import dataclass

import torch

from isthmus.methods import (
    Deployed,
    Disclosure,
    Evaluation,
    Federation,
    Log,
    Message,
    Method,
    Model,
    ModelClient,
    Phase,
    Record,
    Replies,
    Role,
    TrainConfig,
    View,
    handler,
    register,
)
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, num_values


@dataclass(frozen=True)
class Trained(Message):
    """What leaves a client: its weights. The kind `Model` puts the field on the disclosure sheet."""

    weights: Model[Weights]


@dataclass(frozen=True)
class ServerState(Record):
    """All the server remembers between rounds; a checkpoint is exactly this."""

    weights: Weights


class FedMedianClient(ModelClient[TrainConfig]):
    """One client. Its graph stays in `self.data`; only what a @handler returns leaves."""

    @handler
    def local_update(self, common: Deployed) -> Trained:
        self.state = self.train(common.weights, received=common.weights)
        return Trained(self.state.weights)


def init(view: View, config: TrainConfig, common: Stream) -> ServerState:
    return ServerState(get_weights(config.first_model(view, common)))


def fedmedian_round(state: ServerState, federation: Federation, config: TrainConfig) -> tuple[ServerState, Log]:
    replies = federation.call(FedMedianClient.local_update, Deployed(state.weights))
    stacks = {name: torch.stack([reply.weights[name] for reply in replies.values()]) for name in state.weights}
    return ServerState({name: stack.median(0).values for name, stack in stacks.items()}), {}  # w_{t+1} = med_k w_t^k


def evaluate(state: ServerState, federation: Federation, config: TrainConfig) -> Replies[Evaluation]:
    return federation.call(FedMedianClient.deploy, Deployed(state.weights))


METHOD = register(
    Method(
        name="fedmedian",
        summary="FedAvg with a coordinate-wise median, robust against a few broken clients",
        reference="Yin et al., Byzantine-Robust Distributed Learning, ICML 2018",
        config=TrainConfig,
        init=init,
        phases=(Phase("train", fedmedian_round),),
        evaluate=evaluate,
        roles={"client": Role(FedMedianClient)},
        needs_single_updates=True,  # a median has no secure sum
        shared_values=lambda state: num_values(state.weights),
        discloses=(
            Disclosure("train", "server", "client", Deployed),
            Disclosure("train", "client", "server", Trained),
            Disclosure("evaluation", "server", "client", Deployed),
            Disclosure("evaluation", "client", "server", Evaluation),
        ),
    )
)
