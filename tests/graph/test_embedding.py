"""Structure embeddings: against dense powers, on graphs whose walks are known, and on what raw files can hold."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.graph import embedding
from isthmus.graph.embedding import degree_embedding, walk_embedding


def both_ways(pairs: list[tuple[int, int]]) -> Tensor:
    return torch.tensor([*pairs, *[(b, a) for a, b in pairs]], dtype=torch.int64).reshape(-1, 2).T


def walks(edges: Tensor, nodes: int, steps: int = 16) -> Tensor:
    return walk_embedding(edges, torch.tensor([0, nodes]), torch.tensor([0, edges.shape[1]]), steps)


def dense_powers(edges: Tensor, nodes: int, steps: int) -> np.ndarray:
    a = np.zeros((nodes, nodes))
    a[edges[0], edges[1]] = 1.0
    degree = a.sum(0)
    t = a * np.divide(1.0, degree, out=np.zeros(nodes), where=degree > 0)[None, :]  # A D^-1
    power, rows = np.eye(nodes), []
    for _ in range(steps):
        power = power @ t
        rows.append(np.diag(power).copy())
    return np.stack(rows, axis=1)


def random_graph(seed: int, nodes: int, share: float) -> Tensor:
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.random((nodes, nodes)) < share, 1)
    return torch.from_numpy(np.stack(np.nonzero(upper | upper.T)))


def cycle(n: int) -> Tensor:
    return both_ways([(i, (i + 1) % n) for i in range(n)])


@pytest.mark.parametrize(("nodes", "share"), [(12, 0.3), (40, 0.6), (90, 0.02), (600, 0.004)])
@pytest.mark.parametrize("steps", [1, 2, 7, 16])
def test_rwse_is_the_diagonal_of_dense_powers(nodes: int, share: float, steps: int) -> None:
    edges = random_graph(nodes, nodes, share)  # the sparse ones have isolated nodes and go block by block
    assert np.abs(walks(edges, nodes, steps).numpy() - dense_powers(edges, nodes, steps)).max() < 1e-6


def test_blocks_of_columns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = random_graph(3, 70, 0.03)
    whole = walks(edges, 70)
    monkeypatch.setattr(embedding, "_BLOCK", 9)
    assert torch.equal(whole, walks(edges, 70))


def test_a_large_graph_goes_by_blocks_however_dense_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = random_graph(3, 70, 0.6)
    whole = walks(edges, 70)
    monkeypatch.setattr(embedding, "_DENSE_NODES", 60)
    monkeypatch.setattr(embedding, "_BLOCK", 9)
    widths = set()
    toarray = sp.csr_matrix.toarray
    monkeypatch.setattr(sp.csr_matrix, "toarray", lambda matrix: widths.add(matrix.shape[1]) or toarray(matrix))
    assert (whole - walks(edges, 70)).abs().max() < 1e-6 and widths == {9, 7}


def test_bipartite_graphs_return_in_even_steps_only() -> None:
    left, right = torch.arange(6), torch.arange(6, 15)
    complete = both_ways([(int(a), int(b)) for a in left for b in right])
    for edges, nodes in ((complete, 15), (cycle(10), 10), (cycle(600), 600)):
        assert torch.equal(walks(edges, nodes)[:, 0::2], torch.zeros(nodes, 8))
    assert (walks(cycle(9), 9)[:, 8] > 0).all()  # once around an odd cycle


def test_walks_on_a_clique_and_to_the_stationary_law() -> None:
    n = 7
    clique = both_ways([(i, j) for i in range(n) for j in range(i)])
    assert torch.allclose(walks(clique, n)[:, 1], torch.full((n,), 1 / (n - 1)))
    edges = torch.cat([cycle(5), both_ways([(0, 2)])], dim=1)  # connected, not bipartite
    degree = torch.bincount(edges[0])
    assert torch.allclose(walks(edges, 5, 200)[:, -1], degree / edges.shape[1], atol=1e-5)


def test_isolated_nodes_have_zero_walks_and_the_first_degree_class() -> None:
    edges = both_ways([(0, 1), (1, 2)])
    rwse, dse = walks(edges, 5), degree_embedding(edges, 5, 4)
    assert torch.equal(rwse[3:], torch.zeros(2, 16)) and not rwse.isnan().any()
    assert dse.argmax(1).tolist() == [0, 1, 0, 0, 0]
    assert torch.equal(walks(torch.empty(2, 0, dtype=torch.int64), 3), torch.zeros(3, 16))
    assert walks(torch.empty(2, 0, dtype=torch.int64), 0).shape == (0, 16)


@pytest.mark.parametrize("seed", range(4))
def test_both_are_equivariant_and_bounded(seed: int) -> None:
    edges, nodes = random_graph(seed, 30, 0.15), 30
    order = torch.randperm(nodes, generator=torch.Generator().manual_seed(seed))
    moved = order[edges]
    for embed in (lambda e: walks(e, nodes), lambda e: degree_embedding(e, nodes, 5)):
        assert torch.allclose(embed(moved)[order], embed(edges), atol=1e-6)
        assert float(embed(edges).min()) >= 0.0 and float(embed(edges).max()) <= 1.0 + 1e-6


def test_dse_is_one_hot_with_an_open_last_class() -> None:
    star = both_ways([(0, i) for i in range(1, 9)])
    dse = degree_embedding(star, 9, 4)
    assert torch.equal(dse.sum(1), torch.ones(9))
    assert dse[0].tolist() == [0, 0, 0, 1] and dse[1].tolist() == [1, 0, 0, 0]


def test_loops_duplicates_and_one_way_arcs_count_as_one_edge() -> None:
    plain = cycle(5)
    untidy = torch.cat([plain, plain[:, :3], torch.tensor([[2, 2, 4], [2, 2, 4]])], dim=1)
    one_way = torch.stack([torch.arange(5), (torch.arange(5) + 1) % 5])
    for edges in (untidy, one_way):
        assert torch.equal(walks(edges, 5), walks(plain, 5)) and torch.equal(
            degree_embedding(edges, 5, 3), degree_embedding(plain, 5, 3)
        )


def test_graphs_end_to_end_are_graphs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, sizes = [cycle(5), torch.empty(2, 0, dtype=torch.int64), random_graph(1, 20, 0.3), cycle(4)], [5, 0, 20, 4]
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    edge_ptr = torch.tensor([0, *(part.shape[1] for part in parts)]).cumsum(0)
    edges = torch.cat([part + begin for part, begin in zip(parts, ptr, strict=False)], dim=1)
    alone = torch.cat([walks(part, size) for part, size in zip(parts, sizes, strict=True)])
    assert torch.equal(walk_embedding(edges, ptr, edge_ptr, 16), alone)
    monkeypatch.setattr(embedding, "_ARCS_AT_ONCE", 11)
    assert torch.equal(walk_embedding(edges, ptr, edge_ptr, 16), alone)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        walks(cycle(3), 3, 0)
    with pytest.raises(ConfigError, match="at least 1"):
        degree_embedding(cycle(3), 3, 0)
