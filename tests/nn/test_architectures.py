"""A file in `isthmus.nn.architectures` is a backbone of both tasks; nothing else has to know of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from isthmus.data.graphscenario import build_graph_scenario
from isthmus.data.scenario import build_scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.nn import architectures, build_inputs, gradients, registry
from isthmus.nn.graph_batch import pack_graphs
from isthmus.nn.graph_train import predict_graphs
from isthmus.nn.manual_gradients import has_manual_gradient
from isthmus.nn.registry import backbone_options, backbones, build_backbone, build_graph_model, find_architecture
from isthmus.seeds import Stream
from isthmus.tensors import Weights, equal_weights, get_weights, max_difference

APPNP = '''
from dataclasses import dataclass

from isthmus.graph.normalise import gcn_norm
from isthmus.nn.architecture import Architecture
from isthmus.nn.layers import LinearLayer


@dataclass(frozen=True)
class APPNP(Architecture):
    """Personalised PageRank on the output of an MLP, Gasteiger et al., ICLR 2019."""

    aliases = ("ppnp",)
    conv_type = LinearLayer
    hops: int = 10
    alpha: float = 0.1

    propagation_after = property(lambda self: gcn_norm)
    hops_after = property(lambda self: self.hops)

    def after_layers(self, weights, z, hops, drop):
        start = z
        for hop in hops:
            start = hop.itself(start)
            z = (1 - self.alpha) * (hop.propagator @ z) + self.alpha * start
        return z
'''
MEANS = '''
from dataclasses import dataclass

from isthmus.graph.normalise import mean_norm
from isthmus.nn.architecture import Architecture
from isthmus.nn.layers import LinearLayer


class MeanConv(LinearLayer):
    """Mean over neighbours, then an affine map."""

    weight_terms = {"weight": True}
    propagation = staticmethod(mean_norm)


@dataclass(frozen=True)
class Means(Architecture):
    """Means of neighbours."""

    conv_type = MeanConv
'''


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Put a module into the folder of architectures, as far as Python can see."""
    names = []

    def put(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        names.append(f"{architectures.__name__}.{name}")
        registry._architectures.cache_clear()

    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    yield put
    for name in names:
        sys.modules.pop(name, None)
    registry._architectures.cache_clear()


def ends(method: str, task: str, **settings: object) -> tuple[Weights, float]:
    """The first client's weights after two rounds, and the pooled score."""
    name, build = ("motifs", build_graph_scenario) if task == "graph" else ("csbm", build_scenario)
    scenario = build(dataset=name, clients=3, seed=1)  # type: ignore[operator]
    flags = {"dataset": name, "clients": 3, "seed": 1, "rounds": 2, "hidden": (8, 8), "eval_every": 1, **settings}
    experiment = SimulatedRun(resolve(method, flags), scenario)
    experiment.loop.play()
    return experiment.engine.party("client-0").client.export(), experiment.loop.lines[-1]["test"]


@pytest.mark.parametrize("task", ["node", "graph"])
def test_one_file_is_a_backbone_of_both_tasks(task: str, add: Callable[[str, str], None]) -> None:
    assert "appnp" not in backbones()
    add("appnp", APPNP)
    assert "appnp" in backbones() and backbone_options("ppnp") == {"hops": 10, "alpha": 0.1}
    near, score = ends("fedavg", task, backbone="appnp", hops=1, alpha=0.2)
    far, _ = ends("fedavg", task, backbone="ppnp", hops=4, alpha=0.2)
    assert 0.0 <= score <= 1.0 and near.keys() == far.keys() and not equal_weights(near, far)


def test_a_new_backbone_is_trained_as_its_equal(add: Callable[[str, str], None]) -> None:
    """GPR-GNN that does not learn its weights is APPNP."""
    add("appnp", APPNP)
    data = build_scenario(dataset="csbm", clients=1, seed=1).parts["client-0"]
    shape = {"num_features": data.num_features, "num_classes": data.num_classes, "stream": Stream(0), "hops": 4}
    ours, known = build_backbone("appnp", **shape), build_backbone("gprgnn", **shape)
    weights = get_weights(known)
    (found, loss), (expected, other) = (
        gradients(
            model, {n: t.double() for n, t in own.items()}, build_inputs(data, model, data.train, dtype=torch.float64)
        )
        for model, own in ((ours, {n: t for n, t in weights.items() if n != "gamma"}), (known, weights))
    )
    assert abs(float(loss - other)) < 1e-6  # gamma starts as single precision numbers
    assert max_difference(found, {name: grad for name, grad in expected.items() if name != "gamma"}) < 1e-6


def test_a_new_convolution_has_the_accelerators(add: Callable[[str, str], None]) -> None:
    add("means", MEANS)
    data = build_scenario(dataset="csbm", clients=1, seed=1).parts["client-0"]
    model = build_backbone(
        "means", num_features=data.num_features, num_classes=data.num_classes, stream=Stream(0)
    ).double()
    assert has_manual_gradient(model)
    inputs = build_inputs(data, model, data.train, dtype=torch.float64)
    weights = {name: tensor.requires_grad_() for name, tensor in get_weights(model).items()}
    loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model, weights, (inputs,)), inputs.y)
    expected = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    found, _ = gradients(model, {name: tensor.detach() for name, tensor in weights.items()}, inputs)
    assert max_difference(found, expected) < 1e-13
    together, each = (ends("fedavg", "node", backbone="means", execution=how)[0] for how in ("cohort", "each"))
    assert max_difference(together, each) < 1e-5 and not equal_weights(together, ends("fedavg", "node")[0])


def test_a_new_backbone_of_graphs_is_its_equal(add: Callable[[str, str], None]) -> None:
    add("appnp", APPNP)
    data = build_graph_scenario(dataset="motifs", clients=1, seed=1).parts["client-0"]
    shape = {"num_features": data.num_features, "num_classes": data.num_classes, "stream": Stream(0), "hops": 4}
    ours, known = build_graph_model("appnp", **shape), build_graph_model("gprgnn", **shape)
    weights, pack = get_weights(known), pack_graphs(data)
    own = {name: tensor for name, tensor in weights.items() if name != "gamma"}
    torch.testing.assert_close(predict_graphs(ours, own, pack), predict_graphs(known, weights, pack))


@pytest.mark.parametrize("source", ["", MEANS + MEANS.replace("class Means(", "class More(")])
def test_a_file_must_define_one_architecture(source: str, add: Callable[[str, str], None]) -> None:
    add("strange", source)
    with pytest.raises(ConfigError, match=r"architectures\.strange defines [02] sub-classes of Architecture"):
        backbones()


def test_aliases_and_unknown_names() -> None:
    assert find_architecture("graphsage") is find_architecture("sage")
    with pytest.raises(ConfigError, match="did you mean 'graphsage'"):
        find_architecture("graphsag")
