"""The runtime of one party: the only access to its client object.

It holds the allow-list, answers a repeated sequence from memory, keeps the party's last two tags and rolls back to
them. Engines differ in how a call reaches this class, never in what happens here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Protocol

from isthmus.errors import DataError, ProtocolError
from isthmus.federation import codec
from isthmus.federation.interface import Failure, total
from isthmus.federation.messages import Message, PartyId
from isthmus.federation.roles import Client, RoleTable, Signature
from isthmus.federation.secure import MailOrder, Masked, MaskOrder, mask_reply, plan_mail, take_step, unmask
from isthmus.federation.watch import Watch
from isthmus.privacy.flatten import WordRows
from isthmus.privacy.masks import SumParty
from isthmus.records import Record, make_record

logger = logging.getLogger(__name__)

Combine = Literal["each", "sum"]


@dataclass(frozen=True, slots=True)
class Turn:
    """Which round is being run. ``incarnation`` grows with every restart of the server, ``step`` with every round of
    the run: calls of an older one, delayed in transit, are refused."""

    incarnation: int
    phase: str
    round: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Parcel:
    """Mail between parties. The clear header (type, kinds through the type, size) is what a relay may see."""

    sender: PartyId
    receiver: PartyId
    content: Message


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call to one party: ``argument`` for ``call`` and ``send``, ``parcels`` for ``receive``; ``mask`` where only a
    sum may be seen, ``mail`` for mail of which only a sum may be seen."""

    party: PartyId
    role: str
    handler: str
    turn: Turn
    sequence: int
    argument: Message | None = None
    parcels: tuple[Parcel, ...] | None = None
    combine: Combine = "each"
    mask: MaskOrder | None = None
    mail: MailOrder | None = None


Outcome = Message | tuple[Parcel, ...] | Failure | None
Tag = tuple[Record, Record | None, int]
"""A party's state, the state validation has picked and the round of that."""


class Store(Protocol):
    """Where a party keeps its tags across restarts."""

    def save(self, step: int, state: Record) -> None: ...
    def load(self, step: int, record: type[Record]) -> Record: ...
    def steps(self) -> tuple[int, ...]: ...
    def forget(self, keep: Sequence[int]) -> None: ...


