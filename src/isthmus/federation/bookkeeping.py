"""What is recorded and checked about every call: the ledger and the transcript, quorum, and that numbers are finite."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from isthmus.errors import ProtocolError, RunError
from isthmus.federation import codec
from isthmus.federation.interface import Failure, QuorumError, Replies, Stacked
from isthmus.federation.ledger import Entry, Ledger, Protection
from isthmus.federation.messages import SERVER, ClientId, Kind, Message, PartyId, client_of, role_of
from isthmus.federation.party import Combine, Invocation, Outcome, Parcel, Turn
from isthmus.federation.script_recorder import ScriptRecorder
from isthmus.federation.secure import KEYS_PHASE, Sealed, SumKey, SumKeys
from isthmus.federation.transcript import Transcript
from isthmus.federation.watch import SessionWatch
from isthmus.privacy.masks import SumRoster
from isthmus.privacy.sealed_message import OVERHEAD


class Clock:
    """Turn and sequence shared by all tiers of a session."""

    def __init__(
        self,
        incarnation: int,
        seed: int,
        secure: bool = False,
        transcript: Transcript | None = None,
        watch: SessionWatch | ScriptRecorder | None = None,
    ) -> None:
        self.seed, self.secure, self.transcript, self.watch = seed, secure, transcript, watch
        self.run = secrets.token_hex(16)  # of this process: keys of secure sums belong to it
        self.sum_keys: dict[str, dict[PartyId, bytes]] = {}
        self.rosters: dict[tuple[str, tuple[PartyId, ...], int, int], SumRoster] = {}
        self.absent: dict[ClientId, int] = {}
        """Clients that were lost, and the step in which."""
        self.left_out: dict[str, tuple[PartyId, ...]] = {}
        """Of each sum that may lose parties, by its content, who was not in it when it was first confirmed."""
        self.keep_left_out: Callable[[str, Sequence[PartyId]], None] | None = None
        self.least: int | None = None
        self.deadline: float | None = None
        self.incarnation = incarnation
        self.turn = Turn(incarnation, "init", 0)
        self.sequence = 0

    def begin(self, phase: str, round: int, step: int = 0) -> None:
        self.turn = Turn(self.incarnation, phase, round, step)
        self.sequence = 0
        if self.watch is not None:
            self.watch.begin()

    def next(self) -> int:
        self.sequence += 1
        return self.sequence

    def confirmed(self, content: str, left_out: Sequence[PartyId]) -> None:
        """From now on this sum is over everybody but these, also when its round is run again. Kept before parties
        confirm it: they never confirm another group.
        """
        if content not in self.left_out:
            self.left_out[content] = tuple(left_out)
            if self.keep_left_out is not None:
                self.keep_left_out(content, left_out)

    def lose(self, parties: Iterable[PartyId]) -> None:
        """These did not answer: the round goes on without them."""
        for party in parties:
            self.absent.setdefault(client_of(party), self.turn.step)


class Bookkeeping:
    """The entries that the calls of a session leave in its ledger, and in its transcript if there is one."""

    def __init__(self, clock: Clock, ledger: Ledger) -> None:
        self.clock, self.ledger = clock, ledger

    def requests(self, handler: str, arguments: Mapping[PartyId, Message | None], *, broadcast: bool) -> None:
        """What the server sends with a call; a broadcast is measured once."""
        messages = [(party, argument) for party, argument in arguments.items() if argument is not None]
        if not messages:
            return
        if broadcast:
            receivers = [party for party, _ in messages]
            measure = codec.measure(messages[0][1])
            self._alike(handler, "clear", type(messages[0][1]), measure, [SERVER], receivers, len(receivers))
        else:
            self.batch(handler, "clear", [(SERVER, party, message) for party, message in messages])

    def replies(self, handler: str, outcome: Mapping[PartyId, Outcome] | Stacked[Any], protection: Protection) -> None:
        """What the server receives for a call."""
        if isinstance(outcome, Stacked):
            measure, parties = codec.measure_row(outcome.message), outcome.parties
            self._alike(handler, protection, type(outcome.message), measure, parties, [SERVER], len(parties))
            return
        replies = [(party, SERVER, reply) for party, reply in outcome.items() if isinstance(reply, Message)]
        self.batch(handler, protection, replies)

    def mail(self, handler: str, parcels: Sequence[Parcel], combine: Combine, declared: type[Message]) -> None:
        """Mail between parties; what a party sends to itself is no traffic."""
        by_roles: dict[tuple[str, str], list[tuple[PartyId, PartyId, Message]]] = {}
        for parcel in parcels:
            if parcel.sender != parcel.receiver:
                roles = role_of(parcel.sender), role_of(parcel.receiver)
                by_roles.setdefault(roles, []).append((parcel.sender, parcel.receiver, parcel.content))
        for batch in by_roles.values():
            protection: Protection = "summed" if combine == "sum" else "clear"
            if combine == "each" and all(isinstance(message, Sealed) for _, _, message in batch):
                protection = "sealed"
            self.batch(handler, protection, batch, declared)

    def mail_to_all(self, handler: str, messages: Mapping[PartyId, Message]) -> None:
        """Summed mail from every party to every other; of one size to the same receiver."""
        found = {receiver: codec.measure(message) for receiver, message in sorted(messages.items())}
        pairs = [(sender, receiver) for sender in found for receiver in found if sender != receiver]
        if not pairs:
            return
        kinds: dict[str, int] = {}
        for _, by_kind in found.values():
            for kind, size in by_kind.items():
                kinds[kind] = kinds.get(kind, 0) + size * (len(found) - 1)
        senders, receivers = zip(*pairs, strict=True)
        message = type(next(iter(messages.values())))
        self._entry(message, handler, "summed", senders, receivers, [found[r][0] for _, r in pairs], kinds)

    def masked(
        self,
        handler: str,
        declared: type[Message],
        senders: Sequence[PartyId],
        receivers: Sequence[PartyId],
        messages: Sequence[Message],
    ) -> None:
        """Masked messages; ``declared`` is their type before masking."""
        sizes = [measured(message)[0] for message in messages]
        self._entry(declared, handler, "masked", senders, receivers, sizes, {Kind.SHARE: sum(sizes)})

    def keys(self, roster: SumRoster) -> None:
        """The session keys of secure sums: from every party, and to every party its own and its neighbours'."""
        parties, count = roster.parties, len(roster)
        up, views = codec.size(SumKey(b"0" * 32)), [roster.seen_by(party).keys for party in parties]
        down = tuple(codec.size(SumKeys(keys)) for keys in views)
        place = {"attempt": self.clock.incarnation, "phase": KEYS_PHASE, "round": 0, "sequence": 0, "handler": "keys"}
        columns: dict[str, Any] = {**place, "protection": "clear"}
        given, handed_out = {Kind.IDENTIFIER: 32 * count}, {Kind.IDENTIFIER: 32 * sum(map(len, views))}
        self.ledger.add(
            Entry.of(SumKey, sender=parties, receiver=(SERVER,), bytes=(up,) * count, by_kind=given, **columns)
        )
        self.ledger.add(
            Entry.of(SumKeys, sender=(SERVER,), receiver=parties, bytes=down, by_kind=handed_out, **columns)
        )

    def batch(
        self,
        handler: str,
        protection: Protection,
        batch: Sequence[tuple[PartyId, PartyId, Message]],
        declared: type[Message] | None = None,
    ) -> None:
        """Messages of one type as (sender, receiver, message). ``declared``: their type where they are sealed."""
        if not batch:
            return
        sizes, by_kind = [], dict[str, int]()
        for _, _, message in batch:
            size, kinds = measured(message)
            sizes.append(size)
            for kind, value in kinds.items():
                by_kind[kind] = by_kind.get(kind, 0) + value
        senders, receivers = [sender for sender, _, _ in batch], [receiver for _, receiver, _ in batch]
        self._entry(declared or type(batch[0][2]), handler, protection, senders, receivers, sizes, by_kind)

    def _alike(
        self,
        handler: str,
        protection: Protection,
        message: type[Message],
        measure: tuple[int, Mapping[str, int]],
        sender: Sequence[PartyId],
        receiver: Sequence[PartyId],
        count: int,
    ) -> None:
        """So many messages of one measure."""
        size, by_kind = measure
        many = {kind: value * count for kind, value in by_kind.items()}
        self._entry(message, handler, protection, sender, receiver, [size] * count, many)

    def _entry(
        self,
        message: type[Message],
        handler: str,
        protection: Protection,
        sender: Sequence[PartyId],
        receiver: Sequence[PartyId],
        sizes: Sequence[int],
        by_kind: Mapping[str, int],
    ) -> None:
        turn = self.clock.turn
        self.ledger.add(
            Entry.of(
                message,
                attempt=turn.incarnation,
                phase=turn.phase,
                round=turn.round,
                sequence=self.clock.sequence,
                handler=handler,
                protection=protection,
                sender=tuple(sender),
                receiver=tuple(receiver),
                bytes=tuple(sizes),
                by_kind=dict(by_kind),
            )
        )

    def transcribe(self, calls: Sequence[Invocation], outcome: Mapping[PartyId, Outcome]) -> None:
        """Keep what every party was sent by these calls, where a transcript is wanted; a party that failed may have
        read its part all the same.
        """
        transcript = self.clock.transcript
        if transcript is None:
            return
        for call in calls:
            place: dict[str, Any] = {
                "attempt": call.turn.incarnation,
                "phase": call.turn.phase,
                "round": call.turn.round,
                "sequence": call.sequence,
                "handler": call.handler,
            }
            reply = outcome[call.party]
            if call.argument is not None:
                transcript.note(call.party, SERVER, call.argument, **place)
            for parcel in call.parcels or ():
                if parcel.sender != parcel.receiver:
                    transcript.note(parcel.receiver, parcel.sender, parcel.content, **place)
            if isinstance(reply, Message):
                transcript.note(SERVER, call.party, reply, **place)
            for parcel in reply if isinstance(reply, tuple) else ():
                if parcel.receiver == SERVER:
                    transcript.note(SERVER, parcel.sender, parcel.content, **place)


