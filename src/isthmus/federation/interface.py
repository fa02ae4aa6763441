"""What a method sees of the others: a few verbs, the same on every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, overload

from torch import Tensor

from isthmus.errors import ProtocolError, RunError
from isthmus.federation.messages import Message, PartyId
from isthmus.federation.schema import schema
from isthmus.seeds import Stream

M = TypeVar("M", bound=Message)
Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)
MaybeRep = TypeVar("MaybeRep", bound=Message | None)
FailureKind = Literal["timeout", "unavailable", "crashed", "handler", "protocol"]


@dataclass(frozen=True)
class Failure:
    """Why a party has no reply. ``detail`` is an exception's type, never its text: a text could carry data across a
    trust boundary.
    """

    kind: FailureKind
    detail: str = ""
    cause: BaseException | None = field(default=None, compare=False, repr=False)
    """The exception itself, only where party and server share a process (for the log); never serialised."""


class QuorumError(RunError):
    """Too few parties answered. The round is not committed; the run can be resumed."""

    def __init__(self, action: str, failures: Mapping[PartyId, Failure], answered: int, asked: int) -> None:
        self.failures = dict(failures)
        listed = "; ".join(
            f"{party}: {f.kind} {f.detail}{_text(f)}".rstrip() for party, f in sorted(failures.items())[:5]
        )
        more = f" and {len(failures) - 5} more" if len(failures) > 5 else ""
        super().__init__(
            f"{action}: {answered} of {asked} parties answered ({listed}{more}); fix these parties, then resume the run"
        )


def _text(failure: Failure) -> str:
    return f" ({failure.cause})" if failure.cause is not None and str(failure.cause) else ""


@dataclass(frozen=True)
class PerClient(Generic[M]):
    """A different message for each party."""

    messages: Mapping[PartyId, M]


@dataclass(frozen=True)
class Stacked(Generic[M]):
    """One message that stands for many: every tensor has a leading axis over ``parties``, every number is a 1-D
    tensor. Whoever makes one does not change its numbers later; models, gradients and the like are copied out at once.
    """

    message: M
    parties: tuple[PartyId, ...]

    def row(self, k: int) -> M:
        row = schema(type(self.message)).row(self.message, k)
        assert isinstance(row, type(self.message))
        return row

    def rows(self) -> list[M]:
        """The messages of all parties."""
        return schema(type(self.message)).rows(self.message, len(self.parties))

    def total(self) -> M:
        total = schema(type(self.message)).sum_rows(self.message)
        assert isinstance(total, type(self.message))
        return total


@dataclass(frozen=True)
class Exchanged(Generic[M]):
    """Summed mail that a cohort has made and delivered itself: every client to every other.

    Args:
        messages: By receiver, a message of the size that each of the others has sent it. Only sizes are read.
    """

    messages: Mapping[PartyId, M]


class Replies(Mapping[PartyId, MaybeRep]):
    """Replies by party, in sorted order; ``failures`` says why others are missing; ``mail`` is what ``exchange`` sent
    to the server.
    """

    def __init__(
        self,
        replies: Mapping[PartyId, MaybeRep] | Stacked[Any],
        failures: Mapping[PartyId, Failure],
        mail: Mapping[PartyId, Message] | None = None,
    ) -> None:
        self._stack = replies if isinstance(replies, Stacked) else None
        self._replies: dict[PartyId, MaybeRep] = (
            {} if isinstance(replies, Stacked) else {p: replies[p] for p in sorted(replies)}
        )
        self.failures = dict(failures)
        self.mail: dict[PartyId, Message] = dict(mail or {})

    def _rows(self) -> dict[PartyId, MaybeRep]:
        if self._stack is not None and not self._replies:
            self._replies = dict(zip(self._stack.parties, self._stack.rows(), strict=True))
        return self._replies

    @property
    def stacked(self) -> Stacked[Any] | None:
        """The replies as one stack where the parties ran together, else None."""
        return self._stack

    def __getitem__(self, party: PartyId) -> MaybeRep:
        return self._rows()[party]

    def __iter__(self) -> Iterator[PartyId]:
        return iter(self._stack.parties if self._stack is not None else self._replies)

    def __len__(self) -> int:
        return len(self._stack.parties if self._stack is not None else self._replies)


def total(messages: Sequence[M]) -> M:
    """Sum of every numeric field over messages of one type, in the given order."""
    if not messages:
        raise ProtocolError("a sum needs at least one message")
    node = schema(type(messages[0]))
    result = messages[0]
    for message in messages[1:]:
        if type(message) is not type(result):
            raise ProtocolError(f"cannot add {type(message).__name__} to {type(result).__name__}")
        result = node.add(result, message)
    return result


class Federation(Protocol):
    """The server's view of the parties of one role (architecture, section 4).

    ``handler`` is the function itself, e.g. ``FedAvgClient.local_update``: editors jump to it, mypy checks the request,
    engines send its name. ``to`` defaults to all parties of the role.
    """

    @property
    def clients(self) -> tuple[PartyId, ...]:
        """Addresses of the parties of this role, sorted."""
        ...

    @property
    def absent(self) -> tuple[PartyId, ...]:
        """Parties of this role that were lost and are not back: not in ``clients``, and not in sums."""
        ...

    @property
    def least(self) -> int | None:
        """For ``at_least``: parties with which a round goes on (``least_clients`` of the run); None: all are needed."""
        ...

    @property
    def role(self) -> str: ...

    @property
    def secure(self) -> bool:
        """Whether sums are masked. Then scores are summed, too: ``isthmus.methods.evaluation.scores_of``."""
        ...

    @overload
    def call(
        self,
        handler: Callable[[Any, Req], MaybeRep],
        request: Req | PerClient[Req],
        *,
        to: Iterable[PartyId] | None = None,
        quorum: float = 1.0,
        timeout: float | None = None,
    ) -> Replies[MaybeRep]: ...
    @overload
    def call(
        self,
        handler: Callable[[Any], MaybeRep],
        *,
        to: Iterable[PartyId] | None = None,
        quorum: float = 1.0,
        timeout: float | None = None,
    ) -> Replies[MaybeRep]: ...

    @overload
    def sum(
        self,
        handler: Callable[[Any, Req], Rep],
        request: Req | PerClient[Req],
        *,
        to: Iterable[PartyId] | None = None,
        at_least: int | None = None,
    ) -> Rep: ...
    @overload
    def sum(
        self, handler: Callable[[Any], Rep], *, to: Iterable[PartyId] | None = None, at_least: int | None = None
    ) -> Rep: ...

    def exchange(
        self,
        send: Callable[..., Mapping[PartyId, Any]],
        receive: Callable[..., Any] | Sequence[Callable[..., Any]],
        request: Message | PerClient[Any] | None = None,
        *,
        to: Iterable[PartyId] | None = None,
        combine: Literal["each", "sum"] = "each",
    ) -> Replies[Any]: ...

    @property
    def round(self) -> int:
        """Number of the current round within its phase, from 1."""
        ...

    def stream(self, purpose: str) -> Stream:
        """Random stream of the server for one purpose in the current round."""
        ...

    def tier(self, role: str) -> Federation:
        """The same federation seen by another role, e.g. the devices below the silos."""
        ...


@dataclass(frozen=True)
class View:
    """Shapes and counts the server may know before anything is sent."""

    clients: tuple[PartyId, ...]
    num_features: int
    num_classes: int
    task: Literal["node", "graph"] = "node"
    alike: bool = True
    """Whether all clients have the same features and classes; if not, the two numbers above are those of nobody in
    particular.
    """
    edges: Tensor | None = None
    """The whole edge list (2, E), only for a method whose server knows the graph."""
