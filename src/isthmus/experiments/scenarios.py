"""From settings to the data of each party: node tasks and graph tasks, pooled or divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isthmus.data.datasets import with_defaults
from isthmus.data.edge_weights import EdgeWeights
from isthmus.data.feature_scaling import Scale
from isthmus.data.graph_set import GraphSetData
from isthmus.data.graphscenario import GraphScenario, build_graph_scenario, task_of
from isthmus.data.graphset_partition import GRAPH_PARTITIONS
from isthmus.data.graphset_split import GRAPH_SPLITS
from isthmus.data.node_data import NodeData
from isthmus.data.own_dataset import contents_of, kind_of
from isthmus.data.partition import PARTITIONS, parse_partition
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.data.split import SPLITS
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config import Settings
from isthmus.federation.interface import View
from isthmus.metrics.gain import subgraph_leakage
from isthmus.preparation import link_of

DEFAULTS: Mapping[str, tuple[str | None, str]] = {"node": ("random", "10/10/80"), "graph": (None, "fedstar")}
"""Task -> partition (None: by data set) and split of a scenario that does not say which."""
AnyScenario = Scenario | GraphScenario
AnyData = NodeData | GraphSetData


def scenario_of(settings: Settings) -> AnyScenario:
    """Load, partition and split as the settings say."""
    run = settings.run
    if run.data_hash is not None and contents_of(run.dataset) != run.data_hash:
        raise DataError(f"{run.dataset} holds other data than this run began with: undo the change, or start a new run")
    return build(
        dataset=run.dataset,
        partition=run.partition,
        clients=run.clients,
        split=run.split,
        seed=run.seed,
        undirected=run.undirected,
        scale=run.scale,
        edge_weights=run.edge_weights,
        secure_sum=run.secure_sum,
        link=run.link,
        cross_edges=settings.method.cross_edges,
    )


def build(
    *,
    dataset: str,
    partition: str | None,
    clients: int | None,
    split: str | None,
    seed: int,
    undirected: bool = False,
    scale: Scale = "none",
    edge_weights: EdgeWeights = "ignore",
    secure_sum: bool = False,
    link: str = "auto",
    cross_edges: bool = True,
) -> AnyScenario:
    """A scenario of either kind of task; None means the task's default."""
    kind = kind_of(dataset)
    if kind == "site tables":
        raise ConfigError("dataset tables means what each organisation has: give a folder of their folders instead")
    if kind == "tables":
        from isthmus.experiments.tables import tables_scenario

        if undirected:
            raise ConfigError("whether edges have a direction stands in schema.toml: leave undirected out")
        if scale != "none":
            raise ConfigError("the scale of each column stands in schema.toml: leave scale out")
        return tables_scenario(
            dataset,
            partition=partition,
            clients=clients,
            split=split,
            seed=seed,
            secure=secure_sum,
            link=link_of(link, organisations=False),
            edge_weights=edge_weights,
        )
    task = task_of(dataset)
    asked = with_defaults(dataset, {"partition": partition, "clients": clients, "split": split})
    partition, clients, split = asked["partition"], asked["clients"], asked["split"]
    _check_task(task, partition, split)
    if task == "graph":
        if undirected:
            raise ConfigError("undirected=true is for one graph; sets of graphs are undirected already")
        if scale != "none":
            raise ConfigError("scale is for one graph; features of sets of graphs are used as they are: leave it out")
        if edge_weights != "ignore":
            raise ConfigError(
                "edge_weights=use is for one graph; edges of sets of graphs have no weights: leave it out"
            )
        split = DEFAULTS[task][1] if split is None else split
        return build_graph_scenario(dataset=dataset, partition=partition, clients=clients, split=split, seed=seed)
    if dataset.lower() == "banks" and partition in (None, "owner"):
        # A network of banks comes with its owners: as many banks as clients are asked for, each bank a client.
        dataset, partition = f"banks:banks={8 if clients is None else clients}", "owner"
    partition = str(DEFAULTS[task][0] if partition is None else partition)
    return build_scenario(
        dataset=dataset,
        partition=partition,
        clients=clients,
        split=(parse_partition(partition).natural_split() or DEFAULTS[task][1]) if split is None else split,
        seed=seed,
        undirected=undirected,
        scale=scale,
        edge_weights=edge_weights,
        cross_edges=cross_edges,
    )


def _check_task(task: str, partition: str | None, split: str | None) -> None:
    """Say so where a partition or split exists, but for the other kind of data."""
    here = 0 if task == "node" else 1
    for what, text, both in (
        ("partition", partition, (PARTITIONS, GRAPH_PARTITIONS)),
        ("split", split, (SPLITS, GRAPH_SPLITS)),
    ):
        mine, theirs = ({name.partition(":")[0] for name in both[place]} for place in (here, 1 - here))
        kind = (text or "").partition(":")[0].strip().lower()
        if kind not in mine and kind in theirs:
            whose = "sets of graphs" if task == "node" else "the nodes of one graph"
            raise ConfigError(
                f"{what} {text} is for {whose}, which this data set is not: use one of {', '.join(sorted(mine))}"
            )


