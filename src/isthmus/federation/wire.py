"""Calls and their outcomes as bytes, for engines whose parties live in another process.

A *frame* is a few byte strings: a header and, behind it, every message once, encoded by `codec` exactly as the ledger
counts it. The header is JSON, columns with an entry per call that point into the messages; a broadcast is therefore one
message however many parties get it. Nothing here is pickled, and what is read is decided by the receiver:

- a host reads calls against its own :class:`~isthmus.federation.roles.RoleTable`, so an unknown handler is refused
  before a message is looked at, and a message is decoded as exactly the type its handler declares;
- a server reads outcomes against the calls it made: who must answer, and with which type, is known before the bytes
  arrive.

Besides declared messages the framework sends a few of its own (:data:`STAND_INS`): masked numbers, sealed mail, and
plans of mail. A frame is a tuple, so that an engine may carry its parts apart; :func:`pack` and :func:`unpack` make one
buffer of it and back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any, TypeVar, get_args

from torch import Tensor

from isthmus.errors import ProtocolError, RunError, unknown
from isthmus.federation import codec
from isthmus.federation.codec import LIMITS, Buffer, Limits, Part, Pieces
from isthmus.federation.interface import Failure, FailureKind
from isthmus.federation.messages import Message, PartyId
from isthmus.federation.party import Combine, Invocation, Outcome, Parcel, Turn
from isthmus.federation.roles import RoleTable, Signature
from isthmus.federation.secure import (
    STEP_REPLIES,
    ConfirmedGroup,
    MailOrder,
    MailPlan,
    Masked,
    MaskOrder,
    ReleasedShares,
    Sealed,
    SharedSecrets,
    SumStep,
    SumStepRequest,
)
from isthmus.privacy.masks import SumRoster, SumTag
from isthmus.records import Record

Frame = tuple[Part, ...]
Whole = tuple[Buffer, ...]
"""A frame none of whose parts is in pieces."""
R = TypeVar("R", bound=Record)
S = TypeVar("S")

STAND_INS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Masked, MailPlan, Sealed, SharedSecrets, ConfirmedGroup, ReleasedShares)
}
"""Framework messages that may stand where a handler declares one of the method's, by the name a header gives them."""
MAGIC = b"isthmus1"
NONE = -1
LARGE = 1 << 16


@dataclass(frozen=True)
class _Mask(Record):
    """A :class:`~isthmus.federation.secure.MaskOrder` that travels."""

    keys: Mapping[str, bytes]
    chosen: int
    names: tuple[str, ...]
    run: str
    phase: str
    round: int
    sequence: int
    handler: str
    attempt: int
    receiver: str
    request: str
    supports: tuple[Tensor, ...] | None
    at_least: int = 0
    step: str = ""
    told: SumStepRequest | None = None

    @classmethod
    def of(cls, order: MaskOrder) -> _Mask:
        roster, step = order.roster, order.step
        return cls(
            keys=dict(roster.keys),
            chosen=roster.chosen,
            names=roster.names,
            supports=order.supports,
            at_least=roster.at_least,
            step="" if step is None else step.name,
            told=None if step is None else step.request,
            **asdict(order.tag),
        )

    def order(self) -> MaskOrder:
        tag = SumTag(**{each.name: getattr(self, each.name) for each in fields(SumTag)})
        step = None
        for name in STEP_REPLIES:
            if self.step == name and self.told is not None:
                step = SumStep(name, self.told)
        if (self.step or self.told) and step is None:
            raise unknown("step of a sum", self.step, STEP_REPLIES, error=ProtocolError)
        return MaskOrder(SumRoster(self.keys, self.chosen, self.names, self.at_least), tag, self.supports, step)


@dataclass(frozen=True)
class _Mail(Record):
    """A :class:`~isthmus.federation.secure.MailOrder` that travels."""

    held: int
    orders: Mapping[str, _Mask] | None

    @classmethod
    def of(cls, order: MailOrder) -> _Mail:
        return cls(
            order.held, None if order.orders is None else {party: _Mask.of(one) for party, one in order.orders.items()}
        )

    def order(self) -> MailOrder:
        return MailOrder(
            self.held, None if self.orders is None else {party: one.order() for party, one in self.orders.items()}
        )


