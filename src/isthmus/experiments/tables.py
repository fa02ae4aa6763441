"""Tables of several owners in one process: read, prepared as between organisations, and put together as a scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from isthmus.data.edge_weights import EdgeWeights
from isthmus.data.graph_set import GraphSetData
from isthmus.data.graphscenario import GraphScenario, graph_scenario_of
from isthmus.data.node_data import NodeData
from isthmus.data.own_dataset import tables_folder
from isthmus.data.scenario import Scenario
from isthmus.data.statistics import describe
from isthmus.data.tables.check import owner_folders
from isthmus.data.tables.model import TablesModel
from isthmus.data.tables.owner import OwnerTables, owners_in, read_owner
from isthmus.data.tables.schema import FILE, Schema, differences, read_schema
from isthmus.errors import ConfigError, DataError
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import QuorumError
from isthmus.federation.ledger import Entry
from isthmus.federation.session import Session
from isthmus.preparation import LINKING, Link
from isthmus.preparation.linking import KEY_BYTES, LinkCounts, read_key
from isthmus.preparation.owner import OwnerClient, PreparationConfig
from isthmus.preparation.prepared import prepared, tables_model
from isthmus.preparation.rounds import TABLE, TABLES, link_owners, prepare_owners
from isthmus.preparation.script import preparation_contract
from isthmus.seeds import Stream

PARTITION, SPLIT, SOURCE = "owner", "schema", "own tables"
"""What results say of tables: owners are those of the tables, the split is in ``schema.toml``."""


@dataclass(frozen=True)
class PreparedTables:
    """All owners' data, the messages it took, and what each owner learnt of its links."""

    parts: Mapping[str, NodeData | GraphSetData]
    entries: tuple[Entry, ...]
    links: Mapping[str, Mapping[str, LinkCounts]]
    models: Mapping[str, TablesModel]


@dataclass(frozen=True)
class TablesScenario(Scenario):
    """A scenario of tables. ``entries`` are the messages of its preparation, ``tables`` what models take along."""

    entries: tuple[Entry, ...] = ()
    tables: Mapping[str, TablesModel] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphTablesScenario(GraphScenario):
    """The same for sets of graphs."""

    entries: tuple[Entry, ...] = ()
    tables: Mapping[str, TablesModel] = field(default_factory=dict)


def read_owners(folder: Path, seed: int) -> dict[str, OwnerTables]:
    """Every owner's tables: a folder of folders, or one folder with an owner column."""
    apart = owner_folders(folder)
    if not apart:
        schema = read_schema(folder)
        if schema.owner is None:
            raise DataError(
                f"{folder} holds one owner's tables: give a folder of such folders, or name the owner column in {FILE}"
            )
        return {name: read_owner(folder, name, seed=seed, only=name) for name in owners_in(folder, schema)}
    check_same_schema({owner: read_schema(path) for owner, path in apart.items()})
    return {owner: _read(path, owner, seed) for owner, path in apart.items()}


def _read(folder: Path, owner: str, seed: int) -> OwnerTables:
    """One owner's tables; a mistake is said to be the owner's."""
    try:
        return read_owner(folder, owner, seed=seed)
    except DataError as error:
        raise DataError(f"{owner}: {error}") from None


def check_same_schema(schemas: Mapping[str, Schema]) -> None:
    """Refuse owners whose schemas differ; the error names where."""
    first, *others = schemas
    for owner in others:
        if schemas[owner].hash != schemas[first].hash:
            found = differences(schemas[owner], schemas[first]) or ["its bytes differ: copy the file"]
            raise DataError(f"{owner} and {first} have different schemas: {'; '.join(found)}")


def link_counts(
    tables: Mapping[str, OwnerTables], max_ids: Mapping[str, int | None]
) -> dict[str, dict[str, LinkCounts]]:
    """Owner -> partner -> edges listed and agreed, by private set intersection; no owner compares more than it may."""
    for owner, owned in tables.items():
        if owned.schema.task == "graph":
            raise DataError(f"{owner} holds sets of graphs, which have no edges between owners: nothing to link")
    if len(tables) < 2:
        raise DataError("linking takes at least two owners: give the client.toml of every owner, or their folder")
    config = PreparationConfig(key=read_key(tables))
    engine = LocalEngine(tables, TABLE, config, Stream(0, ("preparation",)))  # type: ignore[arg-type]
    clients: dict[str, OwnerClient] = {name: engine.party(name).client for name in tables}  # type: ignore[misc]
    for name, client in clients.items():
        client.config = replace(config, max_ids=max_ids[name])
    session = Session(engine, TABLE)
    session.clock.begin(LINKING, 1, 1)
    try:
        link_owners(session)
    except QuorumError as error:
        raise DataError(str(error)) from None
    return {name: client.counts() for name, client in clients.items()}


