"""Scenarios of graph tasks: data sets of graphs + partition + split + seed.

data set         partition                            clients
chem, bio-chem,  by-dataset (default)                 one per data set
...              shards:S                             S per data set (FedStar, figure 4)
mutag, ...,      random, random-equal, dirichlet      as asked
motifs           shards                               as asked
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isthmus.data.datasets import NODE_SETS, canonical_name
from isthmus.data.generators import GENERATORS, GRAPH_GENERATORS, canonical, generate_graphs
from isthmus.data.graph_set import GraphSetData
from isthmus.data.graphset_partition import GraphPartitioner, parse_graph_partition
from isthmus.data.graphset_split import parse_graph_split
from isthmus.data.graphsets import GRAPH_SETS, SETTINGS, find_graphs, load_graphs
from isthmus.data.own_dataset import kind_of, load_own, task_of_own
from isthmus.data.own_graph import OwnGraphs
from isthmus.data.partition import FALLBACK_CLIENTS, check_owners, client_ids
from isthmus.data.split import unseen_classes
from isthmus.errors import ConfigError, DataError, unknown
from isthmus.seeds import Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphScenario:
    """Data sets of graphs, partition, split and seed, worked out.

    Args:
        dataset, partition, clients, split, seed: What was asked for.
        source: Where the data came from, in words fit for a result.
        parts: Client id -> its graphs. Sorted by id.
        titles: Client id -> what it holds, in words: a data set, or a shard of one.
        statistics: Plain numbers per client.
    """

    dataset: str
    partition: str
    clients: int
    split: str
    seed: int
    source: str
    parts: Mapping[str, GraphSetData]
    titles: Mapping[str, str]
    statistics: Mapping[str, Mapping[str, Any]]


def task_of(dataset: str) -> str:
    """``graph`` for names this module knows, ``node`` for the rest."""
    if kind_of(dataset) is not None:
        return task_of_own(dataset)
    name = dataset.partition(":")[0].lower().replace("_", "-")
    return "graph" if name in SETTINGS or name in GRAPH_SETS or name in GRAPH_GENERATORS else "node"


def dataset_name(dataset: str) -> str:
    """The name results carry, of either kind of task; an unknown one is answered with all there are."""
    if kind_of(dataset) is not None:
        return dataset
    if task_of(dataset) == "graph":
        return dataset.lower()
    try:
        return canonical_name(dataset)
    except ConfigError as error:
        if dataset.partition(":")[0].lower() in GENERATORS:
            raise  # a known generator with a wrong parameter says which
        if _is_folder(dataset):
            raise ConfigError(
                f"{dataset!r} is no data set that Isthmus knows: for the folder of that name give --dataset ./{dataset}"
            ) from error
        names = [*NODE_SETS, *GENERATORS, *GRAPH_SETS, *SETTINGS, *GRAPH_GENERATORS]
        raise unknown("data set", dataset, names) from error


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # longer than a file's name may be
        return False


def build_graph_scenario(
    *, dataset: str, partition: str | None = None, clients: int | None = None, split: str = "fedstar", seed: int = 0
) -> GraphScenario:
    """Load, partition and split data sets of graphs.

    Args:
        dataset: A setting (``chem``), one data set of graphs (``mutag``) or a generator (``motifs``).
        partition: ``by-dataset`` for settings, ``random-equal`` for a single data set, or another of
            `isthmus.data.graphset_partition`.
        clients: Number of clients for a single data set, by default 10; a setting has its own.
        split: ``fedstar`` or ``stratified:80/10/10``.
        seed: Of all draws of the scenario.
    """
    if kind_of(dataset) is not None:
        return _own_graph_scenario(dataset, partition, clients, split, seed)
    setting = SETTINGS.get(dataset.lower())
    partition = partition or ("by-dataset" if setting else "random-equal")
    rule = parse_graph_partition(partition)
    splitter = parse_graph_split(split)
    names = setting or (dataset,)
    per_set = _clients_per_set(
        rule, partition, clients, sets=len(names), fallback=len(names) if setting else FALLBACK_CLIENTS
    )
    ids = client_ids(len(names) * per_set)
    parts: dict[str, GraphSetData] = {}
    titles: dict[str, str] = {}
    sources: set[str] = set()
    unseen: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        title, loader = _loader(name, seed)
        data, source = loader()
        sources.add(source)
        if per_set > data.num_graphs:
            raise DataError(f"{per_set} clients cannot share the {data.num_graphs} graphs of {title}: use fewer")
        mine = ids[index * per_set : (index + 1) * per_set]
        owner = rule.assign(data, per_set, Stream(seed, ("partition", title)))
        check_owners(owner, per_set, partition, "graphs")
        for shard, client in enumerate(mine):
            rows = torch.nonzero(owner == shard).flatten()
            part = data if per_set == 1 else data.select(rows)
            stream = Stream(seed, ("split", title, shard))
            if part.num_graphs < 3:
                even = rule.even
                raise DataError(
                    f"{data.num_graphs} graphs of {title} over {per_set} clients leave one with {part.num_graphs}, too "
                    "few for train, val "
                    f"and test: use {f'at most {data.num_graphs // 3}' if even else 'fewer'} clients or shards"
                    f"{'' if even else ', another seed or --partition random-equal'}"
                )
            train, val, test = splitter.draw(part.y.numpy(), stream)
            parts[client] = replace(part, train=train, val=val, test=test)
            if absent := unseen_classes(parts[client]):
                unseen[client] = absent
            titles[client] = title if per_set == 1 else f"{title} {shard + 1}/{per_set}"
    if unseen:
        shown = "; ".join(
            f"{client} class {', '.join(map(str, absent))}" for client, absent in list(unseen.items())[:5]
        )
        log.warning(
            "split %s leaves classes without a training graph at %d of %d clients, which cannot predict them (%s%s): "
            "use fewer "
            "clients or train on more",
            split,
            len(unseen),
            len(ids),
            shown,
            "; ..." if len(unseen) > 5 else "",
        )
    return GraphScenario(
        dataset=dataset.lower() if setting else _loader(dataset, seed)[0],
        partition=partition,
        clients=len(ids),
        split=split,
        seed=seed,
        source=" + ".join(sorted(sources)),
        parts=parts,
        titles=titles,
        statistics={client: describe_graphs(part) for client, part in parts.items()},
    )


def _own_graph_scenario(
    dataset: str, partition: str | None, clients: int | None, split: str, seed: int
) -> GraphScenario:
    """Own sets of graphs: every owner is a client."""
    own = load_own(dataset)
    assert isinstance(own, OwnGraphs)
    if partition not in (None, "owner") or clients not in (None, len(own.parts)):
        raise ConfigError(f"own sets of graphs have their owners, {len(own.parts)}: leave partition and clients out")
    splitter = parse_graph_split(split)
    parts = {}
    for owner, data in own.parts.items():
        if data.num_graphs < 3:
            raise DataError(f"{owner} has {data.num_graphs} graphs, too few for train, val and test: at least 3")
        train, val, test = splitter.draw(data.y.numpy(), Stream(seed, ("split", owner)))
        parts[owner] = replace(data, train=train, val=val, test=test)
    return graph_scenario_of(parts, dataset=dataset, partition="owner", split=split, seed=seed, source=own.source)


def graph_scenario_of(
    parts: Mapping[str, GraphSetData], *, dataset: str, partition: str, split: str, seed: int, source: str
) -> GraphScenario:
    """A scenario of owners whose graphs are given, split already."""
    return GraphScenario(
        dataset=dataset,
        partition=partition,
        clients=len(parts),
        split=split,
        seed=seed,
        source=source,
        parts=dict(parts),
        titles={client: client for client in parts},
        statistics={client: describe_graphs(part) for client, part in parts.items()},
    )


def describe_graphs(part: GraphSetData) -> dict[str, Any]:
    """Sizes of one client, as plain numbers."""
    return {
        "graphs": part.num_graphs,
        "train": part.num_train,
        "val": int(part.val.sum()),
        "test": int(part.test.sum()),
        "nodes": part.num_nodes,
        "edges": part.edge_index.shape[1],
        "features": part.num_features,
        "classes": torch.bincount(part.y, minlength=part.num_classes).tolist(),
    }


def _clients_per_set(rule: GraphPartitioner, partition: str, clients: int | None, *, sets: int, fallback: int) -> int:
    if clients is not None and clients < 1:
        raise ConfigError(f"a scenario needs at least 1 client, got {clients}")
    natural = rule.clients_per_set()
    if natural is not None:
        if clients not in (None, natural * sets):
            raise ConfigError(
                f"partition {partition} has {natural * sets} clients here, not {clients}: leave the number out"
            )
        return natural
    wanted = fallback if clients is None else clients
    if wanted % sets:
        raise ConfigError(
            f"{wanted} clients cannot hold {sets} data sets in equally many shards each: use a multiple of {sets}"
        )
    return wanted // sets


def _loader(name: str, seed: int) -> tuple[str, Callable[[], tuple[GraphSetData, str]]]:
    kind = name.partition(":")[0].lower()
    if kind in GRAPH_GENERATORS:
        return canonical(name), lambda: (generate_graphs(name, Stream(seed, ("data",))), "generated")
    if kind in GENERATORS:
        raise ConfigError(f"{kind} makes one graph for a node task, not a set of graphs")
    entry = find_graphs(name)
    return entry.name, lambda: load_graphs(entry.name)
