"""From an owner's tables, and what was agreed with the others, to the data a method is given."""

from __future__ import annotations

import secrets

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.edge_weights import EdgeWeights, checked
from isthmus.data.graph_set import GraphSetData
from isthmus.data.node_data import CrossEdges, NodeData
from isthmus.data.tables.model import TablesModel
from isthmus.data.tables.owner import OwnerTables
from isthmus.data.tables.scaling import Scaling, encode
from isthmus.errors import ConfigError, DataError
from isthmus.preparation.linking import KEY_BYTES, node_ids
from isthmus.preparation.owner import Preparation


def prepared(tables: OwnerTables, agreed: Preparation, edge_weights: EdgeWeights = "ignore") -> NodeData | GraphSetData:
    """Scaled features, own edges, labels and split; for one graph also the edges to other owners both ends list. With
    ``edge_weights=use`` edges have the weights this owner lists.
    """
    scaling = Scaling(**{name: tensor.numpy() for name, tensor in agreed.scaling.items()})
    x = torch.from_numpy(encode(tables.schema, tables.features, scaling))
    if edge_weights == "use":
        _check_weighted(tables)
    return _node_data(tables, agreed, x, edge_weights == "use") if tables.graph is None else _graph_set(tables, x)


def tables_model(tables: OwnerTables, agreed: Preparation) -> TablesModel:
    """What a model trained on these tables takes along."""
    return TablesModel(tables.schema, agreed.scaling, agreed.key)


def _check_weighted(tables: OwnerTables) -> None:
    schema = tables.schema
    if schema.task == "graph":
        raise ConfigError("edge_weights=use is for one graph; edges of sets of graphs have no weights: leave it out")
    if schema.edges is None or schema.edges.weight is None:
        raise ConfigError(
            'schema.toml names no weight of edges: add weight = "COLUMN" to [edges] of it, or set edge_weights=ignore'
        )


def _node_data(tables: OwnerTables, agreed: Preparation, x: Tensor, weighted: bool) -> NodeData:
    edges = tables.edges
    ids = torch.from_numpy(node_ids(tables.ids.to_list(), agreed.key or secrets.token_bytes(KEY_BYTES)))
    weight = checked(torch.tensor(edges.weight)) if weighted else torch.ones(len(edges.source))
    far_weight = checked(torch.tensor(edges.far_weight)) if weighted else torch.ones(len(edges.own))
    inside = torch.nonzero(weight > 0).flatten()  # an edge of weight 0 is none
    kept = torch.nonzero((agreed.partner >= 0) & (far_weight > 0)).flatten()
    far = torch.from_numpy(node_ids_of(edges.far.gather(kept.numpy()).to_list() if len(kept) else [], agreed.key))
    return NodeData(
        x=x,
        edge_index=torch.from_numpy(np.stack([edges.source, edges.target]))[:, inside],
        y=torch.from_numpy(tables.y),
        **_masks(tables),
        node_id=ids,
        num_classes=len(tables.schema.labels.classes),
        cross=CrossEdges(
            own=torch.from_numpy(edges.own)[kept],
            owner=agreed.partner[kept],
            other=far,
            outgoing=torch.from_numpy(edges.outgoing)[kept],
            weight=far_weight[kept],
            owners=agreed.partners,
        ),
        edge_weight=weight[inside] if weighted else None,
    )


def node_ids_of(texts: list[str], key: bytes) -> NDArray[np.int64]:
    """Keyed ids of texts that may repeat."""
    different = list(dict.fromkeys(texts))
    number = dict(zip(different, node_ids(different, key).tolist(), strict=True))
    return np.array([number[text] for text in texts], dtype=np.int64)


def _graph_set(tables: OwnerTables, x: Tensor) -> GraphSetData:
    assert tables.graph is not None
    count = len(tables.y)
    sizes = np.bincount(tables.graph, minlength=count)
    if (sizes == 0).any():
        raise DataError(f"{tables.owner}: {int((sizes == 0).sum())} graphs have no node: take them out")
    order = np.argsort(tables.graph, kind="stable")
    row = np.empty_like(order)
    row[order] = np.arange(len(order))
    source, target = row[tables.edges.source], row[tables.edges.target]
    arcs = np.lexsort((target, source, tables.graph[tables.edges.source]))
    edge_index = torch.from_numpy(np.stack([source[arcs], target[arcs]]))
    per_graph = np.bincount(tables.graph[tables.edges.source], minlength=count)
    return GraphSetData(
        x=x[torch.from_numpy(order)],
        edge_index=edge_index,
        ptr=_begin(sizes),
        edge_ptr=_begin(per_graph),
        y=torch.from_numpy(tables.y),
        **_masks(tables),
        graph_id=torch.arange(count),
        num_classes=len(tables.schema.labels.classes),
    )


def _masks(tables: OwnerTables) -> dict[str, Tensor]:
    part = torch.from_numpy(tables.part)
    return {"train": part == 0, "val": part == 1, "test": part == 2}


def _begin(sizes: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
