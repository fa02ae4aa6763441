"""What misled a researcher in the first hour: each case once, as it was typed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

import isthmus
from isthmus.api.compare import compare, compared_settings, split_method
from isthmus.api.progress import ProgressDisplay
from isthmus.cli.main import main
from isthmus.errors import ConfigError, unknown
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import resolve
from isthmus.experiments.describe import settings_of
from isthmus.experiments.run import start
from isthmus.methods.registry import METHODS
from isthmus.report import find_runs, write_report

ROOT = Path(__file__).resolve().parents[2]

SMALL = ["--dataset", "csbm:nodes=60,features=6", "--clients", "3", "--set", "hidden=4"]


def test_settings_of_one_method_win_over_those_for_all(tmp_path: Path) -> None:
    found = compare(
        ["fedavg:rounds=4", "fedavg:lr=0.5", "local"],
        dataset="csbm:nodes=60,features=6",
        clients=3,
        rounds=2,
        runs=1,
        out=tmp_path,
    )
    assert {row["method"]: row["rounds"] for row in found["methods"]} == {
        "fedavg:rounds=4": 4,
        "fedavg:lr=0.5": 2,
        "local": 2,
    }


def test_a_list_needs_no_brackets_after_a_method() -> None:
    assert split_method("fedavg:hidden=64,32,lr=0.1") == ("fedavg", {"hidden": "64,32", "lr": 0.1})
    assert resolve(*("fedavg", {"dataset": "csbm"}), split_method("fedavg:hidden=64,32")[1]).method_config.hidden == (
        64,
        32,
    )


def test_a_setting_that_one_method_lacks_is_left_out_there_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "fedavg", "local", *SMALL, "--rounds", "1", "--runs", "1", "--jobs", "1"]
    assert main([*words, "--set", "weighting=uniform", "--out", str(tmp_path)]) == 0
    assert "weighting is no setting of local, which runs without" in capsys.readouterr().err
    assert main([*words, "--set", "wieghting=uniform", "--out", str(tmp_path)]) == 2
    assert "did you mean 'weighting'?" in capsys.readouterr().err


def test_setup_counts_in_what_was_sent(tmp_path: Path) -> None:
    seen: list[Progress] = []

    class Watcher(Callback):
        def on_round(self, progress: Progress) -> None:
            seen.append(progress)

    settings = resolve(
        "fedstruct",
        {"dataset": "csbm:nodes=60,features=6", "clients": 3, "rounds": 1, "variant": "near"},
    )
    start(settings, tmp_path / "run", [Watcher()])
    powers = [sum(progress.bytes.values()) for progress in seen if progress.phase != "train"]
    assert powers and all(powers) and powers == sorted(powers)


def test_divergence_ends_with_our_message_and_no_warning_of_numpy(tmp_path: Path) -> None:
    words = ["run", "fedavg", "--preset", "fedstruct", *SMALL[:-2], "--rounds", "8", "--set", "lr=1e9", "--quiet"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", RuntimeWarning)
        main([*words, "--out", str(tmp_path / "run")])
    assert not [str(warning.message) for warning in seen if warning.category is RuntimeWarning]


def test_a_short_run_of_a_preset_that_evaluates_seldom_has_a_curve() -> None:
    def every(**flags: int) -> int:
        return resolve("gcfl", {"dataset": "motifs", "preset": "fedstar", **flags}).run.eval_every

    assert (every(rounds=3), every(), every(rounds=100), every(rounds=3, eval_every=3)) == (1, 5, 5, 3)


def test_an_unknown_data_set_is_answered_with_all_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "nosuch"]) == 2
    said = capsys.readouterr().err
    assert "cora" in said and "mutag" in said and "bio-chem" in said


def test_meanings_name_the_values_as_they_are_typed() -> None:
    meaning = next(setting.meaning for setting in settings_of("fedavg") if setting.key == "weighting")
    assert "nodes (all its nodes)" in meaning and "train (its training nodes)" in meaning


def test_the_beginning_of_a_name_is_suggested_before_a_similar_one() -> None:
    allowed = ("last", "best_val_acc", "best_val_loss")
    assert "did you mean 'best_val_acc'?" in str(unknown("value for selection", "best", allowed))
    assert "did you mean 'last'?" in str(unknown("value for selection", "lst", allowed))


def test_the_score_is_read_at_the_round_that_is_kept(tmp_path: Path) -> None:
    def rule(**flags: str) -> str:
        return resolve("fedavg", {"dataset": "csbm", **flags}).score

    assert rule(preset="fedstruct") == "node_weighted_last"
    assert rule(preset="fedstruct", selection="best_val_acc") == "node_weighted_selected"
    assert rule(preset="general", selection="last") == "pooled_last"
    assert rule(preset="general", selection="best_val_loss") == "pooled_selected"
    flags = {"dataset": "csbm:nodes=60,features=6", "clients": 3, "rounds": 12, "preset": "fedstruct"}
    found = start(resolve("fedavg", {**flags, "selection": "best_val_acc"}), tmp_path / "run")
    assert found["score_round"] == found["selected_round"] < 12  # or the assertion shows nothing: choose another seed
    line = next(
        line
        for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if line["round"] == found["selected_round"]
    )
    assert found["score"] == line["test_node_weighted"]
    # A resolved config given back means the same again.
    assert (
        rule(preset="fedstruct")
        == resolve("fedavg", {}, None, _config_of(tmp_path, resolve("fedavg", flags).to_toml())).score
    )


def _config_of(folder: Path, text: str) -> Path:
    path = folder / "given.toml"
    path.write_text(text)
    return path


def test_a_result_says_what_was_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", *SMALL, "--rounds", "3", "--quiet"]
    assert main([*words, "--preset", "fedstruct", "--set", "head=true", "--out", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    for said in (
        "csbm:nodes=60,features=6 (generated), 3 clients (random)",
        "10/10/80, seed 0",
        "preset fedstruct; the last round's model is kept",
        "sage, layers 6-4-4, dropout 0.5, input norm, linear head",
        "weighted by their number of nodes, last round",
    ):
        assert said in shown
    # One round in a row.
    rows = [line for line in shown.splitlines() if line.startswith("round ")]
    assert rows and all(row.count("round") == 1 for row in rows) and rows[0].startswith("round 3, the last")
    found = json.loads((tmp_path / "a" / "result.json").read_text())
    assert found["model"]["layers"] == [6, 4, 4] and found["model"]["head"] and found["selection"] == "last"
    assert main([*words, "--preset", "fedstruct", "--out", str(tmp_path / "b"), "--seed", "0,1"]) == 0
    shown = capsys.readouterr().out
    assert "split 10/10/80" in shown and "preset fedstruct" in shown and "test, pooled is of the same round" in shown


def test_a_run_says_so_when_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedavg", *SMALL, "--rounds", "1", "--out", str(tmp_path / "a")]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    for said in ("split 10/10/80", "preset general", "sage hidden 4", "dropout 0.5", "selection best_val_acc"):
        assert said in first


def test_compare_says_what_else_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "fedavg", "fedavg:hidden=8", *SMALL, "--rounds", "1", "--runs", "1", "--jobs", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "not the same model for all" in capsys.readouterr().out
    assert main(["compare", "fedavg", "local", *words[3:], "--out", str(tmp_path / "same")]) == 0
    assert "not the same" not in capsys.readouterr().out


def test_a_second_seed_does_not_begin_with_the_score_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay()
    settings = resolve("fedavg", {"dataset": "csbm:nodes=60", "clients": 2, "rounds": 2})
    for _ in range(2):
        display.on_start(settings, Path("nowhere"), 0, 2)
        display.on_round(Progress("setup", 1, 1, 1, 2, None, {}, None))
        display.on_round(Progress("train", 1, 1, 2, 2, None, {}, {"val": 0.5}))
    begins = [line for line in capsys.readouterr().err.splitlines() if " setup " in line]
    assert len(begins) == 2 and all("val -" in line for line in begins)


def test_a_preset_of_one_method_wins_over_that_for_all() -> None:
    flags = {"dataset": "csbm:nodes=60", "clients": 3, "preset": "fedstruct", "split": "20/20/60"}
    (settings,) = compared_settings(["fedspray:preset=general"], flags, {}, None, 1).values()
    assert settings[0].run.preset == "general"
    with pytest.raises(ConfigError, match="scores by different rules cannot be compared"):
        compared_settings(["fedspray:preset=general", "local"], flags, {}, None, 1)


def test_fedsage_is_not_passed_off_as_fedsage_plus() -> None:
    assert "Missing Neighbor Generation" not in METHODS["fedsage"].reference
    assert "Missing Neighbor Generation" in METHODS["fedsageplus"].reference
    readme = (ROOT / "README.md").read_text()
    assert "FedSage (FedAvg with GraphSAGE, not FedSage+)" in readme


def test_what_was_expected_and_absent_is_there() -> None:
    assert not [name for name in METHODS if not (ROOT / "docs" / "methods" / f"{name}.md").is_file()]
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    for word in ("score", "pooled", "client mean", "graph gain"):
        assert f"| {word} |" in glossary
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "docs/choosing.md", "docs/tutorial.ipynb"):
        assert (ROOT / name).is_file()
    for name in ("compare", "sweep", "load", "reproduce"):
        assert name in isthmus.__all__


def test_reports_from_python(tmp_path: Path) -> None:
    result = isthmus.run("fedavg", dataset="csbm:nodes=60,features=6", clients=2, rounds=2, out=tmp_path / "runs" / "a")
    assert result.report(tmp_path / "one.html").is_file()
    page = write_report(find_runs([tmp_path / "runs"]), tmp_path / "all.html")
    assert "fedavg" in page.read_text()
