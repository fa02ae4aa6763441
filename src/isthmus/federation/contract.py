"""The contract of a run: what its parties may be asked, and nothing else.

Compiled from a method's script and the resolved settings (`isthmus.experiments.contract.contract_of`) by every site for
itself, and by the server: the same settings, clients and versions give the same :attr:`Contract.hash` everywhere.
:class:`~isthmus.federation.watch.Watch` holds a party's calls against it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from isthmus.errors import ConfigError, ProtocolError
from isthmus.federation.messages import SERVER, ClientId, Message, PartyId, address, kinds_of
from isthmus.federation.roles import RoleTable
from isthmus.federation.script import EVALUATION, Script, lines_of
from isthmus.privacy.mask_graph import least_left

Way = Literal["ask", "total", "send", "receive"]


@dataclass(frozen=True)
class Line:
    """How one handler may be called in one phase.

    Args:
        way: The only verb by which it may be called.
        summed: Only a total may be seen: with secure sums the call must bring an order to mask.
        most, some, each, fresh, groups, survivors: As in `isthmus.federation.script.ScriptLine`.
        request, reply: Messages it takes and gives.
        to: Roles that see what it gives.
        paired: ``role.handler`` of those that take the mail it sends, or send the mail it takes.
    """

    phase: str
    role: str
    handler: str
    way: Way
    summed: bool = False
    most: int = 1
    some: bool = False
    each: bool = False
    fresh: bool = False
    groups: int = 0
    survivors: bool = False
    request: type[Message] | None = None
    reply: type[Message] | None = None
    to: tuple[str, ...] = ()
    paired: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}.{self.handler}"

    @property
    def most_in_all(self) -> int:
        """Calls of all parties together in one round."""
        return self.most * max(1, self.groups)

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "role": self.role,
            "handler": self.handler,
            "way": self.way,
            "summed": self.summed,
            "most": self.most,
            "some": self.some,
            "each": self.each,
            "fresh": self.fresh,
            "groups": self.groups,
            "survivors": self.survivors,
            "request": _described(self.request),
            "reply": _described(self.reply),
            "to": list(self.to),
            "paired": list(self.paired),
        }


def _described(message: type[Message] | None) -> dict[str, Any] | None:
    """A message by name and the kinds of its fields."""
    if message is None:
        return None
    return {"message": message.__name__, "kinds": {name: str(kind) for name, kind in kinds_of(message).items()}}


@dataclass(frozen=True)
class ScheduledPhase:
    """Rounds of one phase: round r is step ``first + r - 1`` of its stage.

    Args:
        eval_every: 0 for a phase that is never evaluated; otherwise every so many rounds, and the last.
        resumes: A lost run goes on from a checkpoint; otherwise the phase is repeated from its beginning.
    """

    phase: str
    first: int
    rounds: int
    eval_every: int = 0
    resumes: bool = True

    def evaluates(self, round: int) -> bool:
        return self.eval_every > 0 and (round == self.rounds or round % self.eval_every == 0)


@dataclass(frozen=True)
class Contract:
    """What the parties of a run agree to.

    Args:
        lines: One per phase, role and handler; a handler that is not listed does not exist in this run.
        schedule: Phases in order.
        clients: Names of all clients.
        roles: Of the method; every client has one party of each.
        secure: Sums are masked.
        at_least: Clients with which a round goes on; 0: everybody is needed.
        method, settings, versions: What is run, with which resolved settings, by which versions of the packages.
    """

    lines: tuple[Line, ...]
    schedule: tuple[ScheduledPhase, ...]
    clients: tuple[ClientId, ...]
    roles: tuple[str, ...]
    secure: bool
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    at_least: int = 0

    def __post_init__(self) -> None:
        clients = len(self.clients)
        if self.secure and self.at_least and self.at_least < least_left(clients):
            raise ConfigError(
                f"least_clients={self.at_least} of {clients} is too few for secure sums: at least "
                f"{least_left(clients)}, or those who work with the server could open more than the sum"
            )

    @cached_property
    def parties(self) -> dict[str, frozenset[PartyId]]:
        """Addresses by role."""
        return {role: frozenset(address(client, role) for client in self.clients) for role in self.roles}

    @cached_property
    def by_place(self) -> dict[tuple[str, str, str], Line]:
        """Lines by phase, role and handler."""
        return {(line.phase, line.role, line.handler): line for line in self.lines}

    @cached_property
    def calls(self) -> dict[str, int]:
        """Most calls of all parties together that a round of each phase can have: sequence numbers go no further."""
        found: dict[str, int] = {}
        for line in self.lines:
            found[line.phase] = found.get(line.phase, 0) + line.most_in_all
        return found

    @cached_property
    def _phases(self) -> dict[str, ScheduledPhase]:
        return {phase.phase: phase for phase in self.schedule}

    def resumes(self, phase: str) -> bool:
        """Whether a lost run goes on from a checkpoint within this phase."""
        return phase not in self._phases or self._phases[phase].resumes

    def check_turn(self, phase: str, round: int, step: int) -> None:
        """Refuse a round that the schedule does not have, and an evaluation where none is due."""
        planned = self._phases.get(phase)
        if phase == EVALUATION:
            planned = next((each for each in self.schedule if each.eval_every), None)
            if planned is not None and not planned.evaluates(round):
                planned = None
        if planned is None or not 1 <= round <= planned.rounds or step != planned.first + round - 1:
            raise ProtocolError(f"{phase} round {round} at step {step} is not in the schedule of this run")

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON has it; :attr:`hash` is made from this."""
        return {
            "lines": [line.to_json() for line in self.lines],
            "schedule": [asdict(each) for each in self.schedule],
            "clients": list(self.clients),
            "roles": list(self.roles),
            "secure": self.secure,
            "method": self.method,
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "at_least": self.at_least,
        }

    @cached_property
    def canonical(self) -> bytes:
        """The canonical JSON."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.canonical).hexdigest()


def compiled(script: Script, table: RoleTable) -> tuple[Line, ...]:
    """Lines of a script, one per phase, role and handler, in a fixed order. A handler that is called in several places
    of a round has the sum of their bounds.
    """
    found: dict[tuple[str, str, str], Line] = {}

    def add(line: Line) -> None:
        place = line.phase, line.role, line.handler
        known = found.get(place)
        found[place] = line if known is None else _joined(known, line)

    for phase, line in lines_of(script):
        role, name = table.locate(line.handler, prefer="client")
        signature = table.signature(role, name)
        common = partial(Line, phase, role, name, most=line.most, some=line.some, fresh=line.fresh, groups=line.groups)
        common = partial(common, request=signature.request, reply=signature.reply)
        if line.verb != "mail":
            if signature.sends or signature.mail:
                raise ConfigError(f"script: {role}.{name} is part of an exchange: write mail(...)")
            shown = (SERVER,) if signature.reply is not None else ()
            totalled = line.verb == "total"
            add(common(way=line.verb, summed=totalled, each=line.each, survivors=line.survivors, to=shown))
            continue
        if not signature.sends:
            raise ConfigError(f"script: {role}.{name} sends no mail: write ask(...) or total(...)")
        receivers = [table.locate(receive, prefer=role) for receive in line.receive]
        to = tuple(sorted({receiver for receiver, _ in receivers} | ({SERVER} if line.server else set())))
        paired = tuple(sorted(f"{receiver}.{handler}" for receiver, handler in receivers))
        add(common(way="send", summed=line.summed, to=to, paired=paired))
        for receiver, handler in receivers:
            taken = table.signature(receiver, handler)
            add(
                Line(
                    phase,
                    receiver,
                    handler,
                    "receive",
                    line.summed,
                    line.most,
                    some=line.some,
                    request=taken.request,
                    reply=taken.reply,
                    to=(SERVER,) if taken.reply is not None else (),
                    paired=(f"{role}.{name}",),
                )
            )
    return tuple(found[place] for place in sorted(found))


def _joined(a: Line, b: Line) -> Line:
    if (a.way, a.summed, a.each, a.groups, a.survivors) != (b.way, b.summed, b.each, b.groups, b.survivors):
        raise ConfigError(f"script: {a.name} is called in two ways in phase {a.phase!r}: give it two handlers")
    return replace(
        a,
        most=a.most + b.most,
        some=a.some or b.some,
        fresh=a.fresh or b.fresh,
        to=tuple(sorted({*a.to, *b.to})),
        paired=tuple(sorted({*a.paired, *b.paired})),
    )


def in_order(phases: Sequence[tuple[str, int, int]]) -> tuple[ScheduledPhase, ...]:
    """A schedule from (phase, rounds, eval_every), one phase after the other."""
    found, first = [], 1
    for phase, rounds, eval_every in phases:
        found.append(ScheduledPhase(phase, first, rounds, eval_every))
        first += rounds
    return tuple(found)
