"""Local (also Isolate, SelfTrain): every client trains its own model on its own data. No message passes.

The lower reference of every comparison. It gets the budget of the federated runs: ``rounds * local_epochs`` epochs. All
clients start from the same weights, drawn from the run's common stream, so that FedAvg with one client is this method
bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from isthmus.federation.interface import Federation, View
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask
from isthmus.methods.cohort_training import ModelCohort
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import ModelClient, TrainConfig
from isthmus.records import Record
from isthmus.seeds import Stream


@dataclass(frozen=True)
class ServerState(Record):
    """Empty: the server receives nothing to remember."""


class LocalCohort(ModelCohort):
    pads_less = True

    def train_alone(self) -> None:
        self.train_together(received={})


class LocalClient(ModelClient[TrainConfig]):
    """One client, on its own."""

    cohort: ClassVar[type[Cohort[Any]] | None] = LocalCohort

    @handler
    def train_alone(self) -> None:
        """E epochs on the own model; nothing is returned."""
        self.state = self.train(self.state.weights, received={})


def init(view: View, config: TrainConfig, common: Stream) -> ServerState:
    return ServerState()


def local_round(state: ServerState, federation: Federation, config: TrainConfig) -> tuple[ServerState, Log]:
    """Every client trains; the server only starts the round."""
    federation.call(LocalClient.train_alone)
    return state, {}


def script(config: TrainConfig, view: View) -> Script:
    """Scores alone leave a client."""
    return {"train": (ask(LocalClient.train_alone),), "evaluation": (ask(LocalClient.evaluate),)}


METHOD = register(
    Method(
        name="local",
        summary="each client alone on its own data (lower reference)",
        reference="no paper; Isolate / SelfTrain in others' tables",
        config=TrainConfig,
        init=init,
        phases=(Phase("train", local_round),),
        edge_weights=True,
        own_backbones=True,
        roles={"client": Role(LocalClient)},
        script=script,
    )
)
