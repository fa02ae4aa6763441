"""A federation on loopback: what its sites are given."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from isthmus.deploy.loopback import prepare_run
from isthmus.experiments.config import resolve


def test_own_files_are_absolute_since_sites_work_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = Data(x=torch.randn(30, 4), edge_index=torch.randint(30, (2, 90)), y=torch.arange(30) % 2)
    torch.save(graph, "graph.pt")
    part = np.arange(30) % 3
    np.savez("split.npz", train=part == 0, val=part == 1, test=part == 2)
    own = {"dataset": "./graph.pt", "split": "masks:split.npz", "clients": 2, "engine": "nvflare"}
    folder, settings = prepare_run(resolve("fedavg", own), tmp_path / "run")
    wanted = (str(tmp_path / "graph.pt"), f"masks:{tmp_path / 'split.npz'}")
    assert (settings.run.dataset, settings.run.split) == wanted
    kept = tomllib.loads((folder / "config.toml").read_text())["run"]  # what the server sends the sites
    assert (kept["dataset"], kept["split"]) == wanted
    _, named = prepare_run(
        resolve("fedavg", {"dataset": "csbm:nodes=30", "clients": 2, "engine": "nvflare"}), tmp_path / "named"
    )
    assert (named.run.dataset, named.run.split) == ("csbm:nodes=30", "10/10/80")
