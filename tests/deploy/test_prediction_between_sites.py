"""Predictions between organisations: each gets its own, equal to what the training scored, and nothing but the messages
of the prediction's script leaves a site.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process_sites import federation, run_in_process, settings_of

from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings
from isthmus.experiments.run import start
from isthmus.experiments.scenarios import scenario_of

MORE: dict[str, dict[str, Any]] = {
    "fedstruct": {"protocol": "published", "structure_hops": 2, "nsf_dim": 4, "structure_hidden": 4},
    "hifgl": {"secmp": "plain"},
    "fedggr": {"k": 4, "encoder_epochs": 2, "embedding_width": 8, "encoder_hidden": 8},
}


def predicting(settings: Settings) -> Settings:
    return replace(settings, run=replace(settings.run, predict="r"))


def right(file: Path, labels: dict[int, int], test: set[int]) -> tuple[int, int]:
    rows = [row for row in csv.DictReader(file.open()) if int(row["id"]) in test]
    return sum(int(row["predicted"]) == labels[int(row["id"])] for row in rows), len(rows)


@pytest.mark.parametrize("method", ["fedavg", "fedstruct", "hifgl", "fedggr"])
def test_each_organisation_gets_its_predictions(method: str, tmp_path: Path) -> None:
    settings = settings_of(method, selection="best_val_acc", **MORE.get(method, {}))
    transport = federation(tmp_path)
    trained = run_in_process(tmp_path, transport, settings).result()
    assert trained is not None
    folder = run_in_process(tmp_path, transport.restarted(), predicting(settings), run="p")
    result = folder.result()
    assert result is not None and result["kind"] == "predict" and result["clients"] == ["client-0", "client-1"]
    parts = scenario_of(settings).parts
    found = []
    for number in (0, 1):
        data = parts[f"client-{number}"]
        ids = data.node_id.tolist()
        labels = dict(zip(ids, data.y.tolist(), strict=True))
        test = {id_ for id_, chosen in zip(ids, data.test.tolist(), strict=True) if chosen}
        found.append(right(tmp_path / f"bank-{number}" / "state" / "p" / "predictions.csv", labels, test))
    assert sum(one[0] for one in found) / sum(one[1] for one in found) == trained["test"]
    assert not list(folder.path.rglob("predictions*")), "predictions stay with their owners"
    entries = list(folder.ledger())
    assert {entry.phase for entry in entries} <= {"prediction"}
    assert "Evaluation" not in {entry.message for entry in entries}
    assert bool(entries) == (method != "fedavg")


def test_who_did_not_train_cannot_predict(tmp_path: Path) -> None:
    settings = settings_of("fedavg")
    with pytest.raises(ConfigError, match="client-0 holds no model of run r"):
        run_in_process(tmp_path, federation(tmp_path), predicting(settings), run="p")


def test_other_settings_than_those_of_the_training_are_refused(tmp_path: Path) -> None:
    transport = federation(tmp_path)
    run_in_process(tmp_path, transport, settings_of("fedavg"))
    other = predicting(settings_of("fedavg", rounds=3))
    with pytest.raises(ConfigError, match="had other settings here than this prediction names"):
        run_in_process(tmp_path, transport.restarted(), other, run="p")


def test_a_simulation_takes_packages_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="isthmus predict"):
        start(
            replace(
                predicting(settings_of("fedavg")), run=replace(predicting(settings_of("fedavg")).run, engine="local")
            )
        )
