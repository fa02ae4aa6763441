"""Named data sets of graphs (TUDataset, https://chrsmrrs.github.io/datasets/) and the four multi-data-set settings of
FedStar.

    name           graphs  classes  nodes     arcs        features
    mutag          188     2        3,371     7,442       7   one-hot node label
    bzr            405     2        14,479    31,070      53  one-hot node label
    cox2           467     2        19,252    40,578      35  one-hot node label
    dhfr           756     2        32,075    67,352      53  one-hot node label
    ptc-mr         344     2        4,915     10,108      18  one-hot node label
    aids           2,000   2        31,385    64,780      38  one-hot node label
    nci1           4,110   2        122,747   265,506     37  one-hot node label
    enzymes        600     6        19,580    74,564      3   one-hot node label
    dd             1,178   2        334,925   1,686,092   89  one-hot node label
    proteins       1,113   2        43,471    162,088     3   one-hot node label
    collab         5,000   3        372,474   24,572,158  492 one-hot degree
    imdb-binary    1,000   2        19,773    193,062     136 one-hot degree
    imdb-multi     1,500   3        19,502    197,806     89  one-hot degree
    letter-low     2,250   15       10,522    14,092      2   position
    letter-med     2,250   15       10,518    14,426      2   position
    letter-high    2,250   15       10,507    20,250      2   position

Features are those of FedStar: node labels where there are any (their range, not only the labels in use), else degrees,
and for the Letter sets the two coordinates. Other node attributes and edge labels are ignored.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data import cache_format, store
from isthmus.data.graph_set import GraphSetData
from isthmus.data.whole_graph import empty_masks
from isthmus.errors import DataError, unknown
from isthmus.graph.normalise import to_torch_csr
from isthmus.registry import Registry

LIMIT = 512 << 20  # bytes a member of a data set's zip may unpack to


@dataclass(frozen=True)
class GraphCounts:
    """What the publisher says the set has; edges are arcs, self-loops and duplicates removed."""

    graphs: int
    nodes: int
    edges: int
    features: int
    classes: int


@dataclass(frozen=True)
class GraphSet:
    """One named data set of graphs; ``features`` is ``label``, ``degree`` or ``attribute``."""

    name: str
    title: str
    features: str
    counts: GraphCounts
    raws: tuple[store.RawFiles, ...]
    chunked: bool = False  # too large for PyG's parser


GRAPH_SETS: Registry[GraphSet] = Registry("data set of graphs", "isthmus.data")
"""Named data sets of graphs. To add one, add its `GraphSet`, here or in a file of its own."""

SETTINGS: Registry[tuple[str, ...]] = Registry("setting", "isthmus.data")
"""Settings of several data sets, one client each (FedStar spec, section 6)."""


def load_graphs(name: str) -> tuple[GraphSetData, str]:
    """A named set of graphs and where it came from; all masks False."""
    entry = find_graphs(name)
    key = entry.raws[0].key()
    tensors, source = cache_format.converted(entry.name, key, entry.counts, _counts, lambda: _read(entry))
    return _graphs(tensors), source


def find_graphs(name: str) -> GraphSet:
    """The registry entry of a name, whatever its case."""
    wanted = name.lower().replace("_", "-")
    if wanted not in GRAPH_SETS:
        raise unknown("data set of graphs", name, [*GRAPH_SETS, *SETTINGS])
    return GRAPH_SETS[wanted]


def _read(entry: GraphSet) -> tuple[dict[str, Tensor], str]:
    for raw in entry.raws:
        found = store.locate(raw)
        if found is None:
            continue
        with store.staged(raw, found) as root:
            if entry.chunked:
                return read_chunked(root / raw.folder, entry.title), found.source
            return read_tu(root / raw.root, entry.title, entry.features), found.source
    raise store.missing(entry.raws[-1])


def read_tu(root: Path, title: str, features: str) -> dict[str, Tensor]:
    """Let PyG's class read a staged root."""
    from torch_geometric.datasets import TUDataset

    with cache_format.pyg_reading(title):
        dataset: Any = TUDataset(str(root), title, use_node_attr=features == "attribute")
    data, slices = dataset._data, dataset.slices
    sizes = slices["x"].diff() if data.x is not None else torch.tensor(data._num_nodes)
    graphs = sizes.numel()
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(sizes, 0)])
    # PyG's slices end early where the last graphs have no edges.
    begin = slices["edge_index"]
    edge_ptr = torch.cat([begin, begin[-1:].expand(graphs + 1 - begin.numel())])
    edge_index = data.edge_index + torch.repeat_interleave(ptr[:-1], edge_ptr.diff())
    x = (
        cache_format.sparsify(data.x)
        if features != "degree"
        else degree_one_hot(np.bincount(edge_index[0].numpy(), minlength=int(ptr[-1])))
    )
    return {
        **cache_format.pack("x", x),
        "edge_index": edge_index.to(torch.int32),
        "ptr": ptr,
        "edge_ptr": edge_ptr,
        "y": data.y.to(torch.int64),
    }