class Party:
    """One party: a client object behind its runtime.

    Args:
        make: Builds the client object from data and config, nothing else; called again after a crash.

    ``store`` keeps tags across restarts and out of memory; without one they live here. ``watch`` refuses calls outside
    the contract of the run; without one every marked handler may be called.
    """

    def __init__(self, name: PartyId, role: str, make: Callable[[], Client[Any, Any]], table: RoleTable) -> None:
        self.name, self.role, self.table = name, role, table
        self.store: Store | None = None
        self.watch: Watch | None = None
        self._make = make
        self._tags: dict[int, Tag | None] = {}  # None: in the store
        self._selected: Record | None = None
        self._selected_round = 0
        self._turn: Turn | None = None
        self._sums: SumParty | None = None
        self._first: Record | None = None  # where a round begins, if clients of the run remember nothing
        self._held: dict[
            int, dict[PartyId, Message]
        ] = {}  # mail that waits for its masks, by the sequence it was made under
        self._memory: dict[int, tuple[str, Outcome]] = {}
        self._sum_steps: dict[tuple[int, str, str], Outcome] = {}
        self.client = make()
        self.client.setup()
        self.client.enter("init", 0, 0)
        self.client.state = self.client.initial_state()
        self.state_type: type[Record] = type(self.client.state)

    # -- calls -------------------------------------------------------------------------------------

    def invoke(self, call: Invocation) -> Outcome:
        """Run an allowed handler. A handler that raises leaves the party's state as it was."""
        try:
            signature = self.admit(call)
        except ProtocolError as error:
            return Failure("protocol", type(error).__name__, error)
        if call.mask is not None and call.mask.step is not None and not call.mask.runs_handler:
            return self._step_of_sum(call, call.mask, call.mask.step.name)
        if call.sequence in self._memory:
            return self._memory[call.sequence][1]
        if signature.sends and call.sequence > 0:
            self._forget_mail()
        before = self.client.state
        self.client.enter(call.turn.phase, call.turn.round, call.sequence)
        try:
            if call.mail is not None and call.mail.orders is not None and call.parcels is None:
                outcome: Outcome = self._masked_mail(call, call.mail.held, call.mail.orders)
            else:
                outcome = self._run(call, signature)
            if call.mask is not None:
                outcome = self.mask(outcome, call)
            elif call.mail is not None and call.mail.orders is None:
                outcome = self._hold(outcome, call)
        except (
            Exception
        ) as error:  # whatever a method's code raises becomes a failure of this party, not of the process
            self.client.state = before
            logger.debug("%s: handler %s failed", self.name, call.handler, exc_info=True)
            return Failure("protocol" if isinstance(error, ProtocolError) else "handler", type(error).__name__, error)
        self._memory[call.sequence] = call.handler, outcome
        return outcome

    def _forget_mail(self) -> None:
        """Mail sent before is not asked for again once other mail is: a round of many exchanges holds that of one."""
        for sequence, (handler, outcome) in self._memory.items():
            if isinstance(outcome, tuple):
                over = ProtocolError(f"{self.name}: the mail of {handler} is over")
                self._memory[sequence] = handler, Failure("protocol", type(over).__name__, over)
        self._held.clear()

    def _step_of_sum(self, call: Invocation, order: MaskOrder, step: str) -> Outcome:
        """A step around a masked message, answered once: asked for again, the first answer is given again."""
        asked = call.sequence, call.handler, step
        if asked not in self._sum_steps:
            try:
                if self._sums is None:
                    raise ProtocolError(f"{self.name} has no key for sums yet")
                self._sum_steps[asked] = take_step(self._sums, order, self._asked_so_far(call))
            except ProtocolError as error:
                return Failure("protocol", type(error).__name__, error)
        return self._sum_steps[asked]

    def sum_key(self) -> bytes:
        """This party's public key for secure sums of this process; its secret half never leaves it."""
        if self._sums is None:
            self._sums = SumParty(self.name, guard=None if self.watch is None else self.watch.guard)
        return self._sums.public_key

    def mask(self, outcome: Outcome, call: Invocation, rows: WordRows | None = None) -> Message:
        """A reply as it leaves this party where the call brings an order to mask."""
        if not isinstance(outcome, Message) or self._sums is None or call.mask is None:
            raise ProtocolError(f"{self.name}: {call.handler} gives nothing that could be masked")
        return mask_reply(self._sums, outcome, call.mask, self._asked_so_far(call), rows)

    def _asked_so_far(self, call: Invocation) -> bytes:
        return b"" if self.watch is None else self.watch.asked_so_far(call.sequence, call.handler)

    def _hold(self, outcome: Outcome, call: Invocation) -> Message:
        if not isinstance(outcome, tuple) or self._sums is None:
            raise ProtocolError(f"{self.name}: {call.handler} sends no mail that could be masked")
        self._held[call.sequence] = {parcel.receiver: parcel.content for parcel in outcome}
        return plan_mail(self._held[call.sequence], self.name, self.client.dummy_positions)

    def _masked_mail(self, call: Invocation, held: int, orders: Mapping[PartyId, MaskOrder]) -> tuple[Parcel, ...]:
        """Held mail, each message masked for its receiver."""
        mail = {receiver: content for receiver, content in self._held.get(held, {}).items() if receiver != self.name}
        if self._sums is None or not mail or mail.keys() != orders.keys():
            raise ProtocolError(f"{self.name} holds no such mail of {call.handler}: repeat the round")
        if any(
            order.tag.receiver != receiver or receiver in order.roster.members for receiver, order in orders.items()
        ):
            raise ProtocolError(f"{self.name}: mail would be masked for somebody else than its receiver")
        context = self._asked_so_far(call)
        return tuple(
            Parcel(self.name, receiver, mask_reply(self._sums, mail[receiver], orders[receiver], context))
            for receiver in sorted(mail)
        )

    def _unmasked(self, call: Invocation, wanted: type[Message], order: MailOrder) -> Message | None:
        """The sum of masked mail, and of what this party wrote to itself."""
        assert call.parcels is not None
        foreign: list[Message] = []
        if order.orders:
            masked = {parcel.sender: parcel.content for parcel in call.parcels if isinstance(parcel.content, Masked)}
            if len(masked) != len(call.parcels) or any(parcel.receiver != self.name for parcel in call.parcels):
                raise ProtocolError(f"{self.name}: masked mail of another receiver, or mail that is not masked")
            if list(order.orders) != [self.name] or order.orders[self.name].tag.receiver != self.name:
                raise ProtocolError(f"{self.name}: the order to unmask mail is for somebody else")
            foreign = [unmask(masked, order.orders[self.name], wanted)]
        elif call.parcels:
            raise ProtocolError(f"{self.name}: masked mail came without its roster")
        own = self._held.get(order.held, {}).get(self.name)
        if own is not None:
            _expect(own, wanted, call.handler)
        together = [*foreign, *([own] if own is not None else [])]
        return total(together) if together else None

    def guard_by(self, watch: Watch) -> None:
        """From now on refuse what this watch refuses."""
        self.watch = watch
        self._first = self.client.state if watch.forgets else None
        if self._sums is not None:
            self._sums.guard = watch.guard

    def admit(self, call: Invocation) -> Signature:
        """Refuse a call that is not for this party, not marked, not in the contract, or of another time; enter its
        round.
        """
        try:
            return self._admit(call)
        except ProtocolError as error:
            if self.watch is not None:
                self.watch.refuse(call, error)
            raise

    def _admit(self, call: Invocation) -> Signature:
        if call.party != self.name or call.role != self.role:
            raise ProtocolError(f"a call for {call.role} {call.party} reached {self.role} {self.name}")
        signature = self.table.signature(call.role, call.handler)
        admission = None if self.watch is None else self.watch.check(call)
        self.begin(call.turn)
        known = self._memory.get(call.sequence)
        if known is not None and known[0] != call.handler:
            raise ProtocolError(
                f"{self.name}: sequence {call.sequence} was a call of {known[0]}, now of {call.handler}"
            )
        if self.watch is not None and admission is not None:
            self.watch.enter(call, admission)
        return signature

    def begin(self, turn: Turn) -> None:
        """Enter a round. Scratch and remembered answers of the last one are dropped."""
        if turn is self._turn or turn == self._turn:
            return
        if self._turn is not None and (turn.incarnation, turn.step) < (self._turn.incarnation, self._turn.step):
            given, serving = (f"incarnation {t.incarnation}, step {t.step}" for t in (turn, self._turn))
            raise ProtocolError(f"{self.name}: call of {given}, already serving {serving}")
        before, self._turn = self._turn, turn
        self._forget_calls()
        self.client.scratch = SimpleNamespace()
        again = before is not None and (before.incarnation, before.step) == (turn.incarnation, turn.step)
        if self._first is not None and not again:
            self.client.state = self.client.forgotten(self._first)

    def _forget_calls(self) -> None:
        self._memory.clear()
        self._held.clear()
        self._sum_steps.clear()
        if self._sums is not None:
            self._sums.open.clear()

    def _run(self, call: Invocation, signature: Signature) -> Outcome:
        function = getattr(self.client, call.handler)
        if call.parcels is not None:
            result = function(self._inbox(call, signature))
        elif signature.mail:
            raise ProtocolError(f"handler {call.handler} receives mail, got a call")
        elif signature.request is None:
            if call.argument is not None:
                raise ProtocolError(f"handler {call.handler} takes no message, got {type(call.argument).__name__}")
            result = function()
        else:
            _expect(call.argument, signature.request, call.handler)
            result = function(call.argument)
        return self._outcome(result, call, signature)

    def _inbox(self, call: Invocation, signature: Signature) -> Mapping[PartyId, Message] | Message | None:
        assert call.parcels is not None
        if signature.request is None or signature.mail != (call.combine == "each"):
            raise ProtocolError(f"handler {call.handler} does not receive mail with combine={call.combine!r}")
        if call.mail is not None:
            return self._unmasked(call, signature.request, call.mail)
        for parcel in call.parcels:
            _expect(parcel.content, signature.request, call.handler)
            if parcel.receiver != self.name:
                raise ProtocolError(f"mail for {parcel.receiver} reached {self.name}")
        ordered = sorted(call.parcels, key=lambda parcel: parcel.sender)
        if call.combine == "sum":
            return total([parcel.content for parcel in ordered]) if ordered else None
        return {parcel.sender: parcel.content for parcel in ordered}

    def _outcome(self, result: object, call: Invocation, signature: Signature) -> Outcome:
        if signature.reply is None:
            if result is not None:
                raise ProtocolError(f"handler {call.handler} declares no reply but returned {type(result).__name__}")
            return None
        if not signature.sends:
            _expect(result, signature.reply, call.handler)
            assert isinstance(result, Message)
            return result
        if not isinstance(result, Mapping):
            raise ProtocolError(f"handler {call.handler} must return a mapping from party to message")
        parcels = []
        for receiver in sorted(result, key=str):
            content = result[receiver]
            if not isinstance(receiver, str):
                raise ProtocolError(
                    f"handler {call.handler} must address parties by name, got {type(receiver).__name__}"
                )
            _expect(content, signature.reply, call.handler)
            parcels.append(Parcel(self.name, receiver, content))
        return tuple(parcels)

    # -- tags --------------------------------------------------------------------------------------

    def commit(self, step: int) -> None:
        """Tag the present state; the last two tags are kept."""
        if self.watch is not None:
            self.watch.check_commit(step)
        held: Tag | None = self.client.state, self._selected, self._selected_round
        if self.store is not None:
            fields: dict[str, Any] = {
                "state": self.client.state,
                "selected": self._selected,
                "selected_round": self._selected_round,
            }
            self.store.save(step, _snapshot_type(self.state_type)(**fields))
            held = None
        self._tags[step] = held
        for old in sorted(self._tags)[:-2]:
            del self._tags[old]
        if self.store is not None:
            self.store.forget(keep=sorted(self._tags))

    def tags(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._tags) | set(self.store.steps() if self.store is not None else ())))

    def fetch(self, step: int) -> None:
        """Make sure a tag can be read; changes nothing else."""
        if self._tags.get(step) is None:
            if self.store is None:
                raise DataError(f"{self.name} holds no tag {step}; start the run again")
            snapshot: Any = self.store.load(step, _snapshot_type(self.state_type))
            self._tags[step] = snapshot.state, snapshot.selected, snapshot.selected_round

    def rollback(self, step: int) -> None:
        """Return to a tag, as if nothing had happened since: newer tags are forgotten, calls of an older incarnation
        stay refused.
        """
        self.fetch(step)
        remembered, self.client = self.client.remembered, self._make()
        self.client.remembered = remembered
        self.client.setup()
        tag = self._tags[step]
        assert tag is not None  # fetched
        self.client.state, self._selected, self._selected_round = tag
        self._tags = {tag: kept for tag, kept in self._tags.items() if tag <= step}
        if self.store is not None:
            kept = [tag for tag in self.store.steps() if tag <= step]
            self.store.forget(keep=kept)
            self._tags |= dict.fromkeys(kept)
        self._forget_calls()
        if self.watch is not None:
            self.watch.rolled_back(step)

    def catch_up(self, step: int) -> None:
        """Be back after an absence: from the newest tag, whatever was begun since is dropped; the state counts as that
        of this step.
        """
        tags = [tag for tag in self.tags() if tag <= step]
        if self.watch is not None:
            self.watch.check_catch_up(step, bool(tags))
        if tags:
            self.rollback(tags[-1])
        if self.watch is not None:
            self.watch.rolled_back(step)
        self.commit(step)

    def select(self) -> None:
        """Remember the present state as the one validation picked."""
        self._selected = self.client.state
        self._selected_round = self._turn.round if self._turn is not None else 0

    def restore_selected(self) -> None:
        """Return to the state validation picked."""
        if self._selected is not None:
            self.client.state = self._selected

    @property
    def model_round(self) -> int | None:
        """Round of the state validation picked; None where it picked none, so that the last counts."""
        return self._selected_round or None


