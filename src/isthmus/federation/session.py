"""The verbs of :class:`~isthmus.federation.interface.Federation`, once, on top of any engine.

An engine only carries invocations to parties and brings outcomes back. Addressing, quorum, retries, sums, mail and the
ledger are here, so they cannot differ between engines.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from isthmus.errors import ProtocolError, RunError, unknown
from isthmus.federation import codec
from isthmus.federation.interface import Failure, PerClient, QuorumError, Replies, Stacked, total
from isthmus.federation.ledger import Entry, Ledger, Protection
from isthmus.federation.messages import SERVER, ClientId, Kind, Message, PartyId, role_of
from isthmus.federation.party import Combine, Invocation, Outcome, Parcel, Store, Turn
from isthmus.federation.roles import RoleTable
from isthmus.federation.secure import (
    KEYS_PHASE,
    MailOrder,
    MailOrders,
    MailPlan,
    Masked,
    MaskOrder,
    Sealed,
    SumKey,
    SumKeys,
    join_supports,
    unmask,
)
from isthmus.federation.transcript import Transcript
from isthmus.privacy.masks import SumRoster, SumTag
from isthmus.privacy.sealed_message import OVERHEAD
from isthmus.seeds import Stream
from isthmus.tensors import Weights

_Outcomes = Mapping[PartyId, Outcome] | Stacked[Any]
RETRIED = ("unavailable", "crashed")


@dataclass(frozen=True)
class Export:
    """What a client ends with. ``weights`` is None where its model stays with its owner; ``values`` is how many numbers
    it has.
    """

    values: int
    weights: Weights | None = None


class Engine(Protocol):
    """Carries calls to parties. Implementations: in process, many cores, separate organisations.

    Everything a run needs of its parties is here, and all of it can cross a wall between processes. A party that is
    lost shows as a ``crashed`` failure of a call, and as a :class:`~isthmus.federation.interface.QuorumError` of the
    other operations.
    """

    @property
    def execution(self) -> Literal["each", "cohort"]:
        """``cohort`` if clients are trained together, else ``each``."""
        ...

    @property
    def why_each(self) -> str:
        """Why the cohort that the clients' class declares is not used although that was asked for; empty otherwise."""
        ...

    @property
    def resolved(self) -> Mapping[str, Any]:
        """Fields of the run's config that were left open and this engine has decided, e.g. how many actors there
        are.
        """
        ...

    def parties(self, role: str) -> tuple[PartyId, ...]:
        """Addresses of a role's parties, sorted."""
        ...

    def dispatch(self, calls: Sequence[Invocation], timeout: float | None) -> Mapping[PartyId, Outcome] | Stacked[Any]:
        """Run calls of one handler, one per party; every party gets an outcome, a failure at worst."""
        ...

    def sum_keys(self, role: str) -> Mapping[PartyId, bytes]:
        """Public session keys of a role's parties for secure sums."""
        ...

    def keep_tags(self, store: Callable[[PartyId], Store]) -> None:
        """From now on parties keep their tags in stores of their own. An engine whose parties have a place for them
        already need not.
        """
        ...

    def commit(self, step: int) -> None:
        """Tag the state of every party."""
        ...

    def tags(self) -> tuple[int, ...]:
        """Tags that all parties hold, sorted; parties that were lost are started again."""
        ...

    def rollback(self, step: int) -> None:
        """Take every party back to a tag, or raise a :class:`~isthmus.errors.DataError` and change nothing."""
        ...

    def select(self) -> None:
        """Every party remembers its present state as the one validation picked."""
        ...

    def export(self, selected: bool) -> Iterator[tuple[ClientId, Export]]:
        """What each client ends with, one by one: of the state validation picked, or of the last."""
        ...

    def close(self) -> None:
        """End everything the engine started. May be called twice."""
        ...


