"""Faults on purpose: an engine that loses calls and parties as a plan says, for tests of recovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import Failure, FailureKind, Stacked
from isthmus.federation.messages import ClientId, PartyId
from isthmus.federation.party import Invocation, Outcome


@dataclass(frozen=True)
class Fault:
    """At this party, in this phase and round, the call to ``handler`` fails ``times`` times.

    ``after=True`` loses the *answer* instead of the call: the handler has run, as after a broken connection. A
    ``crashed`` party stays away until the federation rolls back, or until step ``back``. ``step``: only in this step of
    a sum that may lose parties.
    """

    party: PartyId
    phase: str
    round: int
    handler: str
    kind: FailureKind = "unavailable"
    times: int = 1
    after: bool = False
    step: str = ""
    back: int = 10**9


class FaultyEngine(LocalEngine):
    """The local engine with a plan of faults."""

    def __init__(self, *args: Any, plan: Sequence[Fault] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left = {fault: fault.times for fault in plan}
        self._down: dict[PartyId, int] = {}
        self.rollbacks = 0

    def dispatch(self, calls: Sequence[Invocation], timeout: float | None) -> Mapping[PartyId, Outcome] | Stacked[Any]:
        self._release()
        return {call.party: self._faulty(call) for call in calls}

    def _faulty(self, call: Invocation) -> Outcome:
        if call.party in self._down:
            return Failure("crashed", "party is down")
        for fault, left in self._left.items():
            aimed_at = (fault.party, fault.phase, fault.round, fault.handler)
            step = call.mask.step.name if call.mask is not None and call.mask.step is not None else ""
            if fault.step not in ("", step):
                continue
            if left and aimed_at == (call.party, call.turn.phase, call.turn.round, call.handler):
                self._left[fault] -= 1
                if fault.after:
                    self._invoke(call)
                if fault.kind == "crashed":
                    self._down[call.party] = fault.back
                return Failure(fault.kind, "planned")
        return self._invoke(call)

    def take_back(self, step: int) -> frozenset[ClientId]:
        """Those whose time has come; a client that was only cut off for a moment is back at once."""
        stay = frozenset(client for client in self.away if self._down.get(client, 0) > step)
        self._down = {party: back for party, back in self._down.items() if back > step}
        self.away -= stay
        back = super().take_back(step)
        self.away = stay
        return back

    def rollback(self, step: int) -> None:
        self._down.clear()
        self.rollbacks += 1
        super().rollback(step)
