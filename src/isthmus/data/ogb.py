"""Node sets of the Open Graph Benchmark (Hu et al., NeurIPS 2020, https://arxiv.org/abs/2005.00687): ``ogbn-arxiv`` and
``ogbn-products``, with the published split.

Read from OGB's own files, as its downloads (http://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip, products.zip)
unpack: a folder ``ogbn_arxiv`` with ``raw/edge.csv.gz`` and so on. The package ogb keeps a pickle beside them, which is
not read, and holds a text of gigabytes in memory at once; here it goes by pieces.
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data import cache_format, store
from isthmus.data.datasets import NODE_SETS, Counts, NodeSet
from isthmus.errors import DataError

PIECE = 1 << 26
"""Characters that are read at a time."""
PARTS = {"train": "train", "val": "valid", "test": "test"}


def read_ogb(folder: Path, *, split: str, inverse: bool, year: bool) -> dict[str, Tensor]:
    """A node set from its CSV files.

    Args:
        split: Folder of the published split.
        inverse: Every edge is written once and stands for both directions.
        year: Whether the year of every node is there; it becomes a column.
    """
    nodes = int(_table(folder / "raw/num-node-list.csv.gz", np.int64, 1)[0, 0])
    y = _table(folder / "raw/node-label.csv.gz", np.float64, 1)[:, 0]  # products writes whole numbers as 3.0
    x = _table(folder / "raw/node-feat.csv.gz", np.float32, None, rows=nodes)
    edges = _table(folder / "raw/edge.csv.gz", np.int32, 2)
    if len(y) != nodes or len(x) != nodes or (edges.size and not 0 <= int(edges.min()) <= int(edges.max()) < nodes):
        raise DataError(f"{folder.name} does not belong together: labels, features and edges are not of {nodes} nodes")
    count = len(edges)
    arcs = np.empty((2, 2 * count if inverse else count), dtype=np.int64)
    arcs[:, :count] = edges.T
    if inverse:
        arcs[:, count:] = edges[:, ::-1].T
    masks = {}
    for part, file in PARTS.items():
        mask = torch.zeros(nodes, 1, dtype=torch.bool)
        mask[torch.from_numpy(_table(folder / f"split/{split}/{file}.csv.gz", np.int64, 1)[:, 0])] = True
        masks[part] = mask
    years = (
        {"column.year": torch.from_numpy(_table(folder / "raw/node_year.csv.gz", np.int64, 1)[:, 0])} if year else {}
    )
    return {
        **cache_format.pack("x", cache_format.sparsify(torch.from_numpy(x))),
        "edge_index": torch.from_numpy(arcs),
        "y": torch.from_numpy(np.where(np.isnan(y), -1, y).astype(np.int64)),
        **masks,
        **years,
    }


def _table(path: Path, dtype: Any, columns: int | None, rows: int | None = None) -> NDArray[Any]:
    """The numbers of a compressed CSV file without a header (rows, columns).

    Args:
        columns: How many there are; None: as many as the first line has.
        rows: How many there will be, where it is known: memory is then taken once.
    """
    found: list[NDArray[Any]] = []
    filled = 0
    try:
        for text in _pieces(path):
            if columns is None:
                columns = text.partition(b"\n")[0].count(b",") + 1
            # Whole numbers are exact in float64 below 2^53.
            with warnings.catch_warnings():
                warnings.simplefilter("error", DeprecationWarning)  # how numpy says that something is no number
                values = np.fromstring(text.replace(b",", b" "), dtype=np.float64, sep=" ").reshape(-1, columns)
            if rows is not None and not found:
                found.append(np.empty((rows, columns), dtype=dtype))
            if rows is None:
                found.append(values.astype(dtype))
            else:
                found[0][filled : filled + len(values)] = values
            filled += len(values)
    except (OSError, EOFError, ValueError, DeprecationWarning) as error:
        raise DataError(f"{path.name} cannot be read ({error}): replace it by the published file") from error
    if rows is not None and filled != rows:
        raise DataError(f"{path.name} has {filled} rows, {rows} are expected: replace it by the published file")
    return found[0] if len(found) == 1 else np.concatenate(found) if found else np.empty((0, columns or 1), dtype=dtype)


def _pieces(path: Path) -> Iterator[bytes]:
    """A compressed text in pieces of whole lines."""
    with gzip.open(path, "rb") as file:
        rest = b""
        while text := file.read(PIECE):
            text, newline, rest = (rest + text).rpartition(b"\n")
            if newline:
                yield text
        if rest.strip():
            yield rest


def _ogb(name: str, counts: Counts, *, split: str, inverse: bool, year: bool) -> NodeSet:
    folder = name.replace("-", "_")
    raw = ("edge", "node-feat", "node-label", "num-node-list", *(["node_year"] if year else []))
    files = (*(f"raw/{file}.csv.gz" for file in raw), *(f"split/{split}/{file}.csv.gz" for file in PARTS.values()))
    return NodeSet(
        name,
        store.RawFiles(name, folder, files, pinned=False),
        counts,
        parse=partial(read_ogb, split=split, inverse=inverse, year=year),
        defaults={"split": "public"},
    )


for _entry in (
    _ogb("ogbn-arxiv", Counts(169343, 1166243, 128, 40), split="time", inverse=False, year=True),
    _ogb("ogbn-products", Counts(2449029, 123718280, 100, 47), split="sales_ranking", inverse=True, year=False),
):
    NODE_SETS.add(_entry.name, _entry)
