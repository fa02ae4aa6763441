"""Sites without processes, one per client, behind the codec, each with a watch over the contract of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus.deploy.handshake import PeerKeys
from isthmus.deploy.roster import OrganisationKeys
from isthmus.deploy.site_host import SiteHost
from isthmus.federation.contract import Contract
from isthmus.federation.engine import Export
from isthmus.federation.engines.remote import RemoteEngine
from isthmus.federation.host import FrameKind
from isthmus.federation.interface import Failure
from isthmus.federation.messages import PartyId
from isthmus.federation.party import Store
from isthmus.federation.watch import MemoryLog, Watch
from isthmus.federation.wire import Frame, pack, unpack
from isthmus.privacy.keys import Identity


class SitePerClient(RemoteEngine):
    """A site for each client, every request and reply packed to one buffer. Models stay at the sites, in ``models``."""

    def __init__(
        self,
        parts: Mapping[str, Any],
        table: Any,
        config: Any,
        stream: Any,
        *,
        wire: bool = False,
        cohort: bool = False,
    ) -> None:
        super().__init__({f"site-{client}": [client] for client in sorted(parts)}, table)
        identity = Identity()
        roster = OrganisationKeys(dict.fromkeys(parts, identity.public), {client: f"site-{client}" for client in parts})
        self.models: dict[str, Export] = {}
        self.log = MemoryLog()
        self.hosts = {
            f"site-{client}": SiteHost(
                {client: data},
                table,
                config,
                stream,
                run="r",
                identity=identity,
                organisations=roster,
                write_model=self.models.__setitem__,
            )
            for client, data in parts.items()
        }
        keys = {party: pair for host in self.hosts.values() for party, pair in host.session_keys().items()}
        for host in self.hosts.values():
            host.accept_keys(PeerKeys(keys))

    def carry(self, kind: FrameKind, frames: Mapping[str, Frame], timeout: float | None) -> dict[str, Frame | Failure]:
        return {
            site: unpack(pack(self.hosts[site].handle(kind, unpack(pack(frame))))) for site, frame in frames.items()
        }

    def watch(self, contract: Contract) -> None:
        """As sites that joined a run: each watches over the contract in full, and logs what it admits."""
        for host in self.hosts.values():
            for party in host._all():
                party.guard_by(Watch(contract, party.name, party.role, full=True, log=self.log))

    def revive(self) -> None: ...
    def close(self) -> None: ...
    def keep_tags(self, store: Callable[[PartyId], Store]) -> None: ...
