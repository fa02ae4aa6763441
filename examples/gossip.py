"""Gossip averaging on a ring -- Lian et al., NeurIPS 2017, https://arxiv.org/abs/1705.09056, Algorithm 1 (D-PSGD) with
local epochs: no common model, every client averages with its two neighbours. A method with messages between clients.

paper      here
x_{k,i}    ModelState.weights    client i's own model, all it is scored with
W_ij       1 / 3                 for i itself and its two neighbours on the ring

The server never sees a model. It knows who takes part, and sends the order of the ring.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import isthmus.methods as fl


@dataclass(frozen=True)
class Ring(fl.Message):
    """The clients in their order on the ring."""

    order: fl.Identifier[tuple[str, ...]]


@dataclass(frozen=True)
class Trained(fl.Message):
    """A client's weights, for its neighbours."""

    weights: fl.Model[fl.Weights]


class GossipClient(fl.ModelClient[fl.TrainConfig]):
    @fl.handler
    def train_and_send(self, ring: Ring) -> Mapping[fl.PartyId, Trained]:
        """What is returned is mail: {address: message}."""
        self.state = self.train(self.state.weights, received={})
        place = ring.order.index(self.party)
        neighbours = {ring.order[place - 1], ring.order[(place + 1) % len(ring.order)]} - {self.party}
        return {neighbour: Trained(self.state.weights) for neighbour in neighbours}

    @fl.handler
    def average(self, mail: Mapping[fl.PartyId, Trained]) -> None:
        models = [self.state.weights, *(mail[sender].weights for sender in sorted(mail))]
        mean = fl.weighted_mean(models, [1.0 / len(models)] * len(models))  # x_i <- sum_j W_ij x_j
        self.state = replace(self.state, weights=mean)


def init(view: fl.View, config: fl.TrainConfig, common: fl.Stream) -> fl.Record:
    """The server remembers nothing."""
    if not view.alike:
        raise fl.ConfigError("gossip averages whole models: all clients need the same features and classes; try fedavg")
    return fl.Record()


def gossip_round(state: fl.Record, federation: fl.Federation, config: fl.TrainConfig) -> tuple[fl.Record, fl.Log]:
    federation.exchange(GossipClient.train_and_send, GossipClient.average, Ring(federation.clients))
    return state, {}


def script(config: fl.TrainConfig, view: fl.View) -> fl.Script:
    return {
        "train": (fl.mail(GossipClient.train_and_send, GossipClient.average),),
        "evaluation": (fl.ask(GossipClient.evaluate),),
    }


METHOD = fl.register(
    fl.Method(
        name="gossip",
        summary="every client averages its model with its two neighbours on a ring; no common model",
        reference="Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017",
        config=fl.TrainConfig,
        init=init,
        phases=(fl.Phase("train", gossip_round),),
        roles={"client": fl.Role(GossipClient)},
        needs_single_updates=True,  # neighbours read each other's weights
        script=script,
    )
)
