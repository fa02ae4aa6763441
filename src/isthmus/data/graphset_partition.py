"""Which client owns which graph: partitions of data sets of graphs.

A partitioner is a small frozen object made from a string such as ``dirichlet:alpha=0.5``. A new one needs nothing but
its class, here or in a file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from isthmus.data.graph_set import GraphSetData
from isthmus.data.parameters import need, parse_object
from isthmus.data.partition import dirichlet_owners, equal_owners
from isthmus.registry import Registry
from isthmus.seeds import Stream


class GraphPartitioner(Protocol):
    """A rule that deals the graphs of each data set out to clients."""

    even: ClassVar[bool] = False
    """Whether clients get about equally many graphs, whatever the seed."""

    def assign(self, data: GraphSetData, clients: int, stream: Stream) -> Tensor:
        """Client index of every graph of one data set (G,), int64."""
        ...

    def clients_per_set(self) -> int | None:
        """How many clients share a data set, or None where the caller says."""
        return None


GRAPH_PARTITIONS: Registry[type[GraphPartitioner]] = Registry("partition of graphs", "isthmus.data")
"""Partitions of graphs by name. To add one, decorate a frozen dataclass whose fields have defaults; the first line of
its docstring is what ``isthmus partitions`` shows.
"""


@GRAPH_PARTITIONS.register("by-dataset")
@dataclass(frozen=True)
class ByDataset(GraphPartitioner):
    """One client per data set."""

    def assign(self, data: GraphSetData, clients: int, stream: Stream) -> Tensor:
        return torch.zeros(data.num_graphs, dtype=torch.int64)

    def clients_per_set(self) -> int | None:
        return 1


@GRAPH_PARTITIONS.register("random")
@dataclass(frozen=True)
class RandomGraphs(GraphPartitioner):
    """Every graph draws a client."""

    def assign(self, data: GraphSetData, clients: int, stream: Stream) -> Tensor:
        return torch.randint(0, clients, (data.num_graphs,), generator=stream.torch())


@GRAPH_PARTITIONS.register("random-equal")
@dataclass(frozen=True)
class EqualGraphs(GraphPartitioner):
    """One permutation cut into pieces that differ by at most one graph."""

    even: ClassVar[bool] = True

    def assign(self, data: GraphSetData, clients: int, stream: Stream) -> Tensor:
        return equal_owners(data.num_graphs, clients, stream)


@GRAPH_PARTITIONS.register("dirichlet")
@dataclass(frozen=True)
class DirichletGraphs(GraphPartitioner):
    """Label skew: shares of a class over clients from Dirichlet(alpha)."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        need("dirichlet", "alpha", self.alpha > 0, "above 0")

    def assign(self, data: GraphSetData, clients: int, stream: Stream) -> Tensor:
        return dirichlet_owners(data.y.numpy(), clients, self.alpha, stream)


@GRAPH_PARTITIONS.register("shards")
@dataclass(frozen=True)
class ShardedGraphs(GraphPartitioner):
    """Every data set cut into ``count`` shards of about equal size, each a client (FedStar spec, section 9.17).

    Args:
        count: Shards per data set; 0 means the number of clients asked for.
        legacy: 1 = as the published code: consecutive blocks of at most 50 graphs in file order (single-class where the
            file is sorted), the rest scattered. 0 = shuffled first.
    """

    even: ClassVar[bool] = True
    count: int = 0
    legacy: int = 0

    def __post_init__(self) -> None:
        need("shards", "count", self.count >= 0, "at least 1 (or 0 for the number of clients asked for)")

    def assign(self, data: GraphSetData, clients: int, stream: Stream) -> Tensor:
        graphs = data.num_graphs
        if not self.legacy:
            return equal_owners(graphs, clients, stream)
        size = min(50, graphs // clients)
        scattered = torch.randint(0, clients, (graphs,), generator=stream.torch())
        block = torch.arange(graphs) // max(size, 1)
        return torch.where((block < clients) & (size > 0), block, scattered)

    def clients_per_set(self) -> int | None:
        return self.count or None


def parse_graph_partition(text: str) -> GraphPartitioner:
    """The partitioner a string such as ``random`` or ``dirichlet:alpha=0.5`` describes."""
    return parse_object("partition of graphs", text, GRAPH_PARTITIONS)
