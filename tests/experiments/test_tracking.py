"""Tracking tools see the scores of every round, the settings and the result; a resumed run continues its record."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_helpers import SMALL, lines

import isthmus
from isthmus.errors import ConfigError
from isthmus.experiments.callbacks import Callback, Progress

KEYS: dict[str, Any] = {**SMALL, "rounds": 3}


class StopAt(Callback):
    def on_round(self, progress: Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes ten seconds to be made
    uri = (tmp_path / "mlflow").as_uri()
    with pytest.raises(KeyboardInterrupt):
        isthmus.run("fedavg", **KEYS, out=tmp_path / "run", callbacks=[isthmus.MLflow("small", uri), StopAt()])
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("small").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "KILLED"
    result = isthmus.resume(tmp_path / "run", [isthmus.MLflow("small", uri)])
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.params["method.lr"] == "0.05" and run.data.params["run.clients"] == "3"
    assert run.data.metrics["final/test"] == result["test"]
    tracked = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "val")}
    assert tracked == {line["step"]: line["val"] for line in lines(tmp_path / "run")}


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    callback = isthmus.WandB("small")
    isthmus.run("fedavg", **KEYS, out=tmp_path / "run", callbacks=[callback])
    (record,) = (tmp_path / "run" / "tracking").rglob("*.wandb")
    wanted = (b"final/test", b"bytes/up", b"method.lr")
    for _ in range(300):  # another process writes it
        if all(name in record.read_bytes() for name in wanted):
            break
        time.sleep(0.1)
    assert all(name in record.read_bytes() for name in wanted)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, callback in (("mlflow", "MLflow"), ("wandb", "WandB")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"isthmus\[{name}\]"):
            getattr(isthmus, callback)()
