"""``isthmus predict`` on tables: the owner's own package, rows that came later, other schemas."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("polars", reason="needs the extra tables")

from isthmus.cli.main import main
from isthmus.data.tables.schema import read_schema

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "banks" / "make_tables.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Banks, a FedAvg and a FedStruct run on them, run folders gone but for the packages."""
    place = tmp_path_factory.mktemp("banks")
    spec = importlib.util.spec_from_file_location("bank_tables", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_banks(place / "banks", accounts=150, transfers=900)
    for method, more in (("fedavg", []), ("fedstruct", ["--set", "structure_hops=2", "--set", "nsf_dim=8"])):
        run = place / method
        common = ["--dataset", str(place / "banks"), "--rounds", "3", "--set", "selection=best_val_acc", *more]
        assert main(["run", method, *common, "--metric", "accuracy", "--out", str(run)]) == 0
        shutil.move(run / "models", place / f"{method}-models")
        shutil.move(run / "result.json", place / f"{method}.json")
        shutil.rmtree(run)
    return place


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


@pytest.mark.parametrize("method", ["fedavg", "fedstruct"])
def test_all_owners_as_the_run_scored_them(
    method: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.csv"
    command = ["predict", str(trained / f"{method}-models"), "--tables", str(trained / "banks"), "--part", "test"]
    assert main([*command, "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["accuracy"] == json.loads((trained / f"{method}.json").read_text())["test"]
    assert {row["client"] for row in rows(out)} == {"bank-a", "bank-b", "bank-c"}


def test_one_owner_with_accounts_that_came_later(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, package = trained / "banks" / "bank-a", trained / "fedavg-models" / "bank-a"
    accounts, transfers = (list(csv.reader((tables / f"{n}.csv").open())) for n in ("accounts", "transfers"))
    header, first = accounts[0], accounts[1]
    label = header.index("fraud")
    new = [["NEW-1" if n == 0 else cell for n, cell in enumerate(first) if n != label]]
    ends = [transfers[0].index(name) for name in ("from", "to")]
    edge = list(transfers[1])
    edge[ends[0]], edge[ends[1]] = "NEW-1", first[0]
    for name, lines in (
        ("nodes", [[h for n, h in enumerate(header) if n != label], *new]),
        ("edges", [transfers[0], edge]),
    ):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    common = ["predict", str(package), "--tables", str(tables)]
    assert main([*common, "--out", str(tmp_path / "old.csv")]) == 0
    more = ["--nodes", str(tmp_path / "nodes.csv"), "--edges", str(tmp_path / "edges.csv")]
    assert main([*common, *more, "--out", str(tmp_path / "new.parquet")]) == 0
    assert main([*common, *more, "--out", str(tmp_path / "new.csv")]) == 0
    old, now = rows(tmp_path / "old.csv"), rows(tmp_path / "new.csv")
    assert len(now) == len(old) + 1 and now[-1]["id"] == "NEW-1" and now[-1]["label"] == ""
    assert abs(sum(float(now[-1][f"probability_{name}"]) for name in ("no", "yes")) - 1) < 1e-6
    far = [a for a, b in zip(old, now, strict=False) if a == b]
    assert len(far) > len(old) // 2, "accounts that the new one does not reach are predicted as before"
    capsys.readouterr()


def test_a_wrong_row_is_named_where_it_stands(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the file with further rows, not in the table that Isthmus makes of both; no further rows are no mistake."""
    tables, package = trained / "banks" / "bank-a", trained / "fedavg-models" / "bank-a"
    header, *accounts = csv.reader((tables / "accounts.csv").open())
    good = ["NEW-1", *accounts[0][1:]]
    bad = [
        "NEW-2" if name == header[0] else "XX" if name == "country" else cell
        for name, cell in zip(header, good, strict=True)
    ]
    common = ["predict", str(package), "--tables", str(tables), "--nodes", str(tmp_path / "new.csv")]
    for lines, code, said in (
        ([header, good, bad], 3, "new.csv, line 3, column country: is none of"),
        ([header, good, good], 3, "new.csv, line 3, column account: is the id of an earlier row"),
        ([header], 0, ""),
    ):
        with (tmp_path / "new.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
        assert main([*common, "--out", str(tmp_path / "scores.csv")]) == code
        assert said in capsys.readouterr().err
    assert len(rows(tmp_path / "scores.csv")) == len(accounts)


def test_another_schema_is_named_by_column(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained / "banks" / "bank-a", tmp_path / "bank")
    schema = tmp_path / "bank" / "schema.toml"
    text = schema.read_text()
    assert "log-standard" in text
    schema.write_text(text.replace("log-standard", "standard", 1))
    command = ["predict", str(trained / "fedavg-models" / "bank-a"), "--tables", str(tmp_path / "bank")]
    assert main([*command, "--out", str(tmp_path / "scores.csv")]) == 3
    error = capsys.readouterr().err
    assert "the model was trained with another schema.toml: feature" in error and "differs in scale" in error


def test_mistakes(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = str(trained / "fedavg-models" / "bank-a")
    assert main(["predict", str(tmp_path), "--out", "x.csv"]) == 3
    assert "holds no model package" in capsys.readouterr().err
    assert main(["predict", package, "--tables", str(trained / "banks" / "bank-a"), "--out", "x.txt"]) == 2
    assert "predictions are written as .csv or .parquet" in capsys.readouterr().err
    assert main(["predict", package, "--client", "bank-z", "--out", "x.csv"]) == 2
    assert "unknown client 'bank-z'" in capsys.readouterr().err


def explained(capsys: pytest.CaptureFixture[str], out: Path, *more: str) -> list[dict[str, str]]:
    assert main(["predict", *more, "--explain", "--out", str(out)]) == 0
    capsys.readouterr()
    return rows(out)


def test_explanations_are_in_the_output(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the owner's names, of own nodes only, and they add up."""
    tables = trained / "banks" / "bank-a"
    common = [str(trained / "fedavg-models" / "bank-a"), "--tables", str(tables)]
    accounts = {row["account"] for row in csv.DictReader((tables / "accounts.csv").open())}
    columns = set(read_schema(tables).columns)
    chosen = sorted(accounts)[:4]
    named = [word for account in chosen for word in ("--id", account)]
    assert main(["predict", *common, *named, "--out", str(tmp_path / "plain.csv")]) == 0
    plain = rows(tmp_path / "plain.csv")
    assert sorted(row["id"] for row in plain) == chosen and "top_features" not in plain[0]
    found = explained(capsys, tmp_path / "some.csv", *common, *named, "--top", "2")
    assert [{name: row[name] for name in plain[0]} for row in found] == plain, "the predictions are the same"
    every = explained(capsys, tmp_path / "all.csv", *common, *named, "--top", "1000")
    for short, row in zip(found, every, strict=True):
        features, neighbours = (json.loads(row[name]) for name in ("top_features", "top_neighbours"))
        assert set(features) <= columns and set(neighbours) <= accounts - {row["id"]}
        assert list(json.loads(short["top_features"]).items()) == list(features.items())[:2]
        assert sum(features.values()) == pytest.approx(float(row["margin"]), rel=0.02, abs=0.02)
        total = float(row["own_features"]) + sum(neighbours.values())
        assert total == pytest.approx(float(row["margin"]), rel=0.02, abs=0.02)
    assert any(json.loads(row["top_neighbours"]) for row in every)


def test_explanations_of_all_owners(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {}
    for bank in ("bank-a", "bank-b"):
        names[bank] = [row["account"] for row in csv.DictReader((trained / "banks" / bank / "accounts.csv").open())]
    common = [str(trained / "fedavg-models"), "--tables", str(trained / "banks")]
    wanted = [word for bank in names for word in ("--id", names[bank][0])]
    found = explained(capsys, tmp_path / "scores.csv", *common, *wanted)
    for row in found:
        assert set(json.loads(row["top_neighbours"])) <= set(names[row["client"]]), "nobody else's accounts"
    assert {row["client"] for row in found} == set(names)


def test_no_explanation_without_a_plain_model(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", str(trained / "fedstruct-models"), "--tables", str(trained / "banks"), "--out", "x.csv"]
    assert main([*command, "--explain"]) == 2
    error = capsys.readouterr().err
    assert "a model of fedstruct is more than a graph neural network" in error
    assert "predict without explanations" in error and error.count("\n") == 1
    assert not Path("x.csv").exists()


def test_an_id_that_nobody_has(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package, tables = trained / "fedavg-models" / "bank-a", trained / "banks" / "bank-a"
    assert main(["predict", str(package), "--tables", str(tables), "--id", "NOBODY", "--out", "x.csv"]) == 2
    assert "no sample 'NOBODY' among those of bank-a" in capsys.readouterr().err
