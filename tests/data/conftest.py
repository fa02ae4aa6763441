"""A cache of its own for every test session, so that tests neither see nor fill the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # ISTHMUS_TEST_CACHE keeps converted data sets between sessions, for whoever runs these tests often.
    kept = os.environ.get("ISTHMUS_TEST_CACHE")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("cache")
    before = {name: os.environ.get(name) for name in ("ISTHMUS_CACHE", "ISTHMUS_OFFLINE")}
    os.environ.update(ISTHMUS_CACHE=str(folder), ISTHMUS_OFFLINE="1")
    yield folder
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def need_data() -> object:
    """``need_data("Planetoid/Cora/raw")`` skips the test unless the mirror holds that folder or file."""

    root = os.environ.get("ISTHMUS_DATA")  # as it was before the test changed it: name this fixture first

    def need(path: str) -> Path:
        if not root or not (Path(root) / path).exists():
            pytest.skip(f"ISTHMUS_DATA holds no {path}")
        return Path(root) / path

    return need
