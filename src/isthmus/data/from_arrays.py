"""From arrays to a whole graph."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.data.whole_graph import empty_masks


def node_data(
    x: NDArray[np.floating], edge_index: NDArray[np.int64], y: NDArray[np.int64], num_classes: int
) -> NodeData:
    """A whole graph with empty masks; rows are the global ids."""
    return NodeData(
        x=torch.from_numpy(x.astype(np.float32, copy=False)),
        edge_index=torch.from_numpy(edge_index),
        y=torch.from_numpy(y.astype(np.int64)),
        **empty_masks(len(y)),
        node_id=torch.arange(len(y)),
        num_classes=num_classes,
    )


def undirected(edges: NDArray[np.integer], num_nodes: int) -> NDArray[np.int64]:
    """Both directions of every edge once, self-loops dropped, sorted by source and target."""
    return _sorted(
        np.concatenate([_codes(edges[0], edges[1], num_nodes), _codes(edges[1], edges[0], num_nodes)]), num_nodes
    )


def both_ways(arcs: Tensor, num_nodes: int) -> Tensor:
    """Every arc and its reverse once, self-loops kept, sorted by source and target; the given tensor where it is that
    already. Sorting one number per arc takes a fraction of the time and memory of sorting columns.
    """
    source, target = arcs.numpy()
    codes = _numbered(source, target, num_nodes)
    back = _numbered(target, source, num_nodes)
    back.sort()
    if bool((codes[1:] > codes[:-1]).all()) and np.array_equal(codes, back):
        return arcs
    codes = np.concatenate([codes, back])
    del back
    return torch.from_numpy(_sorted(codes, num_nodes))


def simple(arcs: NDArray[np.integer], num_nodes: int) -> NDArray[np.int64]:
    """Every arc once, self-loops dropped, sorted by source and target."""
    return _sorted(_codes(arcs[0], arcs[1], num_nodes), num_nodes)


def _codes(source: NDArray[np.integer], target: NDArray[np.integer], num_nodes: int) -> NDArray[np.int64]:
    """One number per arc that is no loop. Arcs by the hundred million are at their most here, so nothing is copied."""
    codes = _numbered(source, target, num_nodes)
    loops = np.flatnonzero(source == target)
    return np.delete(codes, loops) if len(loops) else codes


def _numbered(source: NDArray[np.integer], target: NDArray[np.integer], num_nodes: int) -> NDArray[np.int64]:
    codes = source.astype(np.int64)
    codes *= num_nodes
    codes += target
    return codes


def _sorted(codes: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    codes.sort()  # several times faster than np.unique on millions of arcs
    new = np.ones(len(codes), dtype=bool)
    np.not_equal(codes[1:], codes[:-1], out=new[1:])
    if not new.all():
        codes = codes[new]
    arcs = np.empty((2, len(codes)), dtype=np.int64)
    np.floor_divide(codes, num_nodes, out=arcs[0])
    np.remainder(codes, num_nodes, out=arcs[1])
    return arcs
