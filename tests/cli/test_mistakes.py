"""Mistakes: one line that says what to do, the agreed exit code, nothing left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.experiments.folder import RunFolder

SCENARIO = ["--dataset", "csbm:nodes=60,features=4,degree=4", "--clients", "2", "--rounds", "1"]
RUN = ["run", "fedavg", *SCENARIO, "--set", "hidden=4"]

GRAPHS = ["--dataset", "motifs", "--rounds", "1"]

USAGE = [
    (["runn"], ["No such command 'runn'", "run", "allowed: ", "resume"]),
    (["run", "fedavg", "--bogus", "1"], ["--bogus", "allowed: ", "--rounds"]),
    (["run", "fedavg", "--rouns", "1"], ["--rouns", "--rounds"]),
    (["run"], ["Missing argument", "isthmus run --help"]),
    (["resume"], ["Missing argument"]),
    ([*RUN, "--rounds", "many"], ["--rounds", "integer"]),
    (
        ["run", "fedavgg", *SCENARIO],
        ["unknown method 'fedavgg': did you mean 'fedavg'? allowed: adafgl, apfl, "],
    ),
    (["disclose", "fedsg"], ["unknown method 'fedsg': did you mean 'fedsgd'?"]),
    (["run", "fedavg", "--dataset", "corra"], ["unknown data set 'corra': did you mean 'cora'?", "citeseer"]),
    (["run", "fedavg", "--dataset", "csbm:nods=60"], ["unknown csbm parameter 'nods': did you mean 'nodes'?"]),
    (["run", "fedavg"], ["no data set given", "--dataset"]),
    ([*RUN, "--partition", "randm"], ["unknown partition 'randm': did you mean 'random'?"]),
    ([*RUN, "--split", "10/10"], ["10/10/80"]),
    ([*RUN, "--split", ""], ["unknown split '': allowed: 10/10/80"]),
    ([*RUN, "--partition", ""], ["unknown partition ''"]),
    ([*RUN, "--preset", "fedstrukt"], ["did you mean 'fedstruct'?"]),
    (
        [*RUN, "--profile", "papper"],
        ["unknown value for profile 'papper': did you mean 'paper'? allowed: paper, reference"],
    ),
    ([*RUN, "--engine", "rai"], ["unknown value for engine 'rai'", "local"]),
    ([*RUN, "--metric", "acuracy"], ["unknown metric 'acuracy'", "accuracy"]),
    ([*RUN, "--set", "lrr=0.1"], ["unknown key 'lrr': did you mean 'lr'? allowed: ", "weight_decay"]),
    ([*RUN, "--set", "mu=0.1"], ["unknown key 'mu'"]),
    ([*RUN, "--set", "lr"], ["--set takes key=value, got 'lr'"]),
    ([*RUN, "--set", "lr=fast"], ["lr must be a number, got 'fast'"]),
    ([*RUN, "--set", "lr=-1"], ["lr must be above 0"]),
    ([*RUN, "--set", "dropout=1.5"], ["dropout must lie in [0, 1)"]),
    ([*RUN, "--set", "local_epochs=2.5"], ["local_epochs must be a whole number, got 2.5"]),
    ([*RUN, "--set", "eval_every=inf"], ["eval_every must be a whole number"]),
    ([*RUN, "--set", "threads=99999999999"], ["threads must be at most"]),
    ([*RUN, "--set", "hidden=999999999999999999"], ["cannot be built with these settings"]),
    ([*RUN, "--set", "method=fedprox"], ["another method"]),
    ([*RUN, "--clients", "0"], ["clients must be at least 1, got 0"]),
    ([*RUN, "--rounds", "0"], ["rounds must be at least 1, got 0"]),
    ([*RUN, "--seed", "-1"], ["seed must be at least 0, got -1"]),
    ([*RUN, "--set", "hidden=4,0"], ["hidden: every layer needs a width of at least 1, got 4,0"]),
    ([*RUN, "--partition", "by-dataset"], ["partition by-dataset is for sets of graphs", "use one of", "louvain"]),
    ([*RUN, "--split", "fedstar"], ["split fedstar is for sets of graphs", "use one of", "stratified"]),
    (
        ["run", "fedavg", *GRAPHS, "--partition", "louvain"],
        ["partition louvain is for the nodes of one graph", "by-dataset"],
    ),
    (["run", "fedavg", *GRAPHS, "--split", "public"], ["split public is for the nodes of one graph", "fedstar"]),
    (["run", "fedavg", *GRAPHS, "--partition", "shards:-1"], ["shards: count must be at least 1"]),
    (["run", "fedspray", *GRAPHS], ["fedspray learns from the nodes of one graph", "fedstar"]),
    (["run", "fedper", "--set", "personal_layers=9", *SCENARIO], ["personal_layers=9: this model has"]),
    (["run", "fedper", "--set", "personal_layers=2", *GRAPHS], ["personal_layers=2", "convolutions are shared"]),
    ([*RUN, "--config", "missing.toml"], ["cannot read config file missing.toml"]),
    (["report"], ["Missing argument"]),
]
DATA = [
    ([*RUN, "--clients", "61"], ["61 clients cannot share 60 nodes"]),
    ([*RUN, "--split", "100/0/0"], ["split 100/0/0 leaves no val nodes"]),
    ([*RUN, "--split", "0/50/50"], ["no train nodes"]),
    ([*RUN, "--split", "public"], ["no split was published"]),
    (["resume", "missing"], ["missing is not a run folder"]),
    (["report", "missing"], ["missing"]),
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [(*case, 2) for case in USAGE] + [(*case, 3) for case in DATA],
    ids=lambda value: str(value)[-50:],
)
@pytest.mark.parametrize("out", [True, False])
def test_one_line_and_nothing_left_behind(
    arguments: list[str], says: list[str], code: int, out: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if out:
        if arguments[0] != "run" or len(arguments) < 3:
            pytest.skip("no folder to ask for")
        arguments = [*arguments, "--out", "new"]
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and shown.err.startswith("isthmus: ")
        and shown.err.count("\n") == 1
        and "Traceback" not in shown.err
    )
    for text in says:
        assert text in shown.err
    assert list(tmp_path.iterdir()) == [], "a refused run leaves nothing"


@pytest.mark.parametrize("place", ["first", "last"])
def test_debug_shows_the_traceback(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*RUN, "--set", "lr=-1"]
    assert main(["--debug", *arguments] if place == "first" else [*arguments, "--debug"]) == 2
    err = capsys.readouterr().err
    assert (
        "Traceback" in err and "ConfigError" in err and err.splitlines()[-1].startswith("isthmus: lr must be above 0")
    )


def test_an_existing_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--out", "r"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([*RUN, "--out", "r", "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "r already holds a run: continue it with `isthmus resume r`" in shown.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("out", ["file", "file/run"])
def test_unwritable_run_folder(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert main([*RUN, "--out", out]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"run folder {out}" in err and "choose another --out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_folder_of_default_runs_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").write_text("x")
    assert main(RUN) == 2
    assert "--out" in capsys.readouterr().err


def test_corrupt_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "keep_last_checkpoint", lambda *_: None)
    assert main([*RUN, "--out", "r"]) == 0
    (tmp_path / "r" / "result.json").unlink()
    for tag in (tmp_path / "r" / "checkpoints").rglob("*.tag"):
        tag.write_bytes(tag.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["resume", "r"]) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "no checkpoint" in err and "start the run again" in err
    shutil.rmtree(tmp_path / "r" / "checkpoints")
    assert main(["resume", "r"]) == 3


def test_a_failed_run_is_four(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from isthmus.methods.fedavg import FedAvgClient, FedAvgCohort

    def broken(*rest: Any, **named: Any) -> Any:
        raise ValueError("bad\nluck")

    monkeypatch.setattr(FedAvgClient, "train", broken)
    monkeypatch.setattr(FedAvgCohort, "train_together", broken)
    for execution in ("each", "cohort"):
        capsys.readouterr()
        assert main([*RUN, "--set", f"execution={execution}", "--out", execution, "--json"]) == 4
        shown = capsys.readouterr()
        assert shown.out == "" and "Traceback" not in shown.err
        assert shown.err.splitlines()[-1].startswith("isthmus: train round 1") and "bad luck" in shown.err


def test_ctrl_c_before_there_is_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*rest: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("isthmus.experiments.scenarios.build_scenario", interrupted)
    assert main([*RUN, "--out", "r"]) == 130
    shown = capsys.readouterr()
    assert (
        "stopped; nothing was written" in shown.err and "Traceback" not in shown.err and list(tmp_path.iterdir()) == []
    )


def test_a_reader_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """``isthmus methods | head -1``."""
    import os
    import subprocess
    import sys

    script = f"{sys.executable} -m isthmus.cli.main methods | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_config_errors_are_exit_code_two() -> None:
    assert ConfigError("x").exit_code == 2
