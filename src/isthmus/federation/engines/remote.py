"""What all engines have in common whose parties live in other processes.

Clients are spread over *places*, each a :class:`~isthmus.federation.host.PartyHost`. An engine of this kind carries
frames to places (:meth:`RemoteEngine.carry`) and starts lost ones again (:meth:`RemoteEngine.revive`); grouping,
encoding, checking and the order of a rollback are here, so they cannot differ. Nothing is sent twice by an engine:
whether a lost call is repeated is decided by the session (same sequence, answered from memory) and by the loop (back to
a tag), never by a transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from isthmus.errors import IsthmusError, ProtocolError
from isthmus.federation import codec
from isthmus.federation.codec import LIMITS, Limits
from isthmus.federation.contract import Contract
from isthmus.federation.engine import Export
from isthmus.federation.engines.local import check_names
from isthmus.federation.host import Answer, FrameKind, Order
from isthmus.federation.interface import Failure, QuorumError
from isthmus.federation.messages import ClientId, PartyId, address, client_of
from isthmus.federation.party import Invocation, Outcome, Store
from isthmus.federation.roles import RoleTable
from isthmus.federation.wire import Frame, Writer, decode_outcomes, encode_calls

Place = str
TAKE_BACK_TIMEOUT = 20.0
"""Seconds that a client that was lost may take to say that it is back."""
EXPORTED = 16
"""Clients of one place whose models are fetched at a time."""


class RemoteEngine(ABC):
    """Parties in other processes, or at other organisations.

    Args:
        places: Which clients live where.
        limits: What is accepted of a place before anybody looks closer.
    """

    def __init__(
        self, places: Mapping[Place, Sequence[ClientId]], table: RoleTable, *, limits: Limits = LIMITS
    ) -> None:
        self.places = {place: tuple(clients) for place, clients in places.items()}
        self._place_of = {client: place for place, clients in places.items() for client in clients}
        check_names(self._place_of)
        self._table, self._limits = table, limits
        self.away: frozenset[ClientId] = frozenset()
        self._parties = {
            role: tuple(address(client, role) for client in sorted(self._place_of)) for role in table.roles
        }

    # -- what an engine of this kind must do
    # -----------------------------------------------------------------------------------

    @abstractmethod
    def carry(
        self, kind: FrameKind, frames: Mapping[Place, Frame], timeout: float | None
    ) -> Mapping[Place, Frame | Failure]:
        """Bring each place its frame and back what its host answered, all at the same time. A place that cannot be
        reached, or is lost while it works, gets a failure (``unavailable``, ``crashed``, ``timeout``); nothing is ever
        sent a second time."""

    @abstractmethod
    def revive(self) -> None:
        """Start lost places again, with the stores their parties had; they are taken back to a tag right afterwards."""

    @abstractmethod
    def keep_tags(self, store: Callable[[PartyId], Store]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def watch(self, contract: Contract) -> None:  # noqa: B027 -- sites watch by contracts of their own
        """The server's contract binds nobody elsewhere."""

    @property
    def resolved(self) -> Mapping[str, Any]:
        return {}

    @property
    def execution(self) -> Literal["each", "cohort"]:
        return "each"

    @property
    def why_each(self) -> str:
        return ""

    # -- calls -------------------------------------------------------------------------------------

    def parties(self, role: str) -> tuple[PartyId, ...]:
        return self._parties.get(role, ())

    def dispatch(self, calls: Sequence[Invocation], timeout: float | None) -> Mapping[PartyId, Outcome]:
        by_place: dict[Place, list[Invocation]] = {}
        for call in calls:
            by_place.setdefault(self._place_of[client_of(call.party)], []).append(call)
        writer = Writer()
        frames = {place: encode_calls(its, writer) for place, its in by_place.items()}
        found = self.carry("call", frames, timeout)
        outcomes: dict[PartyId, Outcome] = {}
        for place, its in by_place.items():
            outcomes |= self._outcomes(found[place], its)
        return outcomes

    def _outcomes(self, answer: Frame | Failure, calls: Sequence[Invocation]) -> dict[PartyId, Outcome]:
        if isinstance(answer, Failure):
            return dict.fromkeys((call.party for call in calls), answer)
        try:
            return decode_outcomes(answer, calls, self._table, self._limits)
        except ProtocolError as error:
            refusal = _refusal(answer, self._limits) or error  # a host that could not read the calls says why
            return dict.fromkeys((call.party for call in calls), Failure("protocol", type(refusal).__name__, refusal))

    # -- orders ------------------------------------------------------------------------------------

    def order(self, order: Order, timeout: float | None = None) -> dict[Place, Answer]:
        """The same operation at every place where somebody is not away."""
        return self.each(dict.fromkeys(self._present(), order), timeout)

    def _present(self) -> list[Place]:
        return [place for place, clients in self.places.items() if not self.away or set(clients) - self.away]

    def take_back(self, step: int) -> frozenset[ClientId]:
        orders = {
            place: Order("catch_up", step=step, clients=tuple(sorted(self.away & set(clients))))
            for place, clients in self.places.items()
            if self.away & set(clients)
        }
        frames = {place: (codec.encode(order),) for place, order in orders.items()}
        back = set[ClientId]()
        for place, answer in self.carry("order", frames, TAKE_BACK_TIMEOUT).items():
            if isinstance(answer, Failure):
                continue
            codec.decode(answer[0] if answer else b"", Answer, self._limits).check(place)
            back |= set(orders[place].clients)
        self.away -= back
        return frozenset(back)

    def each(self, orders: Mapping[Place, Order], timeout: float | None = None) -> dict[Place, Answer]:
        """An operation at each place; a place that is lost loses the quorum, an error of one is raised."""
        found = self.carry("order", {place: (codec.encode(order),) for place, order in orders.items()}, timeout)
        lost = {
            client: answer
            for place, answer in found.items()
            if isinstance(answer, Failure)
            for client in self.places[place]
        }
        if lost:
            names = ", ".join(sorted({order.name for order in orders.values()}))
            raise QuorumError(names, lost, len(self._place_of) - len(lost), len(self._place_of))
        answers = {}
        for place, answer in found.items():
            assert not isinstance(answer, Failure)
            answers[place] = codec.decode(answer[0] if answer else b"", Answer, self._limits).check(place)
        return answers

    def sum_keys(self, role: str) -> dict[PartyId, bytes]:
        keys: dict[PartyId, bytes] = {}
        for answer in self.order(Order("sum_keys", role=role)).values():
            keys |= answer.keys or {}
        if keys.keys() != set(self.parties(role)):
            raise ProtocolError("a place gave session keys of other parties than live there; start the run again")
        return dict(sorted(keys.items()))

    def commit(self, step: int) -> None:
        self.order(Order("commit", step=step))

    def tags(self) -> tuple[int, ...]:
        self.revive()
        return tuple(sorted(set.intersection(*(set(answer.steps) for answer in self.order(Order("tags")).values()))))

    def rollback(self, step: int) -> None:
        self.order(
            Order("fetch", step=step)
        )  # all must be able to, before any of them goes back and forgets newer tags
        self.order(Order("rollback", step=step))

    def select(self) -> None:
        self.order(Order("select"))

    def export(self, selected: bool) -> Iterator[tuple[ClientId, Export]]:
        longest = max(map(len, self.places.values()))
        for start in range(
            0, longest, EXPORTED
        ):  # a few at a time: all models of many clients need not be in memory at once
            asked = {place: clients[start : start + EXPORTED] for place, clients in self.places.items()}
            asked = {place: tuple(c for c in clients if c not in self.away) for place, clients in asked.items()}
            orders = {
                place: Order("export", selected=selected, clients=clients)
                for place, clients in asked.items()
                if clients
            }
            for place, answer in self.each(orders).items():
                exports = answer.exports or {}
                if exports.keys() != set(asked[place]):
                    raise ProtocolError(f"{place} gave models of other clients than it was asked for")
                for client in asked[place]:
                    yield client, Export(**vars(exports[client]))


def _refusal(answer: Frame, limits: Limits) -> IsthmusError | None:
    """Why a host refused calls as a whole, if that is what its answer says."""
    try:
        refused = codec.decode(answer[0] if answer else b"", Answer, limits)
    except ProtocolError:
        return None
    try:
        refused.check("the host refused the call")
    except IsthmusError as error:
        return error
    return None
