"""An engine that separates parties as processes would, in one process: everything is packed into one
buffer each way, and hosts can be killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from isthmus.federation.engines.remote import Place, RemoteEngine
from isthmus.federation.host import FrameKind, Order, PartyHost
from isthmus.federation.interface import Failure
from isthmus.federation.messages import PartyId, client_of
from isthmus.federation.party import Store
from isthmus.federation.wire import Frame, pack, unpack


class HostedEngine(RemoteEngine):
    """Client ``i`` at place ``i mod places``."""

    def __init__(
        self,
        parts: Mapping[str, Any],
        table: Any,
        config: Any,
        stream: Any,
        *,
        wire: bool = False,
        cohort: bool = False,
        places: int = 2,
        explain: bool = True,
    ) -> None:
        names = sorted(parts)
        super().__init__({f"place-{k}": names[k::places] for k in range(min(places, len(names)))}, table)
        self._store: Callable[[PartyId], Store] | None = None
        self._make = lambda place: PartyHost(
            {client: parts[client] for client in self.places[place]},
            table,
            config,
            stream,
            cohort=cohort,
            explain=explain,
        )
        self.hosts: dict[Place, PartyHost | None] = {place: self._make(place) for place in self.places}
        self.revived = 0
        self.closed = False
        self.carried = 0

    def carry(
        self, kind: FrameKind, frames: Mapping[Place, Frame], timeout: float | None
    ) -> Mapping[Place, Frame | Failure]:
        answers: dict[Place, Frame | Failure] = {}
        for place, frame in reversed(list(frames.items())):  # whoever is faster: it must not matter
            host = self.hosts[place]
            data = pack(frame)
            self.carried += len(data)
            answers[place] = (
                Failure("crashed", "killed") if host is None else unpack(pack(host.handle(kind, unpack(data))))
            )
        return answers

    def kill(self, place: Place) -> None:
        self.hosts[place] = None

    def revive(self) -> None:
        for place, host in self.hosts.items():
            if host is None:
                self.hosts[place] = self._made(place)
                self.revived += 1

    def _made(self, place: Place) -> PartyHost:
        host: PartyHost = self._make(place)
        if self._store is not None:
            host.keep_tags(self._store)
        return host

    def keep_tags(self, store: Callable[[PartyId], Store]) -> None:
        self._store = store
        for host in self.hosts.values():
            assert host is not None
            host.keep_tags(store)

    def party(self, name: PartyId) -> Any:
        """One party's runtime, for tests."""
        host = self.hosts[self._place_of[client_of(name)]]
        assert host is not None
        return host.party(name)

    @property
    def execution(self) -> Literal["each", "cohort"]:
        return (
            "cohort" if any(answer.execution == "cohort" for answer in self.order(Order("open")).values()) else "each"
        )

    def close(self) -> None:
        self.closed = True
