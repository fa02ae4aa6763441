"""The example of tuning: pruned trials leave no unfinished run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import isthmus

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tuning" / "tune_with_optuna.py"


def test_tuning_with_optuna_leaves_no_unfinished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spec = importlib.util.spec_from_file_location("tune_with_optuna", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1)
    monkeypatch.setattr(optuna.pruners, "MedianPruner", lambda: pruner)
    best = module.tune(
        "fedavg", tmp_path, trials=6, dataset="csbm:nodes=80,features=6", clients=2, rounds=5, preset="fedstruct"
    )
    folders = sorted(tmp_path.iterdir())
    assert 0 < len(folders) < 6, "some trials were pruned, and are gone"
    assert best["val"] == max(isthmus.load(folder)["val"] for folder in folders)
