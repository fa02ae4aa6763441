"""The loop against torch's own optimisers, and what it must leave alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from nn_helpers import NUM_FEATURES, client, jittered, model
from torch import nn

from isthmus.errors import ConfigError, DataError, ProtocolError
from isthmus.nn import DropoutSource, Proximal, build_backbone, build_inputs, gradients, stack_inputs, train_locally
from isthmus.nn.loss import get_loss
from isthmus.nn.optim import OptimizerState, fresh_state, step_plan, take_step
from isthmus.seeds import Stream
from isthmus.tensors import equal_weights, get_weights, max_difference


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_steps_equal_torch(optimizer: str, weight_decay: float) -> None:
    generator = Stream(0).torch()
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"a": (4, 3), "b": (7,)}.items()
    }
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    reference = kind(list(parameters.values()), lr=0.03, weight_decay=weight_decay)
    state = fresh_state(optimizer, weights)
    for _ in range(20):
        grads = {
            name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            for name, tensor in weights.items()
        }
        for name, parameter in parameters.items():
            parameter.grad = grads[name].clone()
        reference.step()
        state = take_step(
            weights, grads, state, step_plan(optimizer, state.steps, 1, 0.03, weight_decay, torch.float64)
        )
    assert state.steps == (20,)
    assert max_difference(weights, {name: parameter.detach() for name, parameter in parameters.items()}) < 1e-7


@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_training_equals_a_plain_torch_loop(kind: str) -> None:
    """30 steps of Adam with autograd through the whole model, on the module's own parameters."""
    data = client(20, 1)
    backbone = model(kind, input_norm=True, head=True).double()
    inputs = build_inputs(data, backbone, data.train, dtype=torch.float64)
    start = get_weights(backbone)
    result = train_locally(backbone, start, None, inputs, epochs=30, lr=0.02, weight_decay=5e-4)
    plain = copy.deepcopy(backbone)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.02, weight_decay=5e-4)
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(plain(inputs), inputs.y)
        loss.backward()
        optimizer.step()
    assert max_difference(result.weights, get_weights(plain)) < 1e-10
    assert abs(float(result.loss - loss.detach())) < 1e-10


def test_nothing_of_the_caller_changes() -> None:
    data = client(20, 2)
    backbone = model("gcn")
    inputs = build_inputs(data, backbone, data.train)
    own = get_weights(backbone)
    weights = jittered(backbone, 1, torch.float32)
    first = train_locally(backbone, weights, None, inputs, epochs=2, lr=0.1)
    kept = copy.deepcopy((weights, first))
    again = train_locally(backbone, first.weights, first.optimizer_state, inputs, epochs=2, lr=0.1)
    assert equal_weights(weights, kept[0]) and equal_weights(first.weights, kept[1].weights)
    assert equal_weights(first.optimizer_state.first, kept[1].optimizer_state.first)
    assert equal_weights(own, get_weights(backbone)) and all(p.grad is None for p in backbone.parameters())
    assert not equal_weights(first.weights, again.weights)
    assert not any(tensor.requires_grad for tensor in again.weights.values())


def test_donated_weights_give_the_same_result_in_the_same_memory() -> None:
    data = client(20, 2)
    backbone = model("gcn")
    inputs = stack_inputs([build_inputs(data, backbone, data.train)] * 2)
    start = train_locally(backbone, get_weights(backbone), None, inputs, epochs=2, lr=0.1)
    kept = train_locally(backbone, start.weights, start.optimizer_state, inputs, epochs=2, lr=0.1)
    given = train_locally(backbone, start.weights, start.optimizer_state, inputs, epochs=2, lr=0.1, donate=True)
    assert equal_weights(kept.weights, given.weights) and equal_weights(
        kept.optimizer_state.second, given.optimizer_state.second
    )
    assert all(given.weights[name].data_ptr() == start.weights[name].data_ptr() for name in start.weights)


