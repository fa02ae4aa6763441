"""Manual gradients against autograd, with dropout, for one channel and two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_helpers import graph_set
from torch.func import functional_call

from isthmus.data.embeddings import structure_embedding
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.gin_gradients import _tanh, gin_gradients, gin_logits, has_manual_gradient
from isthmus.nn.graph_batch import Batch, pack_graphs
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.graph_train import autograd_gradients
from isthmus.nn.loss import get_loss
from isthmus.nn.registry import build_graph_model
from isthmus.nn.two_channel import TwoChannel
from isthmus.seeds import Stream
from isthmus.tensors import get_weights, max_difference

SHAPE: dict[str, Any] = {"num_features": 6, "num_classes": 3, "dropout": 0.4, "stream": Stream(3)}


def model_of(kind: str, hidden: tuple[int, ...] = (6, 5, 7)) -> GraphModel:
    if kind == "one":
        return build_graph_model("gin", hidden=hidden, **SHAPE).double()
    return TwoChannel("gin", "gcn", num_structure=8, hidden=hidden, **SHAPE).double()


def batch_of(seed: int, *, dtype: torch.dtype = torch.float64, **options: Any) -> Batch:
    data = graph_set(seed, **options)
    pack = pack_graphs(data, extra={"s": structure_embedding(data, "dse+rwse", 4, 4)}, dtype=dtype)
    return pack.batch(torch.randperm(data.num_graphs, generator=torch.Generator().manual_seed(seed)))


def source(seed: int) -> DropoutSource:
    return DropoutSource([torch.Generator().manual_seed(seed)])


@pytest.mark.parametrize("kind", ["one", "two"])
@pytest.mark.parametrize("loss", ["ce", "double_softmax"])
@pytest.mark.parametrize(
    "options", [{}, {"one_hot": True}, {"undirected": False}, {"sizes": (1, 0, 2)}, {"without_edges": tuple(range(9))}]
)
@pytest.mark.parametrize("dropped", [False, True])
def test_they_are_autograds(kind: str, loss: str, options: dict[str, Any], dropped: bool) -> None:
    model, batch = model_of(kind), batch_of(1, **options)
    weights, share = (
        get_weights(model),
        torch.rand(batch.num_graphs, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    assert has_manual_gradient(model, batch)
    ours, value = gin_gradients(model, weights, batch, share, get_loss(loss), source(7) if dropped else None)
    theirs, wanted = autograd_gradients(
        model, weights, list(weights), batch, share, get_loss(loss), source(7) if dropped else None
    )
    assert value == pytest.approx(wanted, rel=1e-12) and max_difference(ours, theirs) < 1e-12
    assert list(ours) == list(weights)


@pytest.mark.parametrize("hidden", [(4,), (3, 3)])
def test_any_depth(hidden: tuple[int, ...]) -> None:
    for kind in ("one", "two"):
        model, batch = model_of(kind, hidden), batch_of(2)
        weights, share = get_weights(model), torch.ones(batch.num_graphs, dtype=torch.float64)
        ours, _ = gin_gradients(model, weights, batch, share, get_loss("ce"), None)
        assert (
            max_difference(
                ours, autograd_gradients(model, weights, list(weights), batch, share, get_loss("ce"), None)[0]
            )
            < 1e-12
        )


def test_in_single_precision_to_rounding() -> None:
    model, batch = model_of("two").float(), batch_of(3, dtype=torch.float32)
    weights, share = get_weights(model), torch.ones(batch.num_graphs) / batch.num_graphs
    ours, _ = gin_gradients(model, weights, batch, share, get_loss("ce"), source(1))
    assert (
        max_difference(
            ours, autograd_gradients(model, weights, list(weights), batch, share, get_loss("ce"), source(1))[0]
        )
        < 1e-5
    )


def test_tanh_in_single_precision() -> None:
    z = torch.cat([torch.linspace(-12, 12, 20_001), torch.logspace(-30, 1, 300), -torch.logspace(-30, 1, 299)]).view(
        -1, 8
    )
    bias, out = torch.linspace(-1, 1, 8), torch.full((z.shape[0], 11), 5.0)
    _tanh(z.clone(), bias, out)
    exact = torch.tanh((z + bias).double())
    torch.testing.assert_close(out[:, 3:].double(), exact, rtol=4e-7, atol=0.0)
    assert (out[:, :3] == 5).all()  # the other channel's columns
    special = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0]])
    _tanh(special.clone(), torch.zeros(4), out := torch.empty(1, 4))
    assert out[0, 0].isnan() and out[0, 1:].tolist() == pytest.approx([1.0, -1.0, 0.0], abs=3e-7)


def test_other_models_are_left_to_autograd() -> None:
    batch = batch_of(4)
    for name in ("gcn", "sage", "sgc", "mlp"):
        assert not has_manual_gradient(build_graph_model(name, hidden=(4, 4), **SHAPE).double(), batch)
    for pair in (("sage", "gcn"), ("gin", "gin"), ("sgc", "gcn")):
        assert not has_manual_gradient(TwoChannel(*pair, num_structure=8, hidden=(4, 4), **SHAPE).double(), batch)
    assert not has_manual_gradient(
        TwoChannel("gin", "gcn", num_structure=8, hidden=(4,), pooled=False, **SHAPE).double(), batch
    )


@pytest.mark.parametrize("kind", ["one", "two"])
def test_logits_are_those_of_forward(kind: str) -> None:
    model, batch = model_of(kind), batch_of(4)
    with torch.no_grad():
        wanted = functional_call(model, get_weights(model), (batch,))
    assert float((gin_logits(model, get_weights(model), batch) - wanted).abs().max()) < 1e-12
