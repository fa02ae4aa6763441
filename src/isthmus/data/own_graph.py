"""An own graph, or own sets of graphs, as PyTorch Geometric has them: from Python or from a saved ``.pt`` file."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.data import given
from isthmus.data.cache_format import sparsify
from isthmus.data.graph_set import GraphSetData
from isthmus.data.node_data import NodeData
from isthmus.data.whole_graph import Loaded, PublicSplits, empty_masks
from isthmus.errors import DataError

log = logging.getLogger(__name__)

PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class OwnGraphs:
    """Sets of graphs by owner."""

    parts: Mapping[str, GraphSetData]
    source: str


def remember(dataset: object) -> str:
    """Check own data and keep them for this process; returns the name that stands for them in settings."""
    own = from_pyg(dataset)
    return given.keep(given.OWN, content_hash(own), own)


def content_hash(own: Loaded | OwnGraphs) -> str:
    """SHA-256 of all that a run can see of own data."""
    if isinstance(own, OwnGraphs):
        return given.digest(*(part for name, data in own.parts.items() for part in (name, *vars(data).values())))
    data, public = own.data, own.public
    masks = () if public is None else (public.train, public.val, public.test)
    columns = (part for name, values in sorted(own.columns.items()) for part in (name, np.asarray(values).tolist()))
    weights = () if own.edge_weight is None else (own.edge_weight,)
    parts = (data.x, data.edge_index, data.y, data.num_classes, *masks, own.owner, own.owner_names, *columns, *weights)
    return given.digest(*parts)


def read_pt(path: Path, *, labelled: bool = True) -> Loaded | OwnGraphs:
    """A saved ``Data``, or a dict of lists of ``Data``. Only tensors and PyG's own containers are loaded, no code.
    ``labelled`` as in `from_pyg`.
    """
    try:
        with _pyg_allowed():
            thing = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except pickle.UnpicklingError as error:
        what = str(error).splitlines()[0][:160]
        raise DataError(
            f"{path.name} holds more than tensors and is not opened ({what}): save a plain torch_geometric Data with "
            "x, edge_index and y"
        ) from None
    except Exception as error:
        raise DataError(
            f"{path.name} is no file that torch.save wrote ({type(error).__name__}): save it again"
        ) from None
    return from_pyg(thing, source=path.name, labelled=labelled)


@contextlib.contextmanager
def _pyg_allowed() -> Iterator[None]:
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import EdgeStorage, GlobalStorage, NodeStorage

    allowed = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage, NodeStorage, EdgeStorage]
    with torch.serialization.safe_globals(allowed):
        yield


def from_pyg(thing: object, source: str = "own data", *, labelled: bool = True) -> Loaded | OwnGraphs:
    """A ``Data`` with x, edge_index and y (optional: train/val/test_mask, owner), or ``{owner: [Data, ...]}``. With
    ``labelled=False`` nodes (or graphs) may all be without a label, and y may be missing.
    """
    if isinstance(thing, Mapping) and not hasattr(thing, "edge_index"):
        return _graphs(thing, source, labelled)
    x, edge_index = _features(thing, "the data"), _edges(thing, "the data")
    _note_edge_values(thing, "edge_attr")
    given = getattr(thing, "y", None)
    if not labelled and (given is None or not bool((given >= 0).any())):
        y = torch.full((x.shape[0],), -1)
    else:
        y = _labels(given, x.shape[0])
    data = NodeData(
        x=sparsify(x) if x.layout == torch.strided else x,
        edge_index=edge_index,
        y=y,
        **empty_masks(y.numel()),
        node_id=torch.arange(y.numel()),
        num_classes=max(int(y.max()) + 1, 2) if y.numel() else 2,
    )
    owner, names = _owner(getattr(thing, "owner", None), y.numel())
    return Loaded(
        data,
        source,
        _public(thing, y.numel()),
        owner,
        owner_names=names,
        columns=_columns(thing, y.numel()),
        edge_weight=_edge_weight(getattr(thing, "edge_weight", None), edge_index.shape[1]),
    )


def _features(thing: object, what: str) -> Tensor:
    x = getattr(thing, "x", None)
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] < 1:
        raise DataError(
            f"{what} must have x, a matrix of node features (n, F) with at least one column; where there is nothing to "
            "tell about nodes, take their degrees or a column of ones"
        )
    if x.layout not in (torch.strided, torch.sparse_csr):
        x = x.to_sparse_csr() if x.layout == torch.sparse_coo else x.to_dense()
    x = x.detach().to(torch.float32)
    values = x.values() if x.layout == torch.sparse_csr else x
    if wrong := int((~torch.isfinite(values)).sum()):
        raise DataError(
            f"{what}: {wrong} of {values.numel()} cells of x are not finite; fill them first, such as by their "
            "column's mean"
        )
    return x


def _edges(thing: object, what: str) -> Tensor:
    edges, nodes = getattr(thing, "edge_index", None), int(thing.x.shape[0])  # type: ignore[attr-defined]
    if not isinstance(edges, Tensor) or edges.dim() != 2 or edges.shape[0] != 2 or edges.is_floating_point():
        raise DataError(f"{what} must have edge_index, whole numbers of shape (2, E)")
    edges = edges.detach().to(torch.int64).contiguous()
    if edges.numel() and not (int(edges.min()) >= 0 and int(edges.max()) < nodes):
        raise DataError(f"{what}: edge_index names nodes outside 0 ... {nodes - 1}")
    return edges


def _edge_weight(weight: object, arcs: int) -> Tensor | None:
    """One number per arc (E,), or None where there is none."""
    if weight is None:
        return None
    if not isinstance(weight, Tensor) or weight.numel() != arcs:
        raise DataError(f"edge_weight must be a tensor with one number for each of the {arcs} arcs, or be left out")
    return weight.detach().flatten()


def _note_edge_values(thing: object, *known: str) -> None:
    """Say that values of edges are not used: models here read who is linked to whom."""
    names = [name for name in known if isinstance(getattr(thing, name, None), Tensor)]
    if names:
        log.warning(
            "%s changes nothing here: models read edges without values. Make features of nodes of it, such as the sum "
            "and mean over a node's edges, as [edges.features] in the schema.toml of tables does",
            " and ".join(names),
        )


def _labels(y: object, count: int) -> Tensor:
    if not isinstance(y, Tensor) or y.numel() != count:
        raise DataError(f"y must give every one of {count} nodes a class, -1 for one without a label")
    y = y.detach().flatten()
    whole = y.to(torch.int64)
    if y.is_floating_point() and not torch.equal(whole.to(y.dtype), y):
        raise DataError(
            "y must hold classes as whole numbers; put amounts into classes first, as regression is not trained"
        )
    if not bool((whole >= 0).any()):
        raise DataError("y has no label: at least the training nodes need one")
    if int(whole.min()) < -1:
        raise DataError("y has negative classes: -1 means no label, classes count from 0")
    return whole


def _public(thing: object, count: int) -> PublicSplits | None:
    found = {part: getattr(thing, f"{part}_mask", None) for part in PARTS}
    if all(mask is None for mask in found.values()):
        return None
    masks = {part: mask_of(mask, count, f"{part}_mask") for part, mask in found.items()}
    splits = max(mask.shape[1] for mask in masks.values())
    if any(mask.shape[1] not in (1, splits) for mask in masks.values()):
        raise DataError("train_mask, val_mask and test_mask have different numbers of splits")
    return PublicSplits(**{part: mask.expand(-1, splits).contiguous() for part, mask in masks.items()})


def _columns(thing: object, count: int) -> dict[str, object]:
    """Everything else that has one value per node."""
    known = {"x", "y", "edge_index", "edge_weight", "owner", *(f"{part}_mask" for part in PARTS)}
    names = [name for name in thing.keys() if name not in known] if hasattr(thing, "keys") else []  # noqa: SIM118
    values = {name: getattr(thing, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor | list | tuple | np.ndarray) and len(value) == count and np.ndim(value) == 1
    }


def mask_of(mask: object, count: int, what: str) -> Tensor:
    """A mask as booleans (n, S)."""
    tensor = torch.as_tensor(mask) if isinstance(mask, np.ndarray | list | tuple) else mask
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool or tensor.shape[:1] != (count,) or tensor.dim() > 2:
        raise DataError(f"{what} must be booleans, one per node ({count}), for all of train, val and test or none")
    return tensor if tensor.dim() == 2 else tensor[:, None]


def _owner(owner: object, count: int) -> tuple[Tensor | None, tuple[str, ...]]:
    """Index of each node's owner, and the owners' names where they have some."""
    if owner is None:
        return None, ()
    if isinstance(owner, Tensor):
        owner = owner.detach().cpu().numpy()
    values = np.asarray(owner)
    if values.shape != (count,) or values.dtype.kind not in "iuUSO":
        raise DataError(f"owner must give every one of {count} nodes a whole number or a name")
    if values.dtype.kind in "iu":
        if int(values.min()) < -1:
            raise DataError("owner has numbers below -1: -1 leaves a node out, owners count from 0")
        different = np.unique(values[values >= 0])
        if len(different) and not np.array_equal(different, np.arange(len(different))):
            raise DataError("owner must count from 0 without gaps: every number up to the largest owns a node")
        return torch.from_numpy(values.astype(np.int64)), ()
    names, index = np.unique(values.astype(str), return_inverse=True)
    return torch.from_numpy(index.astype(np.int64)), tuple(names.tolist())


def owners_of(owner: object, count: int | None = None) -> tuple[Tensor, tuple[str, ...]]:
    """The same for owners given as a partition."""
    size = count if count is not None else len(owner)  # type: ignore[arg-type]
    index, names = _owner(owner, size)
    assert index is not None
    return index, names


def _graphs(thing: Mapping[Any, Any], source: str, labelled: bool) -> OwnGraphs:
    if not thing:
        raise DataError("sets of graphs are {owner: [Data, ...]}: the dict is empty")
    parts = {}
    for owner in sorted(thing, key=str):
        graphs = thing[owner]
        if not isinstance(owner, str) or not isinstance(graphs, Sequence) or not graphs:
            raise DataError("sets of graphs are {owner: [Data, ...]} with names of owners and at least one graph each")
        parts[owner] = _graph_set(owner, graphs, labelled)
    _note_edge_values(graphs[0], "edge_weight", "edge_attr")
    return OwnGraphs(parts, source)


def _graph_set(owner: str, graphs: Sequence[Any], labelled: bool) -> GraphSetData:
    xs = [_features(graph, f"graph {number} of {owner}").to_dense() for number, graph in enumerate(graphs)]
    if len({x.shape[1] for x in xs}) > 1:
        raise DataError(f"the graphs of {owner} have different numbers of features")
    edges = [_edges(graph, f"graph {number} of {owner}") for number, graph in enumerate(graphs)]
    labels = [label.flatten() for graph in graphs if isinstance(label := getattr(graph, "y", None), Tensor)]
    if not labels and not labelled:
        labels = [torch.full((1,), -1)] * len(graphs)
    if len(labels) < len(graphs) or any(label.numel() != 1 for label in labels):
        raise DataError(f"every graph of {owner} needs y with one class")
    y = _labels(torch.cat(labels), len(graphs)) if labelled else torch.cat(labels).to(torch.int64)
    if labelled and int(y.min()) < 0:
        raise DataError(f"every graph of {owner} needs a class")
    ptr = torch.tensor([0, *(x.shape[0] for x in xs)]).cumsum(0)
    edge_ptr = torch.tensor([0, *(each.shape[1] for each in edges)]).cumsum(0)
    return GraphSetData(
        x=torch.cat(xs),
        edge_index=torch.cat([each + int(shift) for each, shift in zip(edges, ptr, strict=False)], dim=1),
        ptr=ptr,
        edge_ptr=edge_ptr,
        y=y,
        **empty_masks(len(graphs)),
        graph_id=torch.arange(len(graphs)),
        num_classes=max(int(y.max()) + 1, 2),
    )
