"""Graph models are those of PyG, and their loop is torch's, with nothing of the caller's changed."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_helpers import graph_set
from nn_helpers import TwoWays
from torch import Tensor, nn
from torch_geometric.nn import APPNP, GATConv, GCNConv, GINConv, SAGEConv, SGConv, global_add_pool

from isthmus.data.graph_set import GraphSetData
from isthmus.errors import ConfigError, ProtocolError
from isthmus.nn import DropoutSource, Proximal, graph_train
from isthmus.nn.graph_batch import Pack, batches, pack_graphs
from isthmus.nn.graph_models import GraphModel, activated
from isthmus.nn.graph_train import graph_gradients, predict_graphs, train_graphs
from isthmus.nn.registry import backbones, build_graph_model
from isthmus.nn.train import TrainResult
from isthmus.seeds import Stream
from isthmus.tensors import equal_weights, get_weights, max_difference

KINDS = ("dgcn", "dirsage", "gat", "gcn", "gin", "gprgnn", "mlp", "sage", "sgc")
OPTIONS: dict[str, dict[str, Any]] = {
    "dgcn": {"hops": 3},
    "gprgnn": {"hops": 3, "alpha": 0.2, "dprate": 0.0},
    "sgc": {"hops": 3},
}


def model(
    kind: str = "gin",
    *,
    hidden: tuple[int, ...] = (8, 8),
    dropout: float = 0.0,
    features: int = 6,
    classes: int = 3,
    **options: Any,
) -> GraphModel:
    options = {**OPTIONS.get(kind, {}), **options}
    return build_graph_model(
        kind, num_features=features, num_classes=classes, hidden=hidden, dropout=dropout, stream=Stream(0), **options
    )


def jittered(graph_model: GraphModel, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = Stream(seed).torch()
    weights = get_weights(graph_model)
    return {
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=generator)).to(dtype)
        for name, tensor in weights.items()
    }


class Reference(nn.Module):
    """The same network from torch and PyG parts."""

    def __init__(self, kind: str, hidden: tuple[int, ...], features: int = 6, classes: int = 3, heads: int = 1) -> None:
        super().__init__()
        make = {
            "gin": lambda a, b: GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))),
            "gcn": GCNConv,
            "sage": SAGEConv,
            "dirsage": TwoWays,
            "gat": lambda a, b: GATConv(a, b // heads, heads=heads),
            "sgc": lambda a, b: SGConv(a, b, K=3),
        }.get(kind, nn.Linear)
        self.kind = kind
        self.pre = nn.Linear(features, hidden[0])
        widths = [hidden[0], hidden[-1]] if kind == "sgc" else [hidden[0], *hidden]
        self.convs = nn.ModuleList(make(a, b) for a, b in pairwise(widths))
        self.post = nn.Linear(hidden[-1], hidden[-1])
        self.readout = nn.Linear(hidden[-1], classes)
        self.gamma = nn.Parameter(torch.zeros(4))

    def load(self, weights: dict[str, Tensor]) -> dict[str, nn.Parameter]:
        """Copy our weights in; returns our name -> its parameter (transposed where it is a matrix)."""
        names: dict[str, nn.Parameter] = {"gamma": self.gamma} if self.kind == "gprgnn" else {}
        for part in ("pre", "post", "readout"):
            names |= {f"{part}.weight": getattr(self, part).weight, f"{part}.bias": getattr(self, part).bias}
        for i, conv in enumerate(self.convs):
            names |= {f"convs.{i}.{name}": parameter for name, parameter in self.parts(conv).items()}
        assert names.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in names.items():
                parameter.copy_(
                    weights[name].mT if parameter.dim() == 2 else weights[name]
                )  # attention (1, heads, out) is not turned
        return names

    def parts(self, conv: Any) -> dict[str, nn.Parameter]:
        """Our name -> PyG's parameter, of one layer."""
        if self.kind == "gin":
            return {
                f"{part}.{n}": getattr(conv.nn[k], n)
                for k, part in ((0, "inner"), (2, "outer"))
                for n in ("weight", "bias")
            }
        if self.kind == "gcn":
            return {"weight": conv.lin.weight, "bias": conv.bias}
        if self.kind == "sage":
            return {"neighbour": conv.lin_l.weight, "root": conv.lin_r.weight, "bias": conv.lin_l.bias}
        if self.kind == "dirsage":
            return conv.parts()
        if self.kind == "gat":
            return {"weight": conv.lin.weight, "source": conv.att_src, "target": conv.att_dst, "bias": conv.bias}
        linear = conv.lin if self.kind == "sgc" else conv
        return {"weight": linear.weight, "bias": linear.bias}

    def spread(self, h: Tensor, edge_index: Tensor) -> Tensor:
        """gprgnn and dgcn propagate once all is learnt; written with dense matrices, PyG has no layer for them."""
        step = torch.eye(h.shape[0], dtype=h.dtype)
        step.index_put_((edge_index[0], edge_index[1]), torch.ones(1, dtype=h.dtype), accumulate=True)
        if self.kind == "dgcn":
            step = step / step.sum(1, keepdim=True)
            return step @ step @ step @ h
        if self.kind == "gprgnn":
            scale = step.sum(0).rsqrt()  # in-degrees
            step = scale[:, None] * step.T * scale
            return self.gamma[0] * h + step @ (
                self.gamma[1] * h + step @ (self.gamma[2] * h + step @ (self.gamma[3] * h))
            )
        return h

    def forward(self, data: GraphSetData) -> Tensor:
        x = data.x.to_dense() if data.x.layout == torch.sparse_csr else data.x
        h = self.pre(x.to(self.pre.weight.dtype))
        for conv in self.convs:
            h = conv(h) if isinstance(conv, nn.Linear) else conv(h, data.edge_index)
            h = h if self.kind == "sgc" else torch.relu(h)
        h = self.spread(h, data.edge_index)
        logits: Tensor = self.readout(torch.relu(self.post(global_add_pool(h, data.batch, data.num_graphs))))
        return logits


