"""Packed batches: the same numbers as the chosen graphs one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.sparse as sp
import torch
from graph_helpers import SIZES, graph_set
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.utils import to_dense_adj

from isthmus.data.graph_set import GraphSetData
from isthmus.errors import ConfigError
from isthmus.graph.normalise import gcn_norm, mean_norm, to_torch_csr
from isthmus.nn import graph_batch
from isthmus.nn.architectures.gin import sum_with_itself
from isthmus.nn.graph_batch import batches, pack_graphs
from isthmus.seeds import Stream

STEPS = {"sum": sum_with_itself, "gcn": gcn_norm, "mean": mean_norm}


def dense_step(name: str, edge_index: Tensor, nodes: int) -> Tensor:
    """P from its definition, in float64."""
    arcs = torch.zeros(nodes, nodes, dtype=torch.float64)
    if nodes and edge_index.numel():
        arcs = to_dense_adj(edge_index, max_num_nodes=nodes)[0].double().T  # row = target
    if name == "sum":
        return arcs + torch.eye(nodes, dtype=torch.float64)
    if name == "mean":
        return arcs / arcs.sum(1, keepdim=True).clamp(min=1)
    looped = arcs + torch.eye(nodes, dtype=torch.float64)
    scale = looped.sum(1).rsqrt()
    return scale[:, None] * looped * scale[None]


def expected_step(name: str, data: GraphSetData, graphs: list[int]) -> Tensor:
    blocks = []
    for g in graphs:
        one = data.select(torch.tensor([g]))
        blocks.append(dense_step(name, one.edge_index, one.num_nodes))
    return torch.block_diag(*blocks) if blocks else torch.zeros(0, 0, dtype=torch.float64)


def expected_rows(data: GraphSetData, graphs: list[int]) -> Tensor:
    x = data.x.to_dense() if data.x.layout == torch.sparse_csr else data.x
    parts = [x[int(data.ptr[g]) : int(data.ptr[g + 1])] for g in graphs]
    rows = torch.cat(parts).double() if parts else x[:0].double()
    return torch.cat([rows, torch.ones(rows.shape[0], 1, dtype=torch.float64)], dim=1)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 50),
    graphs=st.lists(st.integers(0, len(SIZES) - 1), max_size=12),
    step=st.sampled_from(["sum", "gcn", "mean"]),
    undirected=st.booleans(),
    one_hot=st.booleans(),
)
def test_batch_equals_its_graphs(seed: int, graphs: list[int], step: str, undirected: bool, one_hot: bool) -> None:
    """Any graphs in any order, also none and the same one twice."""
    data = graph_set(seed, undirected=undirected, one_hot=one_hot)
    batch = pack_graphs(data, dtype=torch.float64).batch(torch.tensor(graphs, dtype=torch.int64))
    matrix, rows = expected_step(step, data, graphs), expected_rows(data, graphs)
    assert batch.num_graphs == len(graphs) and batch.num_nodes == len(rows)
    assert torch.equal(batch.y, data.y[graphs])

    generator = Stream(seed).torch()
    h = torch.randn(batch.num_nodes, 5, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(batch.pair(STEPS[step]) @ h, matrix @ h, rtol=1e-6, atol=1e-6)
    pooled = [part.sum(0) for part in torch.split(h, [SIZES[g] for g in graphs])]
    torch.testing.assert_close(batch.pool(h), torch.stack(pooled) if pooled else h.new_zeros(0, 5))
    weight = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(batch.affine("x", weight), rows @ weight)
    torch.testing.assert_close(batch.affine("x", weight, STEPS[step]), matrix @ rows @ weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("undirected", [True, False])
@pytest.mark.parametrize("step", ["sum", "gcn", "mean"])
def test_gradients(step: str, undirected: bool, one_hot: bool) -> None:
    data = graph_set(3, undirected=undirected, one_hot=one_hot, num_features=20 if one_hot else 6)
    pack = pack_graphs(data, dtype=torch.float64)
    batch = pack.batch(torch.tensor([4, 0, 5, 1]))
    generator = Stream(1).torch()
    h = torch.randn(batch.num_nodes, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: batch.pair(STEPS[step]) @ t, (h,))
    assert torch.autograd.gradcheck(batch.pool, (h,))
    weight = torch.randn(data.num_features + 1, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: batch.affine("x", w), (weight,))
    assert torch.autograd.gradcheck(lambda w: batch.affine("x", w, STEPS[step]), (weight,))


def test_symmetric_matrices_are_kept_once() -> None:
    undirected, directed = (pack_graphs(graph_set(1, undirected=flag)) for flag in (True, False))
    for step in (sum_with_itself, gcn_norm):
        assert undirected.pair(step).forward is undirected.pair(step).backward
        assert directed.pair(step).forward is not directed.pair(step).backward
        assert undirected.pair(step) is undirected.pair(step)  # normalised once
    assert undirected.pair(mean_norm).forward is not undirected.pair(mean_norm).backward


@pytest.mark.parametrize("undirected", [True, False])
@pytest.mark.parametrize("step", ["sum", "gcn", "mean"])
def test_normalising_by_stretches_changes_nothing(monkeypatch: pytest.MonkeyPatch, step: str, undirected: bool) -> None:
    # The first graphs are without edges: the stretch they are in is symmetric, later ones need not be.
    data = graph_set(2, undirected=undirected, without_edges=(0, 1, 2))
    whole = pack_graphs(data).pair(STEPS[step])
    monkeypatch.setattr(graph_batch, "_ARCS_AT_ONCE", 3)
    pieces = pack_graphs(data).pair(STEPS[step])
    for a, b in ((whole.forward, pieces.forward), (whole.backward, pieces.backward)):
        assert (a.indptr == b.indptr).all() and (a.indices == b.indices).all() and (a.data == b.data).all()


def test_products_are_multiplied_out_only_where_that_is_less_work() -> None:
    """In a clique whose nodes have five words each, none in common, every row of P x holds all words: P and x apart are
    less.
    """
    nodes, words = 30, 5
    arcs = torch.ones(nodes, nodes).fill_diagonal_(0).nonzero().T
    x = torch.kron(torch.eye(nodes), torch.ones(1, words))
    x = torch.cat([x, torch.zeros(nodes, 150)], dim=1)
    pieces = {
        "edge_index": arcs,
        "edge_ptr": torch.tensor([0, arcs.shape[1]]),
        "x": to_torch_csr(sp.csr_matrix(x.numpy())),
    }
    clique = replace(graph_set(0, sizes=(nodes,)), **pieces)
    pack = pack_graphs(clique, dtype=torch.float64)
    assert pack.rows("x", sum_with_itself) is None
    weight = torch.randn(301, 2, dtype=torch.float64, generator=Stream(0).torch(), requires_grad=True)
    found = pack.batch(torch.tensor([0])).affine("x", weight, sum_with_itself)
    expected = torch.ones(nodes, nodes, dtype=torch.float64) @ expected_rows(clique, [0]) @ weight
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.square().sum(), weight)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads)
    assert pack_graphs(graph_set(0, one_hot=True)).rows("x", sum_with_itself) is not None
    # Full rows of few columns have as many terms, but their product is as narrow as they are: COLLAB's structure
    # embedding.
    narrow = replace(clique, x=torch.rand(nodes, 16, generator=Stream(1).torch()))
    product = pack_graphs(narrow, dtype=torch.float64).rows("x", sum_with_itself)
    assert isinstance(product, torch.Tensor)
    torch.testing.assert_close(product, torch.ones(nodes, nodes, dtype=torch.float64) @ expected_rows(narrow, [0]))


def test_more_inputs() -> None:
    data = graph_set(4)
    structure = torch.randn(data.num_nodes, 3, generator=Stream(0).torch())
    pack = pack_graphs(data, extra={"s": structure})
    batch = pack.batch(torch.arange(data.num_graphs))
    weight = torch.randn(4, 2, generator=Stream(1).torch())
    torch.testing.assert_close(batch.affine("s", weight), structure @ weight[:3] + weight[3])
    with pytest.raises(ConfigError, match="did you mean 's'"):
        batch.affine("ss", weight)
    with pytest.raises(ConfigError, match="2 rows"):
        pack_graphs(data, extra={"s": structure[:2]})


def test_batches_cover_every_row_once() -> None:
    rows = torch.tensor([3, 1, 4, 15, 9, 2, 6])
    parts = list(batches(rows, 3))
    assert [part.numel() for part in parts] == [3, 3, 1] and torch.equal(torch.cat(parts), rows)
    shuffled = [torch.cat(list(batches(rows, 3, Stream(seed).torch()))) for seed in (1, 1, 2)]
    assert torch.equal(shuffled[0], shuffled[1]) and not torch.equal(shuffled[0], shuffled[2])
    assert torch.equal(shuffled[2].sort().values, rows.sort().values)
    generator = Stream(1).torch()
    epochs = [torch.cat(list(batches(rows, 3, generator))) for _ in range(2)]
    assert not torch.equal(epochs[0], epochs[1])  # a new order in every epoch
    assert list(batches(rows[:0], 3)) == []
    with pytest.raises(ConfigError, match="batch_size"):
        batches(rows, 0)


def test_pieces_follow_the_order_and_the_limit() -> None:
    pack = pack_graphs(graph_set(5))
    rows = torch.tensor([8, 4, 0, 5, 1, 2, 3])  # sizes 9, 12, 5, 0, 1, 7, 4
    pieces = [piece.tolist() for piece in pack.pieces(rows, 8)]
    assert pieces == [[8], [4], [0, 5, 1], [2], [3]]
    assert [piece.tolist() for piece in pack.pieces(rows, 1000)] == [rows.tolist()]
    assert list(pack.pieces(rows[:0], 8)) == []
