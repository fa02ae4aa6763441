"""The verbs: what they print, where, and their exit codes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import isthmus
from isthmus.cli.main import main
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.folder import RunFolder
from isthmus.methods.registry import all_methods, get_method

SCENARIO = ["--dataset", "csbm:nodes=90,features=6,degree=4", "--clients", "3"]
RUN = [*SCENARIO, "--rounds", "3", "--set", "hidden=8"]
KEYS = {
    "method",
    "dataset",
    "partition",
    "clients",
    "split",
    "seed",
    "engine",
    "preset",
    "profile",
    "variant",
    "execution",
    "rounds",
    "selected_round",
    "metric",
    "val",
    "test",
    "test_last",
    "test_client_mean",
    "test_client_mean_last",
    "test_minority",
    "score",
    "score_rule",
    "per_client",
    "parameters",
    "bytes",
    "seconds",
    "seconds_per_round",
    "peak_rss_mb",
    "run_dir",
    "versions",
}
TIMES = {"seconds", "peak_rss_mb", "run_dir", "finished", "seconds_per_round"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "keep_last_checkpoint", lambda *_: None)
        assert main(["run", "fedavg", *RUN, "--out", str(path)]) == 0
    return path


@pytest.fixture
def unfinished(finished: Path, tmp_path: Path) -> Path:
    path = tmp_path / "unfinished"
    shutil.copytree(finished, path, ignore=shutil.ignore_patterns("result.json"))
    return path


# -- run -------------------------------------------------------------------------------------------


def test_json_is_one_object_with_the_agreed_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedavg", *RUN, "--out", str(tmp_path / "r"), "--json"]) == 0
    out, err = capsys.readouterr()
    output = json.loads(out)
    assert out.count("\n") == 1 and output == json.loads((tmp_path / "r" / "result.json").read_text())
    assert set(output) == KEYS | {
        "source",
        "finished",
        "groups",
        "test_minority_last",
        "score_round",
        "selection",
        "model",
    }
    assert set(output["bytes"]) - {f"evaluation_{way}" for way in ("up", "down", "peer", "device")} == {
        "setup_up",
        "setup_down",
        "up",
        "down",
        "peer",
        "device",
    }
    assert set(output["seconds"]) == {"setup", "train", "eval"} and set(output["parameters"]) == {"trainable", "shared"}
    assert all(
        0.0 <= output[key] <= 1.0
        for key in ("val", "test", "test_last", "test_client_mean", "test_client_mean_last", "score")
    )
    assert "train 3/3" in err and "\x1b" not in err, "progress goes to stderr, as plain lines where that is no terminal"
    assert len(err.splitlines()) <= 12


def test_python_gives_the_same_result(finished: Path, tmp_path: Path) -> None:
    output = isthmus.run(
        "fedavg", dataset="csbm:nodes=90,features=6,degree=4", clients=3, rounds=3, hidden=8, out=tmp_path / "r"
    )
    other = json.loads((finished / "result.json").read_text())
    assert {k: v for k, v in output.items() if k not in TIMES} == {k: v for k, v in other.items() if k not in TIMES}
    for file in (finished / "models").rglob("*.*"):
        assert file.read_bytes() == (tmp_path / "r" / file.relative_to(finished)).read_bytes()


def test_people_get_a_table(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(finished)]) == 0
    out, err = capsys.readouterr()
    output = json.loads((finished / "result.json").read_text())
    assert f"{100 * output['test']:.2f} %" in out and "fedavg on csbm" in out and err == ""


def test_flags_win_over_set_and_file(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "run",
        "fedavg",
        "--config",
        str(finished / "config.toml"),
        "--set",
        "rounds=2",
        "--set",
        "seed=8",
        "--rounds",
        "1",
    ]
    assert main([*arguments, "--json", "--out", str(tmp_path / "r")]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["rounds"], output["seed"], output["clients"]) == (1, 8, 3)


def test_progress_is_about_ten_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["run", "local", *SCENARIO, "--rounds", "40", "--set", "hidden=4", "--out", str(tmp_path / "r"), "--json"])
        == 0
    )
    header, *lines = capsys.readouterr().err.splitlines()
    assert (
        "split 10/10/80" in header
        and 8 <= len(lines) <= 12
        and all(re.search(r"train \d+/40  val .* sent .* left ", line) for line in lines)
    )


def test_a_live_bar_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["run", "local", *RUN, "--out", str(tmp_path / "r"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) and "3/3" in err


# -- resume, report --------------------------------------------------------------------------------


def test_resume(unfinished: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(unfinished), "--json"]) == 0
    out, err = capsys.readouterr()
    output, other = json.loads(out), json.loads((finished / "result.json").read_text())
    assert {k: v for k, v in output.items() if k not in TIMES} == {k: v for k, v in other.items() if k not in TIMES}
    assert "continued after 4 of 4 rounds" in err


def test_resume_again_prints_the_result_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "result.json").read_bytes()
    assert main(["resume", str(finished), "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out) == json.loads(before) and (finished / "result.json").read_bytes() == before
    )


def test_report(finished: Path, unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(finished), "--out", str(page)]) == 0
    assert "fedavg" in page.read_text() and str(page) in capsys.readouterr().out
    for folder, other in ((unfinished, "unfinished"), (tmp_path / "missing", "missing")):
        assert main(["report", str(folder), "--out", str(tmp_path / "none.html")]) == 3
        err = capsys.readouterr().err
        assert other in err and err.count("\n") == 1 and not (tmp_path / "none.html").exists()


# -- lists -----------------------------------------------------------------------------------------


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert all(method.name in shown for method in all_methods())
    assert main(["datasets"]) == 0
    assert {"cora", "csbm", "banks"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize("method", [method.name for method in all_methods()])
def test_disclose(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disclose", method]) == 0
    out = capsys.readouterr().out
    run = resolve(method, {"dataset": "csbm"})  # what a run without further flags would do
    lines = sheet_of(run.method, secure_sum=run.run.secure_sum, config=run.method_config)
    for line in lines:
        assert line.message.__name__ in out and line.protection in out and line.phase in out
        assert all(kind in out for kind in line.kinds)
    assert ("pools all data" in out) == get_method(method).pooled


def test_a_sheet_has_the_settings_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """FedSpray masks its sums as printed in the paper, and not as in its reference code."""
    shown = []
    for flags in (
        [],
        ["--profile", "reference"],
        ["--profile", "reference", "--secure-sum"],
        ["--preset", "fedstruct"],
    ):
        assert main(["disclose", "fedspray", *flags]) == 0
        shown.append(" masked " in capsys.readouterr().out)
    assert shown == [True, False, True, False]


def test_a_method_names_its_own_preset(capsys: pytest.CaptureFixture[str]) -> None:
    for method, preset in (("fedstar", "fedstar"), ("fedavg", None)):
        assert main(["methods", method, "--json"]) == 0
        settings = {row["key"]: row["default"] for row in json.loads(capsys.readouterr().out)["settings"]}
        assert settings["preset"] == preset


def test_a_group_without_a_verb_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "Usage: isthmus data" in shown.err.splitlines()[0]


@pytest.mark.parametrize("arguments", [[], ["--debug"], ["--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "Usage: isthmus" in out and all(
        verb in out for verb in ("run", "resume", "report", "disclose", "methods", "datasets", "demo")
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"isthmus {isthmus.__version__}\n"


# -- TensorBoard -----------------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "r"
    assert main(["run", "fedavg", *RUN, "--set", "tensorboard=true", "--out", str(path)]) == 0
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [(e.step, e.value) for e in events.Scalars("val")] == [
        (line["step"], pytest.approx(line["val"])) for line in lines
    ]
    assert {"test", "val_loss", "bytes/up", "bytes/down"} <= set(events.Tags()["scalars"])


def test_tensorboard_after_a_resume_has_every_round_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from isthmus.experiments.callbacks import Callback, Progress

    class Stop(Callback):
        def on_round(self, progress: Progress) -> None:
            if progress.step == 3:
                raise KeyboardInterrupt

    settings: dict[str, Any] = {
        "dataset": "csbm:nodes=90,features=6,degree=4",
        "clients": 3,
        "rounds": 4,
        "eval_every": 1,
        "hidden": 8,
        "tensorboard": True,
    }
    with pytest.raises(KeyboardInterrupt):
        isthmus.run("fedavg", **settings, out=tmp_path / "r", callbacks=[Stop()], set={"checkpoint.every": 2})
    isthmus.resume(tmp_path / "r")
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("val")] == [2, 3, 4, 5]


def test_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["run", "fedavg", *RUN, "--set", "tensorboard=true", "--out", str(tmp_path / "r")]) == 2
    assert "pip install 'isthmus[tensorboard]'" in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_threads_are_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    assert main(["run", "local", *RUN, "--set", "threads=2", "--out", str(tmp_path / "r"), "--json"]) == 0
    assert torch.get_num_threads() == before
