"""A stranger's wrong inputs, three or more for each command: one line that says what to do, and no traceback."""

from __future__ import annotations

import importlib.util
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from isthmus.cli.main import app, main

SMALL = "--dataset csbm:nodes=60"
NO_NVFLARE = importlib.util.find_spec("nvflare") is None  # then commands of a federation ask for it first
WRONG = {
    "advise --dataset corra": "did you mean 'cora'?",
    f"advise {SMALL} --clients 900": "900 clients cannot share 60 nodes",
    "advise": "use --dataset NAME",
    "advise csbm": "a data set is given as --dataset NAME",
    "run auto mutag": "a data set is given as --dataset NAME",
    "run fedavg --dataset afile": "unknown data set 'afile'",
    "run fedavg --dataset ./afile": "must end in .pt",
    f"run auto {SMALL} --seed 0,1": "takes one seed",
    f"run fedavg {SMALL} --partition column:bank": "an attribute with one value per node (data.bank = ...)",
    f"run fedavg {SMALL} --split masks:none.npz": "there is no file none.npz: save boolean arrays",
    "resume empty": "start one with `isthmus run`",
    "resume nowhere --rounds 5": "as +100, got '5'",
    "resume": "Missing argument",
    "predict empty --out a.csv": "a run folder has them under models/",
    "predict nowhere --out a.csv": "there is no such folder",
    "predict": "Missing argument",
    "compare local": "use --dataset NAME",
    f"compare local fedavg:lr {SMALL}": "e.g. fedavg:backbone=mlp",
    f"compare local fedavg {SMALL} --table a.doc": "one of .csv, .md, .tex",
    f"trilemma fedavgg {SMALL}": "did you mean 'fedavg'?",
    "trilemma --dataset nosuch": "unknown data set 'nosuch'",
    f"trilemma fedavg {SMALL} --clients 0": "clients must be at least 1",
    "reproduce nopaper": "unknown paper 'nopaper': allowed: fedggr",
    "reproduce fedstruct/table99": "did you mean 'table8'?",
    "reproduce fedstruct --only nothing-like-this": "rows, columns and parts are",
    f"sweep fedavg {SMALL}": "Missing option '--grid'",
    f"sweep fedavg {SMALL} --grid lr": "--grid takes key=a,b,c",
    f"sweep fedavg {SMALL} --grid lr=fast,slow": "lr must be a number",
    "report nowhere": "no such folder",
    "report empty": "name a folder written by `isthmus run`",
    "report afile --out empty": "for example empty/report.html",
    "watch nowhere": "start one with `isthmus run`",
    "watch empty --port 99999999": "65535",
    "watch": "Missing argument",
    "disclose fedavgg": "did you mean 'fedavg'?",
    "disclose fedavg --set lrr=1": "did you mean 'lr'?",
    "disclose": "Missing argument",
    "audit nowhere": "start one with `isthmus run`",
    "audit empty": "start one with `isthmus run`",
    "audit": "Missing argument",
    "link nowhere": "there is no such file",
    "link empty": "`isthmus data describe empty` drafts one",
    "link": "Missing argument",
    "demo --seeds 0": "greater than or equal to 1",
    "demo --accounts 5": "greater than or equal to 300",
    "demo --out afile/x": "afile/x: Not a directory; name another",
    "submit nowhere.toml": "make one with `isthmus server init`",
    "submit": "e.g. `isthmus submit run.toml`",
    "submit a.toml b.toml": "unexpected extra argument",
    "status nowhere": "make one with `isthmus server init`",
    "status afile": "make one with `isthmus server init`",
    "status a b": "unexpected extra argument",
    "stop nowhere": "make one with `isthmus server init`",
    "stop empty --run x": "make one with `isthmus server init`",
    "stop a b": "unexpected extra argument",
    "methods nosuch": "unknown method 'nosuch'",
    "methods fedavg extra": "unexpected extra argument",
    "methods --nosuch": "No such option: --nosuch",
    "datasets extra": "unexpected extra argument",
    "datasets --nosuch": "allowed: --json",
    "datasets --json extra": "unexpected extra argument",
    "partitions --dataset nosuch": "unknown data set 'nosuch'",
    f"partitions {SMALL} --partition nosuch": "unknown partition 'nosuch'",
    f"partitions {SMALL} --clients -3": "at least 1 client, got -3",
    "data get": "Missing argument",
    "data get nosuch": "unknown data set 'nosuch'",
    "data get csbm": "csbm is generated when a run begins",
    "data list extra": "unexpected extra argument",
    "data list --nosuch": "allowed: --json",
    "data lst": "No such command 'lst'",
    "data verify extra": "unknown data set 'extra'",
    "data verify --nosuch": "No such option",
    "data verify cora nosuch": "unknown data set 'nosuch'",
    "data tables nosuch folder": "unknown data set 'nosuch'",
    "data tables csbm folder": "use amlsim-fanin, amlsim-cycle or banks",
    "data tables banks afile --clients 3": "afile: ",
    "data describe nowhere": "nowhere is not a folder",
    "data describe empty": "no file that ends in .csv or .parquet",
    "data describe": "Missing argument",
    "data check nowhere": "not a folder of tables",
    "data check empty": "drafts one",
    "data check": "Missing argument",
    "server init": "Missing argument",
    "server init afile --organisation a": "choose another folder",
    "server init fed --organisation ../a": "e.g. bank-a",
    "server start nowhere": "make one with `isthmus server init`",
    "server start afile": "make one with `isthmus server init`",
    "server start a b": "unexpected extra argument",
    "client identity": "Missing argument",
    "client identity bank-a": "Missing option '--client'",
    "client identity ../bank --client bank-a": "e.g. bank-a",
    "client offer": "Missing option '--config'",
    "client offer --config nowhere.toml": "cannot read",
    "client offer --config empty": "Is a directory",
    "client contract": "Missing argument",
    "client contract nowhere.toml": "cannot read",
    "client contract afile --config afile": "afile needs either [tables]",
    "client approve": "give the hash of a contract, --list, or --withdraw HASH",
    "client approve x --config nowhere.toml": "cannot read",
    "client approve a b c": "unexpected extra argument",
    "client audit nowhere.toml": "cannot read",
    "client audit empty": "Is a directory",
    "client audit afile": "afile needs either [tables]",
    "client start": "Missing option '--kit'",
    "client start --kit nowhere --config nowhere.toml": "`isthmus client join` makes one",
    "client start --kit empty --config afile": "`isthmus client join` makes one",
    "server fingerprint nowhere": "make one with `isthmus server init`",
    "server fingerprint afile": "make one with `isthmus server init`",
    "server fingerprint": "Missing argument",
    "server add nowhere bank-z": "make one with `isthmus server init`",
    "server add afile bank-z": "make one with `isthmus server init`",
    "server add empty": "Missing argument",
    "server approve nowhere x --fingerprint y": "make one with `isthmus server init`",
    "server approve empty afile --fingerprint y": "make one with `isthmus server init`",
    "server approve empty": "Missing argument",
    "server revoke nowhere bank-a": "make one with `isthmus server init`",
    "server revoke afile bank-a": "make one with `isthmus server init`",
    "server revoke empty": "Missing argument",
    "server renew nowhere": "make one with `isthmus server init`",
    "server renew afile": "make one with `isthmus server init`",
    "server renew": "Missing argument",
    "client request nowhere": "`isthmus client identity` writes one",
    "client request": "Missing argument",
    "client request a b": "unexpected extra argument",
    "client join nowhere --fingerprint y": "cannot read an approval nowhere",
    "client join afile --fingerprint y": "afile is not an approval: ask for it again",
    "client join empty --fingerprint y": "Is a directory",
    "client renew --config nowhere.toml": "`isthmus client join` makes one",
    "client renew --kit nowhere": "`isthmus client join` makes one",
    "client renew --kit empty": "`isthmus client join` makes one",
    "client restored nothere": "give the digits that the refusal names",
    "client restored": "Missing argument",
    "client restored a b c": "unexpected extra argument",
    "client roster add nowhere": "cannot read nowhere",
    "client roster add": "Missing argument",
    "client roster add a b": "unexpected extra argument",
    "client roster apply nowhere": "`isthmus client identity` writes one",
    "client roster apply": "`isthmus client identity` writes one",
    "client roster apply a b": "unexpected extra argument",
    "client roster sign nowhere": "`isthmus client identity` writes one",
    "client roster sign": "`isthmus client identity` writes one",
    "client roster sign a b": "unexpected extra argument",
    "client roster remove": "Missing argument",
    "client roster remove a b": "unexpected extra argument",
    "client roster remove nobody": "cannot read",
}


