"""The owner's side of the preparation. Its tables stay in ``self.data``; only what handlers return leaves."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.tables import scaling
from isthmus.data.tables.owner import OwnerTables
from isthmus.errors import DataError, ProtocolError
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Client, handler
from isthmus.preparation.linking import KEY_BYTES, LinkCounts, candidates, count_links, split_items
from isthmus.preparation.messages import (
    CellCounts,
    FeatureShapes,
    FeatureSums,
    Known,
    LinkAnswer,
    LinkKey,
    LinkRequest,
    Links,
    Partners,
    Totals,
)
from isthmus.privacy import psi
from isthmus.records import Record


@dataclass(frozen=True)
class PreparationConfig:
    """Settings of the preparation.

    Args:
        max_ids: Largest set of edges this owner intersects with a partner; None for any.
        key: Link key all owners were given outside the federation; None: the first owner draws one.
    """

    max_ids: int | None = None
    key: bytes | None = None


@dataclass(frozen=True)
class Preparation(Record):
    """What an owner ends the preparation with.

    Args:
        scaling: Agreed numbers by name.
        key: Link key.
        partner: Owner of the other end of each of its edges that lead elsewhere (X,), -1 where nobody agreed.
        partners: All owners, sorted.
    """

    scaling: Mapping[str, Tensor]
    key: bytes
    partner: Tensor
    partners: tuple[str, ...]


class OwnerClient(Client[PreparationConfig, Preparation]):
    """One owner of tables."""

    @property
    def tables(self) -> OwnerTables:
        tables: OwnerTables = self.data  # type: ignore[assignment]
        return tables

    def initial_state(self) -> Preparation:
        return Preparation({}, b"", torch.full((len(self.tables.edges.own),), -1), ())

    # -- scaling -----------------------------------------------------------------------------------

    @handler
    def count_cells(self) -> CellCounts:
        return CellCounts(torch.from_numpy(scaling.count(self.tables.schema, self.tables.features)))

    @handler
    def add_up(self, known: Known) -> FeatureSums:
        return FeatureSums(torch.from_numpy(scaling.add_up(self.tables.schema, self.tables.features, spread(known))))

    @handler
    def add_squares(self, known: Known) -> FeatureSums:
        return FeatureSums(torch.from_numpy(scaling.squares(self.tables.schema, self.tables.features, spread(known))))

    @handler
    def add_shapes(self, known: Known) -> FeatureShapes:
        shape = scaling.shape(self.tables.schema, self.tables.features, spread(known))
        return FeatureShapes(*(torch.from_numpy(array) for array in vars(shape).values()))

    @handler
    def settle(self, totals: Totals) -> None:
        """Every owner works out the same numbers from the totals; the server needs no schema."""
        total = scaling.Shape(*(tensor.numpy() for tensor in vars(totals.shapes).values()))
        agreed = scaling.agree(self.tables.schema, spread(totals.known), total)
        self.state = replace(
            self.state, scaling={name: torch.from_numpy(array) for name, array in agreed.arrays().items()}
        )

    # -- edges between owners ----------------------------------------------------------------------

    @handler
    def share_key(self, partners: Partners) -> Mapping[PartyId, LinkKey]:
        key = self.config.key if self.config.key is not None else secrets.token_bytes(KEY_BYTES)
        return {owner: LinkKey(key) for owner in partners.owners}

    @handler
    def take_key(self, mail: Mapping[PartyId, LinkKey]) -> None:
        (sent,) = mail.values()
        if len(sent.key) != KEY_BYTES:
            raise ProtocolError(f"a link key has {KEY_BYTES} bytes")
        if self.config.key is not None and self.config.key != sent.key:
            raise DataError("the link key of this owner is another than the first owner's: use the same link.key")
        self.state = replace(self.state, key=sent.key)

    @handler
    def request_links(self, partners: Partners) -> Mapping[PartyId, LinkRequest]:
        """The owner with the smaller name asks."""
        self.start_linking(partners)
        own = self.items()
        self.scratch.sessions = {owner: psi.Receiver(own) for owner in partners.owners if owner > self.party}
        return {owner: LinkRequest(session.request) for owner, session in self.scratch.sessions.items()}

    @handler
    def take_requests(self, mail: Mapping[PartyId, LinkRequest]) -> None:
        self.scratch.requests = {owner: sent.request for owner, sent in mail.items()}

    @handler
    def answer_links(self) -> Mapping[PartyId, LinkAnswer]:
        own = self.items()
        answers = {}
        for owner, request in self.scratch.requests.items():
            self._check_cap(psi.request_size(request))
            answers[owner] = LinkAnswer(psi.answer(own, request))
        return answers

    @handler
    def take_answers(self, mail: Mapping[PartyId, LinkAnswer]) -> None:
        for owner, sent in mail.items():
            self.agree_with(owner, self.scratch.sessions[owner].common(sent.answer))

    @handler
    def confirm_links(self) -> Mapping[PartyId, Links]:
        own = self.items()
        return {owner: Links(b"".join(own[place] for place in places)) for owner, places in self.scratch.common.items()}

    @handler
    def take_confirmed(self, mail: Mapping[PartyId, Links]) -> None:
        place = {item: number for number, item in enumerate(self.items())}
        for owner, sent in mail.items():
            if owner >= self.party:
                raise ProtocolError(f"{owner} confirmed links that it did not ask for")
            items = split_items(sent.items)
            if not all(item in place for item in items):
                raise ProtocolError(f"{owner} confirmed an edge that this owner does not list")
            self._claim(owner, np.array([place[item] for item in items], dtype=np.int64))

    def counts(self) -> dict[str, LinkCounts]:
        """Edges that lead elsewhere: how many this owner lists, how many each partner agreed on. The owner's alone."""
        return count_links(self.tables, self.state.key, self.state.partner.numpy(), self.state.partners, self.party)

    def start_linking(self, partners: Partners) -> None:
        """Remember who takes part, and refuse more edges than this owner compares."""
        self.state = replace(self.state, partners=partners.owners)
        self.scratch.common = {}
        self._check_cap(len(self.items()))

    def agree_with(self, owner: PartyId, places: Sequence[int]) -> None:
        """These items are listed by ``owner`` too, to whom it is still to be confirmed."""
        self.scratch.common[owner] = places
        self._claim(owner, np.array(places, dtype=np.int64))

    def items(self) -> tuple[bytes, ...]:
        """This owner's edges that lead elsewhere."""
        if not hasattr(self.scratch, "candidates"):
            self.scratch.candidates = candidates(self.tables, self.state.key)
        items: tuple[bytes, ...] = self.scratch.candidates.items
        return items

    def _check_cap(self, size: int) -> None:
        if self.config.max_ids is not None and size > self.config.max_ids:
            raise DataError(
                f"a set of {size} edges is more than this owner intersects with a partner ({self.config.max_ids}): "
                "raise link.max_ids in [policy] of its client.toml, or list fewer edges"
            )

    def _claim(self, owner: PartyId, places: NDArray[np.int64]) -> None:
        """These items are edges to ``owner``."""
        self.items()
        partner = self.state.partner.clone()
        mine = torch.from_numpy(np.isin(self.scratch.candidates.edge, places))
        if bool((partner[mine] >= 0).any()):
            raise DataError("two partners claim the same node: ids must belong to one owner, agree on whose they are")
        partner[mine] = self.state.partners.index(owner)
        self.state = replace(self.state, partner=partner)


def spread(known: Known) -> scaling.Spread:
    return scaling.Spread(
        known.number.numpy(), known.exponent.numpy().astype(np.int64), known.mean.numpy(), known.std.numpy()
    )
