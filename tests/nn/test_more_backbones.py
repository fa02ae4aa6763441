"""GAT, GIN, SGC, GPR-GNN and the decoupled GCN against PyG and against their formulas; alone and in cohorts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from nn_helpers import NUM_CLASSES, NUM_FEATURES, TwoWays, client, jittered, uneven_clients
from test_cohort import assert_same, both_ways
from torch import Tensor, nn
from torch_geometric.nn import APPNP, GATConv, GINConv, SGConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm

from isthmus.errors import ConfigError, DataError
from isthmus.nn import (
    Backbone,
    DropoutSource,
    backbones,
    build_backbone,
    build_inputs,
    gradients,
    predict,
    stack_inputs,
    stack_weights,
    train_locally,
)
from isthmus.nn.architectures.dirsage import BASE
from isthmus.nn.architectures.gat import _Attention
from isthmus.seeds import Stream
from isthmus.tensors import equal_weights, get_weights, max_difference

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("dirsage", {}),
    ("gat", {}),
    ("gat", {"heads": 2}),
    ("gin", {}),
    ("sgc", {}),
    ("sgc", {"hops": 3}),
    ("gprgnn", {}),
    ("gprgnn", {"hops": 2, "alpha": 0.4}),
    ("dgcn", {}),
    ("dgcn", {"hops": 5}),
    ("dgcn", {"hops": 0}),
]


def model(name: str, *, hidden: tuple[int, ...] = (6,), seed: int = 0, **options: Any) -> Backbone:
    return build_backbone(
        name,
        num_features=NUM_FEATURES,
        num_classes=NUM_CLASSES,
        hidden=hidden,
        stream=Stream(seed, ("init",)),
        **options,
    )


def dense_gcn(edge_index: Tensor, nodes: int) -> Tensor:
    index, value = pyg_gcn_norm(edge_index, None, nodes)
    matrix = torch.zeros(nodes, nodes)
    matrix.index_put_((index[1], index[0]), value, accumulate=True)
    return matrix


class Reference(nn.Module):
    """The same network from torch and PyG parts on dense features."""

    def __init__(
        self,
        kind: str,
        hidden: tuple[int, ...],
        *,
        input_norm: bool,
        head: bool,
        heads: int = 1,
        hops: int | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.hops = kind, {"sgc": 2, "gprgnn": 10, "dgcn": 2}.get(kind, 0) if hops is None else hops
        hidden = () if kind == "sgc" else hidden
        widths = [NUM_FEATURES, *hidden] if head else [NUM_FEATURES, *hidden, NUM_CLASSES]
        self.norm = nn.LayerNorm(NUM_FEATURES) if input_norm else nn.Identity()
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise(widths)):
            last = i == len(widths) - 2 and not head
            if kind == "gat":
                layers.append(GATConv(a, b if last else b // heads, heads=heads, concat=not last))
            elif kind == "dirsage":
                layers.append(TwoWays(a, b))
            elif kind == "gin":
                layers.append(GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))))
            elif kind == "sgc":
                layers.append(SGConv(a, b, K=self.hops))
            else:
                layers.append(nn.Linear(a, b))
        self.layers = nn.ModuleList(layers)
        self.top = nn.Linear(widths[-1], NUM_CLASSES) if head else None
        self.gamma = nn.Parameter(torch.zeros(self.hops + 1))

    def load(self, weights: dict[str, Tensor]) -> dict[str, nn.Parameter]:
        names: dict[str, nn.Parameter] = {}
        if "input_norm.gamma" in weights:
            names |= {"input_norm.gamma": self.norm.weight, "input_norm.beta": self.norm.bias}
        for i, layer in enumerate(self.layers):
            if self.kind == "gat":
                parts = {
                    "weight": layer.lin.weight,
                    "source": layer.att_src,
                    "target": layer.att_dst,
                    "bias": layer.bias,
                }
            elif self.kind == "dirsage":
                parts = layer.parts()
            elif self.kind == "gin":
                one, two = layer.nn[0], layer.nn[2]
                parts = {
                    "inner.weight": one.weight,
                    "inner.bias": one.bias,
                    "outer.weight": two.weight,
                    "outer.bias": two.bias,
                }
            elif self.kind == "sgc":
                parts = {"weight": layer.lin.weight, "bias": layer.lin.bias}
            else:
                parts = {"weight": layer.weight, "bias": layer.bias}
            names |= {f"layers.{i}.{part}": parameter for part, parameter in parts.items()}
        if self.top is not None:
            names |= {"head.weight": self.top.weight, "head.bias": self.top.bias}
        if self.kind == "gprgnn":
            names["gamma"] = self.gamma
        assert names.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in names.items():
                parameter.copy_(as_theirs(name, weights[name]))
        return names

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h, nodes = self.norm(x), x.shape[0]
        for i, layer in enumerate(self.layers):
            h = torch.relu(h) if i else h
            h = layer(h) if self.kind in ("gprgnn", "dgcn") else layer(h, edge_index)
        h = h if self.top is None else self.top(torch.relu(h) if self.kind in ("gprgnn", "dgcn") else h)
        if self.kind == "gprgnn":
            matrix = dense_gcn(edge_index, nodes)
            powers = [torch.matrix_power(matrix, k) for k in range(self.hops + 1)]
            return sum(gamma * power @ h for gamma, power in zip(self.gamma, powers, strict=True))
        if self.kind == "dgcn":
            looped = torch.eye(nodes).index_put(
                (edge_index[0], edge_index[1]), torch.ones(edge_index.shape[1]), accumulate=True
            )
            return torch.matrix_power(looped / looped.sum(1, keepdim=True), self.hops) @ h
        return h


def as_theirs(name: str, tensor: Tensor) -> Tensor:
    """Our shape of a weight or gradient to PyG's, and back."""
    if name.endswith((".source", ".target")):
        return tensor.unsqueeze(0) if tensor.dim() == 2 else tensor.squeeze(0)
    return tensor.mT if tensor.dim() == 2 else tensor


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize(("input_norm", "sparse"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(("hidden", "head"), [((), False), ((20, 4), False), ((8,), True)])
def test_equals_pyg(
    kind: str, options: dict[str, Any], input_norm: bool, hidden: tuple[int, ...], head: bool, sparse: bool
) -> None:
    """Values and gradients, on a directed graph with loops, repeated arcs and nodes nobody points to."""
    if kind == "sgc" and head:
        return
    data = client(25, 7, sparse=sparse, density=0.15 if sparse else 0.8)
    ours = model(kind, hidden=hidden, input_norm=input_norm, head=head, **options)
    weights = jittered(ours, 3, torch.float32)
    shape = {name: value for name, value in options.items() if name in ("heads", "hops")}
    reference = Reference(kind, hidden, input_norm=input_norm, head=head, **shape)
    names = reference.load(weights)

    expected = reference(data.x.to_dense(), data.edge_index)
    torch.testing.assert_close(
        predict(ours, weights, build_inputs(data, ours)), expected.detach(), rtol=1e-5, atol=1e-5
    )

    loss = torch.nn.functional.cross_entropy(expected[data.train], data.y[data.train])
    loss.backward()
    true = {name: as_theirs(name, p.grad) for name, p in names.items() if p.grad is not None}
    for restrict in (True, False):
        grads, value = gradients(ours, weights, build_inputs(data, ours, data.train, restrict=restrict))
        for name in true:
            torch.testing.assert_close(grads[name], true[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(value[0], loss.detach())


@pytest.mark.parametrize(("kind", "options"), [*KINDS, ("gat", {"heads": 2, "attention_dropout": 0.4})])
@pytest.mark.parametrize(("hidden", "input_norm"), [((6,), False), ((6, 4), True)])
def test_a_cohort_ends_where_its_clients_end(
    kind: str, options: dict[str, Any], hidden: tuple[int, ...], input_norm: bool
) -> None:
    backbone = model(kind, hidden=hidden, input_norm=input_norm, dropout=0.4, **options)
    alone, together = both_ways(uneven_clients(), backbone, torch.float64, 4, epochs=2, lr=0.02, weight_decay=5e-4)
    assert_same(alone, together, 1e-10)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_predictions_of_a_cohort(kind: str, options: dict[str, Any]) -> None:
    """Stacked weights, plain weights, single clients: the same logits."""
    clients, backbone = uneven_clients(), model(kind, input_norm=True, **options)
    items = [build_inputs(data, backbone, dtype=torch.float64) for data in clients]
    inputs, own = stack_inputs(items), [jittered(backbone, k) for k in range(len(clients))]
    for plain, per_client in ((None, own), (own[0], [own[0]] * len(clients))):
        found = inputs.split(predict(backbone, stack_weights(per_client) if plain is None else plain, inputs))
        for logits, weights, item in zip(found, per_client, items, strict=True):
            torch.testing.assert_close(logits, predict(backbone, weights, item), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_gradients_equal_autograd_through_the_whole_model(kind: str, options: dict[str, Any]) -> None:
    data, ours = client(18, 8), model(kind, hidden=(6,), input_norm=True, **options)
    weights = {name: tensor.requires_grad_() for name, tensor in jittered(ours, 4).items()}
    inputs = build_inputs(data, ours, data.train, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(torch.func.functional_call(ours, weights, (inputs,)), inputs.y)
    expected = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    found, _ = gradients(ours, {name: tensor.detach() for name, tensor in weights.items()}, inputs)
    assert max_difference(found, expected) < 1e-13


@pytest.mark.parametrize("masked", [False, True])
def test_attention_passes_gradcheck(masked: bool) -> None:
    data, ours = client(7, 9), model("gat", heads=2)
    matrix = build_inputs(data, ours, dtype=torch.float64).hidden[0].csr
    generator = Stream(0).torch()
    z, scores, own = (
        torch.randn(7, width, dtype=torch.float64, generator=generator, requires_grad=True) for width in (6, 2, 2)
    )
    mask = DropoutSource([generator]).mask((matrix.nnz,), matrix.nnz, 2, 0.5, torch.float64) if masked else None
    assert torch.autograd.gradcheck(lambda *tensors: _Attention.apply(*tensors, matrix, mask), (z, scores, own))


def test_attention_survives_large_scores() -> None:
    data, ours = client(9, 10), model("gat")
    weights = {name: tensor * 1e4 for name, tensor in get_weights(ours).items()}
    assert bool(torch.isfinite(predict(ours, weights, build_inputs(data, ours))).all())


def test_attention_dropout() -> None:
    """In training only; with all neighbours saying the same it keeps the mean."""
    data, ours = client(20, 11), model("gat", attention_dropout=0.5)
    inputs = build_inputs(data, ours, data.train)
    weights = get_weights(ours)

    def end(seed: int | None) -> dict[str, Tensor]:
        source = None if seed is None else DropoutSource([Stream(seed).torch()])
        return train_locally(ours, weights, None, inputs, epochs=2, lr=0.1, dropout=source).weights

    assert equal_weights(end(1), end(1)) and not equal_weights(end(1), end(2)) and not equal_weights(end(1), end(None))
    everything, source = (
        build_inputs(data, model("gat", hidden=(), attention_dropout=0.5)),
        DropoutSource([Stream(3).torch()]),
    )
    alone = model("gat", hidden=(), attention_dropout=0.5)
    product = {"layers.0.weight": torch.ones(20, NUM_CLASSES)}
    with torch.no_grad():
        mean = sum(alone(everything, source, {n: t.clone() for n, t in product.items()}) for _ in range(600)) / 600
        torch.testing.assert_close(alone(everything, None, product), torch.ones(20, NUM_CLASSES))
    assert float((mean - 1).abs().max()) < 0.2


def test_gprgnn_starts_as_appnp() -> None:
    data, ours = client(15, 12), model("gprgnn", hops=4, alpha=0.2)
    weights = get_weights(ours)
    gamma = weights["gamma"]
    assert gamma.tolist() == pytest.approx([0.2, 0.2 * 0.8, 0.2 * 0.64, 0.2 * 0.512, 0.8**4]) and float(
        gamma.sum()
    ) == pytest.approx(1.0)
    mlp = build_backbone("mlp", num_features=NUM_FEATURES, num_classes=NUM_CLASSES, hidden=(6,), stream=Stream(0))
    plain = predict(mlp, {name: tensor for name, tensor in weights.items() if name != "gamma"}, build_inputs(data, mlp))
    expected = APPNP(K=4, alpha=0.2)(plain, data.edge_index)
    torch.testing.assert_close(predict(ours, weights, build_inputs(data, ours)), expected, rtol=1e-5, atol=1e-5)
    assert ours.shared_groups == ("layers.0.", "layers.1.", "gamma")


def test_dprate_acts_in_training_only() -> None:
    data, ours = client(15, 13), model("gprgnn", dprate=0.5)
    inputs = build_inputs(data, ours)
    with torch.no_grad():
        sources = [DropoutSource([Stream(seed).torch()]) for seed in (1, 1, 2)]
        first, again, other = (ours(inputs, source) for source in sources)
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert torch.equal(ours(inputs), ours(inputs))
        still = model("gprgnn", dprate=0.0)
        assert torch.equal(still(inputs, DropoutSource([Stream(1).torch()])), still(inputs))


def test_dgcn_without_hops_is_an_mlp() -> None:
    data, ours = client(12, 14), model("dgcn", hops=0)
    mlp = build_backbone("mlp", num_features=NUM_FEATURES, num_classes=NUM_CLASSES, hidden=(6,), stream=Stream(0))
    weights = get_weights(ours)
    torch.testing.assert_close(
        predict(ours, weights, build_inputs(data, ours)), predict(mlp, weights, build_inputs(data, mlp))
    )


def test_restriction_keeps_only_reachable_rows() -> None:
    """On a path 0 - 1 - 2 - 3 - 4 with training node 0, L propagations read rows 0 .. L."""
    edges = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])
    data = replace(client(5, 15), edge_index=edges)
    mask = torch.tensor([True, False, False, False, False])
    assert build_inputs(data, model("dgcn", hops=2), mask).rows == ((3,), (2,), (1,))
    assert build_inputs(data, model("gprgnn", hops=10), mask).rows[0] == (5,)
    assert build_inputs(data, model("gat", hidden=(6,)), mask).rows == ((3,), (2,), (1,))
    assert build_inputs(data, model("gin", hidden=(6,)), mask).rows == ((2,), (1,))
    assert build_inputs(data, model("sgc"), mask).rows == ((1,),)


def test_dirsage_reads_both_ends_of_an_arc() -> None:
    """On arcs 0 -> 1 -> 2, training node 1 needs all three rows; turning the arcs round swaps the two weights."""
    data, ours = replace(client(3, 17), edge_index=torch.tensor([[0, 1], [1, 2]])), model("dirsage", hidden=())
    mask = torch.tensor([False, True, False])
    assert build_inputs(data, ours, mask).rows == ((3,), (1,))
    weights = get_weights(ours)
    swapped = weights | {
        f"layers.0.{name}": weights[f"layers.0.{other}"]
        for name, other in (("incoming", "outgoing"), ("outgoing", "incoming"))
    }
    turned = replace(data, edge_index=data.edge_index.flip(0))
    found = predict(ours, weights, build_inputs(data, ours))
    torch.testing.assert_close(predict(ours, swapped, build_inputs(turned, ours)), found)
    assert not torch.allclose(predict(ours, weights, build_inputs(turned, ours)), found)


def test_dirsage_counts_repeated_arcs_or_refuses_them() -> None:
    """Both counts share a float32: exact to the last one that fits."""
    ours = model("dirsage", hidden=())
    often = torch.tensor([[0, 1, 2], [1, 0, 1]]).repeat_interleave(torch.tensor([BASE - 1, BASE - 1, 1]), dim=1)
    data = replace(client(3, 18), edge_index=often)
    weights, reference = get_weights(ours), Reference("dirsage", (), input_norm=False, head=False)
    reference.load(weights)
    expected = reference(data.x.to_dense(), often).detach()
    torch.testing.assert_close(predict(ours, weights, build_inputs(data, ours)), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match="occurs 4096 times, dirsage counts to 4095"):
        build_inputs(replace(data, edge_index=torch.cat([often, often[:, :1]], dim=1)), ours)


def test_sparse_features_stay_sparse() -> None:
    data = client(60, 16, density=0.02)
    for kind in ("dirsage", "gat", "gin", "sgc", "gprgnn", "dgcn"):
        for norm in (False, True):
            inputs = build_inputs(data, model(kind, input_norm=norm), data.train)
            assert all(operand.sparse is not None for operand in inputs.first.values())


def test_same_stream_same_weights_in_every_group() -> None:
    before = torch.random.get_rng_state()
    for kind, options in KINDS:
        first, again, other = (
            model(kind, seed=seed, head=kind != "sgc", input_norm=True, **options) for seed in (1, 1, 2)
        )
        assert equal_weights(get_weights(first), get_weights(again)) and not equal_weights(
            get_weights(first), get_weights(other)
        )
        for name in get_weights(first):
            assert sum(name.startswith(group) for group in first.shared_groups) == 1
    assert torch.equal(before, torch.random.get_rng_state())


def test_options_and_mistakes() -> None:
    assert {"dgcn", "gat", "gcn", "gin", "gprgnn", "mlp", "sage", "sgc"} <= set(backbones())
    with pytest.raises(ConfigError, match="did you mean 'hops'"):
        model("dgcn", hop=3)
    with pytest.raises(ConfigError, match="gcn has no options"):
        model("gcn", heads=2)
    for kind, options in (
        ("gat", {"heads": 4}),
        ("gat", {"attention_dropout": 1.0}),
        ("dgcn", {"hops": -1}),
        ("sgc", {"hops": 0}),
        ("sgc", {"head": True}),
        ("gprgnn", {"alpha": 1.5}),
        ("gprgnn", {"dprate": 1.0}),
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            model(kind, **options)
