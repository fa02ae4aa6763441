r"""Structure embeddings of nodes -- Tan et al. (FedStar), AAAI 2023: what a node's place in its graph looks like,
features apart.

    name   dimension   row of node v
    DSE    k1          one-hot of the degree: :math:`[1(d_v=1), \dots, 1(d_v \ge k_1)]`
    RWSE   k2          return probabilities of random walks: :math:`[T_{vv}, (T^2)_{vv}, \dots, (T^{k_2})_{vv}]`,
                       :math:`T = A D^{-1}`

A is binary, symmetric and without loops: duplicate arcs count once, loops not at all, and an arc stands for both
directions. A node without neighbours falls into the first degree class (as in the published code, where the formula
would give a zero row), and never
returns: its RWSE is zero.

Powers of T fill in, so they are never formed for a large graph. With the symmetric :math:`S = D^{-1/2} A D^{-1/2}`,
which has the same diagonals,

.. math:: (T^{2j})_{vv} = \lVert S^j e_v \rVert^2, \qquad (T^{2j+1})_{vv} = \langle S^j e_v, S^{j+1} e_v \rangle,

exact, all terms in [0, 1], with half the products, for a block of columns :math:`e_v` at a time: memory grows with
nodes x block.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import ConfigError

_BLOCK = 256  # columns at a time
_ARCS_AT_ONCE = 1 << 21  # graphs are prepared in stretches of about this many arcs
_DENSE_GAIN = 20.0  # a dense product does about this many multiplications in the time of a sparse one
_DENSE_NODES = 1024  # a larger graph goes by blocks however dense it is: memory grows with nodes, not with their square

Array = NDArray[np.float64]


def degree_embedding(edge_index: Tensor, num_nodes: int, size: int) -> Tensor:
    """DSE (n, k1): one 1 per row.

    Args:
        edge_index: Arcs (2, E).
        size: k1, at least 1; the last class holds all larger degrees.
    """
    _at_least_one("size", size)
    degree = np.diff(simple_adjacency(edge_index, num_nodes).indptr)
    return torch.nn.functional.one_hot(torch.from_numpy(np.clip(degree, 1, size) - 1).long(), size).float()


def walk_embedding(edge_index: Tensor, ptr: Tensor, edge_ptr: Tensor, steps: int) -> Tensor:
    """RWSE (n, k2) of all nodes of graphs that lie end to end.

    Args:
        edge_index: Arcs (2, E), graph by graph.
        ptr: First node of every graph, and the number of nodes (G + 1,); ``[0, n]`` for one graph.
        edge_ptr: First arc of every graph, and the number of arcs (G + 1,).
        steps: k2, at least 1.
    """
    _at_least_one("steps", steps)
    nodes, arcs = ptr.numpy(), edge_ptr.numpy()
    out = np.zeros((int(nodes[-1]), steps), dtype=np.float32)
    graph = 0
    while graph < len(nodes) - 1:
        end = max(graph + 1, int(np.searchsorted(arcs, arcs[graph] + _ARCS_AT_ONCE, side="right")) - 1)
        first, last = int(nodes[graph]), int(nodes[end])
        matrix = _symmetric_walk(edge_index[:, int(arcs[graph]) : int(arcs[end])] - first, last - first)
        for begin, stop in zip(nodes[graph:end] - first, nodes[graph + 1 : end + 1] - first, strict=True):
            _returns(matrix, int(begin), int(stop), out[first + begin : first + stop])
        graph = end
    return torch.from_numpy(out)


def simple_adjacency(edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
    """A as read here: binary, symmetric, without loops."""
    source, target = edge_index.numpy()
    apart = source != target
    rows, columns = np.concatenate([source[apart], target[apart]]), np.concatenate([target[apart], source[apart]])
    matrix = sp.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(num_nodes, num_nodes))
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix


def _symmetric_walk(edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
    """S; rows of nodes without neighbours are empty, so nothing is divided by zero."""
    matrix = simple_adjacency(edge_index, num_nodes)
    degree = np.diff(matrix.indptr)
    scale = 1.0 / np.sqrt(np.maximum(degree, 1))
    matrix.data *= np.repeat(scale, degree) * scale[matrix.indices]
    return matrix


def _returns(matrix: sp.csr_matrix, begin: int, stop: int, out: NDArray[np.float32]) -> None:
    """RWSE of the graph on nodes ``begin`` to ``stop`` of a block diagonal S."""
    nodes, first, last = stop - begin, matrix.indptr[begin], matrix.indptr[stop]
    if first == last:
        return
    parts = (matrix.data[first:last], matrix.indices[first:last] - begin, matrix.indptr[begin : stop + 1] - first)
    own = sp.csr_matrix(parts, shape=(nodes, nodes))
    dense = own.toarray() if nodes <= min(_DENSE_NODES, _DENSE_GAIN * own.nnz / nodes) else None
    for column in range(0, nodes, nodes if dense is not None else _BLOCK):
        columns = slice(column, nodes if dense is not None else min(column + _BLOCK, nodes))
        walk: Array = (
            dense if dense is not None else own[:, columns].toarray()
        )  # S e_v; S^0 e_v has nothing in common with it
        for step in range(2, out.shape[1] + 1):
            if step % 2 == 0:
                before = walk
            else:
                walk = before @ dense if dense is not None else own @ before
            out[columns, step - 1] = np.einsum("ij,ij->j", before, walk)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} of a structure embedding must be at least 1, got {value}")
