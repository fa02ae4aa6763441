"""The server's side of the preparation: the order of the steps. It sees sums of statistics, and relays sealed mail."""

from __future__ import annotations

import torch

from isthmus.data.tables import scaling
from isthmus.data.tables.schema import Schema
from isthmus.federation.interface import Federation
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Role, RoleTable
from isthmus.preparation.messages import Agreed, Known, Partners
from isthmus.preparation.owner import OwnerClient

TABLE = RoleTable({"client": Role(OwnerClient)})


def agree_on_scaling(federation: Federation, schema: Schema) -> scaling.Scaling:
    """Four sums, then everybody has the result."""
    spread = scaling.after_counts(federation.sum(OwnerClient.count_cells).cells.numpy())
    spread = scaling.after_sums(spread, federation.sum(OwnerClient.add_up, _known(spread)).values.numpy())
    spread = scaling.after_squares(spread, federation.sum(OwnerClient.add_squares, _known(spread)).values.numpy())
    total = federation.sum(OwnerClient.add_shapes, _known(spread))
    agreed = scaling.agree(schema, spread, scaling.Shape(*(tensor.numpy() for tensor in vars(total).values())))
    federation.call(OwnerClient.settle, Agreed(**{k: torch.from_numpy(v) for k, v in agreed.arrays().items()}))
    return agreed


def link_owners(federation: Federation) -> None:
    """A key for ids, then every pair of owners finds the edges both list."""
    partners = Partners(tuple(federation.clients))
    first: PartyId = federation.clients[0]
    federation.exchange(OwnerClient.share_key, OwnerClient.take_key, partners, to=[first])
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
