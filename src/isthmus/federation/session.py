"""The verbs of :class:`~isthmus.federation.interface.Federation`, once, on top of any engine.

An engine only carries invocations to parties and brings outcomes back. Everything else is here and cannot differ
between engines:

    session.py        the verbs: call, sum, exchange, tier
    secure_verbs.py   sum and exchange behind masks
    calls.py          what the verbs share: addressing, checks, retries, delivery of mail
    bookkeeping.py    ledger, transcript, quorum, finite numbers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from isthmus.errors import ProtocolError, RunError, unknown
from isthmus.federation import codec
from isthmus.federation.bookkeeping import Bookkeeping, Clock, check_finite
from isthmus.federation.calls import Caller, messages_of
from isthmus.federation.contract import Contract
from isthmus.federation.engine import Engine
from isthmus.federation.interface import PerClient, Replies, Stacked, total
from isthmus.federation.ledger import Ledger
from isthmus.federation.messages import SERVER, Message, PartyId
from isthmus.federation.party import Combine, Parcel
from isthmus.federation.roles import RoleTable
from isthmus.federation.script import EVALUATION
from isthmus.federation.secure_verbs import masked_exchange, masked_sum, sum_of_survivors
from isthmus.federation.transcript import Transcript
from isthmus.federation.watch import SessionWatch
from isthmus.seeds import Stream


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
        contract: Contract | None = None,
        shared: tuple[Clock, Ledger] | None = None,
    ) -> None:
        self.engine, self.table, self._role = engine, table, role
        if shared is None:
            watch = None if contract is None else SessionWatch(contract)
            shared = Clock(incarnation, seed, secure, transcript, watch), Ledger()
        self.clock, self.ledger = shared
        if contract is not None:
            self.clock.least = contract.at_least or None
        self._books = Bookkeeping(self.clock, self.ledger)
        self._caller = Caller(engine, table, role, self._books)

    @property
    def clients(self) -> tuple[PartyId, ...]:
        return self._caller.parties

    @property
    def absent(self) -> tuple[PartyId, ...]:
        present = set(self.clients)
        return tuple(party for party in self._caller.everybody if party not in present)

    @property
    def least(self) -> int | None:
        return self.clock.least

    @property
    def round(self) -> int:
        return self.clock.turn.round

    @property
    def role(self) -> str:
        return self._role

    @property
    def secure(self) -> bool:
        return self.clock.secure

    def stream(self, purpose: str) -> Stream:
        return Stream(self.clock.seed, (SERVER, self.clock.turn.phase, self.clock.turn.round, purpose))

    def tier(self, role: str) -> Session:
        if role not in self.table.roles:
            raise unknown("role", role, self.table.roles, error=ProtocolError)
        return Session(self.engine, self.table, role=role, shared=(self.clock, self.ledger))

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
        calls, name = self._caller.prepare(handler, request, to, "ask")
        least = self.clock.least if self.clock.turn.phase == EVALUATION else None  # scores are of those who are there
        if least is None:
            self._caller.check_everybody(name)
        outcome, failures = self._caller.dispatch(calls, quorum=quorum, timeout=timeout, at_least=least)
        self._books.replies(name, outcome, "clear")
        replies = Replies[Any](outcome if isinstance(outcome, Stacked) else messages_of(outcome), failures)
        check_finite(name, replies)  # looks at every row of models, so they are copied out before a cohort trains on
        return replies

    def sum(
        self,
        handler: Callable[..., Any],
        request: Any = None,
        *,
        to: Iterable[PartyId] | None = None,
        at_least: int | None = None,
    ) -> Any:
        """Ask parties for messages of which the method sees only the total. Everyone must answer; with ``at_least`` so
        many, and the total is over those who do. Who did not is in ``absent``.
        """
        calls, name = self._caller.prepare(handler, request, to, "total")
        if at_least is None:
            self._caller.check_everybody(name)
        else:
            self._caller.check_at_least(name, at_least)
        if self.clock.secure and at_least is not None:
            return sum_of_survivors(self._caller, calls, name, at_least)
        if self.clock.secure:
            return masked_sum(self._caller, calls, name, each=isinstance(request, PerClient))
        outcome, failures = self._caller.dispatch(calls, at_least=at_least)
        self._books.replies(name, outcome, "summed")
        if isinstance(outcome, Stacked):
            summed = outcome.total()
        else:
            messages = [reply for reply in messages_of(outcome).values() if reply is not None]
            if len(messages) != len(calls) - len(failures):
                raise ProtocolError(f"{name} returned no message; a handler called through sum() must return one")
            summed = total(messages)
        if not codec.finite(summed):  # the total tells whether a closer look is needed
            check_finite(name, Replies[Any](outcome if isinstance(outcome, Stacked) else messages_of(outcome), {}))
            raise RunError(
                f"{name}: the sum of the parties' finite numbers is not finite; scale them down before sending"
            )
        return summed

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
        self._caller.check_everybody(send.__name__)
        handlers = self._caller.receivers([receive] if callable(receive) else receive, combine)
        calls, name = self._caller.prepare(send, request, to, "send")
        self._caller.check_pair(name, handlers, combine)
        if self.clock.secure and combine == "sum":
            return masked_exchange(self._caller, calls, name, handlers)
        if combine == "sum" and self._caller.exchange_together(calls, handlers):
            return Replies({}, {})
        parcels, senders = self._caller.collect(calls)
        self._caller.check_receivers([parcel.receiver for parcel in parcels], handlers)
        self._books.mail(name, parcels, combine, self._caller.reply_type(name))
        replies = self._caller.deliver(handlers, parcels, senders, combine)
        to_server = [parcel for parcel in parcels if parcel.receiver == SERVER]
        return Replies(replies, {}, _server_mail(to_server, combine))


def _server_mail(parcels: Sequence[Parcel], combine: Combine) -> dict[PartyId, Message]:
    ordered = sorted(parcels, key=lambda parcel: parcel.sender)
    if combine == "sum" and ordered:
        return {"sum": total([parcel.content for parcel in ordered])}
    return {parcel.sender: parcel.content for parcel in ordered}
