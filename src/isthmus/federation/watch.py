"""Watches: each party holds every call against the contract of its run, before a handler runs.

A :class:`Watch` belongs to one party. On every engine it refuses handlers that the script does not have, a verb other
than the declared one, a summed handler without an order to mask where sums are masked, sums over others than everybody,
and more calls in a round than the script allows. At a site it also checks (``full``) the schedule, that an order to
mask names this call and this request, that replays ask the same, and it writes every admitted call to a
:class:`CallLog` first; masks depend on all that was asked before (:meth:`Watch.asked_so_far`). What it remembers can be
rebuilt from those lines (:meth:`Watch.restore`), so that neither a restart nor a second beginning of the same run makes
it forget.

The server's :class:`SessionWatch` makes the same check on its own calls: authors see a mistake in the first simulated
round.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from isthmus.errors import ProtocolError
from isthmus.federation import codec
from isthmus.federation.contract import Contract, Line, Way
from isthmus.federation.messages import SERVER, PartyId
from isthmus.federation.script import EVALUATION
from isthmus.federation.secure import MailOrder, MaskOrder
from isthmus.privacy.guard import RosterGuard, fixed_groups
from isthmus.privacy.keys import frame
from isthmus.privacy.mask_graph import choices_for
from isthmus.privacy.masks import SumTag, series_of

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from isthmus.federation.party import Invocation, Turn


@dataclass(frozen=True)
class AdmittedCall:
    """A call that a watch admitted: all it needs to remember of it, and no value of any message.

    Args:
        attempt: Incarnation of the server.
        count: The how many-th call of this handler in its round.
        request: Digest of the request, empty where there is none.
        rosters: Parties of each sum it took part in, by what was summed.
        changed: A replay that asked for something else than before.
    """

    party: PartyId
    phase: str
    round: int
    step: int
    attempt: int
    sequence: int
    handler: str
    count: int
    request: str = ""
    rosters: Mapping[str, tuple[PartyId, ...]] = field(default_factory=dict)
    changed: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"rosters": {content: list(parties) for content, parties in self.rosters.items()}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> AdmittedCall:
        known = {each.name: raw[each.name] for each in fields(cls)}
        return cls(**known | {"rosters": {content: tuple(parties) for content, parties in raw["rosters"].items()}})


@dataclass(frozen=True)
class RolledBack:
    """The parties of a site went back to their checkpoint of a step."""

    step: int


class CallLog(Protocol):
    """Where a site writes what its parties were asked. :meth:`admitted` is called before the handler runs: if it
    raises, the call is refused.
    """

    def admitted(self, call: AdmittedCall) -> None: ...
    def refused(self, party: PartyId, handler: str, text: str) -> None: ...


class MemoryLog:
    """A log that lives as long as its process."""

    def __init__(self) -> None:
        self.calls: list[AdmittedCall] = []
        self.refusals: list[tuple[PartyId, str, str]] = []

    def admitted(self, call: AdmittedCall) -> None:
        self.calls.append(call)

    def refused(self, party: PartyId, handler: str, text: str) -> None:
        self.refusals.append((party, handler, text))


@dataclass(frozen=True)
class WatchRules:
    """What a site adds to every contract.

    Args:
        least: Fewest parties of a sum.
        changes: Replays of a run that may ask for something else than before.
        survivors: How often the group of one handler's sums may change, where clients may be lost; None: no bound.
    """

    least: int = 2
    changes: int = 3
    survivors: int | None = None


class Admission(NamedTuple):
    """What a check found out."""

    line: Line
    nth: int
    request: str = ""
    rosters: Mapping[str, Collection[PartyId]] = {}
    repeated: bool = False
    changed: bool = False


_Place = tuple[int, int, str]
"""Incarnation, step, phase."""


def _place_of(call: Invocation) -> _Place:
    return call.turn.incarnation, call.turn.step, call.turn.phase


class ToldInStep(NamedTuple):
    """``digest``: of the calls that everybody of a role got up to this step.

    Args:
        place: Whether it is a step of the run or of the preparation before it, and its number.
    """

    place: tuple[bool, int]
    attempt: int
    digest: bytes


Told = dict[str, list[ToldInStep]]
"""By role, step by step."""


class Watch:
    """What one party may be asked in one run.

    Args:
        full: At a site: schedule, tags, digests of requests, replays.
        log: Where admitted and refused calls are written.
        told: What everybody was asked, shared by the watches of a client and its devices: what one of them is told
            reaches the other by mail.
    """

    def __init__(
        self,
        contract: Contract,
        party: PartyId,
        role: str,
        *,
        full: bool = False,
        rules: WatchRules | None = None,
        log: CallLog | None = None,
        told: Told | None = None,
    ) -> None:
        self.contract, self.party, self.role, self.full, self.log = contract, party, role, full, log
        self.rules = rules or WatchRules()
        # A sum of mail has one party less, its receiver; the minimum of each sum is checked with its roster.
        self.guard = RosterGuard(max(2, self.rules.least - 1), self.rules.survivors)
        self._secure = contract.secure
        self._lines = {(line.phase, line.handler): line for line in contract.lines if line.role == role}
        self._place: _Place | None = None
        self._seen: dict[str, dict[int, str]] = {}  # of this place: handler -> sequence -> digest of the request
        self._masked: set[tuple[str, int]] = set()  # mail of this place that was masked
        self._written: set[tuple[str, frozenset[PartyId]]] = set()  # rosters that are in the log, by what was summed
        self._asked: dict[tuple[int, str, str, int], set[tuple[int, str]]] = {}
        # Of this step: phase, sequence, handler and request of the calls that clients may be absent from.
        self._told_here: list[tuple[str, int, str, str]] = []
        self._changes = 0
        self._at = 0  # step of the party's state: of the last call, or of the checkpoint it went back to
        self._steps: set[int] = set()  # all steps in which it was ever called
        self._lost = False  # it was called before, and has not gone back to a checkpoint since
        self._told: Told = {} if told is None else told

    def restore(self, log: Iterable[AdmittedCall | RolledBack]) -> None:
        """Remember what was admitted before, by this process or another one."""
        for call in log:
            if isinstance(call, RolledBack):
                self._forget_told(call.step)
                continue
            if call.party != self.party:
                continue
            if call.sequence > 0:
                key = call.step, call.phase, call.handler, call.count
                self._asked.setdefault(key, set()).add((call.sequence, call.request))
                self._tell(call.phase, call.step, call.attempt, call.handler, call.request)
            self._changes += call.changed
            if self.contract.resumes(call.phase):
                self._steps.add(call.step)
                self._lost = True
            self._remember(call.rosters)
            self._written |= {(content, frozenset(parties)) for content, parties in call.rosters.items()}

    def _remember(self, rosters: Mapping[str, Collection[PartyId]]) -> None:
        for content, parties in rosters.items():
            self.guard.admit(content, parties, series_of(content), changing=self._may_lose(content))

    def _write(self, call: Invocation, admission: Admission) -> None:
        """Write an admitted call to the log, unless that has it, and its rosters, already. A call may be repeated with
        rosters that were not in it the first time.
        """
        rosters = {content: frozenset(parties) for content, parties in admission.rosters.items()}
        if self.log is None or (admission.repeated and rosters.items() <= self._written):
            return
        turn, asked = call.turn, {content: tuple(sorted(parties)) for content, parties in rosters.items()}
        where = turn.phase, turn.round, turn.step, turn.incarnation, call.sequence if admission.nth else 0
        what = call.handler, admission.nth, admission.request, asked, admission.changed
        self.log.admitted(AdmittedCall(self.party, *where, *what))
        self._written |= rosters.items()

    def _may_lose(self, content: str) -> bool:
        phase, _, handler, _ = content.split("/", 3)
        line = self._lines.get((phase, handler))
        return line is not None and self._at_least(line) > 0

    def _at_least(self, line: Line) -> int:
        """Parties with which a sum of this line goes on; 0: everybody is needed."""
        return self.contract.at_least if line.survivors else 0

    def rolled_back(self, step: int) -> None:
        """The party went back to its checkpoint of this step."""
        self._at, self._lost = step, False
        self._forget_told(step)

    def _forget_told(self, step: int) -> None:
        """What was asked after a checkpoint has no part in the state any more."""
        steps = self._told.get(self.role, [])
        while steps and steps[-1].place > (True, step):
            steps.pop()

    def check_commit(self, step: int) -> None:
        """Refuse to keep the party's state as that of a step it does not belong to: a server that could have a fresh
        state kept so would go back to it, and be answered again under fresh noise.
        """
        if self.full and (self._lost or step < self._at or any(self._at < known <= step for known in self._steps)):
            error = ProtocolError(f"{self.party}: the state of step {self._at} is not that of step {step}")
            self._note("commit", error)
            raise error

    def check_catch_up(self, step: int, checkpoint: bool) -> None:
        """Refuse to count as back at a step other than one after all in which this party was ever asked: no step is
        answered from two states. Nor without a checkpoint of this step or before: a site that was started again would
        answer from a fresh state, under fresh noise.
        """
        error = None
        if not self.contract.at_least:
            error = ProtocolError(f"{self.party}: nobody may be absent in this run, so nobody catches up")
        elif self.full and not checkpoint:
            error = ProtocolError(f"{self.party}: holds no checkpoint of step {step} or before to go back to")
        elif self.full and any(known > step + 1 for known in self._steps):
            error = ProtocolError(f"{self.party}: was asked in steps after {step} already, and does not go back there")
        if error is not None:
            self._note("catch_up", error)
            raise error
        # What it was asked in the step it was lost in has no part in its state, and is not asked for again.
        self._steps = {known for known in self._steps if known <= step}

    def check_export(self) -> None:
        """Refuse to keep a state as the model of the run that is not one of the run."""
        if self._lost:
            error = ProtocolError(
                f"{self.party}: its state is not that of the run: it must go back to a checkpoint first"
            )
            self._note("export", error)
            raise error

    # -- what everybody was asked ------------------------------------------------------------------

    def asked_so_far(self, sequence: int, handler: str) -> bytes:
        """A digest of all that this party was asked in the run, beside this very call, and everybody else in
        its sum must have been asked too. Masks are derived from it: what a party answers depends on what it was told
        before, so parties that were told different things have no total in common. Empty in a simulation.
        """
        if not self.full:
            return b""
        parts: list[str | int | bytes] = []
        for role, steps in sorted(self._told.items()):
            parts += (role, steps[-1].digest) if steps else ()
        # Of calls that some may be absent from: who is in a sum was there in all of its round, and remembers no other.
        # Numbers are the server's, so they say nothing of which call came first: all count but this one.
        own = "" if self._place is None else self._place[2], sequence, handler
        for told in self._told_here:
            parts += () if told[:3] == own else told
        return hashlib.sha256(frame(*parts)).digest()

    @property
    def forgets(self) -> bool:
        """Whether a client's state goes at the beginning of every round: who is back was not told what others were."""
        return self.full and self.contract.at_least > 0

    def _tell(self, phase: str, step: int, attempt: int, handler: str, request: str) -> None:
        """Add a call that everybody gets; a step that is run again begins anew."""
        line = self._lines.get((phase, handler))
        if line is None or line.way == "receive" or line.some or line.groups or self._at_least(line):
            return  # who was absent was not asked: in other rounds such a line leaves nothing behind
        place, steps = (self.contract.resumes(phase), step), self._told.setdefault(self.role, [])
        while steps and (steps[-1].place > place or (steps[-1].place == place and steps[-1].attempt != attempt)):
            steps.pop()
        before = steps[-1].digest if steps else b""
        entry = frame(before, *place, phase, handler, "" if line.each else request)
        if steps and steps[-1].place == place:
            steps.pop()
        steps.append(ToldInStep(place, attempt, hashlib.sha256(entry).digest()))

    # -- one call ----------------------------------------------------------------------------------

    def check(self, call: Invocation) -> Admission:
        """Refuse a call outside the contract; changes nothing."""
        turn = call.turn
        line = self._lines.get((turn.phase, call.handler))
        if line is None:
            raise ProtocolError(
                f"{call.role}.{call.handler} is not in the contract of this run for phase {turn.phase!r}"
            )
        _check_way(self.party, line, call, self._secure)
        place = turn.incarnation, turn.step, turn.phase
        seen = self._seen.get(call.handler, {}) if place == self._place else {}
        if self.full:
            self._check_turn(turn, place)
        if call.mask is not None and not call.mask.runs_handler:
            return self._check_step(call, line, call.mask)
        if call.mail is not None and call.mail.orders is not None and call.parcels is None:
            return self._check_orders(call, line, seen, call.mail)
        if call.mail is not None and call.parcels is None and call.mail.held != call.sequence:
            raise ProtocolError(f"{self.party}: mail of {line.name} would be held under another sequence than its call")
        self._check_sequence(call, line)
        request = codec.digest(call.argument) if self.full and call.argument is not None else ""
        rosters = self._rosters(call, line, request)
        if call.sequence in seen:
            if seen[call.sequence] != request:
                raise ProtocolError(
                    f"{self.party}: sequence {call.sequence} of {line.name} asks for something else now"
                )
            return Admission(line, list(seen).index(call.sequence) + 1, request, rosters, repeated=True)
        count = len(seen) + 1
        if count > line.most:
            raise ProtocolError(
                f"{self.party}: {line.name} may be called {line.most} times in a round of {turn.phase!r}, not {count}"
            )
        return Admission(line, count, request, rosters, False, self.full and self._changed(call, line, count, request))

    def _check_sequence(self, call: Invocation, line: Line) -> None:
        phase = call.turn.phase
        if self.full and not 0 < call.sequence <= self.contract.calls[phase]:
            raise ProtocolError(
                f"{self.party}: sequence {call.sequence} of {line.name} is none that a round of {phase!r} has"
            )

    def _check_turn(self, turn: Turn, place: _Place) -> None:
        self.contract.check_turn(turn.phase, turn.round, turn.step)
        if self._place is not None and self._place[:2] == place[:2] and EVALUATION == self._place[2] != turn.phase:
            raise ProtocolError(f"{self.party}: {turn.phase} of step {turn.step} is over")
        if not self.contract.resumes(turn.phase):
            return
        again = self._place is not None and place[0] != self._place[0] and turn.step <= self._at
        if self._lost or again or any(self._at < step < turn.step for step in self._steps):
            # Its state is not the one that this step follows from: the answer would be another one than before, under
            # the same noise, or the same one under other noise.
            raise ProtocolError(f"{self.party}: step {turn.step} does not follow from the state of step {self._at}")

    def _check_step(self, call: Invocation, line: Line, order: MaskOrder) -> Admission:
        """A step around a masked message where parties may be lost; the group that is confirmed is what is summed."""
        if call.argument is not None or not self._at_least(line):
            raise ProtocolError(f"{self.party}: {line.name} is not summed over those who are left in this run")
        self._check_sequence(call, line)
        # The request is not known before the call that brings it, which must be of this tag.
        self._check_tag(call, line, order, line.handler, call.sequence, SERVER, order.tag.request)
        self._check_roster(line, order, self.contract.parties[line.role], SERVER, mine=True)
        assert order.step is not None
        rosters: dict[str, Collection[PartyId]] = {}
        if order.step.name == "confirm":
            rosters = {order.tag.content: frozenset(order.step.request.group)}
        # Of these steps only the group is written down, when it is confirmed: with it a sum becomes readable.
        return Admission(line, 0, "", rosters, repeated=True)

    def _begin_place(self, call: Invocation) -> None:
        place = _place_of(call)
        if place != self._place:
            if self._place is None or place[:2] != self._place[:2]:
                self._told_here.clear()
            self._place, self._seen = place, {}
            self._masked.clear()

    def enter(self, call: Invocation, admission: Admission) -> None:
        """Remember an admitted call; with a log, only after it was written there."""
        self._remember(admission.rosters)
        turn = call.turn
        self._write(call, admission)
        self._begin_place(call)
        if call.mask is not None and not call.mask.runs_handler:
            return
        self._at = turn.step
        if self.full and self.contract.resumes(turn.phase):
            self._steps.add(turn.step)
        if call.sequence < 0:
            self._masked.add((call.handler, call.sequence))
        else:
            self._seen.setdefault(call.handler, {})[call.sequence] = admission.request
            if self._at_least(admission.line) and not admission.repeated:
                self._told_here.append((turn.phase, call.sequence, call.handler, admission.request))
            if self.full and not admission.repeated:
                key = turn.step, turn.phase, call.handler, admission.nth
                self._asked.setdefault(key, set()).add((call.sequence, admission.request))
                self._changes += admission.changed
                self._tell(turn.phase, turn.step, turn.incarnation, call.handler, admission.request)

    def refuse(self, call: Invocation, error: ProtocolError) -> None:
        """Note a refused call."""
        self._note(call.handler, error)

    def _note(self, what: str, error: ProtocolError) -> None:
        if self.full:
            logger.warning("refused: %s", error)
        if self.log is not None:
            self.log.refused(self.party, what, str(error))

    def _changed(self, call: Invocation, line: Line, count: int, request: str) -> bool:
        """Whether a replay asks for something else than any attempt before; too many such replays are refused."""
        known = self._asked.get((call.turn.step, line.phase, line.handler, count))
        if known is None or (call.sequence, request) in known:
            return False
        if line.fresh and any(call.sequence == sequence for sequence, _ in known):
            return False
        if self._changes >= self.rules.changes:
            raise ProtocolError(
                f"{self.party}: step {call.turn.step} was run before, and {line.name} now asks for something else; "
                f"{self.rules.changes} such changes are allowed in a run"
            )
        return True

    # -- sums --------------------------------------------------------------------------------------

    def _rosters(self, call: Invocation, line: Line, request: str) -> dict[str, Collection[PartyId]]:
        """The sums this call takes part in, checked: orders to mask and to unmask name this call and everybody."""
        if call.mask is not None:
            self._check_tag(call, line, call.mask, line.handler, call.sequence, SERVER, "" if line.each else request)
            self._check_roster(line, call.mask, self.contract.parties[line.role], SERVER, mine=True)
            if self._at_least(line):
                return {}  # over whom it is summed is known, and checked, when it is confirmed
            return {call.mask.tag.content: call.mask.roster.members}
        if call.parcels is not None and call.mail is not None:
            self._check_unmasking(call, line, call.mail)
        return {}

    def _check_orders(self, call: Invocation, line: Line, seen: Mapping[int, str], mail: MailOrder) -> Admission:
        """The second half of summed mail: orders to mask, by receiver, for mail that the first half made."""
        if call.argument is not None or call.sequence != -mail.held or mail.held not in seen:
            raise ProtocolError(f"{self.party} holds no mail of {line.name} for this order to mask")
        rosters: dict[str, Collection[PartyId]] = {}
        for receiver, order in (mail.orders or {}).items():
            if not any(receiver in self.contract.parties.get(role, ()) for role in line.to) and not (
                receiver == SERVER and SERVER in line.to
            ):
                raise ProtocolError(f"{self.party}: {line.name} does not write to {receiver}")
            self._check_tag(call, line, order, line.handler, mail.held, receiver, seen[mail.held])
            self._check_roster(line, order, self.contract.parties[line.role], receiver, mine=True)
            rosters[order.tag.content] = order.roster.members
        count = list(seen).index(mail.held) + 1
        repeated = (line.handler, call.sequence) in self._masked
        return Admission(line, count, "", rosters, repeated=repeated)

    def _check_unmasking(self, call: Invocation, line: Line, mail: MailOrder) -> None:
        orders = mail.orders or {}
        for receiver, order in orders.items():
            sender = next((name for name in line.paired if name.partition(".")[2] == order.tag.handler), None)
            if sender is None or receiver != self.party:
                raise ProtocolError(f"{self.party}: {line.name} does not take mail of {order.tag.handler}")
            role = sender.partition(".")[0]
            own = self._seen.get(order.tag.handler, {}).get(mail.held) if role == self.role else None
            request = order.tag.request if own is None or not self.full else own
            self._check_tag(call, line, order, order.tag.handler, mail.held, self.party, request)
            self._check_roster(line, order, self.contract.parties[role], self.party, mine=False)
        if not orders and not line.some and self._others(line):
            raise ProtocolError(f"{self.party}: {line.name} takes mail of everybody, and none came")

    def _others(self, line: Line) -> bool:
        roles = {name.partition(".")[0] for name in line.paired}
        return any(self.contract.parties[role] - {self.party} for role in roles)

    def _check_tag(
        self, call: Invocation, line: Line, order: MaskOrder, handler: str, sequence: int, receiver: str, request: str
    ) -> None:
        """The tag of a sum is that of the call; only ``run``, the server's name for its process, is its own."""
        if not self.full:
            return
        turn = call.turn
        wanted = SumTag(order.tag.run, turn.phase, turn.round, sequence, handler, turn.incarnation, receiver, request)
        if order.tag != wanted:
            wrong = next(
                each.name for each in fields(wanted) if getattr(order.tag, each.name) != getattr(wanted, each.name)
            )
            raise ProtocolError(f"{self.party}: the order to mask for {line.name} is of another {wrong} than the call")

    def _check_roster(
        self, line: Line, order: MaskOrder, everybody: frozenset[PartyId], receiver: PartyId, *, mine: bool
    ) -> None:
        """Everybody takes part unless the script says otherwise, and never fewer than the site's minimum."""
        parties, others = order.roster.members, everybody - {receiver}
        if line.groups:
            if parties not in map(frozenset, fixed_groups(others, line.groups)):
                raise ProtocolError(
                    f"{self.party}: a sum of {line.name} is over one of {line.groups} fixed groups in this run, not "
                    f"over these {len(parties)} parties"
                )
        elif parties != others and not (line.some and parties < others):
            raise ProtocolError(
                f"{self.party}: a sum of {line.name} is over everybody in this run ({len(others)} parties), not over "
                f"{len(parties)}"
            )
        least = self.rules.least if receiver not in everybody else max(2, self.rules.least - 1)
        if len(parties) < least:
            raise ProtocolError(
                f"{self.party}: a sum of {line.name} over {len(parties)} parties; at least {least} must"
            )
        chosen, at_least = order.roster.chosen, self._at_least(line)
        if order.roster.at_least != at_least or (order.step is None) != (not at_least):
            raise ProtocolError(
                f"{self.party}: a sum of {line.name} goes on with {at_least or 'no fewer than all'} parties in this "
                f"run, not with {order.roster.at_least or 'all'}"
            )
        if chosen and (chosen != choices_for(len(parties), at_least) or not (line.groups or parties == others)):
            # Whoever chooses a roster, or how many neighbours there are, could leave a party with bad ones only.
            raise ProtocolError(
                f"{self.party}: a sum of {line.name} over {len(parties)} parties would be masked with the wrong number "
                "of neighbours"
            )
        if mine and self.party not in parties:
            raise ProtocolError(f"{self.party} is not on the roster of a sum it is asked to take part in")

    def check_mail(self, call: Invocation, sender: PartyId, handler: str) -> None:
        """Mail must come from a party and a handler that write to this one."""
        line = self._lines.get((call.turn.phase, call.handler))
        for name in line.paired if line is not None else ():
            role, _, sends = name.partition(".")
            if sends == handler and sender in self.contract.parties[role]:
                return
        raise ProtocolError(f"{self.party}: {call.role}.{call.handler} does not take mail of {handler} from {sender}")


