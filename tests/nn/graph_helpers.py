"""Small random sets of graphs for the tests of packed batches and graph models."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch

from isthmus.data.graph_set import GraphSetData
from isthmus.graph.normalise import to_torch_csr

SIZES = (5, 1, 7, 4, 12, 0, 3, 1, 9)
"""Nodes per graph: single nodes and a graph without nodes among them."""


def graph_set(
    seed: int = 0,
    *,
    sizes: tuple[int, ...] = SIZES,
    num_features: int = 6,
    num_classes: int = 3,
    undirected: bool = True,
    one_hot: bool = False,
    without_edges: tuple[int, ...] = (3,),
) -> GraphSetData:
    """Random graphs; those in ``without_edges`` and single nodes have no edges."""
    rng = np.random.default_rng(seed)
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    edges, counts = [], []
    for g, size in enumerate(sizes):
        adjacency = rng.random((size, size)) < 0.4
        np.fill_diagonal(adjacency, False)
        adjacency = np.triu(adjacency) | np.triu(adjacency).T if undirected else adjacency
        adjacency &= g not in without_edges
        edges.append(np.stack(np.nonzero(adjacency)) + ptr[g])
        counts.append(edges[-1].shape[1])
    nodes, graphs = int(ptr[-1]), len(sizes)
    if one_hot:
        column = rng.integers(0, num_features, nodes)
        x = to_torch_csr(
            sp.csr_matrix((np.ones(nodes, np.float32), column, np.arange(nodes + 1)), shape=(nodes, num_features))
        )
    else:
        x = torch.from_numpy(rng.normal(size=(nodes, num_features)).astype(np.float32))
    part = torch.from_numpy(rng.permutation(graphs))
    return GraphSetData(
        x=x,
        edge_index=torch.from_numpy(np.concatenate(edges, axis=1)),
        ptr=torch.from_numpy(ptr),
        edge_ptr=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        y=torch.from_numpy(rng.integers(0, num_classes, graphs)),
        train=part < graphs - 3,
        val=part == graphs - 3,
        test=part > graphs - 3,
        graph_id=torch.arange(graphs),
        num_classes=num_classes,
    )
