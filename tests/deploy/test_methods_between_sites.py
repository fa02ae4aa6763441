"""Methods whose parties send mail to each other, between sites without processes: sealed, and bit-equal to one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from isthmus.deploy.handshake import PeerKeys
from isthmus.deploy.roster import OrganisationKeys
from isthmus.deploy.site_host import SiteHost
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.engines.remote import RemoteEngine
from isthmus.federation.host import FrameKind
from isthmus.federation.interface import Failure
from isthmus.federation.messages import PartyId
from isthmus.federation.party import Store
from isthmus.federation.wire import Frame, pack, unpack
from isthmus.methods.registry import all_methods
from isthmus.privacy.keys import Identity
from isthmus.tensors import Weights
from isthmus.testing import small_runs


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
        self.models: dict[str, Weights] = {}
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

    def revive(self) -> None: ...
    def close(self) -> None: ...
    def keep_tags(self, store: Callable[[PartyId], Store]) -> None: ...


WITH_MAIL = [
    method.name
    for method in all_methods()
    if any(s.sends for names in method.table.handlers.values() for s in names.values())
]


@pytest.mark.parametrize("method", WITH_MAIL)
def test_bit_equal_between_sites(method: str) -> None:
    for settings, scenario in small_runs(method).values():
        with (
            SimulatedRun(settings, scenario, engine=LocalEngine) as local,
            SimulatedRun(settings, scenario, engine=SitePerClient) as apart,
        ):
            for run in (local, apart):
                run.loop.play()
            expected, found = dict(local.engine.export(False)), dict(apart.engine.export(False))
            kept: dict[str, Weights] = apart.engine.models  # type: ignore[attr-defined]
        for client, export in expected.items():
            assert found[client].weights is None and found[client].values == export.values
            assert export.weights is not None and export.weights.keys() == kept[client].keys()
            assert all(torch.equal(tensor, kept[client][name]) for name, tensor in export.weights.items())
        assert apart.loop.totals == local.loop.totals, "sealing is not counted"