def _check_way(party: PartyId, line: Line, call: Invocation, secure: bool) -> None:
    """The verb by which a handler is called, and whether it brings what that verb brings."""
    masked, way = secure and line.summed, line.way
    if way == "receive":
        if call.parcels is None or call.argument is not None or (call.combine == "sum") != line.summed:
            raise ProtocolError(f"{party}: {line.name} receives {'summed ' * line.summed}mail and nothing else")
    elif call.parcels is not None or call.combine != "each":
        raise ProtocolError(f"{party}: {line.name} does not receive mail")
    if way in ("ask", "total"):
        if call.mail is not None:
            raise ProtocolError(f"{party}: {line.name} sends no mail")
        if (call.mask is not None) == masked:
            return
    elif call.mask is None and (call.mail is not None) == masked:
        return
    if masked:
        raise ProtocolError(
            f"{party}: {line.name} is summed behind masks in this run, and the call has no order to mask"
        )
    raise ProtocolError(
        f"{party}: {line.name} is not summed behind masks in this run, and the call has an order to mask"
    )


# -- the server's own check ------------------------------------------------------------------------


class SessionWatch:
    """The server's check of its own calls, for authors: what a party would refuse is refused here, with what to write
    in the script.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.used: Counter[tuple[str, str, str]] = Counter()
        self._round: Counter[tuple[str, str, str]] = Counter()

    def begin(self) -> None:
        """A new round: counts begin again."""
        self._round.clear()

    def check(
        self, phase: str, role: str, handler: str, way: Way, *, everybody: bool = True, each: bool = False
    ) -> None:
        """Refuse a verb that the script does not have in this phase."""
        line = self.contract.by_place.get((phase, role, handler))
        method, name = self.contract.method, f"{role}.{handler}"
        if line is None or line.way != way:
            there = f"has it as {_WORDS[line.way]}" if line is not None else "does not have it"
            advice = "correct the script"
            if line is not None and phase == EVALUATION and line.way == "total":
                advice = "return scores_of(federation, handler, request), or run without secure_sum"
            raise ProtocolError(
                f"{name} is called by {_WORDS[way]} in phase {phase!r}, but the script of {method} {there}: {advice}"
            )
        if not (everybody or line.some or line.groups):
            raise ProtocolError(
                f"{name} is called at a part of the parties in phase {phase!r}: write some=True in the script of "
                f"{method}"
            )
        if each and not line.each:
            raise ProtocolError(
                f"{name} is called at parties that are asked different things in phase {phase!r}: write each=True in "
                f"the script of {method}"
            )
        place = phase, role, handler
        self.used[place] += 1
        self._round[place] += 1
        if self._round[place] > line.most_in_all:
            raise ProtocolError(
                f"{name} is called more than {line.most_in_all} times in a round of {phase!r}: raise `most` in the "
                f"script of {method}"
            )

    def check_at_least(self, phase: str, role: str, handler: str, at_least: int) -> None:
        """Refuse a sum that can do without parties that the script or the run needs."""
        if not self.contract.by_place[phase, role, handler].survivors:
            raise ProtocolError(
                f"{role}.{handler} is summed with at_least in phase {phase!r}: write survivors=True in the script of "
                f"{self.contract.method}"
            )
        if at_least != self.contract.at_least:
            raise ProtocolError(
                f"{role}.{handler}: at_least={at_least}, but this run goes on with "
                f"{self.contract.at_least or 'all'} of {len(self.contract.clients)} clients (least_clients): pass "
                "at_least=federation.least"
            )

    def check_pair(self, phase: str, send: tuple[str, str], receivers: Sequence[tuple[str, str]], summed: bool) -> None:
        """Refuse an exchange whose two ends the script does not pair, or that is delivered otherwise."""
        line = self.contract.by_place[phase, *send]
        for role, handler in receivers:
            if f"{role}.{handler}" not in line.paired:
                raise ProtocolError(
                    f"mail of {line.name} goes to {role}.{handler} in phase {phase!r}, which the script of "
                    f"{self.contract.method} does not say: name it in mail(...)"
                )
        if summed != line.summed:
            raise ProtocolError(
                f"mail of {line.name} is {'summed' if summed else 'not summed'} in phase {phase!r}: write "
                f"summed={summed} in the script of {self.contract.method}"
            )

    def unused(self) -> list[Line]:
        """Lines that no call was made by."""
        return [line for line in self.contract.lines if not self.used[line.phase, line.role, line.handler]]


_WORDS: dict[Way, str] = {"ask": "call()", "total": "sum()", "send": "exchange()", "receive": "exchange()"}
