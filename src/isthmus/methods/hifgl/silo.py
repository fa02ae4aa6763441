"""What a silo is given and remembers, and what it passes on to the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from isthmus.data.nodes import NodeData
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Client, handler
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.messages import Labelled, Sizes
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.records import Record
from isthmus.tensors import Weights, get_weights


@dataclass(frozen=True)
class Register:
    """All a silo is given: who its devices are, and the public shape of the task."""

    node_id: Tensor
    num_features: int
    num_classes: int


def register_of(data: NodeData) -> Register:
    return Register(data.node_id, data.num_features, data.num_classes)


@dataclass(frozen=True)
class SiloState(Record):
    """What a silo remembers: theta_i, its optimiser, and how many of its devices are labelled."""

    weights: Weights
    optimizer: OptimizerState
    labelled: int = 0


SiloStateT = TypeVar("SiloStateT", bound=SiloState)


class SiloParty(Client[HiFGLConfig, SiloStateT]):
    """Knows the identities of its devices and the model; no feature, label or edge of a device."""

    def setup(self) -> None:
        self.register: Any = self.data

    def initial_model(self) -> tuple[Weights, OptimizerState]:
        """theta^(0) and a fresh optimiser."""
        register, stream = self.register, self.common.child("init")
        weights = get_weights(self.config.build(register.num_features, register.num_classes, stream))
        return weights, fresh_state(self.config.optimizer, weights)

    def export(self) -> Weights:
        return self.state.weights

    @handler
    def take_count(self, mail: Mapping[PartyId, Labelled]) -> None:
        (sent,) = mail.values()
        self.state = replace(self.state, labelled=sent.devices)

    @handler
    def sizes(self) -> Sizes:
        return Sizes(float(self.state.labelled), float(self.state.labelled > 0))

    @handler
    def take_scores(self, mail: Mapping[PartyId, Evaluation]) -> None:
        (self.scratch.evaluation,) = mail.values()

    @handler
    def evaluation(self) -> Evaluation:
        scored: Evaluation = self.scratch.evaluation
        return scored
