"""How a run begins: the messages between the server job and the client jobs before the first call, and the transport.

One frame (`isthmus.federation.wire`) per request, with a kind: ``begin``, ``keys`` and ``end`` are defined here,
``call`` and ``order`` are handled by the site's :class:`~isthmus.federation.host.PartyHost`. Every request names its
run, so that a delayed one of another run is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from isthmus.federation.interface import Failure
from isthmus.privacy.keys import frame
from isthmus.records import Record

Site = str
"""An organisation's installation, by the name in its certificate."""
PROTOCOL = 2
"""Of the requests below. A site answers no other, older ones included: a server cannot ask for a weaker one."""
BEGIN, KEYS, CALL, ORDER, END = "begin", "keys", "call", "order", "end"


@dataclass(frozen=True)
class BeginRun(Record):
    """The server starts or continues a run.

    Args:
        run_id: Distinguishes the run's checkpoints from those of another run of the same name.
        settings: The resolved ``config.toml``.
        versions: Of the packages at the server.
        stage: ``prepare`` where owners of tables first agree on scaling and links, then ``run``.
        known: The newest head of each client's audit chain that the server has kept, in whatever run: a site whose
            chain does not hold it was restored from an old backup, and says so.
    """

    run: str
    run_id: bytes
    attempt: int
    settings: str
    versions: Mapping[str, str]
    stage: str = "run"
    known: Mapping[str, str] | None = None
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class SessionKeys(Record):
    """A party's public keys for one run, signed by its organisation: one for mail, one for secure sums."""

    mail: bytes
    mail_signature: bytes
    sums: bytes
    sums_signature: bytes


@dataclass(frozen=True)
class SignedHead(Record):
    """The newest line of a site's audit chain (`isthmus.deploy.audit_chain`), signed by its organisation for one of its
    clients. Whoever keeps it can tell later whether the chain was cut or rewritten.
    """

    number: int
    hash: str
    signature: bytes

    def signed(self, client: str) -> bytes:
        return frame("isthmus/audit-head/1", client, self.number, self.hash)


@dataclass(frozen=True)
class ClientFacts(Record):
    """What the server may know of a client before anything is sent (:class:`~isthmus.federation.interface.View`).

    Args:
        samples: Weight of the client in means over clients; 0 with secure sums, which show no such mean.
    """

    features: int
    classes: int
    samples: int
    task: str


@dataclass(frozen=True)
class JoinReply(Record):
    """A site's reply to :class:`BeginRun`: its clients, or why it does not take part.

    ``schema``: of tables, a hash of every table and feature of its schema, so that a difference can be named.
    ``heads``: of its audit chain, by client. ``contract``: the hash of the one it derived.
    """

    error: str = ""
    text: str = ""
    clients: Mapping[str, ClientFacts] | None = None
    keys: Mapping[str, SessionKeys] | None = None
    dataset: str = ""
    source: str = ""
    schema: Mapping[str, str] | None = None
    heads: Mapping[str, SignedHead] | None = None
    contract: str = ""


@dataclass(frozen=True)
class PeerKeys(Record):
    """The signed session keys of all parties, and the heads of all audit chains, distributed by the server."""

    keys: Mapping[str, SessionKeys]
    heads: Mapping[str, SignedHead] | None = None


@dataclass(frozen=True)
class EndReply(Record):
    """A site's reply to the end of a run: the heads of its audit chain, by client."""

    heads: Mapping[str, SignedHead] | None = None


class Transport(Protocol):
    """Sends requests to sites. No request is sent twice."""

    @property
    def sites(self) -> tuple[Site, ...]: ...

    def request(
        self, run: str, kind: str, requests: Mapping[Site, bytes], timeout: float | None
    ) -> Mapping[Site, bytes | Failure]:
        """Send all at the same time and wait for the replies; the reply of a lost site is a failure."""
        ...
