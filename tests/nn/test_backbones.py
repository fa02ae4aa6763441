"""Our layers are PyG's layers: values and gradients, single and restricted to what training nodes see."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from nn_helpers import NUM_CLASSES, NUM_FEATURES, client, jittered, model
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

from isthmus.errors import ConfigError
from isthmus.nn import backbones, build_backbone, build_inputs, gradients, predict
from isthmus.seeds import Stream
from isthmus.tensors import equal_weights, get_weights, max_difference


class Reference(nn.Module):
    """The same network from torch and PyG parts on dense features."""

    def __init__(self, kind: str, hidden: tuple[int, ...], *, input_norm: bool, head: bool) -> None:
        super().__init__()
        widths = [NUM_FEATURES, *hidden] if head else [NUM_FEATURES, *hidden, NUM_CLASSES]
        make = {"gcn": GCNConv, "sage": SAGEConv, "mlp": nn.Linear}[kind]
        self.kind = kind
        self.norm = nn.LayerNorm(NUM_FEATURES) if input_norm else nn.Identity()
        self.convs = nn.ModuleList(make(a, b) for a, b in pairwise(widths))
        self.top = nn.Linear(widths[-1], NUM_CLASSES) if head else None

    def load(self, weights: dict[str, Tensor]) -> dict[str, nn.Parameter]:
        """Copy our weights in; returns our name -> its parameter (transposed where it is a matrix)."""
        names: dict[str, nn.Parameter] = {}
        if "input_norm.gamma" in weights:
            names |= {"input_norm.gamma": self.norm.weight, "input_norm.beta": self.norm.bias}
        for i, conv in enumerate(self.convs):
            if self.kind == "sage":
                parts = {"neighbour": conv.lin_l.weight, "root": conv.lin_r.weight, "bias": conv.lin_l.bias}
            else:
                parts = {"weight": conv.lin.weight if self.kind == "gcn" else conv.weight, "bias": conv.bias}
            names |= {f"layers.{i}.{part}": tensor for part, tensor in parts.items()}
        if self.top is not None:
            names |= {"head.weight": self.top.weight, "head.bias": self.top.bias}
        assert names.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in names.items():
                parameter.copy_(weights[name].mT if weights[name].dim() == 2 else weights[name])
        return names

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.norm(x)
        for i, conv in enumerate(self.convs):
            h = torch.relu(h) if i else h
            h = conv(h) if self.kind == "mlp" else conv(h, edge_index)
        # Nothing stands between the last convolution and the head.
        return h if self.top is None else self.top(torch.relu(h) if self.kind == "mlp" else h)


@pytest.mark.parametrize("kind", ["gcn", "sage", "mlp"])
@pytest.mark.parametrize("input_norm", [False, True])
@pytest.mark.parametrize(
    ("hidden", "head"), [((), False), ((5,), False), ((20, 4), False), ((7,), True), ((7, 6), True)]
)
@pytest.mark.parametrize("sparse", [True, False])
def test_equals_pyg(kind: str, input_norm: bool, hidden: tuple[int, ...], head: bool, sparse: bool) -> None:
    data = client(25, 7, sparse=sparse, density=0.15 if sparse else 0.8)
    ours = model(kind, hidden=hidden, input_norm=input_norm, head=head)
    weights = jittered(ours, 3, torch.float32)
    reference = Reference(kind, hidden, input_norm=input_norm, head=head)
    names = reference.load(weights)
    x = data.x.to_dense()

    expected = reference(x, data.edge_index)
    torch.testing.assert_close(predict(ours, weights, build_inputs(data, ours)), expected, rtol=1e-5, atol=1e-5)

    torch.nn.functional.cross_entropy(expected[data.train], data.y[data.train]).backward()
    true = {name: (p.grad.mT if p.grad.dim() == 2 else p.grad) for name, p in names.items() if p.grad is not None}
    for restrict in (True, False):
        inputs = build_inputs(data, ours, data.train, restrict=restrict)
        grads, loss = gradients(ours, weights, inputs)
        assert max_difference(grads, true) < 1e-5
        torch.testing.assert_close(
            loss, torch.nn.functional.cross_entropy(expected[data.train], data.y[data.train])[None].detach()
        )


@pytest.mark.parametrize("kind", ["gcn", "sage", "mlp"])
@pytest.mark.parametrize("input_norm", [False, True])
def test_written_gradients_equal_autograd(kind: str, input_norm: bool) -> None:
    """The loop writes the first layer's gradient out; ``model(inputs)`` is differentiable end to end. In float64 they
    agree.
    """
    data = client(18, 8)
    ours = model(kind, hidden=(6,), input_norm=input_norm, head=True)
    weights = {name: tensor.requires_grad_() for name, tensor in jittered(ours, 4).items()}
    inputs = build_inputs(data, ours, data.train, dtype=torch.float64)
    logits = torch.func.functional_call(ours, weights, (inputs,))
    rows = inputs.weight > 0
    loss = torch.nn.functional.cross_entropy(logits[rows], inputs.y[rows])
    expected = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    found, _ = gradients(ours, {name: tensor.detach() for name, tensor in weights.items()}, inputs)
    assert max_difference(found, expected) < 1e-13


def test_gradient_of_operand_passes_gradcheck() -> None:
    data = client(6, 9)
    ours = model("sage", input_norm=True)
    inputs = build_inputs(data, ours, dtype=torch.float64)
    weights = jittered(ours, 5)
    operand = inputs.first["layers.0.neighbour"]
    leaves = [weights[n].requires_grad_() for n in ("layers.0.neighbour", "input_norm.gamma", "input_norm.beta")]
    assert torch.autograd.gradcheck(lambda w, g, b: operand.product(w, (g, b)), leaves)


def test_restriction_keeps_only_reachable_rows() -> None:
    """On a path 0 - 1 - 2 - 3 - 4 with training node 0: the output needs row 0, the hidden layer rows 0 and 1."""
    data = client(5, 10)
    edges = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])
    mask = torch.tensor([True, False, False, False, False])
    inputs = build_inputs(replace(data, edge_index=edges), model("gcn"), mask)
    assert inputs.rows == ((2,), (1,))
    assert build_inputs(replace(data, edge_index=edges), model("gcn", hidden=(5, 5)), mask).rows == ((3,), (2,), (1,))
    assert build_inputs(replace(data, edge_index=edges), model("mlp", hidden=(5, 5)), mask).rows == ((1,),)


def test_sparse_features_stay_sparse() -> None:
    data = client(60, 11, density=0.02)
    for kind in ("gcn", "sage", "mlp"):
        for norm in (False, True):
            inputs = build_inputs(data, model(kind, input_norm=norm), data.train)
            assert all(operand.sparse is not None for operand in inputs.first.values())


def test_filled_features_are_not_copied_where_they_are_used_as_they_are() -> None:
    data = client(60, 11)
    data = replace(data, x=torch.rand(60, data.num_features))
    root = build_inputs(data, model("sage")).first["layers.0.root"].matrix
    assert isinstance(root, torch.Tensor)
    assert root.data_ptr() == data.x.data_ptr()


def test_same_stream_same_weights_and_shapes() -> None:
    first, again, other = (get_weights(model("sage", seed=s, head=True, input_norm=True)) for s in (1, 1, 2))
    assert equal_weights(first, again)
    assert not torch.equal(first["layers.0.root"], other["layers.0.root"])
    bound = 1 / NUM_FEATURES**0.5
    assert float(first["layers.0.root"].abs().max()) <= bound
    glorot = get_weights(model("gcn", seed=1))["layers.0.weight"]
    assert 0.5 < float(glorot.abs().max()) / (6 / (NUM_FEATURES + 5)) ** 0.5 <= 1.0


def test_building_leaves_the_process_generator_alone() -> None:
    before = torch.random.get_rng_state()
    model("gcn")
    assert torch.equal(before, torch.random.get_rng_state())


def test_groups_cover_every_parameter_once_in_order() -> None:
    backbone = model("sage", hidden=(5, 4), head=True, input_norm=True)
    assert backbone.shared_groups == ("input_norm.", "layers.0.", "layers.1.", "head.")
    for name in get_weights(backbone):
        assert sum(name.startswith(group) for group in backbone.shared_groups) == 1
    assert model("gcn").shared_groups == ("layers.0.", "layers.1.")
    assert (model("gcn").hops, model("sage", head=True).hops, model("mlp").hops) == (2, 1, 0)


def test_names() -> None:
    assert {"gcn", "mlp", "sage"} <= set(backbones())
    options = {"num_features": 3, "num_classes": 2, "stream": Stream(0)}
    assert build_backbone("graphsage", **options).architecture == build_backbone("sage", **options).architecture
    assert build_backbone("graphsage", **options).architecture != build_backbone("gcn", **options).architecture
    with pytest.raises(ConfigError, match="did you mean 'gcn'"):
        build_backbone("gcnn", **options)
    with pytest.raises(ConfigError, match="dropout"):
        build_backbone("gcn", dropout=1.0, **options)
    with pytest.raises(ConfigError, match="head"):
        build_backbone("gcn", hidden=(), head=True, **options)


def test_mlp_does_not_see_edges() -> None:
    data = client(10, 12)
    backbone = model("mlp")
    bare = replace(data, edge_index=torch.zeros(2, 0, dtype=torch.int64))
    weights = get_weights(backbone)
    assert torch.equal(
        predict(backbone, weights, build_inputs(data, backbone)),
        predict(backbone, weights, build_inputs(bare, backbone)),
    )
