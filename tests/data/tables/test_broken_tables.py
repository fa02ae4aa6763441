"""Broken tables: one clear line each, with file, line and column where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from table_helpers import ACCOUNTS, SCHEMA, TRANSFERS, write_owner

pl = pytest.importorskip("polars", reason="needs the extra tables")

from isthmus.data.tables.check import check_folder  # noqa: E402
from isthmus.data.tables.owner import read_owner  # noqa: E402
from isthmus.errors import DataError  # noqa: E402


def accounts(old: str, new: str) -> Callable[[Path], None]:
    assert old in ACCOUNTS
    return lambda folder: write_owner(folder, accounts=ACCOUNTS.replace(old, new)) and None  # type: ignore[func-returns-value]


def transfers(old: str, new: str) -> Callable[[Path], None]:
    assert old in TRANSFERS
    return lambda folder: write_owner(folder, transfers=TRANSFERS.replace(old, new)) and None  # type: ignore[func-returns-value]


def schema(old: str, new: str) -> Callable[[Path], None]:
    assert old in SCHEMA
    return lambda folder: write_owner(folder, schema=SCHEMA.replace(old, new)) and None  # type: ignore[func-returns-value]


def nested(folder: Path) -> None:
    write_owner(folder)
    (folder / "accounts.csv").unlink()
    frame = pl.DataFrame({"account": ["a"], "fraud": ["no"], "balance": [[1.0]], "country": ["DE"], "company": [True]})
    frame.with_columns(part=pl.lit("train")).write_parquet(folder / "accounts.parquet")


def half_a_parquet(folder: Path) -> None:
    nested(folder)
    path = folder / "accounts.parquet"
    path.write_bytes(path.read_bytes()[:-20])


def cut_in_the_middle(folder: Path) -> None:
    rows = "".join(f"b{i},no,{i},DE,no,train\n" for i in range(200_000))
    text = ACCOUNTS + rows
    write_owner(folder, accounts=text[: len(text) // 2].rpartition("\n")[0] + "\nb99,no,5,D")


def no_edges_file(folder: Path) -> None:
    write_owner(folder)
    (folder / "transfers.csv").unlink()


def two_files(folder: Path) -> None:
    write_owner(folder)
    (folder / "accounts.parquet").write_bytes(b"")


def no_schema(folder: Path) -> None:
    write_owner(folder)
    (folder / "schema.toml").unlink()


BROKEN = {
    "wrong encoding": (
        lambda folder: write_owner(folder, accounts=ACCOUNTS.replace("a3", "m\xfcller").encode("latin-1")),
        "accounts.csv, line 4: is not UTF-8",
    ),
    "utf-16": (
        lambda folder: write_owner(folder, accounts=ACCOUNTS.encode("utf-16")),
        "accounts.csv, line 1: is not UTF-8",
    ),
    "mixed types": (
        accounts("a1,no,100", "a1,no,many"),
        "accounts.csv, line 2, column balance: is not a finite number",
    ),
    "decimal comma": (accounts("5.5", '"5,5"'), "accounts.csv, line 4, column balance: is not a finite number"),
    "infinite": (accounts("a1,no,100", "a1,no,inf"), "accounts.csv, line 2, column balance: is not a finite number"),
    "unknown category": (
        accounts("a2,yes,,FR", "a2,yes,,UK"),
        "accounts.csv, line 3, column country: is none of DE, FR",
    ),
    "not a flag": (accounts("DE,yes,train", "DE,maybe,train"), "accounts.csv, line 2, column company: is neither true"),
    "ids with spaces": (accounts("a3,no", "a 3,no"), "accounts.csv, line 4, column account: has white space inside"),
    "duplicate ids": (accounts("a3,no", "a1,no"), "accounts.csv, line 4, column account: is the id of an earlier row"),
    "empty id": (accounts("a3,no", ",no"), "accounts.csv, line 4, column account: is empty"),
    "label outside classes": (
        accounts("a5,yes", "a5,perhaps"),
        "accounts.csv, line 6, column fraud: is none of no, yes",
    ),
    "wrong part": (
        accounts("FR,yes,test", "FR,yes,tset"),
        "accounts.csv, line 6, column part: is none of train, val, test",
    ),
    "row too short": (accounts("a3,no,5.5,,no,val", "a3,no,5.5,,no"), "accounts.csv, line 4: has 5 cells"),
    "row too long": (accounts("a3,no,5.5,,no,val", "a3,no,5.5,,no,val,x"), "accounts.csv, line 4: has 7 cells"),
    "missing column": (accounts("balance", "blance"), "accounts.csv: unknown column 'balance'"),
    "column twice": (accounts("company,part", "balance,part"), "accounts.csv"),
    "empty file": (lambda folder: write_owner(folder, accounts=""), "accounts.csv is empty"),
    "header only": (
        lambda folder: write_owner(folder, accounts=ACCOUNTS.splitlines()[0] + "\n"),
        "accounts.csv has no rows",
    ),
    "cut in the middle": (cut_in_the_middle, "cells where the first line has 6; the file may be cut off"),
    "nested parquet": (nested, "accounts.parquet, column balance: holds lists or structures"),
    "half a parquet": (half_a_parquet, "accounts.parquet"),
    "two files": (two_files, "holds several files accounts.*"),
    "no edges file": (no_edges_file, "holds no file transfers.*"),
    "edge with neither end": (
        transfers("a2,a3", "x8,x9"),
        "transfers.csv, line 4: neither end is a node of this owner",
    ),
    "edge without an end": (transfers("a2,a3", "a2,"), "transfers.csv, line 4, column to: is empty"),
    "self loop": (transfers("a2,a3", "a2,a2"), "transfers.csv, line 4: leads from a node to itself"),
    "negative weight": (transfers("a2,a3,1", "a2,a3,-1"), "transfers.csv, line 4, column amount: is negative"),
    "no weight": (transfers("a2,a3,1", "a2,a3,"), "transfers.csv, line 4, column amount: is empty"),
    "wrong date": (
        transfers("2026-01-05", "yesterday"),
        "transfers.csv, line 6, column day: is neither a number of days",
    ),
    "duplicate edge": (
        schema('time = "day"', 'time = "day"\nduplicates = "error"'),
        "transfers.csv, line 3: lists an edge of an earlier row again",
    ),
    "no schema": (no_schema, "there is no schema.toml"),
    "schema is no TOML": (schema("[nodes]", "[nodes"), "schema.toml is not valid TOML"),
    "unknown key": (schema("directed", "directd"), "schema.toml: unknown key in [edges] 'directd'"),
    "unknown scale": (schema("log-standard", "log"), "schema.toml: unknown scale of feature balance 'log'"),
    "label as feature": (schema("company =", "fraud ="), "column 'fraud' is the label of [nodes]"),
    "one class": (schema('["no", "yes"]', '["no"]'), "classes must list two or more"),
    "missing not allowed": (
        schema(', missing = "median"', ""),
        "accounts.csv, line 3, column balance: is empty: fill it",
    ),
    "file elsewhere": (schema('"accounts.*"', '"../accounts.*"'), "must lie in the folder itself"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_one_clear_line(kind: str, tmp_path: Path) -> None:
    make, expected = BROKEN[kind]
    make(tmp_path / "bank")
    before = sorted(path.name for path in (tmp_path / "bank").iterdir())
    with pytest.raises(DataError) as error:
        read_owner(tmp_path / "bank", "bank", seed=0)
    assert expected in str(error.value), str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3
    assert sorted(path.name for path in (tmp_path / "bank").iterdir()) == before  # nothing half-written


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"accounts": re.sub(r"(?m)^(a\d),(no|yes),", r"\1,,", ACCOUNTS)},
            "accounts.csv, column fraud: no row has a label",
        ),
        (
            {"accounts": ACCOUNTS.replace("train", "test")},
            "column fraud: the split (column part) leaves no training rows",
        ),
        ({"transfers": "from,to,amount,day\n"}, "transfers.csv: has no rows: this owner has no edges"),
    ],
)
def test_an_owner_who_lacks_something_takes_part(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    write_owner(tmp_path / "bank", **changes)
    (checked,) = check_folder(tmp_path / "bank")
    assert checked.problems.errors == []
    assert said in " ".join(map(str, checked.problems.warnings))


def test_check_lists_every_problem_and_says_how_many_more(tmp_path: Path) -> None:
    text = ACCOUNTS.replace("a1,no,100", "a1,no,many").replace("a5,yes", "a5,perhaps") + "".join(
        f"b{i},no,x,DE,no,train\n" for i in range(20)
    )
    write_owner(tmp_path / "bank", accounts=text)
    (checked,) = check_folder(tmp_path / "bank")
    lines = [str(problem) for problem in checked.problems.errors]
    assert "accounts.csv, line 6, column fraud: is none of no, yes" in lines
    assert sum("column balance: is not a finite number" in line for line in lines) == 5
    assert any("16 more lines like this" in line for line in lines)
    assert checked.summary == ()


def test_the_schema_of_another_bank_is_named_by_column(tmp_path: Path) -> None:
    write_owner(tmp_path / "banks" / "a")
    write_owner(tmp_path / "banks" / "b", schema=SCHEMA.replace('values = ["DE", "FR"]', 'values = ["FR", "DE"]'))
    first, second = check_folder(tmp_path / "banks")
    assert first.problems.errors == []
    assert "feature country differs in values" in str(second.problems.errors[0])


def test_a_whole_folder_is_fine_and_its_summary_holds_no_cell(tmp_path: Path) -> None:
    write_owner(tmp_path / "bank")
    (checked,) = check_folder(tmp_path / "bank")
    assert checked.problems.errors == []
    text = " ".join(f"{name} {value}" for name, value in checked.summary)
    assert "5" in dict(checked.summary)["nodes"] and "2 inside, 2 towards others" in text
    assert not any(cell in text for cell in ("a1", "x1", "5.5", "2026"))


def test_a_feature_that_predicts_the_label_is_a_warning(tmp_path: Path) -> None:
    rows = "".join(f"c{i},{'yes' if i % 2 else 'no'},{1000 * (i % 2) + i},DE,no,train\n" for i in range(60))
    write_owner(
        tmp_path / "bank", accounts=ACCOUNTS.splitlines()[0] + "\n" + rows, transfers="from,to,amount,day\nc1,c2,1,1\n"
    )
    (checked,) = check_folder(tmp_path / "bank")
    assert any(
        problem.column == "balance" and "predicts the label" in problem.text for problem in checked.problems.warnings
    )
