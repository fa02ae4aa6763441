"""Mini-batches of nodes: what is drawn, how often, and that sums over draws are the full batch's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from nn_helpers import client
from scipy import stats

from isthmus.errors import ConfigError
from isthmus.graph.normalise import gcn_norm
from isthmus.methods.learners import NodeLearner, SampledLearner, node_learner
from isthmus.methods.training import TrainConfig
from isthmus.nn.optim import fresh_state
from isthmus.nn.sampling import Sampler, arcs_inside, draw_neighbours, form_clusters
from isthmus.nn.sparse import canonical
from isthmus.seeds import Stream
from isthmus.tensors import get_weights

BACKBONES = ("gcn", "sage", "gin", "mlp", "sgc", "gprgnn", "dgcn", "gat", "dirsage")


def hub(neighbours: int, *, itself: bool) -> sp.csr_matrix:
    """Row 0 reads everybody with a value of its own; the others read nobody."""
    values = np.zeros((neighbours + 1, neighbours + 1), dtype=np.float64)
    values[0, 1:] = np.arange(1, neighbours + 1) / 10
    values[0, 0] = 7.0 if itself else 0.0
    return canonical(sp.csr_matrix(values))


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize(("neighbours", "fanout"), [(12, 1), (12, 5), (12, 11), (40, 3)])
def test_every_set_of_neighbours_is_as_likely(neighbours: int, fanout: int, itself: bool) -> None:
    matrix, rows, draws = hub(neighbours, itself=itself), np.array([0]), 4000
    counts, pairs = np.zeros(neighbours), np.zeros((neighbours, neighbours))
    for draw in range(draws):
        part, order = draw_neighbours(matrix, rows, fanout, Stream(draw).integer())
        drawn = order[1:] - 1
        assert order[0] == 0 and len(set(drawn)) == len(drawn) == fanout  # without replacement, the row first
        assert part.shape == (1, fanout + 1) and part.nnz == fanout + itself
        counts[drawn] += 1
        pairs[np.ix_(drawn, drawn)] += 1
    assert stats.chisquare(counts).pvalue > 1e-4
    if 1 < fanout < neighbours - 1:  # and no two of them belong together
        both = pairs[np.triu_indices(neighbours, 1)]
        assert stats.chisquare(both).pvalue > 1e-4


def test_the_mean_over_draws_is_the_propagation() -> None:
    rng = np.random.default_rng(0)
    edges = torch.from_numpy(rng.integers(0, 60, size=(2, 900)))
    matrix = canonical(gcn_norm(edges, 60), torch.float64)
    h, rows = rng.normal(size=(60, 3)), np.arange(20)
    found = []
    for draw in range(3000):
        part, order = draw_neighbours(matrix, rows, 4, Stream(draw).integer())
        found.append(part @ h[order])
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / np.sqrt(len(found))
    assert np.abs((mean - (matrix @ h)[rows]) / np.maximum(error, 1e-9)).max() < 4.5  # all of 4 neighbours: no error
    assert np.median(error) > 1e-3  # it is a draw


def test_a_large_fanout_takes_every_neighbour_as_it_is() -> None:
    matrix = canonical(gcn_norm(client(30, 3).edge_index, 30), torch.float64)
    rows = np.array([5, 2, 17])
    part, order = draw_neighbours(matrix, rows, 1000, 1)
    assert np.allclose(part.toarray(), matrix[rows][:, order].toarray())
    assert list(order[:3]) == [5, 2, 17] and len(set(order)) == len(order)


def test_the_same_seed_draws_the_same() -> None:
    matrix = hub(50, itself=True)
    first, again, other = (draw_neighbours(matrix, np.array([0]), 5, seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_arcs_inside_stand_for_those_that_leave() -> None:
    matrix = hub(4, itself=True)  # values .1 .2 .3 .4 of nodes 1 ... 4
    part = arcs_inside(matrix, np.array([0, 2, 4])).toarray()
    assert np.allclose(part[0], [7.0, 2 * 0.2, 2 * 0.4])
    assert np.allclose(arcs_inside(matrix, np.array([0, 2, 4]), weighted=False).toarray()[0], [7.0, 0.2, 0.4])


def test_clusters_are_bounded_and_dense_inside() -> None:
    rng = np.random.default_rng(1)
    block = np.repeat(np.arange(8), 40)
    same = block[:, None] == block[None]
    arcs = sp.csr_matrix(np.triu(rng.random((320, 320)) < np.where(same, 0.3, 0.005), 1).astype(np.float32))
    matrix = canonical(sp.csr_matrix(arcs + arcs.T))
    cluster = form_clusters(matrix, 50, 3)
    assert np.bincount(cluster).max() <= 50 and cluster.min() == 0
    source, target = matrix.nonzero()
    inside = (cluster[source] == cluster[target]).mean()
    assert inside > 0.7 > 4 * (np.bincount(cluster) ** 2).sum() / 320**2  # four times what chance would give


def learner(batches: str, backbone: str, **changes: object) -> NodeLearner:
    options = {"dprate": 0.0} if backbone == "gprgnn" else {}
    config = TrainConfig(
        backbone=backbone, hidden=(8, 8), dropout=0.0, batches=batches, precision="float64", **options, **changes
    )  # type: ignore[arg-type]
    data = client(80, 4, num_edges=400)
    model = config.build(num_features=data.num_features, num_classes=data.num_classes, stream=Stream(0))
    found = node_learner(data, model, config)
    assert isinstance(found, NodeLearner)
    return found


def streams(name: str) -> Stream:
    return Stream(3, (name,))


@pytest.mark.parametrize("batch_size", [1000, 7])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("norm", [False, True])
def test_all_neighbours_and_all_batches_give_the_gradient_of_the_full_batch(
    backbone: str, batch_size: int, norm: bool
) -> None:
    full = learner("full", backbone, class_weight="balanced", input_norm=norm)
    sampled = learner(
        "neighbours", backbone, batch_size=batch_size, fanout=(500,), class_weight="balanced", input_norm=norm
    )
    weights = get_weights(full.model)
    wanted, found = full.gradients(weights, streams), sampled.gradients(weights, streams)
    assert wanted.keys() == found.keys()
    for name in wanted:
        assert torch.allclose(wanted[name], found[name], atol=1e-12), name


@pytest.mark.parametrize("batches", ["neighbours", "clusters"])
def test_every_training_node_is_in_one_batch_of_an_epoch(batches: str) -> None:
    sampled = learner(batches, "gcn", batch_size=6)
    assert isinstance(sampled, SampledLearner)
    sampler = sampled.sampler
    first, second = sampler.epoch(Stream(1)), sampler.epoch(Stream(2))
    train = sampled.data.train.nonzero().flatten().numpy()
    for epoch in (first, second):
        assert np.array_equal(np.sort(np.concatenate(epoch)), train) and len(epoch) > 2
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))
    rows = first[0]
    inputs = sampler.batch(rows, Stream(1))
    assert np.array_equal(inputs.y.numpy(), sampled.data.y[rows].numpy())
    assert float(inputs.weight.sum()) == pytest.approx(1.0)
    if batches == "clusters":  # nothing but nodes of the batch's clusters is read after the first propagation
        held = np.isin(sampler.clusters, np.unique(sampler.clusters[rows])).sum()
        assert inputs.padded == (held, held, len(rows))


def test_a_layer_that_counts_arcs_gets_counts() -> None:
    sampled = learner("neighbours", "dirsage", batch_size=5, fanout=(1,))
    assert isinstance(sampled, SampledLearner) and sampled.sampler.steps is not None
    values = sampled.sampler.batch(sampled.sampler.epoch(Stream(1))[0], Stream(1)).hidden[0].csr.data
    assert set(values) <= set(sampled.sampler.steps.csr.data)


@pytest.mark.parametrize("batches", ["neighbours", "clusters"])
def test_training_by_batches_lowers_the_loss_and_repeats(batches: str) -> None:
    sampled = learner(batches, "sage", batch_size=8, fanout=(2,), local_epochs=40)
    weights = get_weights(sampled.model)

    def run() -> tuple[dict[str, torch.Tensor], float]:
        result = sampled.train(weights, fresh_state("adam", weights), streams, None, (), lr=0.02)
        return dict(result.weights), float(result.loss)

    first, loss = run()
    again, _ = run()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert loss < 0.8 * np.log(3)


def test_a_model_without_propagation_needs_no_clusters() -> None:
    sampled = learner("clusters", "mlp", batch_size=8)
    assert isinstance(sampled, SampledLearner)
    rows = sampled.sampler.epoch(Stream(1))
    assert max(map(len, rows)) == 8 and sampled.sampler.batch(rows[0], Stream(1)).padded == (8,)


def test_a_client_without_training_nodes_takes_no_step() -> None:
    config = TrainConfig(batches="neighbours")
    data = client(9, 4, train=0.0)
    model = config.build(num_features=data.num_features, num_classes=data.num_classes, stream=Stream(0))
    sampled = node_learner(data, model, config)
    weights = get_weights(model)
    result = sampled.train(weights, fresh_state("adam", weights), streams, None, (), lr=0.01)
    assert all(torch.equal(weights[name], result.weights[name]) for name in weights)
    assert not any(grad.any() for grad in sampled.gradients(weights, streams).values())


def test_what_needs_all_nodes_at_once_says_so() -> None:
    with pytest.raises(ConfigError, match="set batches=full"):
        _ = learner("neighbours", "gcn").inputs


def test_an_empty_batch_size_is_refused() -> None:
    everything = learner("full", "gcn").everything
    with pytest.raises(ConfigError, match="batch_size"):
        Sampler(everything, 0, (3,)).epoch(Stream(1))
