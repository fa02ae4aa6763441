"""The two-channel model: against PyG's layers, and what each channel may see."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from graph_helpers import graph_set
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, global_add_pool

from isthmus.data.embeddings import structure_embedding
from isthmus.data.graph_set import GraphSetData
from isthmus.errors import ConfigError
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.graph_batch import Batch, node_batch, pack_graphs
from isthmus.nn.two_channel import TwoChannel
from isthmus.seeds import Stream
from isthmus.tensors import get_weights, num_values

CONVS = ("gcn", "gin", "sage")


def batch_of(data: GraphSetData, s: Tensor | None = None, graphs: list[int] | None = None) -> Batch:
    s = structure_embedding(data, "dse+rwse", 4, 4) if s is None else s
    pack = pack_graphs(data, extra={"s": s}, dtype=torch.float64)
    return pack.batch(torch.tensor(range(data.num_graphs) if graphs is None else graphs))


def model_of(features: str = "gin", structure: str = "gcn", **changes: Any) -> TwoChannel:
    shape: dict[str, Any] = {
        "num_features": 6,
        "num_classes": 3,
        "num_structure": 8,
        "hidden": (5, 5, 5),
        "stream": Stream(3),
    } | changes
    return TwoChannel(features, structure, **shape).double()


def turned(linear: nn.Linear, weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear.weight = nn.Parameter(weight.T.detach().clone())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear


def pyg_conv(conv: Any) -> nn.Module:
    """PyG's layer with our weights."""
    if hasattr(conv, "inner"):
        inner, outer = nn.Linear(*conv.inner.weight.shape), nn.Linear(*conv.outer.weight.shape)
        layer: Any = GINConv(nn.Sequential(inner, nn.ReLU(), outer))  # draws its weights anew
        turned(inner, conv.inner.weight, conv.inner.bias), turned(outer, conv.outer.weight, conv.outer.bias)
        return layer.double()
    if hasattr(conv, "neighbour"):
        layer = SAGEConv(*conv.root.shape).double()
        turned(layer.lin_l, conv.neighbour, conv.bias), turned(layer.lin_r, conv.root)
        return layer
    layer = GCNConv(*conv.weight.shape).double()
    turned(layer.lin, conv.weight)
    layer.bias = nn.Parameter(conv.bias.detach().clone())
    return layer


def paper_logits(model: TwoChannel, data: GraphSetData, s: Tensor, x: Tensor) -> Tensor:
    """FedStar spec, section 2.2, with PyG's layers; the map after the channels is applied per node, before pooling."""
    h, g = model.pre(x), model.structure.embed(s)
    for features, structure in zip(model.convs, model.structure.convs, strict=True):
        h, g = (
            torch.relu(pyg_conv(features)(torch.cat([h, g], 1), data.edge_index)),
            torch.tanh(pyg_conv(structure)(g, data.edge_index)),
        )
    z = model.mix(torch.cat([h, g], 1))
    pooled = global_add_pool(z, data.batch, size=data.num_graphs)
    logits: Tensor = model.readout(torch.relu(model.post(pooled)))
    return logits


@pytest.mark.parametrize(("features", "structure"), product(CONVS, CONVS))
def test_logits_are_the_papers(features: str, structure: str) -> None:
    data = graph_set(1)
    s = structure_embedding(data, "dse+rwse", 4, 4)
    model = model_of(features, structure)
    assert torch.allclose(model(batch_of(data, s)), paper_logits(model, data, s.double(), data.x.double()), atol=1e-10)


@pytest.mark.parametrize(("features", "structure"), product(CONVS, CONVS))
def test_gradients_are_right(features: str, structure: str) -> None:
    data = graph_set(2, sizes=(4, 3, 0, 5))
    model, batch = model_of(features, structure, hidden=(3, 3)), batch_of(data)
    names = [name for name, _ in model.named_parameters()]
    values = tuple(parameter.detach().clone().requires_grad_() for parameter in model.parameters())
    assert torch.autograd.gradcheck(
        lambda *w: functional_call(model, dict(zip(names, w, strict=True)), (batch,)), values
    )


def test_dropout_comes_after_post_too() -> None:
    """With feature layers that put out nothing, nothing else can drop: the structure channel never does."""
    model, batch = model_of(dropout=0.5), batch_of(graph_set(4))
    with torch.no_grad():
        for parameter in model.convs.parameters():
            parameter.zero_()
        calm = model(batch)
        drawn = torch.stack([model(batch, DropoutSource([torch.Generator().manual_seed(i)])) for i in range(400)])
    assert not torch.equal(drawn[0], drawn[1])
    assert (drawn.mean(0) - calm).abs().max() < 5 * drawn.std(0).max() / 20  # of the mean of 400


def test_shared_part_has_14592_numbers_whatever_the_client() -> None:
    for shape in ({"num_features": 7, "num_classes": 2}, {"num_features": 492, "num_classes": 15}):
        model = TwoChannel("gin", "gcn", num_structure=32, stream=Stream(0), **shape)
        shared = {name: tensor for name, tensor in get_weights(model).items() if name.startswith(model.structure_part)}
        assert num_values(shared) == 14_592 == num_values(get_weights(model.structure))


