"""``isthmus data``, ``datasets``, ``partitions``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.cli.main import main


def output(capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return found


def test_list_names_sets_settings_and_generators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--json"]) == 0
    entries = {entry["name"]: entry for entry in output(capsys)["datasets"]}
    assert {"cora", "mutag", "chem", "banks", "csbm"} <= set(entries)
    assert entries["chem"]["kind"] == "setting" and entries["banks"]["where"] == "generated"
    assert main(["datasets"]) == 0 and "cora" in capsys.readouterr().out


def test_verify_finds_a_changed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tmp_path / "Planetoid" / "Cora" / "raw"
    raw.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (raw / f"ind.cora.{part}").write_bytes(b"not what it says")
    monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path))
    assert main(["data", "verify", "cora"]) == 3
    shown = capsys.readouterr()
    assert "damaged" in shown.out and "replace these files" in shown.err and "Traceback" not in shown.err
    (raw / "ind.cora.graph").unlink()
    assert main(["data", "verify", "cora"]) == 3
    shown = capsys.readouterr()
    assert (
        "incomplete" in shown.out
        and "cora is incomplete: Planetoid/Cora/raw of the mirror lacks ind.cora.graph" in shown.err
    )
    for file in raw.iterdir():
        file.unlink()
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    assert main(["data", "verify", "cora"]) == 0 and "not here" in capsys.readouterr().out


def test_unknown_names_are_refused_with_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("get", "verify"):
        assert main(["data", verb, "corra"]) == 2
        assert "did you mean 'cora'" in capsys.readouterr().err


def test_partitions_are_listed_and_one_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partitions"]) == 0
    shown = capsys.readouterr().out
    assert "louvain-top" in shown and "stratified:60/20/20" in shown
    assert main(["partitions", "--dataset", "csbm:nodes=60", "--clients", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["clients"]) == 3 and sum(facts["sizes"].values()) == 60 and 0.0 < facts["cross_share"] < 1.0
    assert 0.0 < facts["leakage"] <= 1.0
    assert main(["partitions", "--dataset", "csbm:nodes=60", "--clients", "3"]) == 0
    assert "cross-edge share" in capsys.readouterr().out
    assert main(["partitions", "--dataset", "motifs", "--clients", "2"]) == 0 and "graphs" in capsys.readouterr().out
    assert main(["partitions", "--clients", "3"]) == 2 and "--dataset" in capsys.readouterr().err
