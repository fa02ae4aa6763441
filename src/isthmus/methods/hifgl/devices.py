"""The devices of one silo as one party: their part of the graph, and the exchanges of a pass, one at a time.

All devices of a silo run in one object, at the address ``<silo>/devices``. What passes between two devices of one silo
is an array in it and no message, and what a silo's devices know, they know together. Everything that leaves the object
is a message. Where the simulation stands in for separate hosts:

- sums of gradients over the devices of a silo are formed in the object. Separate devices form them by
  `isthmus.privacy.masks`;
- mail between devices of one silo does not show in the ledger (``facts`` counts it);
- a device that fails takes its group with it: the round is lost and repeated, no sum is formed without it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from isthmus.errors import DataError, ProtocolError
from isthmus.federation.messages import PartyId, address, client_of
from isthmus.federation.roles import Client, handler
from isthmus.graph.normalise import from_torch_csr
from isthmus.methods.evaluation import Evaluation, tally
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.layers import Matrix, numpy_type, propagation
from isthmus.methods.hifgl.messages import Labelled, Pass
from isthmus.methods.hifgl.neighbours import neighbourhood
from isthmus.methods.learners import PARTS, node_groups
from isthmus.nn.dropout import DropoutSource
from isthmus.records import Record

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

    def setup(self) -> None:
        config, data = self.config, self.data
        self.silo = client_of(self.party)
        self.where = neighbourhood(data, self.silo, inside=config.mode != "cross-silo")
        self.terms = max(1, self.where.terms)
        if self.terms > config.max_degree:
            raise DataError(
                f"{self.party}: a device has {self.terms} edges, sums are made for {config.max_degree}: raise "
                "max_degree"
            )
        self.plan = config.plan(data.num_features, data.num_classes)
        k_min = config.k_min if config.one_neighbour == "drop" else 0
        self.graph = propagation(config.kind, self.where, k_min).to(config.dtype)
        kind: Any = numpy_type(config.dtype)
        sparse = data.x.layout == torch.sparse_csr
        self.x: Matrix = from_torch_csr(data.x).astype(kind) if sparse else data.x.to(config.dtype)
        self.first_sums = lru_cache(maxsize=1)(_multipliable)

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
        if order.round == 0 and order.part == 0:
            self.start(self.raw_feature_sums(order))
        values: Tensor | None = getattr(self.scratch, "outgoing", None)
        if values is None or values.shape[1] != order.width:
            found = "nothing" if values is None else f"{values.shape[1]} numbers"
            raise ProtocolError(
                f"{self.party}: an exchange of {order.width} numbers in layer {order.layer} was ordered, {found} is "
                "due: repeat the round"
            )
        self.scratch.awaited = order
        return values if order.round == 0 else self.with_noise(values, order)

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
            raise ProtocolError(
                f"{self.party} has no sums of {self.senders()} in layer {order.layer}: repeat the round with all of "
                "them"
            )

    def senders(self) -> str:
        """Whose sums or messages are missing."""
        return "neighbours"

    def with_noise(self, values: Tensor, order: Pass) -> Tensor:
        """``one_neighbour=dp``: clipped, with Gaussian noise, before anything leaves; the same to all neighbours, so
        one release.
        """
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

    def dropout_masks(self) -> list[Tensor]:
        """One per hidden layer; none without dropout."""
        config, count = self.config, self.where.count
        if config.dropout == 0.0:
            return []
        source = DropoutSource([self.stream("dropout").torch()])
        return [source.mask([count], count, width, config.dropout, config.dtype) for width in config.hidden]


def run_through(exchanges: Exchanges, sums: Iterable[Tensor]) -> None:
    """Run a computation to its end on sums that are known already."""
    next(exchanges, None)
    for each in sums:
        _resumed(exchanges, each)


def _resumed(exchanges: Exchanges, sums: Tensor) -> Tensor | None:
    try:
        return exchanges.send(sums)
    except StopIteration:
        return None


def _multipliable(stored: Tensor | None) -> Matrix | None:
    """In the form that is multiplied fastest."""
    sparse = stored is not None and stored.layout == torch.sparse_csr
    return from_torch_csr(stored) if stored is not None and sparse else stored
