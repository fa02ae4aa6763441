"""Scenarios of graph tasks: data sets of graphs + partition + split + seed.

data set         partition                            clients
chem, bio-chem,  by-dataset (default)                 one per data set
...              shards:S                             S per data set (FedStar, figure 4)
mutag, ...,      random, random-equal, dirichlet      as asked
motifs           shards                               as asked

split
fedstar               stratified 80/10/10 drawn once with the published code's seed, the same for every seed of ours
                      (FedStar, 9.8)
stratified:80/10/10   stratified, drawn anew with every seed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.datasets import canonical_name, node_sets
from isthmus.data.generators import GENERATORS, GRAPH_GENERATORS, canonical, generate_graphs
from isthmus.data.graph_set import GraphSetData
from isthmus.data.graphsets import SETTINGS, find_graphs, graph_sets, load_graphs
from isthmus.data.parameters import need, parse_object
from isthmus.data.partition import FALLBACK_CLIENTS, check_owners, client_ids, dirichlet_owners
from isthmus.data.split import Shares, unseen_classes
from isthmus.errors import ConfigError, DataError, unknown
from isthmus.seeds import Stream

log = logging.getLogger(__name__)

FEDSTAR_SPLIT_SEED = 123  # of the published code; part of its protocol, so not one of our streams


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
    name = dataset.partition(":")[0].lower().replace("_", "-")
    return "graph" if name in SETTINGS or name in graph_sets() or name in GRAPH_GENERATORS else "node"


def dataset_name(dataset: str) -> str:
    """The name results carry, of either kind of task; an unknown one is answered with all there are."""
    if task_of(dataset) == "graph":
        return dataset.lower()
    try:
        return canonical_name(dataset)
    except ConfigError as error:
        if dataset.partition(":")[0].lower() in GENERATORS:
            raise  # a known generator with a wrong parameter says which
        names = [*node_sets(), *GENERATORS, *graph_sets(), *SETTINGS, *GRAPH_GENERATORS]
        raise unknown("data set", dataset, names) from error


# -- partition -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByDataset:
    """One client per data set."""


@dataclass(frozen=True)
class RandomGraphs:
    """Every graph draws a client."""


@dataclass(frozen=True)
class EqualGraphs:
    """One permutation cut into pieces that differ by at most one graph."""


@dataclass(frozen=True)
class DirichletGraphs:
    """Label skew: shares of a class over clients from Dirichlet(alpha)."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        need("dirichlet", "alpha", self.alpha > 0, "above 0")


@dataclass(frozen=True)
class ShardedGraphs:
    """Every data set cut into ``count`` shards of about equal size, each a client (FedStar, section 9.17).

    Args:
        count: Shards per data set; 0 means the number of clients asked for.
        legacy: 1 = as the published code: consecutive blocks of at most 50 graphs in file order (single-class where the
            file is sorted), the rest scattered. 0 = shuffled first.
    """

    count: int = 0
    legacy: int = 0

    def __post_init__(self) -> None:
        need("shards", "count", self.count >= 0, "at least 1 (or 0 for the number of clients asked for)")


GRAPH_PARTITIONS: dict[str, type[Any]] = {
    "by-dataset": ByDataset,
    "random": RandomGraphs,
    "random-equal": EqualGraphs,
    "dirichlet": DirichletGraphs,
    "shards": ShardedGraphs,
}


