"""The file of known names says what the installed modules say, and its mistakes are theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli import known
from isthmus.data.catalogue import list_datasets
from isthmus.errors import IsthmusError
from isthmus.experiments.config import resolve
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.models import load_models


def test_the_file_is_current() -> None:
    assert known.FILE.read_text(encoding="utf-8") == known.text(), "run python -m isthmus.cli.known"


def test_data_sets_and_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "known", known.read)
    wanted = [entry.to_json() | {"size": _as_json(dict(entry.size))} for entry in list_datasets()]
    assert known.datasets() == wanted


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, tuple | list) else value


def said(work: Callable[[], object]) -> tuple[type, str]:
    with pytest.raises(IsthmusError) as caught:
        work()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("method", "dataset", "overrides"),
    [
        ("nosuch", "cora", {}),
        ("fedavgg", "cora", {}),
        ("fedavg", "nosuch", {}),
        ("fedavg", None, {}),
        ("fedavg", "./nowhere.pt", {}),
        ("fedavg", "nowhere/tables", {}),
        ("fedavg", "cora", {"nosuch": 1}),
        ("./nowhere.py", "cora", {}),
    ],
)
def test_mistakes_in_a_run(
    method: str, dataset: str | None, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "known", known.read)
    late = said(lambda: resolve(method, {"dataset": dataset}, overrides))
    assert said(lambda: known.check_run([method], dataset, overrides)) == late


@pytest.mark.parametrize(
    ("method", "dataset", "overrides"),
    [
        ("fedavg", "Cora", {"lr": 1, "rounds": 2}),
        ("fedavg:lr=0.1", "csbm:nodes=100", {}),
        ("fedstar", "chem", {}),
        ("auto", "amazon_photo", {"whatever": 1}),
        ("fedavg", "tables", {}),
        ("fedavg", None, {"dataset": "cora"}),
    ],
)
def test_what_is_right_passes(
    method: str, dataset: str | None, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "known", known.read)
    known.check_run([method], dataset, overrides)


def test_a_new_file_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    known.read.cache_clear()
    monkeypatch.setattr(known, "modules", lambda: ["methods/mine.py"])
    assert known.read() is None
    known.read.cache_clear()


def test_folders_are_refused_alike(tmp_path: Path) -> None:
    from isthmus.cli.main import main

    assert main(["resume", str(tmp_path)]) == 3
    assert "is not a run folder" in said(lambda: RunFolder.open(tmp_path))[1]
    assert "holds no model package" in said(lambda: load_models(tmp_path))[1]
