"""Sets of graphs: packing, loading, splitting, sharding."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from isthmus.data import graphsets
from isthmus.data.generators import generate_graphs
from isthmus.data.graph_set import GraphSetData
from isthmus.data.graphscenario import build_graph_scenario, task_of
from isthmus.data.graphset_split import parse_graph_split
from isthmus.data.graphsets import GRAPH_SETS, SETTINGS, GraphCounts, find_graphs, load_graphs
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config import resolve
from isthmus.experiments.scenarios import scenario_of
from isthmus.seeds import Stream

Need = Callable[[str], Path]
SMALL = "motifs:graphs=60,classes=3,nodes=8"


def motifs(seed: int = 0, name: str = SMALL) -> GraphSetData:
    return generate_graphs(name, Stream(seed, ("data",)))


def one(data: GraphSetData, graph: int) -> tuple[list[list[float]], list[list[int]], int]:
    """Features, arcs (from 0) and label of one graph, cut out by hand."""
    first, last = int(data.ptr[graph]), int(data.ptr[graph + 1])
    arcs = data.edge_index[:, int(data.edge_ptr[graph]) : int(data.edge_ptr[graph + 1])] - first
    x = data.x if data.x.layout == torch.strided else data.x.to_dense()
    return x[first:last].tolist(), arcs.tolist(), int(data.y[graph])


# -- packing ---------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(chosen=st.lists(st.integers(0, 59), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_selected_graphs_are_the_graphs(chosen: list[int], seed: int) -> None:
    data = motifs(seed)
    batch = data.select(torch.tensor(chosen))
    assert batch.num_graphs == len(chosen)
    assert [one(batch, index) for index in range(len(chosen))] == [one(data, graph) for graph in chosen]
    assert batch.graph_id.tolist() == chosen
    assert torch.equal(torch.bincount(batch.batch, minlength=len(chosen)), batch.ptr.diff())


def test_arcs_stay_inside_their_graph() -> None:
    data = motifs()
    graph_of_arc = torch.repeat_interleave(torch.arange(data.num_graphs), data.edge_ptr.diff())
    assert torch.equal(data.batch[data.edge_index[0]], graph_of_arc)
    assert torch.equal(data.batch[data.edge_index[1]], graph_of_arc)
    assert not (data.edge_index[0] == data.edge_index[1]).any()


def test_motifs_are_there() -> None:
    bare = motifs(name="motifs:graphs=30,classes=2,copies=0,noise=0")
    assert torch.equal(bare.edge_ptr.diff(), 2 * (bare.ptr.diff() - 1))  # trees
    planted = motifs(name="motifs:graphs=30,classes=2,copies=2,noise=0")
    # A motif with c independent cycles adds c edges beyond a tree; triangle and hexagon have one each, hung on by one
    # edge.
    assert torch.equal(planted.edge_ptr.diff(), 2 * (planted.ptr.diff() - 1 + 2))
    for graph in range(30):
        arcs = planted.edge_index[:, planted.edge_ptr[graph] : planted.edge_ptr[graph + 1]] - planted.ptr[graph]
        dense = torch.zeros(int(planted.ptr.diff()[graph]), int(planted.ptr.diff()[graph]))
        dense[arcs[0], arcs[1]] = 1
        assert int(torch.trace(dense @ dense @ dense)) == (12 if planted.y[graph] == 0 else 0)  # two triangles, or none


# -- loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GRAPH_SETS))
def test_published_counts(name: str, need_data: Need) -> None:
    entry = find_graphs(name)
    need_data(f"{entry.raws[0].folder}/{entry.raws[0].files[0]}")
    data, source = load_graphs(entry.title.lower())
    assert source == "mirror"
    assert (
        GraphCounts(data.num_graphs, data.num_nodes, data.edge_index.shape[1], data.num_features, data.num_classes)
        == entry.counts
    )
    assert int(data.ptr[-1]) == data.num_nodes and int(data.edge_ptr[-1]) == data.edge_index.shape[1]
    if name != "collab":  # half a minute of checks for 24 million arcs
        assert torch.equal(data.batch[data.edge_index[0]], data.batch[data.edge_index[1]])


def test_mutag_is_what_pyg_loads(need_data: Need, tmp_path: Path) -> None:
    from torch_geometric.datasets import TUDataset

    shutil.copytree(need_data("TUDataset/MUTAG/raw"), tmp_path / "MUTAG" / "raw")
    expected = TUDataset(str(tmp_path), "MUTAG")
    data, _ = load_graphs("mutag")
    for graph in (0, 57, 187):
        x, arcs, label = one(data, graph)
        assert (x, arcs, label) == (
            expected[graph].x.tolist(),
            expected[graph].edge_index.tolist(),
            int(expected[graph].y),
        )


@pytest.mark.parametrize("zipped", [True, False])
def test_chunked_reader_equals_pyg(need_data: Need, tmp_path: Path, zipped: bool) -> None:
    raw = need_data("TUDataset/IMDB-BINARY/raw")
    folder = raw
    if zipped:
        folder = tmp_path
        with zipfile.ZipFile(tmp_path / "IMDB-BINARY.zip", "w") as archive:
            for part in ("A", "graph_indicator", "graph_labels"):
                archive.write(raw / f"IMDB-BINARY_{part}.txt", f"IMDB-BINARY/IMDB-BINARY_{part}.txt")
    tensors = graphsets.read_chunked(folder, "IMDB-BINARY")
    expected, _ = load_graphs("imdb-binary")
    data = graphsets._graphs(tensors)
    assert torch.equal(data.edge_index, expected.edge_index) and torch.equal(data.y, expected.y)
    assert torch.equal(data.ptr, expected.ptr) and torch.equal(data.edge_ptr, expected.edge_ptr)
    assert torch.equal(data.x.to_dense(), expected.x.to_dense())


def tu_folder(
    folder: Path,
    *,
    arcs: str = "1, 2\n2, 1\n3, 3\n4, 5\n5, 4\n4, 5\n",
    indicator: str = "1\n1\n2\n2\n2\n",
    labels: str = "-1\n1\n",
) -> Path:
    for part, text in (("A", arcs), ("graph_indicator", indicator), ("graph_labels", labels)):
        (folder / f"T_{part}.txt").write_text(text)
    return folder


def test_chunked_reader_by_hand(tmp_path: Path) -> None:
    data = graphsets._graphs(graphsets.read_chunked(tu_folder(tmp_path), "T"))
    assert data.edge_index.tolist() == [[0, 1, 3, 4], [1, 0, 4, 3]]  # self-loop and duplicate dropped
    assert data.edge_ptr.tolist() == [0, 2, 4] and data.ptr.tolist() == [0, 2, 5] and data.y.tolist() == [0, 1]
    assert data.x.to_dense().tolist() == [[0, 1], [0, 1], [1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"arcs": "1, 6\n"}, "does not exist"),
        ({"arcs": "0, 1\n"}, "does not exist"),
        ({"arcs": "1, 2\n3\n"}, "two numbers per line"),
        ({"arcs": "1, x\n"}, "something else than whole numbers"),
        ({"arcs": "1, 2-3\n"}, "something else than whole numbers"),
        ({"arcs": "1, -2\n"}, "does not exist"),
        ({"labels": "--1\n1\n"}, "something else than whole numbers"),
        ({"indicator": "1\n1\n3\n3\n3\n"}, "does not fit"),
        ({"indicator": "2\n1\n1\n1\n1\n"}, "does not fit"),
    ],
)
def test_malformed_text_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        graphsets.read_chunked(tu_folder(tmp_path, **files), "T")


def test_zip_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphsets, "LIMIT", 1000)
    with zipfile.ZipFile(tmp_path / "T.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("T/T_graph_indicator.txt", "1\n" * 2000)
    with pytest.raises(DataError, match="declares 4000 bytes"):
        graphsets.read_chunked(tmp_path, "T")
    (tmp_path / "T.zip").unlink()
    with pytest.raises(DataError, match="more than the 1000 bytes"):
        graphsets.read_chunked(tu_folder(tmp_path, indicator="1\n" * 2000), "T")


def test_a_zip_without_the_member(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "T.zip", "w") as archive:
        archive.writestr("other.txt", "1")
    with pytest.raises(DataError, match="has no member"):
        graphsets.read_chunked(tmp_path, "T")


# -- scenarios -------------------------------------------------------------------------------------

FEDSTAR_SIZES = {  # FedStar spec, section 6: train, val, test
    "mutag": (150, 19, 19),
    "bzr": (324, 40, 41),
    "cox2": (373, 47, 47),
    "dhfr": (604, 76, 76),
    "ptc-mr": (275, 34, 35),
    "aids": (1600, 200, 200),
    "nci1": (3288, 411, 411),
    "enzymes": (480, 60, 60),
    "dd": (942, 118, 118),
    "proteins": (890, 111, 112),
    "collab": (4000, 500, 500),
    "imdb-binary": (800, 100, 100),
    "imdb-multi": (1200, 150, 150),
    "letter-low": (1800, 225, 225),
    "letter-med": (1800, 225, 225),
    "letter-high": (1800, 225, 225),
}


@pytest.mark.parametrize(("setting", "clients"), [("chem", 7), ("bio-chem", 10), ("bio-chem-sn", 13), ("bio-sn-cv", 9)])
def test_fedstar_settings(need_data: Need, setting: str, clients: int) -> None:
    need_data("TUDataset")
    scenario = build_graph_scenario(dataset=setting.upper())
    assert scenario.clients == clients and tuple(scenario.titles.values()) == SETTINGS[setting]
    for client, part in scenario.parts.items():
        assert (part.num_train, int(part.val.sum()), int(part.test.sum())) == FEDSTAR_SIZES[scenario.titles[client]]
        assert bool((part.train.int() + part.val.int() + part.test.int() == 1).all())
        shares = torch.bincount(part.y).double() / part.num_graphs
        for mask in (part.train, part.val, part.test):
            mine = torch.bincount(part.y[mask], minlength=part.num_classes)
            assert bool(((mine - shares * int(mask.sum())).abs() <= 1.0).all())  # at most one graph per class off


def test_fedstar_split_is_the_same_for_every_seed() -> None:
    first, second = (
        build_graph_scenario(dataset=SMALL, clients=1, seed=3, split=split)
        for split in ("fedstar", "stratified:80/10/10")
    )
    y = first.parts["client-0"].y.numpy()
    again = [parse_graph_split("fedstar").draw(y, Stream(seed))[0] for seed in (0, 1)]
    assert torch.equal(*again) and torch.equal(again[0], first.parts["client-0"].train)
    drawn = [parse_graph_split("stratified:80/10/10").draw(y, Stream(seed))[0] for seed in (0, 1)]
    assert not torch.equal(*drawn)
    assert second.parts["client-0"].num_train == 48
    for seed in (0, 3):  # what a run takes where no split is given
        assert scenario_of(resolve("fedstar", {"dataset": SMALL, "clients": 1, "seed": seed})).split == "fedstar"


def test_classes_without_a_training_graph_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    build_graph_scenario(dataset=SMALL, clients=2, seed=1)
    assert not caplog.records
    build_graph_scenario(dataset=SMALL, clients=15, seed=1)
    (record,) = caplog.records
    assert re.search(
        r"without a training graph at \d+ of 15 clients, which cannot predict them \(client-\d+ class \d",
        record.getMessage(),
    )


@pytest.mark.parametrize("partition", ["random", "random-equal", "dirichlet:alpha=2", "shards", "shards:legacy=1"])
def test_one_set_shared_by_clients(partition: str) -> None:
    scenario = build_graph_scenario(dataset=SMALL, partition=partition, clients=4, seed=1)
    together = torch.cat([part.graph_id for part in scenario.parts.values()])
    assert torch.equal(together.sort().values, torch.arange(60))
    data = motifs(1)
    for part in scenario.parts.values():
        assert one(part, 0) == one(data, int(part.graph_id[0]))
        assert part.train.any() and part.val.any() and part.test.any()


def test_fedstar_split_is_the_published_codes() -> None:
    y = motifs().y.numpy()
    train, rest = train_test_split(range(60), test_size=0.2, random_state=123, stratify=y)
    val, test = train_test_split(rest, test_size=0.5, random_state=123, stratify=y[rest])
    masks = parse_graph_split("fedstar").draw(y, Stream(1))
    assert [mask.nonzero().flatten().tolist() for mask in masks] == [sorted(train), sorted(val), sorted(test)]


def test_shards_are_shuffled_first() -> None:
    first, second = build_graph_scenario(dataset="motifs:graphs=120,nodes=4", partition="shards:count=2").parts.values()
    assert first.num_graphs == second.num_graphs == 60 and set(first.graph_id.tolist()) != set(range(60))


def test_legacy_shards_begin_with_blocks_of_the_file() -> None:
    scenario = build_graph_scenario(dataset="motifs:graphs=120,nodes=4", partition="shards:count=2,legacy=1")
    first, second = scenario.parts.values()
    assert set(range(50)) <= set(first.graph_id.tolist()) and set(range(50, 100)) <= set(second.graph_id.tolist())


def test_tiny_shards_still_have_every_part(need_data: Need) -> None:
    need_data("TUDataset/MUTAG/raw")
    scenario = build_graph_scenario(dataset="chem", partition="shards:12")
    assert scenario.clients == 84 and list(scenario.parts) == sorted(scenario.parts)
    assert scenario.titles["client-00"] == "mutag 1/12"
    assert all(part.train.any() and part.val.any() and part.test.any() for part in scenario.parts.values())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset": "mutagg"}, ConfigError, "did you mean 'mutag'"),
        ({"dataset": "csbm"}, ConfigError, "one graph for a node task"),
        ({"partition": "louvain"}, ConfigError, "allowed: by-dataset"),
        ({"partition": "by-dataset", "clients": 3}, ConfigError, "has 1 clients here, not 3"),
        ({"split": "10/10/80"}, ConfigError, "allowed: fedstar"),
        ({"clients": 61}, DataError, "cannot share the 60 graphs"),
        ({"clients": 30}, DataError, "leave one with 2, too few for train, val and test: use at most"),
        (
            {"clients": 20, "partition": "random"},
            DataError,
            "use fewer clients or shards, another seed or --partition random-equal",
        ),
        ({"clients": 40, "partition": "random"}, DataError, "without graphs: use fewer clients"),
        ({"clients": 0}, ConfigError, "at least 1 client"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_graph_scenario(**{"dataset": SMALL, **options})  # type: ignore[arg-type]


def test_task_of() -> None:
    assert [task_of(name) for name in ("cora", "CHEM", "ptc_mr", "motifs:graphs=3", "banks")] == [
        "node",
        "graph",
        "graph",
        "graph",
        "node",
    ]
