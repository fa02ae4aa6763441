"""``isthmus compare``: one scenario, several methods, differences by seed, what each party receives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from isthmus.api.compare import check_presets, check_same_scenario, compare_methods, compared_settings
from isthmus.cli import console
from isthmus.cli.console import print_table
from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve

SCENARIO = [
    "--dataset",
    "csbm:nodes=60,features=6",
    "--clients",
    "3",
    "--rounds",
    "2",
    "--set",
    "backbone=gcn",
    "--set",
    "hidden=4",
]


def compare(*words: str) -> int:
    return main(["compare", *words, "--jobs", "1"])


def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert compare("local", "fedavg", *SCENARIO, "--runs", "2", "--out", str(out), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    local, fedavg = found["methods"]
    assert (local["method"], fedavg["method"]) == ("local", "fedavg")
    assert local["seeds"] == fedavg["seeds"] == [0, 1]
    differences = [a - b for a, b in zip(fedavg["scores"], local["scores"], strict=True)]
    assert fedavg["difference"]["mean"] == pytest.approx(sum(differences) / 2)
    assert fedavg["difference"]["std"] == pytest.approx(abs(differences[0] - differences[1]) / 2)
    assert local["difference"] == {"mean": 0.0, "std": 0.0, "runs": 2}
    assert local["bytes"]["up"] == 0 < fedavg["bytes"]["up"]
    assert fedavg["parameters"]["shared"] > 0
    assert any(
        line["from"] == "client" and line["to"] == "server" and "model" in line["kinds"] for line in fedavg["discloses"]
    )
    assert not any("model" in line["kinds"] for line in local["discloses"])
    assert "<html" in (out / "report.html").read_text()[:200]
    assert json.loads((out / "compare.json").read_text()) == found
    # The same seeds and partitions for all.
    labels = {json.dumps(json.loads((folder / "scenario.json").read_text())) for folder in out.glob("*-s0")}
    assert len(labels) == 1
    # With one more method and seed, only what is missing is played.
    assert compare("local", "fedavg", *SCENARIO, "--runs", "2", "--out", str(out)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert (
        "to local, paired" in captured.out
        and "What each party receives" in captured.out
        and "report.html" in captured.out
    )


def test_a_narrow_terminal_gets_whole_cells_and_is_told_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    headings, row = ("method", "score", "parameters", "up"), ("fedstruct", "71.53 ± 5.80", "68,184", "104.7 kB")
    assert print_table(headings, [row], spare=("up", "parameters", "absent")) == []  # no terminal: as wide as it is
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in row)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(console, "stdout", lambda: Console(width=36, force_terminal=True, highlight=False))
        assert print_table(headings, [row], spare=("up", "parameters", "absent")) == ["up"]
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in row[:3]) and "104.7" not in shown


def test_what_all_methods_ran_with_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("local", "fedavg", *SCENARIO, "--runs", "1", "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert shown.count("general, gcn, 2 rounds") == 1 and "ran with" not in shown
    assert compare("local", "fedavg:rounds=1", *SCENARIO, "--runs", "1", "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "ran with" in shown and "general, gcn, 1 rounds" in shown and "general, gcn, 2 rounds" in shown


def test_both_kinds_of_spread_where_the_score_is_the_clients_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "local",
        "fedavg",
        "--dataset",
        "motifs:graphs=40",
        "--preset",
        "fedstar",
        "--clients",
        "2",
        "--rounds",
        "1",
        "--set",
        "hidden=4,4",
        "--runs",
        "2",
    )
    assert compare(*words, "--out", str(tmp_path), "--json") == 0
    found = json.loads(capsys.readouterr().out)["methods"]
    for row in found:
        runs = [
            json.loads((folder / "result.json").read_text())
            for folder in sorted(tmp_path.glob(f"{row['method']}-*-s?"))
        ]
        a, b = ([client["test_score_last"] for client in run["per_client"]] for run in runs)
        assert row["client_stds"] == pytest.approx(sum(abs(x - y) / 2**0.5 for x, y in zip(a, b, strict=True)) / 2)
    assert compare(*words, "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert (
        "client stds" in shown
        and "client stds: mean over clients of each client's sample standard deviation over seeds" in shown
    )
    assert compare("local", "fedavg", *SCENARIO, "--runs", "2", "--out", str(tmp_path / "nodes")) == 0
    assert "client stds" not in capsys.readouterr().out


def test_graph_gain_between_local_mlp_and_central(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["local:backbone=mlp", "local", "central", *SCENARIO, "--runs", "2", "--out", str(tmp_path)]
    assert compare(*words) == 0  # two rounds: Central has learned nothing yet
    assert "Graph gain: none, since central (gcn) is not above local (mlp)." in capsys.readouterr().out
    words += ["--rounds", "20"]
    assert compare(*words, "--json") == 0
    found = {row["method"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    blind, local, central = found["local:backbone=mlp"], found["local"], found["central"]
    assert blind["scores"] != local["scores"]  # settings of its own
    low, high = blind["test"]["mean"], central["test"]["mean"]
    assert local["graph_gain"]["value"] == pytest.approx((local["test"]["mean"] - low) / (high - low))
    assert (blind["graph_gain"]["value"], central["graph_gain"]["value"]) == (0.0, 1.0)
    assert compare(*words) == 0
    shown = capsys.readouterr().out
    assert "graph gain" in shown and "0 is local (mlp), 100 is central (gcn)" in shown
    assert "0 is local (mlp), 100 is central (gcn)" in (tmp_path / "report.html").read_text()
    assert compare(*words[1:2], *SCENARIO, "--runs", "2", "--out", str(tmp_path)) == 0
    assert "graph gain" not in capsys.readouterr().out


def test_one_seed_has_no_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("local", *SCENARIO, "--runs", "1", "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "one seed has none" in shown and shown.count("±") == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["local", "local", *SCENARIO], 2, "local is given twice"),
        (["local", "fedavgg", *SCENARIO], 2, "unknown method 'fedavgg': did you mean 'fedavg'?"),
        (["local", "fedavgg", "fedprox:seed=3", *SCENARIO], 2, "2 of 3 methods cannot run with these settings: "),
        (["local", "--dataset", "motifs", "--split", "10/10/80", "--runs", "1"], 2, "use one of fedstar, stratified"),
        (["local"], 2, "no data set given"),
        ([], 2, "Missing argument"),
        (["local", *SCENARIO, "--runs", "0"], 2, "--runs"),
        (["local:backbone", *SCENARIO], 2, "local:backbone: settings of a method are key=value"),
        (["local:backbon=mlp", *SCENARIO], 2, "unknown key 'backbon'"),
        (["local", *SCENARIO, "--set", "nokey=1"], 2, "unknown key 'nokey'"),
    ],
)
def test_mistakes(
    words: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*words, "--out", str(tmp_path / "o")) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_missing_data_is_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("ISTHMUS_DATA", raising=False)
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ISTHMUS_OFFLINE", "1")
    assert compare("local", "fedavg", "--dataset", "flickr", "--runs", "2", "--out", str(tmp_path / "new" / "o")) == 3
    output = capsys.readouterr().err
    assert (
        "4 of 4 runs have no result: data set 'flickr' is not available" in output and len(output.splitlines()) == 1
    )  # once, not per run
    assert not (tmp_path / "new").exists()


def test_a_damaged_folder_is_named_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["local", "fedavg", *SCENARIO, "--runs", "1", "--out", str(tmp_path), "--json"]
    assert compare(*words) == 0
    (next(tmp_path.glob("fedavg-*")) / "result.json").write_text("{}")
    capsys.readouterr()
    assert compare(*words) == 3
    captured = capsys.readouterr()
    found = json.loads(captured.out)["methods"]
    assert [row["seeds"] for row in found] == [[0], []]
    assert found[1]["score"] is None and "damaged" in found[1]["reasons"][0]
    assert "delete the folder" in captured.err


def settings(**run: Any) -> Any:
    values = {
        "method": "a",
        "dataset": "cora",
        "partition": "random",
        "clients": 10,
        "split": "10/10/80",
        "metric": "accuracy",
        **run,
    }
    return SimpleNamespace(run=SimpleNamespace(**values))


def test_presets_that_bring_different_scenarios_are_refused() -> None:
    check_same_scenario([settings(), settings(method="b")])
    with pytest.raises(ConfigError, match=r"split would be 10/10/80 for a, client:40/30/30 for b; give --split, or"):
        check_same_scenario([settings(), settings(method="b", split="client:40/30/30")])


def test_everything_that_differs_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"clients would be .*; split would be .*give --clients, --split, or"):
        check_same_scenario([settings(), settings(method="b", clients=3), settings(method="c", split="60/20/20")])
    with pytest.raises(
        ConfigError, match=r"2 of 3 methods cannot run .*fedstruct: fedstruct learns .*hifgl: hifgl learns"
    ):
        compared_settings(["fedavg", "fedstruct", "hifgl"], {"dataset": "motifs:graphs=20"}, None, None, 1)
    named = ["fedavg", "nosuch", "local:mlp", "fedprox:seed=3", "fedstruct:lr=-1"]
    with pytest.raises(ConfigError, match=r"4 of 5 methods cannot run") as refused:
        compared_settings(named, {"dataset": "cora", "preset": "own"}, None, None, 2)
    told = str(refused.value)
    assert "nosuch: unknown method 'nosuch'" in told and "local:mlp: local:mlp: settings of a method are" in told
    assert "fedprox:seed=3: all methods of a comparison run with the seeds" in told and "lr must be above 0" in told


def test_a_seed_for_all_methods_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^all methods of a comparison run with the seeds from 0 on: leave seed out"):
        compared_settings(["fedavg", "local"], {"dataset": "cora", "preset": "own"}, {"seed": 3}, None, 2)


def test_own_settings_win_over_flags_and_own_presets_are_scored_alike(tmp_path: Path) -> None:
    flags = {"dataset": "cora", "partition": "random", "clients": 10, "split": "10/10/80", "preset": "own", "rounds": 7}
    found = compared_settings(["fedavg", "fedstruct", "fedspray:rounds=9"], flags, None, None, 1)
    got = {name: (each.run.preset, each.run.rounds, each.run.selection, each.score) for name, (each,) in found.items()}
    same = ("best_val_acc", "pooled_selected")
    assert got == {
        "fedavg": ("general", 7, *same),
        "fedstruct": ("fedstruct", 7, *same),
        "fedspray:rounds=9": ("general", 9, *same),
    }


def test_scores_by_different_rules_are_refused_and_different_presets_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = (resolve("fedavg", {"dataset": "csbm", "preset": preset}) for preset in ("fedstruct", "fedspray"))
    assert one.score != other.score
    with pytest.raises(ConfigError, match=r"cannot be compared: fedavg .*give --preset"):
        check_presets([one, other])
    check_presets([one, one])
    assert capsys.readouterr().err == ""
    check_presets([one, replace(other, score=one.score)])
    assert "fedavg fedstruct, fedavg fedspray" in capsys.readouterr().err


def test_runs_on_different_data_are_refused() -> None:
    def outcome(**changes: Any) -> Any:
        result = {
            "seed": 0,
            "score": 0.5,
            "test": 0.5,
            "dataset": "cora",
            "partition": "random",
            "clients": 10,
            "split": "10/10/80",
            "source": "mirror",
            "run_dir": "nowhere",
            **changes,
        }
        return SimpleNamespace(result=result, reason="")

    assert compare_methods({"a": [outcome()], "b": [outcome()]})["methods"][1]["difference"]["mean"] == 0.0
    for changes in ({"source": "package index"}, {"clients": 5}):
        with pytest.raises(ConfigError, match="different scenarios and cannot be compared"):
            compare_methods({"a": [outcome()], "b": [outcome(**changes)]})