def ours(names: dict[str, nn.Parameter], what: str) -> dict[str, Tensor]:
    tensors = {name: parameter.grad if what == "grad" else parameter.detach() for name, parameter in names.items()}
    return {name: t.mT if t.dim() == 2 else t[0] if t.dim() == 3 else t for name, t in tensors.items() if t is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [(8,), (8, 8, 8), (5, 9)])
@pytest.mark.parametrize(("undirected", "one_hot"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_pyg(kind: str, hidden: tuple[int, ...], undirected: bool, one_hot: bool, dtype: torch.dtype) -> None:
    """Values and gradients, on graphs with single nodes, without edges, and without nodes."""
    data = graph_set(7, undirected=undirected, one_hot=one_hot, num_features=16)
    graph_model = model(kind, hidden=hidden, features=16)
    weights = jittered(graph_model, 1, dtype)
    reference = Reference(kind, hidden, features=16).to(dtype)
    names = reference.load(weights)
    pack = pack_graphs(data, dtype=dtype)
    expected = reference(data)
    torch.testing.assert_close(predict_graphs(graph_model, weights, pack), expected, rtol=1e-5, atol=1e-5)

    rows = torch.tensor([4, 0, 1, 3, 5, 8])
    loss = F.cross_entropy(expected[rows], data.y[rows])
    loss.backward()
    grads, value = graph_gradients(graph_model, weights, pack, rows)
    found, true = grads, ours(names, "grad")
    for name in true:
        torch.testing.assert_close(found[name], true[name], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value[0], loss.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_graphs_one_by_one(kind: str) -> None:
    pack = pack_graphs(graph_set(8), dtype=torch.float64)
    graph_model = model(kind)
    weights = jittered(graph_model, 2)
    rows = torch.tensor([6, 2, 5, 0])
    alone = torch.cat([predict_graphs(graph_model, weights, pack, rows[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(predict_graphs(graph_model, weights, pack, rows), alone, rtol=0, atol=1e-12)
    mask = torch.zeros(9, dtype=torch.bool)
    mask[[0, 2]] = True
    torch.testing.assert_close(predict_graphs(graph_model, weights, pack, mask), alone[[3, 1]], rtol=0, atol=1e-12)
    assert predict_graphs(graph_model, weights, pack, rows[:0]).shape == (0, 3)


@pytest.mark.parametrize("kind", ["gin", "gcn"])
def test_pieces_change_no_result(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor steps: a mini-batch is one step however many pieces it takes."""
    pack = pack_graphs(graph_set(9), dtype=torch.float64)
    graph_model = model(kind)
    weights, rows = jittered(graph_model, 3), torch.arange(9)
    importance = torch.linspace(0.5, 2, 9, dtype=torch.float64)

    def trained() -> TrainResult:
        stream = torch.Generator().manual_seed(1)
        return train_graphs(
            graph_model,
            weights,
            None,
            pack,
            rows,
            epochs=2,
            batch_size=5,
            lr=0.01,
            generator=stream,
            sample_weight=importance,
        )

    logits, (grads, loss) = (
        predict_graphs(graph_model, weights, pack),
        graph_gradients(graph_model, weights, pack, rows),
    )
    result = trained()
    monkeypatch.setattr(graph_train, "NODES_AT_ONCE", 6)
    taken = trained()
    assert (
        taken.optimizer_state.steps == result.optimizer_state.steps
        and max_difference(taken.weights, result.weights) < 1e-10
    )
    torch.testing.assert_close(taken.loss, result.loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(predict_graphs(graph_model, weights, pack), logits, rtol=0, atol=1e-12)
    again, same = graph_gradients(graph_model, weights, pack, rows)
    assert max_difference(grads, again) < 1e-12 and abs(float(loss - same)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_training_equals_a_plain_pyg_loop(kind: str, optimizer: str) -> None:
    data = graph_set(10, sizes=(5, 1, 7, 4, 12, 3, 6, 9, 8, 2), one_hot=True)
    graph_model = model(kind)
    weights = jittered(graph_model, 4)
    pack, rows = pack_graphs(data, dtype=torch.float64), torch.arange(10)
    result = train_graphs(
        graph_model,
        weights,
        None,
        pack,
        rows,
        epochs=4,
        batch_size=4,
        lr=0.01,
        weight_decay=5e-4,
        optimizer=optimizer,
        generator=Stream(5).torch(),
    )
    reference = Reference(kind, (8, 8)).double()
    names = reference.load(weights)
    steps = (torch.optim.Adam if optimizer == "adam" else torch.optim.SGD)(names.values(), lr=0.01, weight_decay=5e-4)
    generator, last = Stream(5).torch(), 0.0
    for _ in range(4):
        last = 0.0
        for graphs in batches(rows, 4, generator):
            steps.zero_grad()
            loss = F.cross_entropy(reference(data.select(graphs)), data.y[graphs])
            loss.backward()
            steps.step()
            last += float(loss.detach()) * graphs.numel() / 10
    assert max_difference(result.weights, ours(names, "value")) < 1e-6
    assert result.optimizer_state.steps == (12,)
    assert abs(float(result.loss) - last) < 1e-6


def run(graph_model: GraphModel, pack: Pack, *, seed: int = 1, drop: int | None = 2) -> dict[str, Tensor]:
    source = None if drop is None else DropoutSource([Stream(drop).torch()])
    generator, rows = Stream(seed).torch(), torch.arange(9)
    weights = get_weights(graph_model)
    result = train_graphs(
        graph_model, weights, None, pack, rows, epochs=2, batch_size=3, lr=0.05, generator=generator, dropout=source
    )
    return result.weights


def test_randomness_is_what_is_handed_in() -> None:
    pack, graph_model = pack_graphs(graph_set(11)), model("gin", dropout=0.5)
    before = torch.random.get_rng_state()
    first = run(graph_model, pack)
    assert equal_weights(first, run(graph_model, pack))
    assert not equal_weights(first, run(graph_model, pack, seed=3))
    assert not equal_weights(first, run(graph_model, pack, drop=3))
    assert not equal_weights(first, run(graph_model, pack, drop=None))
    model("gin")
    assert torch.equal(before, torch.random.get_rng_state())


def test_dropout_keeps_the_mean_and_its_gradient() -> None:
    """Averaged over many masks, a linear path through dropout is the path without it."""
    pack, graph_model = (
        pack_graphs(graph_set(12, one_hot=True), dtype=torch.float64),
        model("gcn", hidden=(4,), dropout=0.5).double(),
    )
    batch = pack.batch(torch.arange(9))
    z = torch.randn(40, 3, dtype=torch.float64, generator=Stream(0).torch(), requires_grad=True)
    source = DropoutSource([Stream(1).torch()])
    total = torch.zeros_like(z)
    for _ in range(400):
        out = activated(z.clone(), 0.5, source)
        (grad,) = torch.autograd.grad(out.sum(), z)
        assert torch.equal(grad != 0, out != 0)
        assert torch.allclose(out.detach(), (grad * z).detach())  # h = relu(z) * mask, dh/dz = mask where z > 0
        total += grad
    assert float((total / 400 - (z > 0).double()).abs().max()) < 0.25
    assert torch.equal(graph_model(batch, None), graph_model(batch, None))
    assert not torch.equal(graph_model(batch, source), graph_model(batch, source))


def test_nothing_of_the_caller_changes_and_calls_compose() -> None:
    pack, graph_model = pack_graphs(graph_set(13)), model("sage")
    own, weights = get_weights(graph_model), jittered(graph_model, 5, torch.float32)
    rows = torch.arange(9)
    generator = Stream(1).torch()
    first = train_graphs(graph_model, weights, None, pack, rows, epochs=1, batch_size=4, lr=0.1, generator=generator)
    kept = copy.deepcopy((weights, first))
    second = train_graphs(
        graph_model,
        first.weights,
        first.optimizer_state,
        pack,
        rows,
        epochs=1,
        batch_size=4,
        lr=0.1,
        generator=generator,
    )
    assert equal_weights(weights, kept[0]) and equal_weights(first.weights, kept[1].weights)
    assert equal_weights(first.optimizer_state.first, kept[1].optimizer_state.first)
    assert equal_weights(own, get_weights(graph_model)) and all(p.grad is None for p in graph_model.parameters())
    assert not any(tensor.requires_grad for tensor in second.weights.values())
    once = train_graphs(
        graph_model, weights, None, pack, rows, epochs=2, batch_size=4, lr=0.1, generator=Stream(1).torch()
    )
    assert equal_weights(second.weights, once.weights) and equal_weights(
        second.optimizer_state.second, once.optimizer_state.second
    )


def test_frozen_and_proximal() -> None:
    pack, graph_model = pack_graphs(graph_set(14), dtype=torch.float64), model("gin")
    start, anchor, rows = jittered(graph_model, 6), jittered(graph_model, 7), torch.arange(9)
    frozen = ("pre.weight", "convs.1.outer.bias")
    held = train_graphs(graph_model, start, None, pack, rows, epochs=2, lr=0.1, weight_decay=0.1, frozen=frozen)
    for name in start:
        assert torch.equal(start[name], held.weights[name]) == (name in frozen)
    assert set(held.optimizer_state.first) == set(start) - set(frozen)
    assert set(graph_gradients(graph_model, start, pack, rows, frozen=frozen)[0]) == set(start) - set(frozen)

    grads, _ = graph_gradients(graph_model, start, pack, rows)
    options = {"epochs": 1, "lr": 0.1, "optimizer": "sgd"}
    pulled = train_graphs(graph_model, start, None, pack, rows, extra_gradient=Proximal(0.5, anchor), **options).weights
    expected = {name: start[name] - 0.1 * (grads[name] + 0.5 * (start[name] - anchor[name])) for name in start}
    assert max_difference(pulled, expected) < 1e-12
    at_anchor = train_graphs(
        graph_model, start, None, pack, rows, extra_gradient=Proximal(10.0, start), **options
    ).weights
    assert equal_weights(at_anchor, train_graphs(graph_model, start, None, pack, rows, **options).weights)


def test_no_training_graphs() -> None:
    pack, graph_model = pack_graphs(graph_set(15)), model("gin")
    weights, none = get_weights(graph_model), torch.zeros(9, dtype=torch.bool)
    result = train_graphs(graph_model, weights, None, pack, none, epochs=3, lr=0.1, weight_decay=0.1)
    assert equal_weights(result.weights, weights) and float(result.loss) == 0.0 and result.optimizer_state.steps == (0,)
    grads, loss = graph_gradients(graph_model, weights, pack, none)
    assert float(loss) == 0.0 and all(not bool(grad.any()) for grad in grads.values())


def test_sample_weights() -> None:
    """A weighted mean: scale does not matter, a graph of weight 2 counts as two, one of weight 0 not at all."""
    pack, graph_model = pack_graphs(graph_set(18), dtype=torch.float64), model("gin")
    weights, rows = jittered(graph_model, 9), torch.tensor([0, 2, 4])
    importance = torch.tensor([2.0, 7, 1, 7, 0, 7, 7, 7, 7], dtype=torch.float64)
    grads, loss = graph_gradients(graph_model, weights, pack, rows, sample_weight=importance)
    again, same = graph_gradients(graph_model, weights, pack, torch.tensor([0, 0, 2]))
    assert max_difference(grads, again) < 1e-12 and abs(float(loss - same)) < 1e-12
    options = {"epochs": 2, "batch_size": 2, "lr": 0.1}
    first = train_graphs(graph_model, weights, None, pack, rows, sample_weight=importance, **options).weights
    scaled = train_graphs(graph_model, weights, None, pack, rows, sample_weight=10 * importance, **options).weights
    assert max_difference(first, scaled) < 1e-9
    assert not equal_weights(first, train_graphs(graph_model, weights, None, pack, rows, **options).weights)
    even = train_graphs(graph_model, weights, None, pack, rows, sample_weight=torch.ones(9), **options).weights
    assert equal_weights(even, train_graphs(graph_model, weights, None, pack, rows, **options).weights)
    for bad in (torch.ones(3), torch.zeros(9), -importance):
        with pytest.raises(ConfigError, match="sample_weight"):
            graph_gradients(graph_model, weights, pack, rows, sample_weight=bad)


def test_double_softmax() -> None:
    pack, graph_model = pack_graphs(graph_set(16), dtype=torch.float64), model("gin")
    weights, rows = jittered(graph_model, 8), torch.arange(9)
    logits = predict_graphs(graph_model, weights, pack)
    _, loss = graph_gradients(graph_model, weights, pack, rows, loss="double_softmax")
    assert abs(float(loss) - float(F.cross_entropy(torch.softmax(logits, 1), pack.y))) < 1e-12


def test_groups_and_what_clients_can_share() -> None:
    first, second = (
        model("gin", hidden=(8, 8, 8), features=6, classes=3),
        model("gin", hidden=(8, 8, 8), features=11, classes=2),
    )
    assert first.shared_groups == ("pre.", "convs.0.", "convs.1.", "convs.2.", "post.", "readout.")
    assert first.conv_groups == ("convs.0.", "convs.1.", "convs.2.") and GraphModel.shape_bound == ("pre.", "readout.")
    a, b = get_weights(first), get_weights(second)
    assert a.keys() == b.keys()
    for name in a:
        assert sum(name.startswith(group) for group in first.shared_groups) == 1
        if name.startswith(GraphModel.shape_bound):
            assert a[name].shape != b[name].shape or name == "pre.bias"
        else:
            assert torch.equal(a[name], b[name])  # a common start, whatever the clients' features
    assert not torch.equal(a["convs.0.inner.weight"], a["convs.1.inner.weight"])
    assert float(a["convs.0.inner.weight"].abs().max()) <= 8**-0.5


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_heads_equal_pyg(heads: int) -> None:
    """Several heads, side by side in every layer."""
    data = graph_set(21, undirected=False)
    graph_model = model("gat", heads=heads)
    weights = jittered(graph_model, 11)
    reference = Reference("gat", (8, 8), heads=heads).double()
    reference.load(weights)
    torch.testing.assert_close(
        predict_graphs(graph_model, weights, pack_graphs(data, dtype=torch.float64)), reference(data)
    )


def test_gprgnn_starts_as_appnp() -> None:
    data = graph_set(22)
    graph_model = model("gprgnn", hidden=(8,), alpha=0.3).double()
    batch = pack_graphs(data, dtype=torch.float64).batch(torch.arange(9))
    h = torch.randn(data.num_nodes, 8, dtype=torch.float64, generator=Stream(1).torch())
    torch.testing.assert_close(
        graph_model.after_layers(batch, h), APPNP(K=3, alpha=0.3)(h, data.edge_index), rtol=1e-5, atol=1e-5
    )
    assert graph_model.conv_groups == ("convs.0.", "gamma")


def test_dropout_of_single_backbones() -> None:
    """gat drops arcs, gprgnn the values it propagates, also where ``dropout`` is zero."""
    batch = pack_graphs(graph_set(23)).batch(torch.arange(9))
    for kind, options in (("gat", {"attention_dropout": 0.5}), ("gprgnn", {"dprate": 0.5})):
        dropping, never = model(kind, **options), model(kind)
        first, second = (dropping(batch, DropoutSource([Stream(seed).torch()])) for seed in (1, 2))
        assert not torch.equal(first, second)
        assert torch.equal(dropping(batch), never(batch))
        assert torch.equal(never(batch, DropoutSource([Stream(1).torch()])), never(batch))
        assert torch.equal(dropping(batch, DropoutSource([Stream(1).torch()])), first)


def test_size_of_the_published_model() -> None:
    """FedStar's baselines: pre, 3 GIN layers of two 64 x 64 maps each, post, readout."""
    weights = get_weights(build_graph_model("gin", num_features=37, num_classes=2, stream=Stream(0)))
    square = 64 * 64 + 64
    assert sum(t.numel() for t in weights.values()) == (37 * 64 + 64) + 3 * 2 * square + square + (64 * 2 + 2)


def test_mistakes_are_named() -> None:
    options = {"num_features": 3, "num_classes": 2, "stream": Stream(0)}
    assert backbones() == KINDS
    for alias, name in (("graphsage", "sage"), ("gpr-gnn", "gprgnn"), ("decoupled-gcn", "dgcn")):
        assert (
            get_weights(build_graph_model(alias, **options)).keys()
            == get_weights(build_graph_model(name, **options)).keys()
        )
    with pytest.raises(ConfigError, match="did you mean 'gin'"):
        build_graph_model("gni", **options)
    with pytest.raises(ConfigError, match="dropout"):
        build_graph_model("gin", dropout=1.0, **options)
    with pytest.raises(ConfigError, match="hidden"):
        build_graph_model("gin", hidden=(), **options)
    for name, option, value, match in (
        ("gin", "heads", 2, "gin has no options"),
        ("gat", "hops", 2, "allowed: attention_dropout, heads"),
        ("gat", "heads", 3, "divide"),
        ("gat", "attention_dropout", 1.0, "attention_dropout"),
        ("sgc", "hops", 0, "at least 1"),
        ("dgcn", "hops", -1, "at least 0"),
        ("gprgnn", "hops", -1, "at least 0"),
        ("gprgnn", "alpha", 2.0, "alpha"),
        ("gprgnn", "dprate", 1.0, "dprate"),
    ):
        with pytest.raises(ConfigError, match=match):
            build_graph_model(name, **options, **{option: value})
    pack, graph_model = pack_graphs(graph_set(17)), model("gin")
    weights, rows = get_weights(graph_model), torch.arange(9)
    with pytest.raises(ConfigError, match="0 to 8"):
        train_graphs(graph_model, weights, None, pack, torch.tensor([9]), epochs=1, lr=0.1)
    with pytest.raises(ConfigError, match="did you mean 'adam'"):
        train_graphs(graph_model, weights, None, pack, rows, epochs=1, lr=0.1, optimizer="adm")
    with pytest.raises(ConfigError, match="epochs"):
        train_graphs(graph_model, weights, None, pack, rows, epochs=-1, lr=0.1)
    with pytest.raises(ConfigError, match="batch_size"):
        train_graphs(graph_model, weights, None, pack, rows, epochs=1, batch_size=0, lr=0.1)
    with pytest.raises(ProtocolError, match="missing"):
        predict_graphs(graph_model, {}, pack)
    with pytest.raises(ProtocolError, match=r"pre\.weight"):
        predict_graphs(graph_model, weights | {"pre.weight": torch.zeros(2, 2)}, pack)
    with pytest.raises(ProtocolError, match="float64"):
        predict_graphs(graph_model, {name: tensor.double() for name, tensor in weights.items()}, pack)
