"""Tune a method with Optuna: trials that do badly on validation are pruned, and leave no unfinished folder behind.

    pip install optuna
    python examples/tuning/tune_with_optuna.py

Only validation scores are looked at. The test score is read once, of the settings that were chosen.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import optuna

import isthmus


class Prune(isthmus.Callback):
    """Reports validation scores to a trial, and ends its run where it falls behind."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_round(self, progress: isthmus.Progress) -> None:
        if progress.scores is None or progress.scores["val"] is None:
            return
        self.trial.report(progress.scores["val"], progress.round)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def tune(method: str, folder: Path, *, trials: int = 20, **settings: Any) -> isthmus.Result:
    """Search learning rate, dropout and width; returns the run that validation prefers."""

    def objective(trial: optuna.Trial) -> float:
        out = folder / f"trial-{trial.number}"
        try:
            result = isthmus.run(
                method,
                **settings,
                lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True),
                dropout=trial.suggest_float("dropout", 0.0, 0.7),
                hidden=trial.suggest_categorical("hidden", [16, 64]),
                out=out,
                callbacks=[Prune(trial)],
                quiet=True,
            )
        except optuna.TrialPruned:
            shutil.rmtree(out, ignore_errors=True)
            raise
        return float(result["val"])

    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner()
    )
    study.optimize(objective, n_trials=trials)
    return isthmus.load(folder / f"trial-{study.best_trial.number}")


if __name__ == "__main__":
    best = tune("fedavg", Path("runs/optuna"), dataset="cora", clients=10, rounds=50)
    sys.stdout.write(f"{best!r}\n")
