"""Who owns which node.

A partitioner is a small frozen object made from a string (`parse_partition`); ``assign`` gives every node the index of
a client, or -1 for a node that takes no part. A new one needs nothing but its class, here or in a file of its own.

    random          every node draws a client (FedStruct)
    random-equal    one permutation cut into pieces that differ by at most one node (FedGGR, HiFGL)
    louvain         Louvain communities, assigned to clients of about equal size (FedStruct)
    louvain-top     the K largest Louvain communities, one per client; the rest is left out (FedSpray)
    kmeans          K-means clusters of the features, assigned likewise (FedStruct)
    metis           METIS parts: equal sizes, few cut edges
    dirichlet       label skew: the shares of a class over clients are drawn from Dirichlet(alpha)
    shards          label skew: nodes sorted by class, cut into shards, a few shards per client (FedAvg)
    ego             balls around K random centres; nodes in no ball are left out
    owner           as the data say themselves (generated banks, own data with ``owner``)
    column          own data: a column names the owner, ``column:NAME``
    owners          own data: owners handed over from Python, ``partition=owner``
    list            given lists of nodes: ``list:FOLDER`` with one text file of row numbers per client

Lists that were published (fedspray, fedtad, openfgl, fedaux) are in `isthmus.data.published_partition`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data import communities, given
from isthmus.data.own_graph import owners_of
from isthmus.data.parameters import need, parse_object
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError, DataError, unknown
from isthmus.graph.normalise import adjacency, from_torch_csr
from isthmus.registry import Registry
from isthmus.seeds import Stream

FALLBACK_CLIENTS = 10


class Partitioner(Protocol):
    """A rule that assigns nodes to clients."""

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        """Client index of every node (n,), int64; -1 for a node left out."""
        ...

    def natural_clients(self, graph: Loaded) -> int | None:
        """The number of clients the rule brings itself, or None where the caller says."""
        return None

    def names(self, graph: Loaded) -> tuple[str, ...]:
        """What the clients are called, sorted; empty where they have numbers only."""
        return ()

    def natural_split(self) -> str | None:
        """The split that was published with the partition, or None where there is none."""
        return None


PARTITIONS: Registry[type[Partitioner]] = Registry("partition", "isthmus.data")
"""Partitions of nodes by name. To add one, decorate a frozen dataclass whose fields have defaults; the first line of
its docstring is what ``isthmus partitions`` shows.
"""


@PARTITIONS.register("random")
@dataclass(frozen=True)
class RandomPartition(Partitioner):
    """Every node goes to a client of its own draw, uniformly (FedStruct): sizes vary."""

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        return torch.randint(0, clients, (graph.data.num_nodes,), generator=stream.torch())


@PARTITIONS.register("random-equal")
@dataclass(frozen=True)
class EqualPartition(Partitioner):
    """One random permutation cut into K consecutive pieces at rounded boundaries (FedGGR spec, section 6)."""

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        return equal_owners(graph.data.num_nodes, clients, stream)


@PARTITIONS.register("louvain")
@dataclass(frozen=True)
class LouvainPartition(Partitioner):
    """Louvain communities, balanced.

    Args:
        rule: ``code`` (moving pointer, as FedStruct's code does) or ``prose`` (first fit, as its text says).
        slack: How many nodes more than n / K a client may hold.
    """

    rule: str = "code"
    slack: int = 20

    def __post_init__(self) -> None:
        _check_rule("louvain", self.rule, self.slack)

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        groups = communities.louvain(graph.data, stream)
        return communities.balanced(groups, graph.data.num_nodes, clients, rule=self.rule, slack=self.slack)


@PARTITIONS.register("louvain-top")
@dataclass(frozen=True)
class LouvainTopPartition(Partitioner):
    """The K largest Louvain communities, one per client; all other nodes are left out (FedSpray spec, section 6.2)."""

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        groups = communities.louvain(graph.data, stream)
        return communities.owners_of(groups[:clients], graph.data.num_nodes)


@PARTITIONS.register("kmeans")
@dataclass(frozen=True)
class KMeansPartition(Partitioner):
    """K-means with K clusters on the raw features, balanced like louvain."""

    rule: str = "code"
    slack: int = 20

    def __post_init__(self) -> None:
        _check_rule("kmeans", self.rule, self.slack)

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        from sklearn.cluster import KMeans

        x = graph.data.x
        features = from_torch_csr(x) if x.layout == torch.sparse_csr else x.numpy()
        seed = stream.integer() % 2**32
        label = KMeans(clients, n_init=1, random_state=seed).fit_predict(features).astype(np.int64)
        groups = communities.groups_of(label)
        return communities.balanced(groups, graph.data.num_nodes, clients, rule=self.rule, slack=self.slack)


@PARTITIONS.register("metis")
@dataclass(frozen=True)
class MetisPartition(Partitioner):
    """K-way METIS on the graph read as undirected (Karypis & Kumar, 1998)."""

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        try:
            import pymetis
        except ImportError:
            raise ConfigError("partition metis needs the package pymetis: pip install 'isthmus[metis]'") from None
        if clients == 1:
            return torch.zeros(graph.data.num_nodes, dtype=torch.int64)
        adjacency = _undirected(graph)
        options = pymetis.Options(seed=stream.integer() % 2**31)
        _, part = pymetis.part_graph(clients, xadj=adjacency.indptr, adjncy=adjacency.indices, options=options)
        return torch.tensor(part, dtype=torch.int64)


@PARTITIONS.register("dirichlet")
@dataclass(frozen=True)
class DirichletPartition(Partitioner):
    """Label skew: the shares in which the nodes of a class go to the clients are drawn from Dirichlet(alpha, ...,
    alpha).

    Drawn anew (at most 100 times) while a client is left without nodes. Nodes without a label are one more class.

    Args:
        alpha: Concentration: small is skewed, large is even.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        need("dirichlet", "alpha", self.alpha > 0, "above 0")

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        return dirichlet_owners(graph.data.y.numpy(), clients, self.alpha, stream)


@PARTITIONS.register("shards")
@dataclass(frozen=True)
class ShardPartition(Partitioner):
    """Label skew of McMahan et al. (2017): nodes sorted by class, cut into ``K * per_client`` shards, ``per_client``
    random shards each.
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        need("shards", "per_client", self.per_client >= 1, "at least 1")

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        nodes, shards = graph.data.num_nodes, clients * self.per_client
        rng = stream.numpy()
        shuffled = rng.permutation(nodes)  # a class lies in random order inside its stretch
        order = shuffled[np.argsort(graph.data.y.numpy()[shuffled], kind="stable")]
        holder = rng.permutation(np.arange(shards) % clients)
        owner = np.empty(nodes, dtype=np.int64)
        owner[order] = holder[np.arange(nodes) * shards // nodes]
        return torch.from_numpy(owner)


@PARTITIONS.register("ego")
@dataclass(frozen=True)
class EgoPartition(Partitioner):
    """Balls around K random centres: a node belongs to the nearest centre within ``hops`` (a tie to the lower client),
    else to nobody.
    """

    hops: int = 2

    def __post_init__(self) -> None:
        need("ego", "hops", self.hops >= 0, "at least 0")

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        adjacency = _undirected(graph)
        nodes = graph.data.num_nodes
        owner = np.full(nodes, clients, dtype=np.int64)  # clients = nobody, larger than every client
        owner[stream.numpy().permutation(nodes)[:clients]] = np.arange(clients)
        frontier = np.flatnonzero(owner < clients)
        for _ in range(self.hops):
            rows = adjacency[frontier]
            nearest = np.full(nodes, clients, dtype=np.int64)
            np.minimum.at(nearest, rows.indices, np.repeat(owner[frontier], np.diff(rows.indptr)))
            frontier = np.flatnonzero((owner == clients) & (nearest < clients))
            owner[frontier] = nearest[frontier]
        owner[owner == clients] = -1
        return torch.from_numpy(owner)


@PARTITIONS.register("owner")
@dataclass(frozen=True)
class OwnerPartition(Partitioner):
    """As the data say themselves: each of their owners is a client."""

    def natural_clients(self, graph: Loaded) -> int | None:
        return int(self._owner(graph).max()) + 1

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        return self._owner(graph)

    def names(self, graph: Loaded) -> tuple[str, ...]:
        return graph.owner_names

    def _owner(self, graph: Loaded) -> Tensor:
        if graph.owner is None:
            raise ConfigError(
                "partition owner needs data that name an owner for every node (such as banks): use another partition"
            )
        return graph.owner


class _GivenOwners(Partitioner):
    """Base of rules that know the owner of every node of own data."""

    def owners(self, graph: Loaded) -> tuple[Tensor, tuple[str, ...]]:
        """Index of each node's owner, and the owners' names where they have some."""
        raise NotImplementedError

    def natural_clients(self, graph: Loaded) -> int | None:
        return int(self.owners(graph)[0].max()) + 1

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        return self.owners(graph)[0]

    def names(self, graph: Loaded) -> tuple[str, ...]:
        return self.owners(graph)[1]


@PARTITIONS.register("column")
@dataclass(frozen=True)
class ColumnPartition(_GivenOwners):
    """Own data: a column (``column:NAME``) names the owner of every node."""

    name: str = ""

    def owners(self, graph: Loaded) -> tuple[Tensor, tuple[str, ...]]:
        if not graph.columns:
            raise DataError(
                f"partition column:{self.name}: these data have no columns beside features and labels: give the graph "
                f"an attribute with one value per node (data.{self.name or 'owner'} = ...), or use another partition"
            )
        if self.name not in graph.columns:
            raise unknown("column of the data", self.name, graph.columns)
        return owners_of(graph.columns[self.name], graph.data.num_nodes)


@PARTITIONS.register("owners")
@dataclass(frozen=True)
class HandedOwners(_GivenOwners):
    """Owners handed over from Python: ``isthmus.run(..., partition=owner)``."""

    contents: str = ""

    def owners(self, graph: Loaded) -> tuple[Tensor, tuple[str, ...]]:
        kept = given.recall(f"{given.OWNERS}:{self.contents}", tuple)
        if len(kept[0]) != graph.data.num_nodes:
            raise DataError(f"partition gives {len(kept[0])} owners to {graph.data.num_nodes} nodes: one per node")
        return kept


@dataclass(frozen=True)
class ListPartition(Partitioner):
    """Given lists of rows, one per client; rows in no list are left out."""

    lists: tuple[tuple[int, ...], ...]

    def natural_clients(self, graph: Loaded) -> int | None:
        return len(self.lists)

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        rows = [np.array(rows, dtype=np.int64) for rows in self.lists]
        together = np.concatenate(rows)
        if len(together) and (together.min() < 0 or together.max() >= graph.data.num_nodes):
            raise DataError(
                f"a node list names a row outside 0 ... {graph.data.num_nodes - 1}: the lists belong to another graph"
            )
        if len(np.unique(together)) < len(together):
            raise DataError("a node is in two lists (or twice in one): give every node to one client only")
        return communities.owners_of(rows, graph.data.num_nodes)


@PARTITIONS.register("list")
@dataclass(frozen=True)
class FolderPartition(Partitioner):
    """Given lists of rows: a folder of text files, one row number per line, in order of file name."""

    folder: str = ""

    def natural_clients(self, graph: Loaded) -> int | None:
        return self._lists().natural_clients(graph)

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        return self._lists().assign(graph, clients, stream)

    def _lists(self) -> ListPartition:
        files = sorted(Path(self.folder).glob("*.txt")) if self.folder else []
        if not files:
            raise DataError("partition list needs a folder with one .txt file of row numbers per client: list:FOLDER")
        return ListPartition(tuple(read_rows(file) for file in files))


def parse_partition(text: str) -> Partitioner:
    """The partitioner a string such as ``random`` or ``dirichlet:alpha=0.5`` describes."""
    return parse_object("partition", text, PARTITIONS)


def number_of_clients(partitioner: Partitioner, graph: Loaded, asked: int | None, partition: str) -> int:
    """How many clients there will be: what the rule brings, else what was asked for, else 10."""
    natural = partitioner.natural_clients(graph)
    if natural is not None and asked is not None and asked != natural:
        raise ConfigError(f"partition {partition} has {natural} clients here, not {asked}: leave the number out")
    return natural or (FALLBACK_CLIENTS if asked is None else asked)


def client_ids(clients: int) -> tuple[str, ...]:
    """``client-0`` ... with as many digits as the last one needs, so that sorting by name is sorting by number."""
    width = len(str(clients - 1))
    return tuple(f"client-{index:0{width}d}" for index in range(clients))


def check_owners(owner: Tensor, clients: int, partition: str, what: str = "nodes") -> None:
    """Raise unless every client owns something."""
    sizes = torch.bincount(owner[owner >= 0], minlength=clients)
    if bool((sizes == 0).any()):
        names = [name for name, size in zip(client_ids(clients), sizes.tolist(), strict=True) if size == 0]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise DataError(
            f"partition {partition} leaves {shown} without {what}: use fewer clients, another seed or another partition"
        )


def equal_owners(items: int, clients: int, stream: Stream) -> Tensor:
    """Client index of every item (n,): a random permutation cut into K consecutive pieces at rounded boundaries."""
    owner = torch.empty(items, dtype=torch.int64)
    owner[torch.randperm(items, generator=stream.torch())] = torch.arange(items) * clients // items
    return owner


def dirichlet_owners(y: NDArray[np.int64], clients: int, alpha: float, stream: Stream) -> Tensor:
    """Client index of every item (n,): shares of a class over clients from Dirichlet(alpha)."""
    rng = stream.numpy()
    owner = np.empty(len(y), dtype=np.int64)
    for _ in range(100):
        for label in np.unique(y):
            rows = rng.permutation(np.flatnonzero(y == label))
            cuts = np.floor(np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(rows)).astype(np.int64)
            owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
        if len(np.unique(owner)) == clients:
            break
    return torch.from_numpy(owner)


def read_rows(path: Path) -> tuple[int, ...]:
    """Row numbers of a text file, one per line, written as whole numbers or as numpy's ``savetxt`` writes them."""
    try:
        values = np.array([float(line) for line in path.read_text(encoding="ascii").split()])
    except ValueError:
        raise DataError(f"{path.name} holds something else than row numbers: one per line is expected") from None
    if not np.array_equal(values, np.round(values)):
        raise DataError(f"{path.name} holds numbers that are not whole: row numbers are expected")
    return tuple(values.astype(np.int64).tolist())


def _undirected(graph: Loaded) -> sp.csr_matrix:
    """0/1 adjacency of the graph read as undirected, without self-loops."""
    matrix = adjacency(graph.data.edge_index, graph.data.num_nodes)
    matrix = sp.csr_matrix(matrix + matrix.T)
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    return matrix


def _check_rule(kind: str, rule: str, slack: int) -> None:
    if rule not in ("code", "prose"):
        raise unknown(f"{kind} rule", rule, ("code", "prose"))
    need(kind, "slack", slack >= 0, "at least 0")
