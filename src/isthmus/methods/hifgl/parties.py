"""What HiFGL's parties are, whatever the protocol: all devices of one silo, and the silo.

All devices of a silo run in one object, at the address ``<silo>/devices``: what passes between two of them is an array
and no message, sums of their gradients are formed in the object (separate devices would use `isthmus.privacy.masks`),
and if one fails the round is lost and repeated. Everything that leaves the object is a message.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import DataError, ProtocolError, RunError
from isthmus.federation.messages import PartyId, address, client_of
from isthmus.federation.roles import Client, handler
from isthmus.methods.evaluation import Detail, Evaluation, ScoreBins, WantedMetric, bin_scores, detail, tally
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.layers import Arrivals, Pairs, Rows, matrix_of, neighbourhood, propagation
from isthmus.methods.hifgl.messages import ClassCounts, Labelled, Pass, Sizes
from isthmus.methods.learners import PARTS, node_groups
from isthmus.metrics.registry import ACCURACY
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
        scored: What the model said of the devices when it was scored last (n, C).
        class_counts: Training labels of each class in the silo (C,), where classes are weighted.
    """

    secret: bytes
    first_sums: Tensor | None = None
    scored: Tensor | None = None
    class_counts: Tensor | None = None


DeviceStateT = TypeVar("DeviceStateT", bound=DeviceState)


class DeviceGroup(Client[HiFGLConfig, DeviceStateT]):
    """All devices of one silo: features, labels, edges."""

    state_type: ClassVar[type[DeviceState]] = DeviceState

    def initial_state(self) -> Any:
        return self.state_type(secrets.token_bytes(32))

    def setup(self) -> None:
        config, data = self.config, self.data
        self.silo = client_of(self.party)
        inside, pools = config.mode != "cross-silo", config.mode != "cross-device"
        self.where = neighbourhood(data, self.silo, inside=inside, pools=pools)
        self.terms = max(1, self.where.terms)
        if config.secmp != "plain" and self.terms > config.format.terms:
            raise DataError(
                f"{self.party}: a device has {self.terms} edges, and sums of at most {config.format.terms} numbers are "
                "allowed: raise max_degree, or leave it out; if that is not enough, lower fraction_bits or bound"
            )
        self.plan = config.plan(data.num_features, data.num_classes)
        self.k_min = config.k_min if config.one_neighbour == "drop" else 0
        self.graph = propagation(config.kind, self.where, self.k_min).to(config.dtype)
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

    @handler
    def tell_class_counts(self) -> Mapping[PartyId, ClassCounts]:
        """To the silo: training labels of each class."""
        return {self.silo: self.class_counts()}

    @handler
    def class_counts(self) -> ClassCounts:
        return ClassCounts(torch.bincount(self.data.y[self.data.train], minlength=self.data.num_classes))

    @handler
    def hear_class_counts(self, mail: Mapping[PartyId, ClassCounts]) -> None:
        (sent,) = mail.values()
        self.take_class_counts(sent)

    @handler
    def take_class_counts(self, counts: ClassCounts) -> None:
        self.state = replace(self.state, class_counts=counts.devices)

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

    @cached_property
    def arrivals(self) -> tuple[Arrivals, Arrivals]:
        """What reaches the devices: values, gradients."""
        return self.where.arrivals(self.k_min), self.where.arrivals(self.k_min, gradients=True)

    def times_by_peer(self, order: Pass) -> Iterator[tuple[str, Pairs, Rows]]:
        """How often the value of each message that leaves counts. No gradient returns over an edge whose value did not
        arrive: the model does not depend on it.
        """
        for peer, pair in self.where.pairs.items():
            heard = self.arrivals[0].of(peer, self.silo)[pair.source]
            yield peer, pair, pair.against * heard if order.backward else pair.along

    def arriving(self, order: Pass) -> NDArray[np.bool_]:
        """Which messages of this exchange count at their target, peer after peer."""
        found, pairs = self.arrivals[order.backward], self.where.pairs.items()
        return np.concatenate([np.empty(0, bool), *(found.of(peer, self.silo)[pair.target] for peer, pair in pairs)])

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

    def logits(self) -> Tensor:
        """Of the pass that is complete, or of the one that was scored last."""
        model = getattr(self.scratch, "model", None)
        if model is not None:
            self.check_complete()
            logits: Tensor = model.logits
            return logits
        if self.state.scored is None:
            raise RunError(f"{self.party} has no predictions yet: run the phases in order")
        return self.state.scored

    @handler
    def scores(self) -> Mapping[PartyId, Evaluation]:
        """To the silo: counts over its devices."""
        return {self.silo: self.score()}

    @handler
    def score(self) -> Evaluation:
        logits = self.logits()
        self.state = replace(self.state, scored=logits)
        tallies = {part: tally(logits, self.data.y, mask) for part, mask in self.score_masks.items()}
        self.scratch.evaluation = Evaluation(tallies)
        return Evaluation(tallies)

    @handler
    def score_bins(self, wanted: WantedMetric) -> ScoreBins:
        """In which bin the score of the devices of a silo lies, where no silo knows it."""
        found = None if wanted.metric == ACCURACY else self.detail()
        return bin_scores(self.scratch.evaluation, wanted.metric, found)

    @handler
    def tell_detail(self) -> Mapping[PartyId, Detail]:
        """To the silo: counts over its devices for scores beyond accuracy."""
        return {self.silo: self.detail()}

    @handler
    def detail(self) -> Detail:
        self.check_complete()
        masks = {part: self.score_masks[part] for part in ("val", "test")}
        return detail(self.scratch.model.logits, self.data.y, masks)

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
    def score_bins(self, wanted: WantedMetric) -> ScoreBins:
        """In which bin the score of its devices lies."""
        return bin_scores(self.scratch.evaluation, wanted.metric, getattr(self.scratch, "detail", None))

    @handler
    def evaluation(self) -> Evaluation:
        scored: Evaluation = self.scratch.evaluation
        return scored

    @handler
    def take_detail(self, mail: Mapping[PartyId, Detail]) -> None:
        (self.scratch.detail,) = mail.values()

    @handler
    def detail(self) -> Detail:
        counted: Detail = self.scratch.detail
        return counted

    @handler
    def note_class_counts(self, mail: Mapping[PartyId, ClassCounts]) -> None:
        (self.scratch.class_counts,) = mail.values()

    @handler
    def tell_class_counts(self) -> Mapping[PartyId, ClassCounts]:
        """To its devices: training labels of each class in the silo."""
        return {address(self.party, "device"): self.scratch.class_counts}
