"""Sets of graphs as tables: one row per graph, per node and per edge."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pl = pytest.importorskip("polars", reason="needs the extra tables")

import isthmus  # noqa: E402
from isthmus.errors import DataError  # noqa: E402
from isthmus.experiments.tables import GraphTablesScenario, tables_scenario  # noqa: E402

SCHEMA = """
[graphs]
file = "molecules.*"
id = "molecule"
label = "toxic"
classes = ["no", "yes"]
split = "stratified:60/20/20"

[nodes]
file = "atoms.*"
id = "atom"
graph = "molecule"

[features]
element = { type = "category", values = ["C", "N", "O"] }
charge = { type = "number" }

[edges]
file = "bonds.*"
source = "a"
target = "b"
graph = "molecule"
"""


def write_lab(folder: Path, seed: int, molecules: int = 20) -> Path:
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    (folder / "schema.toml").write_text(SCHEMA)
    atoms, bonds = [], []
    for number in range(molecules):
        size = int(draw.integers(4, 8))
        names = [f"m{number}-{place}" for place in range(size)]
        ring = number % 2
        atoms += [(name, f"m{number}", draw.choice(["C", "N", "O"]), float(draw.normal())) for name in names]
        pairs = list(pairwise(names)) + ([(names[-1], names[0])] if ring else [])
        bonds += [(a, b, f"m{number}") for a, b in pairs]
    draw.shuffle(atoms)  # rows need not be in the order of graphs
    labels = ["yes" if number % 2 else "no" for number in range(molecules)]
    names = [f"m{number}" for number in range(molecules)]
    pl.DataFrame({"molecule": names, "toxic": labels}).write_csv(folder / "molecules.csv")
    pl.DataFrame(
        [tuple(map(str, row)) for row in atoms], schema=["atom", "molecule", "element", "charge"], orient="row"
    ).write_csv(folder / "atoms.csv")
    pl.DataFrame(bonds, schema=["a", "b", "molecule"], orient="row").write_csv(folder / "bonds.csv")
    return folder


def test_graphs_are_whole_and_methods_train_on_them(tmp_path: Path) -> None:
    for number in range(3):
        write_lab(tmp_path / "labs" / f"lab-{number}", number)
    scenario = tables_scenario(str(tmp_path / "labs"), partition=None, clients=None, split=None, seed=0)
    assert isinstance(scenario, GraphTablesScenario)
    data = scenario.parts["lab-0"]
    assert data.num_graphs == 20 and data.num_features == 4
    assert data.y.tolist() == [number % 2 for number in range(20)]
    graph = data.batch
    assert (graph[data.edge_index[0]] == graph[data.edge_index[1]]).all()
    sizes, arcs = data.ptr.diff(), data.edge_ptr.diff()
    assert (arcs == 2 * (sizes - 1 + data.y)).all()  # a path, or a ring of the toxic ones; both directions
    assert [int(mask.sum()) for mask in (data.train, data.val, data.test)] == [12, 4, 4]
    for method in ("fedavg", "fedstar", "gcfl"):
        result = isthmus.run(method, dataset=isthmus.Tables(tmp_path / "labs"), rounds=2, out=tmp_path / method)
        assert result["clients"] == 3 and 0.0 <= result["test"] <= 1.0


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("atoms.csv", ",m0,", ",m99,", "names a graph that is not in the table of graphs"),
        ("bonds.csv", "m0-0,m0-1,m0", "m0-0,m1-1,m0", "joins nodes of two graphs"),
        ("molecules.csv", "m0,no", "m0,", "every graph needs a label"),
    ],
)
def test_mistakes_are_named(file: str, old: str, new: str, expected: str, tmp_path: Path) -> None:
    for number in range(2):
        write_lab(tmp_path / f"lab-{number}", number)
    path = tmp_path / "lab-1" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=f"lab-1: .*{expected}"):
        tables_scenario(str(tmp_path), partition=None, clients=None, split=None, seed=0)
