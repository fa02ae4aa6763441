"""Secure sums behind ``federation.sum``: each party masks its reply, the server adds vectors of words and reads only the total.

The masks are those of `isthmus.privacy.masks`. Once per session every party announces a session key; then a reply's numbers become one
vector modulo 2^64 whose masks cancel in the sum of all. What the vector means (names, shapes, types, but no value) travels beside it as
``layout``.

In one process keys are not signed: there is nobody to sign for. Between organisations they are, by long-term keys agreed outside
(`isthmus.privacy.keys`); otherwise a server could play all other parties.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ProtocolError
from isthmus.federation.messages import Identifier, Message, PartyId, Share
from isthmus.federation.schema import Json, Sink, Source, schema
from isthmus.privacy.leaves import Leaf, LeafTemplate, template_of_leaves
from isthmus.privacy.masks import SumParty, SumRoster, SumServer, SumTag

KEYS_PHASE = "keys"


@dataclass(frozen=True)
class SumKey(Message):
    """A party's public session key."""

    key: Identifier[bytes]


@dataclass(frozen=True)
class SumKeys(Message):
    """Everybody's public session keys."""

    keys: Identifier[Mapping[str, bytes]]


@dataclass(frozen=True)
class Masked(Message):
    """A reply nobody can read alone: words modulo 2^64 (as int64), and what they mean."""

    words: Share[Tensor]
    layout: Identifier[str]


@dataclass(frozen=True)
class MaskOrder:
    """Asks a party to mask its reply for one sum."""

    roster: SumRoster
    tag: SumTag


def mask_reply(party: SumParty, reply: Message, order: MaskOrder) -> Masked:
    """The numbers of a reply, masked. Texts, bytes, bools and sparse matrices have no masked sum and are refused."""
    sink = Sink()
    tree = schema(type(reply)).write(reply, sink)
    _check_summable(tree, type(reply).__name__)
    leaves: list[Leaf] = [*sink.tensors, *sink.floats, *sink.integers]
    counts = [len(sink.tensors), len(sink.floats), len(sink.integers)]
    layout = {"tree": tree, "leaves": template_of_leaves(leaves).to_json(), "counts": counts}
    words = party.mask(leaves, order.roster, order.tag)
    return Masked(torch.from_numpy(words.view(np.int64).copy()), json.dumps(layout, separators=(",", ":")))


def unmask(replies: Mapping[PartyId, Masked], order: MaskOrder, reply: type[Message]) -> Message:
    """The sum of all parties' replies; a missing party, another roster or a changed vector is an error, never a wrong sum."""
    layouts = {masked.layout for masked in replies.values()}
    if len(layouts) != 1:
        raise ProtocolError("the parties of a secure sum sent messages of different shape; all must have the same names and sizes")
    server = SumServer(order.roster, order.tag)
    for party, masked in sorted(replies.items()):
        server.add(party, masked.words.numpy().view(np.uint64))
    try:
        layout = json.loads(layouts.pop())
        tensors, floats, integers = layout["counts"]
        template = LeafTemplate.from_json(layout["leaves"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        raise ProtocolError("the layout of a secure sum is malformed") from None
    leaves: list[Any] = server.total(template)
    if len(leaves) != tensors + floats + integers:
        raise ProtocolError("the layout of a secure sum does not fit its numbers")
    source = Source(leaves[:tensors], [], leaves[tensors : tensors + floats], leaves[tensors + floats :])
    total = schema(reply).read(layout["tree"], source)
    if not source.finished():
        raise ProtocolError("the layout of a secure sum does not fit its numbers")
    assert isinstance(total, reply)
    return total


def _check_summable(tree: Json, where: str) -> None:
    """Leaves of a tree are ``t`` (tensor), ``f``, ``i``; anything else carries something that cannot be added up behind masks."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            if key != "":  # the name of the record's type
                _check_summable(item, where)
    elif isinstance(tree, list) and not (tree and tree[0] == "c"):
        for item in tree:
            _check_summable(item, where)
    elif tree not in ("t", "f", "i", None):
        kind = {"b": "a bool", "y": "bytes", "c": "a sparse matrix"}.get(tree[0] if tree else "", "a text")
        raise ProtocolError(f"{where} holds {kind}, which has no masked sum: send tensors and numbers only, or run without secure_sum")
