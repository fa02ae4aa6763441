"""Edges between owners: ids under a key that only owners know, and items two owners compare.

An owner's edge that leads elsewhere names the other end by its partner's id. Both list it, or it is not used: per pair
of owners the edges both list are found by private set intersection (`isthmus.privacy.psi`). The other end belongs to
whoever agrees on the edge; an end that nobody claims stays outside the graph.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.data.tables.owner import LINK_KEY_BYTES, OwnerTables
from isthmus.errors import DataError, ProtocolError

KEY_BYTES = LINK_KEY_BYTES
ITEM_BYTES = 16
Ints = NDArray[np.int64]


def node_ids(ids: Sequence[str], key: bytes) -> Ints:
    """The 63-bit ids other parties may see; nobody without the key can tell which text they stand for."""
    found = np.array(
        [int.from_bytes(_digest(key, b"node", text.encode(), size=8), "big") >> 1 for text in ids], dtype=np.int64
    )
    if len(np.unique(found)) < len(found):
        raise DataError("two ids of this owner have the same keyed number: draw another link key and start again")
    return found


@dataclass(frozen=True)
class Candidates:
    """An owner's edges that lead elsewhere, as items to compare.

    Args:
        items: One per pair of ends, all different (I,).
        edge: Item of every such edge of the owner (X,).
    """

    items: tuple[bytes, ...]
    edge: Ints


def candidates(tables: OwnerTables, key: bytes) -> Candidates:
    """The owner's edges towards others. The same edge gives the same item at both of its owners."""
    edges = tables.edges
    directed = tables.schema.edges is not None and tables.schema.edges.directed
    own = tables.ids.gather(edges.own).to_list() if len(edges.own) else []
    found: dict[bytes, int] = {}
    place = np.zeros(len(own), dtype=np.int64)
    for row, (mine, far, out) in enumerate(zip(own, edges.far.to_list(), edges.outgoing.tolist(), strict=True)):
        source, target = (mine, far) if out else (far, mine)
        if not directed and target < source:
            source, target = target, source
        item = _digest(key, b"edge", source.encode(), target.encode(), size=ITEM_BYTES)
        place[row] = found.setdefault(item, len(found))
    return Candidates(tuple(found), place)


def _digest(key: bytes, *parts: bytes, size: int) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(4, "big") + part)
    return mac.digest()[:size]


def split_items(joined: bytes) -> list[bytes]:
    """Items that were sent end to end."""
    if len(joined) % ITEM_BYTES:
        raise ProtocolError(f"items of edges have {ITEM_BYTES} bytes each")
    return [joined[at : at + ITEM_BYTES] for at in range(0, len(joined), ITEM_BYTES)]


@dataclass(frozen=True)
class LinkCounts:
    """What an owner is shown of its links with one partner, or with all: edges it lists, edges both list."""

    listed: int
    agreed: int

    @property
    def only_here(self) -> int:
        return self.listed - self.agreed


def count_links(
    tables: OwnerTables, key: bytes, partner: Ints, partners: Sequence[str], owner: str
) -> dict[str, LinkCounts]:
    """Edges that lead elsewhere: how many ``owner`` lists, how many each of its partners agreed on."""
    found = candidates(tables, key)
    return {
        name: LinkCounts(len(found.items), len(np.unique(found.edge[partner == number])))
        for number, name in enumerate(partners)
        if name != owner
    }


def read_key(tables: Mapping[str, OwnerTables]) -> bytes | None:
    """The link key owners were given outside the federation: the same ``link.key`` in every folder, or none."""
    keys = {owned.link_key for owned in tables.values()}
    if len(keys) > 1:
        raise DataError("owners have different link.key files, or only some have one: give all the same, or none")
    return keys.pop()
