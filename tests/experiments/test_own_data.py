"""Own data from Python and from files, everywhere a named data set can be used."""

from __future__ import annotations

import importlib.util
import json
import pickle
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import isthmus
from isthmus.cli.main import main
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of_settings
from isthmus.methods.registry import all_methods, get_method

NAMES = ("bank-a", "bank-b", "bank-c")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "banks" / "make_tables.py"


def graph(nodes: int = 90, seed: int = 0, **more: Any) -> Data:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (nodes,), generator=draw)
    x = torch.nn.functional.one_hot(y, 3).float() + torch.rand((nodes, 3), generator=draw)
    ends = torch.randint(0, nodes, (2, 4 * nodes), generator=draw)
    return Data(x=x, edge_index=torch.cat([ends, ends.flip(0)], 1).unique(dim=1), y=y, **more)


def owners(nodes: int = 90) -> list[str]:
    return [NAMES[i % 3] for i in range(nodes)]


def masks(nodes: int = 90) -> dict[str, torch.Tensor]:
    part = torch.arange(nodes) % 10
    return {"train": part < 4, "val": (part >= 4) & (part < 6), "test": part >= 6}


def molecules(count: int, seed: int) -> list[Data]:
    draw = torch.Generator().manual_seed(seed)
    return [
        Data(
            x=torch.rand((5, 4), generator=draw),
            edge_index=torch.tensor([[0, 1, 2, 3, 1, 2, 3, 4], [1, 2, 3, 4, 0, 1, 2, 3]]),
            y=torch.tensor([i % 2]),
        )
        for i in range(count)
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def banks(folder: Path) -> Path:
    pytest.importorskip("polars", reason="needs the extra tables")
    spec = importlib.util.spec_from_file_location("bank_tables", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_banks(folder / "banks", accounts=150, transfers=900)
    return folder / "banks"


def config(run: str) -> dict[str, Any]:
    return tomllib.loads(Path(run, "config.toml").read_text())["run"]


# -- what is accepted ----------------------------------------------------------------------------------


def test_a_graph_without_owners_is_divided_and_with_them_is_not(folder: Path) -> None:
    divided = isthmus.run("fedavg", dataset=graph(), partition="louvain", clients=3, rounds=2, out="a")
    assert divided["clients"] == 3 and divided["partition"] == "louvain"
    keys: dict[str, Any] = {"rounds": 2, "dropout": 0.0}  # a client's random draws depend on its name
    named = isthmus.run("fedavg", dataset=graph(owner=owners()), **keys, out="b")
    assert named["clients"] == 3 and config("b")["partition"] == "owner"
    assert {path.stem for path in Path("b/models").iterdir()} == set(NAMES)
    number = torch.tensor([NAMES.index(name) for name in owners()])
    assert isthmus.run("fedavg", dataset=graph(), partition=number, **keys, out="c")["test"] == named["test"]
    assert isthmus.run("fedavg", dataset=graph(), partition=owners(), **keys, out="d")["test"] == named["test"]


def test_masks_from_python_from_the_graph_and_from_a_file_are_the_same(folder: Path) -> None:
    inside = graph(owner=owners(), **{f"{part}_mask": mask for part, mask in masks().items()})
    tests = [isthmus.run("fedavg", dataset=inside, rounds=2, out="a")["test"]]
    assert config("a")["split"] == "public"
    plain = graph(owner=owners())
    tests.append(isthmus.run("fedavg", dataset=plain, split=masks(), rounds=2, out="b")["test"])
    np.savez("masks.npz", **{part: mask.numpy() for part, mask in masks().items()})
    tests.append(isthmus.run("fedavg", dataset=plain, split="masks:masks.npz", rounds=2, out="c")["test"])
    assert len(set(tests)) == 1
    assert isthmus.run("fedavg", dataset=plain, rounds=2, out="d")["test"] != tests[0]


@pytest.mark.parametrize("method", ["fedavg", "fedstar", "gcfl", "local"])
def test_sets_of_graphs_by_owner(method: str, folder: Path) -> None:
    data = {"lab-a": molecules(12, 0), "lab-b": molecules(15, 1)}
    result = isthmus.run(method, dataset=data, rounds=2, out="run")
    assert result["clients"] == 2 and {path.stem for path in Path("run/models").iterdir()} == set(data)


def test_a_file_gives_what_memory_gives_and_one_with_code_is_refused(folder: Path) -> None:
    data = graph(owner=owners())
    torch.save(data, "graph.pt")
    memory = isthmus.run("fedavg", dataset=data, rounds=2, out="a")
    assert isthmus.run("fedavg", dataset="./graph.pt", rounds=2, out="b")["test"] == memory["test"]

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (folder / "was-run",)

    torch.save({"x": Code()}, "evil.pt", pickle_module=pickle)
    with pytest.raises(DataError, match="holds more than tensors and is not opened"):
        isthmus.run("fedavg", dataset="./evil.pt", out="c")
    assert not (folder / "was-run").exists() and not (folder / "c").exists()


def test_config_holds_a_hash_and_not_the_data(folder: Path) -> None:
    isthmus.run("fedavg", dataset=graph(owner=owners()), rounds=1, out="a")
    isthmus.run("fedavg", dataset=graph(seed=1, owner=owners()), rounds=1, out="b")
    first, second = config("a")["data_hash"], config("b")["data_hash"]
    assert len(first) == 64 and first != second and config("a")["dataset"] == f"own:{first[:16]}"
    assert Path("a/config.toml").stat().st_size < 3000


# -- continuing ----------------------------------------------------------------------------------------


class StopAfter(Callback):
    def on_round(self, progress: Progress) -> None:
        if progress.phase == "train" and progress.round == 1:
            raise KeyboardInterrupt


def test_resume_asks_for_the_same_data_and_refuses_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"rounds": 3, "set": {"checkpoint.every": 1}}
    whole = isthmus.run("fedavg", dataset=graph(owner=owners()), **keys, out="whole")
    with pytest.raises(KeyboardInterrupt):
        isthmus.run("fedavg", dataset=graph(owner=owners()), **keys, out="cut", callbacks=[StopAfter()])
    monkeypatch.setattr("isthmus.data.given._KEPT", {})  # as in another process
    with pytest.raises(DataError, match="give the same data again"):
        isthmus.resume("cut")
    with pytest.raises(DataError, match="give the same data again"):
        isthmus.resume("cut", dataset=graph(seed=1, owner=owners()))
    assert isthmus.resume("cut", dataset=graph(owner=owners()))["test"] == whole["test"]


@pytest.mark.parametrize("kind", ["file", "tables"])
def test_resume_refuses_a_file_or_table_that_changed(kind: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if kind == "file":
        torch.save(graph(owner=owners()), "graph.pt")
        dataset = "./graph.pt"
    else:
        request.getfixturevalue("banks")
        dataset = "./banks"
    keys: dict[str, Any] = {"dataset": dataset, "rounds": 3, "set": {"checkpoint.every": 1}}
    with pytest.raises(KeyboardInterrupt):
        isthmus.run("fedavg", **keys, out="cut", callbacks=[StopAfter()])
    if kind == "file":
        torch.save(graph(seed=1, owner=owners()), "graph.pt")
    else:
        table = Path("banks/bank-a/accounts.csv")
        table.write_text(table.read_text() + "AC0,no,1.0,FR,0\n")
    with pytest.raises(DataError, match="other data than this run began with"):
        isthmus.resume("cut")


# -- everywhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "tables"])
def test_every_command_takes_own_data(
    kind: str, folder: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "file":
        torch.save(graph(owner=owners()), "graph.pt")
        place, clients = "./graph.pt", set(NAMES)
    else:
        request.getfixturevalue("banks")
        place, clients = "./banks", set(NAMES)
    scenario = ["--dataset", place, "--rounds", "2"]
    assert (
        main(["partitions", "--dataset", place, "--json", *([] if kind == "tables" else ["--partition", "owner"])]) == 0
    )
    assert {row["client"] for row in json.loads(capsys.readouterr().out)["clients"]} == clients
    assert main(["compare", "fedavg", "local", *scenario, "--runs", "1", "--jobs", "1", "--out", "compare"]) == 0
    assert main(["sweep", "fedavg", *scenario, "--grid", "lr=0.1,0.01", "--jobs", "2", "--out", "sweep"]) == 0
    assert main(["run", "fedavg", *scenario, "--out", "run"]) == 0
    assert main(["run", "fedavg", *scenario, "--set", "wire=true", "--out", "wire"]) == 0
    assert main(["report", "run", "--out", "report.html"]) == 0 and Path("report.html").stat().st_size > 1000
    results = [json.loads(Path(run, "result.json").read_text()) for run in ("run", "wire")]
    assert results[0]["test"] == results[1]["test"]


def test_tables_from_python(banks: Path) -> None:
    result = isthmus.run("fedavg", dataset=isthmus.Tables(banks), rounds=2, out="run")
    assert result["clients"] == 3 and len(config("run")["data_hash"]) == 64


NODE_METHODS = sorted(method.name for method in all_methods() if "node" in method.tasks)


@pytest.mark.parametrize("method", NODE_METHODS)
def test_every_node_method_runs_on_own_data(method: str, folder: Path) -> None:
    data = graph(owner=owners())
    try:
        settings = resolve(method, isthmus.experiments.run.by_name({"dataset": data, "rounds": 2}))
    except ConfigError as error:
        pytest.skip(str(error))
    result = isthmus.run(method, dataset=data, rounds=2, out="run")
    assert result["dataset"] == settings.run.dataset and 0.0 <= result["test"] <= 1.0
    assert result["clients"] == (1 if get_method(method).pooled and result["clients"] == 1 else 3)


def test_a_folder_without_a_slash_is_suggested_with_one(banks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedavg", "--dataset", "banks2"]) == 2
    assert "./" not in capsys.readouterr().err
    (banks.parent / "mine").mkdir()
    assert main(["run", "fedavg", "--dataset", "mine"]) == 2
    assert "--dataset ./mine" in capsys.readouterr().err


# -- disclosure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("secure", "link"), [(False, "psi"), (True, "psi"), (False, "plain"), (False, "none")])
def test_the_sheet_stated_in_advance_is_what_a_run_on_tables_sends(secure: bool, link: str, banks: Path) -> None:
    keys = {"dataset": str(banks), "rounds": 1, "secure_sum": secure, "link": link}
    declared = {
        (line.phase, line.sender, line.receiver, line.message.__name__, line.protection)
        for line in sheet_of_settings(resolve("fedavg", keys))
    }
    isthmus.run("fedavg", **keys, out="run")
    rows = json.loads(Path("run/disclosure.json").read_text())["rows"]
    sent = {tuple(row[key] for key in ("phase", "sender", "receiver", "message", "protection")) for row in rows}
    assert sent == declared and ("linking" in {row["phase"] for row in rows}) == (link != "none")


def test_disclose_shows_the_preparation_of_tables_only(banks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disclose", "fedavg", "--dataset", str(banks), "--secure-sum"]) == 0
    shown = capsys.readouterr().out
    assert "CellCounts" in shown and "ListedEdges" in shown and "in the clear (link=plain)" in shown
    assert main(["disclose", "fedavg", "--dataset", str(banks), "--set", "link=psi"]) == 0
    shown = capsys.readouterr().out
    assert "LinkRequest" in shown and "ListedEdges" not in shown and "edges both list" in shown
    assert main(["disclose", "fedavg"]) == 0 and "CellCounts" not in capsys.readouterr().out
