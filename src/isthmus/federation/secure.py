"""Secure sums behind ``federation.sum`` and ``exchange(..., combine="sum")``: each party masks what it sends, the
receiver adds vectors of words and reads only the total.

The masks are those of `isthmus.privacy.masks`. Once per session every party announces a session key; then a reply's
numbers become one vector modulo 2^64 whose masks cancel in the sum of all. What the vector means (names, shapes, types,
but no value) travels beside it as ``layout``.

Mail is masked in two steps, because masks need to know who else writes to the same receiver: senders hold their mail
and say whom it is for (:class:`MailPlan`), learn the roster of each receiver (:class:`MailOrders`), and only then mask
and send. A sparse matrix is summed over the union of the positions its senders announced among dummies
(`isthmus.privacy.sparse`): whoever relays mail, and the other senders to the same receiver, see where entries may be,
never their values. Mail to oneself is added by the party's own runtime and never leaves it.

In one process keys are not signed: there is nobody to sign for. Between organisations they are, by long-term keys
agreed outside (`isthmus.privacy.keys`); otherwise a server could impersonate all other parties.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import IsthmusError, ProtocolError, RunError
from isthmus.federation.messages import Ciphertext, Count, Identifier, Message, PartyId, Share, Structure
from isthmus.federation.schema import Json, Sink, Source, schema
from isthmus.privacy.flatten import Leaf, LeafTemplate, WordRows, decode_leaves, template_of_leaves
from isthmus.privacy.keys import frame
from isthmus.privacy.masks import CHECK_WORDS, SumParty, SumRoster, SumServer, SumTag
from isthmus.privacy.shamir import SECRET_BYTES
from isthmus.privacy.sparse import announce, place, union_support
from isthmus.privacy.survivors import SurvivorServer, confirm, meet, release, share_secrets

logger = logging.getLogger(__name__)

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
class Sealed(Message):
    """Mail that only its receiver can open. What it is of is said in clear and authenticated with it: type, size, bytes
    by kind, and the call it was sent by."""

    message_type: Identifier[str]
    size: Count[int]
    kinds: Count[Mapping[str, int]]
    sequence: Count[int]
    handler: Identifier[str]
    body: Ciphertext[bytes]


@dataclass(frozen=True)
class MailPlan(Message):
    """Whom a party has mail for, and for every sparse matrix in it the positions that may hold something, dummies among
    them.
    """

    receivers: Identifier[tuple[str, ...]]
    announced: Structure[Mapping[str, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class MailOrders(Message):
    """Who else writes to the receivers of a party's mail, and the positions their sparse matrices are summed over."""

    rosters: Identifier[Mapping[str, tuple[str, ...]]]
    supports: Structure[Mapping[str, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class SharedSecrets(Message):
    """What a party sends before a sum that may lose parties (`isthmus.privacy.survivors`)."""

    boxes: Ciphertext[Mapping[str, bytes]]
    sealed: Ciphertext[bytes]
    digests: Identifier[bytes]


@dataclass(frozen=True)
class ConfirmedGroup(Message):
    """Codes by which a party tells others over whom it takes part in a sum."""

    codes: Identifier[Mapping[str, bytes]]


@dataclass(frozen=True)
class ReleasedShares(Message):
    """Shares that open the masks left in the total of a group, by party: which of its secrets, and the share."""

    shares: Share[Mapping[str, bytes]]


@dataclass(frozen=True)
class SumStepRequest(Message):
    """What a party is told in a step of a sum that may lose parties."""

    group: Identifier[tuple[str, ...]]
    codes: Identifier[Mapping[str, bytes]]
    boxes: Ciphertext[Mapping[str, bytes]]


StepName = Literal["share", "mask", "confirm", "release"]
STEP_REPLIES: dict[StepName, type[Message]] = {
    "share": SharedSecrets,
    "mask": Masked,
    "confirm": ConfirmedGroup,
    "release": ReleasedShares,
}


@dataclass(frozen=True)
class SumStep:
    """A step of a sum that may lose parties. ``request.group``: who is present (mask), or left (confirm)."""

    name: StepName
    request: SumStepRequest = SumStepRequest((), {}, {})


@dataclass(frozen=True)
class MaskOrder:
    """Asks a party to mask a message for one sum. ``supports``: flat positions of each sparse matrix in it; None
    refuses such matrices. ``step``: where the sum may lose parties.
    """

    roster: SumRoster
    tag: SumTag
    supports: tuple[Tensor, ...] | None = None
    step: SumStep | None = None

    def seen_by(self, party: PartyId) -> MaskOrder:
        """The same order with no other keys than this party needs."""
        roster = self.roster.seen_by(party)
        return self if roster is self.roster else replace(self, roster=roster)

    @property
    def runs_handler(self) -> bool:
        """Whether the call is for the message itself, and not for a step before or after it."""
        return self.step is None or self.step.name == "mask"


def take_step(party: SumParty, order: MaskOrder, context: bytes) -> Message:
    """A party's answer to a step in which no handler runs."""
    assert order.step is not None
    asked, tag = order.step.request, order.tag
    if order.step.name == "share":
        secrets = share_secrets(party, order.roster, tag, frame(context))
        return SharedSecrets(secrets.boxes, secrets.sealed, secrets.digests)
    if order.step.name == "confirm":
        return ConfirmedGroup(confirm(party, tag, asked.group))
    shares = release(party, tag, asked.codes, asked.boxes)
    return ReleasedShares(
        {owner: bytes([which]) + number.to_bytes(SECRET_BYTES, "big") for owner, (which, number) in shares.items()}
    )


def read_shares(party: PartyId, message: ReleasedShares) -> dict[PartyId, tuple[int, int]]:
    """The shares in a message."""
    if any(len(share) != 1 + SECRET_BYTES for share in message.shares.values()):
        raise ProtocolError(f"{party} sent shares that are cut short or too long")
    return {owner: (share[0], int.from_bytes(share[1:], "big")) for owner, share in message.shares.items()}


@dataclass(frozen=True)
class MailOrder:
    """What a party's runtime does with summed mail.

    ``held`` is the sequence of the sending: without ``orders`` the handler's mail is held under it and a plan returned;
    a sender's ``orders`` (by receiver) have it masked; a receiver's own order has what arrived unmasked and its mail to
    itself added.
    """

    held: int
    orders: Mapping[PartyId, MaskOrder] | None = None


def mask_reply(
    party: SumParty, reply: Message, order: MaskOrder, context: bytes = b"", rows: WordRows | None = None
) -> Masked:
    """The numbers of a reply, masked. Texts, bytes and bools have no masked sum and are refused; so are sparse matrices
    without support.

    Args:
        context: What all parties of the sum have in common beside the order (`Watch.asked_so_far`). Masks cancel only
            between parties with the same, and with the same supports: over others a party's numbers would stand alone.
    """
    if order.step is not None:
        meet(party, order.tag, order.step.request.group)
    sink = Sink()
    tree = schema(type(reply)).write(reply.summand(), sink)
    _check_summable(tree, type(reply).__name__, sparse=order.supports is not None)
    tensors = sink.tensors if order.supports is None else _placed(sink.tensors, tree, order.supports)
    leaves: list[Leaf] = [*tensors, *sink.floats, *sink.integers]
    counts = [len(tensors), len(sink.floats), len(sink.integers)]
    layout = {"tree": tree, "leaves": template_of_leaves([*leaves, 0]).to_json(), "counts": counts}
    words = _masked_words(party, leaves, order, frame(context, *_bytes_of(order.supports or ())), rows)
    return Masked(torch.from_numpy(words.view(np.int64)), json.dumps(layout, separators=(",", ":")))


def _masked_words(
    party: SumParty, leaves: Sequence[Leaf], order: MaskOrder, context: bytes, rows: WordRows | None
) -> NDArray[np.uint64]:
    """Numbers, masked, and whether they can be summed at all. Where they cannot, only the total says so: a party that
    failed instead would tell by itself, under a request chosen for that, how large its numbers are.
    """
    try:
        return party.mask([*leaves, 0], order.roster, order.tag, context=context, rows=rows)
    except ProtocolError:  # the order is refused, whatever the numbers are
        raise
    except RunError as error:
        logger.warning("%s takes part in a sum with zeros: %s", party.name, error)
        zeros: list[Leaf] = [torch.zeros_like(leaf) if isinstance(leaf, Tensor) else type(leaf)(0) for leaf in leaves]
        return party.mask([*zeros, 1], order.roster, order.tag, context=context, rows=rows)


def _bytes_of(supports: Iterable[Tensor]) -> list[bytes]:
    return [hashlib.sha256(support.contiguous().numpy().tobytes()).digest() for support in supports]


def unmask(replies: Mapping[PartyId, Masked], order: MaskOrder, reply: type[Message]) -> Message:
    """The sum of all parties' replies; a missing party, another roster or a changed vector is an error, never a wrong
    sum.
    """
    server = SumServer(order.roster, order.tag)
    layout = add_masked(server, replies)
    words = server.total_words()  # before anything else: says who is missing
    return _read(words, layout, reply, len(order.roster), order.supports)


def add_masked(server: SumServer, replies: Mapping[PartyId, Masked]) -> str:
    """Add up masked messages; returns what all of them say they mean."""
    layouts = {masked.layout for masked in replies.values()}
    if len(layouts) > 1:
        raise ProtocolError(
            "the parties of a secure sum sent messages of different shape; all must have the same names and sizes"
        )
    for party, masked in sorted(replies.items()):
        server.add(party, masked.words.numpy().view(np.uint64))
    return layouts.pop() if layouts else ""


def total_of_survivors(server: SurvivorServer, layout: str, reply: type[Message]) -> Message:
    """The sum over those who are left."""
    return _read(server.total_words(), layout, reply, len(server.survivors), None)


def as_if_unmasked(masked: Masked, reply: type[Message]) -> Message | None:
    """What one masked message says if its masks are missing; None if that is no message at all."""
    words = masked.words.numpy().view(np.uint64)[:-CHECK_WORDS]
    try:
        return _read(words, masked.layout, reply, 1, None, usable=True)
    except IsthmusError:
        return None


def _read(
    words: NDArray[np.uint64],
    text: str,
    reply: type[Message],
    parties: int,
    supports: tuple[Tensor, ...] | None,
    *,
    usable: bool = False,
) -> Message:
    """A message from the words of a sum and its layout; ``usable``: whatever the parties say of their numbers."""
    try:
        layout = json.loads(text)
        tensors, floats, integers = layout["counts"]
        template = LeafTemplate.from_json(layout["leaves"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ProtocolError("the layout of a secure sum is malformed") from None
    leaves: list[Any] = decode_leaves(words, template, parties=parties)
    if len(leaves) != tensors + floats + integers + 1:
        raise ProtocolError("the layout of a secure sum does not fit its numbers")
    unusable = leaves.pop()
    if unusable and not usable:
        raise RunError(
            f"{unusable} of the {parties} parties of a secure sum hold numbers that are too large for it, NaN or "
            "infinite: training has diverged; lower lr or check the features (their logs say more)"
        )
    dense = leaves[:tensors] if supports is None else _gathered(leaves[:tensors], layout["tree"], supports)
    source = Source(dense, [], leaves[tensors : tensors + floats], leaves[tensors + floats :])
    total = schema(reply).read(layout["tree"], source)
    if not source.finished():
        raise ProtocolError("the layout of a secure sum does not fit its numbers")
    assert isinstance(total, reply)
    return total


Dummies = Callable[[PartyId, Message], Sequence[Tensor]]
"""Positions beside its entries that a sender announces for each sparse matrix of its mail to a receiver."""


def no_dummies(receiver: PartyId, content: Message) -> Sequence[Tensor]:
    return ()


def plan_mail(mail: Mapping[PartyId, Message], sender: PartyId, dummies: Dummies = no_dummies) -> MailPlan:
    """What a sender says about the mail it holds for others."""
    others = {receiver: content for receiver, content in sorted(mail.items()) if receiver != sender}
    announced = {receiver: _announced(content, dummies(receiver, content)) for receiver, content in others.items()}
    return MailPlan(tuple(others), {receiver: lists for receiver, lists in announced.items() if lists})


def join_supports(plans: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The common support of every sparse matrix of one receiver's mail. Sizes are checked by the parties, who know the
    shapes.
    """
    lists = list(plans)
    if len({len(each) for each in lists}) != 1:
        raise ProtocolError(
            "the senders of one receiver's mail sent messages of different shape; all must have the same names and "
            "sizes"
        )
    return tuple(
        torch.from_numpy(union_support([each.numpy() for each in column], _MOST)) for column in zip(*lists, strict=True)
    )


_MOST = 2**62


def _announced(message: Message, dummies: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    sink = Sink()
    tree = schema(type(message)).write(message, sink)
    found: list[Tensor] = []
    for at, shape in _tensor_places(tree):
        if shape is not None:
            positions = _positions(sink.tensors[at : at + 3], shape)
            if dummies:
                positions = torch.cat([positions, dummies[len(found)]])
            found.append(torch.from_numpy(announce(positions.numpy(), _size(shape))))
    return tuple(found)


def _placed(tensors: Sequence[Tensor], tree: Json, supports: Sequence[Tensor]) -> list[Tensor]:
    """A message's tensors with every sparse matrix as a dense vector over its support."""
    placed: list[Tensor] = []
    left = list(supports)
    for at, shape in _tensor_places(tree):
        if shape is None:
            placed.append(tensors[at])
            continue
        values, support = tensors[at], left.pop(0)
        if not values.is_floating_point():
            raise ProtocolError(
                "sparse matrices are summed behind masks as floats: send float values, or run without secure_sum"
            )
        _check_support(support, shape)
        over = place(_positions(tensors[at : at + 3], shape).numpy(), values.detach().double().numpy(), support.numpy())
        placed.append(torch.from_numpy(over).to(values.dtype))
    return placed


def _gathered(tensors: Sequence[Tensor], tree: Json, supports: Sequence[Tensor]) -> list[Tensor]:
    """The reverse for the total: values over a support become values, columns and row pointers; positions with nothing
    in them go.
    """
    gathered: list[Tensor] = []
    left, given = list(supports), iter(tensors)
    for _, shape in _tensor_places(tree):
        values = next(given, None)
        if values is None or (shape is not None and not left):
            raise ProtocolError("the layout of a secure sum does not fit its numbers")
        if shape is None:
            gathered.append(values)
            continue
        support = left.pop(0)
        _check_support(support, shape)
        if values.shape != support.shape:
            raise ProtocolError("the layout of a secure sum does not fit its numbers")
        kept = values != 0
        positions, columns = support[kept], max(1, shape[1])
        pointers = torch.zeros(shape[0] + 1, dtype=torch.int64)
        pointers[1:] = torch.bincount(positions // columns, minlength=shape[0]).cumsum(0)
        gathered += [values[kept], positions % columns, pointers]
    return gathered


def _tensor_places(tree: Json) -> list[tuple[int, tuple[int, int] | None]]:
    """Tensors of a tree in order: index of the first of each in the sink, and its shape if it is a sparse matrix (three
    tensors there).
    """
    places: list[tuple[int, tuple[int, int] | None]] = []
    at = 0

    def walk(node: Json) -> None:
        nonlocal at
        if isinstance(node, dict):
            for key, item in node.items():
                if key != "":
                    walk(item)
        elif isinstance(node, list) and node and node[0] == "c":
            places.append((at, (int(node[1]), int(node[2]))))
            at += 3
        elif isinstance(node, list):
            for item in node:
                walk(item)
        elif node == "t":
            places.append((at, None))
            at += 1

    walk(tree)
    return places


def _positions(parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Flat positions of a CSR matrix given as values, columns, row pointers."""
    _, columns, pointers = parts
    rows = torch.repeat_interleave(torch.arange(shape[0]), pointers.long().diff())
    return rows * shape[1] + columns.long()


def _size(shape: tuple[int, int]) -> int:
    if shape[0] * shape[1] >= _MOST:
        raise ProtocolError(
            f"a sparse matrix of shape {shape} is too large for a secure sum: send fewer rows or columns"
        )
    return shape[0] * shape[1]


def _check_support(support: Tensor, shape: tuple[int, int]) -> None:
    if support.numel() and int(support.max()) >= _size(shape):
        raise ProtocolError(
            "the senders of one receiver's mail sent messages of different shape; all must have the same names and "
            "sizes"
        )


def _check_summable(tree: Json, where: str, sparse: bool = False) -> None:
    """Leaves of a tree are ``t`` (tensor), ``f``, ``i``; anything else carries something that cannot be added up behind
    masks.
    """
    if isinstance(tree, dict):
        for key, item in tree.items():
            if key != "":  # the name of the record's type
                _check_summable(item, where, sparse)
    elif isinstance(tree, list) and tree and tree[0] == "c" and sparse:
        return
    elif isinstance(tree, list) and not (tree and tree[0] == "c"):
        for item in tree:
            _check_summable(item, where, sparse)
    elif tree not in ("t", "f", "i", None):
        kind = {"b": "a bool", "y": "bytes", "c": "a sparse matrix"}.get(tree[0] if tree else "", "a text")
        raise ProtocolError(
            f"{where} holds {kind}, which has no masked sum: send tensors and numbers only, or run without secure_sum"
        )
