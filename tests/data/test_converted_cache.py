"""A damaged converted copy is noticed and made anew, never trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.data import cache_format


def test_a_changed_number_in_the_cache_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    tensors = {"x": torch.arange(6.0).view(2, 3), "y": torch.tensor([0, 1])}
    cache_format.write_cached("toy", "key", tensors, "mirror")
    found = cache_format.read_cached("toy", "key")
    assert found is not None and found[1] == "mirror" and torch.equal(found[0]["x"], tensors["x"])
    (path,) = tmp_path.rglob("*.safetensors")
    spoiled = load_file(path)
    digest = found[0]["x"].clone()
    spoiled["x"] = digest.index_fill(0, torch.tensor([0]), 1234.5)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(spoiled, path, metadata=metadata)
    assert cache_format.read_cached("toy", "key") is None
