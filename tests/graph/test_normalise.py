"""Propagation matrices against PyG's own layers and the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm

from isthmus.graph.normalise import adjacency, from_torch_csr, gcn_norm, mean_norm, row_norm, to_torch_csr


def graph(seed: int, *, undirected: bool) -> tuple[Tensor, int]:
    """Random arcs with duplicates, self-loops and (node 19) an isolated node."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, 19, (2, 60), generator=generator)
    edge_index = torch.cat([edge_index, torch.tensor([[3, 4, 4], [3, 4, 4]])], dim=1)
    return (torch.cat([edge_index, edge_index.flip(0)], dim=1) if undirected else edge_index), 20


@pytest.mark.parametrize("undirected", [True, False])
def test_gcn_norm_is_that_of_pyg(undirected: bool) -> None:
    edge_index, n = graph(0, undirected=undirected)
    index, weight = pyg_gcn_norm(edge_index, num_nodes=n, dtype=torch.float64)
    expected = torch.zeros(n, n, dtype=torch.float64)
    expected.index_put_((index[1], index[0]), weight, accumulate=True)  # arcs carry from index[0] to index[1]
    np.testing.assert_allclose(gcn_norm(edge_index, n).toarray(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("undirected", [True, False])
def test_mean_norm_is_what_sageconv_does(undirected: bool) -> None:
    edge_index, n = graph(1, undirected=undirected)
    h = torch.randn(n, 5, generator=torch.Generator().manual_seed(2))
    layer = SAGEConv(5, 5, root_weight=False, bias=False)
    with torch.no_grad():
        layer.lin_l.weight.copy_(torch.eye(5))
        expected = layer(h, edge_index)
    actual = mean_norm(edge_index, n) @ h.numpy()
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-6)
    assert not mean_norm(edge_index, n)[19].nnz  # nobody to hear from


def test_row_norm_is_stochastic_and_doubles_existing_loops() -> None:
    matrix = row_norm(torch.tensor([[0, 0, 1], [0, 1, 2]]), 4).toarray()
    np.testing.assert_allclose(matrix, [[2 / 3, 1 / 3, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 1, 0], [0, 0, 0, 1]], atol=1e-7)
    edge_index, n = graph(3, undirected=False)
    np.testing.assert_allclose(np.asarray(row_norm(edge_index, n).sum(axis=1)).ravel(), 1.0, atol=1e-6)


def test_torch_round_trip_and_product() -> None:
    edge_index, n = graph(4, undirected=False)
    matrix = adjacency(edge_index, n)
    tensor = to_torch_csr(matrix)
    assert tensor.layout == torch.sparse_csr and tensor.dtype == torch.float32
    assert (from_torch_csr(tensor) != matrix).nnz == 0
    assert matrix[4, 4] >= 2  # duplicates are counted
    h = torch.randn(n, 3)
    torch.testing.assert_close(tensor @ h, torch.from_numpy(matrix @ h.numpy()))


def test_graph_without_edges() -> None:
    none = torch.empty(2, 0, dtype=torch.long)
    assert (gcn_norm(none, 3).toarray() == np.eye(3)).all()
    assert (row_norm(none, 3).toarray() == np.eye(3)).all()
    assert mean_norm(none, 3).nnz == 0


def test_weights_of_arcs_take_the_place_of_counts() -> None:
    edge_index, n = graph(5, undirected=False)
    weight = torch.rand(edge_index.shape[1], generator=torch.Generator().manual_seed(6))
    a = np.zeros((n, n))  # row = source
    np.add.at(a, (edge_index[0].numpy(), edge_index[1].numpy()), weight.numpy().astype(np.float64))
    into = a.T * (1 - np.eye(n)) + np.eye(n)
    scale = 1 / np.sqrt(into.sum(1))
    np.testing.assert_allclose(gcn_norm(edge_index, n, weight).toarray(), scale[:, None] * into * scale, atol=1e-6)
    sums = a.T.sum(1, keepdims=True)
    mean = np.divide(a.T, sums, out=np.zeros_like(a), where=sums > 0)
    np.testing.assert_allclose(mean_norm(edge_index, n, weight).toarray(), mean, atol=1e-6)
    both = a + np.eye(n)
    np.testing.assert_allclose(row_norm(edge_index, n, weight).toarray(), both / both.sum(1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(adjacency(edge_index, n, weight).toarray(), a, atol=1e-6)


def test_weighted_gcn_norm_is_that_of_pyg_without_loops() -> None:
    edge_index, n = graph(7, undirected=False)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    weight = torch.rand(edge_index.shape[1], generator=torch.Generator().manual_seed(8))
    index, values = pyg_gcn_norm(edge_index, weight.double(), num_nodes=n, dtype=torch.float64)
    expected = torch.zeros(n, n, dtype=torch.float64)
    expected.index_put_((index[1], index[0]), values, accumulate=True)
    np.testing.assert_allclose(gcn_norm(edge_index, n, weight).toarray(), expected.numpy(), atol=1e-6)


def test_weights_of_zero_are_no_neighbours() -> None:
    edge_index, none = torch.tensor([[0, 1], [1, 2]]), torch.zeros(2)
    assert (gcn_norm(edge_index, 3, none).toarray() == np.eye(3)).all()
    assert not mean_norm(edge_index, 3, none).toarray().any()
