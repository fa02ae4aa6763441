"""A scenario: data set + partition + split + seed, before anything is trained.

Every draw has its own stream, so all methods see the same nodes at the same owners with the same labels, whatever they
do later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isthmus.data.datasets import canonical_name, load_nodes
from isthmus.data.edge_weights import EdgeWeights, weighted_arcs
from isthmus.data.feature_scaling import UNSCALED, Scale, Scaling, scaling_of
from isthmus.data.node_data import NodeData
from isthmus.data.partition import Partitioner, check_owners, client_ids, number_of_clients, parse_partition
from isthmus.data.split import Split, check_classes, check_masks, parse_split
from isthmus.data.split_graph import split_graph
from isthmus.data.statistics import Statistics, describe
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError, DataError
from isthmus.seeds import Stream


@dataclass(frozen=True)
class Scenario:
    """Data set, partition, split and seed, worked out.

    Args:
        dataset, partition, clients, split, seed: What was asked for; the data set under its registry name.
        source: Where the data came from, in words fit for a result.
        parts: Client id -> its data, with cross edges. Sorted by id.
        whole: The union graph with all edges and the same split; its rows are the global node ids.
        statistics: Sizes and skew.
        original_id: Row in the data set of every global id; differs from 0 ... n-1 only where the partition leaves
            nodes out.
        scaling: What ``scale`` came to; features of ``parts`` and ``whole`` are scaled already.
    """

    dataset: str
    partition: str
    clients: int
    split: str
    seed: int
    source: str
    parts: Mapping[str, NodeData]
    whole: NodeData
    statistics: Statistics
    original_id: Tensor
    scaling: Scaling = UNSCALED


def build_scenario(
    *,
    dataset: str,
    partition: str = "random",
    clients: int | None = None,
    split: str = "10/10/80",
    seed: int = 0,
    undirected: bool = False,
    scale: Scale = "none",
    edge_weights: EdgeWeights = "ignore",
    cross_edges: bool = True,
) -> Scenario:
    """Load, partition and split a named data set.

    Args:
        dataset: See `isthmus.data.datasets` and `isthmus.data.generators`.
        partition: See `isthmus.data.partition`.
        clients: Number of clients; by default what the partition brings itself (lists, owners), else 10.
        split: See `isthmus.data.split`.
        seed: Of all draws of the scenario.
        undirected: Store every arc in both directions; arcs are otherwise used as the data set has them.
        scale: See `isthmus.data.feature_scaling`.
        edge_weights: Whether models use weights of edges; see `isthmus.data.edge_weights`.
        cross_edges: False leaves edges between clients out of ``parts``, for methods that must not know them: where
            nodes are divided at random they are most of the graph, and each is held twice.

    Example:
        >>> build_scenario(dataset="csbm:nodes=100", clients=3).whole.num_nodes
        100
    """
    partitioner, splitter = (
        parse_partition(partition),
        parse_split(split),
    )  # complain about names before loading anything
    graph = load_nodes(dataset, Stream(seed, ("data",)))
    scaling = scaling_of(graph.data.x, scale)
    data = as_used(graph, scaling, undirected=undirected, edge_weights=edge_weights)
    graph = replace(graph, data=data, edge_weight=None)
    scenario = scenario_of(
        graph,
        partitioner,
        splitter,
        dataset=canonical_name(dataset),
        partition=partition,
        clients=clients,
        split=split,
        seed=seed,
        cross_edges=cross_edges,
    )
    check_classes(scenario.whole, split)
    return replace(scenario, scaling=scaling)


def as_used(graph: Loaded, scaling: Scaling, *, undirected: bool, edge_weights: EdgeWeights = "ignore") -> NodeData:
    """A graph as models see it: features on their scale, with ``undirected`` every arc in both directions, and with
    ``edge_weights=use`` weights of arcs.
    """
    arcs, weight = weighted_arcs(graph, edge_weights, undirected=undirected)
    return replace(graph.data, x=scaling.apply(graph.data.x), edge_index=arcs, edge_weight=weight)


def scenario_of(
    graph: Loaded,
    partitioner: Partitioner,
    splitter: Split,
    *,
    dataset: str,
    partition: str,
    clients: int | None,
    split: str,
    seed: int,
    cross_edges: bool = True,
) -> Scenario:
    """The same for a graph, a partitioner and a split given as objects; the names are for results."""
    clients = number_of_clients(partitioner, graph, clients, partition)
    if clients < 1:
        raise ConfigError(f"a scenario needs at least 1 client, got {clients}")
    if clients > graph.data.num_nodes:
        raise DataError(
            f"{clients} clients cannot share {graph.data.num_nodes} nodes: use at most as many clients as nodes"
        )
    owner, names = partitioner.assign(graph, clients, Stream(seed, ("partition",))), partitioner.names(graph)
    check_owners(owner, clients, partition)
    kept = torch.nonzero(owner >= 0).flatten()
    if kept.numel() < owner.numel():
        graph, owner = graph.restricted(kept), owner[kept]
    masks = splitter.draw(graph, owner, Stream(seed, ("split",)))
    check_masks(masks, split)
    whole = replace(graph.data, train=masks.train, val=masks.val, test=masks.test)
    parts = split_graph(whole, owner, names or client_ids(clients), cross_edges=cross_edges)
    return Scenario(
        dataset=dataset,
        partition=partition,
        clients=clients,
        split=split,
        seed=seed,
        source=graph.source,
        parts=parts,
        whole=whole,
        statistics=describe(whole, owner, parts),
        original_id=kept,
    )