def prepare(
    tables: Mapping[str, OwnerTables],
    *,
    seed: int,
    secure: bool,
    link: Link,
    models: Mapping[str, TablesModel] | None = None,
    edge_weights: EdgeWeights = "ignore",
) -> PreparedTables:
    """Agree on scaling and on edges between owners, by the messages organisations would exchange. With ``models``, as
    they took them along: scaling and link key are those of the training. With ``edge_weights=use`` edges have the
    weights that the schema names.
    """
    # In one process the key protects nothing; drawn from the seed, it makes runs repeatable.
    key = read_key(tables) or Stream(seed, ("link key",)).numpy().bytes(KEY_BYTES)
    if models:
        key = next(iter(models.values())).key or key
    config, stream = PreparationConfig(key=key), Stream(seed, ("preparation",))
    engine = LocalEngine(tables, TABLES[link], config, stream)  # type: ignore[arg-type]
    contract = preparation_contract(link, list(tables), secure=secure, scale=not models)
    engine.watch(contract)
    session = Session(engine, TABLES[link], seed=seed, secure=secure, contract=contract)
    prepare_owners(session, link, scale=not models)
    clients: dict[str, OwnerClient] = {name: engine.party(name).client for name in tables}  # type: ignore[misc]
    for name, model in (models or {}).items():
        clients[name].state = replace(clients[name].state, scaling=model.scaling)
    return PreparedTables(
        {name: prepared(tables[name], client.state, edge_weights) for name, client in clients.items()},
        tuple(session.ledger.take()),
        {name: client.counts() if client.state.key else {} for name, client in clients.items()},
        {name: tables_model(tables[name], client.state) for name, client in clients.items()},
    )


def tables_scenario(
    dataset: str,
    *,
    partition: str | None,
    clients: int | None,
    split: str | None,
    seed: int,
    secure: bool = False,
    link: Link = "plain",
    edge_weights: EdgeWeights = "ignore",
) -> TablesScenario | GraphTablesScenario:
    """A folder of tables as a scenario."""
    if partition not in (None, PARTITION):
        raise ConfigError(f"tables have their owners: leave --partition {partition} out")
    if split not in (None, SPLIT):
        raise ConfigError(f"the split of tables stands in {FILE}: leave --split {split} out and write it there")
    tables = read_owners(tables_folder(dataset), seed)
    if clients not in (None, len(tables)):
        raise ConfigError(f"{dataset} holds the tables of {len(tables)} owners, not {clients}: leave the number out")
    ready = prepare(tables, seed=seed, secure=secure, link=link, edge_weights=edge_weights)
    if isinstance(next(iter(ready.parts.values())), GraphSetData):
        parts = {name: part for name, part in ready.parts.items() if isinstance(part, GraphSetData)}
        made = graph_scenario_of(parts, dataset=dataset, partition=PARTITION, split=SPLIT, seed=seed, source=SOURCE)
        return GraphTablesScenario(**vars(made), entries=ready.entries, tables=ready.models)
    nodes = {name: part for name, part in ready.parts.items() if isinstance(part, NodeData)}
    whole = union(list(nodes.values()))
    owner = torch.repeat_interleave(torch.arange(len(nodes)), torch.tensor([part.num_nodes for part in nodes.values()]))
    for part in ("train", "val", "test"):
        if not bool(getattr(whole, part).any()):
            raise DataError(f"the split in {FILE} leaves no {part} rows at any owner")
    return TablesScenario(
        dataset=dataset,
        partition=PARTITION,
        clients=len(nodes),
        split=SPLIT,
        seed=seed,
        source=SOURCE,
        parts=nodes,
        whole=whole,
        statistics=describe(whole, owner, nodes),
        original_id=torch.arange(whole.num_nodes),
        entries=ready.entries,
        tables=ready.models,
    )


def union(parts: Sequence[NodeData]) -> NodeData:
    """All owners' nodes one after the other, with all edges; ids are the owners' keyed ones."""
    begin = torch.tensor([0, *(part.num_nodes for part in parts)]).cumsum(0)
    ids = torch.cat([part.node_id for part in parts])
    order = torch.argsort(ids)
    arcs, weights = [], []
    for part, shift in zip(parts, begin.tolist(), strict=False):
        arcs.append(part.edge_index + shift)
        if part.edge_weight is not None:
            weights.append(part.edge_weight)
        if part.cross is not None:
            out = part.cross.outgoing  # the owner of the source lists the arc once
            target = order[torch.searchsorted(ids[order], part.cross.other[out])]
            arcs.append(torch.stack([part.cross.own[out] + shift, target]))
            if part.edge_weight is not None:
                weights.append(part.cross.weight[out])
    first = parts[0]
    return NodeData(
        x=torch.cat([part.x for part in parts]),
        edge_index=torch.cat(arcs, dim=1),
        y=torch.cat([part.y for part in parts]),
        train=torch.cat([part.train for part in parts]),
        val=torch.cat([part.val for part in parts]),
        test=torch.cat([part.test for part in parts]),
        node_id=ids,
        num_classes=first.num_classes,
        edge_weight=torch.cat(weights) if weights else None,
    )