def load_state(store: Store, step: int, state: type[Record]) -> Record:
    """The state a party kept under a tag, for its owner."""
    snapshot: Any = store.load(step, _snapshot_type(state))
    found: Record = snapshot.state
    return found


def _snapshot_type(state: type[Record]) -> type[Record]:
    """What a tag holds on disk: the state, and the state validation has picked so far."""
    if state not in _SNAPSHOTS:
        _SNAPSHOTS[state] = make_record(
            f"Snapshot[{state.__name__}]", state=state, selected=state | None, selected_round=int
        )
    return _SNAPSHOTS[state]


_SNAPSHOTS: dict[type[Record], type[Record]] = {}


def _expect(message: object, wanted: type[Message] | None, handler: str) -> None:
    if wanted is None or type(message) is not wanted:
        name = "no message" if wanted is None else wanted.__name__
        raise ProtocolError(f"handler {handler} expects {name}, got {type(message).__name__}")


def transfer_copy(message: Message) -> Message:
    """Cross a trust boundary inside one process: a checked copy."""
    return codec.copy(message)


def transfer_wire(message: Message) -> Message:
    """Cross a trust boundary through the full wire codec: the same bits as :func:`transfer_copy`."""
    return codec.decode(codec.encode(message), type(message))


def readdress(call: Invocation, argument: Message | None, parcels: tuple[Parcel, ...] | None) -> Invocation:
    """The same call with contents that have crossed a process or trust boundary."""
    return Invocation(
        call.party,
        call.role,
        call.handler,
        call.turn,
        call.sequence,
        argument,
        parcels,
        call.combine,
        call.mask,
        call.mail,
    )