def check_quorum(turn: Turn, handler: str, asked: int, failures: Mapping[PartyId, Failure], quorum: float) -> None:
    """Enough parties must have answered."""
    answered = asked - len(failures)
    if answered < max(1, math.ceil(quorum * asked - 1e-9)):
        raise QuorumError(f"{turn.phase} round {turn.round}, {handler}", failures, answered, asked)


def check_finite(handler: str, replies: Replies[Any]) -> None:
    """Models, gradients and embeddings must be numbers: one NaN would silently become everybody's."""
    stacked = replies.stacked
    if stacked is not None and not codec.looked_at(type(stacked.message)):  # type: ignore[arg-type]
        return
    for party, reply in replies.items():
        if reply is not None and not codec.finite(reply):
            raise RunError(
                f"{handler}: what {party} returned is not finite; training has diverged: lower lr or check the "
                f"features of {party}"
            )


def measured(message: Message) -> tuple[int, Mapping[str, int]]:
    """Bytes of a message and what kinds they carry. Of sealed mail its sender says so; changed in transit, it could
    not be opened.
    """
    if not isinstance(message, Sealed):
        return codec.measure(message)
    kinds = message.kinds.values()
    if len(message.body) != message.size + OVERHEAD or min(kinds, default=0) < 0 or sum(kinds) > message.size:
        raise ProtocolError(f"sealed mail of {message.handler} says it is of another size than it is")
    return message.size, message.kinds
