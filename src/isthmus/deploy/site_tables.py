"""A site's own tables in a run: read once, prepared with the other organisations, then handed to the method.

Runs in the client job. Only the folder that ``client.toml`` names is opened. What was agreed with the others stays
under ``state/<run>/preparation`` of the site, so that a run can be continued without repeating it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from isthmus.data.graph_set import GraphSetData
from isthmus.data.node_data import NodeData
from isthmus.data.own_dataset import SITE_TABLES
from isthmus.data.tables.owner import OwnerTables, read_owner
from isthmus.data.tables.schema import digests
from isthmus.deploy.handshake import ClientFacts, JoinReply
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import DataError
from isthmus.experiments.config import Settings
from isthmus.experiments.folder import FileStore, write_atomic
from isthmus.federation.party import load_state
from isthmus.federation.roles import RoleTable
from isthmus.preparation.linking import count_links
from isthmus.preparation.owner import Preparation, PreparationConfig
from isthmus.preparation.prepared import prepared
from isthmus.preparation.rounds import COMMITTED, TABLE

logger = logging.getLogger(__name__)


class SiteTablesRun:
    """The tables of one site in one run."""

    table: RoleTable = TABLE

    def __init__(self, site: SiteSettings, settings: Settings, folder: Path, run_id: bytes) -> None:
        self.site, self.settings, self.folder, self.run_id = site, settings, folder, run_id
        self.client = str(site.client)

    @cached_property
    def tables(self) -> OwnerTables:
        assert self.site.tables is not None
        return read_owner(self.site.tables.folder, self.client, seed=self.site.tables.seed)

    @property
    def tables_by_client(self) -> dict[str, OwnerTables]:
        return {self.client: self.tables}

    @property
    def preparation(self) -> PreparationConfig:
        """How this site prepares; the cap is its own."""
        assert self.site.tables is not None
        link = "none" if self.settings.run.link == "none" else "psi"
        return PreparationConfig(link=link, max_ids=self.site.tables.max_ids, key=self.tables.link_key)

    def reply(self) -> JoinReply:
        """Sizes and hashes of the schema: what the server may know before anything is sent."""
        schema = self.tables.schema
        facts = ClientFacts(len(schema.columns), len(schema.labels.classes), len(self.tables.y), schema.task)
        return JoinReply(clients={self.client: facts}, dataset=SITE_TABLES, source="own tables", schema=digests(schema))

    def data(self) -> dict[str, NodeData | GraphSetData]:
        """What the method is given; the links found are shown to this organisation alone."""
        store = FileStore(self.folder / "preparation" / self.client, self.run_id)
        if COMMITTED not in store.steps():
            raise DataError(f"{self.client} holds no preparation of this run: submit a new run")
        agreed = load_state(store, COMMITTED, Preparation)
        assert isinstance(agreed, Preparation)
        counts = count_links(self.tables, agreed.key, agreed.partner.numpy(), agreed.partners, self.client)
        for partner, count in counts.items():
            logger.info("%s: %d edges listed, %d agreed with %s", self.client, count.listed, count.agreed, partner)
        write_atomic(
            self.folder / "links.json", json.dumps({name: asdict(count) for name, count in counts.items()}).encode()
        )
        found = prepared(self.tables, agreed)
        if isinstance(found, NodeData) and not self.settings.method.cross_edges:
            found = found.without_cross()
        return {self.client: found}