class Clock:
    """Turn and sequence shared by all tiers of a session."""

    def __init__(self, incarnation: int, seed: int, secure: bool = False, transcript: Transcript | None = None) -> None:
        self.seed, self.secure, self.transcript = seed, secure, transcript
        self.run = secrets.token_hex(16)  # of this process: keys of secure sums belong to it
        self.sum_keys: dict[str, dict[PartyId, bytes]] = {}
        self.incarnation = incarnation
        self.turn = Turn(incarnation, "init", 0)
        self.sequence = 0

    def begin(self, phase: str, round: int, step: int = 0) -> None:
        self.turn = Turn(self.incarnation, phase, round, step)
        self.sequence = 0

    def next(self) -> int:
        self.sequence += 1
        return self.sequence


class Session:
    """A federation over an engine; implements :class:`~isthmus.federation.interface.Federation`."""

    def __init__(
        self,
        engine: Engine,
        table: RoleTable,
        *,
        seed: int = 0,
        incarnation: int = 0,
        role: str = "client",
        secure: bool = False,
        transcript: Transcript | None = None,
        shared: tuple[Clock, Ledger] | None = None,
    ) -> None:
        self.engine, self.table, self.role = engine, table, role
        self.clock, self.ledger = (
            shared if shared is not None else (Clock(incarnation, seed, secure, transcript), Ledger())
        )

    @property
    def clients(self) -> tuple[PartyId, ...]:
        return self.engine.parties(self.role)

    def stream(self, purpose: str) -> Stream:
        return Stream(self.clock.seed, (SERVER, self.clock.turn.phase, self.clock.turn.round, purpose))

    def tier(self, role: str) -> Session:
        if role not in self.table.roles:
            raise unknown("role", role, self.table.roles, error=ProtocolError)
        return Session(self.engine, self.table, role=role, shared=(self.clock, self.ledger))

    # -- verbs -------------------------------------------------------------------------------------

    def call(
        self,
        handler: Callable[..., Any],
        request: Any = None,
        *,
        to: Iterable[PartyId] | None = None,
        quorum: float = 1.0,
        timeout: float | None = None,
    ) -> Replies[Any]:
        """Ask parties and collect their replies; below quorum the round is lost."""
        if not 0.0 < quorum <= 1.0:
            raise ValueError(f"quorum must lie in (0, 1], got {quorum}")
        calls, name = self._calls(handler, request, to)
        outcome, failures = self._dispatch(calls, timeout)
        self._require(name, len(calls), failures, quorum)
        self._note_replies(name, outcome, "clear")
        replies = Replies[Any](outcome if isinstance(outcome, Stacked) else _messages(outcome), failures)
        _check_finite(name, replies)  # looks at every row, so a stack is copied out before its cohort trains on
        return replies

    def sum(self, handler: Callable[..., Any], request: Any = None, *, to: Iterable[PartyId] | None = None) -> Any:
        """Ask parties for messages of which the method sees only the total. Everyone must answer."""
        calls, name = self._calls(handler, request, to)
        if self.clock.secure:
            return self._secure_sum(calls, name)
        outcome, failures = self._dispatch(calls, None)
        self._require(name, len(calls), failures, 1.0)
        self._note_replies(name, outcome, "summed")
        if isinstance(outcome, Stacked):
            summed = outcome.total()
        else:
            messages = [reply for reply in _messages(outcome).values() if reply is not None]
            if len(messages) != len(calls):
                raise ProtocolError(f"{name} returned no message; a handler called through sum() must return one")
            summed = total(messages)
        if not codec.finite(summed):  # the total tells whether a closer look is needed
            _check_finite(name, Replies[Any](outcome if isinstance(outcome, Stacked) else _messages(outcome), {}))
            raise RunError(
                f"{name}: the sum of the parties' finite numbers is not finite; scale them down before sending"
            )
        return summed

    def _secure_sum(self, calls: Sequence[Invocation], name: str) -> Message:
        """The same behind pairwise masks: what arrives from one party is uniform, only the sum of all can be read."""
        if len(calls) < 2:
            raise RunError(
                f"{name}: a sum over one party shows that party's values; run with two clients or more, or without "
                "secure_sum"
            )
        keys, turn = self._sum_keys(), self.clock.turn
        tag = SumTag(
            self.clock.run, turn.phase, turn.round, self.clock.sequence, handler=name, attempt=turn.incarnation
        )
        order = MaskOrder(SumRoster({call.party: keys[call.party] for call in calls}), tag)
        outcome, failures = self._dispatch([replace(call, mask=order) for call in calls], None)
        self._require(name, len(calls), failures, 1.0)
        masked = {party: reply for party, reply in _messages(outcome).items() if isinstance(reply, Masked)}  # type: ignore[arg-type]
        reply = self.table.signature(self.role, name).reply
        assert reply is not None
        sizes = [codec.size(message) for message in masked.values()]
        self._entry(reply, name, "masked", list(masked), [SERVER], sizes, {Kind.SHARE: sum(sizes)})
        return unmask(masked, order, reply)

    def _sum_keys(self) -> Mapping[PartyId, bytes]:
        """Everybody's session key, exchanged before the first secure sum of a role."""
        if self.role not in self.clock.sum_keys:
            keys = dict(self.engine.sum_keys(self.role))
            self.clock.sum_keys[self.role] = keys
            up, down = codec.size(SumKey(b"0" * 32)), codec.size(SumKeys(keys))
            place = {"attempt": self.clock.incarnation, "phase": KEYS_PHASE, "round": 0, "sequence": 0}
            columns = {**place, "handler": "keys", "protection": "clear"}
            parties = tuple(keys)
            self.ledger.add(
                Entry.of(
                    SumKey,
                    sender=parties,
                    receiver=(SERVER,),
                    bytes=(up,) * len(keys),
                    by_kind={Kind.IDENTIFIER: 32 * len(keys)},
                    **columns,
                )
            )
            self.ledger.add(
                Entry.of(
                    SumKeys,
                    sender=(SERVER,),
                    receiver=parties,
                    bytes=(down,) * len(keys),
                    by_kind={Kind.IDENTIFIER: 32 * len(keys) ** 2},
                    **columns,
                )
            )
        return self.clock.sum_keys[self.role]

    def exchange(
        self,
        send: Callable[..., Any],
        receive: Callable[..., Any] | Sequence[Callable[..., Any]],
        request: Any = None,
        *,
        to: Iterable[PartyId] | None = None,
        combine: Literal["each", "sum"] = "each",
    ) -> Replies[Any]:
        """Mail between parties.

        ``send`` runs at the parties in ``to`` and returns ``{party: message}``; ``receive`` runs at every party of its
        role that sent or got mail (one handler per receiving role). With ``combine="sum"`` a receiver is given one
        message, the sum, or None. Mail to ``server`` is returned in ``Replies.mail`` (summed: under the key ``sum``).
        Mail to oneself is delivered but is no traffic. With secure sums on, summed mail is masked between the senders
        to one receiver, who can read only the total.
        """
        handlers = self._receivers([receive] if callable(receive) else receive, combine)
        calls, name = self._calls(send, request, to, sends=True)
        if self.clock.secure and combine == "sum":
            return self._secure_exchange(calls, name, handlers)
        outcome, failures = self._dispatch(calls, None)
        self._require(name, len(calls), failures, 1.0)
        assert not isinstance(outcome, Stacked)
        parcels = [parcel for party, sent in outcome.items() for parcel in _sent_by(party, sent)]
        self._check_addresses(parcels, set(handlers))
        self._note_mail(name, parcels, combine)
        replies: dict[PartyId, Any] = {}
        for role, handler in handlers.items():
            replies |= self._deliver(role, handler, parcels, set(outcome), combine)
        to_server = [parcel for parcel in parcels if parcel.receiver == SERVER]
        return Replies(replies, {}, _server_mail(to_server, combine))

    def _secure_exchange(self, calls: Sequence[Invocation], name: str, handlers: Mapping[str, str]) -> Replies[Any]:
        """Summed mail behind pairwise masks: senders say whom they write to, learn who else does, and only then send,
        masked.
        """
        keys, held = self._sum_keys(), calls[0].sequence
        plans = self._mail_plans([replace(call, mail=MailOrder(held)) for call in calls], name)
        writers: dict[PartyId, list[PartyId]] = {}
        for party, plan in plans.items():
            for receiver in plan.receivers:
                writers.setdefault(receiver, []).append(party)
        self._check_receivers(writers, set(handlers))
        for receiver, senders in writers.items():
            if len(senders) < 2:
                raise RunError(
                    f"{name}: only {senders[0]} writes to {receiver}, and a sum over one party shows that party's "
                    "values; "
                    "let two others or more write to every receiver (zeros are fine), or run without secure_sum"
                )
        turn = self.clock.turn
        orders = {
            receiver: MaskOrder(
                SumRoster({sender: keys[sender] for sender in senders}),
                SumTag(
                    self.clock.run,
                    turn.phase,
                    turn.round,
                    held,
                    handler=name,
                    attempt=turn.incarnation,
                    receiver=receiver,
                ),
                join_supports([plans[sender].announced.get(receiver, ()) for sender in senders]),
            )
            for receiver, senders in sorted(writers.items())
        }
        parcels = self._masked_parcels(calls, name, plans, orders)
        replies: dict[PartyId, Any] = {}
        for role, handler in handlers.items():
            replies |= self._deliver(role, handler, parcels, set(plans), "sum", MailOrder(held, orders))
        to_server = {parcel.sender: parcel.content for parcel in parcels if parcel.receiver == SERVER}
        mail = {"sum": unmask(to_server, orders[SERVER], self._mail_type(name))} if to_server else {}  # type: ignore[arg-type]
        return Replies(replies, {}, mail)

    def _mail_type(self, name: str) -> type[Message]:
        sent = self.table.signature(self.role, name).reply
        assert sent is not None
        return sent

    def _mail_plans(self, calls: Sequence[Invocation], name: str) -> dict[PartyId, MailPlan]:
        outcome, failures = self._dispatch(calls, None)
        self._require(name, len(calls), failures, 1.0)
        plans = {party: plan for party, plan in _messages(outcome).items() if isinstance(plan, MailPlan)}  # type: ignore[arg-type]
        self._note_batch(name, "clear", [(party, SERVER, plan) for party, plan in plans.items()])
        return plans

    def _masked_parcels(
        self,
        calls: Sequence[Invocation],
        name: str,
        plans: Mapping[PartyId, MailPlan],
        orders: Mapping[PartyId, MaskOrder],
    ) -> list[Parcel]:
        own = {
            party: {receiver: orders[receiver] for receiver in plan.receivers}
            for party, plan in plans.items()
            if plan.receivers
        }
        if not own:
            return []
        self._note_batch(name, "clear", [(SERVER, party, _told(its)) for party, its in own.items()])
        held = calls[0].sequence
        # A number of its own, but none of the clock's: handlers draw the same random numbers as in a run without masks.
        second = [
            replace(call, argument=None, sequence=-held, mail=MailOrder(held, its))
            for call in calls
            if (its := own.get(call.party))
        ]
        outcome, failures = self._dispatch(second, None)
        self._require(name, len(second), failures, 1.0)
        assert not isinstance(outcome, Stacked)
        parcels = [parcel for party, sent in outcome.items() for parcel in _sent_by(party, sent)]
        by_role: dict[str, list[Parcel]] = {}
        for parcel in parcels:
            content = parcel.content
            masked = isinstance(content, Masked) or (
                isinstance(content, Sealed) and content.message_type == Masked.__name__
            )
            if not masked or parcel.receiver not in own[parcel.sender]:
                raise ProtocolError(
                    f"mail of {parcel.sender} to {parcel.receiver} is not masked, or not what it said it would send"
                )
            by_role.setdefault(role_of(parcel.receiver), []).append(parcel)
        for batch in by_role.values():
            sizes = [_measured(parcel.content)[0] for parcel in batch]
            self._entry(
                self._mail_type(name),
                name,
                "masked",
                [p.sender for p in batch],
                [p.receiver for p in batch],
                sizes,
                {Kind.SHARE: sum(sizes)},
            )
        return parcels

    def _deliver(
        self,
        role: str,
        handler: str,
        parcels: Sequence[Parcel],
        senders: set[PartyId],
        combine: Combine,
        masked: MailOrder | None = None,
    ) -> dict[PartyId, Any]:
        inbox: dict[PartyId, list[Parcel]] = {party: [] for party in sorted(senders) if role_of(party) == role}
        for parcel in parcels:
            if parcel.receiver != SERVER and role_of(parcel.receiver) == role:
                inbox.setdefault(parcel.receiver, []).append(parcel)
        sequence = self.clock.next()
        calls = [
            Invocation(
                party,
                role,
                handler,
                self.clock.turn,
                sequence,
                parcels=tuple(mail),
                combine=combine,
                mail=_order_of(party, masked),
            )
            for party, mail in sorted(inbox.items())
        ]
        if not calls:
            return {}
        outcome, failures = self._dispatch(calls, None)
        self._require(handler, len(calls), failures, 1.0)
        self._note_replies(handler, outcome, "clear")
        return dict(_messages(outcome)) if not isinstance(outcome, Stacked) else {}

    def _check_addresses(self, parcels: Sequence[Parcel], roles: set[str]) -> None:
        self._check_receivers([parcel.receiver for parcel in parcels], roles)

    def _check_receivers(self, receivers: Iterable[PartyId], roles: set[str]) -> None:
        known = {party for role in roles for party in self.engine.parties(role)} | {SERVER}
        for receiver in receivers:
            if receiver not in known:
                raise unknown("receiver", receiver, known, error=ProtocolError)

    # -- shared steps ------------------------------------------------------------------------------

    def _receivers(self, functions: Sequence[Callable[..., Any]], combine: Combine) -> dict[str, str]:
        """Handler by receiving role; what cannot receive this mail is refused before anybody sends."""
        handlers: dict[str, str] = {}
        for function in functions:
            role, name = self.table.locate(function, prefer=self.role)
            signature = self.table.signature(role, name)
            if signature.request is None or signature.mail != (combine == "each"):
                wanted = "Mapping[PartyId, Message]" if combine == "each" else "Message | None"
                raise ProtocolError(f"{name} cannot receive with combine={combine!r}: its argument must be {wanted}")
            if signature.sends:
                raise ProtocolError(f"{name} receives mail and may not send: give its mail to another exchange()")
            if role in handlers:
                raise ProtocolError(f"{handlers[role]} and {name} both receive for role {role!r}; name one")
            handlers[role] = name
        return handlers

    def _calls(
        self, function: Callable[..., Any], request: Any, to: Iterable[PartyId] | None, *, sends: bool = False
    ) -> tuple[list[Invocation], str]:
        role, name = self.table.locate(function, prefer=self.role)
        if role != self.role:
            raise ProtocolError(f"{name} is a handler of role {role!r}; use federation.tier({role!r})")
        signature = self.table.signature(role, name)
        if signature.mail:
            raise ProtocolError(f"{name} receives mail; name it as `receive` of exchange()")
        if signature.sends != sends:
            raise ProtocolError(
                f"{name} sends mail; use exchange()"
                if signature.sends
                else f"{name} sends no mail; use call() or sum()"
            )
        everyone = self.clients
        parties = everyone if to is None else tuple(sorted(set(to)))
        for party in parties:
            if party not in everyone:
                raise unknown("party", party, everyone, error=ProtocolError)
        if not parties:
            raise ProtocolError(f"{name}: nobody to call")
        arguments = self._arguments(name, request, parties)
        sequence = self.clock.next()
        for party, argument in arguments.items():
            if type(argument) is not (signature.request or type(None)):
                wanted = signature.request.__name__ if signature.request else "no message"
                raise ProtocolError(f"{name} takes {wanted}, got {type(argument).__name__} for {party}")
        self._note_requests(name, arguments, broadcast=not isinstance(request, PerClient))
        return [Invocation(p, role, name, self.clock.turn, sequence, argument=arguments[p]) for p in parties], name

    def _arguments(self, name: str, request: Any, parties: Sequence[PartyId]) -> dict[PartyId, Any]:
        if not isinstance(request, PerClient):
            return dict.fromkeys(parties, request)
        for party in request.messages:
            if party not in self.clients:
                raise unknown("party", party, self.clients, error=ProtocolError)
        missing = [party for party in parties if party not in request.messages]
        if missing:
            raise ProtocolError(
                f"{name}: no message for {', '.join(missing)}; add theirs to PerClient or leave them out with `to`"
            )
        return {party: request.messages[party] for party in parties}

    def _dispatch(self, calls: Sequence[Invocation], timeout: float | None) -> tuple[_Outcomes, dict[PartyId, Failure]]:
        """One retry for parties that were away; a repeated sequence is answered from memory, so nobody trains twice."""
        outcome = self.engine.dispatch(calls, timeout)
        if isinstance(outcome, Stacked):
            return outcome, {}
        again = [
            call for call in calls if isinstance(failure := outcome[call.party], Failure) and failure.kind in RETRIED
        ]
        if again:
            second = self.engine.dispatch(again, timeout)
            outcome = {**outcome, **(Replies(second, {}) if isinstance(second, Stacked) else second)}
        # In the order of the calls, however the engine collected them: sums must not depend on who was faster.
        ordered = {call.party: outcome[call.party] for call in calls}
        if self.clock.transcript is not None:
            self._write_down(self.clock.transcript, calls, ordered)
        failures = {party: result for party, result in ordered.items() if isinstance(result, Failure)}
        return {party: result for party, result in ordered.items() if party not in failures}, failures

    def _write_down(
        self, transcript: Transcript, calls: Sequence[Invocation], outcome: Mapping[PartyId, Outcome]
    ) -> None:
        """What everybody was sent by these calls; a party that failed may have read its part all the same."""
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

    def _require(self, name: str, asked: int, failures: Mapping[PartyId, Failure], quorum: float) -> None:
        answered = asked - len(failures)
        if answered < max(1, math.ceil(quorum * asked - 1e-9)):
            raise QuorumError(
                f"{self.clock.turn.phase} round {self.clock.turn.round}, {name}", failures, answered, asked
            )

    # -- ledger ------------------------------------------------------------------------------------

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

    def _note_requests(self, name: str, arguments: Mapping[PartyId, Message | None], *, broadcast: bool) -> None:
        messages = [(party, argument) for party, argument in arguments.items() if argument is not None]
        if not messages:
            return
        if broadcast:
            receivers = [party for party, _ in messages]
            self._note_alike(name, "clear", messages[0][1], [SERVER], receivers, len(receivers))
        else:
            self._note_batch(name, "clear", [(SERVER, party, message) for party, message in messages])

    def _note_replies(
        self, name: str, outcome: Mapping[PartyId, Outcome] | Stacked[Any], protection: Protection
    ) -> None:
        if isinstance(outcome, Stacked):
            # Sizes do not depend on values, so one row speaks for all.
            self._note_alike(name, protection, outcome.row(0), outcome.parties, [SERVER], len(outcome.parties))
        else:
            self._note_batch(
                name,
                protection,
                [(party, SERVER, reply) for party, reply in outcome.items() if isinstance(reply, Message)],
            )

    def _note_mail(self, name: str, parcels: Sequence[Parcel], combine: Combine) -> None:
        protection: Protection = "summed" if combine == "sum" else "clear"
        by_roles: dict[tuple[str, str], list[tuple[PartyId, PartyId, Message]]] = {}
        for parcel in parcels:
            if parcel.sender != parcel.receiver:
                roles = role_of(parcel.sender), role_of(parcel.receiver)
                by_roles.setdefault(roles, []).append((parcel.sender, parcel.receiver, parcel.content))
        for batch in by_roles.values():
            sealed = all(isinstance(message, Sealed) for _, _, message in batch)
            self._note_batch(
                name, "sealed" if sealed and combine == "each" else protection, batch, self._mail_type(name)
            )

    def _note_alike(
        self,
        name: str,
        protection: Protection,
        message: Message,
        sender: Sequence[PartyId],
        receiver: Sequence[PartyId],
        n: int,
    ) -> None:
        size, by_kind = codec.measure(message)
        self._entry(
            type(message),
            name,
            protection,
            sender,
            receiver,
            [size] * n,
            {kind: value * n for kind, value in by_kind.items()},
        )

    def _note_batch(
        self,
        name: str,
        protection: Protection,
        batch: Sequence[tuple[PartyId, PartyId, Message]],
        declared: type[Message] | None = None,
    ) -> None:
        if not batch:
            return
        sizes, by_kind = [], dict[str, int]()
        for _, _, message in batch:
            size, kinds = _measured(message)
            sizes.append(size)
            for kind, value in kinds.items():
                by_kind[kind] = by_kind.get(kind, 0) + value
        message_type = declared or type(batch[0][2])
        self._entry(message_type, name, protection, [s for s, _, _ in batch], [r for _, r, _ in batch], sizes, by_kind)