def test_parts_of_the_model_do_not_overlap_and_cover_it() -> None:
    model = model_of()
    for name, _ in model.named_parameters():
        parts = (model.structure_part, model.feature_part, model.shape_bound)
        assert sum(name.startswith(part) for part in parts) == 1, name


def test_first_weights_of_the_structure_encoder_are_common_and_the_rest_is_not() -> None:
    first, second = (get_weights(model_of(stream=Stream(i), common=Stream(9))) for i in range(2))
    for name in first:
        if not name.endswith("convs.0.bias"):  # GCN's biases start at zero everywhere
            assert torch.equal(first[name], second[name]) == name.startswith("structure."), name


def test_the_structure_channel_is_blind_for_features() -> None:
    data = graph_set(3)
    other = replace(data, x=torch.randn(data.x.shape, generator=torch.Generator().manual_seed(0)))
    model = model_of()
    for a, b in zip(model.structure.states(batch_of(data)), model.structure.states(batch_of(other)), strict=True):
        assert torch.equal(a, b)
    assert not torch.allclose(model(batch_of(data)), model(batch_of(other)))


def test_structure_reaches_the_logits() -> None:
    data = graph_set(3)
    s = structure_embedding(data, "dse+rwse", 4, 4)
    model = model_of()
    moved = s.clone()
    moved[0, 0] += 0.1
    change = model(batch_of(data, moved)) - model(batch_of(data, s))
    assert float(change[0].detach().abs().max()) > 1e-6 and torch.equal(change[1:], torch.zeros_like(change[1:]))
    loss = model(batch_of(data, s)).square().sum()
    assert all(float(grad.abs().sum()) > 0.0 for grad in torch.autograd.grad(loss, list(model.structure.parameters())))


@pytest.mark.parametrize("features", CONVS)
def test_a_batch_is_its_graphs_one_by_one(features: str) -> None:
    data = graph_set(4)  # with a graph of no nodes, single nodes, and one without edges
    model = model_of(features)
    alone = torch.cat([model(batch_of(data, graphs=[g])) for g in range(data.num_graphs)])
    assert torch.allclose(model(batch_of(data)), alone, atol=1e-12)


def test_without_edges_gcn_is_a_perceptron_with_tanh_and_gin_its_root_term() -> None:
    data = graph_set(5, sizes=(4, 6), without_edges=(0, 1))
    s = structure_embedding(data, "dse+rwse", 4, 4)
    model = model_of()
    g = model.structure.embed(s.double())
    h = model.pre(data.x.double())
    for i, state in enumerate(model.structure.states(batch_of(data, s))):
        conv: Any = model.convs[i]
        h = torch.relu(conv.outer(torch.relu(conv.inner(torch.cat([h, g], 1)))))
        g = torch.tanh(g @ model.structure.convs[i].weight + model.structure.convs[i].bias)  # type: ignore[operator]
        assert torch.allclose(state, g, atol=1e-12)
    pooled = global_add_pool(model.mix(torch.cat([h, g], 1)), data.batch)
    assert torch.allclose(model(batch_of(data, s)), model.readout(torch.relu(model.post(pooled))), atol=1e-10)


def test_without_pooling_every_node_has_logits() -> None:
    data = graph_set(6, sizes=(9,))
    s = structure_embedding(data, "dse+rwse", 4, 4)
    pooled, flat = model_of(), model_of(pooled=False)
    labels = torch.tensor([0, 1, 2, -1, 0, 1, 2, 0, 1])
    batch = node_batch(data.x, data.edge_index, labels, 3, extra={"s": s}, dtype=torch.float64)
    assert flat(batch).shape == (9, 3) and batch.y.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 1]
    h = [get_weights(model) for model in (pooled, flat)]
    assert all(torch.equal(h[0][name], h[1][name]) for name in h[0])


@pytest.mark.parametrize("features", (*CONVS, "sgc"))
def test_without_pooling_logits_are_the_papers_row_by_row(features: str) -> None:
    data = graph_set(6, sizes=(9,))
    s, model = structure_embedding(data, "dse+rwse", 4, 4), model_of(features, pooled=False)
    h, g = model.pre(data.x.double()), model.structure.embed(s.double())
    for conv, other in zip(model.convs, model.structure.convs, strict=True):
        z = pyg_conv(conv)(torch.cat([h, g], 1), data.edge_index)
        h, g = z if features == "sgc" else torch.relu(z), torch.tanh(pyg_conv(other)(g, data.edge_index))
    wanted = model.readout(torch.relu(model.post(model.mix(torch.cat([h, g], 1)))))
    batch = node_batch(
        data.x, data.edge_index, torch.zeros(9, dtype=torch.int64), 3, extra={"s": s}, dtype=torch.float64
    )
    assert torch.allclose(model(batch), wanted, atol=1e-10)


@pytest.mark.parametrize(
    "bad",
    [
        {"hidden": ()},
        {"num_features": 0},
        {"num_structure": 0},
        {"dropout": 1.0},
        {"features": "gatt"},
        {"structure": "x"},
    ],
)
def test_what_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        model_of(**bad)