def test_epochs_compose() -> None:
    """Two calls of two steps are one call of four, given the state."""
    data = client(20, 3)
    backbone = model("sage")
    inputs = build_inputs(data, backbone, data.train)
    half = train_locally(backbone, get_weights(backbone), None, inputs, epochs=2, lr=0.05)
    twice = train_locally(backbone, half.weights, half.optimizer_state, inputs, epochs=2, lr=0.05)
    once = train_locally(backbone, get_weights(backbone), None, inputs, epochs=4, lr=0.05)
    assert equal_weights(twice.weights, once.weights)
    reset = train_locally(backbone, half.weights, None, inputs, epochs=2, lr=0.05)
    assert not equal_weights(reset.weights, once.weights)


@pytest.mark.parametrize(
    "names", [("layers.0.weight",), ("layers.1.weight", "layers.1.bias"), ("input_norm.gamma", "input_norm.beta")]
)
def test_frozen_parameters_stay(names: tuple[str, ...]) -> None:
    data = client(20, 4)
    backbone = model("gcn", input_norm=True)
    inputs = build_inputs(data, backbone, data.train)
    start = jittered(backbone, 3, torch.float32)
    end = train_locally(backbone, start, None, inputs, epochs=3, lr=0.1, weight_decay=0.1, frozen=names)
    for name in start:
        assert torch.equal(start[name], end.weights[name]) == (name in names)
    assert set(end.optimizer_state.first) == set(start) - set(names)
    free, _ = gradients(backbone, start, inputs)
    held, _ = gradients(backbone, start, inputs, frozen=names)
    assert equal_weights(held, {name: grad for name, grad in free.items() if name not in names})


def test_proximal_term() -> None:
    data = client(20, 5)
    backbone = model("gcn")
    inputs = build_inputs(data, backbone, data.train, dtype=torch.float64)
    start = {name: tensor.double() for name, tensor in get_weights(backbone).items()}
    common = {"epochs": 1, "lr": 0.1, "optimizer": "sgd"}
    # At the anchor the term has no gradient: the first step is FedAvg's, bit for bit.
    assert equal_weights(
        train_locally(backbone, start, None, inputs, extra_gradient=Proximal(10.0, start), **common).weights,
        train_locally(backbone, start, None, inputs, **common).weights,
    )
    anchor = jittered(backbone, 6)
    grads, _ = gradients(backbone, start, inputs)
    end = train_locally(backbone, start, None, inputs, extra_gradient=Proximal(0.5, anchor), **common).weights
    expected = {name: start[name] - 0.1 * (grads[name] + 0.5 * (start[name] - anchor[name])) for name in start}
    assert max_difference(end, expected) < 1e-14


def test_double_softmax_by_hand() -> None:
    data = client(12, 6)
    backbone = model("mlp")
    inputs = build_inputs(data, backbone, data.train, dtype=torch.float64)
    logits = torch.randn(len(inputs.y), 3, dtype=torch.float64, generator=Stream(1).torch())
    twice = torch.softmax(torch.softmax(logits, 1), 1)[torch.arange(len(logits)), inputs.y]
    assert abs(float(get_loss("double_softmax").value(logits, inputs)) + float(twice.log().mean())) < 1e-14
    once = torch.softmax(logits, 1)[torch.arange(len(logits)), inputs.y]
    assert abs(float(get_loss("ce").value(logits, inputs)) + float(once.log().mean())) < 1e-14


def test_dropout_mask() -> None:
    """The share of zeros is the rate, kept values are scaled so that the mean stays, padding draws nothing."""
    source = DropoutSource([Stream(0, (k,)).torch() for k in range(2)])
    mask = source.mask((3000, 1000), 3000, 10, 0.3, torch.float64).view(2, 3000, 10)
    values = mask[0].unique()
    assert values.tolist() == pytest.approx([0.0, 1 / 0.7], abs=1e-4)
    assert abs(float((mask[0] == 0).double().mean()) - 0.3) < 0.01
    for column in range(10):
        assert abs(float((mask[0, :, column] == 0).double().mean()) - 0.3) < 0.04
    lone = DropoutSource([Stream(0, (1,)).torch()]).mask((1000,), 1000, 10, 0.3, torch.float64)
    assert torch.equal(mask[1, :1000], lone)
    assert not torch.equal(mask[0, :1000], lone)


