"""The feature auto-encoder: its loss and gradients against the written-out ones, and that it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import build_scenario
from isthmus.errors import ConfigError
from isthmus.graph.normalise import from_torch_csr, to_torch_csr
from isthmus.nn.autoencoder import (
    FeatureTask,
    decode,
    encode,
    first_autoencoder,
    reconstruction_loss,
    train_autoencoder,
)
from isthmus.nn.optim import fresh_state
from isthmus.seeds import Stream


def nodes(*, sparse: bool) -> Any:
    scenario = build_scenario(dataset="csbm:nodes=60,classes=3,features=9,degree=4", clients=1, seed=2)
    data: NodeData = next(iter(scenario.parts.values()))
    x = (data.x.to_dense() if data.x.layout == torch.sparse_csr else data.x).clone()
    x[x.abs() < (1.3 if sparse else 0.0)] = 0.0
    return type(
        "Plain", (), {"x": _csr(x) if sparse else x, "edge_index": data.edge_index, "y": data.y, "num_nodes": 60}
    )(), x.double()


def _csr(x: torch.Tensor) -> torch.Tensor:
    return to_torch_csr(from_torch_csr(x.to_sparse_csr()))


@pytest.mark.parametrize("hops", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_loss_and_gradients_equal_the_ones_through_the_whole_reconstruction(hops: bool, sparse: bool) -> None:
    data, x = nodes(sparse=sparse)
    task = FeatureTask.of(data, hops=hops, dtype=torch.float64)
    assert isinstance(task.target, torch.Tensor) is not sparse
    weights = {n: t.requires_grad_() for n, t in first_autoencoder(9, 7, 4, Stream(1), torch.float64).items()}
    for name in weights:
        if name.endswith("bias"):
            weights[name].data.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(0))
    loss = reconstruction_loss(weights, task)
    plain = (decode(weights, encode(weights, task), task.steps) - x).square().sum() / 60
    torch.testing.assert_close(loss, plain, atol=1e-10, rtol=0)
    found, expected = (torch.autograd.grad(value, list(weights.values())) for value in (loss, plain))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_training_lowers_the_loss_and_leaves_its_arguments_alone() -> None:
    data, _ = nodes(sparse=False)
    task = FeatureTask.of(data)
    first = first_autoencoder(9, 8, 6, Stream(1))
    kept = {name: tensor.clone() for name, tensor in first.items()}
    state = fresh_state("adam", first)
    before = float(reconstruction_loss(first, task))
    trained, _, _ = train_autoencoder(first, state, task, epochs=60, lr=0.01)
    assert float(reconstruction_loss(trained, task)) < 0.8 * before
    assert all(torch.equal(first[name], kept[name]) for name in first) and not any(
        bool(t.any()) for t in state.first.values()
    )


def test_steps_in_two_calls_equal_steps_in_one() -> None:
    data, _ = nodes(sparse=True)
    task = FeatureTask.of(data)
    first = first_autoencoder(9, 8, 6, Stream(1))
    once, _, _ = train_autoencoder(first, fresh_state("adam", first), task, epochs=4, lr=0.01)
    weights, state = first, fresh_state("adam", first)
    for _ in range(2):
        weights, state, _ = train_autoencoder(weights, state, task, epochs=2, lr=0.01)
    assert all(torch.equal(once[name], weights[name]) for name in once)


def test_widths_of_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        first_autoencoder(9, 8, 0, Stream(1))
