"""What a partition did to a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.graph.homophily import ARCS, edge_homophily


@dataclass(frozen=True)
class ClientStatistics:
    """Sizes of one client; ``edges`` are its own arcs (``homophily`` is theirs, None without any), ``cross_edges``
    those that leave it.
    """

    client: str
    nodes: int
    train: int
    val: int
    test: int
    edges: int
    cross_edges: int
    classes: tuple[int, ...]
    homophily: float | None


@dataclass(frozen=True)
class Statistics:
    """Sizes and skew of a scenario.

    Args:
        nodes, edges, features, classes: Of the union graph; edges are arcs.
        cross_edge_share: Share of arcs whose ends have different owners, None without arcs.
        cross_edges: K x K counts: entry (i, j) is the number of arcs from client i to client j (the diagonal: own
            arcs).
        label_skew: Mean over clients of the total variation distance between the client's labels and all labels; 0 =
            alike.
        homophily: Edge homophily of the union graph.
        clients: Per client, in order of id.
    """

    nodes: int
    edges: int
    features: int
    classes: int
    cross_edge_share: float | None
    cross_edges: tuple[tuple[int, ...], ...]
    label_skew: float
    homophily: float | None
    clients: tuple[ClientStatistics, ...]

    def to_json(self) -> dict[str, Any]:
        """A plain dict of numbers, strings, lists and None."""
        own = {key: value for key, value in vars(self).items() if key not in ("cross_edges", "clients")}
        clients = [{**vars(client), "classes": list(client.classes)} for client in self.clients]
        return {**own, "cross_edges": [list(row) for row in self.cross_edges], "clients": clients}


def describe(whole: NodeData, owner: Tensor, parts: dict[str, NodeData]) -> Statistics:
    """Statistics of a graph cut into parts."""
    count = len(parts)
    matrix = torch.zeros(count * count, dtype=torch.int64)
    for arcs in torch.split(whole.edge_index, ARCS, dim=1):
        source, target = owner[arcs]
        matrix += torch.bincount(source * count + target, minlength=count * count)
    matrix = matrix.reshape(count, count)
    total = int(matrix.sum())
    labels = torch.stack([_histogram(part) for part in parts.values()])
    everywhere = _shares(labels.sum(dim=0, keepdim=True))
    skew = 0.5 * (_shares(labels) - everywhere).abs().sum(dim=1).mean()
    return Statistics(
        nodes=whole.num_nodes,
        edges=whole.edge_index.shape[1],
        features=whole.num_features,
        classes=whole.num_classes,
        cross_edge_share=(total - int(matrix.trace())) / total if total else None,
        cross_edges=tuple(tuple(row) for row in matrix.tolist()),
        label_skew=float(skew),
        homophily=edge_homophily(whole.edge_index, whole.y),
        clients=tuple(
            _client(client, part, row, cross)
            for (client, part), row, cross in zip(
                parts.items(), labels.tolist(), (matrix.sum(dim=1) - matrix.diagonal()).tolist(), strict=True
            )
        ),
    )


def _client(client: str, part: NodeData, classes: list[int], cross_edges: int) -> ClientStatistics:
    return ClientStatistics(
        client=client,
        nodes=part.num_nodes,
        train=part.num_train,
        val=int(part.val.sum()),
        test=int(part.test.sum()),
        edges=part.edge_index.shape[1],
        cross_edges=cross_edges,
        classes=tuple(classes),
        homophily=edge_homophily(part.edge_index, part.y),
    )


def _histogram(part: NodeData) -> Tensor:
    return torch.bincount(part.y[part.y >= 0], minlength=part.num_classes)


def _shares(counts: Tensor) -> Tensor:
    return counts.double() / counts.sum(dim=1, keepdim=True).clamp(min=1)
