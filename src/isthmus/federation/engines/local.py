"""Everything in one process. The default engine.

Parties are isolated by copying every message between them; with ``wire=True`` each message also goes through the full
wire codec, with the same bits as a result. With ``cohort=True`` clients whose class offers it are trained together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import DataError, ProtocolError, unknown
from isthmus.federation.contract import Contract
from isthmus.federation.engine import Export
from isthmus.federation.interface import Exchanged, Failure, Stacked
from isthmus.federation.kept import kept_bytes
from isthmus.federation.messages import SERVER, ClientId, Message, PartyId, address, client_of
from isthmus.federation.party import Invocation, Outcome, Parcel, Party, Store, readdress, transfer_copy, transfer_wire
from isthmus.federation.roles import Client, Cohort, CohortChoice, RoleTable, cohort_of, overridden_on_objects
from isthmus.federation.watch import Watch
from isthmus.privacy.flatten import WordRows
from isthmus.seeds import Stream
from isthmus.tensors import num_values

RESERVED = (SERVER, "common")
"""Names that mean something else: the server's address, and the random stream all parties share."""


def check_names(clients: Iterable[ClientId]) -> None:
    """Refuse clients whose names mean something else."""
    for client in clients:
        if client in RESERVED or "/" in client or not client:
            raise DataError(
                f"a client cannot be called {client!r}: {', '.join(RESERVED)} and names with '/' are taken; rename it"
            )


