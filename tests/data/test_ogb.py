"""Node sets of the Open Graph Benchmark, read from small files in its layout."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.data import ogb
from isthmus.data.datasets import NODE_SETS, Counts, load_nodes
from isthmus.data.scenario import build_scenario
from isthmus.errors import DataError
from isthmus.experiments.scenarios import build
from isthmus.seeds import Stream

EDGES = [(0, 1), (1, 2), (4, 0), (3, 4), (2, 5), (5, 3)]
NODES, WIDTH = 6, 3


def write(folder: Path, split: str, *, year: bool) -> np.ndarray:
    """The files of six nodes."""
    x = np.random.default_rng(0).normal(size=(NODES, WIDTH)).astype(np.float32)
    files = {
        "raw/edge": "\n".join(f"{a},{b}" for a, b in EDGES),
        "raw/node-feat": "\n".join(",".join(repr(float(value)) for value in row) for row in x),
        "raw/node-label": "\n".join(["0.0", "1", "1", "nan", "2.0", "0"]) + "\n",
        "raw/num-node-list": "6\n",
        f"split/{split}/train": "0\n4\n",
        f"split/{split}/valid": "1",
        f"split/{split}/test": "2\n5\n",
    } | ({"raw/node_year": "\n".join(str(2010 + i) for i in range(NODES))} if year else {})
    for name, text in files.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    return x


@pytest.fixture
def arxiv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A mirror that holds a small ogbn-arxiv."""
    monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path / "mirror"))
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    small = replace(NODE_SETS["ogbn-arxiv"], counts=Counts(NODES, len(EDGES), WIDTH, 3))
    monkeypatch.setitem(NODE_SETS._entries, "ogbn-arxiv", small)
    return write(tmp_path / "mirror/ogbn_arxiv", "time", year=True)


def test_arxiv_is_directed_with_its_split_and_years(arxiv: np.ndarray) -> None:
    for _ in range(2):  # read, then from the cache
        graph = load_nodes("ogbn-arxiv", Stream(0))
        assert torch.equal(graph.data.x, torch.from_numpy(arxiv))
        assert graph.data.edge_index.T.tolist() == [list(edge) for edge in EDGES]
        assert graph.data.y.tolist() == [0, 1, 1, -1, 2, 0] and graph.data.num_classes == 3
        assert graph.public is not None and graph.public.train[:, 0].nonzero().flatten().tolist() == [0, 4]
        assert graph.public.val[:, 0].nonzero().flatten().tolist() == [1]
        assert graph.public.test[:, 0].nonzero().flatten().tolist() == [2, 5]
        assert np.asarray(graph.columns["year"]).tolist() == list(range(2010, 2016))


def test_the_published_split_is_the_default(arxiv: np.ndarray) -> None:
    scenario = build(dataset="ogbn-arxiv", partition=None, clients=2, split=None, seed=0)
    assert scenario.split == "public"
    assert build_scenario(dataset="ogbn-arxiv", clients=1, split="public").whole.train.sum() == 2


def test_products_has_both_directions_of_every_edge(tmp_path: Path) -> None:
    write(tmp_path, "sales_ranking", year=False)
    tensors = ogb.read_ogb(tmp_path, split="sales_ranking", inverse=True, year=False)
    both = {tuple(arc) for arc in tensors["edge_index"].T.tolist()}
    assert both == set(EDGES) | {(b, a) for a, b in EDGES} and len(tensors["edge_index"][0]) == 2 * len(EDGES)


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_files_are_read_in_pieces_of_whole_lines(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ogb, "PIECE", piece)
    x = write(tmp_path, "time", year=True)
    tensors = ogb.read_ogb(tmp_path, split="time", inverse=False, year=True)
    assert torch.equal(tensors["x"], torch.from_numpy(x)) and tensors["edge_index"].T.tolist() == [*map(list, EDGES)]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("raw/edge", "0,1\n2,x", "edge.csv.gz cannot be read"),
        ("raw/edge", "0,1\n2,6", "does not belong together"),
        ("raw/edge", "0,1\n-1,2", "does not belong together"),
        ("raw/node-feat", "1,2,3", "has 1 rows, 6 are expected"),
        ("raw/node-feat", "1,2,3\n1,2", "node-feat.csv.gz cannot be read"),
        ("raw/node-label", "0\n1", "does not belong together"),
    ],
)
def test_damaged_files_are_named(file: str, text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, "time", year=True)
    (tmp_path / f"{file}.csv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DataError, match=said):
        ogb.read_ogb(tmp_path, split="time", inverse=False, year=True)


def test_a_file_cut_off_is_named(tmp_path: Path) -> None:
    write(tmp_path, "time", year=True)
    path = tmp_path / "raw/edge.csv.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"edge\.csv\.gz cannot be read"):
        ogb.read_ogb(tmp_path, split="time", inverse=False, year=True)


def test_other_counts_than_the_published_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path))
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "ogbn_arxiv", "time", year=True)
    with pytest.raises(DataError, match="published are"):
        load_nodes("ogbn-arxiv", Stream(0))


def test_where_the_files_go_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path))
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="ogbn_products/"):
        load_nodes("ogbn-products", Stream(0))
