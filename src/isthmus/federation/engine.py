"""What an engine must do: carry calls to parties, wherever they are, and bring outcomes back.

Implementations are in `isthmus.federation.engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from isthmus.federation.contract import Contract
from isthmus.federation.interface import Exchanged, Failure, Stacked
from isthmus.federation.messages import ClientId, PartyId
from isthmus.federation.party import Invocation, Outcome, Store
from isthmus.tensors import Weights


@dataclass(frozen=True)
class Export:
    """What a client ends with.

    Args:
        values: How many numbers its model has.
        weights: Its model; None where that stays with its owner, and the rest with it.
        kept: What its class keeps beside the weights (`isthmus.federation.kept`).
        logits: What the model says of its own samples, where it can tell.
        round: Round the model is of; None where that is not known.
    """

    values: int
    weights: Weights | None = None
    kept: bytes = b""
    logits: Tensor | None = None
    round: int | None = None


class Engine(Protocol):
    """Carries calls to parties. Implementations: in process, many cores, separate organisations.

    Everything a run needs of its parties is here, and all of it can cross a process boundary. A party that is lost
    shows as a ``crashed`` failure of a call, and as a :class:`~isthmus.federation.interface.QuorumError` of the other
    operations.
    """

    @property
    def execution(self) -> Literal["each", "cohort"]:
        """``cohort`` if clients are trained together, else ``each``."""
        ...

    @property
    def why_each(self) -> str:
        """Why the cohort that the clients' class declares is not used although that was asked for; empty otherwise."""
        ...

    @property
    def resolved(self) -> Mapping[str, Any]:
        """Fields of the run's config that were left open and this engine has decided, e.g. how many actors there
        are.
        """
        ...

    def parties(self, role: str) -> tuple[PartyId, ...]:
        """Addresses of a role's parties, sorted."""
        ...

    def dispatch(self, calls: Sequence[Invocation], timeout: float | None) -> Mapping[PartyId, Outcome] | Stacked[Any]:
        """Run calls of one handler, one per party; every party gets an outcome, a failure at worst."""
        ...

    def sum_keys(self, role: str) -> Mapping[PartyId, bytes]:
        """Public session keys of a role's parties for secure sums."""
        ...

    def watch(self, contract: Contract) -> None:
        """From now on every party refuses what is not in this contract. An engine whose parties make their own contract
        need not.
        """
        ...

    def keep_tags(self, store: Callable[[PartyId], Store]) -> None:
        """From now on parties keep their tags in stores of their own. An engine whose parties have a place for them
        already need not.
        """
        ...

    away: frozenset[ClientId]
    """Clients that are absent: tags, rollbacks, selections and exports are of the others. Set by the round loop."""

    def take_back(self, step: int) -> frozenset[ClientId]:
        """Which of those away can be reached again: they go back to their own newest tag, and tag it as that of this
        step. They are no longer away.
        """
        ...

    def commit(self, step: int) -> None:
        """Tag the state of every party."""
        ...

    def tags(self) -> tuple[int, ...]:
        """Tags that all parties hold, sorted; parties that were lost are started again."""
        ...

    def rollback(self, step: int) -> None:
        """Take every party back to a tag, or raise a :class:`~isthmus.errors.DataError` and change nothing."""
        ...

    def select(self) -> None:
        """Every party remembers its present state as the one validation picked."""
        ...

    def export(self, selected: bool) -> Iterator[tuple[ClientId, Export]]:
        """What each client ends with, one by one: of the state validation picked, or of the last."""
        ...

    def close(self) -> None:
        """End everything the engine started. May be called twice."""
        ...


@runtime_checkable
class ExchangesTogether(Protocol):
    """An engine whose clients may exchange summed mail in one computation, where their cohort can."""

    def exchange_together(
        self, calls: Sequence[Invocation], received: Callable[[], Sequence[Invocation]]
    ) -> Exchanged[Any] | Mapping[PartyId, Failure] | None:
        """Run a sending handler and the receiving one for all; None where the clients send one by one.

        Args:
            calls: Of the sending handler.
            received: Makes those of the receiving one, without mail in them.
        """
        ...