def test_dropout_acts_in_training_only_and_repeats_with_its_stream() -> None:
    data = client(20, 7)
    backbone = model("gcn", dropout=0.6)
    inputs = build_inputs(data, backbone, data.train)
    weights = get_weights(backbone)

    def end(seed: int | None) -> dict[str, torch.Tensor]:
        source = None if seed is None else DropoutSource([Stream(seed).torch()])
        return train_locally(backbone, weights, None, inputs, epochs=2, lr=0.1, dropout=source).weights

    assert equal_weights(end(1), end(1))
    assert not equal_weights(end(1), end(2)) and not equal_weights(end(1), end(None))
    with pytest.raises(ConfigError, match="one generator per client"):
        train_locally(backbone, weights, None, inputs, epochs=1, lr=0.1, dropout=DropoutSource([]))


def test_mistakes_are_named() -> None:
    data = client(20, 8)
    backbone = model("gcn")
    inputs = build_inputs(data, backbone, data.train)
    weights = get_weights(backbone)
    with pytest.raises(ConfigError, match="did you mean 'adam'"):
        train_locally(backbone, weights, None, inputs, epochs=1, lr=0.1, optimizer="adm")
    with pytest.raises(ConfigError, match="unknown loss"):
        train_locally(backbone, weights, None, inputs, epochs=1, lr=0.1, loss="mse")
    with pytest.raises(ConfigError, match="epochs"):
        train_locally(backbone, weights, None, inputs, epochs=-1, lr=0.1)
    with pytest.raises(ProtocolError, match="missing"):
        train_locally(backbone, {}, None, inputs, epochs=1, lr=0.1)
    wrong = weights | {"layers.1.bias": torch.zeros(9)}
    with pytest.raises(ProtocolError, match=r"layers\.1\.bias"):
        train_locally(backbone, wrong, None, inputs, epochs=1, lr=0.1)
    assert fresh_state("sgd", weights) == OptimizerState((0,), {}, {})


def test_what_does_not_fit_is_refused_before_compiled_loops_run() -> None:
    """They check no bounds: a wrong shape would read foreign memory."""
    data = client(20, 8)
    backbone, other = model("gcn"), model("gcn", hidden=(7,))
    inputs = build_inputs(data, backbone, data.train)
    weights, options = get_weights(backbone), {"epochs": 1, "lr": 0.1}
    adam = train_locally(backbone, weights, None, inputs, **options).optimizer_state
    foreign = train_locally(other, get_weights(other), None, inputs, **options).optimizer_state
    for state, optimizer in ((foreign, "adam"), (OptimizerState((1,), {}, {}), "adam"), (adam, "sgd")):
        with pytest.raises(ProtocolError, match="optimiser state"):
            train_locally(backbone, weights, state, inputs, optimizer=optimizer, **options)
    with pytest.raises(ProtocolError, match="anchor"):
        train_locally(backbone, weights, None, inputs, extra_gradient=Proximal(1.0, get_weights(other)), **options)
    with pytest.raises(ProtocolError, match="float64"):
        train_locally(backbone, {name: tensor.double() for name, tensor in weights.items()}, None, inputs, **options)
    narrow = build_backbone("gcn", num_features=5, num_classes=3, stream=Stream(0))
    with pytest.raises(ProtocolError, match="do not fit"):
        train_locally(narrow, get_weights(narrow), None, inputs, **options)
    few = build_backbone("gcn", num_features=NUM_FEATURES, num_classes=2, stream=Stream(0))
    with pytest.raises(DataError, match="2 classes"):
        train_locally(few, get_weights(few), None, inputs, **options)
    with pytest.raises(DataError, match="negative"):
        build_inputs(replace(data, y=data.y - 1), backbone, data.train)
