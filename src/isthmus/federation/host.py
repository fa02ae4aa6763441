"""Parties at another place than the server, driven by bytes.

A :class:`PartyHost` is the far end of an engine whose parties are in other processes: a ray actor with many simulated
clients, or an organisation's site with its one client (and that client's devices). It is the local engine behind a
codec, so what happens to a call is what happens on one machine: allow-list, sequences answered from memory, tags,
rollback. It is built from data, a method's roles and its config; whoever builds it decides whether the data was handed
over (a simulation) or loaded where it lies (an organisation).

Two kinds of frames reach it (:meth:`PartyHost.handle`): ``call`` (see `wire`) and ``order``, one of a fixed list of
operations that carry no message. Whatever arrives, it answers with a frame: an error is a line in the answer, never an
exception of the transport.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from isthmus.errors import ConfigError, DataError, IsthmusError, ProtocolError, RunError, StorageError, unknown
from isthmus.federation import codec
from isthmus.federation.codec import LIMITS, Limits
from isthmus.federation.engine import Export
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import Stacked
from isthmus.federation.messages import ClientId, Message, client_of
from isthmus.federation.party import Invocation, Outcome
from isthmus.federation.roles import RoleTable
from isthmus.federation.wire import Frame, decode_calls, encode_outcomes
from isthmus.records import Record
from isthmus.seeds import Stream

FrameKind = Literal["call", "order"]
ERRORS: dict[str, type[IsthmusError]] = {
    kind.__name__: kind for kind in (ConfigError, DataError, RunError, StorageError, ProtocolError)
}


@dataclass(frozen=True)
class Order(Record):
    """An operation on all parties of a host. Which of the arguments counts depends on ``name``."""

    name: str
    step: int = 0
    role: str = "client"
    selected: bool = False
    clients: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exported(Record):
    """An :class:`~isthmus.federation.engine.Export` that travels."""

    values: int
    weights: Mapping[str, Tensor] | None
    kept: bytes = b""
    logits: Tensor | None = None
    round: int | None = None


@dataclass(frozen=True)
class Answer(Record):
    """What became of a frame. ``error`` names one of :data:`ERRORS` where it was refused; ``text`` says why."""

    error: str = ""
    text: str = ""
    steps: tuple[int, ...] = ()
    keys: Mapping[str, bytes] | None = None
    exports: Mapping[str, Exported] | None = None
    execution: str = "each"
    why_each: str = ""

    def check(self, place: str) -> Answer:
        """This answer, or the error it carries."""
        if self.error:
            raise ERRORS.get(self.error, RunError)(f"{place}: {self.text}")
        return self


class PartyHost(LocalEngine):
    """The parties of some clients, behind a codec.

    Args:
        parts: Data of the clients that live here.
        cohort: Train them together where their class offers it.
        explain: Let texts of errors out: only where host and server belong to one trust domain.
        limits: What is accepted before anybody looks closer.
    """

    def __init__(
        self,
        parts: Mapping[ClientId, Any],
        table: RoleTable,
        config: Any,
        stream: Stream,
        *,
        cohort: bool = False,
        explain: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        super().__init__(parts, table, config, stream, cohort=cohort)
        self._explain, self._limits = explain, limits
        self._shared: set[int] = set()
        self.orders: dict[str, Callable[[Order], Answer]] = {
            "open": lambda order: Answer(execution=self.execution, why_each=self.why_each),
            "commit": self._on_commit,
            "tags": lambda order: Answer(steps=self.tags()),
            "fetch": self._on_fetch,
            "rollback": self._on_rollback,
            "catch_up": self._on_catch_up,
            "select": self._on_select,
            "export": self._on_export,
            "sum_keys": self._on_sum_keys,
        }

    def handle(self, kind: str, frame: Frame) -> Frame:
        """The one entry point: ``call`` gives outcomes (or an :class:`Answer` with the reason of refusal), ``order`` an
        :class:`Answer`.
        """
        try:
            if kind == "call":
                return self._call(frame)
            if kind != "order":
                raise unknown("kind of frame", kind, ("call", "order"), error=ProtocolError)
            if len(frame) != 1:
                raise ProtocolError("malformed order: it has parts")
            order = codec.decode(frame[0], Order, self._limits)
            if order.name not in self.orders:
                raise unknown("order", order.name, self.orders, error=ProtocolError)
            answer = self.orders[order.name](order)
        except IsthmusError as error:
            answer = Answer(type(error).__name__, str(error))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            answer = Answer("StorageError", f"cannot keep its state ({reason}): set that right, then resume the run")
        except Exception as error:  # a method's own code may raise anything; its text may hold data
            answer = Answer("RunError", f"{type(error).__name__}{f': {error}' if self._explain else ''}")
        return (codec.encode(answer),)

    def _call(self, frame: Frame) -> Frame:
        calls = decode_calls(frame, self._table, self._limits)
        here = self._parties[calls[0].role]
        for call in calls:
            if call.party not in here:
                raise unknown("party", call.party, here, error=ProtocolError)
        calls = self.admit(calls)
        times = Counter(id(content) for call in calls for content in _contents(call))
        self._shared = {content for content, n in times.items() if n > 1}
        found = self.dispatch(calls, None)
        outcomes: Mapping[str, Outcome]
        if isinstance(found, Stacked):
            outcomes = {party: found.row(k) for k, party in enumerate(found.parties)}
        else:
            outcomes = found
        return encode_outcomes(self.release(outcomes, calls), explain=self._explain)

    def admit(self, calls: list[Invocation]) -> list[Invocation]:
        """Calls as they are run here. An organisation's host opens mail that came sealed."""
        return calls

    def release(self, outcomes: Mapping[str, Outcome], calls: list[Invocation]) -> Mapping[str, Outcome]:
        """Outcomes as they leave. An organisation's host seals mail."""
        return outcomes

    def _enter(self, call: Invocation) -> Invocation:
        """Decoded messages belong to this process already: only what several parties share is copied."""
        return super()._enter(call) if any(id(content) in self._shared for content in _contents(call)) else call

    def _leave(self, outcome: Outcome) -> Outcome:
        return outcome  # encoding checks it as a copy would

    # -- orders ------------------------------------------------------------------------------------

    def _on_commit(self, order: Order) -> Answer:
        self.commit(order.step)
        return Answer()

    def _on_fetch(self, order: Order) -> Answer:
        self.fetch(order.step)
        return Answer()

    def _on_rollback(self, order: Order) -> Answer:
        self.rollback(order.step)
        return Answer()

    def _on_catch_up(self, order: Order) -> Answer:
        self._release()
        for party in self._all():
            if client_of(party.name) in order.clients:
                party.catch_up(order.step)
        return Answer()

    def _on_select(self, order: Order) -> Answer:
        self.select()
        return Answer()

    def _on_sum_keys(self, order: Order) -> Answer:
        if order.role not in self._parties:
            raise unknown("role", order.role, self._parties, error=ProtocolError)
        return Answer(keys=self.sum_keys(order.role))

    def _on_export(self, order: Order) -> Answer:
        self._release()
        exports = {}
        for client in order.clients:
            if client not in self._parties["client"]:
                raise unknown("client", client, self._parties["client"], error=ProtocolError)
            export = self.keep_export(client, self.export_one(client, order.selected))
            exports[client] = Exported(**vars(export))
        return Answer(exports=exports)

    def keep_export(self, client: ClientId, export: Export) -> Export:
        """What of a client's final model leaves this place. In a simulation all; an organisation's host keeps it and
        tells its size.
        """
        return export


def _contents(call: Invocation) -> list[Message]:
    return [*([call.argument] if call.argument is not None else []), *(parcel.content for parcel in call.parcels or ())]