class LocalEngine:
    """All parties of a federation in this process.

    Args:
        parts: Each client's data.
        table: Roles of the method.
        config: The method's config, handed to every party.
        stream: Root of the parties' random streams.
        wire: Send every message through the wire codec.
        cohort: Train clients together where their class offers it.
    """

    def __init__(
        self,
        parts: Mapping[ClientId, NodeData],
        table: RoleTable,
        config: Any,
        stream: Stream,
        *,
        wire: bool = False,
        cohort: bool = False,
    ) -> None:
        check_names(parts)
        self.away: frozenset[ClientId] = frozenset()
        self._transfer = transfer_wire if wire else transfer_copy
        self._table = table
        self._cohort_wanted = cohort
        self._cohorts: dict[str, Cohort[Any]] = {}
        self._with_cohort: set[str] = set()
        self._choices: dict[str, CohortChoice] = {}
        self._words: dict[tuple[str, str], WordRows] = {}  # masked vectors of the last call of each handler
        self._parties: dict[str, dict[PartyId, Party]] = {}
        for role, entry in table.roles.items():
            self._parties[role] = {}
            for client in sorted(parts):
                name = address(client, role)
                make = _maker(entry.cls, name, entry.holds(parts[client]), config, stream.child(name))
                self._parties[role][name] = Party(name, role, make, table)

    def parties(self, role: str) -> tuple[PartyId, ...]:
        return tuple(self._parties.get(role, {}))

    def party(self, name: PartyId) -> Party:
        """One party's runtime (for its owner: export of models, tests)."""
        self._release()
        everyone = {party.name: party for party in self._all()}
        if name not in everyone:
            raise unknown("party", name, everyone)
        return everyone[name]

    def sum_keys(self, role: str) -> dict[PartyId, bytes]:
        return {name: party.sum_key() for name, party in self._parties[role].items()}

    def dispatch(self, calls: Sequence[Invocation], timeout: float | None) -> Mapping[PartyId, Outcome] | Stacked[Any]:
        if calls[0].mask is not None and not calls[0].mask.runs_handler:  # touches no state: cohorts keep theirs
            return {call.party: self._invoke(call) for call in calls}
        together = self._together(calls)
        if together is not None:
            return together
        self._release()
        return {call.party: self._invoke(call) for call in calls}

    def _invoke(self, call: Invocation) -> Outcome:
        return self._leave(self._parties[call.role][call.party].invoke(self._enter(call)))

    def _enter(self, call: Invocation) -> Invocation:
        argument = self._transfer(call.argument) if call.argument is not None else None
        parcels = tuple(self._cross(parcel) for parcel in call.parcels) if call.parcels is not None else None
        return readdress(call, argument, parcels)

    def _leave(self, outcome: Outcome) -> Outcome:
        try:
            if isinstance(outcome, Message):
                return self._transfer(outcome)
            return tuple(self._cross(parcel) for parcel in outcome) if isinstance(outcome, tuple) else outcome
        except ProtocolError as error:  # the right type with wrong contents: this party's failure, nobody else's
            return Failure("protocol", type(error).__name__, error)

    def _cross(self, parcel: Parcel) -> Parcel:
        return Parcel(parcel.sender, parcel.receiver, self._transfer(parcel.content))

    # -- clients trained together ------------------------------------------------------------------

    def _together(self, calls: Sequence[Invocation]) -> Stacked[Any] | dict[PartyId, Outcome] | None:
        cohort = self._cohort_for(calls)
        role, handler = calls[0].role, calls[0].handler
        if cohort is None or self._table.signature(role, handler).sends:
            return None
        if calls[0].mask is not None and handler in cohort.only_totals:
            return None
        try:
            return self._run_together(cohort, calls)
        except Exception as error:
            return dict[PartyId, Outcome](self._failed_together(calls, error))

    def _cohort_for(self, calls: Sequence[Invocation]) -> Cohort[Any] | None:
        """The cohort that can run these calls."""
        role = calls[0].role
        if not self._cohort_wanted or calls[0].parcels is not None or len(calls) != len(self._parties[role]):
            return None
        cohort = self._cohort(role)
        return cohort if cohort is not None and calls[0].handler in self._choice(role).handlers else None

    def _failed_together(self, calls: Sequence[Invocation], error: Exception) -> dict[PartyId, Failure]:
        """As in `Party.invoke`; here nobody can say whose fault it was. The cohort may be half changed: it goes, and
        the round is run again from a tag.
        """
        role = calls[0].role
        self._with_cohort.discard(role)
        del self._cohorts[role]
        failure = Failure("protocol" if isinstance(error, ProtocolError) else "handler", type(error).__name__, error)
        return {call.party: failure for call in calls}

    def exchange_together(
        self, calls: Sequence[Invocation], received: Callable[[], Sequence[Invocation]]
    ) -> Exchanged[Any] | Mapping[PartyId, Failure] | None:
        cohort = self._cohort_for(calls)
        if cohort is None or calls[0].mask is not None:
            return None
        role, handler = calls[0].role, calls[0].handler
        try:
            self._enter_together(cohort, calls)
            result = getattr(cohort, handler)(*self._requests(calls))
            if not isinstance(result, Exchanged) or set(result.messages) != {call.party for call in calls}:
                raise ProtocolError(
                    f"{type(cohort).__name__}.{handler} must return the mail of all its clients as an Exchanged message"
                )
            for call in received():
                self._parties[role][call.party].admit(call)
            return result
        except Exception as error:
            return self._failed_together(calls, error)

    def _enter_together(self, cohort: Cohort[Any], calls: Sequence[Invocation]) -> None:
        """Hand the clients' state to their cohort; every party admits its call."""
        role = calls[0].role
        if role not in self._with_cohort:
            cohort.load()
            self._with_cohort.add(role)
        for call in calls:
            party = self._parties[role][call.party]
            party.admit(call)
            party.client.enter(call.turn.phase, call.turn.round, call.sequence)

    def _run_together(self, cohort: Cohort[Any], calls: Sequence[Invocation]) -> Stacked[Any] | dict[PartyId, Outcome]:
        role, handler = calls[0].role, calls[0].handler
        reply = self._table.signature(role, handler).reply
        self._enter_together(cohort, calls)
        result = getattr(cohort, handler)(*self._requests(calls))
        if result is None and reply is None:
            return {call.party: None for call in calls}
        if (
            not isinstance(result, Stacked)
            or type(result.message) is not reply
            or result.parties != tuple(call.party for call in calls)
        ):
            raise ProtocolError(
                f"{type(cohort).__name__}.{handler} must return the replies of all its clients as a Stacked message"
            )
        if calls[0].mask is None:
            return result
        # What was masked under these calls before has been added up.
        rows, parties = self._words.setdefault((role, handler), WordRows(len(calls))).begin(), self._parties[role]
        return {call.party: parties[call.party].mask(result.row(k), call, rows) for k, call in enumerate(calls)}

    def _requests(self, calls: Sequence[Invocation]) -> tuple[Any, ...]:
        if calls[0].argument is None:
            return ()
        if all(call.argument is calls[0].argument for call in calls):
            return (self._transfer(calls[0].argument),)
        return ([self._transfer(call.argument) for call in calls if call.argument is not None],)

    def _cohort(self, role: str) -> Cohort[Any] | None:
        if role not in self._cohorts:
            kind = self._choice(role).cohort
            clients = [party.client for party in self._parties[role].values()]
            if kind is None or not kind.worthwhile(clients):
                return None
            self._cohorts[role] = kind(clients)
        return self._cohorts[role]

    def _choice(self, role: str) -> CohortChoice:
        if role not in self._choices:
            choice = cohort_of(self._table.roles[role].cls)
            if choice.cohort is not None:
                refused = overridden_on_objects([party.client for party in self._parties[role].values()])
                choice = CohortChoice(refused=refused) if refused else choice
            self._choices[role] = choice
        return self._choices[role]

    @property
    def execution(self) -> Literal["each", "cohort"]:
        return "cohort" if self._cohort_wanted and self._cohort("client") is not None else "each"

    @property
    def why_each(self) -> str:
        return self._choice("client").refused if self._cohort_wanted else ""

    @property
    def resolved(self) -> Mapping[str, Any]:
        return {}

    def _release(self) -> None:
        """Give the clients their state back before anybody else touches them."""
        for role in self._with_cohort:
            self._cohorts[role].store()
        self._with_cohort.clear()

    # -- transactions ------------------------------------------------------------------------------

    def _all(self) -> list[Party]:
        return [party for group in self._parties.values() for party in group.values()]

    def _present(self) -> list[Party]:
        return [party for party in self._all() if client_of(party.name) not in self.away]

    def take_back(self, step: int) -> frozenset[ClientId]:
        self._release()
        back = self.away
        for party in self._all():
            if client_of(party.name) in back:
                party.catch_up(step)
        self.away = frozenset()
        return back

    def commit(self, step: int) -> None:
        for role in self._with_cohort:
            self._cohorts[role].store()
        for party in self._present():
            party.commit(step)

    def tags(self) -> tuple[int, ...]:
        common = set.intersection(*(set(party.tags()) for party in self._present()))
        return tuple(sorted(common))

    def fetch(self, step: int) -> None:
        """Make sure every party can read a tag; changes nothing else."""
        for party in self._present():
            party.fetch(step)

    def rollback(self, step: int) -> None:
        self.fetch(step)  # all must be able to, before any of them goes back and forgets newer tags
        self._with_cohort.clear()
        self._cohorts.clear()
        self._choices.clear()
        for party in self._present():
            party.rollback(step)

    def select(self) -> None:
        for role in self._with_cohort:
            self._cohorts[role].store()
        for party in self._present():
            party.select()

    def export(self, selected: bool) -> Iterator[tuple[ClientId, Export]]:
        self._release()
        for client in self._parties["client"]:
            if client not in self.away:
                yield client, self.export_one(client, selected)

    def export_one(self, client: ClientId, selected: bool) -> Export:
        """What one client ends with."""
        parties = [self._parties[role][address(client, role)] for role in self._table.roles]
        if selected:
            for party in parties:
                party.restore_selected()
        party = self._parties["client"][client]
        weights = party.client.export()
        return Export(num_values(weights), weights, kept_bytes(party.client), _logits(parties), party.model_round)

    def watch(self, contract: Contract) -> None:
        for party in self._all():
            party.guard_by(Watch(contract, party.name, party.role))

    def keep_tags(self, store: Callable[[PartyId], Store]) -> None:
        for party in self._all():
            party.store = store(party.name)

    def close(self) -> None:
        self._release()


def _logits(parties: Sequence[Party]) -> Tensor | None:
    """What a client's model says, from whichever of its roles holds the samples."""
    for party in parties:
        if type(party.client).logits is not Client.logits:
            with torch.no_grad():
                return party.client.logits()
    return None


def _maker(
    cls: type[Client[Any, Any]], name: PartyId, data: Any, config: Any, stream: Stream
) -> Callable[[], Client[Any, Any]]:
    return lambda: cls(name, data, config, stream)
