"""Weights of edges from the data to scores: a weight of 3 is an arc that is listed three times."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import assert_same_run, models
from torch_geometric.data import Data

import isthmus
from isthmus.data.edge_weights import weighted_arcs
from isthmus.data.own_graph import from_pyg
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.scenarios import build
from isthmus.methods.registry import all_methods
from isthmus.nn.registry import backbones, find_architecture

NODES = 60
WEIGHTED = [method.name for method in all_methods() if method.edge_weights and "node" in method.tasks]
BASE: dict[str, Any] = {"preset": "general", "split": "stratified:40/20/40"}


def graph() -> Data:
    """Arcs of one direction, each once, no loops, with whole numbers from 0 for weights; three owners."""
    generator = torch.Generator().manual_seed(0)
    y, owner = (torch.randint(0, high, (NODES,), generator=generator) for high in (2, 3))
    x = torch.randn(NODES, 4, generator=generator)
    x[:, 0] += y
    codes = torch.randperm(NODES * NODES, generator=generator)[: 4 * NODES]
    arcs = torch.stack([codes // NODES, codes % NODES])
    arcs = arcs[:, arcs[0] != arcs[1]]
    weight = torch.randint(0, 4, (arcs.shape[1],), generator=generator).float()
    return Data(x=x, y=y, edge_index=arcs, edge_weight=weight, owner=[f"org-{number}" for number in owner.tolist()])


def with_weight(weight: torch.Tensor | None) -> Data:
    data = graph()
    if weight is None:
        del data.edge_weight
    else:
        data.edge_weight = weight
    return data


def repeated() -> Data:
    data = graph()
    data.edge_index = data.edge_index.repeat_interleave(data.edge_weight.long(), dim=1)
    del data.edge_weight
    return data


def run(method: str, data: Data, out: Path, **settings: Any) -> Any:
    given = {**BASE, "rounds": 2, "undirected": False, **settings}
    return isthmus.run(method, dataset=data, out=out, quiet=True, set=given)


@pytest.mark.parametrize("method", WEIGHTED)
def test_a_weight_of_three_is_an_arc_listed_three_times(method: str, tmp_path: Path) -> None:
    weighted = run(method, graph(), tmp_path / "weighted", edge_weights="use")
    again = run(method, repeated(), tmp_path / "repeated")
    run(method, graph(), tmp_path / "ignored")
    assert (weighted["val"], weighted["test"]) == (again["val"], again["test"])
    of = {name: trained(tmp_path / name) for name in ("weighted", "repeated", "ignored")}
    assert of["weighted"] != of["ignored"]
    if method != "fedgcn":
        assert of["weighted"] == of["repeated"]
        return
    found, wanted = (isthmus.load_models(tmp_path / name).packages for name in ("weighted", "repeated"))
    for client, package in wanted.items():  # its sums are added up in another order
        torch.testing.assert_close(dict(found[client].weights), dict(package.weights), rtol=1e-4, atol=1e-6)


def trained(folder: Path) -> dict[str, Any]:
    """Hashes of the weights of all models."""
    return {name: value for name, value in models(folder).items() if isinstance(value, str)}


@pytest.mark.parametrize("method", ["fedavg", "fedgcn", "central"])
def test_weights_of_one_change_nothing(method: str, tmp_path: Path) -> None:
    run(method, with_weight(torch.ones(graph().num_edges)), tmp_path / "ones", edge_weights="use", undirected=True)
    run(method, with_weight(None), tmp_path / "none", undirected=True)
    assert trained(tmp_path / "ones") == trained(tmp_path / "none")


def test_all_clients_together_and_one_by_one(tmp_path: Path) -> None:
    weight = torch.rand(graph().num_edges, generator=torch.Generator().manual_seed(1))
    found = [
        run("fedavg", with_weight(weight), tmp_path / how, edge_weights="use", execution=how, undirected=True, rounds=5)
        for how in ("each", "cohort")
    ]
    each, cohort = (isthmus.load_models(result["run_dir"]).predict() for result in found)
    for client, one in each.items():
        torch.testing.assert_close(cohort[client].probability, one.probability, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "fedgcn", "central"])
def test_predictions_read_the_weights_of_the_data_given(method: str, tmp_path: Path) -> None:
    data = graph()
    result = run(method, data, tmp_path / "run", edge_weights="use", undirected=True)
    trained_on = isthmus.load_models(tmp_path / "run")
    wanted, again = trained_on.predict(), trained_on.predict(data=data)
    test = [(one.predicted == one.label)[one.parts["test"]] for one in wanted.values()]
    assert float(torch.cat(test).double().mean()) == pytest.approx(result["test"], abs=1e-9)
    for client, one in wanted.items():
        torch.testing.assert_close(again[client].probability, one.probability, rtol=0, atol=1e-6)
    other = trained_on.predict(data=with_weight(data.edge_weight.flip(0)))
    assert any(not torch.allclose(other[client].probability, one.probability) for client, one in wanted.items())
    with pytest.raises(DataError, match="these data have no edge weights: give edge_weight"):
        trained_on.predict(data=with_weight(None))
    with pytest.raises(ConfigError, match="a plain module does not: predict with"):
        trained_on.packages[next(iter(trained_on.packages))].plain_model()


def test_a_longer_run_and_one_that_went_on_are_the_same(tmp_path: Path) -> None:
    run("fedavg", graph(), tmp_path / "long", edge_weights="use", rounds=4)
    run("fedavg", graph(), tmp_path / "short", edge_weights="use", rounds=2)
    isthmus.resume(tmp_path / "short", rounds=+2)
    assert_same_run(tmp_path / "short", tmp_path / "long")


@pytest.mark.parametrize("method", [each.name for each in all_methods() if each.name not in WEIGHTED])
def test_methods_that_read_edges_otherwise_say_so(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{method} reads edges without weights: set edge_weights=ignore, or take"):
        run(method, graph(), tmp_path / "run", edge_weights="use")


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("fedavg", {"backbone": "gat"}, "backbone=gat reads no weights of edges: .* dgcn, gcn, gin, gprgnn, sage, sgc"),
        ("fedavg", {"backbone": "mlp"}, "backbone=mlp reads no weights"),
        ("central", {"backbone": "dirsage"}, "backbone=dirsage reads no weights"),
        ("fedgcn", {"legacy": True}, "legacy=true hands edges out without weights"),
    ],
)
def test_models_that_read_edges_otherwise_say_so(
    method: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(method, graph(), tmp_path / "run", edge_weights="use", **settings)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (-1.0, "1 of 236 edge weights are negative or not finite, the first is number 7 \\(-1\\): correct them"),
        (math.nan, "number 7 \\(nan\\)"),
        (1e300, "number 7 \\(inf\\)"),
    ],
)
def test_weights_that_cannot_be_are_refused(weight: float, said: str, tmp_path: Path) -> None:
    values = graph().edge_weight.double()
    values[7] = weight
    with pytest.raises(DataError, match=said):
        run("fedavg", with_weight(values), tmp_path / "run", edge_weights="use")
    run("fedavg", with_weight(values), tmp_path / "ignored")
    with pytest.raises(DataError, match="one number for each of the 236 arcs"):
        run("fedavg", with_weight(values[1:]), tmp_path / "short")
    with pytest.raises(DataError, match="these data have no edge weights"):
        run("fedavg", with_weight(None), tmp_path / "none", edge_weights="use")


def test_weights_that_are_not_used_are_named(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="isthmus"):
        run("fedavg", graph(), tmp_path / "ignored")
        run("fedavg", with_weight(None), tmp_path / "none")
        run("fedavg", graph(), tmp_path / "used", edge_weights="use")
    heard = [record.getMessage() for record in caplog.records]
    assert len(heard) == 1 and heard[0].startswith("edge_weight changes nothing here: set edge_weights=use")
    assert trained(tmp_path / "ignored") == trained(tmp_path / "none") != trained(tmp_path / "used")


@pytest.mark.parametrize(("factor", "backbone", "heard"), [(100.0, "gcn", 1), (100.0, "sage", 0), (1.0, "gcn", 0)])
def test_weights_far_from_one_beside_loops_are_named(
    factor: float, backbone: str, heard: int, tmp_path: Path, caplog: Any
) -> None:
    data = with_weight(graph().edge_weight * factor)
    with caplog.at_level(logging.WARNING, logger="isthmus"):
        run("fedavg", data, tmp_path / "run", edge_weights="use", backbone=backbone)
    assert sum("loop to itself counts 1" in record.getMessage() for record in caplog.records) == heard


def test_the_page_names_who_can_use_weights() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (methods,) = (line for line in page.splitlines() if line.startswith("| methods | `apfl`"))
    (kinds,) = (line for line in page.splitlines() if line.startswith("| backbones | dgcn"))
    assert methods.split("`")[1::2] == WEIGHTED
    assert kinds.strip("| ").split(" | ")[1].split(", ") == [
        name for name in backbones() if find_architecture(name).edge_weights
    ]


def test_both_ways_the_larger_direction_counts() -> None:
    """0 -> 1 is listed twice; 1 -> 2 both ways; 2 -> 2 is a loop."""
    arcs = torch.tensor([[0, 0, 1, 2, 2], [1, 1, 2, 1, 2]])
    data = Data(x=torch.ones(4, 1), y=torch.arange(4) % 2, edge_index=arcs)
    data.edge_weight = torch.tensor([[1.5], [2.0], [0.5], [4.0], [7.0]])
    loaded = from_pyg(data)
    assert isinstance(loaded, Loaded)
    both, weight = weighted_arcs(loaded, "use", undirected=True)
    assert both.tolist() == [[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]]
    assert weight is not None and weight.tolist() == [3.5, 3.5, 4.0, 4.0, 7.0]
    stored = Loaded(loaded.data, "", edge_weight=loaded.edge_weight)
    assert torch.equal(weighted_arcs(stored, "use", undirected=False)[0], arcs)


def test_every_owner_holds_the_weights_of_its_arcs() -> None:
    """Own and cross edges, each with its weight: together the weighted matrix of the whole graph."""
    dataset = "banks:banks=3,accounts=60"
    made = build(dataset=dataset, partition=None, clients=3, split=None, seed=0, edge_weights="use")
    plain = build(dataset=dataset, partition=None, clients=3, split=None, seed=0)
    whole = dense(made.whole.edge_index, made.whole.edge_weight)
    assert torch.equal(made.whole.edge_index, plain.whole.edge_index) and float(whole.max()) > 1
    total = torch.zeros_like(whole)
    for part in made.parts.values():
        ids, cross = part.node_id, part.cross
        total += dense(ids[part.edge_index], part.edge_weight)
        out = cross.outgoing
        total += dense(torch.stack([ids[cross.own[out]], cross.other[out]]), cross.weight[out])
        assert torch.equal(cross.weight[~out], whole[cross.other[~out], ids[cross.own[~out]]])
    assert torch.equal(total, whole)
    assert all(bool((part.cross.weight == 1).all()) and part.edge_weight is None for part in plain.parts.values())


def dense(arcs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    nodes = 3 * 60
    return torch.zeros(nodes, nodes).index_put_((arcs[0], arcs[1]), weight, accumulate=True)


def test_tables_with_a_column_of_weights(tmp_path: Path) -> None:
    """Amounts of several rows add up; of an edge to another bank the owner of its source says what it weighs."""
    pytest.importorskip("polars", reason="needs the extra tables")
    write_banks(tmp_path / "weighted", 'weight = "amount"\n')
    write_banks(tmp_path / "plain", "")
    made = build(dataset=str(tmp_path / "weighted"), **NAMELESS, edge_weights="use")
    weights = sorted(made.whole.edge_weight.tolist())
    assert weights == [1.0, 2.0, 7.0, 7.5, 8.0]  # one: 0 -> 1 (3 + 4.5), 1 -> 2, 0 -> two's 0; two: 0 -> 1, 1 -> 2
    assert [part.edge_weight.tolist() for part in made.parts.values()] == [[7.5, 1.0], [2.0, 8.0]]
    assert [part.cross.weight.tolist() for part in made.parts.values()] == [[7.0], [7.0]]
    ignored = build(dataset=str(tmp_path / "weighted"), **NAMELESS)
    assert ignored.whole.edge_weight is None and ignored.parts["one"].cross.weight.tolist() == [1.0]
    with pytest.raises(ConfigError, match="names no weight of edges: add weight"):
        build(dataset=str(tmp_path / "plain"), **NAMELESS, edge_weights="use")
    result = isthmus.run("fedgcn", dataset=str(tmp_path / "weighted"), out=tmp_path / "run", quiet=True, set=TABLES)
    again = isthmus.load_models(tmp_path / "run").predict(tables=tmp_path / "weighted")
    kept = isthmus.load_models(tmp_path / "run").predict()
    assert math.isfinite(result["test"])
    for client, one in kept.items():
        torch.testing.assert_close(again[client].probability, one.probability, rtol=0, atol=1e-6)


NAMELESS: dict[str, Any] = {"partition": None, "clients": None, "split": None, "seed": 0}
TABLES: dict[str, Any] = {"preset": "general", "edge_weights": "use", "rounds": 2}
SCHEMA = """
[nodes]
file = "accounts.*"
id = "id"
label = "kind"
classes = ["a", "b"]
split = "part"
[features]
age = { type = "number", scale = "standard" }
[edges]
file = "transfers.*"
source = "from"
target = "to"
directed = true
"""


def write_banks(folder: Path, weight: str) -> None:
    accounts = "id,kind,age,part\n" + "".join(f"{{0}}{number},{rest}\n" for number, rest in enumerate(ROWS))
    transfers = {
        "one": "one0,one1,3\none1,one2,1\none0,one1,4.5\none0,two0,7\none3,one4,0\n",
        "two": "two0,two1,2\none0,two0,7\ntwo1,two2,8\n",
    }
    for bank, listed in transfers.items():
        home = folder / bank
        home.mkdir(parents=True)
        (home / "schema.toml").write_text(SCHEMA + weight)
        (home / "accounts.csv").write_text(accounts.format(bank))
        (home / "transfers.csv").write_text("from,to,amount\n" + listed)


ROWS = ("a,20,train", "b,40,train", "a,31,val", "b,52,test", "a,18,test")
