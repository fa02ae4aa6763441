"""Run folders read back: order, phases, damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_runs import write_run

from isthmus.errors import DataError
from isthmus.report.runs import as_number, find_runs, natural, read_run, read_runs


def test_a_finished_run_is_read_without_notes(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", clients=12))
    assert run.notes == ()
    assert [row.client for row in run.per_client] == [f"client-{k}" for k in range(12)]
    assert [point.step for point in run.curve] == list(range(5, 51, 5))
    assert "seed" not in run.settings["run"] and run.settings["method"]["lr"] == 0.01


def test_cross_edges_follow_their_clients_when_these_are_put_in_natural_order(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", clients=3)
    scenario = {
        "sizes": {"client-10": 1, "client-2": 2, "client-1": 3},
        "cross_edges": [[0, 7, 8], [7, 0, 9], [8, 9, 0]],
    }
    (folder / "scenario.json").write_text(json.dumps(scenario))
    partition = read_run(folder).partition
    assert partition is not None
    assert partition.clients == ("client-1", "client-2", "client-10") and partition.sizes == (3, 2, 1)
    assert partition.cross_edges == ((0, 9, 8), (9, 0, 7), (8, 7, 0))


def test_a_scenario_that_lists_its_clients_reads_the_same(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", clients=2)
    raw = json.loads((folder / "scenario.json").read_text())
    expected = read_run(folder).partition
    listed = [
        {
            "client": c,
            "nodes": n,
            "classes": raw["labels"][c],
            "homophily": raw["homophily"][c],
            "edges": raw["edges_inside"][c],
        }
        for c, n in raw["sizes"].items()
    ]
    statistics = {
        "cross_edge_share": raw["cross_share"],
        "cross_edges": raw["cross_edges"],
        "homophily": 0.8,
        "clients": listed,
    }
    (folder / "scenario.json").write_text(json.dumps(statistics))
    assert expected is not None and read_run(folder).partition == expected


def test_rounds_of_a_second_phase_come_after_the_first_and_a_repeated_round_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    lines = [("warm", 1, 0.1), ("warm", 2, 0.2), ("train", 1, 0.3), ("train", 2, 0.4), ("train", 2, 0.5)]
    text = "".join(json.dumps({"phase": phase, "round": index, "val": value}) + "\n" for phase, index, value in lines)
    (folder / "metrics.jsonl").write_text(text)
    assert [(point.step, point.val) for point in read_run(folder).curve] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.5)]


def test_a_line_cut_off_while_writing_is_skipped_and_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "rou')
    run = read_run(folder)
    assert len(run.curve) == 10 and run.notes == ("metrics.jsonl: 1 unreadable line skipped",)


@pytest.mark.parametrize("file", ["config.toml", "metrics.jsonl", "disclosure.json", "scenario.json"])
@pytest.mark.parametrize("content", [None, b"\xff\xfe{]"])
def test_what_is_not_essential_costs_a_note_not_the_run(tmp_path: Path, file: str, content: bytes | None) -> None:
    folder = write_run(tmp_path / "a")
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    run = read_run(folder)
    assert len(run.notes) == 1 and file in run.notes[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "result.json is missing"),
        ("{", "damaged"),
        ("[1]", "damaged"),
        ('{"method": "x"}', "lacks dataset, seed, test"),
        ('{"method": "x", "dataset": "d", "seed": 0, "test": NaN}', "not a finite number"),
        ('{"method": "x", "dataset": "d", "seed": "zero", "test": 0.5}', "not a finite number"),
    ],
)
def test_an_unusable_result_is_refused_by_name(tmp_path: Path, content: str | None, said: str) -> None:
    folder = write_run(tmp_path / "half")
    (folder / "result.json").unlink() if content is None else (folder / "result.json").write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        read_runs([folder])
    assert str(folder) in str(caught.value)


def test_nothing_given_and_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run folder given"):
        read_runs([])
    with pytest.raises(DataError, match="no such folder"):
        read_runs([tmp_path / "nowhere"])


def test_the_same_folder_twice_is_one_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    runs, left_out = read_runs([folder, tmp_path / "." / "a"])
    assert len(runs) == 1 and left_out == []


def test_numbers_and_order() -> None:
    assert [as_number(value) for value in (1, 0.5, True, "1", None, float("nan"), float("inf"))] == [
        1.0,
        0.5,
        None,
        None,
        None,
        None,
        None,
    ]
    assert sorted(["client-10", "a", "client-2", "3"], key=natural) == ["3", "a", "client-2", "client-10"]


def test_runs_are_found_in_the_folder_of_a_comparison(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "out" / "fedavg-s10"), write_run(tmp_path / "out" / "fedavg-s2")
    deeper = write_run(tmp_path / "out" / "table" / "fedavg-s1")
    (tmp_path / "out" / "compare.json").write_text("{}")
    assert find_runs([tmp_path / "out"]) == [second, first, deeper]
    assert find_runs([first, tmp_path / "missing"]) == [first, tmp_path / "missing"]  # what is given is not judged here
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match="empty holds no finished run: name a folder written by `isthmus run`, `compare` or `sweep`"
    ):
        find_runs([tmp_path / "empty"])
