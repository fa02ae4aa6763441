"""The result of a run in Python: a mapping, and what its folder has to tell."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import isthmus
from isthmus.api import progress
from isthmus.cli.main import main
from isthmus.errors import ConfigError, DataError, IsthmusError, RunError
from isthmus.experiments.callbacks import Callback
from isthmus.experiments.folder import TRIALS, RunFolder

SMALL: dict[str, Any] = {
    "dataset": "csbm:nodes=60,features=6,degree=4",
    "clients": 2,
    "rounds": 3,
    "backbone": "gcn",
    "hidden": 4,
    "preset": "fedstruct",
}
FLAGS = ["--dataset", "csbm:nodes=60,features=6,degree=4", "--clients", "2", "--rounds", "1", "--set", "hidden=4"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> isthmus.Result:
    return isthmus.run("fedavg", **SMALL, out=tmp_path_factory.mktemp("runs") / "run")


# -- the mapping -----------------------------------------------------------------------------------


def test_it_is_still_the_mapping_of_result_json(finished: isthmus.Result) -> None:
    assert isinstance(finished, dict)
    assert json.loads(json.dumps(finished)) == json.loads((finished.folder / "result.json").read_text()) == finished
    assert {**finished}["test"] == finished["test"]
    assert repr(finished).startswith("<Result fedavg on csbm") and "test" in repr(finished)


def test_the_data_come_second(finished: isthmus.Result, tmp_path: Path) -> None:
    rest = {key: value for key, value in SMALL.items() if key != "dataset"}
    again = isthmus.run("fedavg", SMALL["dataset"], **rest, out=tmp_path / "run")
    assert again["test"] == finished["test"] and again["dataset"] == finished["dataset"]
    compared = isthmus.compare(["fedavg"], SMALL["dataset"], **rest, runs=1, out=tmp_path / "compare")
    assert compared["methods"][0]["score"]["mean"] == finished["score"]


def test_load_finds_a_run_that_was_moved(finished: isthmus.Result, tmp_path: Path) -> None:
    finished.folder.rename(tmp_path / "moved")
    try:
        moved = isthmus.load(tmp_path / "moved")
        assert moved["run_dir"] == str(tmp_path / "moved") and moved["test"] == finished["test"]
        assert moved.history["val"]
        with pytest.raises(DataError, match=r"run folder .* is gone"):
            isthmus.Result(finished).history  # noqa: B018
    finally:
        (tmp_path / "moved").rename(finished.folder)


def test_load_refuses_what_is_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        isthmus.load(tmp_path)
    isthmus.run("local", **SMALL, out=tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(DataError, match="no finished run: continue it with `isthmus resume"):
        isthmus.load(tmp_path / "run")


def test_history(finished: isthmus.Result) -> None:
    history = finished.history
    assert history["round"] == [1, 2, 3] and history.num_rounds == 3
    assert history["test"][-1] == finished["test_last"]
    assert {"step", "val", "val_loss", "train_loss", "bytes.up", "seconds"} <= set(history)
    assert all(len(column) == 3 for column in history.values())
    assert list(history.per_client()) == list(finished.clients)
    last = {row["client"]: row["test_score_last"] for row in finished["per_client"]}
    assert {client: scores[-1] for client, scores in history.per_client().items()} == last


def test_history_as_frames(finished: isthmus.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    polars, pandas = pytest.importorskip("polars"), pytest.importorskip("pandas")
    assert finished.history.to_polars()["val"].to_list() == finished.history["val"]
    assert list(finished.history.to_pandas()["val"]) == finished.history["val"]
    assert isinstance(finished.history.to_polars(), polars.DataFrame)
    assert isinstance(finished.history.to_pandas(), pandas.DataFrame)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        finished.history.to_pandas()


def test_report(finished: isthmus.Result, tmp_path: Path) -> None:
    assert "<html" in finished.report(tmp_path / "page.html").read_text()[:200]
    assert finished.report() == finished.folder / "report.html"


def test_in_a_notebook_it_shows_scores_and_curves(finished: isthmus.Result) -> None:
    page = finished._repr_html_()
    assert "<svg" in page and f"{100 * finished['test']:.2f} %" in page and "fedavg on csbm" in page
    hostile = isthmus.Result({**finished, "dataset": "<script>alert(1)</script>"})
    assert "<script" not in hostile._repr_html_()


# -- folders ---------------------------------------------------------------------------------------


def test_a_result_says_what_validation_chose_among(tmp_path: Path) -> None:
    flags = {"dataset": "csbm:nodes=60,features=6", "clients": 3, "rounds": 1, "preset": "general"}
    result = isthmus.run("fedspray", **flags, out=tmp_path / "run")
    assert result["variants"].keys() == {"taught", "nudged"} and result["varied"] == ["lambda1"]
    assert "varied" not in isthmus.run("fedspray", **flags, variant="taught", out=tmp_path / "named")


def test_overwrite_replaces_a_run_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "run"
    isthmus.run("fedavg", **SMALL, out=out)
    (out / "notes.txt").write_text("mine")
    (out / TRIALS).write_text('{"near": 0.5}')
    with pytest.raises(ConfigError, match="--overwrite"):
        isthmus.run("local", **SMALL, out=out)
    assert isthmus.run("local", **SMALL, out=out, overwrite=True)["method"] == "local"
    assert "variants" not in isthmus.load(out), "trials of the run before are not this run's"
    assert isthmus.load(out)["method"] == "local" and (out / "notes.txt").read_text() == "mine"
    assert isthmus.run("local", **SMALL, out=tmp_path / "new", overwrite=True)["method"] == "local"


def test_a_run_that_cannot_begin_or_is_being_run_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "run"
    isthmus.run("fedavg", **SMALL, out=out)
    with pytest.raises(IsthmusError):
        isthmus.run("fedavg", **{**SMALL, "clients": 100}, out=out, overwrite=True)
    assert isthmus.load(out)["method"] == "fedavg"
    folder = RunFolder.open(out)
    try:
        with pytest.raises(RunError, match="in use"):
            isthmus.run("local", **SMALL, out=out, overwrite=True)
    finally:
        folder.close()
    assert isthmus.load(out)["method"] == "fedavg"


# -- several seeds ---------------------------------------------------------------------------------


def test_several_seeds(tmp_path: Path) -> None:
    results = isthmus.run("fedavg", **SMALL, seed=[3, 5], out=tmp_path / "runs")
    singles = [isthmus.run("fedavg", **SMALL, seed=seed, out=tmp_path / str(seed)) for seed in (3, 5)]
    assert results["seeds"] == [3, 5] and [each["seed"] for each in results["results"]] == [3, 5]
    assert [each["test"] for each in results["results"]] == [each["test"] for each in singles]
    values = [each["test"] for each in singles]
    assert results["test"]["mean"] == pytest.approx(sum(values) / 2)
    assert results["test"]["std"] == pytest.approx(abs(values[0] - values[1]) / 2)
    assert isthmus.load(tmp_path / "runs" / "seed-5")["seed"] == 5
    assert json.loads(json.dumps(results))["results"][1]["seed"] == 5
    assert "±" in repr(results) and "±" in results._repr_html_()
    counted = isthmus.run("local", **SMALL, runs=2, seed=4, out=tmp_path / "counted")
    assert counted["seeds"] == [4, 5]


@pytest.mark.parametrize(
    ("given", "text"),
    [({"seed": []}, "each once"), ({"seed": [1, 1]}, "each once"), ({"runs": 0}, "at least 1"),
     ({"runs": 2, "seed": [1]}, "choose one")],
)  # fmt: skip
def test_seeds_that_make_no_sense(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        isthmus.run("fedavg", **SMALL, **given, out=tmp_path / "run")


def test_several_seeds_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "runs")
    assert main(["run", "fedavg", *FLAGS, "--seed", "0,2", "--out", out, "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["seeds"] == [0, 2] and found["test"]["runs"] == 2 and captured.err == ""
    assert main(["run", "fedavg", *FLAGS, "--runs", "2", "--out", out]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["run", "fedavg", *FLAGS, "--runs", "2", "--out", out, "--overwrite"]) == 0
    assert "mean" in capsys.readouterr().out
    assert main(["run", "fedavg", *FLAGS, "--seed", "a", "--out", out]) == 2
    assert "0,1,2" in capsys.readouterr().err


# -- progress --------------------------------------------------------------------------------------


class Cells:
    """What a notebook shows: one output per display, replaced by updates."""

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def display(self, what: Any, display_id: bool) -> Any:
        self.outputs.append(what.data)
        place = len(self.outputs) - 1
        return SimpleNamespace(update=lambda new: self.outputs.__setitem__(place, new.data))


def test_a_notebook_shows_one_bar_per_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    cells = Cells()
    monkeypatch.setattr(progress, "_notebook_cell", lambda: progress._Cell(cells.display))
    isthmus.run("fedavg", **SMALL, out=tmp_path / "shown")
    assert len(cells.outputs) == 1 and "4/4" in cells.outputs[0] and "<progress" in cells.outputs[0]
    isthmus.run("fedavg", **SMALL, out=tmp_path / "quiet", quiet=True)
    assert len(cells.outputs) == 1


def test_scripts_are_silent_and_terminals_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    isthmus.run("fedavg", **SMALL, out=tmp_path / "script")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: as in a terminal
    isthmus.run("fedavg", **SMALL, out=tmp_path / "terminal")
    assert "4/4" in capsys.readouterr().err


def test_callbacks_see_every_seed(tmp_path: Path) -> None:
    class Count(Callback):
        starts = 0

        def on_start(self, *_: Any) -> None:
            self.starts += 1

    count = Count()
    isthmus.run("local", **SMALL, runs=2, callbacks=[count], out=tmp_path / "runs")
    assert count.starts == 2
