"""Weights: copies, means in a given order, bit equality."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from isthmus.errors import ProtocolError
from isthmus.tensors import (
    check_same_names,
    equal_weights,
    get_weights,
    max_difference,
    num_values,
    scaled,
    weighted_mean,
)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))


def test_get_gives_copies() -> None:
    model = _model()
    weights = get_weights(model)
    assert list(weights) == ["0.weight", "0.bias", "1.weight"] and num_values(weights) == 6 + 3 + 3
    before = {name: tensor.clone() for name, tensor in weights.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert equal_weights(weights, before)
    assert not any(tensor.requires_grad for tensor in weights.values())


def test_names_are_listed() -> None:
    with pytest.raises(ProtocolError, match=r"missing \['a'\], unexpected \['c'\]"):
        check_same_names(["a", "b"], ["b", "c"])
    check_same_names(["a", "b"], ["b", "a"])


def test_scaled_and_mean() -> None:
    a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}
    assert torch.equal(scaled(a, 2.0)["w"], torch.tensor([2.0, 4.0]))
    assert torch.equal(weighted_mean([a, b], [0.25, 0.75])["w"], torch.tensor([2.5, 5.0]))
    assert torch.equal(a["w"], torch.tensor([1.0, 2.0])) and torch.equal(b["w"], torch.tensor([3.0, 6.0]))
    one = weighted_mean([a], [1.0])
    one["w"].add_(1.0)
    assert torch.equal(a["w"], torch.tensor([1.0, 2.0]))


def test_a_mean_of_weights_that_do_not_fit() -> None:
    a = {"w": torch.zeros(2, 2)}
    for other in ({"w": torch.zeros(2)}, {"w": torch.zeros(())}, {"v": torch.zeros(2, 2)}, {}):
        with pytest.raises(ProtocolError):
            weighted_mean([a, other], [0.5, 0.5])
    with pytest.raises(ProtocolError, match="at least one"):
        weighted_mean([], [])
    with pytest.raises(ValueError, match="zip"):
        weighted_mean([a, a], [1.0])


def test_bit_equality() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert equal_weights({"w": nan}, {"w": nan.clone()})
    assert not equal_weights({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])})
    assert not equal_weights({"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.float64)})
    assert not equal_weights({"w": torch.zeros(2)}, {"w": torch.zeros(2, 1)})
    assert not equal_weights({"w": torch.zeros(2)}, {"v": torch.zeros(2)})
    assert not equal_weights({"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0000001])})
    assert equal_weights(
        {"w": torch.arange(6.0).reshape(2, 3).t()}, {"w": torch.arange(6.0).reshape(2, 3).t().contiguous()}
    )
    assert equal_weights({"w": torch.tensor(1.0)}, {"w": torch.ones(2, 2)[0, ::2].squeeze()})
    assert equal_weights({}, {}) and equal_weights({"w": torch.zeros(0)}, {"w": torch.zeros(0)})


def test_max_difference() -> None:
    a, b = {"v": torch.tensor([1.0, 2.0]), "w": torch.zeros(0)}, {"v": torch.tensor([1.5, 1.0]), "w": torch.zeros(0)}
    assert max_difference(a, b) == 1.0 and max_difference(a, a) == 0.0 and max_difference({}, {}) == 0.0
    with pytest.raises(ProtocolError):
        max_difference(a, {"v": b["v"]})
    with pytest.raises(ProtocolError):
        max_difference({"v": torch.zeros(2)}, {"v": torch.zeros(1)})
    for order in (("x", "y"), ("y", "x")):  # a NaN is not lost, wherever it stands
        first = dict(zip(order, (torch.tensor([float("nan")]), torch.tensor([3.0])), strict=True))
        assert math.isnan(max_difference(first, {"x": torch.zeros(1), "y": torch.zeros(1)}))
