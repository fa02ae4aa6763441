"""What HiFGL's parties are, whatever the protocol: all devices of one silo, and the silo.

All devices of a silo run in one object, at the address ``<silo>/devices``: what passes between two of them is an array
and no message, sums of their gradients are formed in the object (separate devices would use `isthmus.privacy.masks`),
and if one fails the round is lost and repeated. Everything that leaves the object is a message.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import DataError, ProtocolError
from isthmus.federation.messages import PartyId, address, client_of
from isthmus.federation.roles import Client, handler
from isthmus.methods.evaluation import Evaluation, tally
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.layers import matrix_of, neighbourhood, propagation
from isthmus.methods.hifgl.messages import Labelled, Pass, Sizes
from isthmus.methods.learners import PARTS, node_groups
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.records import Record
from isthmus.tensors import Weights, get_weights

Exchanges = Generator[Tensor, Tensor, None]
"""A computation with neighbours: yields what the devices send, (n, d), and is resumed with the sums over neighbours."""


@dataclass(frozen=True)
class DeviceState(Record):
    """What the devices of a silo remember.

    Args:
        secret: Where the noise of ``one_neighbour=dp`` comes from.
        first_sums: Rows of A x (n, F), once the raw features have travelled.
    """

    secret: bytes
    first_sums: Tensor | None = None


DeviceStateT = TypeVar("DeviceStateT", bound=DeviceState)


class DeviceGroup(Client[HiFGLConfig, DeviceStateT]):
    """All devices of one silo: features, labels, edges."""

    state_type: ClassVar[type[DeviceState]] = DeviceState

    def initial_state(self) -> Any:
        return self.state_type(secrets.token_bytes(32))

    def setup(self) -> None:
        config, data = self.config, self.data
        self.silo = client_of(self.party)
        self.where = neighbourhood(data, self.silo, inside=config.mode != "cross-silo")
        self.terms = max(1, self.where.terms)
        if self.terms > config.max_degree:
            few = f"a device has {self.terms} edges, more than max_degree={config.max_degree}"
            raise DataError(f"{self.party}: {few}: raise max_degree")
        self.plan = config.plan(data.num_features, data.num_classes)
        k_min = config.k_min if config.one_neighbour == "drop" else 0
        self.graph = propagation(config.kind, self.where, k_min).to(config.dtype)
        self.x = matrix_of(data.x, config.dtype)
        self.first_sums = lru_cache(maxsize=1)(matrix_of)

    def raw_feature_sums(self, order: Pass) -> Exchanges:
        """The computation of setup."""
        raise NotImplementedError

    @handler
    def count(self) -> Mapping[PartyId, Labelled]:
        """To the silo: how many devices have a training label."""
        return {self.silo: self.labelled()}

    @handler
    def labelled(self) -> Labelled:
        return Labelled(self.data.num_train)

    # -- one exchange at a time

    def start(self, exchanges: Exchanges) -> None:
        """Begin a computation and run it up to its first message."""
        self.scratch.exchanges, self.scratch.received, self.scratch.clipped = exchanges, [], 0
        self.scratch.outgoing, self.scratch.awaited = next(exchanges, None), None

    def message(self, order: Pass) -> Tensor:
        """What the devices send in this exchange, (n, d)."""
        self.check_complete()
        raw = order.round == 0 and not order.evaluation  # the exchanges of setup
        if raw and order.part == 0:
            self.start(self.raw_feature_sums(order))
        values: Tensor | None = getattr(self.scratch, "outgoing", None)
        if values is None or values.shape[1] != order.width:
            due = "none is due" if values is None else f"one of {values.shape[1]} is due"
            ordered = f"{self.party}: an exchange of {order.width} numbers in layer {order.layer} was ordered"
            raise ProtocolError(f"{ordered}, {due}: repeat the round")
        self.scratch.awaited = order
        return values if raw else self.with_noise(values, order)

    def receive(self, sums: Tensor) -> None:
        """Go on with the sums over neighbours, (n, d), up to the next message or the end."""
        sums = sums.to(self.config.dtype)
        self.scratch.received.append(sums)
        self.scratch.awaited = None
        self.scratch.outgoing = _resumed(self.scratch.exchanges, sums)

    def check_complete(self) -> None:
        """Refuse to go on while sums of the last exchange are missing."""
        order: Pass | None = getattr(self.scratch, "awaited", None)
        if order is not None:
            missing = f"{self.party} has no sums of {self.senders()} in layer {order.layer}"
            raise ProtocolError(f"{missing}: repeat the round with all of them")

    def senders(self) -> str:
        """Whose sums or messages are missing."""
        return "neighbours"

    def with_noise(self, values: Tensor, order: Pass) -> Tensor:
        """``one_neighbour=dp``: clipped, with Gaussian noise; the same to all neighbours, so one release."""
        if self.config.one_neighbour != "dp":
            return values
        purpose = (self.party, order.round, order.layer, int(order.backward), int(order.evaluation))
        return self.config.mechanism.release_rows(values, secret=self.state.secret, purpose=purpose)[0]

    def joined(self, mail: Mapping[PartyId, Any], axis: int = 0) -> Tensor | None:
        """Rows of all peers in order; a peer that sent too few has lost a device on the way."""
        rows = []
        for peer, pair in self.where.pairs.items():
            sent = mail.get(address(peer, "device"))
            if sent is None or sent.rows.shape[axis] != pair.count:
                found = 0 if sent is None else sent.rows.shape[axis]
                raise ProtocolError(
                    f"{address(peer, 'device')} sent {found} of {pair.count} messages to {self.party} in layer "
                    f"{self.scratch.awaited.layer}: a device dropped out; repeat the round when it is back"
                )
            rows.append(sent.rows)
        return torch.cat(rows, dim=axis) if rows else None

    @handler
    def scores(self) -> Mapping[PartyId, Evaluation]:
        """To the silo: counts over its devices."""
        return {self.silo: self.score()}

    @handler
    def score(self) -> Evaluation:
        self.check_complete()
        logits = self.scratch.model.logits
        return Evaluation({part: tally(logits, self.data.y, mask) for part, mask in self.score_masks.items()})

    @cached_property
    def score_masks(self) -> dict[str, Tensor]:
        return {part: getattr(self.data, part) for part in PARTS} | node_groups(self.data)


def run_through(exchanges: Exchanges, sums: Iterable[Tensor]) -> None:
    """Run a computation to its end on sums that are known already."""
    outgoing = next(exchanges, None)
    for each in sums:
        outgoing = _resumed(exchanges, each)
    assert outgoing is None, "a sum over neighbours is missing"


def _resumed(exchanges: Exchanges, sums: Tensor) -> Tensor | None:
    try:
        return exchanges.send(sums)
    except StopIteration:
        return None


# -- silo ------------------------------------------------------------------------------------------


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
    """Knows the identities of its devices and the model; ``data`` is a `Register`: no feature, label or edge."""

    state_type: ClassVar[type[SiloState]] = SiloState

    def initial_state(self) -> Any:
        """theta^(0) and a fresh optimiser."""
        stream = self.common.child("init")
        weights = get_weights(self.config.build(self.data.num_features, self.data.num_classes, stream))
        return self.state_type(weights, fresh_state(self.config.optimizer, weights))

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
