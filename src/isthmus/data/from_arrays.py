"""From arrays to a whole graph."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.data.node_data import NodeData
from isthmus.data.whole_graph import empty_masks


def node_data(
    x: NDArray[np.float64], edge_index: NDArray[np.int64], y: NDArray[np.int64], num_classes: int
) -> NodeData:
    """A whole graph with empty masks; rows are the global ids."""
    return NodeData(
        x=torch.from_numpy(x.astype(np.float32)),
        edge_index=torch.from_numpy(edge_index),
        y=torch.from_numpy(y.astype(np.int64)),
        **empty_masks(len(y)),
        node_id=torch.arange(len(y)),
        num_classes=num_classes,
    )


def undirected(edges: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """Both directions of every edge once, self-loops dropped, sorted by source and target."""
    return simple(np.concatenate([edges, edges[::-1]], axis=1), num_nodes)


def simple(arcs: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """Every arc once, self-loops dropped, sorted by source and target."""
    codes = (arcs[0] * num_nodes + arcs[1])[arcs[0] != arcs[1]]
    codes.sort()  # several times faster than np.unique on millions of arcs
    codes = codes[np.concatenate([np.ones(min(len(codes), 1), dtype=bool), codes[1:] != codes[:-1]])]
    return np.stack([codes // num_nodes, codes % num_nodes])
