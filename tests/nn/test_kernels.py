"""Compiled loops and written-out gradients against their definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from nn_helpers import client, jittered, model, uneven_clients

from isthmus.nn import (
    DropoutSource,
    Proximal,
    Workspace,
    build_inputs,
    first_layer_input,
    kernels,
    stack_inputs,
    stack_weights,
    train_locally,
)
from isthmus.nn.fused_optimizer import StepTensors, step_rows
from isthmus.nn.loss import get_loss, losses
from isthmus.nn.manual_gradients import has_manual_gradient, manual_gradients
from isthmus.nn.optim import fresh_state, step_plan, take_step
from isthmus.nn.sparse import block_diagonal, canonical
from isthmus.nn.train import autograd_gradients
from isthmus.seeds import Stream
from isthmus.tensors import equal_weights, get_weights, max_difference


def random_csr(rows: int, columns: int, seed: int, density: float = 0.2) -> sp.csr_matrix:
    return canonical(sp.random(rows, columns, density, format="csr", random_state=np.random.default_rng(seed)))


def test_spmm() -> None:
    matrix = random_csr(30, 20, 0)
    dense = torch.randn(20, 7, dtype=torch.float64)
    torch.testing.assert_close(kernels.spmm(matrix, dense), torch.from_numpy(matrix @ dense.numpy()))
    torch.testing.assert_close(kernels.spmm(matrix, dense.mT.contiguous().mT), torch.from_numpy(matrix @ dense.numpy()))
    assert kernels.spmm(canonical(sp.csr_matrix((3, 4))), torch.ones(4, 2)).tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("width", [1, 3, 16])
def test_rows_of_any_length_are_summed_exactly(width: int) -> None:
    """Rows of 0 to 9 entries: several at a time and the rest. Whole numbers leave nothing to rounding."""
    generator = np.random.default_rng(0)
    dense = torch.from_numpy(generator.integers(-50, 50, (12, width)).astype(np.float32))
    filled = np.zeros((10, 12), dtype=np.float32)
    for row in range(10):
        filled[row, generator.permutation(12)[:row]] = generator.integers(1, 50, row)
    assert torch.equal(kernels.spmm(canonical(sp.csr_matrix(filled)), dense), torch.from_numpy(filled) @ dense)


def test_block_diagonal_pads() -> None:
    found = block_diagonal([random_csr(2, 3, 1, 0.9), random_csr(4, 1, 2, 0.9)], 4, 3).toarray()
    expected = np.zeros((8, 6))
    expected[:2, :3] = random_csr(2, 3, 1, 0.9).toarray()
    expected[4:, 3:4] = random_csr(4, 1, 2, 0.9).toarray()
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("pull", [0.0, 0.7])
@pytest.mark.parametrize("shared", [True, False])
def test_step_rows_equals_gradient_then_step(optimizer: str, weight_decay: float, pull: float, shared: bool) -> None:
    """Three steps, clients with different step counts, most rows without gradient: the one pass is S^T G followed by
    the optimiser.
    """
    clients, features, rows, width, epochs = 3, 15, 6, 4, 3
    generator = Stream(0).torch()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    transposed = canonical(
        block_diagonal([random_csr(rows, features, k, 0.05) for k in range(clients)], rows, features).T.tocsr()
    )
    assert 0.2 < np.mean(np.diff(transposed.indptr) == 0) < 1
    source = draw(features, width) if shared else draw(clients, features, width)
    anchor = draw(features, width)
    expected = {"w": source.expand(clients, features, width).clone()}
    state = replace(fresh_state(optimizer, expected, clients=clients), steps=(0, 4, 1))
    for moment in (*state.first.values(), *state.second.values()):
        moment.copy_(draw(*moment.shape).abs())
    weight = torch.empty(clients, features, width, dtype=torch.float64)
    moments = [moment.clone() for moment in (*state.first.values(), *state.second.values())]
    plan = step_plan(optimizer, state.steps, epochs, 0.05, weight_decay, torch.float64)
    for epoch in range(epochs):
        grad = draw(clients * rows, width)
        row = StepTensors(source if epoch == 0 else weight, weight, *(moments or (None, None)), pull, anchor)
        step_rows(transposed, grad, row, replace(plan, step=epoch))
        dense = torch.from_numpy(transposed @ grad.numpy()).view(clients, features, width)
        state = take_step(expected, {"w": dense + pull * (expected["w"] - anchor)}, state, replace(plan, step=epoch))
    assert max_difference({"w": weight}, expected) < 1e-13
    for found, moment in zip(moments, (*state.first.values(), *state.second.values()), strict=True):
        torch.testing.assert_close(found, moment, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["gcn", "sage", "mlp"])
@pytest.mark.parametrize("input_norm", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("hidden", [(5,), (4, 9)])
def test_chain_rule_by_hand_equals_autograd(
    kind: str, input_norm: bool, dropout: float, hidden: tuple[int, ...]
) -> None:
    backbone = model(kind, hidden=hidden, input_norm=input_norm, head=True, dropout=dropout)
    inputs = stack_inputs([build_inputs(data, backbone, data.train, dtype=torch.float64) for data in uneven_clients()])
    weights = stack_weights([jittered(backbone, k) for k in range(6)])
    norm = (weights["input_norm.gamma"], weights["input_norm.beta"]) if input_norm else None
    assert has_manual_gradient(backbone)
    for name in losses():
        found = []
        for way in (manual_gradients, autograd_gradients):
            source = DropoutSource([Stream(k).torch() for k in range(6)])
            products = {term: op.forward(weights[term], norm) for term, op in inputs.first.items()}
            found.append(way(backbone, weights, products, inputs, get_loss(name), source))
        assert found[0][0].keys() == found[1][0].keys()
        assert max_difference(found[0][0], found[1][0]) < 1e-13
        assert max_difference(found[0][1], found[1][1]) < 1e-13
        assert float((found[0][2] - found[1][2]).abs().max()) < 1e-13


@pytest.mark.parametrize("kind", ["gcn", "sage"])
@pytest.mark.parametrize("input_norm", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_one_pass_training_equals_the_general_path(kind: str, input_norm: bool, optimizer: str, mu: float) -> None:
    """A term we do not know forces the general path, with stored gradients."""
    backbone = model(kind, input_norm=input_norm, head=True)
    inputs = stack_inputs([build_inputs(data, backbone, data.train, dtype=torch.float64) for data in uneven_clients()])
    assert all(op.blocks is not None for op in inputs.first.values())
    weights = jittered(backbone, 1)
    term = Proximal(mu, jittered(backbone, 2))
    options = {"epochs": 4, "lr": 0.03, "weight_decay": 0.01, "optimizer": optimizer}
    one_pass = train_locally(backbone, weights, None, inputs, extra_gradient=term, **options)
    general = train_locally(backbone, weights, None, inputs, extra_gradient=lambda w, grads: term(w, grads), **options)
    assert max_difference(one_pass.weights, general.weights) < 1e-11
    if mu == 0.0:
        assert equal_weights(one_pass.weights, train_locally(backbone, weights, None, inputs, **options).weights)
    assert max_difference(one_pass.optimizer_state.second, general.optimizer_state.second) < 1e-11


@pytest.mark.parametrize("input_norm", [False, True])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_multiplied_out_or_apart_is_the_same(kind: str, input_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = model(kind, input_norm=input_norm)
    weights = jittered(backbone, 1)
    ends, apart = [], []
    for rule in (lambda m, x, part: False, lambda m, x, part: True, lambda m, x, part: m.shape[0] > 6):
        monkeypatch.setattr(first_layer_input, "_apart", rule)
        items = [build_inputs(data, backbone, data.train, dtype=torch.float64) for data in uneven_clients()]
        apart.append(sum(any(op.after is not None for op in item.first.values()) for item in items))
        ends.append(train_locally(backbone, weights, None, stack_inputs(items), epochs=3, lr=0.02).weights)
    # One client has no training nodes, and two have no edges, so that there is nothing for GraphSAGE to propagate.
    assert apart[0] == 0 and apart[1] == (5 if kind == "gcn" else 3) and 0 < apart[2] < apart[1]
    assert max(max_difference(ends[0], end) for end in ends[1:]) < 1e-11


@pytest.mark.parametrize("input_norm", [False, True])
def test_number_of_threads_does_not_change_a_bit(input_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = model("sage", input_norm=input_norm)
    inputs = stack_inputs([build_inputs(data, backbone, data.train) for data in uneven_clients()])
    ends = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            monkeypatch.setattr(kernels, "_WORK_PER_THREAD", 1)
            ends.append(
                train_locally(backbone, get_weights(backbone), None, inputs, epochs=3, lr=0.02, weight_decay=1e-3)
            )
    finally:
        torch.set_num_threads(threads)
    assert equal_weights(ends[0].weights, ends[1].weights)
    assert equal_weights(ends[0].optimizer_state.first, ends[1].optimizer_state.first)


def test_workspace_changes_nothing_but_the_place() -> None:
    backbone = model("gcn")
    inputs = stack_inputs([build_inputs(data, backbone, data.train) for data in uneven_clients()])
    space = Workspace()
    options = {"epochs": 2, "lr": 0.02}
    shared, states, places = get_weights(backbone), [None, None], []
    for _ in range(3):
        kept = train_locally(backbone, shared, states[0], inputs, **options)
        reused = train_locally(backbone, shared, states[1], inputs, donate=True, workspace=space, **options)
        assert equal_weights(kept.weights, reused.weights)
        assert equal_weights(kept.optimizer_state.second, reused.optimizer_state.second)
        states = [kept.optimizer_state, reused.optimizer_state]
        places.append(reused.weights["layers.0.weight"].data_ptr())
        shared = {name: tensor.mean(0) for name, tensor in kept.weights.items()}
    assert len(set(places)) == 1


def test_plain_weights_with_a_norm_per_client() -> None:
    """FedStruct's reference profile: everything is averaged but the input norm, which stays with each client."""
    backbone = model("sage", input_norm=True, head=True)
    clients = uneven_clients()
    items = [build_inputs(data, backbone, data.train, dtype=torch.float64) for data in clients]
    shared = jittered(backbone, 1)
    norms = [
        {name: tensor for name, tensor in jittered(backbone, 2 + k).items() if name.startswith("input_norm.")}
        for k in range(6)
    ]
    mixed = shared | stack_weights(norms)
    together = train_locally(backbone, mixed, None, stack_inputs(items), epochs=3, lr=0.02)
    for k, item in enumerate(items):
        alone = train_locally(backbone, shared | norms[k], None, item, epochs=3, lr=0.02)
        assert max_difference({name: tensor[k] for name, tensor in together.weights.items()}, alone.weights) < 1e-11


def test_a_wide_client_stays_within_its_reach() -> None:
    """Training inputs hold rows near the training nodes only, whatever the size of the graph."""
    data = client(400, 1, num_edges=300, train=0.01)
    inputs = build_inputs(data, model("gcn"), data.train)
    assert inputs.padded[-1] == max(1, data.num_train)
    assert sum(inputs.rows[0]) < 40
