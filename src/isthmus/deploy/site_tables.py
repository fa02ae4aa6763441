"""A site's own tables in a run: read once, prepared with the other organisations, then handed to the method.

Runs in the client job. Only the folder that ``client.toml`` names is opened. What was agreed with the others stays
under ``state/<run>/preparation`` of the site, so that a run can be continued without repeating it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

from isthmus.data.graph_set import GraphSetData
from isthmus.data.node_data import NodeData
from isthmus.data.own_dataset import SITE_TABLES
from isthmus.data.tables.model import TablesModel
from isthmus.data.tables.new_rows import read_to_predict
from isthmus.data.tables.owner import OwnerTables, read_owner
from isthmus.data.tables.schema import FILE, digests, read_schema
from isthmus.deploy.handshake import ClientFacts, JoinReply
from isthmus.deploy.site_settings import SiteSettings
from isthmus.deploy.trained_models import trained_package
from isthmus.errors import DataError
from isthmus.experiments.config import Settings
from isthmus.experiments.folder import FileStore, write_atomic
from isthmus.federation.party import load_state
from isthmus.federation.roles import RoleTable
from isthmus.preparation.linking import count_links
from isthmus.preparation.owner import Preparation, PreparationConfig
from isthmus.preparation.prepared import prepared, tables_model
from isthmus.preparation.rounds import COMMITTED, TABLE

logger = logging.getLogger(__name__)


class SiteTablesRun:
    """The tables of one site in one run."""

    table: RoleTable = TABLE

    def __init__(self, site: SiteSettings, settings: Settings, folder: Path, run_id: bytes) -> None:
        self.site, self.settings, self.folder, self.run_id = site, settings, folder, run_id
        self.client = str(site.client)
        self.models: dict[str, TablesModel] = {}
        """What this site's model takes along, once :meth:`data` was called."""

    @cached_property
    def tables(self) -> OwnerTables:
        assert self.site.tables is not None
        folder, seed = self.site.tables.folder, self.site.tables.seed
        model = self.trained
        if model is None:
            return read_owner(folder, self.client, seed=seed)
        if (folder / FILE).exists():
            model.check(read_schema(folder))
        return read_to_predict(folder, self.client, model.schema, seed=seed)

    @cached_property
    def trained(self) -> TablesModel | None:
        """Of a prediction: schema, scaling and link key the model was trained with."""
        if self.settings.run.predict is None:
            return None
        return trained_package(self.site, self.settings.run.predict, self.client).tables

    @property
    def tables_by_client(self) -> dict[str, OwnerTables]:
        return {self.client: self.tables}

    @property
    def preparation(self) -> PreparationConfig:
        """How this site prepares; the cap is its own."""
        kept = None if self.trained is None else self.trained.key or None
        return PreparationConfig(max_ids=self.site.policy.max_ids, key=kept or self.tables.link_key)

    @property
    def sample_ids(self) -> list[str]:
        """What this organisation calls its samples."""
        graphs = self.tables.graph_ids
        found: list[str] = (self.tables.ids if graphs is None else graphs).to_list()
        return found

    def reply(self) -> JoinReply:
        """Shapes and hashes of the schema: what the server may know before anything is sent."""
        schema = self.tables.schema
        samples = 0 if self.settings.secure else len(self.tables.y)
        facts = ClientFacts(len(schema.columns), len(schema.labels.classes), samples, schema.task)
        return JoinReply(clients={self.client: facts}, dataset=SITE_TABLES, source="own tables", schema=digests(schema))

    def data(self) -> dict[str, NodeData | GraphSetData]:
        """What the method is given; the links found are shown to this organisation alone."""
        store = FileStore(self.folder / "preparation" / self.client, self.run_id)
        if COMMITTED not in store.steps():
            raise DataError(f"{self.client} holds no preparation of this run: submit a new run")
        agreed = load_state(store, COMMITTED, Preparation)
        assert isinstance(agreed, Preparation)
        if self.trained is not None:
            agreed = replace(agreed, scaling=self.trained.scaling)
        self.models = {self.client: tables_model(self.tables, agreed)}
        counts = count_links(self.tables, agreed.key, agreed.partner.numpy(), agreed.partners, self.client)
        for partner, count in counts.items():
            logger.info("%s: %d edges listed, %d agreed with %s", self.client, count.listed, count.agreed, partner)
        write_atomic(
            self.folder / "links.json", json.dumps({name: asdict(count) for name, count in counts.items()}).encode()
        )
        found = prepared(self.tables, agreed, self.settings.run.edge_weights)
        if isinstance(found, NodeData) and not self.settings.method.cross_edges:
            found = found.without_cross()
        return {self.client: found}
