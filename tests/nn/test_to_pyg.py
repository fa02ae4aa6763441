"""Models as modules of PyTorch Geometric's layers, and as ONNX: the same outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.data.graphscenario import build_graph_scenario
from isthmus.data.node_data import NodeData
from isthmus.data.scenario import build_scenario
from isthmus.errors import ConfigError
from isthmus.nn.graph_batch import pack_graphs
from isthmus.nn.graph_train import predict_graphs
from isthmus.nn.inputs import build_inputs
from isthmus.nn.registry import backbones, build_backbone, build_graph_model
from isthmus.nn.to_pyg import PlainNet, to_pyg
from isthmus.nn.train import predict
from isthmus.nn.two_channel import TwoChannel
from isthmus.seeds import Stream
from isthmus.tensors import get_weights

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
OPTIONS: dict[str, dict[str, Any]] = {"gat": {"heads": 2}, "sgc": {"hops": 3}, "dgcn": {"hops": 3}}


def nodes() -> NodeData:
    """A directed graph with repeated arcs, self-loops and a node without edges."""
    whole = build_scenario(dataset="csbm:nodes=50,features=7,classes=3", clients=1).whole
    generator = torch.Generator().manual_seed(0)
    arcs = torch.randint(0, 49, (2, 160), generator=generator)
    arcs[:, :4] = torch.tensor([[3, 3, 5, 6], [3, 3, 4, 6]])
    arcs[:, 4] = arcs[:, 5]
    return replace(whole, edge_index=arcs)


def drawn(model: torch.nn.Module) -> None:
    """Weights that are all different from their start, biases too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)


def dense(x: Tensor) -> Tensor:
    return x if x.layout == torch.strided else x.to_dense()


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("name", backbones())
def test_node_models(name: str, framed: bool, tmp_path: Path) -> None:
    data = nodes()
    head = framed and name != "sgc"
    model = build_backbone(
        name,
        num_features=7,
        num_classes=3,
        hidden=(6, 4),
        head=head,
        input_norm=framed,
        stream=Stream(0),
        **OPTIONS.get(name, {}),
    )
    drawn(model)
    plain = to_pyg(model)
    ours = predict(model, get_weights(model), build_inputs(data, model))
    torch.testing.assert_close(plain(dense(data.x), data.edge_index), ours, **CLOSE)
    check_onnx(plain, tmp_path / "model.onnx", dense(data.x), data.edge_index)


@pytest.mark.parametrize("name", backbones())
def test_graph_models(name: str, tmp_path: Path) -> None:
    scenario = build_graph_scenario(dataset="motifs:graphs=12", partition=None, clients=1, seed=0)
    data = next(iter(scenario.parts.values()))
    model = build_graph_model(
        name,
        num_features=data.num_features,
        num_classes=data.num_classes,
        hidden=(6, 4),
        stream=Stream(0),
        **OPTIONS.get(name, {}),
    )
    drawn(model)
    plain = to_pyg(model)
    batch = torch.repeat_interleave(torch.arange(data.num_graphs), data.ptr.diff())
    ours = predict_graphs(model, get_weights(model), pack_graphs(data))
    torch.testing.assert_close(plain(dense(data.x), data.edge_index, batch), ours, **CLOSE)
    check_onnx(plain, tmp_path / "model.onnx", dense(data.x), data.edge_index, batch)


def check_onnx(plain: PlainNet, path: Path, *inputs: Tensor) -> None:
    """ONNX gives the same, on another number of nodes and edges than it was written with."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(plain.to_onnx(path).read_bytes(), options)
    wanted = {place.name for place in session.get_inputs()}
    given = dict(zip(("x", "edge_index", "batch"), inputs, strict=False))
    assert wanted <= set(given) and "x" in wanted
    (found,) = session.run(None, {name: given[name].numpy() for name in wanted})
    torch.testing.assert_close(torch.from_numpy(found), plain(*inputs).detach(), **CLOSE)


def test_it_is_differentiable_in_features() -> None:
    data = nodes()
    x = dense(data.x).clone().requires_grad_()
    model = build_backbone("gcn", num_features=7, num_classes=3, hidden=(6,), stream=Stream(0))
    to_pyg(model)(x, data.edge_index).sum().backward()
    assert x.grad is not None and bool((x.grad != 0).any())


def test_others_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    two = TwoChannel.__new__(TwoChannel)  # FedStar's, a sub-class of what can be converted
    for other in (torch.nn.Linear(2, 2), two):
        with pytest.raises(ConfigError, match="no counterpart"):
            to_pyg(other)
    model = to_pyg(build_backbone("mlp", num_features=2, num_classes=2, hidden=(2,), stream=Stream(0)))
    with pytest.raises(ConfigError, match="cannot write"):
        model.to_onnx(tmp_path / "nowhere" / "model.onnx")

    def missing(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'onnx'", name="onnx")

    monkeypatch.setattr(torch.onnx, "export", missing)
    with pytest.raises(ConfigError, match=r"pip install 'isthmus\[onnx\]'"):
        model.to_onnx(tmp_path / "model.onnx")
