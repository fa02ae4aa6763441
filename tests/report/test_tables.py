"""The result table: grouping, spread, what is best, how numbers read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fake_runs import PARAMETERS, write_run

from isthmus.report import result_table, table_cells, words
from isthmus.report.runs import read_runs
from isthmus.report.tables import group_runs, mean_and_spread


def test_mean_and_population_spread_over_seeds(tmp_path: Path) -> None:
    scores = (0.70, 0.74, 0.81)
    folders = [write_run(tmp_path / str(seed), seed=seed, score=score) for seed, score in enumerate(scores)]
    (row,) = result_table(folders)
    mean = sum(scores) / 3
    assert row.runs == 3 and row.seeds == (0, 1, 2)
    assert row.score == pytest.approx(mean)
    assert row.score_spread == pytest.approx(math.sqrt(sum((score - mean) ** 2 for score in scores) / 3))
    assert row.client_mean == pytest.approx(mean - 0.02)
    headings, cells = table_cells([row])
    assert cells[0][headings.index("score (%)")] == "75.00 ± 4.55"


def test_one_seed_has_no_spread_and_says_so(tmp_path: Path) -> None:
    (row,) = result_table([write_run(tmp_path / "a", score=0.8)])
    assert row.score_spread is None
    assert table_cells([row])[1][0][2] == "80.00"


def test_a_missing_score_is_not_averaged_away(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1, result={"score": None})]
    (row,) = result_table(folders)
    assert row.score is None and table_cells([row])[1][0][1] == words.ABSENT
    assert mean_and_spread([0.5, None]) == (None, None)


def test_bytes_are_per_training_round(tmp_path: Path) -> None:
    sizes = {"up": 5000, "down": 10_000, "peer": 0, "device": 0, "setup_up": 10**9, "evaluation_up": 10**9}
    (row,) = result_table([write_run(tmp_path / "a", rounds=50, result={"bytes": sizes})])
    assert (row.up_per_round, row.down_per_round) == (100.0, 200.0)
    assert row.trainable == PARAMETERS
    assert "between clients / run" not in table_cells([row])[0]


def test_columns_for_peers_and_minority_appear_when_some_row_has_them(tmp_path: Path) -> None:
    rows = result_table(
        [
            write_run(tmp_path / "a", "fedavg"),
            write_run(
                tmp_path / "b", "hifgl", result={"bytes": {"up": 1, "down": 1, "peer": 500}, "test_minority": 0.4}
            ),
        ]
    )
    headings, cells = table_cells(rows)
    assert cells[1][headings.index("between clients / run")] == "500 B"
    assert [line[headings.index("minority (%)")] for line in cells] == [words.ABSENT, "40.00"]


def test_order_is_as_given_and_the_best_is_marked(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / method, method) for method in ("central", "fedsgd", "fedavg")]
    rows = result_table(folders)
    assert [(row.method, row.best) for row in rows] == [("central", False), ("fedsgd", True), ("fedavg", False)]


def test_scores_that_read_the_same_are_both_best_and_one_alone_is_not(tmp_path: Path) -> None:
    pair = [write_run(tmp_path / "a", "fedavg", score=0.81231), write_run(tmp_path / "b", "fedsgd", score=0.81229)]
    assert [row.best for row in result_table(pair)] == [True, True]
    assert [row.best for row in result_table(pair[:1])] == [False]


def test_each_scenario_has_its_own_best(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{d}-{m}", m, dataset=d, score=s) for d, m, s in _FOUR]
    assert [row.best for row in result_table(folders)] == [False, True, True, False]


_FOUR = (("cora", "fedprox", 0.6), ("cora", "fedavg", 0.7), ("pubmed", "fedprox", 0.5), ("pubmed", "fedavg", 0.4))


def test_other_settings_are_another_row_named_by_what_differs(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"{lr}-{seed}", seed=seed, settings={"lr": lr}) for lr in (0.1, 0.01) for seed in (0, 1)
    ]
    rows = result_table(folders)
    assert [(row.label, row.runs) for row in rows] == [("fedavg · lr=0.1", 2), ("fedavg · lr=0.01", 2)]


def test_a_seed_given_twice_counts_once_and_is_named(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "first"), write_run(tmp_path / "again"), write_run(tmp_path / "other", seed=1)]
    groups, repeated = group_runs(read_runs(folders)[0])
    assert groups[0].seeds == (0, 1)
    assert [entry.path.name for entry in repeated] == ["again"] and "first" in repeated[0].reason


def test_sizes_and_times_read_well() -> None:
    assert [words.size(value) for value in (0, 999, 1000, 12_345, 999_600, 3_690_000, 5e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 kB",
        "1 MB",
        "3.69 MB",
        "5 TB",
    ]
    assert [words.seconds(value) for value in (0.0123, 0.9999, 12.34, 3600.0)] == [
        "12.3 ms",
        "1 s",
        "12.3 s",
        "3,600 s",
    ]
    assert words.listing(["a"]) == "a" and words.listing(["a", "b", "c"]) == "a, b and c"
    assert words.listing([str(k) for k in range(12)]).endswith("and 4 more")
    assert "60\u00a0% of the nodes train" in words.split("stratified:60/20/20") and "(stratified)" in words.split(
        "stratified:60/20/20"
    )


def test_epsilon_has_a_column_only_where_a_run_has_one(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    assert "epsilon" not in table_cells(result_table([plain]))[0]
    noisy = write_run(
        tmp_path / "noisy", settings={"dp_noise": 1.0}, result={"privacy": {"epsilon": 7.9042, "delta": 1e-5}}
    )
    headings, cells = table_cells(result_table([plain, noisy]))
    assert [row[headings.index("epsilon")] for row in cells] == [words.count(None), "7.9"]


def test_graph_gain_has_a_column_where_local_and_central_are_there(tmp_path: Path) -> None:
    def run(method: str, backbone: str, score: float) -> Path:
        return write_run(tmp_path / f"{method}-{backbone}", method, score=score, settings={"backbone": backbone})

    folders = [run("local", "mlp", 0.5), run("fedavg", "gcn", 0.8), run("central", "gcn", 0.9)]
    assert "graph gain (%)" not in table_cells(result_table(folders[:2]))[0]
    headings, cells = table_cells(result_table(folders))
    assert [row[headings.index("graph gain (%)")] for row in cells] == ["0.00", "75.00", "100.00"]


def test_gain_over_local_needs_one_local_and_one_rule(tmp_path: Path) -> None:
    local, fedavg = write_run(tmp_path / "a", "local"), write_run(tmp_path / "b", "fedavg")
    headings, cells = table_cells(result_table([local, fedavg]))
    assert [line[headings.index("to Local")] for line in cells] == [words.ABSENT, "+16.00"]
    other = write_run(tmp_path / "c", "local", settings={"hidden": 8})
    assert "to Local" not in table_cells(result_table([local, fedavg, other]))[0]
    unlike = write_run(tmp_path / "d", "fedsgd", result={"score_rule": "another"})
    assert "to Local" not in table_cells(result_table([local, fedavg, unlike]))[0]