def _measured(message: Message) -> tuple[int, Mapping[str, int]]:
    """Bytes of a message and what kinds they carry. Of sealed mail its sender says so; changed on the way, it could not
    be opened.
    """
    if not isinstance(message, Sealed):
        return codec.measure(message)
    kinds = message.kinds.values()
    if len(message.body) != message.size + OVERHEAD or min(kinds, default=0) < 0 or sum(kinds) > message.size:
        raise ProtocolError(f"sealed mail of {message.handler} says it is of another size than it is")
    return message.size, message.kinds


def _told(orders: Mapping[PartyId, MaskOrder]) -> MailOrders:
    return MailOrders(
        {receiver: order.roster.parties for receiver, order in orders.items()},
        {receiver: order.supports or () for receiver, order in orders.items()},
    )


def _order_of(party: PartyId, masked: MailOrder | None) -> MailOrder | None:
    """A receiver's part of the orders: its own, or none where nobody else writes to it."""
    if masked is None or masked.orders is None:
        return masked
    return MailOrder(masked.held, {party: masked.orders[party]} if party in masked.orders else {})


def _check_finite(name: str, replies: Replies[Any]) -> None:
    """Models, gradients and embeddings must be numbers: one NaN would silently become everybody's."""
    for party, reply in replies.items():
        if reply is not None and not codec.finite(reply):
            raise RunError(
                f"{name}: what {party} returned is not finite; training has diverged: lower lr or check the features "
                f"of {party}"
            )


def _messages(outcome: Mapping[PartyId, Outcome]) -> dict[PartyId, Message | None]:
    return {party: reply if isinstance(reply, Message) else None for party, reply in outcome.items()}


def _sent_by(party: PartyId, sent: Outcome) -> tuple[Parcel, ...]:
    """A party's parcels, none of which claims to come from somebody else or goes twice to the same address."""
    assert isinstance(sent, tuple)
    if any(parcel.sender != party for parcel in sent) or len({parcel.receiver for parcel in sent}) != len(sent):
        raise ProtocolError(f"mail of {party} has another sender on it, or two messages for one receiver")
    return sent


def _server_mail(parcels: Sequence[Parcel], combine: Combine) -> dict[PartyId, Message]:
    ordered = sorted(parcels, key=lambda parcel: parcel.sender)
    if combine == "sum" and ordered:
        return {"sum": total([parcel.content for parcel in ordered])}
    return {parcel.sender: parcel.content for parcel in ordered}
