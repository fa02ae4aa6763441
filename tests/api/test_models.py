"""Models of a result as plain modules, and explanations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_undirected

import isthmus
from isthmus.data.scenario import build_scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.scenarios import parts_for, scenario_of
from isthmus.methods.explain import explain
from isthmus.methods.plain_model import has_plain_model
from isthmus.methods.registry import METHODS
from isthmus.nn.to_pyg import to_pyg
from isthmus.seeds import Stream

SMALL: dict[str, Any] = {
    "dataset": "csbm:nodes=90,features=6,degree=4",
    "clients": 3,
    "rounds": 2,
    "backbone": "gcn",
    "hidden": 8,
    "preset": "fedstruct",
}


@pytest.mark.parametrize("method", ["fedavg", "fedper", "apfl", "local", "central", "fedspray", "gcfl", "fedsgd"])
def test_a_plain_model_gives_the_scores_of_the_run(method: str, tmp_path: Path) -> None:
    result = isthmus.run(method, **SMALL, out=tmp_path / "run")
    parts = parts_for(result.settings, scenario_of(result.settings))
    right = total = 0
    for client in result.clients:
        data, model = parts[client], result.model(client)
        assert isinstance(model, nn.Module) and not model.training
        x = data.x if data.x.layout == torch.strided else data.x.to_dense()
        predicted = model(x, data.edge_index).argmax(1)
        right += int((predicted == data.y)[data.test].sum())
        total += int(data.test.sum())
    assert right / total == result["test_last"]


@pytest.mark.parametrize("scale", ["standard", "row"])
def test_a_plain_model_takes_features_as_they_were_given(scale: str, tmp_path: Path) -> None:
    """A run that scaled them leaves a module that does so itself, as ONNX too."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(60, 3, generator=generator) * torch.tensor([1.0, 100.0, 0.01]) + 2.0
    arcs = to_undirected(torch.randint(0, 60, (2, 100), generator=generator))
    data = Data(x=x, edge_index=arcs, y=(x[:, 1] > 50.0).long(), owner=torch.arange(60) % 2)
    settings = {"scale": scale, "rounds": 4, "patience": 0, "hidden": 8}
    result = isthmus.run("fedavg", dataset=data, preset="general", set=settings, split="40/20/40", out=tmp_path / "r")
    mine = data.subgraph(data.owner == 0)
    model, wanted = result.model("client-0"), result.predict("client-0").probability
    found = torch.softmax(model(mine.x, mine.edge_index), 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(model.to_onnx(tmp_path / "m.onnx")), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": mine.x.numpy(), "edge_index": mine.edge_index.numpy()})
    torch.testing.assert_close(torch.softmax(torch.from_numpy(logits), 1), wanted, rtol=0, atol=1e-4)


def test_graph_models_too(tmp_path: Path) -> None:
    result = isthmus.run("fedavg", dataset="motifs:graphs=40", clients=2, rounds=2, hidden="4,4", out=tmp_path / "run")
    parts = parts_for(result.settings, scenario_of(result.settings))
    right = total = 0
    for client in result.clients:
        data = parts[client]
        batch = torch.repeat_interleave(torch.arange(data.num_graphs), data.ptr.diff())
        predicted = result.model(client)(data.x.to_dense(), data.edge_index, batch).argmax(1)
        right += int((predicted == data.y)[data.test].sum())
        total += int(data.test.sum())
    assert right / total == result["test_last"]
    with pytest.raises(ConfigError, match="classifies graphs"):
        result.explain(result.clients[0])


def test_which_methods_have_a_plain_model() -> None:
    plain = {name for name in METHODS if has_plain_model(METHODS[name].roles["client"].cls)}
    assert {"fedavg", "fedprox", "fedper", "fedsgd", "fedsage", "local", "central", "apfl", "gcfl", "fedspray"} <= plain
    assert not plain & {"fedstruct", "hifgl", "fedggr", "fedgcn", "fedstar", "fedlit", "fedpergnn"}


def test_the_others_are_refused_with_the_reason(tmp_path: Path) -> None:
    result = isthmus.run("fedgcn", **SMALL, out=tmp_path / "run")
    for ask in (result.model, result.explain):
        with pytest.raises(ConfigError, match="more than a graph neural network on the client's own graph"):
            ask("client-0")
    with pytest.raises(ConfigError, match="unknown client"):
        result.model("nobody")


def test_a_model_of_the_users_own(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, num_features: int, num_classes: int) -> None:
            super().__init__()
            self.conv = GCNConv(num_features, num_classes)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.conv(x, edge_index)
            return out

    isthmus.register_backbone("mine", Net)
    result = isthmus.run("fedavg", **{**SMALL, "backbone": "mine"}, out=tmp_path / "run")
    assert isinstance(result.model("client-0"), Net)
    scaled = {**SMALL, "backbone": "mine", "scale": "standard"}
    result = isthmus.run("fedavg", **scaled, out=tmp_path / "scaled")
    raw = build_scenario(dataset=SMALL["dataset"], clients=3).parts["client-0"]
    x, wanted = raw.x.to_dense(), result.predict("client-0").probability
    found = torch.softmax(result.model("client-0")(x, raw.edge_index), 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("backbone", ["gcn", "mlp", "gat"])
def test_explanations_find_the_feature_that_decides(backbone: str, norm: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 6, generator=generator)
    y = (x[:, 2] > 0).long()
    x[:, 2] = 4.0 * y - 2.0
    same = torch.nonzero(y[:, None] == y[None, :])  # edges inside classes
    arcs = same[torch.randperm(len(same), generator=generator)[:300]].t().contiguous()
    data = Data(x=x, edge_index=torch.cat([arcs, arcs.flip(0)], 1), y=y)
    keys: dict[str, Any] = {
        "lr": 0.05,
        "hidden": 8,
        "dropout": 0.0,
        "split": "60/20/20",
        "preset": "fedstruct",
        "input_norm": norm,
    }
    result = isthmus.run("local", dataset=data, clients=1, rounds=60, backbone=backbone, **keys, out=tmp_path / "run")
    found = result.explain("client-0", top=3, steps=128)
    assert len(found) == 5
    assert all(each.features[0][0] == 2 and len(each.features) == 3 for each in found)
    everything = result.explain("client-0", top=10**6, steps=128)
    for each in everything:
        assert sum(weight for _, weight in each.features) == pytest.approx(each.margin, rel=0.02, abs=0.02)
        assert each.own + sum(weight for _, weight in each.neighbours) == pytest.approx(each.margin, rel=0.02, abs=0.02)
        assert set(node for node, _ in each.neighbours) <= set(range(120)) - {each.id}
    assert any(each.neighbours for each in everything) == (backbone != "mlp")
    assert found == result.explain("client-0", top=3, steps=128), "the same every time"
    with pytest.raises(ConfigError, match="none of this client's"):
        result.explain("client-0", [10**6])
    with pytest.raises(ConfigError, match="at least 1"):
        result.explain("client-0", top=0)


@pytest.mark.parametrize("method", ["fedavg", "fedgcn"])
def test_predictions_and_confusion_are_those_of_the_run(method: str, tmp_path: Path) -> None:
    result = isthmus.run(method, **SMALL, out=tmp_path / "run")
    confusion = isthmus.load(tmp_path / "run").confusion()
    assert int(confusion.diagonal().sum()) / int(confusion.sum()) == result["test_last"]
    one: Any = result.predict("client-1", part="test")
    assert repr(one).startswith(f"Predictions(client-1, {len(one)} rows, predicted 0: ") and "\n" not in repr(one)
    scores = {row["client"]: row["test_score_last"] for row in result["per_client"]}
    assert one.correct / one.labelled == scores["client-1"]
    assert int(result.confusion(client="client-1").sum()) == one.labelled
    every: Any = result.predict(part="test")
    assert set(every) == set(result.clients)


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gat", "gin", "sgc", "mlp", "gprgnn", "dgcn"])
def test_an_explanation_needs_only_what_the_model_sees(backbone: str) -> None:
    """A model whose hops are known is explained on the nodes around; hidden in a module, on the whole graph."""

    class Hidden(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x, edge_index)
            return out

    given = {"dataset": "csbm:nodes=80,classes=3,features=4,degree=2", "clients": 1, "backbone": backbone, "hidden": 4}
    settings = resolve("local", {**given, "preset": "fedstruct", "input_norm": False})
    (data,) = parts_for(settings, scenario_of(settings)).values()
    data = replace(data, edge_index=data.edge_index[:, ::3])  # one-way edges, so that directions count
    config: Any = settings.method_config
    model = to_pyg(config.build(num_features=data.num_features, num_classes=3, stream=Stream(1))).double()
    nodes = data.node_id[:6].tolist()
    near, whole = (explain(each, data, nodes, top=10**6, steps=8) for each in (model, Hidden(model)))
    for one, other in zip(near, whole, strict=True):
        assert one.margin == other.margin and one.own == pytest.approx(other.own, abs=1e-9)
        for name in ("features", "neighbours"):
            assert dict(getattr(one, name)) == pytest.approx(dict(getattr(other, name)), abs=1e-9), name
    assert any(each.neighbours for each in near) == (backbone != "mlp")