def parts_for(settings: Settings, scenario: AnyScenario) -> dict[str, Any]:
    """The data each client receives: all of it in one place for a pooled method, without cross edges for a method that
    must not know them.
    """
    settings.method.check_task("graph" if isinstance(scenario, GraphScenario) else "node")
    if isinstance(scenario, GraphScenario):
        return {"central": pool_graphs(scenario.parts)} if settings.method.pooled else dict(scenario.parts)
    if settings.method.pooled:
        return {"central": scenario.whole}
    if settings.method.cross_edges:
        return dict(scenario.parts)
    return {client: data.without_cross() for client, data in scenario.parts.items()}


def view_of(parts: Mapping[str, AnyData]) -> View:
    """What the server may know: names, shapes, and whether they are the same everywhere."""
    first, *others = parts.values()
    alike = all((data.num_features, data.num_classes) == (first.num_features, first.num_classes) for data in others)
    task: Any = "graph" if isinstance(first, GraphSetData) else "node"
    return View(
        tuple(sorted(parts)),
        first.num_features if alike else 1,
        first.num_classes if alike else 2,
        task=task,
        alike=alike,
    )


def samples_of(parts: Mapping[str, AnyData]) -> dict[str, int]:
    """Number of nodes, or of graphs, of each client: weights of weighted scores."""
    return {
        client: data.num_graphs if isinstance(data, GraphSetData) else data.num_nodes for client, data in parts.items()
    }


def pool_graphs(parts: Mapping[str, GraphSetData]) -> GraphSetData:
    """All graphs in one place, which is possible where they have the same features and classes."""
    items = list(parts.values())
    if len({(data.num_features, data.num_classes) for data in items}) > 1:
        raise ConfigError(
            "these clients hold different data sets, which cannot be pooled; run central on one, e.g. --dataset mutag"
        )
    nodes, edges = _offsets([data.num_nodes for data in items]), _offsets([data.edge_index.shape[1] for data in items])
    zero = torch.zeros(1, dtype=torch.int64)
    return GraphSetData(
        x=torch.cat([data.x.to_dense() if data.x.layout != torch.strided else data.x for data in items]),
        edge_index=torch.cat([data.edge_index + shift for data, shift in zip(items, nodes, strict=True)], dim=1),
        ptr=torch.cat([zero, *(data.ptr[1:] + shift for data, shift in zip(items, nodes, strict=True))]),
        edge_ptr=torch.cat([zero, *(data.edge_ptr[1:] + shift for data, shift in zip(items, edges, strict=True))]),
        y=torch.cat([data.y for data in items]),
        train=torch.cat([data.train for data in items]),
        val=torch.cat([data.val for data in items]),
        test=torch.cat([data.test for data in items]),
        graph_id=torch.cat([data.graph_id for data in items]),
        num_classes=items[0].num_classes,
    )


def _offsets(sizes: list[int]) -> Tensor:
    """Offset of each part."""
    return torch.tensor([0, *sizes[:-1]]).cumsum(0)


def report_statistics(scenario: AnyScenario) -> dict[str, Any]:
    """``scenario.json``: statistics of the partition, for the report."""
    if isinstance(scenario, GraphScenario):
        return {
            "task": "graph",
            "clients": [
                {"client": client, "title": scenario.titles[client], **facts}
                for client, facts in scenario.statistics.items()
            ],
            "sizes": {client: facts["graphs"] for client, facts in scenario.statistics.items()},
            "labels": {client: facts["classes"] for client, facts in scenario.statistics.items()},
            "titles": dict(scenario.titles),
        }
    facts = scenario.statistics
    return {
        "task": "node",
        **facts.to_json(),
        "sizes": {client.client: client.nodes for client in facts.clients},
        "cross_edges": [list(row) for row in facts.cross_edges],
        "cross_share": facts.cross_edge_share,
        "labels": {client.client: list(client.classes) for client in facts.clients},
        "homophily": {client.client: client.homophily for client in facts.clients},
        "edges_inside": {client.client: client.edges for client in facts.clients},
        "leakage": subgraph_leakage(scenario.whole.edge_index, owner_of(scenario)),
    }


def owner_of(scenario: Scenario) -> Tensor:
    """Number of the client that owns each node of the whole graph."""
    order = torch.argsort(scenario.whole.node_id)
    owner = torch.empty(scenario.whole.num_nodes, dtype=torch.int64)
    for number, data in enumerate(scenario.parts.values()):
        owner[order[torch.searchsorted(scenario.whole.node_id[order], data.node_id)]] = number
    return owner