def read_chunked(folder: Path, title: str) -> dict[str, Tensor]:
    """The same from a zip or folder of TU text files, a block of lines at a time.

    For sets whose edge file is hundreds of megabytes of text: memory stays at a few bytes per arc. No node labels:
    features are degrees.
    """
    with _member(folder, title, "graph_indicator") as (file, _):
        batch = np.concatenate(list(_numbers(file))) - 1
    with _member(folder, title, "graph_labels") as (file, _):
        y = np.unique(np.concatenate(list(_numbers(file))), return_inverse=True)[1]
    nodes, graphs = len(batch), len(y)
    if graphs < 1 or (np.diff(batch) < 0).any() or batch[0] < 0 or batch[-1] >= graphs:
        raise DataError(f"{title}: the graph indicator does not fit {graphs} graph labels: replace the files")
    with _member(folder, title, "A") as (file, size):
        # A line has four bytes or more. Room for that many arcs costs nothing until it is written to; a list of blocks
        # would be held twice.
        room, filled = np.empty(size // 4 + 1, dtype=np.int64), 0
        for block in _numbers(file, even=True):
            codes = _codes(block, nodes, title)
            room[filled : filled + len(codes)] = codes
            filled += len(codes)
    arcs = _sorted_unique(room[:filled])
    begin = np.searchsorted(arcs, np.arange(nodes + 1) * nodes)  # first arc of every node
    edges = np.empty((2, len(arcs)), dtype=np.int32)
    np.floor_divide(arcs, nodes, out=edges[0], casting="unsafe")
    np.remainder(arcs, nodes, out=edges[1], casting="unsafe")
    del arcs, room
    ptr = np.concatenate([[0], np.cumsum(np.bincount(batch, minlength=graphs))])
    return {
        **cache_format.pack("x", degree_one_hot(np.diff(begin))),
        "edge_index": torch.from_numpy(edges),
        "ptr": torch.from_numpy(ptr),
        "edge_ptr": torch.from_numpy(begin[ptr]),
        "y": torch.from_numpy(y.astype(np.int64)),
    }


def degree_one_hot(degree: NDArray[np.int64]) -> Tensor:
    """One-hot degree (n, largest degree + 1)."""
    nodes = len(degree)
    shape = (nodes, int(degree.max(initial=0)) + 1)
    return to_torch_csr(sp.csr_matrix((np.ones(nodes, dtype=np.float32), degree, np.arange(nodes + 1)), shape=shape))


@contextlib.contextmanager
def _member(folder: Path, title: str, part: str) -> Iterator[tuple[BinaryIO, int]]:
    """A text file of the set and its size, from the folder or out of its zip (read as a stream; sizes beyond the limit
    are refused).
    """
    archive = folder / f"{title}.zip"
    if not archive.exists():
        path = folder / f"{title}_{part}.txt"
        with path.open("rb") as file:
            yield file, path.stat().st_size
        return
    with zipfile.ZipFile(archive) as opened:
        name = f"{title}/{title}_{part}.txt"
        try:
            info = opened.getinfo(name)
        except KeyError:
            raise DataError(f"{archive.name} has no member {name!r}: it is not the archive we expect") from None
        if info.file_size > LIMIT:
            raise DataError(
                f"{name} declares {info.file_size} bytes, more than the {LIMIT} allowed: not the archive we expect"
            )
        with opened.open(info) as stream:
            yield cast(BinaryIO, stream), info.file_size


def _numbers(file: BinaryIO, *, even: bool = False) -> Iterator[NDArray[np.int64]]:
    """Whole numbers of a text file, block by block; blocks end at line ends."""
    rest, read = b"", 0
    while block := file.read(8 << 20):
        read += len(block)
        if read > LIMIT:
            raise DataError(
                f"a file of the data set unpacks to more than the {LIMIT} bytes allowed: not the file we expect"
            )
        lines, newline, tail = (rest + block).rpartition(b"\n")
        rest = tail
        if newline:
            yield _parse(lines, even=even)
    if rest.strip():
        yield _parse(rest, even=even)


def _parse(text: bytes, *, even: bool) -> NDArray[np.int64]:
    # A byte that is no digit or separator would end the parse early and silently: look first. (Labels may be negative:
    # "-1".)
    other = text.translate(None, b"0123456789, \r\n")
    if other.strip(b"-") or len(other) > len(re.findall(rb"(?<![^\s,])-\d", text) if other else ()):
        raise DataError("a file of the data set holds something else than whole numbers: replace it")
    numbers: NDArray[np.int64] = np.fromstring(text.replace(b",", b" ").decode("ascii"), dtype=np.int64, sep=" ")
    if even and len(numbers) % 2:
        raise DataError("an edge file does not hold two numbers per line: replace it")
    return numbers


def _codes(numbers: NDArray[np.int64], nodes: int, title: str) -> NDArray[np.int64]:
    """Arcs as ``source * nodes + target``, self-loops dropped."""
    source, target = numbers[0::2] - 1, numbers[1::2] - 1
    if len(numbers) and (min(source.min(), target.min()) < 0 or max(source.max(), target.max()) >= nodes):
        raise DataError(f"{title}: an edge names a node that does not exist: replace the files")
    codes: NDArray[np.int64] = (source * nodes + target)[source != target]
    return codes


def _sorted_unique(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Like np.unique, but in place where the codes are free of duplicates (a second copy of COLLAB is 200 MB)."""
    codes.sort()
    fresh = codes[1:] != codes[:-1]
    if fresh.all():
        return codes
    kept: NDArray[np.int64] = codes[np.concatenate([[True], fresh])]
    return kept


def _counts(tensors: Mapping[str, Tensor]) -> GraphCounts:
    nodes, features = (int(n) for n in (tensors["x.size"] if "x.size" in tensors else tensors["x"].shape))
    return GraphCounts(
        tensors["y"].numel(), nodes, tensors["edge_index"].shape[1], features, int(tensors["y"].max()) + 1
    )


def _graphs(tensors: Mapping[str, Tensor]) -> GraphSetData:
    y = tensors["y"]
    return GraphSetData(
        x=cache_format.unpack("x", tensors),
        edge_index=tensors["edge_index"].to(torch.int64),  # 32 bits on disk, 64 where torch wants to index with them
        ptr=tensors["ptr"],
        edge_ptr=tensors["edge_ptr"],
        y=y,
        **empty_masks(y.numel()),
        graph_id=torch.arange(y.numel()),
        num_classes=int(y.max()) + 1,
    )


# Wheels only: pip would run the build script of a source archive.
_WHEEL = ("--only-binary=:all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64")


def _tu(title: str, features: str, counts: GraphCounts) -> GraphSet:
    name = title.lower().replace("_", "-")
    parts = (
        "A",
        "graph_indicator",
        "graph_labels",
        *{"label": ("node_labels",), "attribute": ("node_attributes",)}.get(features, ()),
    )
    files = tuple(f"{title}_{part}.txt" for part in parts)
    package = (
        store.PackageCopy("grakel==0.1.11", "grakel/tests/data/MUTAG", files, _WHEEL) if title == "MUTAG" else None
    )
    # Not pinned: text cannot run code, and the mirror's copies are partly converted. Counts are checked instead.
    unpacked = store.RawFiles(name, f"TUDataset/{title}/raw", files, ("TUDataset", title), package, pinned=False)
    if title != "COLLAB":
        return GraphSet(name, title, features, counts, (unpacked,))
    return GraphSet(
        name, title, features, counts, (store.RawFiles(name, "TUDataset", ("COLLAB.zip",)), unpacked), chunked=True
    )


for _entry in (
    _tu("MUTAG", "label", GraphCounts(188, 3371, 7442, 7, 2)),
    _tu("BZR", "label", GraphCounts(405, 14479, 31070, 53, 2)),
    _tu("COX2", "label", GraphCounts(467, 19252, 40578, 35, 2)),
    _tu("DHFR", "label", GraphCounts(756, 32075, 67352, 53, 2)),
    _tu("PTC_MR", "label", GraphCounts(344, 4915, 10108, 18, 2)),
    _tu("AIDS", "label", GraphCounts(2000, 31385, 64780, 38, 2)),
    _tu("NCI1", "label", GraphCounts(4110, 122747, 265506, 37, 2)),
    _tu("ENZYMES", "label", GraphCounts(600, 19580, 74564, 3, 6)),
    _tu("DD", "label", GraphCounts(1178, 334925, 1686092, 89, 2)),
    _tu("PROTEINS", "label", GraphCounts(1113, 43471, 162088, 3, 2)),
    _tu("COLLAB", "degree", GraphCounts(5000, 372474, 24572158, 492, 3)),
    _tu("IMDB-BINARY", "degree", GraphCounts(1000, 19773, 193062, 136, 2)),
    _tu("IMDB-MULTI", "degree", GraphCounts(1500, 19502, 197806, 89, 3)),
    _tu("Letter-low", "attribute", GraphCounts(2250, 10522, 14092, 2, 15)),
    _tu("Letter-med", "attribute", GraphCounts(2250, 10518, 14426, 2, 15)),
    _tu("Letter-high", "attribute", GraphCounts(2250, 10507, 20250, 2, 15)),
):
    GRAPH_SETS.add(_entry.name, _entry)

_CHEM = ("mutag", "bzr", "cox2", "dhfr", "ptc-mr", "aids", "nci1")
_BIO = ("enzymes", "dd", "proteins")
_SOCIAL = ("collab", "imdb-binary", "imdb-multi")
_LETTERS = ("letter-high", "letter-low", "letter-med")

for _name, _sets in (
    ("chem", _CHEM),
    ("bio-chem", _CHEM + _BIO),
    ("bio-chem-sn", _CHEM + _BIO + _SOCIAL),
    ("bio-sn-cv", _BIO + _SOCIAL + _LETTERS),
):
    SETTINGS.add(_name, _sets)
