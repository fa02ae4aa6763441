"""A finished run goes on for more rounds, and ends as a longer run from the start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_helpers import SMALL, assert_same_run, lines, models, result

import isthmus
from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.methods.registry import Phase, get_method

KEYS: dict[str, dict[str, Any]] = {
    "fedavg": {"dropout": 0.5},
    "fedavg, best round": {"selection": "best_val_acc", "dropout": 0.5},
    "fedavg, noise": {"dp_clip": 1.0, "dp_noise": 0.0, "weighting": "uniform"},
    "fedper": {},
    "apfl": {},
    "local": {"execution": "each"},
    "gcfl": {},
    "fedspray": {"secure_sum": False, "preset": "fedspray"},
    "fedstruct": {"backbone": "mlp", "profile": "reference"},
    "hifgl": {"secmp": "plain", "backbone": None, "hidden": None},
    "fedggr": {"backbone": None, "hidden": None},
    "fedgcn": {},
}


class StopAt(Callback):
    """Ends the process' work after a round, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_round(self, progress: Progress) -> None:
        if progress.step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("case", KEYS)
def test_more_rounds_are_a_longer_run(case: str, tmp_path: Path) -> None:
    method = case.partition(",")[0]
    keys = {**SMALL, **KEYS[case]}
    isthmus.run(method, **{**keys, "rounds": 5}, out=tmp_path / "long")
    isthmus.run(method, **{**keys, "rounds": 2}, out=tmp_path / "short")
    assert result(tmp_path / "short")["rounds"] == 2
    more = isthmus.resume(tmp_path / "short", rounds="+2")  # as it is typed
    assert more["rounds"] == 4 and len(more.history["round"]) == 4
    isthmus.resume(tmp_path / "short", rounds=+1)
    assert_same_run(tmp_path / "short", tmp_path / "long")


def test_with_secure_sums_keys_are_exchanged_once_more_and_nothing_else_differs(tmp_path: Path) -> None:
    keys = {**SMALL, "secure_sum": True, "execution": "each"}
    isthmus.run("fedavg", **{**keys, "rounds": 4}, out=tmp_path / "long")
    isthmus.run("fedavg", **{**keys, "rounds": 2}, out=tmp_path / "short")
    isthmus.resume(tmp_path / "short", rounds=2)
    assert models(tmp_path / "short") == models(tmp_path / "long")
    for ours, theirs in zip(lines(tmp_path / "short"), lines(tmp_path / "long"), strict=True):
        assert {key for key in ours if ours[key] != theirs[key]} <= {"seconds", "bytes"}


def test_graph_tasks_too(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dataset": "motifs:graphs=40", "clients": 2, "hidden": "4,4"}
    isthmus.run("fedstar", **keys, rounds=3, out=tmp_path / "long")
    isthmus.run("fedstar", **keys, rounds=1, out=tmp_path / "short")
    isthmus.resume(tmp_path / "short", rounds=2)
    assert_same_run(tmp_path / "short", tmp_path / "long")


@pytest.mark.parametrize("method", ["fedavg", "local"])
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_last_round_that_was_evaluated_out_of_turn_is_repeated(rounds: int, method: str, tmp_path: Path) -> None:
    keys = {**SMALL, "eval_every": 3, "selection": "best_val_loss"}
    isthmus.run(method, **{**keys, "rounds": 7}, out=tmp_path / "long")
    isthmus.run(method, **{**keys, "rounds": rounds}, out=tmp_path / "short")
    assert lines(tmp_path / "short")[-1]["round"] == rounds
    isthmus.resume(tmp_path / "short")  # returns the result and leaves what more rounds begin from
    isthmus.resume(tmp_path / "short", rounds=7 - rounds)
    assert [line["round"] for line in lines(tmp_path / "short")] == [3, 6, 7]
    assert_same_run(tmp_path / "short", tmp_path / "long")


def test_killed_while_it_goes_on(tmp_path: Path) -> None:
    isthmus.run("fedavg", **{**SMALL, "rounds": 6}, out=tmp_path / "long")
    isthmus.run("fedavg", **{**SMALL, "rounds": 2}, out=tmp_path / "short")
    with pytest.raises(KeyboardInterrupt):
        isthmus.resume(tmp_path / "short", [StopAt(5)], rounds=4)
    with pytest.raises(ConfigError, match="not finished: `isthmus resume"):
        isthmus.resume(tmp_path / "short", rounds=4)
    isthmus.resume(tmp_path / "short")
    assert_same_run(tmp_path / "short", tmp_path / "long")


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "run")
    isthmus.run("fedavg", **{**SMALL, "rounds": 1}, out=path)
    assert main(["resume", path, "--rounds", "+2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 3
    for wrong in ("2", "-2", "+0.5", "+0", "more"):
        assert main(["resume", path, "--rounds", wrong]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and ("as +100" in error or "at least 1" in error)
    assert result(tmp_path / "run")["rounds"] == 3


def test_runs_that_cannot_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isthmus.run("fedavg", **{**SMALL, "rounds": 1}, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="at least 1"):
        isthmus.resume(tmp_path / "run", rounds=0)
    with pytest.raises(ConfigError, match="settings of a run stay"):
        isthmus.resume(tmp_path / "run", lr=0.5)
    method = get_method("fedavg")
    after = replace(method, phases=(*method.phases, Phase("after", method.phases[-1].run_round, rounds=1)))
    with monkeypatch.context() as patch:
        patch.setattr("isthmus.experiments.config.get_method", lambda name: after)
        with pytest.raises(ConfigError, match="ends with a phase of its own"):
            isthmus.resume(tmp_path / "run", rounds=1)
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    config.write_text(text.replace('engine = "local"', 'engine = "nvflare"'))
    with pytest.raises(ConfigError, match="between organisations"):
        isthmus.resume(tmp_path / "run", rounds=1)
    config.write_text(text)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="keeps no checkpoint"):
        isthmus.resume(tmp_path / "run", rounds=1)
    assert result(tmp_path / "run")["rounds"] == 1, "refused before anything was changed"


@pytest.mark.parametrize(
    ("keys", "text"),
    [({"schedule": "cosine"}, "rates fell to nearly 0"), ({"patience": 1, "lr": 1e-9, "rounds": 9}, "ended early")],
)
def test_schedules_by_rounds_and_early_ends_are_refused(keys: dict[str, Any], text: str, tmp_path: Path) -> None:
    isthmus.run("fedavg", **{**SMALL, "dropout": 0.0, **keys}, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=text):
        isthmus.resume(tmp_path / "run", rounds=1)


def test_patience_that_was_not_used_up_and_decaying_rates_go_on(tmp_path: Path) -> None:
    keys = {**SMALL, "patience": 50, "schedule": "decay", "lr_decay": 0.5, "lr_step": 2}
    isthmus.run("fedavg", **{**keys, "rounds": 5}, out=tmp_path / "long")
    isthmus.run("fedavg", **{**keys, "rounds": 3}, out=tmp_path / "short")
    isthmus.resume(tmp_path / "short", rounds=2)
    assert_same_run(tmp_path / "short", tmp_path / "long")


def test_other_settings_than_rounds_still_stop_it(tmp_path: Path) -> None:
    isthmus.run("fedavg", **{**SMALL, "rounds": 1}, out=tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.05", "lr = 0.5"))
    with pytest.raises(ConfigError, match=r"config\.toml was changed"):
        isthmus.resume(tmp_path / "run", rounds=1)
