"""Transfers written as tables: what a run on the tables sees is what a run on the data set sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("polars", reason="needs the extra tables")

from isthmus.cli.main import main
from isthmus.data.datasets import load_nodes
from isthmus.data.scenario import Scenario
from isthmus.data.tables.owner import read_owner
from isthmus.data.tables.schema import parse_schema, read_schema
from isthmus.data.transfer_tables import SCHEMA, write_tables
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.scenarios import build
from isthmus.seeds import Stream

DATASET = "banks:banks=3,accounts=300,rate=0.15"


def test_tables_hold_the_same_graph(tmp_path: Path) -> None:
    sizes = write_tables(DATASET, tmp_path / "banks", seed=3)
    named = build(dataset=f"{DATASET},directed=1", partition=None, clients=None, split=None, seed=3)
    tables = build(dataset=str(tmp_path / "banks"), partition=None, clients=None, split=None, seed=3)
    assert isinstance(named, Scenario) and isinstance(tables, Scenario)
    assert list(sizes.values()) == [part.num_nodes for part in named.parts.values()]
    assert [part.num_nodes for part in tables.parts.values()] == list(sizes.values())
    assert tables.statistics.cross_edges == named.statistics.cross_edges
    columns = read_schema(tmp_path / "banks" / next(iter(sizes))).columns
    known = [index for index, name in enumerate(columns) if not name.endswith("is missing")]
    x = torch.cat([part.x for part in named.parts.values()])
    torch.testing.assert_close(tables.whole.x[:, known], x, atol=2e-5, rtol=1e-4)
    assert torch.equal(tables.whole.y, torch.cat([part.y for part in named.parts.values()]))


def test_a_ring_is_in_one_part_at_all_banks(tmp_path: Path) -> None:
    names = write_tables(DATASET, tmp_path, seed=0, split="group:ring:40/20/40")
    ring = np.asarray(load_nodes(DATASET, Stream(0, ("data",))).columns["ring"])
    part = np.full(len(ring), -1)
    for name in names:
        owned = read_owner(tmp_path / name, name, seed=5)
        part[[int(text[1:]) for text in owned.ids.to_list()]] = owned.part
    assert (part >= 0).all()
    spread = [np.unique(part[ring == number]) for number in range(ring.max() + 1)]
    assert all(len(parts) == 1 for parts in spread) and len(np.unique(np.concatenate(spread))) > 1
    alone = np.bincount(part[ring < 0]) / (ring < 0).sum()
    assert np.abs(alone - [0.4, 0.2, 0.4]).max() < 0.02


def test_a_column_of_groups_is_no_feature() -> None:
    text = SCHEMA.format(split="group:ring").replace("[features]", '[features]\nring = { type = "number" }')
    with pytest.raises(DataError, match="'ring' is the split"):
        parse_schema(text.encode())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("csbm:nodes=60", {}, "no single transfers"),
        (DATASET, {"split": "group:rings"}, "did you mean 'ring'"),
        (DATASET, {"split": "group:"}, "name the column"),
        (DATASET, {"clients": 7}, "has 3 clients here, not 7"),
    ],
)
def test_mistakes(name: str, options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        write_tables(name, tmp_path / "new", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "banks"
    assert main(["data", "tables", DATASET, str(folder)]) == 0
    assert "accounts" in capsys.readouterr().out
    assert main(["data", "check", str(folder)]) == 0
    assert main(["data", "tables", DATASET, str(folder)]) == 2
    assert "not empty" in capsys.readouterr().err
