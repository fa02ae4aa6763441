"""Comparisons, sweeps and reproductions from Python, and their tables as files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

import isthmus
from isthmus.api.table import Cell, Table, scored, write_table
from isthmus.cli.main import main
from isthmus.errors import ConfigError, DataError

SMALL: dict[str, Any] = {"dataset": "csbm:nodes=60,features=6", "clients": 3, "rounds": 2, "hidden": 4}
FLAGS = ["--dataset", "csbm:nodes=60,features=6", "--clients", "3", "--rounds", "2", "--set", "hidden=4", "--jobs", "1"]


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_comparison_is_that_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    found = isthmus.compare(["local", "fedavg"], runs=2, out=out, **SMALL)
    assert capsys.readouterr() == ("", "")
    table = tmp_path / "table.csv"
    words = ["compare", "local", "fedavg", *FLAGS, "--runs", "2", "--out", str(out), "--json", "--table", str(table)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == found == json.loads((out / "compare.json").read_text())
    fedavg = found["methods"][1]
    assert [each["seed"] for each in found.results["fedavg"]] == [0, 1]
    assert [each["score"] for each in found.results["fedavg"]] == fedavg["scores"]
    rows = rows_of(table.read_text())
    assert [row["method"] for row in rows] == ["local", "fedavg"]
    assert float(rows[1]["score"]) == fedavg["score"]["mean"] and float(rows[1]["score std"]) == fedavg["score"]["std"]
    assert float(rows[1]["to local, paired"]) == fedavg["difference"]["mean"] and rows[0]["to local, paired"] == ""
    assert int(rows[1]["parameters"]) == fedavg["parameters"]["trainable"]
    assert "fedavg" in found._repr_html_()


def test_own_data_in_memory(tmp_path: Path) -> None:
    import torch
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.rand(60, 4, generator=generator),
        edge_index=torch.randint(0, 60, (2, 200), generator=generator),
        y=torch.randint(0, 2, (60,), generator=generator),
    )
    keys: dict[str, Any] = {"dataset": data, "clients": 2, "rounds": 1, "hidden": 4, "preset": "fedstruct"}
    found = isthmus.compare(["local", "fedavg"], runs=1, out=tmp_path / "out", **keys)
    assert [row["seeds"] for row in found["methods"]] == [[0], [0]]
    swept = isthmus.sweep("fedavg", {"lr": [0.01, 0.1]}, out=tmp_path / "sweep", **keys)
    assert set(swept.best) == {"lr"}


def test_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {"lr": [0.01, 0.1], "hidden": [[4], [4, 4]]}
    keys = {key: value for key, value in SMALL.items() if key != "hidden"}
    found = isthmus.sweep("fedavg", grid, out=tmp_path / "out", **keys)
    assert len(found["rows"]) == 4 and found.best == found["rows"][0]["point"]
    assert found["rows"][0]["val"]["mean"] == max(row["val"]["mean"] for row in found["rows"])
    table = tmp_path / "table.md"
    words = ["sweep", "fedavg", *FLAGS[:-4], "--jobs", "1", "--grid", "lr=0.01,0.1", "--grid", "hidden=[4],[4,4]"]
    assert main([*words, "--out", str(tmp_path / "out"), "--table", str(table)]) == 0
    assert "| lr | hidden | val |" in table.read_text() and "best validation first" in table.read_text()
    with pytest.raises(ConfigError, match="different scenarios"):
        isthmus.sweep("fedavg", {"clients": [2, 3]}, out=tmp_path / "two", **{**keys, "clients": None}).best  # noqa: B018
    with pytest.raises(ConfigError, match="values to try"):
        isthmus.sweep("fedavg", {}, **keys)


def test_mistakes_are_named_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, text in (("t.xlsx", ".csv, .md, .tex"), ("nowhere/t.csv", "no folder")):
        words = ["compare", "local", "fedavg", *FLAGS, "--out", str(tmp_path / "o"), "--table", str(tmp_path / wrong)]
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and text in error
    assert not (tmp_path / "o").exists()
    for methods in ("fedavg", []):
        with pytest.raises(ConfigError, match="name the methods"):
            isthmus.compare(methods, **SMALL)
    with pytest.raises(DataError, match="have no result"):
        isthmus.compare(["local", "fedavg"], runs=1, out=tmp_path / "p", **{**SMALL, "clients": 100})


TABLE = Table(
    "A & B",
    ("method", "score", "share_1"),
    (
        (Cell("a_b"), scored({"mean": 0.5, "std": 0.01, "runs": 2}), Cell("50 %", 0.5)),
        (Cell("c|d"), scored(None), Cell("")),
    ),
    ("note #1",),
    frozenset({"score"}),
)


def test_formats(tmp_path: Path) -> None:
    assert TABLE.to_csv() == "method,score,score std,share_1\na_b,0.5,0.01,0.5\nc|d,,,\n"
    assert "| a_b | 50.00 ± 1.00 | 50 % |" in TABLE.to_markdown() and "c\\|d" in TABLE.to_markdown()
    latex = TABLE.to_latex()
    assert r"a\_b & 50.00 $\pm$ 1.00 & 50 \% \\" in latex and r"share\_1" in latex and latex.startswith("% A & B")
    assert latex.count(r"\\") == 3 and r"\begin{tabular}{lrr}" in latex
    for suffix in (".csv", ".md", ".tex"):
        path = write_table([TABLE, TABLE], tmp_path / f"t{suffix}")
        assert path.read_text().count("a") >= 2


def test_a_table_as_a_frame() -> None:
    pytest.importorskip("pandas")
    frame = TABLE.to_pandas()
    assert list(frame.columns) == ["method", "score", "score std", "share_1"] and frame["score"][0] == 0.5
