"""Splits by group and by time, and partitions with published masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from isthmus.data.column_split import cut_by_time, groups_of, part_by_name, place_groups
from isthmus.data.own_graph import content_hash, from_pyg
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.data.split import Shares, parse_split
from isthmus.errors import ConfigError, DataError, IsthmusError
from isthmus.experiments.run import by_name
from isthmus.experiments.scenarios import build
from isthmus.seeds import Stream

SHARES = Shares.parse("40/20/40")


def own(**columns: object) -> str:
    """Twelve nodes in two classes with these columns, as the name that stands for them."""
    y = torch.tensor([0, 1] * 6)
    data = Data(x=torch.eye(12), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), y=y)
    for name, values in columns.items():
        data[name] = values
    return str(by_name({"dataset": data})["dataset"])


def parts_of(split: str, dataset: str, seed: int = 0) -> np.ndarray:
    whole = build_scenario(dataset=dataset, clients=2, split=split, seed=seed).whole
    part = np.full(whole.num_nodes, -1)
    for number, mask in enumerate((whole.train, whole.val, whole.test)):
        part[mask.numpy()] = number
    return part


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_no_group_is_torn_apart_and_classes_keep_their_shares(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(2, 8), min_size=20, max_size=60))
    alone = data.draw(st.integers(0, 300))
    rare = data.draw(st.floats(0.1, 0.5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    group = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(alone, -1)])
    y = (rng.random(len(group)) < rare).astype(np.int64)
    part = place_groups(group, y, SHARES, Stream(data.draw(st.integers(0, 99))))
    assert set(part.tolist()) <= {0, 1, 2}
    for number in range(len(sizes)):
        assert len(np.unique(part[group == number])) == 1
    share = np.bincount(part, minlength=3) / len(part)
    assert np.abs(share - [0.4, 0.2, 0.4]).max() < 0.12


def test_groups_by_class_are_spread_over_all_parts() -> None:
    # 30 rings of one class, 3,000 others: without regard to classes a part could miss the rare one.
    group = np.concatenate([np.repeat(np.arange(30), 5), np.full(3000, -1)])
    y = (group >= 0).astype(np.int64)
    draws = [place_groups(group, y, SHARES, Stream(seed)) for seed in (0, 1)]
    for part in draws:
        assert np.bincount(part[y == 1]).tolist() == [60, 30, 60]
        assert np.bincount(part[y == 0]).tolist() == [1200, 600, 1200]
    assert not np.array_equal(*draws)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([3, -1, 3, 0]), [1, -1, 1, 0]),
        (np.array([1.5, np.nan, 1.5, 2.0]), [0, -1, 0, 1]),
        (["b", "", "a", "b"], [1, -1, 0, 1]),
        (np.array(["x", None, "x", "y"], dtype=object), [0, -1, 0, 1]),
        (np.array([-1, -1]), [-1, -1]),
    ],
)
def test_what_means_no_group(values: object, expected: list[int]) -> None:
    assert groups_of(np.asarray(values)).tolist() == expected


def test_time_keeps_equal_times_together() -> None:
    times = np.array([5.0, 1, 1, 1, 2, 9, 9, 3, 4, 9])
    assert cut_by_time(times, Shares.parse("40/30/30")).tolist() == [1, 0, 0, 0, 0, 2, 2, 1, 1, 2]
    assert cut_by_time(times, Shares.parse("20/50/30")).tolist() == [1, 0, 0, 0, 1, 2, 2, 1, 1, 2]
    assert (cut_by_time(np.zeros(4), SHARES) == cut_by_time(np.ones(4), SHARES)).all()


def test_own_data_by_group_and_time() -> None:
    dataset = own(team=[*"aaabbbccc", "", "", ""], opened=torch.arange(12.0).flip(0))
    part = parts_of("group:team:40/20/40", dataset)
    assert all(len(set(part[rows])) == 1 for rows in ([0, 1, 2], [3, 4, 5], [6, 7, 8]))
    part = parts_of("time:opened:50/25/25", dataset)
    assert part.tolist() == [2] * 3 + [1] * 3 + [0] * 6
    made = build(dataset=dataset, partition="random", clients=2, split="time:opened", seed=0)
    assert made.split == "time:opened"


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("group", "name the column, e.g. group:ring"),
        ("time:", "name the column, e.g. time:opened"),
        ("group:tem", "unknown column of the data 'tem'.*team"),
        ("group:team:40/20", "train/val/test in percent"),
        ("group:two", "2 different values.*at least three groups"),
        ("time:team", "needs a number as its time"),
        ("time:empty", "needs a number as its time"),
        ("time:same", "leaves no"),
    ],
)
def test_mistakes(split: str, message: str) -> None:
    columns = {
        "team": [*"abcdefghijkl"],
        "two": [*"aaaaaabbbbbb"],
        "empty": torch.tensor([float("nan")] * 12),
        "same": torch.ones(12),
    }
    with pytest.raises(IsthmusError, match=message):
        parts_of(split, own(**columns))


def test_data_without_columns_say_so() -> None:
    with pytest.raises(DataError, match="these data have no columns"):
        build_scenario(dataset="csbm:nodes=60", clients=2, split="group:ring")


def test_columns_are_part_of_what_a_run_records() -> None:
    y = torch.tensor([0, 1, 0])
    hashes = {
        content_hash(from_pyg(Data(x=torch.eye(3), edge_index=torch.zeros(2, 0, dtype=torch.int64), y=y, team=team)))
        for team in (torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), None)
    }
    assert len(hashes) == 3


def test_columns_follow_nodes_that_a_partition_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("11\n9\n7\n")
    (tmp_path / "1.txt").write_text("1\n3\n5\n")
    made = build_scenario(
        dataset=own(opened=torch.arange(12.0)), partition=f"list:{tmp_path}", split="time:opened:50/20/30"
    )
    assert made.original_id[made.whole.train].tolist() == [1, 3, 5]
    assert made.original_id[made.whole.test].tolist() == [9, 11]


def test_owners_agree_on_a_group_without_a_message() -> None:
    parts = [part_by_name(f"ring {number}", 0, SHARES) for number in range(2000)]
    assert np.abs(np.bincount(parts) / 2000 - [0.4, 0.2, 0.4]).max() < 0.04
    assert parts == [part_by_name(f"ring {number}", 0, SHARES) for number in range(2000)]
    assert parts != [part_by_name(f"ring {number}", 1, SHARES) for number in range(2000)]


def test_rings_of_amlsim(need_data: Callable[[str], Path]) -> None:
    need_data("AMLSim")
    made = build(dataset="amlsim", partition=None, clients=None, split="group:ring:40/20/40", seed=0)
    assert isinstance(made, Scenario)
    whole, fraud = made.whole, made.whole.y == 1
    counts = [int((mask & fraud).sum()) for mask in (whole.train, whole.val, whole.test)]
    assert counts == [722, 361, 721]
    from isthmus.data.datasets import load_nodes

    ring = torch.as_tensor(load_nodes("amlsim", Stream(0)).columns["ring"])
    parts = torch.stack([whole.train, whole.val, whole.test]).int().argmax(0)
    for number in range(int(ring.max()) + 1):
        assert len(parts[ring == number].unique()) == 1


# -- published partitions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "clients", "nodes", "masks"),
    [
        ("fedtad", 10, 2708, (512, 1056, 1140)),
        ("openfgl", 20, 2708, None),
        ("fedaux", 10, 2485, (497, 994, 994)),
    ],
)
def test_published_partitions_of_cora(
    name: str, clients: int, nodes: int, masks: tuple[int, ...] | None, need_data: Callable[[str], Path]
) -> None:
    need_data(f"partitions/{name}")
    made = build(dataset="cora", partition=name, clients=None, split=None, seed=0)
    assert isinstance(made, Scenario)
    assert (made.clients, made.whole.num_nodes) == (clients, nodes)
    assert made.split == ("10/10/80" if masks is None else f"published:{name}")
    if masks is not None:
        assert tuple(int(mask.sum()) for mask in (made.whole.train, made.whole.val, made.whole.test)) == masks


def test_published_partitions_are_for_their_own_graph(need_data: Callable[[str], Path]) -> None:
    need_data("partitions/fedtad")
    with pytest.raises(ConfigError, match="fedtad was published for cora only: use partition louvain elsewhere"):
        build_scenario(dataset="csbm:nodes=60", partition="fedtad")
    with pytest.raises(ConfigError, match="unknown published split 'openfgl'"):
        parse_split("published:openfgl")
    with pytest.raises(ConfigError, match="published for cora only"):
        build_scenario(dataset="csbm:nodes=60", clients=2, split="published:fedtad")


def test_a_damaged_list_is_refused(
    need_data: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("partitions/fedtad", "Planetoid/Cora/raw"):
        (tmp_path / folder).mkdir(parents=True)
        for file in need_data(folder).iterdir():
            if file.is_file():
                (tmp_path / folder / file.name).write_bytes(file.read_bytes())
    (tmp_path / "partitions/fedtad/Cora_03.txt").write_text("5\n")
    monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"Cora_03\.txt is damaged"):
        build_scenario(dataset="cora", partition="fedtad")
