r"""Propagation matrices of one graph, as scipy CSR float32: ``M @ h`` is one propagation.

    name        matrix                                   used by
    gcn_norm    :math:`D^{-1/2} (A + I) D^{-1/2}`        GCN (Kipf & Welling, 2017), as PyG computes it
    mean_norm   row i = mean over arcs j -> i            GraphSAGE, mean aggregator
    row_norm    :math:`D^{-1} (A + I)`, row = source     decoupled GCN of FedStruct

Arcs are columns of ``edge_index``: source above target. Nothing here symmetrises a directed graph. With weights of arcs
(E,), at least 0, A holds their sums in place of counts, degrees are sums of weights, means are weighted; a loop that is
added counts 1, as without weights.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor


def gcn_norm(edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None = None) -> sp.csr_matrix:
    r""":math:`D^{-1/2} (A + I) D^{-1/2}` with :math:`D` the in-degree, self-loop included.

    Equals ``torch_geometric.nn.conv.gcn_conv.gcn_norm``: a node that already has a self-loop gets no second one,
    duplicate arcs are summed. With weights the loop counts 1, whatever a listed one weighs.
    """
    source, target = _arcs(edge_index)
    other = source != target
    loops = np.arange(num_nodes)
    rows, columns = np.concatenate([target[other], loops]), np.concatenate([source[other], loops])
    matrix = _count(rows, columns, num_nodes, _beside_loops(edge_weight, num_nodes, other))
    scale = 1.0 / np.sqrt(_row_sums(matrix))  # at least 1 everywhere: every node has its loop
    return _float32(sp.diags(scale) @ matrix @ sp.diags(scale))


def mean_norm(edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None = None) -> sp.csr_matrix:
    """Row i averages over the sources of arcs into i (duplicates count); a node without incoming arcs, or with weights
    of 0 alone, has a zero row.
    """
    source, target = _arcs(edge_index)
    matrix = _count(target, source, num_nodes, edge_weight)
    degree = _row_sums(matrix)
    scale = np.divide(1.0, degree, out=np.zeros_like(degree), where=degree > 0)
    return _float32(sp.diags(scale) @ matrix)


def row_norm(edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None = None) -> sp.csr_matrix:
    r""":math:`D^{-1} (A + I)` with row = source, :math:`D` the out-degree + 1.

    Every node gets one more loop, also where one exists already (its diagonal weight is then 2), as FedStruct defines
    it.
    """
    source, target = _arcs(edge_index)
    loops = np.arange(num_nodes)
    rows, columns = np.concatenate([source, loops]), np.concatenate([target, loops])
    matrix = _count(rows, columns, num_nodes, _beside_loops(edge_weight, num_nodes))
    return _float32(sp.diags(1.0 / _row_sums(matrix)) @ matrix)


def adjacency(edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None = None) -> sp.csr_matrix:
    """``A`` itself, row = source: entry (i, j) counts the arcs i -> j, or adds up their weights."""
    source, target = _arcs(edge_index)
    return _float32(_count(source, target, num_nodes, edge_weight))


def to_torch_csr(matrix: sp.csr_matrix) -> Tensor:
    """The same matrix as a ``torch.sparse_csr`` float32 tensor with int64 indices, sorted and without duplicates."""
    matrix = matrix if matrix.has_canonical_format else _canonical(matrix)
    return torch.sparse_csr_tensor(
        torch.from_numpy(matrix.indptr.astype(np.int64)),
        torch.from_numpy(matrix.indices.astype(np.int64)),
        torch.from_numpy(np.asarray(matrix.data, dtype=np.float32)),
        size=(int(matrix.shape[0]), int(matrix.shape[1])),
        check_invariants=True,
    )


def from_torch_csr(tensor: Tensor) -> sp.csr_matrix:
    """The inverse of `to_torch_csr`."""
    parts = (tensor.values().numpy(), tensor.col_indices().numpy(), tensor.crow_indices().numpy())
    return sp.csr_matrix(parts, shape=(int(tensor.shape[0]), int(tensor.shape[1])))


def _arcs(edge_index: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    arcs = edge_index.numpy()
    return arcs[0], arcs[1]


def _beside_loops(edge_weight: Tensor | None, num_nodes: int, chosen: NDArray[np.bool_] | None = None) -> Tensor | None:
    """Weights of the chosen arcs, then 1 for a loop at every node."""
    if edge_weight is None:
        return None
    weight = edge_weight if chosen is None else edge_weight[torch.from_numpy(chosen)]
    return torch.cat([weight, weight.new_ones(num_nodes)])


def _count(
    rows: NDArray[np.int64], columns: NDArray[np.int64], num_nodes: int, weight: Tensor | None = None
) -> sp.csr_matrix:
    # float64 until the end: entries are then correctly rounded float32 and sums of rows stay 1 to the last bit we keep.
    values = np.ones(len(rows)) if weight is None else weight.numpy().astype(np.float64)
    matrix = sp.csr_matrix((values, (rows, columns)), shape=(num_nodes, num_nodes))
    matrix.sum_duplicates()
    return matrix


def _row_sums(matrix: sp.csr_matrix) -> NDArray[np.float64]:
    return np.asarray(matrix.sum(axis=1), dtype=np.float64).ravel()


def _float32(matrix: sp.csr_matrix) -> sp.csr_matrix:
    return _canonical(sp.csr_matrix(matrix, dtype=np.float32))


def _canonical(matrix: sp.csr_matrix) -> sp.csr_matrix:
    matrix = matrix.copy()
    matrix.sum_duplicates()
    return matrix
