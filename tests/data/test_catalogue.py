"""List, get, verify."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.data.catalogue import get, list_datasets, list_partitions, verify
from isthmus.data.datasets import NODE_SETS
from isthmus.data.graphscenario import dataset_name
from isthmus.data.graphsets import GRAPH_SETS, SETTINGS
from isthmus.data.partition import PARTITIONS
from isthmus.errors import ConfigError, DataError

Need = Callable[[str], Path]


@pytest.fixture
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ISTHMUS_DATA", raising=False)
    return tmp_path


def test_list_is_complete_and_plain(nothing_here: Path) -> None:
    entries = list_datasets()
    assert {*NODE_SETS, *GRAPH_SETS, *SETTINGS, "csbm", "powerlaw", "banks", "motifs"} == {
        entry.name for entry in entries
    }
    assert {entry.where for entry in entries} == {None, "generated"}
    json.dumps([entry.to_json() for entry in entries])


def test_where(need_data: Need) -> None:
    need_data("Planetoid/Cora/raw")
    where = {entry.name: entry.where for entry in list_datasets()}
    assert where["cora"] == where["chem"] == where["bio-chem-sn"] == "mirror"
    assert where["flickr"] is None


def test_get_converts_for_later(need_data: Need, nothing_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_DATA", str(need_data("Planetoid").parent))
    assert get("Cora") == [("cora", "mirror")]
    assert get("MUTAG") == [("mutag", "mirror")]
    monkeypatch.delenv("ISTHMUS_DATA")
    assert get("cora") == [("cora", "mirror")]  # from the converted copy
    assert {entry.name for entry in list_datasets() if entry.where == "cache"} == {"cora", "mutag"}
    with pytest.raises(DataError, match="isthmus data get pubmed"):
        get("pubmed")
    with pytest.raises(ConfigError, match="unknown data set"):
        get("nonsense")


@pytest.mark.parametrize("name", ["nonsense", "n" * 5000])
def test_an_unknown_name_is_refused_however_long(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown data set"):
        dataset_name(name)


def test_verify_names_the_damaged_file(need_data: Need, nothing_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = nothing_here / "mirror"
    shutil.copytree(need_data("Planetoid/Cora/raw"), mirror / "Planetoid/Cora/raw")
    shutil.copytree(need_data("TUDataset/MUTAG/raw"), mirror / "TUDataset/MUTAG/raw")
    monkeypatch.setenv("ISTHMUS_DATA", str(mirror))
    assert [(item.name, item.status) for item in verify(["cora", "mutag", "citeseer"])] == [
        ("cora", "ok"),
        ("mutag", "ok"),
        ("citeseer", "not here"),
    ]
    victim = mirror / "Planetoid/Cora/raw/ind.cora.tx"
    victim.chmod(0o644)
    victim.write_bytes(victim.read_bytes() + b" ")
    (item,) = verify(["CORA"])
    assert item.status == "damaged" and "ind.cora.tx" in item.problems[0]


def test_verify_names_what_the_mirror_has_lost(
    need_data: Need, nothing_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set of which some files are gone is incomplete, also where a converted copy could still be used; one that is
    gone is not here.
    """
    mirror = nothing_here / "mirror"
    shutil.copytree(need_data("Planetoid/Cora/raw"), mirror / "Planetoid/Cora/raw")
    shutil.copytree(need_data("TUDataset/MUTAG/raw"), mirror / "TUDataset/MUTAG/raw")
    monkeypatch.setenv("ISTHMUS_DATA", str(mirror))
    monkeypatch.setenv("ISTHMUS_OFFLINE", "1")
    (mirror / "TUDataset/MUTAG/raw/MUTAG_A.txt").unlink()
    for part in ("tx", "graph"):
        (mirror / f"Planetoid/Cora/raw/ind.cora.{part}").unlink()
    found = {item.name: item for item in verify(["cora", "mutag", "citeseer"])}
    assert [item.status for item in found.values()] == ["incomplete", "incomplete", "not here"]
    assert found["cora"].problems == ("Planetoid/Cora/raw of the mirror lacks ind.cora.tx, ind.cora.graph",)
    with pytest.raises(DataError, match=r"put MUTAG_A\.txt into TUDataset/MUTAG/raw/"):
        get("mutag")


def test_list_and_verify_agree_on_a_converted_copy(
    need_data: Need, nothing_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_DATA", str(need_data("Planetoid").parent))
    get("cora")
    monkeypatch.delenv("ISTHMUS_DATA")
    (item,) = verify(["cora"])
    assert (item.status, item.source) == ("ok", "converted copy")
    assert {each.name for each in verify() if each.status == "ok"} == {
        each.name for each in list_datasets() if each.where == "cache"
    }
    (copy,) = (nothing_here / "cache").rglob("cora-*.safetensors")
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    (item,) = verify(["cora"])
    assert item.status == "damaged" and "converted copy" in item.problems[0]


def test_the_mirror_is_intact(need_data: Need) -> None:
    need_data("Planetoid/Cora/raw")
    here = [item for item in verify() if item.status != "not here"]
    assert len(here) >= 25 and {item.status for item in here} == {"ok"}


def test_partitions_are_described() -> None:
    rows = list_partitions()
    assert {row["name"] for row in rows if row["kind"] == "partition" and row["task"] == "node"} == set(PARTITIONS)
    assert all(row["what"] and "`" not in row["what"] and "Partition" not in row["what"] for row in rows)