def owners_in_set(rule: Any, data: GraphSetData, clients: int, stream: Stream) -> Tensor:
    """Client index of every graph of one data set (G,)."""
    graphs = data.num_graphs
    if isinstance(rule, ByDataset):
        return torch.zeros(graphs, dtype=torch.int64)
    if isinstance(rule, DirichletGraphs):
        return dirichlet_owners(data.y.numpy(), clients, rule.alpha, stream)
    if isinstance(rule, RandomGraphs):
        return torch.randint(0, clients, (graphs,), generator=stream.torch())
    if isinstance(rule, ShardedGraphs) and rule.legacy:
        size = min(50, graphs // clients)
        scattered = torch.randint(0, clients, (graphs,), generator=stream.torch())
        block = torch.arange(graphs) // max(size, 1)
        return torch.where((block < clients) & (size > 0), block, scattered)
    owner = torch.empty(graphs, dtype=torch.int64)
    owner[torch.randperm(graphs, generator=stream.torch())] = torch.arange(graphs) * clients // graphs
    return owner


# -- split -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphSplit:
    """Stratified split of one client's graphs.

    First the training part is drawn, then the rest is divided, both stratified with the rounding of scikit-learn, which
    the published code uses. Where a class is too small for that, the same sizes are drawn without regard to class, but
    at least one graph for every part.

    Args:
        shares: Percentages.
        fixed: Seed to draw with whatever the scenario's seed; None to follow the scenario.
    """

    shares: Shares
    fixed: int | None = None

    def draw(self, y: NDArray[np.int64], stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """Masks (G,) of training, validation and test graphs."""
        seed = stream.integer() % 2**32 if self.fixed is None else self.fixed
        held = float(self.shares.val + self.shares.test)
        train, rest = _halve(np.arange(len(y)), y, held / 100, seed, least=2)
        val, test = _halve(rest, y[rest], float(self.shares.test) / held, seed, least=1)
        return _mask(len(y), train), _mask(len(y), val), _mask(len(y), test)


GRAPH_SPLITS = ("fedstar", "stratified:80/10/10")
"""One example of every form."""


def parse_graph_split(text: str) -> GraphSplit:
    """``fedstar`` or ``stratified:80/10/10``."""
    kind, _, rest = text.strip().lower().partition(":")
    if kind == "fedstar" and not rest:
        return GraphSplit(Shares.parse("80/10/10"), FEDSTAR_SPLIT_SEED)
    if kind == "stratified" and rest:
        shares = Shares.parse(rest)
        if min(shares.train, shares.val, shares.test) <= 0:
            raise ConfigError(f"split {text!r}: every part needs a share above 0")
        return GraphSplit(shares)
    raise unknown("split of graphs", text, GRAPH_SPLITS)


def _halve(
    rows: NDArray[np.int64], y: NDArray[np.int64], share: float, seed: int, *, least: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two parts, the second with ``share`` of the rows; stratified if the classes allow it."""
    from sklearn.model_selection import train_test_split

    try:
        first, second = train_test_split(rows, test_size=share, random_state=seed, shuffle=True, stratify=y)
        if len(second) >= least:
            return first, second
    except ValueError:  # a class with one member, or fewer places than classes
        pass
    shuffled = np.random.default_rng(seed).permutation(rows)
    size = min(max(round(share * len(rows)), least), len(rows) - 1)
    return shuffled[size:], shuffled[:size]


def _mask(count: int, rows: NDArray[Any]) -> Tensor:
    mask = torch.zeros(count, dtype=torch.bool)
    mask[torch.from_numpy(np.asarray(rows, dtype=np.int64))] = True
    return mask


# -- scenario --------------------------------------------------------------------------------------


def build_graph_scenario(
    *, dataset: str, partition: str | None = None, clients: int | None = None, split: str = "fedstar", seed: int = 0
) -> GraphScenario:
    """Load, partition and split data sets of graphs.

    Args:
        dataset: A setting (``chem``), one data set of graphs (``mutag``) or a generator (``motifs``).
        partition: ``by-dataset`` for settings, ``random-equal`` for a single data set, or another of
            `GRAPH_PARTITIONS`.
        clients: Number of clients for a single data set, by default 10; a setting has its own.
        split: ``fedstar`` or ``stratified:80/10/10``.
        seed: Of all draws of the scenario.
    """
    setting = SETTINGS.get(dataset.lower())
    partition = partition or ("by-dataset" if setting else "random-equal")
    rule: Any = parse_object("partition of graphs", partition, GRAPH_PARTITIONS)
    splitter = parse_graph_split(split)
    names = setting or (dataset,)
    per_set = _clients_per_set(rule, partition, clients, setting)
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
        owner = owners_in_set(rule, data, per_set, Stream(seed, ("partition", title)))
        check_owners(owner, per_set, partition, "graphs")
        for shard, client in enumerate(mine):
            rows = torch.nonzero(owner == shard).flatten()
            part = data if per_set == 1 else data.select(rows)
            stream = Stream(seed, ("split", title, shard))
            if part.num_graphs < 3:
                even = isinstance(rule, EqualGraphs | ShardedGraphs)
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


def _clients_per_set(rule: Any, partition: str, clients: int | None, setting: tuple[str, ...] | None) -> int:
    if clients is not None and clients < 1:
        raise ConfigError(f"a scenario needs at least 1 client, got {clients}")
    sets = len(setting) if setting else 1
    if isinstance(rule, ByDataset):
        natural: int | None = sets
    elif isinstance(rule, ShardedGraphs) and rule.count:
        natural = sets * rule.count
    else:
        natural = None
    if natural is not None:
        if clients not in (None, natural):
            raise ConfigError(f"partition {partition} has {natural} clients here, not {clients}: leave the number out")
        return natural // sets
    wanted = clients if clients is not None else (sets if setting else FALLBACK_CLIENTS)
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
