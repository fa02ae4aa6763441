"""The model package: complete, versioned, and refused with a reason where it is not what was written."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
from run_helpers import run_in_folder, small

from isthmus.errors import ConfigError, DataError
from isthmus.experiments.model_package import read_package, read_packages


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run_in_folder(small("fedlit", rounds=2), folder / "r")
    return folder / "r" / "models"


@pytest.fixture
def package(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "client-0", tmp_path / "p")
    return tmp_path / "p"


def test_what_it_holds(package: Path) -> None:
    names = {path.name for path in package.iterdir()}
    assert names == {
        *("weights.safetensors", "model.toml", "structure.safetensors", "card.md", "scores.json", "disclosure.json")
    }
    found = read_package(package)
    assert found.client == "client-0" and found.clients == ("client-0", "client-1", "client-2")
    assert found.method.name == "fedlit" and found.num_features == 6 and found.weights
    card = (package / "card.md").read_text()
    for said in ("Took part: 3", "By class, test", "Calibration, test", "Differential privacy: none", "Not to be used"):
        assert said in card
    left = json.loads((package / "disclosure.json").read_text())
    assert {row["message"] for row in left["rows"]} >= {"Centroids", "Update", "Evaluation"}
    assert all(row["sender"] == "client" for row in left["rows"]), "what others sent is not the owner's to tell"


@pytest.mark.parametrize("name", ["weights.safetensors", "structure.safetensors", "card.md", "disclosure.json"])
def test_tampered_and_truncated_files_are_named(package: Path, name: str) -> None:
    content = (package / name).read_bytes()
    for damaged in (content[:-5], content[:-1] + bytes([content[-1] ^ 1])):
        (package / name).write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{name} is not the file this package was written with"):
            read_package(package)
    (package / name).unlink()
    with pytest.raises(DataError, match=rf"lacks {name}"):
        read_package(package)


def test_a_changed_model_toml_does_not_go_with_the_weights(package: Path) -> None:
    facts = tomllib.loads((package / "model.toml").read_text())
    facts["method_config"]["types"] = 3
    (package / "model.toml").write_text(tomli_w.dumps(facts))
    with pytest.raises(DataError, match=r"model\.toml was changed since the weights were written"):
        read_package(package)


def test_a_newer_format_says_to_upgrade(package: Path) -> None:
    text = (package / "model.toml").read_text()
    (package / "model.toml").write_text(text.replace("format = 1", "format = 2"))
    with pytest.raises(ConfigError, match=r"has package format 2, .*reads format 1: upgrade Isthmus"):
        read_package(package)


def test_a_folder_that_is_none(tmp_path: Path, trained: Path) -> None:
    with pytest.raises(DataError, match="holds no model package"):
        read_packages(tmp_path)
    (tmp_path / "client-0.safetensors").write_bytes(b"old")
    with pytest.raises(DataError, match="older versions wrote bare weights: train again"):
        read_packages(tmp_path)
    run_in_folder(small("fedlit", rounds=1), tmp_path / "other")
    shutil.copytree(trained / "client-0", tmp_path / "mixed" / "a")
    shutil.copytree(tmp_path / "other" / "models" / "client-1", tmp_path / "mixed" / "b")
    with pytest.raises(DataError, match="are of different runs"):
        read_packages(tmp_path / "mixed")
