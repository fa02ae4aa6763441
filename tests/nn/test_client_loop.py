"""The compiled loop of a client's epochs against the loop that takes its steps one by one, and clients that share idle
rows against clients each by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nn_helpers import client, jittered, model

from isthmus.nn import DropoutSource, Proximal, build_inputs, train_locally
from isthmus.nn import train as steps
from isthmus.nn.client_program import build_program, program_of
from isthmus.nn.client_stack import ClientStack
from isthmus.nn.client_training import aim_of
from isthmus.nn.loss import distilled
from isthmus.nn.optim import fresh_state
from isthmus.nn.train import TrainResult
from isthmus.seeds import Stream
from isthmus.tensors import max_difference

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gcn", {}, {"optimizer": "adam"}),
    ("gcn", {"hidden": (3, 7)}, {"optimizer": "adamw", "loss": "double_softmax"}),
    ("gcn", {"input_norm": True, "head": True}, {"optimizer": "adam"}),
    ("sage", {"hidden": (4, 2)}, {"optimizer": "adam"}),
    ("sage", {"input_norm": True}, {"optimizer": "sgd"}),
    ("mlp", {"hidden": (6, 4), "input_norm": True}, {"optimizer": "adamw"}),
    ("mlp", {"head": True}, {"optimizer": "sgd"}),
    ("sgc", {}, {"optimizer": "adam"}),
    ("gcn", {"hidden": (3, 7)}, {"optimizer": "adam", "loss": "soft labels"}),
]


def call(kind: str, shape: dict[str, Any], settings: dict[str, Any], *, pull: bool, seed: int = 0) -> TrainResult:
    """Two calls of three steps, each with dropout."""
    data = client(25, 5 + seed, density=0.08, num_edges=15)
    backbone = model(kind, dropout=0.4, **shape).double()
    inputs = build_inputs(data, backbone, data.train, dtype=torch.float64)
    weights, state = jittered(backbone, 1), None
    anchor = jittered(backbone, 2)
    anchor.pop("layers.0.bias")
    result = None
    if settings.get("loss") == "soft labels":
        generator = torch.Generator().manual_seed(seed)
        targets = torch.softmax(torch.randn(len(inputs.y), data.num_classes, generator=generator).double(), dim=-1)
        weight = torch.arange(len(inputs.y)).double() % 3 / 10  # zero for some
        settings = {**settings, "loss": distilled(targets, weight, inputs)}
    for round in range(2):
        result = train_locally(
            backbone,
            weights,
            state,
            inputs,
            epochs=3,
            lr=0.05,
            weight_decay=0.02,
            dropout=DropoutSource([Stream(round).torch()]),
            extra_gradient=Proximal(0.3, anchor) if pull else None,
            **settings,
        )
        weights, state = result.weights, result.optimizer_state
    assert result is not None
    return result


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize(("kind", "shape", "settings"), CASES)
def test_equals_steps_taken_one_by_one(
    kind: str, shape: dict[str, Any], settings: dict[str, Any], pull: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    monkeypatch.setattr(steps, "train_client", lambda *a, f=steps.train_client, **k: used.append(1) or f(*a, **k))
    fast = call(kind, shape, settings, pull=pull)
    assert used
    monkeypatch.setattr(steps, "_whole_call", lambda *_: None)
    slow = call(kind, shape, settings, pull=pull)
    assert max_difference(fast.weights, slow.weights) < 1e-10
    assert max_difference(fast.optimizer_state.first, slow.optimizer_state.first) < 1e-10
    assert max_difference(fast.optimizer_state.second, slow.optimizer_state.second) < 1e-10
    assert fast.optimizer_state.steps == slow.optimizer_state.steps == (6,)
    assert torch.allclose(fast.loss, slow.loss, atol=1e-12)
    assert list(fast.weights) == list(slow.weights)


def test_weights_that_are_frozen_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = {"frozen": ("layers.1.weight", "layers.0.bias")}
    fast = call("gcn", {}, {"optimizer": "adam", **frozen}, pull=False)
    start = jittered(model("gcn", dropout=0.4).double(), 1)
    assert all(torch.equal(fast.weights[name], start[name]) for name in frozen["frozen"])
    monkeypatch.setattr(steps, "_whole_call", lambda *_: None)
    slow = call("gcn", {}, {"optimizer": "adam", **frozen}, pull=False)
    assert max_difference(fast.weights, slow.weights) < 1e-10


def test_what_the_loop_does_not_know_is_left_to_others() -> None:
    data = client(20, 1)
    for kind in ("gat", "gprgnn"):
        backbone = model(kind)
        assert program_of(backbone, build_inputs(data, backbone, data.train)) is None
    dense = client(20, 1, density=0.9)
    backbone = model("mlp")
    assert program_of(backbone, build_inputs(dense, backbone, dense.train)) is None


class Together:
    """Clients in a stack, and the same clients each by itself."""

    def __init__(self, kind: str, optimizer: str, **shape: Any) -> None:
        self.data = [client(size, 7 + size, density=0.06, train=0.3) for size in (12, 30, 7, 18)]
        self.data.append(client(9, 3, train=0.0))
        self.model = model(kind, dropout=0.3, **shape).double()
        self.inputs = [build_inputs(data, self.model, data.train, dtype=torch.float64) for data in self.data]
        self.common: dict[str, torch.Tensor] = dict(jittered(self.model, 4))
        self.optimizer = optimizer
        self.alone = [(self.common, fresh_state(optimizer, self.common)) for _ in self.data]
        program = build_program(self.model, self.inputs, compact=True)
        assert program is not None
        self.stack = ClientStack(program, *zip(*self.alone, strict=True))
        self.shares = torch.tensor([0.3, 0.1, 0.25, 0.2, 0.15], dtype=torch.float64)

    def round(self, number: int, chosen: list[int], *, mu: float = 0.0, shared: str = "") -> None:
        received = {name: tensor for name, tensor in self.common.items() if name.startswith(shared)}
        options: dict[str, Any] = {"epochs": 2, "lr": 0.05, "weight_decay": 0.1, "optimizer": self.optimizer}
        streams = [Stream(number, (k,)) for k in range(len(self.data))]
        for k in chosen:
            weights, state = self.alone[k]
            term = Proximal(mu, received) if mu else None
            result = train_locally(
                self.model,
                {**weights, **received},
                state,
                self.inputs[k],
                dropout=DropoutSource([streams[k].torch()]),
                extra_gradient=term,
                **options,
            )
            self.alone[k] = (result.weights, result.optimizer_state)
        shares = self.shares[chosen]
        self.stack.train(
            received,
            pull=(mu, received) if mu else None,
            trained=self.stack.names,
            dropout=DropoutSource([streams[k].torch() for k in chosen]),
            aim=aim_of("ce", self.stack.program, torch.clone)[0],
            clients=chosen,
            shares=shares,
            **options,
        )
        for name in received:
            total = sum(float(share) * self.alone[k][0][name] for share, k in zip(shares, chosen, strict=True))
            assert isinstance(total, torch.Tensor)
            found = self.stack.total(name, shares, chosen)
            assert torch.allclose(found, total, atol=1e-10)
            later = self.stack.total(name, shares.clone(), chosen)
            assert torch.equal(found, later), "added up while training, or after"
            self.common[name] = total / float(shares.sum())

    def check(self) -> None:
        for k, (weights, state) in enumerate(self.alone):
            mine, optimizer = self.stack.client(k)
            assert max_difference(mine, weights) < 1e-10
            assert max_difference(optimizer.first, state.first) < 1e-10
            assert max_difference(optimizer.second, state.second) < 1e-10
            assert optimizer.steps == state.steps
        stacked = self.stack.weights()
        assert all(
            torch.equal(stacked[name][k], self.stack.row(name, k)) for name in stacked for k in range(len(self.data))
        )


@pytest.mark.parametrize("mu", [0.0, 0.4])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_clients_that_share_idle_rows_equal_clients_alone(kind: str, optimizer: str, mu: float) -> None:
    everyone = list(range(5))
    together = Together(kind, optimizer)
    for number in range(3):
        together.round(number, everyone, mu=mu)
    together.check()
    assert len(together.stack.idle[0]) == 1
    active = sum(len(part[0]) for part in together.stack.program.active)
    assert together.stack.rows[0].shape[0] == active < 5 * len(together.stack.program.first) * 12


def test_clients_that_sat_out_a_round_are_a_group_of_their_own() -> None:
    together = Together("gcn", "adam")
    everyone = list(range(5))
    together.round(0, everyone)
    together.round(1, [0, 2])
    assert len(together.stack.idle[0]) == 2
    assert together.stack.group.tolist() == [1, 0, 1, 0, 0]
    together.round(2, [0, 2])
    together.round(3, [1, 2, 4])
    together.round(4, everyone)
    together.check()
    assert len(together.stack.idle[0]) == 4


def test_weights_that_stay_at_home_are_kept() -> None:
    together = Together("sage", "adam")
    for number in range(2):
        together.round(number, list(range(5)), shared="layers.0.")
    together.check()
    ones = {"layers.0.bias": torch.ones(5, dtype=torch.float64)}
    together.stack.receive(ones)
    together.alone = [({**weights, **ones}, state) for weights, state in together.alone]
    together.check()
    together.round(2, list(range(5)), shared="layers.1.")
    together.check()


def test_states_of_other_histories_are_found_in_groups() -> None:
    """A run that goes on from checkpoints: the stack is made of full states."""
    together = Together("gcn", "adam")
    together.round(0, list(range(5)))
    together.round(1, [1, 3])
    program = together.stack.program
    again = ClientStack(program, *zip(*(together.stack.client(k) for k in range(5)), strict=True))
    assert len(again.idle[0]) == 2
    for k in range(5):
        assert max_difference(again.client(k)[0], together.stack.client(k)[0]) == 0.0
        assert max_difference(again.client(k)[1].second, together.stack.client(k)[1].second) == 0.0


def test_input_norm_leaves_no_row_idle() -> None:
    together = Together("gcn", "adam", input_norm=True)
    for number in range(2):
        together.round(number, list(range(5)))
    together.check()
    assert all(not len(rows) for rows in together.stack.program.idle)


def test_a_fresh_optimiser_forgets_its_steps() -> None:
    together = Together("gcn", "adam")
    together.round(0, list(range(5)))
    together.stack.restart()
    together.alone = [(weights, fresh_state("adam", weights)) for weights, _ in together.alone]
    together.round(1, list(range(5)))
    together.check()
    assert np.unique(together.stack.steps).tolist() == [2]