@dataclass(frozen=True)
class _Parcels:
    """Mail: the other end, what stands for its declared type (or nothing), the call it belongs to and the part with its
    content.
    """

    other: list[str]
    stand_in: list[str]
    call: list[int]
    content: list[int]


@dataclass(frozen=True)
class _Calls:
    """Header of calls: one handler, one turn, one sequence. ``argument``, ``mask``, ``mail`` name each call's parts, or
    ``NONE``.
    """

    role: str
    handler: str
    incarnation: int
    phase: str
    round: int
    step: int
    sequence: int
    combine: str
    parties: list[str]
    argument: list[int]
    mask: list[int]
    mail: list[int]
    parcels: _Parcels | None


@dataclass(frozen=True)
class _Outcomes:
    """Header of outcomes. ``stand_in`` names the type of a reply that is not the declared one; ``failed`` has kind,
    detail and text of each failure, three entries a party; ``senders`` are those that answered with mail, be it none.
    """

    parties: list[str]
    reply: list[int]
    stand_in: list[str]
    failed: list[str]
    failures: list[str]
    senders: list[str]
    parcels: _Parcels | None


class Writer:
    """Encodes messages once each. Give the same one to several frames of a broadcast, and it is still encoded once."""

    def __init__(self) -> None:
        self._encoded: dict[int, tuple[object, Part]] = {}

    def encode(self, source: S, form: Callable[[S], Record]) -> Part:
        """The bytes of an object in the form that travels; made at most once."""
        key = id(source)
        if key not in self._encoded:
            self._encoded[key] = source, codec.encode_large(form(source))  # the object is kept: its id stays its own
        return self._encoded[key][1]


