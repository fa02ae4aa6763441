"""``isthmus sweep``: grids, ranking by validation only, resuming, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.api.sweep import parse_grid, sweep_rows
from isthmus.cli.main import main
from isthmus.errors import ConfigError

SCENARIO = ["--dataset", "csbm:nodes=60,features=6", "--clients", "3", "--rounds", "2", "--set", "backbone=gcn"]

MANY = f"lr={','.join(str(i) for i in range(1, 200))}"


def sweep(*words: str) -> int:
    return main(["sweep", *words, "--jobs", "1"])


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("lr=0.1,0.01", "lr", [0.1, 0.01]),
        ("hidden=[64],[128,64]", "hidden", [[64], [128, 64]]),
        ("backbone=gcn, sage", "backbone", ["gcn", "sage"]),
        ("input_norm=true,false", "input_norm", [True, False]),
        ("checkpoint.every=1", "checkpoint.every", [1]),
    ],
)
def test_a_grid_is_read(text: str, key: str, values: list[Any]) -> None:
    assert parse_grid(text) == (key, values)


@pytest.mark.parametrize("text", ["lr", "lr=", "=1,2", "lr=1,,2", "seed=1,2", "method=a,b", "lr=1,1"])
def test_what_is_no_grid(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_grid(text)


def outcomes(*results: tuple[float | None, float]) -> list[Any]:
    job = SimpleNamespace(folder=Path("f"))
    rest = {"selected_round": 1, "seconds": {"train": 1.0}}
    return [
        SimpleNamespace(job=job, reason="", result={"seed": seed, "val": val, "test": test, "score": test, **rest})
        for seed, (val, test) in enumerate(results)
    ]


def test_validation_ranks_and_test_does_not() -> None:
    points = [{"lr": 1}, {"lr": 2}, {"lr": 3}, {"lr": 4}]
    failed = [SimpleNamespace(job=SimpleNamespace(folder=Path("f")), result=None, reason="lost")]
    rows = sweep_rows(points, [outcomes((0.5, 0.9)), outcomes((0.7, 0.1), (0.9, 0.1)), failed, outcomes((0.6, 0.5))])
    assert [row["point"]["lr"] for row in rows] == [2, 4, 1, 3]
    assert rows[0]["val"] == {"mean": pytest.approx(0.8), "std": pytest.approx(0.1), "runs": 2}
    assert rows[3]["reasons"] == ["lost"]
    permuted = sweep_rows(
        points, [outcomes((0.5, 0.1)), outcomes((0.7, 0.9), (0.9, 0.9)), failed, outcomes((0.6, 0.0))]
    )
    assert [row["point"] for row in permuted] == [row["point"] for row in rows]


def test_different_scenarios_are_not_ranked() -> None:
    rows = sweep_rows([{"clients": 2}, {"clients": 3}], [outcomes((0.1, 0.1)), outcomes((0.9, 0.1))])
    assert [row["point"]["clients"] for row in rows] == [2, 3]


def test_a_sweep_is_played_and_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fedavg", *SCENARIO, "--grid", "lr=0.01,0.1", "--grid", "hidden=[4],[4,4]", "--out", str(tmp_path)]
    assert sweep(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["grid"] == {"lr": [0.01, 0.1], "hidden": [[4], [4, 4]]}
    assert len(found["rows"]) == 4
    means = [row["val"]["mean"] for row in found["rows"]]
    assert means == sorted(means, reverse=True)
    assert all(row["val"]["std"] is None for row in found["rows"])  # one seed
    assert json.loads((tmp_path / "sweep.json").read_text()) == found
    configs = {Path(row["folders"][0], "config.toml").read_text() for row in found["rows"]}
    assert len(configs) == 4
    assert sweep(*words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # nothing was played again
    assert "test (not used)" in captured.out and "±" not in captured.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fedavg", *SCENARIO], "--grid"),
        (["fedavg", *SCENARIO, "--grid", "lrr=1,2"], "unknown key 'lrr': did you mean 'lr'?"),
        (["fedavg", *SCENARIO, "--grid", "lr=0.1,fast"], "lr must be a number, got 'fast'"),
        (["fedavg", *SCENARIO, "--grid", "lr=0.1", "--grid", "lr=0.2"], "two --grid options"),
        (["fedavg", *SCENARIO, "--grid", "clients=2,3"], "both swept and given"),
        (["fedavg", *SCENARIO, "--grid", MANY, "--runs", "100"], "more than 10000"),
    ],
)
def test_mistakes(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(*words, "--out", str(tmp_path / "o")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
