"""``isthmus data check``, ``data describe`` and ``link`` on own tables."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("polars", reason="needs the extra tables")
pytest.importorskip("private_set_intersection", reason="needs the extra tables")

from isthmus.cli.main import main
from isthmus.data.tables.schema import parse_schema

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "banks" / "make_tables.py"


@pytest.fixture
def banks(tmp_path: Path) -> Path:
    spec = importlib.util.spec_from_file_location("bank_tables", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_banks(tmp_path / "banks", accounts=150, transfers=900)
    return tmp_path / "banks"


def client_toml(banks: Path, name: str, more: str = "") -> str:
    path = banks.parent / f"{name}.toml"
    path.write_text(f'client = "{name}"\n[tables]\nfolder = "banks/{name}"\n{more}')
    return str(path)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_good_tables_are_summarised_without_a_cell_of_them(banks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(banks)]) == 0
    shown = capsys.readouterr().out
    assert "bank-b: nodes: " in shown and "candidates for linking" in shown and "no errors" in shown
    accounts = (banks / "bank-a" / "accounts.csv").read_text().splitlines()[1:]
    assert not any(row.split(",")[0] in shown for row in accounts)


def test_every_problem_has_a_line_of_its_own_and_the_exit_code_is_3(
    banks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = banks / "bank-a" / "accounts.csv"
    lines = table.read_text().splitlines()
    columns = lines[0].split(",")
    for row, column, value in ((3, "country", "XX"), (7, "fraud", "maybe")):
        cells = lines[row].split(",")
        cells[columns.index(column)] = value
        lines[row] = ",".join(cells)
    table.write_text("\n".join(lines) + "\n")
    toml = client_toml(banks, "bank-a")
    for place in (str(banks / "bank-a"), toml, str(banks)):
        assert main(["data", "check", place]) == 3
        shown = capsys.readouterr().out.splitlines()
        errors = [line for line in shown if line.startswith("error: bank-a: ")]
        assert any("accounts.csv, line 4, column country" in line for line in errors)
        assert any("accounts.csv, line 8, column fraud" in line for line in errors)
    assert main(["data", "check", toml, "--json"]) == 3
    (owner,) = printed(capsys)["owners"]
    assert {(each["line"], each["column"]) for each in owner["errors"]} == {(4, "country"), (8, "fraud")}


def test_a_schema_other_than_the_agreed_one_is_named_by_column(banks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = banks / "bank-a" / "schema.toml"
    assert main(["data", "check", str(banks / "bank-a"), "--against", str(banks / "bank-b" / "schema.toml")]) == 0
    schema.write_text(schema.read_text().replace('["DE", "FR", "NL"]', '["DE", "NL", "FR"]'))
    capsys.readouterr()
    assert main(["data", "check", str(banks / "bank-a"), "--against", str(banks / "bank-b" / "schema.toml")]) == 3
    assert "feature country" in capsys.readouterr().out


def test_warnings_are_marked_and_do_not_fail(banks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = banks / "bank-a" / "accounts.csv"
    head, *rows = [line.split(",") for line in table.read_text().splitlines()]
    for row in rows:
        row[head.index("company")] = "0"
    table.write_text("\n".join(",".join(row) for row in [head, *rows]) + "\n")
    assert main(["data", "check", str(banks / "bank-a")]) == 0
    assert "warning: bank-a: accounts.csv, column company" in capsys.readouterr().out


def test_a_draft_is_a_schema(banks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "describe", str(banks / "bank-a")]) == 0
    schema = parse_schema(capsys.readouterr().out.encode())
    assert schema.labels.classes == ("no", "yes") and {"balance", "country"} <= {f.name for f in schema.features}


def test_a_client_toml_without_tables_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "client.toml"
    path.write_text('client = "client-0"\n[data]\ndataset = "cora"\nclients = 2\n')
    assert main(["data", "check", str(path)]) == 2
    assert "add [tables]" in capsys.readouterr().err


def test_link_counts_what_both_sides_list(banks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["link", str(banks), "--json"]) == 0
    from_folder = printed(capsys)
    assert main(["link", *(client_toml(banks, f"bank-{x}") for x in "abc"), "--json"]) == 0
    assert printed(capsys) == from_folder
    bank_of = {
        row.split(",")[0]: folder.name
        for folder in banks.iterdir()
        for row in (folder / "accounts.csv").read_text().splitlines()[1:]
    }
    listed: dict[str, set[tuple[str, ...]]] = {}
    for folder in banks.iterdir():
        rows = [row.split(",")[:2] for row in (folder / "transfers.csv").read_text().splitlines()[1:]]
        listed[folder.name] = {
            tuple(row) for row in rows if {bank_of.get(end) for end in row} != {folder.name} and row[0] != row[1]
        }
    for row in from_folder["pairs"]:
        mine, theirs = listed[row["owner"]], listed[row["partner"]]
        expected = (len(mine), len(mine & theirs), len(mine) - len(mine & theirs))
        assert (row["listed"], row["agreed"], row["only_here"]) == expected
    assert all(0 < count < 60 for count in from_folder["agreed_by_nobody"].values())
    assert main(["link", str(banks)]) == 0 and "only here" in capsys.readouterr().out


def test_each_owner_caps_what_it_compares(banks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [client_toml(banks, "bank-a"), client_toml(banks, "bank-b", "max_ids = 5\n")]
    assert main(["link", *files]) == 3
    error = capsys.readouterr().err
    assert "bank-b" in error and "(5)" in error and "max_ids" in error
    assert main(["link", *files[:1]]) == 3 and "at least two owners" in capsys.readouterr().err
    assert main(["link", files[0], files[0]]) == 2 and "same client" in capsys.readouterr().err