class _Parts:
    """Messages behind a header, each once."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.data, self._at = writer, list[Part](), dict[int, int]()

    def add(self, source: S | None, form: Callable[[S], Record]) -> int:
        if source is None:
            return NONE
        if id(source) not in self._at:
            self.data.append(self.writer.encode(source, form))
            self._at[id(source)] = len(self.data)  # part 0 is the header
        return self._at[id(source)]


# -- calls -----------------------------------------------------------------------------------------


def encode_calls(calls: Sequence[Invocation], writer: Writer | None = None) -> Frame:
    """Calls of one handler, one per party."""
    first = calls[0]
    if any(
        (c.role, c.handler, c.turn, c.sequence, c.combine)
        != (first.role, first.handler, first.turn, first.sequence, first.combine)
        or (c.parcels is None) != (first.parcels is None)
        for c in calls
    ):
        raise ValueError("calls of one frame must be of one handler, turn and sequence")
    parts = _Parts(writer or Writer())
    arguments = [parts.add(call.argument, _itself) for call in calls]
    masks = [parts.add(call.mask, _Mask.of) for call in calls]
    mails = [parts.add(call.mail, _Mail.of) for call in calls]
    parcels = None
    if first.parcels is not None:
        mail = [(k, parcel.sender, parcel.content) for k, call in enumerate(calls) for parcel in call.parcels or ()]
        parcels = _parcels(mail, parts)
    turn = first.turn
    header = _Calls(
        first.role,
        first.handler,
        turn.incarnation,
        turn.phase,
        turn.round,
        turn.step,
        first.sequence,
        first.combine,
        [call.party for call in calls],
        arguments,
        masks,
        mails,
        parcels,
    )
    return _write_header(header), *parts.data


def decode_calls(frame: Frame, table: RoleTable, limits: Limits = LIMITS) -> list[Invocation]:
    """Read calls at a host. An unknown handler, a message of another type, or anything malformed is a
    :class:`ProtocolError`.
    """
    reader = _Reader(frame, limits)
    header = reader.header(_Calls)
    signature = table.signature(header.role, header.handler)  # the allow-list, before anything else is read
    if header.combine not in get_args(Combine):
        raise ProtocolError(f"malformed call: combine={header.combine!r}")
    parties = header.parties
    if not parties or len(set(parties)) != len(parties):
        raise ProtocolError("malformed call: it must name at least one party, and each once")
    n = len(parties)
    arguments, masks, mails = header.argument, header.mask, header.mail
    if not len(arguments) == len(masks) == len(mails) == n:
        raise ProtocolError("malformed call: its columns do not fit")
    turn = Turn(header.incarnation, header.phase, header.round, header.step)
    inbox: list[list[Parcel]] = [[] for _ in parties]
    for k, sender, content in (
        reader.parcels(header.parcels, n, signature.request) if header.parcels is not None else ()
    ):
        inbox[k].append(Parcel(sender, parties[k], content))
    calls = [
        Invocation(
            party,
            header.role,
            header.handler,
            turn,
            header.sequence,
            combine="sum" if header.combine == "sum" else "each",
            argument=reader.message(arguments[k], _declared(signature.request, header.handler, arguments[k])),
            parcels=tuple(inbox[k]) if header.parcels is not None else None,
            mask=mask.order() if (mask := reader.part(masks[k], _Mask)) is not None else None,
            mail=mail.order() if (mail := reader.part(mails[k], _Mail)) is not None else None,
        )
        for k, party in enumerate(parties)
    ]
    reader.finish()
    return calls


# -- outcomes --------------------------------------------------------------------------------------


def encode_outcomes(outcomes: Mapping[PartyId, Outcome], *, explain: bool = False) -> Frame:
    """What became of calls. ``explain`` adds the texts of errors: only inside one trust domain, a text may hold
    data.
    """
    parts = _Parts(Writer())
    replies, stand_ins, senders = list[int](), list[str](), list[PartyId]()
    failed, failures = list[PartyId](), list[str]()
    mail: list[tuple[int, PartyId, Message]] = []
    for k, (party, outcome) in enumerate(outcomes.items()):
        try:
            contents = [parcel.content for parcel in outcome] if isinstance(outcome, tuple) else [outcome]
            for content in contents:
                if isinstance(content, Message):
                    parts.writer.encode(content, _itself)
        except ProtocolError as error:  # the right type with wrong contents: this party's failure, nobody else's
            outcome = Failure("protocol", type(error).__name__, error)
        if isinstance(outcome, Failure):
            failed.append(party)
            failures += [outcome.kind, outcome.detail, str(outcome.cause or "") if explain else ""]
        elif isinstance(outcome, tuple):
            senders.append(party)
            mail += [(k, parcel.receiver, parcel.content) for parcel in outcome]
        replies.append(parts.add(outcome, _itself) if isinstance(outcome, Message) else NONE)
        stand_ins.append(_stand_in(outcome) if isinstance(outcome, Message) else "")
    header = _Outcomes(
        list(outcomes), replies, stand_ins, failed, failures, senders, _parcels(mail, parts) if mail else None
    )
    return _write_header(header), *parts.data


def decode_outcomes(
    frame: Frame, calls: Sequence[Invocation], table: RoleTable, limits: Limits = LIMITS
) -> dict[PartyId, Outcome]:
    """Read outcomes where the calls were made: exactly the called parties answer, each with what its call may give."""
    reader = _Reader(frame, limits)
    header = reader.header(_Outcomes)
    asked = {call.party: call for call in calls}
    if set(header.parties) != set(asked) or len(header.parties) != len(asked):
        raise ProtocolError("malformed outcome: other parties answered than were called")
    parties, n = header.parties, len(header.parties)
    named = {*header.senders, *header.failed}
    if (
        not len(header.stand_in) == len(header.reply) == n
        or len(header.failures) != 3 * len(header.failed)
        or not named <= set(asked)
    ):
        raise ProtocolError("malformed outcome: its columns do not fit")
    failures = {party: _failure(*header.failures[3 * k : 3 * k + 3]) for k, party in enumerate(header.failed)}
    senders = set(header.senders)
    signature = table.signature(calls[0].role, calls[0].handler)
    outcomes: dict[PartyId, Outcome] = {}
    for k, party in enumerate(parties):
        at = header.reply[k]
        if party in failures:
            outcomes[party] = failures[party]
        elif party in senders:
            outcomes[party] = ()
        else:
            outcomes[party] = reader.message(at, _replied(header.stand_in[k], signature, asked[party], at))
    for k, receiver, content in (
        reader.parcels(header.parcels, n, signature.reply) if header.parcels is not None else ()
    ):
        sent = outcomes[parties[k]]
        if not isinstance(sent, tuple):
            raise ProtocolError("malformed outcome: mail of a party that sent none")
        outcomes[parties[k]] = (*sent, Parcel(parties[k], receiver, content))
    if senders and not signature.sends:
        raise ProtocolError(f"malformed outcome: {calls[0].handler} sends no mail")
    reader.finish()
    return outcomes


def _replied(stand_in: str, signature: Signature, call: Invocation, at: int) -> type[Message] | None:
    """The type a reply to this call may have."""
    wanted: type[Message] | None = signature.reply
    if call.mask is not None:
        wanted = Masked if call.mask.step is None else STEP_REPLIES[call.mask.step.name]
    elif call.mail is not None and call.mail.orders is None:
        wanted = MailPlan
    if (STAND_INS.get(stand_in) if stand_in else signature.reply) is not wanted or (at == NONE) != (wanted is None):
        raise ProtocolError(
            f"malformed outcome: {call.handler} did not answer with {wanted.__name__ if wanted else 'nothing'}"
        )
    return wanted


def _failure(kind: str, detail: str, text: str) -> Failure:
    for known in get_args(FailureKind):
        if kind == known:
            return Failure(known, detail[:200], RunError(text) if text else None)
    raise unknown("kind of failure", kind, get_args(FailureKind), error=ProtocolError)


# -- shared ----------------------------------------------------------------------------------------


def _parcels(mail: Sequence[tuple[int, PartyId, Message]], parts: _Parts) -> _Parcels:
    contents = [parts.add(content, _itself) for _, _, content in mail]
    return _Parcels(
        [other for _, other, _ in mail],
        [_stand_in(content) for _, _, content in mail],
        [k for k, _, _ in mail],
        contents,
    )


def _itself(message: Message) -> Message:
    return message


def _stand_in(message: Message) -> str:
    return next((name for name, kind in STAND_INS.items() if type(message) is kind), "")


def _declared(wanted: type[Message] | None, handler: str, at: int) -> type[Message] | None:
    if wanted is None and at != NONE:
        raise ProtocolError(f"handler {handler} takes no message, got one")
    return wanted


def _write_header(header: object) -> bytes:
    return json.dumps(asdict(header), separators=(",", ":")).encode()  # type: ignore[call-overload]


H = TypeVar("H")
_COLUMNS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: type(value) is str,
    "int": lambda value: type(value) is int and -(2**63) <= value < 2**63,
    "list[str]": lambda value: type(value) is list and all(type(one) is str for one in value),
    "list[int]": lambda value: type(value) is list and all(type(one) is int for one in value),
}


def _read_header(data: Part, kind: type[H], limits: Limits) -> H:
    """A header of exactly this form."""
    if isinstance(data, Pieces):
        raise ProtocolError("malformed frame: its header is in pieces")
    if len(data) > limits.max_header:
        raise ProtocolError(f"a header of {len(data)} bytes exceeds the limit of {limits.max_header}")
    try:
        raw = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise ProtocolError("malformed frame: its header is no JSON") from None
    return _columns(raw, kind)


def _columns(raw: Any, kind: type[H]) -> H:
    if type(raw) is not dict or raw.keys() != kind.__dataclass_fields__.keys():  # type: ignore[attr-defined]
        raise ProtocolError("malformed frame: its header has other columns")
    for name, column in kind.__dataclass_fields__.items():  # type: ignore[attr-defined]
        if column.type == "_Parcels | None":
            raw[name] = None if raw[name] is None else _columns(raw[name], _Parcels)
        elif not _COLUMNS[column.type](raw[name]):
            raise ProtocolError(f"malformed frame: {name} in its header is no {column.type}")
    return kind(**raw)


class _Reader:
    """The parts of a frame, each decoded once as one type, and every one of them used."""

    def __init__(self, frame: Frame, limits: Limits) -> None:
        if not frame or len(frame) > limits.max_tensors or sum(map(len, frame)) > limits.max_bytes:
            raise ProtocolError(
                f"frame has no parts, more than {limits.max_tensors}, or more than {limits.max_bytes} bytes"
            )
        self.frame, self.limits = frame, limits
        self._read: dict[int, Record] = {}

    def header(self, kind: type[H]) -> H:
        return _read_header(self.frame[0], kind, self.limits)

    def part(self, at: int, kind: type[R]) -> R | None:
        if at == NONE:
            return None
        if not 0 < at < len(self.frame):
            raise ProtocolError("malformed frame: it points to a part it does not have")
        if at not in self._read:
            self._read[at] = codec.decode(self.frame[at], kind, self.limits)
        found = self._read[at]
        if type(found) is not kind:
            raise ProtocolError("malformed frame: one part is used as two types")
        return found

    def message(self, at: int, kind: type[Message] | None) -> Message | None:
        return None if kind is None else self.part(at, kind)

    def parcels(
        self, columns: _Parcels, calls: int, declared: type[Message] | None
    ) -> list[tuple[int, PartyId, Message]]:
        n = len(columns.other)
        if not len(columns.stand_in) == len(columns.call) == len(columns.content) == n:
            raise ProtocolError("malformed frame: mail has columns of different length")
        mail = []
        for k, at, other, stand_in in zip(columns.call, columns.content, columns.other, columns.stand_in, strict=True):
            kind = STAND_INS.get(stand_in) if stand_in else declared
            content = self.part(at, kind) if kind is not None else None
            if content is None or not 0 <= k < calls:
                raise ProtocolError("malformed frame: mail without content, of an unknown type, or of no call")
            mail.append((k, other, content))
        return mail

    def finish(self) -> None:
        if len(self._read) != len(self.frame) - 1:
            raise ProtocolError("malformed frame: it has parts nobody refers to")


def pack(frame: Frame) -> bytes:
    """One buffer: magic, number of parts, their lengths (8 bytes each, little-endian), the parts."""
    lengths = [len(frame), *map(len, frame)]
    stretches = (part.stretches if isinstance(part, Pieces) else (part,) for part in frame)
    return b"".join([MAGIC, *(length.to_bytes(8, "little") for length in lengths), *chain.from_iterable(stretches)])


def unpack(data: bytes, limits: Limits = LIMITS) -> Whole:
    """The reverse; truncated, oversized or trailing bytes are refused."""
    if len(data) > limits.max_bytes:
        raise ProtocolError(f"frame of {len(data)} bytes exceeds the limit of {limits.max_bytes}")
    start = len(MAGIC) + 8
    if len(data) < start or data[: len(MAGIC)] != MAGIC:
        raise ProtocolError("these bytes are no frame of isthmus")
    count = int.from_bytes(data[len(MAGIC) : start], "little")
    if not 0 < count <= min(limits.max_tensors, (len(data) - start) // 8):
        raise ProtocolError("frame is truncated")
    lengths = [int.from_bytes(data[start + 8 * k : start + 8 * k + 8], "little") for k in range(count)]
    at = start + 8 * count
    if at + sum(lengths) != len(data):
        raise ProtocolError("frame is truncated or has bytes left over")
    parts: list[Buffer] = []
    view = memoryview(data)
    for length in lengths:
        parts.append(view[at : at + length] if length > LARGE else data[at : at + length])  # a large part is not copied
        at += length
    return tuple(parts)
