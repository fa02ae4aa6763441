"""What a plain model reaches on validation, depending on which rows and edges it may use.

The plain model is a logistic regression on a node's features and their means over one and two steps of neighbours. Who
may use which rows and edges differs, which tells what training together and edges between owners are worth:

    alone     features only, all owners' rows together
    local     edges inside an owner, each owner by itself
    together  edges inside an owner, all owners' rows together
    across    all edges, all owners' rows together
    smoothed  as across, but a node's own features only mixed with its neighbours', as a GCN of two layers has them
    links     no features at all: who is connected to whom (rows of the adjacency), all edges and rows

Only training rows are fitted and only validation rows are scored. All data must be in one place, as in a simulation.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.graph.normalise import adjacency, from_torch_csr, gcn_norm, mean_norm
from isthmus.seeds import Stream

MOST_ROWS = 4000
"""Training rows a plain model is fitted on at most."""


@dataclass(frozen=True)
class Reach:
    """Validation scores of the plain model (see the module)."""

    alone: float
    local: float
    together: float
    across: float
    smoothed: float
    links: float


def reach_of(whole: NodeData, owner: Tensor, metric: str, stream: Stream) -> Reach:
    """What plain models reach on a graph whose nodes have these owners (n,).

    Args:
        metric: ``accuracy``; of any other, two classes are scored by average precision of the second.
    """
    source, target = whole.edge_index
    inside = whole.edge_index[:, owner[source] == owner[target]]
    own = _features(whole.x)
    near, far = _with_neighbours(own, inside, whole.num_nodes), _with_neighbours(own, whole.edge_index, whole.num_nodes)
    mixed = gcn_norm(torch.cat([whole.edge_index, whole.edge_index.flip(0)], dim=1), whole.num_nodes)
    everybody = torch.zeros_like(owner)
    return Reach(
        alone=_score(own, whole, everybody, metric, stream),
        local=_score(near, whole, owner, metric, stream),
        together=_score(near, whole, everybody, metric, stream),
        across=_score(far, whole, everybody, metric, stream),
        smoothed=_score(sp.csr_matrix(mixed @ (mixed @ own)), whole, everybody, metric, stream),
        links=_score(_rows(whole), whole, everybody, metric, stream),
    )


def _features(x: Tensor) -> sp.csr_matrix:
    """Features of the same scale, rows of length about 1: dense columns standardised, sparse rows divided by theirs."""
    if x.layout == torch.sparse_csr:
        matrix = from_torch_csr(x)
        length = np.sqrt(np.asarray(matrix.multiply(matrix).sum(1)).ravel())
        return sp.csr_matrix(sp.diags(1 / np.where(length > 0, length, 1)) @ matrix)
    values = x.numpy().astype(np.float64)
    deviation = values.std(0)
    return sp.csr_matrix((values - values.mean(0)) / np.where(deviation > 0, deviation, 1) / np.sqrt(values.shape[1]))


def _rows(whole: NodeData) -> sp.csr_matrix:
    """Who is connected to whom, rows of length 1."""
    matrix = adjacency(torch.cat([whole.edge_index, whole.edge_index.flip(0)], dim=1), whole.num_nodes)
    matrix.data[:] = 1.0
    length = np.sqrt(np.maximum(np.asarray(matrix.sum(1)).ravel(), 1))
    return sp.csr_matrix(sp.diags(1 / length) @ matrix)


def _with_neighbours(own: sp.csr_matrix, edges: Tensor, nodes: int) -> sp.csr_matrix:
    mean = mean_norm(torch.cat([edges, edges.flip(0)], dim=1), nodes)
    once = mean @ own
    return sp.csr_matrix(sp.hstack([own, once, mean @ once]))


def _score(x: sp.csr_matrix, whole: NodeData, owner: Tensor, metric: str, stream: Stream) -> float:
    """Validation score of one model per owner."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import average_precision_score

    y = whole.y.numpy()
    val = np.flatnonzero(whole.val.numpy())
    shares = np.zeros((len(y), whole.num_classes))
    for number in range(int(owner.max()) + 1):
        rows = np.flatnonzero((whole.train & (owner == number)).numpy())
        mine = val[owner.numpy()[val] == number]
        if len(rows) > MOST_ROWS:
            rows = np.sort(stream.numpy().choice(rows, MOST_ROWS, replace=False))
        seen = np.unique(y[rows])
        if not len(mine) or not len(seen):
            continue
        if len(seen) == 1:
            shares[np.ix_(mine, seen)] = 1.0
            continue
        with warnings.catch_warnings():  # that it stopped early: an estimate is enough
            warnings.simplefilter("ignore")
            model = LogisticRegression(C=10.0, max_iter=60, tol=1e-3).fit(x[rows], y[rows])
        shares[np.ix_(mine, seen)] = model.predict_proba(x[mine])
    found: NDArray[np.float64] = shares[val]
    if metric != "accuracy" and whole.num_classes == 2:
        return float(average_precision_score(y[val] == 1, found[:, 1]))
    return float((found.argmax(1) == y[val]).mean())
