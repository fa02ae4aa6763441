"""A cohort ends where its clients end one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_helpers import client, jittered, model, uneven_clients

from isthmus.data.node_data import NodeData
from isthmus.errors import ProtocolError
from isthmus.nn import (
    Backbone,
    DropoutSource,
    TrainResult,
    build_inputs,
    gradients,
    predict,
    stack_inputs,
    stack_states,
    stack_weights,
    train_locally,
    unstack_states,
    unstack_weights,
)
from isthmus.seeds import Stream
from isthmus.tensors import equal_weights, get_weights, max_difference

VARIANTS = [
    ("gcn", (5,), False, False),
    ("gcn", (6, 4), False, True),
    ("sage", (5,), False, False),
    ("sage", (6, 4), True, True),
    ("mlp", (5,), False, False),
    ("mlp", (6, 4), True, True),
]


def generators(count: int, round: int) -> list[torch.Generator]:
    return [Stream(3, (k, round, "dropout")).torch() for k in range(count)]


def both_ways(
    clients: list[NodeData], backbone: Backbone, dtype: torch.dtype, rounds: int, **options: Any
) -> tuple[list[TrainResult], TrainResult]:
    """Every client alone, and all together, each from its own weights; optimiser states carried from round to round."""
    starts = [jittered(backbone, 20 + k, dtype) for k in range(len(clients))]
    items = [build_inputs(data, backbone, data.train, dtype=dtype) for data in clients]
    alone = []
    for k, (start, item) in enumerate(zip(starts, items, strict=True)):
        result = TrainResult(start, None, torch.zeros(1))  # type: ignore[arg-type]
        for r in range(rounds):
            source = DropoutSource([generators(len(clients), r)[k]])
            result = train_locally(backbone, result.weights, result.optimizer_state, item, dropout=source, **options)
        alone.append(result)
    together = TrainResult(stack_weights(starts), None, torch.zeros(1))  # type: ignore[arg-type]
    stacked = stack_inputs(items)
    for r in range(rounds):
        source = DropoutSource(generators(len(clients), r))
        together = train_locally(
            backbone, together.weights, together.optimizer_state, stacked, dropout=source, **options
        )
    return alone, together


def assert_same(alone: list[TrainResult], together: TrainResult, tolerance: float) -> None:
    for k, weights in enumerate(unstack_weights(together.weights)):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
        assert max_difference(weights, alone[k].weights) < tolerance
        assert abs(float(together.loss[k] - alone[k].loss[0])) < tolerance
    for one, state in zip(alone, unstack_states(together.optimizer_state), strict=True):
        assert one.optimizer_state.steps == state.steps
        assert max_difference(one.optimizer_state.first, state.first) < tolerance


@pytest.mark.parametrize(("kind", "hidden", "input_norm", "head"), VARIANTS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("loss", ["ce", "double_softmax"])
def test_equals_each_in_float64(
    kind: str, hidden: tuple[int, ...], input_norm: bool, head: bool, optimizer: str, loss: str
) -> None:
    backbone = model(kind, hidden=hidden, input_norm=input_norm, head=head, dropout=0.4)
    alone, together = both_ways(
        uneven_clients(),
        backbone,
        torch.float64,
        10,
        epochs=2,
        lr=0.02,
        weight_decay=5e-4,
        optimizer=optimizer,
        loss=loss,
    )
    assert_same(alone, together, 1e-10)


@pytest.mark.parametrize(("kind", "hidden", "input_norm", "head"), VARIANTS)
def test_equals_each_in_float32_after_one_round(
    kind: str, hidden: tuple[int, ...], input_norm: bool, head: bool
) -> None:
    backbone = model(kind, hidden=hidden, input_norm=input_norm, head=head, dropout=0.5)
    alone, together = both_ways(uneven_clients(), backbone, torch.float32, 1, epochs=3, lr=0.01, weight_decay=5e-4)
    assert_same(alone, together, 1e-5)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 25), st.sampled_from([0.0, 0.3, 1.1])), min_size=1, max_size=5
    ),
    kind=st.sampled_from(["gcn", "sage", "mlp"]),
    input_norm=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_each_on_any_clients(
    sizes: list[tuple[int, int, float]], kind: str, input_norm: bool, seed: int
) -> None:
    clients = [client(n, seed + k, num_edges=e, train=share) for k, (n, e, share) in enumerate(sizes)]
    backbone = model(kind, hidden=(4,), input_norm=input_norm, dropout=0.3)
    alone, together = both_ways(clients, backbone, torch.float64, 2, epochs=2, lr=0.02, weight_decay=1e-3)
    if len(clients) > 1:
        assert_same(alone, together, 1e-10)
    else:
        assert max_difference({n: t[0] for n, t in together.weights.items()}, alone[0].weights) < 1e-10


def test_client_without_training_rows_has_no_loss_and_no_gradient() -> None:
    clients = uneven_clients()
    backbone = model("gcn")
    weights = jittered(backbone, 1)
    inputs = stack_inputs([build_inputs(data, backbone, data.train, dtype=torch.float64) for data in clients])
    grads, loss = gradients(backbone, weights, inputs)
    assert float(loss[3]) == 0.0 and bool((loss[[0, 1, 2, 4, 5]] > 0).all())
    assert all(not bool(grad[3].any()) for grad in grads.values())
    alone, lone_loss = gradients(
        backbone, weights, build_inputs(clients[3], backbone, clients[3].train, dtype=torch.float64)
    )
    assert float(lone_loss) == 0.0 and all(not bool(grad.any()) for grad in alone.values())


def test_gradients_of_a_cohort_from_common_weights() -> None:
    clients = uneven_clients()
    backbone = model("sage", input_norm=True, head=True)
    weights = jittered(backbone, 2)
    items = [build_inputs(data, backbone, data.train, dtype=torch.float64) for data in clients]
    grads, losses = gradients(backbone, weights, stack_inputs(items))
    for k, item in enumerate(items):
        alone, loss = gradients(backbone, weights, item)
        assert max_difference({name: grad[k] for name, grad in grads.items()}, alone) < 1e-12
        assert abs(float(losses[k] - loss)) < 1e-12


def test_clients_of_a_cohort_do_not_influence_each_other() -> None:
    """Change one client's data: the others' weights do not move by a bit."""
    backbone = model("gcn")
    clients = uneven_clients()
    changed = [*clients[:4], client(14, 99, density=0.9), clients[5]]
    ends = []
    for group in (clients, changed):
        inputs = stack_inputs([build_inputs(data, backbone, data.train, restrict=False) for data in group])
        ends.append(train_locally(backbone, get_weights(backbone), None, inputs, epochs=3, lr=0.01).weights)
    first, second = (unstack_weights(weights) for weights in ends)
    assert [equal_weights(a, b) for a, b in zip(first, second, strict=True)] == [True, True, True, True, False, True]


@pytest.mark.parametrize(("kind", "hidden", "input_norm", "head"), VARIANTS)
def test_predictions(kind: str, hidden: tuple[int, ...], input_norm: bool, head: bool) -> None:
    """Stacked weights, plain weights, single clients: the same logits."""
    clients = uneven_clients()
    backbone = model(kind, hidden=hidden, input_norm=input_norm, head=head, dropout=0.5)
    items = [build_inputs(data, backbone, dtype=torch.float64) for data in clients]
    inputs = stack_inputs(items)
    own = [jittered(backbone, k) for k in range(len(clients))]
    for plain, per_client in ((None, own), (own[0], [own[0]] * len(clients))):
        found = inputs.split(predict(backbone, stack_weights(per_client) if plain is None else plain, inputs))
        for data, logits, weights, item in zip(clients, found, per_client, items, strict=True):
            assert logits.shape == (data.num_nodes, 3)
            torch.testing.assert_close(logits, predict(backbone, weights, item), rtol=0, atol=1e-12)


def test_common_start_equals_stacked_start() -> None:
    backbone = model("gcn")
    inputs = stack_inputs([build_inputs(data, backbone, data.train) for data in uneven_clients()])
    weights = get_weights(backbone)
    plain = train_locally(backbone, weights, None, inputs, epochs=2, lr=0.01)
    stacked = train_locally(backbone, stack_weights([weights] * 6), None, inputs, epochs=2, lr=0.01)
    assert equal_weights(plain.weights, stacked.weights)


def test_clients_that_sat_out_keep_their_own_step_count() -> None:
    """Bias correction goes by each client's own number of steps."""
    backbone = model("gcn")
    clients = uneven_clients()[:3]
    items = [build_inputs(data, backbone, data.train, dtype=torch.float64) for data in clients]
    start = jittered(backbone, 6)
    veteran = train_locally(backbone, start, None, items[1], epochs=5, lr=0.02).optimizer_state
    fresh = [train_locally(backbone, start, None, item, epochs=0, lr=0.02).optimizer_state for item in items]
    states = [fresh[0], veteran, fresh[2]]
    assert stack_states(states).steps == (0, 5, 0)
    together = train_locally(
        backbone, start, stack_states(states), stack_inputs(items), epochs=2, lr=0.02, weight_decay=1e-3
    )
    for k, (state, item) in enumerate(zip(states, items, strict=True)):
        alone = train_locally(backbone, start, state, item, epochs=2, lr=0.02, weight_decay=1e-3)
        assert max_difference(unstack_weights(together.weights)[k], alone.weights) < 1e-12
    assert together.optimizer_state.steps == (2, 7, 2)


def test_stacking_views_of_a_stack_copies_nothing() -> None:
    weights = {"a": torch.randn(4, 3, 2), "b": torch.randn(4, 5)}
    again = stack_weights(unstack_weights(weights))
    assert equal_weights(weights, again)
    assert all(again[name].data_ptr() == weights[name].data_ptr() for name in weights)
    backwards = stack_weights(unstack_weights(weights)[::-1])
    assert equal_weights(backwards, {name: tensor.flip(0) for name, tensor in weights.items()})
    assert backwards["a"].data_ptr() != weights["a"].data_ptr()


def test_state_of_another_number_of_clients_is_refused() -> None:
    backbone = model("gcn")
    inputs = stack_inputs([build_inputs(data, backbone, data.train) for data in uneven_clients()])
    state = train_locally(backbone, get_weights(backbone), None, inputs, epochs=0, lr=0.1).optimizer_state
    single = build_inputs(client(5, 1), backbone, client(5, 1).train)
    with pytest.raises(ProtocolError, match="6 clients given, inputs of 1"):
        train_locally(backbone, get_weights(backbone), state, single, epochs=1, lr=0.1)
