"""Data as strangers bring them: every method runs on them, or says before the first round what to do."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import isthmus
from isthmus.errors import DataError
from isthmus.methods.registry import all_methods

NODES = 90
NODE_METHODS = [method.name for method in all_methods() if "node" in method.tasks]


_PART = np.arange(NODES) % 3
WITHOUT_POSITIVES = {
    "y": (np.arange(NODES) % 2) * (_PART != 1),
    **{f"{name}_mask": number == _PART for number, name in enumerate(("train", "val", "test"))},
}
"""Two classes, of which validation has one."""


def graph(**changes: Any) -> Data:
    """A graph of three owners in which only the first column says something."""
    draw = np.random.default_rng(0)
    y, owner = draw.integers(0, 3, NODES), draw.integers(0, 3, NODES)
    x = draw.normal(size=(NODES, 5)).astype(np.float32)
    x[:, 0] += y
    made = {"x": x, "y": y, "edge_index": draw.integers(0, NODES, (2, 2 * NODES)), **changes}
    owner = made.pop("owner", owner)
    return Data(**{name: torch.as_tensor(value) for name, value in made.items()}, owner=[f"org-{i}" for i in owner])


def awkward() -> Data:
    """All at once: one owner without a label, one of a single node, nodes without edges, edges listed again and loops,
    a constant column, one on another scale, classes with gaps.
    """
    plain = graph()
    owner = np.array([int(name[-1]) for name in plain.owner])
    owner[owner == 2] = 0
    owner[40] = 2
    near = plain.edge_index[:, (plain.edge_index < 70).all(0)]
    edges = torch.cat([near, near, near.flip(0), torch.arange(9).expand(2, 9)], 1)
    x = plain.x.clone()
    x[:, 3], x[:, 4] = 1.0, x[:, 4] * 1e8
    y = plain.y * 7 + 5
    y[torch.from_numpy(owner) == 1] = -1
    return graph(x=x, y=y, edge_index=edges, owner=owner)


@pytest.mark.parametrize("method", NODE_METHODS)
def test_every_method_takes_an_awkward_graph(method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"preset": "general", "split": "stratified:40/20/40", "rounds": 2}
    result = isthmus.run(method, dataset=awkward(), **settings, out=tmp_path / "run", quiet=True)
    assert all(math.isfinite(result[part]) for part in ("val", "test", "score"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": np.ones((NODES, 0), np.float32)}, "their degrees or a column of ones"),
        ({"x": np.full((NODES, 2), np.nan, np.float32)}, "180 of 180 cells of x are not finite; fill them first"),
        ({"y": np.linspace(0, 1, NODES)}, "put amounts into classes first"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        isthmus.run("fedavg", dataset=graph(**changes), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"edge_weight": np.ones(2 * NODES)}, {}, "edge_weight changes nothing here: set edge_weights=use"),
        (WITHOUT_POSITIVES, {"metric": "auprc"}, "auprc is not defined on the validation nodes"),
        ({}, {}, None),
    ],
)
def test_what_has_no_effect_or_no_score_is_said(
    changes: dict[str, Any], settings: dict[str, Any], said: str | None, tmp_path: Path, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING, logger="isthmus"):
        isthmus.run("fedavg", dataset=graph(**changes), rounds=1, **settings, out=tmp_path / "run")
    heard = [record.getMessage() for record in caplog.records]
    assert any(text.startswith(said) for text in heard) if said else not heard


def test_tables_of_owners_without_labels_or_edges(tmp_path: Path) -> None:
    """One bank has no label, one no transfer: they take part, and who has neither label nor score is named."""
    pytest.importorskip("polars", reason="needs the extra tables")
    schema = """
[nodes]
file = "accounts.*"
id = "id"
label = "kind"
classes = ["a", "b"]
[features]
age = { type = "number", scale = "standard" }
[edges]
file = "transfers.*"
source = "from"
target = "to"
[edges.features]
in_count = true
out_mean = "sum"
"""
    for bank, kinds in {"one": "ab", "two": "ab", "three": [""]}.items():
        folder = tmp_path / "banks" / bank
        folder.mkdir(parents=True)
        rows = [f"{bank}{i},{kinds[i % len(kinds)]},{20 + 7 * i % 40}" for i in range(20)]
        transfers = [] if bank == "two" else [f"{bank}{i},{bank}{3 * i + 1},{i}" for i in range(6)]
        (folder / "schema.toml").write_text(schema)
        (folder / "accounts.csv").write_text("\n".join(["id,kind,age", *rows]) + "\n")
        (folder / "transfers.csv").write_text("\n".join(["from,to,sum", *transfers]) + "\n")
    result = isthmus.run("fedavg", dataset=str(tmp_path / "banks"), rounds=2, out=tmp_path / "run", quiet=True)
    assert math.isfinite(result["test"]) and result["clients"] == 3
