"""The server's side of the preparation: the order of the steps. It sees sums of statistics, and relays sealed mail."""

from __future__ import annotations

import torch

from isthmus.data.tables import scaling
from isthmus.federation.interface import Federation
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Role, RoleTable
from isthmus.federation.session import Session
from isthmus.preparation import LINKING, SCALING, Link
from isthmus.preparation.messages import Known, Partners, Totals
from isthmus.preparation.owner import OwnerClient
from isthmus.preparation.plain_links import PLAIN_TABLE, PlainOwnerClient

TABLE = RoleTable({"client": Role(OwnerClient)})
TABLES: dict[Link, RoleTable] = {"psi": TABLE, "plain": PLAIN_TABLE, "none": TABLE}
"""How owners link -> their roles; an organisation has ``TABLE`` whatever the server asks for."""
COMMITTED = 2
"""Step under which owners keep the outcome: scaling is step 1, linking step 2."""


def agree_on_scaling(federation: Federation) -> None:
    """Four sums, then everybody has the totals."""
    spread = scaling.after_counts(federation.sum(OwnerClient.count_cells).cells.numpy())
    spread = scaling.after_sums(spread, federation.sum(OwnerClient.add_up, _known(spread)).values.numpy())
    spread = scaling.after_squares(spread, federation.sum(OwnerClient.add_squares, _known(spread)).values.numpy())
    total = federation.sum(OwnerClient.add_shapes, _known(spread))
    federation.call(OwnerClient.settle, Totals(_known(spread), total))


def prepare_owners(session: Session, link: Link, *, scale: bool = True) -> None:
    """All of the preparation, and every owner keeps its outcome. A prediction takes the scaling of its training, and
    agrees on none (``scale=False``).
    """
    if scale:
        session.clock.begin(SCALING, 1, 1)
        agree_on_scaling(session)
    session.clock.begin(LINKING, 1, COMMITTED)
    if link != "none" and len(session.clients) > 1:
        link_owners(session, link)
    session.engine.commit(COMMITTED)


def link_owners(federation: Federation, link: Link = "psi") -> None:
    """A key for ids, then every pair of owners finds the edges both list."""
    partners = Partners(tuple(federation.clients))
    first: PartyId = federation.clients[0]
    federation.exchange(OwnerClient.share_key, OwnerClient.take_key, partners, to=[first])
    if link == "plain":
        federation.exchange(PlainOwnerClient.show_edges, PlainOwnerClient.compare_edges, partners)
    else:
        federation.exchange(OwnerClient.request_links, OwnerClient.take_requests, partners)
        federation.exchange(OwnerClient.answer_links, OwnerClient.take_answers)
    federation.exchange(OwnerClient.confirm_links, OwnerClient.take_confirmed)


def _known(spread: scaling.Spread) -> Known:
    return Known(
        torch.from_numpy(spread.number),
        torch.from_numpy(spread.exponent.astype(float)),
        torch.from_numpy(spread.mean),
        torch.from_numpy(spread.std),
    )
