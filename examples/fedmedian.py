"""FedMedian -- Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498: the coordinate-wise median of the clients'
weights.

paper      here
w_t        GlobalModel.weights
w_t^k      Trained.weights
"""

from dataclasses import dataclass

import torch

import isthmus.methods as fl


@dataclass(frozen=True)
class Trained(fl.Message):
    """What leaves a client: its weights. The kind `Model` puts the field on the disclosure sheet."""

    weights: fl.Model[fl.Weights]


class FedMedianClient(fl.ModelClient[fl.TrainConfig]):
    """One client. Its graph stays in `self.data`; only what a handler returns leaves."""

    @fl.handler
    def local_update(self, common: fl.Deployed) -> Trained:
        self.state = self.train(common.weights, received=common.weights)
        return Trained(self.state.weights)


def fedmedian_round(
    state: fl.GlobalModel, federation: fl.Federation, config: fl.TrainConfig
) -> tuple[fl.GlobalModel, fl.Log]:
    """The state is all the server remembers between rounds; a checkpoint is exactly this."""
    replies = federation.call(FedMedianClient.local_update, fl.Deployed(state.weights))
    stacks = {name: torch.stack([reply.weights[name] for reply in replies.values()]) for name in state.weights}
    return fl.GlobalModel({name: stack.median(0).values for name, stack in stacks.items()}), {}  # w_{t+1} = med_k w_t^k


def script(config: fl.TrainConfig, view: fl.View) -> fl.Script:
    """Which handlers are called in each phase: clients refuse everything else."""
    return {"train": (fl.ask(FedMedianClient.local_update),), "evaluation": (fl.ask(FedMedianClient.deploy),)}


METHOD = fl.register(
    fl.Method(
        name="fedmedian",
        summary="FedAvg with a coordinate-wise median, robust against a few broken clients",
        reference="Yin et al., Byzantine-Robust Distributed Learning, ICML 2018",
        config=fl.TrainConfig,
        phases=(fl.Phase("train", fedmedian_round),),
        roles={"client": fl.Role(FedMedianClient)},
        needs_single_updates=True,  # a median has no secure sum
        script=script,
    )
)
