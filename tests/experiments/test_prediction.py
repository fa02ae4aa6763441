"""Predictions from model packages: what the run scored, from packages that were copied away, in another process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import run_in_folder, small
from torch_geometric.data import Data

import isthmus
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config import resolve
from isthmus.experiments.model_package import read_package
from isthmus.experiments.models import load_models
from isthmus.experiments.run import start
from isthmus.experiments.scenarios import parts_for, scenario_of
from isthmus.methods.registry import METHODS, all_methods
from isthmus.testing import small_runs

PREDICT = """
import json, sys
from pathlib import Path
from isthmus.experiments.models import load_models, pooled_accuracy
for folder in sorted(Path(sys.argv[1]).iterdir()):
    print(json.dumps([folder.name, pooled_accuracy(load_models(folder).predict(part="test"))]))
"""


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], dict[str, float]]:
    """``test`` of every method's small runs, and the same from their packages alone, in a process of its own."""
    place = tmp_path_factory.mktemp("all")
    wanted: dict[str, float] = {}
    for method in all_methods():
        if method.name not in METHODS or not method.summary:
            continue
        for task, (settings, _) in small_runs(method.name).items():
            name = f"{method.name}-{task}"
            settings = replace(settings, run=replace(settings.run, selection="best_val_acc"))
            wanted[name] = start(settings, place / "runs" / name)["test"]
            shutil.move(place / "runs" / name / "models", place / "packages" / name)
    shutil.rmtree(place / "runs")
    process = subprocess.run(
        [sys.executable, "-c", PREDICT, str(place / "packages")], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return wanted, dict(json.loads(line) for line in process.stdout.splitlines())


@pytest.mark.parametrize("method", [method.name for method in all_methods()])
def test_packages_alone_predict_what_the_run_scored(
    method: str, scored: tuple[Mapping[str, float], Mapping[str, float]]
) -> None:
    wanted, found = scored
    tasks = [name for name in wanted if name.rpartition("-")[0] == method]
    assert tasks, f"{method} has no small run"
    for name in tasks:
        assert found[name] == wanted[name], name
    assert METHODS[method].predicts in ("alone", "messages")


def test_the_round_that_validation_picked_is_the_one_that_predicts(tmp_path: Path) -> None:
    settings = small("local", rounds=8, selection="best_val_acc", dropout=0.6)
    run_in_folder(settings, tmp_path / "r")
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert result["selected_round"] < 8, "choose another seed: the last round is the best, and the test shows nothing"
    package = read_package(tmp_path / "r" / "models" / "client-0")
    assert package.facts["round"] == result["selected_round"]
    scores = json.loads((package.path / "scores.json").read_text())
    assert scores["test"]["accuracy"] == pytest.approx(result["per_client"][0]["test_score"], abs=1e-12)


# -- new nodes -------------------------------------------------------------------------------------


def grown(data: Any, features: torch.Tensor, arcs: torch.Tensor) -> Any:
    """The data with further nodes, and arcs among all."""
    count = len(features)
    ids = torch.cat([data.node_id, data.node_id.max() + 1000 + torch.arange(count)])
    nobody = torch.zeros(count, dtype=torch.bool)
    masks = {name: torch.cat([getattr(data, name), nobody]) for name in ("train", "val", "test")}
    x = data.x.to_dense() if data.x.layout != torch.strided else data.x
    return replace(
        data,
        x=torch.cat([x, features]),
        edge_index=torch.cat([data.edge_index, arcs, arcs.flip(0)], dim=1),
        y=torch.cat([data.y, torch.full((count,), -1)]),
        node_id=ids,
        **masks,
    )


def with_cross_edges_of(parts: dict[str, Any], client: str, old: int) -> dict[str, Any]:
    """The last node of a client gets the cross edges of another of its nodes; both owners list them."""
    data = parts[client]
    new, cross = data.num_nodes - 1, data.cross
    edges = torch.nonzero(cross.own == old).flatten()
    found = {**parts, client: replace(data, cross=more_edges(cross, edges, own=torch.full_like(edges, new)))}
    for number, name in enumerate(cross.owners):
        mine = edges[cross.owner[edges] == number]
        if name == client or not len(mine):
            continue
        other = parts[name]
        rows = torch.stack([torch.nonzero(other.node_id == id_).flatten()[0] for id_ in cross.other[mine]])
        far = other.cross
        index = torch.zeros(len(mine), dtype=torch.int64)  # any edge as a pattern; every field is given
        added = more_edges(
            far,
            index,
            own=rows,
            owner=torch.full_like(mine, far.owners.index(client)),
            other=data.node_id[torch.full_like(mine, new)],
            outgoing=~cross.outgoing[mine],
            weight=cross.weight[mine],
        )
        found[name] = replace(other, cross=added)
    return found


def more_edges(cross: Any, pattern: torch.Tensor, **fields: torch.Tensor) -> Any:
    names = ("own", "owner", "other", "outgoing", "weight")
    added = {name: fields.get(name, getattr(cross, name)[pattern]) for name in names}
    return replace(cross, **{name: torch.cat([getattr(cross, name), added[name]]) for name in names})


@pytest.mark.parametrize(
    "method", ["fedavg", "fedlit", "fedgcn", "fedstruct", "fedstruct-server", "fedpergnn", "hifgl"]
)
def test_a_twin_of_a_node_is_predicted_like_it(method: str, tmp_path: Path) -> None:
    """A new node with the features and the neighbours of an old one gets nearly its prediction, without training."""
    ((settings, _),) = [run for task, run in small_runs(method).items() if task == "node"]
    start(settings, tmp_path / "r")
    parts = parts_for(settings, scenario_of(settings))
    client = min(parts)
    data = parts[client]
    old = int(torch.bincount(data.edge_index[1], minlength=data.num_nodes).argmax())
    neighbours = data.edge_index[0][data.edge_index[1] == old]
    arcs = torch.stack([neighbours, torch.full_like(neighbours, data.num_nodes)])
    x = data.x.to_dense() if data.x.layout != torch.strided else data.x
    now = {**parts, client: grown(data, x[old : old + 1], arcs)}
    if data.cross is not None:
        now = with_cross_edges_of(now, client, old)
    found = load_models(tmp_path / "r").predict(data=now)
    assert len(found[client]) == data.num_nodes + 1
    distance = (found[client].probability[old] - found[client].probability[-1]).abs().max()
    assert float(distance) < 0.12
    assert all(bool(torch.isfinite(one.probability).all()) for one in found.values())


def test_new_rows_of_s_are_the_mean_of_the_rows_a_node_reaches(tmp_path: Path) -> None:
    ((settings, _),) = small_runs("fedstruct").values()
    start(settings, tmp_path / "r")
    parts = parts_for(settings, scenario_of(settings))
    client = min(parts)
    now = {**parts, client: grown(parts[client], torch.zeros(1, parts[client].num_features), torch.empty(2, 0).long())}
    models = load_models(tmp_path / "r")
    models.predict(data=now)
    sent = {entry.message for entry in models.entries}
    assert {"TrainedRows", "KnownRows"} <= sent, "an isolated new node reaches nobody, and gets the mean of all rows"
    models.predict()
    assert "KnownRows" not in {entry.message for entry in models.entries}, "nothing is new in the data of the training"


def test_own_data_from_python(tmp_path: Path) -> None:
    data = Data(x=torch.randn(40, 3), edge_index=torch.randint(0, 40, (2, 90)), y=torch.arange(40) % 2)
    isthmus.run("fedavg", dataset=data, clients=2, partition="random", rounds=2, out=tmp_path / "r", split="40/20/40")
    models = isthmus.load_models(tmp_path / "r")
    new = Data(x=torch.randn(5, 3), edge_index=torch.tensor([[0, 1], [1, 2]]))
    found = models.predict("client-0", data=new)
    assert len(found["client-0"]) == 5 and found["client-0"].labelled == 0
    assert float((found["client-0"].probability.sum(1) - 1).abs().max()) < 1e-6
    with pytest.raises(DataError, match="takes 3 features, the data have 4"):
        models.predict("client-0", data=Data(x=torch.randn(5, 4), edge_index=new.edge_index))
    with pytest.raises(ConfigError, match="say whose they are"):
        models.predict(data=new)
    with pytest.raises(DataError, match="class 4, and the model of client-0 knows classes 0 to 1"):
        models.predict("client-0", data=Data(x=torch.randn(5, 3), edge_index=new.edge_index, y=torch.arange(5)))


def directed_graph(seed: int = 0, count: int = 45) -> Data:
    """Arcs of one direction and features that need a scale: general settings change both before they train."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator) * torch.tensor([1.0, 100.0, 0.01]) + torch.tensor([0.0, 5.0, 3.0])
    arcs = torch.randint(0, count, (2, 3 * count), generator=generator)
    return Data(x=x, edge_index=arcs[:, arcs[0] != arcs[1]], y=(x[:, 1] > 5.0).long(), owner=torch.arange(count) % 3)


@pytest.mark.parametrize("method", ["fedavg", "adafgl", "fedgcn", "fedggr", "fedstruct", "hifgl", "central"])
def test_own_data_given_again_are_prepared_as_in_training(method: str, tmp_path: Path) -> None:
    """Features on the scale of the training, arcs both ways, owners as they were: the predictions of the run."""
    data = directed_graph()
    settings = {"rounds": 3, "patience": 0, **({"secmp": "plain"} if method == "hifgl" else {})}
    variant = {"variant": "near"} if method == "fedstruct" else {"variant": "own"} if method == "hifgl" else {}
    isthmus.run(method, dataset=data, preset="general", set=settings | variant, split="40/20/40", out=tmp_path / "r")
    models = isthmus.load_models(tmp_path / "r")
    wanted, found = models.predict(), models.predict(data=data)
    assert wanted.keys() == found.keys()
    for client, one in wanted.items():
        torch.testing.assert_close(found[client].probability, one.probability, rtol=0, atol=1e-6)
    if method not in ("fedavg", "adafgl"):
        return
    first = data.subgraph(data.owner == 0)  # one owner's nodes alone, without a partner's
    alone = models.predict("client-0", data=Data(x=first.x, edge_index=first.edge_index))["client-0"]
    torch.testing.assert_close(alone.probability, wanted["client-0"].probability, rtol=0, atol=1e-6)
    assert (
        len(models.predict("client-0", data=Data(x=first.x[:0], edge_index=first.edge_index[:, :0]))["client-0"]) == 0
    )


def test_one_graph_of_all_with_nodes_that_came_later(tmp_path: Path) -> None:
    data = directed_graph()
    settings = {"rounds": 2, "variant": "near", "patience": 0}
    isthmus.run("fedstruct", dataset=data, preset="general", set=settings, split="40/20/40", out=tmp_path / "r")
    models, more = isthmus.load_models(tmp_path / "r"), directed_graph(1, 48)
    more.x[:45], more.edge_index = data.x, torch.cat([data.edge_index, torch.tensor([[45, 46], [3, 45]])], 1)
    found = models.predict(data=Data(x=more.x, edge_index=more.edge_index, owner=more.owner))
    assert [len(found[client]) for client in models.clients] == [16, 16, 16] and found["client-0"].labelled == 0
    with pytest.raises(ConfigError, match="says whose each node is"):
        models.predict("client-0", data=Data(x=more.x, edge_index=more.edge_index))
    with pytest.raises(DataError, match="owner names z; the models are of client-0"):
        models.predict(data=Data(x=more.x, edge_index=more.edge_index, owner=["z"] * 48))


def test_new_graphs_need_no_label(tmp_path: Path) -> None:
    isthmus.run("fedavg", dataset="motifs:graphs=30", clients=2, rounds=1, hidden="4,4", out=tmp_path / "r")
    models = isthmus.load_models(tmp_path / "r")
    width = models.packages["client-0"].num_features
    new = [Data(x=torch.rand(n, width), edge_index=torch.tensor([[0], [1]])) for n in (2, 5)]
    assert len(models.predict("client-0", data=new)["client-0"]) == 2


def test_messages_need_everybody(tmp_path: Path) -> None:
    ((settings, _),) = small_runs("fedgcn").values()
    start(settings, tmp_path / "r")
    with pytest.raises(ConfigError, match="predicts with messages between all clients: give the packages of"):
        load_models(tmp_path / "r" / "models" / "client-0").predict()


def test_a_prediction_is_declared(tmp_path: Path) -> None:
    """The calls of a prediction are those of its script, and nothing that trains."""
    for method in all_methods():
        assert (method.predict is None) == (method.predict_script is None), method.name
    settings = resolve("hifgl", {"dataset": "csbm:nodes=60", "clients": 3, "rounds": 1, "hidden": 4})
    start(settings, tmp_path / "r")
    models = load_models(tmp_path / "r")
    models.predict()
    assert {entry.phase for entry in models.entries} == {"prediction"}
    assert not {"DeviceGradients", "Update", "Evaluation"} & {entry.message for entry in models.entries}


def test_the_page_says_how_every_method_predicts() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "predict.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    ways = ("alone", "messages", "no")
    said = {name.strip(): how.strip() for names, how in rows for name in names.split(",") if how.strip() in ways}
    for method in all_methods():
        assert said.get(method.name) == method.predicts, method.name
