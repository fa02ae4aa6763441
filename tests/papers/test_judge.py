"""Ours beside theirs, on made-up results: spreads, differences, gains and verdicts have values one can work out by
hand.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from isthmus.errors import DataError
from isthmus.papers.counts import Counts, count, counts_table
from isthmus.papers.judge import Comparison, Earlier, compare_table
from isthmus.papers.page import ours_text, published_text, write_page
from isthmus.papers.tables import Paper, Table, read_paper

PAPER = """
title = "A Paper"
cite = "Somebody, 2020"
runs = 3
spread = "SPREAD"
reference = "low"
run = { split = "10/10/80" }
[label]
"X" = { dataset = "cora" }
"low" = { method = "local" }
"mid" = { method = "fedavg" }
"high-GCN" = { method = "central" }
"time" = { method = "local", score = "seconds_per_round", unit = "s" }
"minority" = { method = "local", score = "test_minority" }
[[table]]
key = "1"
title = "t"
columns = ["X"]
rows = [["low", "60.0+-1.0"], ["mid", "MID"], ["high-GCN", "80+-2"], ["time", "3.5"], ["minority", "50+-1"]]
[table.gain]
low = "low"
HIGH
NOTE
"""


def paper(
    mid: str = "70.0+-2.0 (50)", spread: str = "population", high: str = 'high = { mid = "high-GCN" }', note: str = ""
) -> Paper:
    return read_paper(
        "mini", PAPER.replace("MID", mid).replace("SPREAD", spread).replace("HIGH", high).replace("NOTE", note)
    )


def result(seed: int, score: float | None, per_client: dict[str, float] | None = None) -> dict[str, Any]:
    return {
        "seed": seed,
        "score": score,
        "test_minority": None,
        "seconds_per_round": 0.5,
        "seconds": {"train": 2.0, "eval": 1.0},
        "parameters": {"trainable": 10, "shared": 4},
        "per_client": [{"client": c, "test_score": v} for c, v in (per_client or {}).items()],
        "versions": {"isthmus": "0"},
        "source": "mirror",
        "finished": "2020-01-02T03:04:05+00:00",
        "run_dir": f"r{seed}",
    }


def judge(table: Table, scores: dict[str, list[float | None]], reason: str = "") -> dict[str, Comparison]:
    given = {row: {seed: result(seed, score) for seed, score in enumerate(values)} for row, values in scores.items()}
    rows = compare_table(
        table, table.cells, lambda cell: given.get(cell.row, {}), lambda cell: "" if cell.row in given else reason
    )
    return {row.cell.row: row for row in rows}


def one(scores: list[float | None], **changes: str) -> Comparison:
    return judge(paper(**changes).tables[0], {"mid": scores})["mid"]


def test_mean_spread_and_difference() -> None:
    row = one([0.68, 0.70, 0.75])
    assert row.mean == pytest.approx(71.0)
    assert row.spread == pytest.approx(math.sqrt((9 + 1 + 16) / 3))  # population
    assert row.difference == pytest.approx(1.0)
    assert (row.trainable, row.shared, row.seconds) == (10, 4, 3.0)
    assert dict(row.values) == pytest.approx({0: 68.0, 1: 70.0, 2: 75.0})


@pytest.mark.parametrize(
    ("score", "verdict"),
    [
        (0.70, "within 1"),
        (0.72, "within 1"),
        (0.6801, "within 1"),
        (0.7201, "within 2"),
        (0.74, "within 2"),
        (0.7401, "above"),
        (0.65, "below"),
    ],
)
def test_verdicts_measure_with_the_published_spread(score: float, verdict: str) -> None:
    assert one([score - 0.01, score, score + 0.01]).verdict == verdict


def test_without_a_published_spread_ours_is_the_yardstick() -> None:
    row = one([0.70, 0.72, 0.74], mid="70.0")
    assert row.yardstick == row.spread == pytest.approx(math.sqrt(8 / 3))
    assert row.verdict == "within 2"
    assert (
        one([0.70, 0.72, 0.74], mid="70.0+-0.0").verdict == "within 2"
    )  # a spread of nought is rounded away, not certainty


def test_a_spread_printed_elsewhere_with_the_same_number_comes_before_ours() -> None:
    note = '[[table.note]]\nonly = "mid"\nspread = 0.5\nnote = "Printed with a spread of 0.50 in table 8."'
    row = one([0.70, 0.72, 0.74], mid="70.0", note=note)
    assert (row.yardstick, row.verdict) == (0.5, "above") and published_text(row) == "70.00"
    assert one([0.70, 0.72, 0.74], mid="70.0+-2.0", note=note).yardstick == 2.0


def test_one_seed_has_no_spread_and_says_so() -> None:
    row = one([0.71])
    assert (row.spread, row.verdict) == (None, "within 1")
    assert "± unknown" in ours_text(row)
    assert one([0.71], mid="70.0").verdict == "no spread"


def test_a_finding_excuses_nothing_and_a_guess_is_called_one() -> None:
    def found(note: str, score: float = 0.9) -> tuple[str, str]:
        row = one([score, score], note=f"[[table.note]]\n{note}")
        return row.verdict, row.cause

    assert found('only = "mid"\nfinding = "an observation"') == ("above", "not reproduced")
    assert found('only = "mid"\nfinding = "why"\ncause = "guessed"') == ("above", "cause guessed")
    assert found('only = "mid"\nfinding = "why"\ncause = "guessed"', 0.7) == ("within 1", "")
    assert found('note = "a remark on the whole table"') == ("above", "not reproduced")
    assert found('only = "mid"\nprinted = "9.0"\nnote = "a misprint"') == ("above", "not reproduced")


@pytest.mark.parametrize(
    "note",
    [
        'only = "mid"\nfinding = "why"\ncause = "known"',
        'only = "mid"\nfinding = "why"\ncause = "shown"',  # by what?
        'finding = "why"\ncause = "guessed"',  # of which cells?
        'only = "mid"\nnote = "why"\ncause = "guessed"',  # nothing of ours
        'only = "x"\nfinding = "why"\ncause = "guessed"',  # a whole column
    ],
)
def test_a_cause_must_name_its_cells_and_its_proof(note: str) -> None:
    with pytest.raises(DataError, match="cause"):
        paper(note=f"[[table.note]]\n{note}")


def test_a_cause_is_shown_only_by_runs_that_close_the_gap() -> None:
    note = (
        '[[table.note]]\nonly = "mid"\nfinding = "why"\ncause = "shown"\nshown_by = "2 / {row}, changed / {column}"\n'
    )
    second = (
        '[[table]]\nkey = "2"\ntitle = "c"\nours = true\ncolumns = ["X"]\nrows = [["mid, changed", "70.0+-2.0"]]\n'
        '[table.label]\n"mid, changed" = { method = "fedavg", lr = 0.5 }\n'
    )

    def cause(changed: list[float], second: str = second) -> str:
        book = paper(mid="70.0+-2.0", note=note + second)
        given = {"mid": [0.9, 0.9], "mid, changed": changed}
        results = {row: {seed: result(seed, score) for seed, score in enumerate(each)} for row, each in given.items()}
        rows = compare_table(
            book.tables[0],
            book.tables[0].cells,
            lambda cell: results.get(cell.row, {}),
            find=lambda table, name: (book.tables[1], book.tables[1].cells[0]) if name == "mid, changed / X" else None,
        )
        return next(row.cause for row in rows if row.cell.row == "mid")

    assert cause([0.71, 0.73]) == "cause shown"
    assert cause([0.85, 0.85]) == "not reproduced"  # the change does not close the gap
    assert cause([]) == "not reproduced"
    assert cause([0.71, 0.73], second.replace(", lr = 0.5", "")) == "not reproduced"  # nothing was changed


def test_numbers_from_before_records_stand_until_as_many_seeds_are_recorded() -> None:
    table = paper().tables[0]

    def row(scores: list[float]) -> Comparison:
        results = {seed: result(seed, score) for seed, score in enumerate(scores)}
        rows = compare_table(
            table,
            table.cells,
            lambda cell: results if cell.row == "mid" else {},
            earlier=lambda cell: Earlier(60.0, 1.5, 2, 7, 3, 1.0) if cell.row == "mid" else None,
        )
        return next(row for row in rows if row.cell.row == "mid")

    assert (row([0.7]).mean, row([0.7]).seeds, row([]).verdict) == (60.0, 2, "below")
    assert (row([0.7, 0.72]).mean, row([0.7, 0.72]).earlier_seeds) == (pytest.approx(71.0), 0)
    page = write_page(paper(), [(table, [row([])])], [])
    assert "| 60.00 ± 1.50 | 2† |" in page and "before records were kept" in page


def test_counts_add_up() -> None:
    table = paper().tables[0]
    rows = list(judge(table, {"low": [0.6], "mid": [0.9, 0.9], "time": [0.1]}).values())
    found = count([(table, rows), (replace(table, ours=True), rows)])
    assert (found.cells, found.printed, found.filled, found.one_seed) == (5, 5, 3, 2)
    assert (found.within_1, found.not_reproduced, found.not_judged) == (1, 1, 1)
    assert "| a | 5 | 0 → 3 |" in counts_table({"a": Counts(cells=5, printed=5)}, {"a": found})


def test_a_note_for_several_cells_names_them_all() -> None:
    note = (
        '[[table.note]]\nonly = ["low", "mid"]\nnote = "Said of two."\n[[table.note]]\nonly = ["mid"]\nfinding = '
        '"Said of one."'
    )
    book = paper(note=note)
    page = write_page(
        book, [(book.tables[0], list(judge(book.tables[0], {"low": [0.6], "mid": [0.9]}).values()))], [result(0, 0.6)]
    )
    assert "- low / X, mid / X: Said of two." in page
    assert "- **1: mid / X 90.00 ± unknown (published 70.00 ± 2.00 (50.00)).** Said of one." in page
    with pytest.raises(DataError, match="no cell matches the note for 'nobody'"):
        paper(note='[[table.note]]\nonly = ["mid", "nobody"]\nnote = "Said of no one."')


def test_figures_times_and_what_was_not_measured() -> None:
    assert one([0.7, 0.7], mid="?").verdict == "no number"
    table = paper().tables[0]
    rows = judge(table, {"time": [0.1, 0.2], "minority": [0.1, 0.2]}, reason="method x is not here yet")
    assert (rows["time"].verdict, rows["time"].mean) == ("not judged", pytest.approx(0.5))
    assert (rows["minority"].verdict, rows["minority"].reason) == ("not run", "the runs did not measure test_minority")
    assert (rows["mid"].verdict, rows["mid"].mean, rows["mid"].reason) == ("not run", None, "method x is not here yet")


def test_a_seed_without_a_score_is_not_passed_over() -> None:
    row = one([0.7, None, 0.7])
    assert (row.mean, row.verdict) == (None, "not run")


def test_differences_are_paired_by_seed() -> None:
    rows = judge(paper().tables[0], {"low": [0.60, 0.50, 0.40], "mid": [0.61, 0.53]})
    paired = rows["mid"].paired
    assert paired is not None
    assert (paired.row, paired.seeds) == ("low", 2)
    assert (paired.mean, paired.std) == (pytest.approx(2.0), pytest.approx(1.0))
    assert rows["low"].paired is None


def test_gains() -> None:
    scores: dict[str, list[float | None]] = {"low": [0.6, 0.6], "mid": [0.7, 0.74], "high-GCN": [0.8, 0.8]}
    assert judge(paper().tables[0], scores)["mid"].gain == pytest.approx(60.0)
    assert judge(paper(high="").tables[0], scores)["mid"].gain == pytest.approx(12.0)
    assert judge(paper().tables[0], {"mid": [0.7]})["mid"].gain is None
    scores["low"] = [0.6]  # the second seed of the others has nothing to stand beside
    assert judge(paper().tables[0], scores)["mid"].gain == pytest.approx(50.0)
    assert judge(paper(high="").tables[0], scores)["mid"].gain == pytest.approx(10.0)


def test_fedstar_spread_is_the_mean_of_the_clients_sample_stds() -> None:
    table = paper(spread="client-stds").tables[0]
    clients = [{"a": 0.5, "b": 0.9}, {"a": 0.7, "b": 0.7}]
    given = {seed: result(seed, 0.7, scores) for seed, scores in enumerate(clients)}
    (row,) = [
        r
        for r in compare_table(table, table.cells, lambda cell: given if cell.row == "mid" else {})
        if r.cell.row == "mid"
    ]
    assert row.spread == pytest.approx(100 * math.sqrt(0.02))  # both clients: values 0.2 apart, ddof 1
    assert row.run_spread == 0.0
    assert row.yardstick == pytest.approx(2.0 / math.sqrt(2))  # the mean of two clients varies less than either
    page = write_page(paper(spread="client-stds"), [(table, [row])], list(given.values()))
    assert "| ours | std over seeds |" in page and "70.00 ± 14.14 | 0.00 |" in page
    assert "± is the mean over clients of each client's sample standard deviation over runs." in page


def test_the_spread_of_a_last_round_is_that_of_the_last_round() -> None:
    table = read_paper(
        "mini",
        PAPER.replace("MID", "70.0+-2.0")
        .replace("SPREAD", "client-stds")
        .replace("HIGH", "")
        .replace("NOTE", "")
        .replace('"mid" = {', '"mid" = { score = "test_client_mean_last",'),
    ).tables[0]
    given = {seed: result(seed, 0.7) | {"test_client_mean_last": 0.7} for seed in range(2)}
    for seed, each in given.items():
        each["per_client"] = [{"client": c, "test_score": 0.7, "test_score_last": 0.6 + 0.2 * seed} for c in "ab"]
    (row,) = [
        r
        for r in compare_table(table, table.cells, lambda cell: given if cell.row == "mid" else {})
        if r.cell.row == "mid"
    ]
    assert row.spread == pytest.approx(100 * math.sqrt(0.02))


def test_json_is_plain_and_complete() -> None:
    import json

    document = json.loads(json.dumps(one([0.68, 0.70, 0.75]).to_json()))
    assert document["published"]["mean"] == 70.0
    assert document["ours"]["seeds"] == [0, 1, 2]
    assert document["verdict"] == "within 1"
    assert document["run"]["method"] == "fedavg"


def test_the_page_shows_what_was_run_and_why_the_rest_was_not() -> None:
    note = '[[table.note]]\nonly = "mid"\nfinding = "It needs more rounds."\n'
    note += '[[table.note]]\nonly = "low"\nprinted = "6.0"\nnote = "A misprint."'
    book = paper(note=note)
    rows = list(
        judge(book.tables[0], {"low": [0.6, 0.6], "mid": [0.9, 0.9]}, reason="method x is not here yet").values()
    )
    page = write_page(book, [(book.tables[0], rows)], [result(0, 0.6), result(1, 0.6)])
    assert "2 runs, the newest of 2020-01-02; seeds 0, 1" in page
    line = "| mid / X | 70.00 ± 2.00 (50.00) | 90.00 ± 0.00 | 2 | +20.00 | above, not reproduced | +30.00 ± 0.00 |"
    assert line in page
    assert "It needs more rounds." in page
    assert "[printed 6.0]" in published_text(rows[0])
    assert "3 of 5 cells not run: method x is not here yet" in page
    assert page == write_page(book, [(book.tables[0], rows)], [result(0, 0.6), result(1, 0.6)])


def test_the_page_does_not_hide_what_was_not_reproduced() -> None:
    book = paper()
    page = write_page(
        book, [(book.tables[0], list(judge(book.tables[0], {"mid": [0.9, 0.9]}).values()))], [result(0, 0.9)]
    )
    assert "**Not reproduced, cause not known:** 1: mid / X 90.00 ± 0.00 (published 70.00 ± 2.00 (50.00))." in page


def test_a_page_without_runs() -> None:
    book = paper()
    rows = list(judge(book.tables[0], {}).values())
    page = write_page(book, [(book.tables[0], rows)], [])
    assert "5 cells, none run yet." in page
    assert "±" not in page
