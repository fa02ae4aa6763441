"""``isthmus reproduce`` on a small made-up paper: what is printed, written, skipped, refused, and with which exit
code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import isthmus
from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.papers import tables
from isthmus.papers.tables import read_paper

DATA = "csbm:nodes=60,features=6"
MINI = f"""
title = "A small paper"
cite = "Nobody, 2020"
runs = 2
spread = "population"
reference = "Local"
run = {{ split = "20/20/60", rounds = 2, backbone = "gcn", hidden = [4] }}
[label]
"Blocks" = {{ dataset = "{DATA}" }}
"Flickr" = {{ dataset = "flickr" }}
"2 clients" = {{ clients = 2 }}
"3 clients" = {{ clients = 3 }}
"Local" = {{ method = "local" }}
"FedAvg" = {{ method = "fedavg" }}
"FedFuture" = {{ method = "fedfuture" }}
[[table]]
key = "1.1"
alias = ["table1"]
title = "Accuracy"
columns = ["Blocks", "Flickr"]
parts = ["2 clients", "3 clients"]
rows = [
  ["Local",     "60+-99 / 60+-99", "50 / 50"],
  ["FedAvg",    "1+-.1 / 2+-.1",   "50 / 50"],
  ["FedFuture", "90 / 90",         "90"],
]
[[table.note]]
only = "fedavg, blocks, 2"
finding = "Our number is higher for a reason."
[[table]]
key = "2"
title = "Another"
columns = ["Blocks"]
rows = [["Local", "60"]]
"""


@pytest.fixture(autouse=True)
def mini(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paper = read_paper("mini", MINI)
    real = tables.load_paper
    monkeypatch.setattr(tables, "load_paper", lambda name: paper if name == "mini" else real(name))
    monkeypatch.delenv("ISTHMUS_DATA", raising=False)
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ISTHMUS_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def reproduce(*words: str) -> int:
    return main(["reproduce", *words, "--jobs", "1", "--out", "runs"])


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def cells(found: dict[str, Any], table: int = 0) -> dict[str, dict[str, Any]]:
    return {cell["cell"]: cell for cell in found["tables"][table]["cells"]}


def test_ours_beside_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mini/table1", "--only", "blocks", "--json") == 0
    found = document(capsys)
    assert found["runs"] == {"done": 8}
    got = cells(found)
    assert got["Local / Blocks / 2 clients"]["verdict"] == "within 1"
    assert got["FedAvg / Blocks / 2 clients"]["cause"] == "not reproduced"
    assert got["FedAvg / Blocks / 3 clients"]["verdict"] == "above"
    assert got["FedFuture / Blocks / 2 clients"]["reason"] == "method fedfuture is not here yet"
    fedavg, local = got["FedAvg / Blocks / 3 clients"], got["Local / Blocks / 3 clients"]
    assert fedavg["ours"]["seeds"] == [0, 1]
    differences = [a - b for a, b in zip(fedavg["ours"]["values"], local["ours"]["values"], strict=True)]
    assert fedavg["paired"]["mean"] == pytest.approx(sum(differences) / 2)
    assert fedavg["parameters"]["trainable"] > 0
    # What was written holds the same, and a second call plays nothing.
    written = json.loads(Path("runs/mini-1.1.json").read_text())
    assert cells(written)["FedAvg / Blocks / 2 clients"]["ours"] == got["FedAvg / Blocks / 2 clients"]["ours"]
    assert reproduce("mini/1.1", "--only", "blocks", "--json") == 0
    assert document(capsys)["runs"] == {"reused": 8}


def test_the_same_from_python_and_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = isthmus.reproduce("mini/table1", only="blocks", runs=1, out="runs")
    assert found["runs"] == {"done": 4} and capsys.readouterr() == ("", "")
    assert reproduce("mini/table1", "--only", "blocks", "--runs", "1", "--json", "--table", "table.csv") == 0
    assert document(capsys)["tables"] == json.loads(json.dumps(found["tables"]))
    (table,) = found.tables()
    assert Path("table.csv").read_text() == table.to_csv()
    row = table.records()[0]
    assert row["cell"] == "Local / Blocks / 2 clients" and (row["published"], row["published std"]) == (60.0, 99.0)
    assert row["ours"] == cells(found)["Local / Blocks / 2 clients"]["ours"]["mean"]
    with pytest.raises(ConfigError, match="none of these cells has a result"):
        isthmus.reproduce("mini/2", runs=0, out="elsewhere")


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mini/1.1", "--only", "2", "--runs", "1") == 0
    out = capsys.readouterr().out
    assert "FedAvg / Blocks / 2 clients" in out
    assert "± unknown" in out  # one seed
    assert "finding: Our number is higher for a reason." in out
    assert "not reproduced: FedAvg / Blocks / 2 clients" in out
    assert "FedFuture: method fedfuture is not here yet" in out
    assert "not run: Local, FedAvg:" in out and "lickr" in out  # no data: named, and the rest is rendered


def test_runs_that_lie_there_are_shown_without_running(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mini/2", "--runs", "1", "--json") == 0
    capsys.readouterr()
    assert reproduce("mini", "--runs", "0", "--json") == 0
    found = document(capsys)
    assert found["runs"] == {}
    assert cells(found, 1)["Local / Blocks"]["ours"]["seeds"] == [0]


def test_damaged_folders_end_with_3_after_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mini/1.1", "--only", "local blocks 2", "--json") == 0
    capsys.readouterr()
    damaged = sorted(path for path in Path("runs").iterdir() if path.is_dir())[0]
    (damaged / "config.toml").write_text("[[[")
    assert reproduce("mini/1.1", "--only", "local blocks", "--json") == 3
    captured = capsys.readouterr()
    got = cells(json.loads(captured.out))
    assert got["Local / Blocks / 2 clients"]["ours"]["seeds"] == [1]
    assert "config.toml is damaged" in got["Local / Blocks / 2 clients"]["reason"]
    assert got["Local / Blocks / 3 clients"]["ours"]["seeds"] == [0, 1]
    assert str(damaged) in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nopaper"], 2, "unknown paper 'nopaper'"),
        (["mini/table7"], 2, "unknown table of mini 'table7': did you mean 'table1'? allowed: 1.1, 2, table1"),
        (
            ["mini/1.1", "--only", "corra"],
            2,
            "no cell of mini/1.1 matches 'corra'; rows, columns and parts are: Local, FedAvg",
        ),
        (["mini/1.1", "--only", "fedfuture"], 2, "none of these cells has a result: method fedfuture is not here yet"),
        (["mini/1.1", "--only", "flickr local 2"], 3, "nothing could be run"),
        (["mini", "--runs", "-1"], 2, "--runs"),
        ([], 2, "name a paper"),
    ],
)
def test_mistakes_are_one_line(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(*words) == code
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert error[-1].startswith("isthmus: ")


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list", "--json"]) == 0
    names = {entry["table"] for entry in document(capsys)["tables"]}
    assert {"fedstruct/10.1", "fedggr/8.2", "hifgl/9.4", "fedspray/8.5", "fedstar/8.10"} <= names
    assert main(["reproduce", "mini", "--list", "--json"]) == 0
    first = document(capsys)["tables"][0]
    assert (first["cells"], first["runnable"]) == (11, 4), "flickr is not here"
    assert first["missing"] == [
        "data set flickr is not here (isthmus data get flickr)",
        "method fedfuture is not here yet",
    ]
    assert main(["reproduce", "mini/1.1", "--only", "fedavg blocks 3", "--list"]) == 0
    out = capsys.readouterr().out
    assert "2+-.1" in out
    assert f"isthmus run fedavg --dataset {DATA} --clients 3 --split 20/20/60 --rounds 2" in out


def test_the_results_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mini/1.1", "--only", "blocks", "--runs", "2", "--docs", "docs") == 0
    page = Path("docs/mini.md").read_text()
    assert "# A small paper" in page
    assert "8 runs" in page
    assert "Our number is higher for a reason." in page
    paired = [
        float(line.split("|")[7].split()[0]) for line in page.splitlines() if line.startswith("| FedAvg / Blocks")
    ]
    mean = page.partition("Mean over cells, to Local: FedAvg ")[2].partition(" over 2 cells.")[0]
    assert float(mean) == pytest.approx(sum(paired) / 2, abs=0.011) and len(paired) == 2
    assert "method fedfuture is not here yet" in page
    assert str(Path.cwd()) not in page
    # From the folders alone, the same page.
    Path("docs/mini.md").unlink()
    assert reproduce("mini", "--runs", "0", "--docs", "docs") == 0
    assert Path("docs/mini.md").read_text() == page


def test_a_page_outlives_its_run_folders(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("mini/1.1", "--only", "blocks", "--runs", "2", "--docs", "docs") == 0
    page, records = Path("docs/mini.md").read_text(), Path("docs/mini.jsonl").read_text()
    assert str(Path.cwd()) not in records
    assert len(records.splitlines()) == 8
    shutil.rmtree("runs")
    assert reproduce("mini", "--runs", "0", "--docs", "docs") == 0
    assert (Path("docs/mini.md").read_text(), Path("docs/mini.jsonl").read_text()) == (page, records)
    # A page is never emptied.
    Path("docs/mini.jsonl").rename("records")
    assert reproduce("mini", "--runs", "0", "--docs", "docs") == 2
    assert Path("docs/mini.md").read_text() == page
    assert "was not changed" in capsys.readouterr().err
    Path("records").rename("docs/mini.jsonl")
    # Recorded runs stand, what is new is played and added; without the records everything is to be done again.
    capsys.readouterr()
    assert reproduce("mini/1.1", "--only", "local blocks 2", "--runs", "3", "--docs", "docs", "--json") == 0
    assert document(capsys)["runs"] == {"done": 1}
    assert len(Path("docs/mini.jsonl").read_text().splitlines()) == 8, (
        "the paper has two seeds: its page shows no third"
    )
    assert reproduce("mini/1.1", "--only", "local blocks 2", "--runs", "1", "--json") == 0
    assert document(capsys)["runs"] == {"done": 1}
    # The folder wins over the record.
    assert '"score":0.' in records
    Path("docs/mini.jsonl").write_text(records.replace('"score":0.', '"score":0.9'))
    assert reproduce("mini/1.1", "--only", "local blocks 2", "--runs", "2", "--docs", "docs") == 0
    before, after = (
        [json.loads(line) for line in text.splitlines()] for text in (records, Path("docs/mini.jsonl").read_text())
    )
    assert sum(old["score"] == new["score"] for old, new in zip(before, after, strict=True)) == 1, (
        "only seed 0 has a folder again"
    )


def test_a_broken_record_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("docs").mkdir()
    Path("docs/mini.jsonl").write_text('{"run_dir": "x", "seed": 0}\n{"seed": 1}\n')
    assert reproduce("mini/1.1", "--runs", "0", "--docs", "docs") == 3
    assert "mini.jsonl line 2 is not a record of a run" in capsys.readouterr().err
