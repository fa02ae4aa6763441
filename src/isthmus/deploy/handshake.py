"""What the server's part of a job and the sites say to each other besides calls and orders: how a run begins.

One frame (`isthmus.federation.wire`) per request, under a kind: ``begin``, ``meet`` and ``end`` are of this module,
``call`` and ``order`` go to the site's :class:`~isthmus.federation.host.PartyHost`. Every request names its run: one
that was delayed and belongs to another is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from isthmus.federation.interface import Failure
from isthmus.records import Record

Site = str
BEGIN, MEET, CALL, ORDER, END = "begin", "meet", "call", "order", "end"


@dataclass(frozen=True)
class Begin(Record):
    """The server opens a run. ``settings`` is the resolved config.toml; ``versions`` what the server runs with;
    ``mark`` tells the run's checkpoints from those of another of the same name."""

    run: str
    mark: bytes
    attempt: int
    settings: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Keys(Record):
    """A party's session keys for a run, signed by its organisation: one for mail, one for secure sums."""

    mail: bytes
    mail_signature: bytes
    sums: bytes
    sums_signature: bytes


@dataclass(frozen=True)
class Client(Record):
    """What a site says of a client: what the server may know before anything is sent
    (:class:`~isthmus.federation.interface.View`).
    """

    features: int
    classes: int
    samples: int
    task: str


@dataclass(frozen=True)
class Joined(Record):
    """A site's answer to :class:`Begin`: who lives there, or why it does not take part."""

    error: str = ""
    text: str = ""
    clients: Mapping[str, Client] | None = None
    keys: Mapping[str, Keys] | None = None
    dataset: str = ""
    source: str = ""


@dataclass(frozen=True)
class Meet(Record):
    """Everybody's signed session keys, brought round by the server."""

    keys: Mapping[str, Keys]


class Carrier(Protocol):
    """Brings requests to sites. Nothing is ever sent a second time."""

    @property
    def sites(self) -> tuple[Site, ...]: ...

    def ask(
        self, run: str, kind: str, requests: Mapping[Site, bytes], timeout: float | None
    ) -> Mapping[Site, bytes | Failure]:
        """All at the same time; a site that is lost gets a failure."""
        ...