def _commands(command: Any, name: str = "") -> Iterator[str]:
    for inner, found in getattr(command, "commands", {}).items():
        yield from (
            _commands(found, f"{name} {inner}".strip()) if hasattr(found, "commands") else [f"{name} {inner}".strip()]
        )


COMMANDS = sorted(_commands(typer.main.get_command(app)))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "afile").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("typed", "says"), WRONG.items(), ids=WRONG)
def test_one_line_says_what_to_do(typed: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(typed)) in (2, 3)
    shown = capsys.readouterr()
    assert shown.err.startswith("isthmus: ") and shown.err.count("\n") == 1 and shown.out == ""
    assert says in shown.err or (NO_NVFLARE and "pip install 'isthmus[nvflare]'" in shown.err)
    assert "Traceback" not in shown.err
    assert sorted(path.name for path in folder.iterdir()) == ["afile", "empty"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_is_not_there_is_answered_with_those_that_are(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--no-such-option"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("isthmus: No such option: --no-such-option") and err.count("\n") == 1


def test_every_command_has_three() -> None:
    counted = Counter(
        next(name for name in sorted(COMMANDS, key=len, reverse=True) if f"{typed} ".startswith(f"{name} "))
        for typed in WRONG
        if typed != "data lst"
    )
    assert counted.keys() == set(COMMANDS) and all(counted[name] >= 3 for name in COMMANDS if name != "data list")
