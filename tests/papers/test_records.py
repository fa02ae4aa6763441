"""Records of runs: what is kept, what stays behind."""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.papers import read_records, record_of, write_records
from isthmus.papers.cells import measured
from isthmus.papers.records import curve_of

RESULT = {
    "seed": 3,
    "test": 0.5,
    "test_minority": None,
    "run_dir": "/somebody/elses/run-s3",
    "bytes": {"up": 1},
    "curve": [1, 2],
    "facts": {
        "learned_graph": {"cross_share": 0.25, "degrees": list(range(500))},
        "clusters": [["client-0", "client-1"], ["client-2"]],
    },
    "parameters": {"trainable": 7},
    "per_client": [{"client": "client-0", "nodes": 9, "test_score": 0.5, "test_score_last": 0.4}],
}


def test_a_record_keeps_every_score_and_no_place_or_long_list(tmp_path: Path) -> None:
    write_records(tmp_path / "x.jsonl", {"run-s3": record_of("run-s3", RESULT)})
    (record,) = read_records(tmp_path / "x.jsonl").values()
    assert measured(record, "facts.learned_graph.cross_share") == 0.25
    assert measured(record, "test") == 0.5 and measured(record, "facts.nothing.here") is None
    assert record["per_client"] == [{"client": "client-0", "test_score": 0.5, "test_score_last": 0.4}]
    assert "/somebody" not in (tmp_path / "x.jsonl").read_text() and not {"curve", "bytes"} & set(record)
    assert record["facts"] == {
        "learned_graph": {"cross_share": 0.25},
        "clusters": [["client-0", "client-1"], ["client-2"]],
    }


def test_a_small_curve_is_kept(tmp_path: Path) -> None:
    lines = [
        {"round": n, "val": n / 100, "test": n / 200, "per_client": {"a": {"test": [n, 100]}, "b": {"test": [0, 0]}}}
        for n in range(1, 51)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = curve_of(tmp_path)
    assert curve is not None and len(curve["round"]) <= 21 and curve["round"][-1] == 50
    assert curve["test"][-1] == 0.25 and curve["clients"] == {"a": [n / 100 for n in curve["round"]], "b": [None] * 18}
    record = record_of("run-s3", RESULT, curve)
    assert record["curve"] == curve == record_of("run-s3", record)["curve"], "a record of a record is the same"
    assert curve_of(tmp_path / "nowhere") is None


def test_no_file_is_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none.jsonl") == {}
