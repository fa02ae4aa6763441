"""Which run begins next at a hub: so many go on at once, and those who submit take turns.

Every ``isthmus submit`` is a process of its own. Each holds a ticket, a locked file in ``FOLDER/queue``, until its run
has ended: the lock of a process that was killed is gone, and so is its place. Whoever has the fewest runs going on is
next; of those the one who was served longest ago; of its runs the one that was submitted first. So a hundred runs of
one submitter delay the first run of another by one at most.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

QUEUE = "queue"
AT_ONCE = 4
"""Runs at once, unless ``federation.toml`` says otherwise: a server job takes about 500 MB."""
POLL_EVERY = 0.5
_LOCK, _SERVED = ".lock", ".served.json"


@dataclass(frozen=True)
class Ticket:
    """A run that waits, or goes on since ``started``."""

    run: str
    by: str
    since: float
    started: float | None = None


def order(tickets: Sequence[Ticket], served: Mapping[str, float]) -> list[Ticket]:
    """The runs that wait, in the order in which they will begin if nobody else comes."""
    going = Counter(one.by for one in tickets if one.started is not None)
    waiting, last, found = [one for one in tickets if one.started is None], dict(served), []
    while waiting:
        first = min(waiting, key=lambda one: (going[one.by], last.get(one.by, 0.0), one.since, one.run))
        found.append(first)
        waiting.remove(first)
        going[first.by] += 1
        last[first.by] = time.time() + len(found)
    return found


class RunQueue:
    """The queue of a federation's folder."""

    def __init__(self, folder: Path, at_once: int = AT_ONCE) -> None:
        self.path, self.at_once = folder / QUEUE, at_once

    @contextlib.contextmanager
    def turn(self, run: str, by: str, on_wait: Callable[[int], None]) -> Iterator[None]:
        """Wait until it is a run's turn, and hold its place while it goes on. ``on_wait`` gets its number in the queue
        twice a second, and may raise to end the waiting.
        """
        self.path.mkdir(exist_ok=True)
        ticket = Ticket(run, by, time.time())
        with self._locked():
            file = (self.path / run).open("a+")
            fcntl.flock(file, fcntl.LOCK_EX)  # free: two processes that submit one run exclude each other before
            _write(file, ticket)
        try:
            while (number := self._try_to_start(ticket, file)) > 0:
                on_wait(number)
                time.sleep(POLL_EVERY)
            yield
        finally:
            with self._locked():
                (self.path / run).unlink(missing_ok=True)
                file.close()

    def _try_to_start(self, ticket: Ticket, file: IO[str]) -> int:
        """Start if it is this run's turn and a place is free: then 0, else its number in the queue."""
        with self._locked():
            tickets, served = self._tickets(own=ticket), self._served()
            number = order(tickets, served).index(ticket) + 1
            if number > 1 or sum(one.started is not None for one in tickets) >= self.at_once:
                return number
            _write(file, replace(ticket, started=time.time()))
            temporary = self.path / f"{_SERVED}.tmp"
            temporary.write_text(json.dumps(served | {ticket.by: time.time()}))
            temporary.rename(self.path / _SERVED)
            return 0

    def waiting(self) -> list[Ticket]:
        """The runs that wait, the next one first."""
        if not self.path.is_dir():
            return []
        with self._locked():
            return order(self._tickets(), self._served())

    def _tickets(self, own: Ticket | None = None) -> list[Ticket]:
        """Tickets of processes that live."""
        found = [own] if own is not None else []
        for path in sorted(self.path.iterdir()):
            if path.name.startswith(".") or (own is not None and path.name == own.run):
                continue
            with path.open("r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(Ticket(**json.load(file)))
                else:
                    path.unlink()
        return found

    def _served(self) -> dict[str, float]:
        """When somebody's run began last."""
        try:
            found: dict[str, float] = json.loads((self.path / _SERVED).read_text())
            return found
        except (OSError, ValueError):
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.path / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _write(file: IO[str], ticket: Ticket) -> None:
    file.seek(0)
    file.truncate()
    json.dump(asdict(ticket), file)
    file.flush()
