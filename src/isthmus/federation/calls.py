"""Calls to the parties of one role: prepared and checked, carried out by the engine, recorded.

What :class:`~isthmus.federation.session.Session` and `isthmus.federation.secure_verbs` have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from isthmus.errors import ProtocolError, unknown
from isthmus.federation.bookkeeping import Bookkeeping, check_quorum
from isthmus.federation.contract import Way
from isthmus.federation.engine import Engine, ExchangesTogether
from isthmus.federation.interface import Exchanged, Failure, PerClient, QuorumError, Replies, Stacked
from isthmus.federation.messages import SERVER, Message, PartyId, client_of, role_of
from isthmus.federation.party import Combine, Invocation, Outcome, Parcel
from isthmus.federation.roles import RoleTable
from isthmus.federation.secure import MailOrder
from isthmus.federation.watch import SessionWatch

RETRIED = ("unavailable", "crashed")
LOST = (*RETRIED, "timeout")
"""Kinds of failures that say nothing but that a party is not there."""
ABSENT = Failure("unavailable", "absent")


class Caller:
    """Calls the parties of one role on an engine."""

    def __init__(self, engine: Engine, table: RoleTable, role: str, books: Bookkeeping) -> None:
        self.engine, self.table, self.role, self.books = engine, table, role, books
        self.clock = books.clock

    @property
    def parties(self) -> tuple[PartyId, ...]:
        """Who can be called: without those that are absent."""
        everybody, absent = self.everybody, self.clock.absent
        return tuple(party for party in everybody if client_of(party) not in absent) if absent else everybody

    @property
    def everybody(self) -> tuple[PartyId, ...]:
        return self.engine.parties(self.role)

    # -- before anybody is called ------------------------------------------------------------------

    def prepare(
        self, function: Callable[..., Any], request: Any, to: Iterable[PartyId] | None, way: Way
    ) -> tuple[list[Invocation], str]:
        """The calls of a handler, one per party, and the handler's name; the requests are entered in the ledger."""
        role, name = self.table.locate(function, prefer=self.role)
        if role != self.role:
            raise ProtocolError(f"{name} is a handler of role {role!r}; use federation.tier({role!r})")
        signature = self.table.signature(role, name)
        if signature.mail:
            raise ProtocolError(f"{name} receives mail; name it as `receive` of exchange()")
        if signature.sends != (way == "send"):
            raise ProtocolError(
                f"{name} sends mail; use exchange()"
                if signature.sends
                else f"{name} sends no mail; use call() or sum()"
            )
        parties = self.parties if to is None else tuple(sorted(set(to)))
        self._check_known(parties)
        if not parties:
            raise ProtocolError(f"{name}: nobody to call")
        arguments = self._arguments(name, request, parties)
        if self.clock.watch is not None:
            everybody, each = len(parties) == len(self.parties), isinstance(request, PerClient)
            self.clock.watch.check(self.clock.turn.phase, role, name, way, everybody=everybody, each=each)
        sequence = self.clock.next()
        for party, argument in arguments.items():
            if type(argument) is not (signature.request or type(None)):
                wanted = signature.request.__name__ if signature.request else "no message"
                raise ProtocolError(f"{name} takes {wanted}, got {type(argument).__name__} for {party}")
        self.books.requests(name, arguments, broadcast=not isinstance(request, PerClient))
        return [Invocation(p, role, name, self.clock.turn, sequence, argument=arguments[p]) for p in parties], name

    def _arguments(self, name: str, request: Any, parties: Sequence[PartyId]) -> dict[PartyId, Any]:
        if not isinstance(request, PerClient):
            return dict.fromkeys(parties, request)
        self._check_known(request.messages)
        missing = [party for party in parties if party not in request.messages]
        if missing:
            raise ProtocolError(
                f"{name}: no message for {', '.join(missing)}; add theirs to PerClient or leave them out with `to`"
            )
        return {party: request.messages[party] for party in parties}

    def _check_known(self, parties: Iterable[PartyId]) -> None:
        everyone, known = self.parties, set(self.parties)
        for party in parties:
            if party not in known:
                raise unknown("party", party, everyone, error=ProtocolError)

    def receivers(self, functions: Sequence[Callable[..., Any]], combine: Combine) -> dict[str, str]:
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

    def check_pair(self, send: str, handlers: Mapping[str, str], combine: Combine) -> None:
        """Refuse an exchange whose ends the script does not pair."""
        if self.clock.watch is not None:
            receivers = list(handlers.items())
            self.clock.watch.check_pair(self.clock.turn.phase, (self.role, send), receivers, combine == "sum")

    def reply_type(self, name: str) -> type[Message]:
        """Type of the message a handler returns, or sends."""
        reply = self.table.signature(self.role, name).reply
        assert reply is not None
        return reply

    # -- calls -------------------------------------------------------------------------------------

    def dispatch(
        self,
        calls: Sequence[Invocation],
        *,
        quorum: float = 1.0,
        timeout: float | None = None,
        at_least: int | None = None,
    ) -> tuple[Mapping[PartyId, Outcome] | Stacked[Any], dict[PartyId, Failure]]:
        """Outcomes of a handler's calls, and failures; too many failures lose the round.

        One retry for parties that were away; a repeated sequence is answered from memory, so nobody trains twice.

        Args:
            at_least: Parties that must answer; others that are lost are absent from now on.
        """
        timeout = self.clock.deadline if timeout is None else timeout
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
        self.books.transcribe(calls, ordered)
        failures = {party: result for party, result in ordered.items() if isinstance(result, Failure)}
        if at_least is None:
            check_quorum(self.clock.turn, calls[0].handler, len(calls), failures, quorum)
        else:
            self._check_left(calls, failures, at_least)
            self.clock.lose(failures)
        return {party: result for party, result in ordered.items() if party not in failures}, failures

    def _check_left(self, calls: Sequence[Invocation], failures: Mapping[PartyId, Failure], at_least: int) -> None:
        """Enough parties must be left; one that failed for another reason than being lost fails the round."""
        answered = len(calls) - len(failures)
        if answered >= at_least and all(failure.kind in LOST for failure in failures.values()):
            return
        asked = {call.party for call in calls}
        absent = {party: ABSENT for party in self.everybody if party not in asked}
        turn, everybody = self.clock.turn, len(self.everybody)
        place = f"{turn.phase} round {turn.round}, {calls[0].handler}, which needs {at_least}"
        raise QuorumError(place, {**absent, **failures}, answered, everybody)

    def check_everybody(self, name: str) -> None:
        """Refuse what needs everybody while somebody is absent."""
        if not self.clock.absent:
            return
        missing = {party: ABSENT for party in self.everybody if client_of(party) in self.clock.absent}
        if missing:
            turn, count = self.clock.turn, len(self.everybody)
            place = f"{turn.phase} round {turn.round}, {name}, which needs everybody"
            raise QuorumError(place, missing, count - len(missing), count)

    def check_at_least(self, name: str, at_least: int) -> None:
        """Refuse a sum that goes on with other parties than the run says."""
        if not 1 <= at_least <= len(self.everybody):
            raise ProtocolError(
                f"{name}: at_least={at_least} of {len(self.everybody)} parties; pass at_least=federation.least, which "
                "is least_clients of the run"
            )
        if isinstance(self.clock.watch, SessionWatch):
            self.clock.watch.check_at_least(self.clock.turn.phase, self.role, name, at_least)

    def replies(self, calls: Sequence[Invocation]) -> dict[PartyId, Message | None]:
        """What everybody answers, one by one."""
        outcome, _ = self.dispatch(calls)
        assert not isinstance(outcome, Stacked)
        return messages_of(outcome)

    def collect(self, calls: Sequence[Invocation]) -> tuple[list[Parcel], set[PartyId]]:
        """The mail of a sending handler, none of it with a false sender or twice to one address; and who was asked."""
        outcome, _ = self.dispatch(calls)
        assert not isinstance(outcome, Stacked)
        parcels: list[Parcel] = []
        for party, sent in outcome.items():
            assert isinstance(sent, tuple)
            if any(parcel.sender != party for parcel in sent) or len({parcel.receiver for parcel in sent}) != len(sent):
                raise ProtocolError(f"mail of {party} has another sender on it, or two messages for one receiver")
            parcels += sent
        return parcels, set(outcome)

    def exchange_together(self, calls: Sequence[Invocation], handlers: Mapping[str, str]) -> bool:
        """Have summed mail exchanged in one computation, where the engine can; False where clients send one by one."""
        if not isinstance(self.engine, ExchangesTogether) or list(handlers) != [self.role]:
            return False
        handler = handlers[self.role]

        def received() -> list[Invocation]:
            if self.clock.watch is not None:
                self.clock.watch.check(self.clock.turn.phase, self.role, handler, "receive")
            sequence = self.clock.next()
            return [
                Invocation(call.party, self.role, handler, self.clock.turn, sequence, parcels=(), combine="sum")
                for call in calls
            ]

        outcome = self.engine.exchange_together(calls, received)
        if outcome is None:
            return False
        if not isinstance(outcome, Exchanged):
            check_quorum(self.clock.turn, calls[0].handler, len(calls), outcome, 1.0)
            raise ProtocolError(f"{calls[0].handler}: an engine must exchange the mail of all clients, or fail")
        self.books.mail_to_all(calls[0].handler, outcome.messages)
        return True

    def check_receivers(self, receivers: Iterable[PartyId], roles: Iterable[str]) -> None:
        """Mail may go to parties of these roles, and to the server."""
        known = {party for role in roles for party in self.engine.parties(role)} | {SERVER}
        for receiver in receivers:
            if receiver not in known:
                raise unknown("receiver", receiver, known, error=ProtocolError)

    def deliver(
        self,
        handlers: Mapping[str, str],
        parcels: Sequence[Parcel],
        senders: set[PartyId],
        combine: Combine,
        masked: MailOrder | None = None,
    ) -> dict[PartyId, Any]:
        """Hand mail to the receiving handler of each role, and collect the replies."""
        replies: dict[PartyId, Any] = {}
        for role, handler in handlers.items():
            inbox: dict[PartyId, list[Parcel]] = {party: [] for party in sorted(senders) if role_of(party) == role}
            for parcel in parcels:
                if parcel.receiver != SERVER and role_of(parcel.receiver) == role:
                    inbox.setdefault(parcel.receiver, []).append(parcel)
            if self.clock.watch is not None:
                self.clock.watch.check(self.clock.turn.phase, role, handler, "receive")
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
            if calls:
                outcome, _ = self.dispatch(calls)
                self.books.replies(handler, outcome, "clear")
                replies |= {} if isinstance(outcome, Stacked) else messages_of(outcome)
        return replies


def messages_of(outcome: Mapping[PartyId, Outcome]) -> dict[PartyId, Message | None]:
    """The replies among outcomes; None where a handler returns none."""
    return {party: reply if isinstance(reply, Message) else None for party, reply in outcome.items()}


def _order_of(party: PartyId, masked: MailOrder | None) -> MailOrder | None:
    """A receiver's part of the orders: its own, or none where nobody else writes to it."""
    if masked is None or masked.orders is None:
        return masked
    return MailOrder(masked.held, {party: masked.orders[party].seen_by(party)} if party in masked.orders else {})
