"""A method's own facts on the page, whatever they are."""

from __future__ import annotations

from pathlib import Path

from fake_runs import write_run

from isthmus.report import words, write_report
from isthmus.report.facts import fact_rows


def test_values_in_few_words() -> None:
    facts = {
        "chosen": 3,
        "gain": 0.123456,
        "masked": True,
        "rule": "a<b",
        "nothing": None,
        "sizes": [1, 2, 3.5],
        "many": list(range(40)),
        "matrix": [[0.0, 1.0], [2.0, 3.0]],
        "empty": [],
        "by kind": {"up": 1, "down": {"a": 2}},
        "by client": {f"c{k}": k for k in range(30)},
    }
    assert fact_rows([facts]) == [
        ("chosen", "3"),
        ("gain", "0.1235"),
        ("masked", "yes"),
        ("rule", "a<b"),
        ("nothing", words.ABSENT),
        ("sizes", "1, 2, 3.5"),
        ("many", "40 values, 0 to 39"),
        ("matrix", "2 rows of 2 each, 0 to 3"),
        ("empty", "none"),
        ("by kind: up", "1"),
        ("by kind: down: a", "2"),
        ("by client", "30 values, 0 to 29"),
    ]


def test_numbers_are_averaged_over_seeds_and_texts_are_not() -> None:
    rows = fact_rows([{"a": 1.0, "b": "x", "c": [1]}, {"a": 3.0, "b": "y", "d": False}])
    assert rows == [("a", "2 ± 1"), ("b", "x; y"), ("c", "1"), ("d", "no")]


def test_facts_have_a_table_of_their_own_and_are_escaped(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    title = "Reported by the methods"
    assert title not in write_report([plain], tmp_path / "a.html").read_text()
    with_facts = write_run(tmp_path / "with_facts", "fedstruct", result={"facts": {"<b>noise": "<i>"}})
    text = write_report([plain, with_facts], tmp_path / "b.html").read_text()
    assert title in text and "&lt;b&gt;noise" in text and "<i>" not in text
    odd = write_run(tmp_path / "odd", "fedper", result={"facts": "none of your business"})
    assert title not in write_report([odd], tmp_path / "c.html").read_text()


def test_names_of_classes_are_not_averaged() -> None:
    assert fact_rows([{"majority_class": 0}, {"majority_class": 1}]) == [("majority_class", "0; 1")]
    assert fact_rows([{"classes_seen": 1}, {"classes_seen": 2}]) == [("classes_seen", "1.5 ± 0.5")]
