"""Many runs: reused, resumed, damaged, failed; in this process and in others, killed or not."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import ConfigError, RunError
from isthmus.experiments import batch
from isthmus.experiments.batch import Job, Outcome, _Worker, different, existing_outcome, finished, run_all
from isthmus.experiments.config import resolve
from isthmus.experiments.run import start
from isthmus.papers.plan import folder_of

SMALL: dict[str, Any] = {
    "dataset": "csbm:nodes=60,features=6",
    "clients": 3,
    "rounds": 2,
    "backbone": "gcn",
    "hidden": 4,
}


def job(out: Path, method: str = "fedavg", **changes: Any) -> Job:
    settings = resolve(method, {**SMALL, **changes}, {"checkpoint.every": 1})
    return Job(settings, folder_of(settings, out))


def scores(outcomes: dict[Path, Outcome]) -> dict[str, Any]:
    return {folder.name: outcome.result and outcome.result["score"] for folder, outcome in outcomes.items()}


def test_runs_are_played_once_and_reused(tmp_path: Path) -> None:
    jobs = [job(tmp_path, seed=0), job(tmp_path, seed=1), job(tmp_path, seed=0)]
    output: list[str] = []
    first = run_all(jobs, workers=1, on_done=lambda outcome: output.append(outcome.status))
    assert output == ["done", "done"]
    assert len(first) == 2
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    again = run_all(jobs, workers=1)
    assert [outcome.status for outcome in again.values()] == ["reused", "reused"]
    assert scores(again) == scores(first)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == stamps


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def play_half(one: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds, but interrupted before the result is written."""
    with monkeypatch.context() as patch:
        patch.setattr("isthmus.experiments.run.SimulatedRun._finish", stop)
        with pytest.raises(KeyboardInterrupt):
            run_all([one], workers=1)
    assert (one.folder / "config.toml").exists() and not (one.folder / "result.json").exists()


def test_a_half_finished_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, half = job(tmp_path / "whole", rounds=4), job(tmp_path / "half", rounds=4)
    run_all([whole], workers=1)
    play_half(half, monkeypatch)
    assert existing_outcome(half) is None
    monkeypatch.setattr(batch, "start", stop)  # it must be resumed, not begun again
    outcome = run_all([half], workers=1)[half.folder]
    assert outcome.status == "done"
    assert outcome.result is not None
    assert outcome.result["score"] == json.loads((whole.folder / "result.json").read_text())["score"]


def test_a_finished_run_keeps_what_is_needed(tmp_path: Path) -> None:
    full, lean = job(tmp_path / "full"), dataclasses.replace(job(tmp_path / "lean"), models=False)
    run_all([full, lean], workers=1)
    assert (full.folder / "models").is_dir() and not (lean.folder / "models").exists()
    assert (full.folder / "checkpoints").is_dir() and not (lean.folder / "checkpoints").exists()
    for each in (full, lean):
        assert {"config.toml", "result.json", "metrics.jsonl", "disclosure.json"} <= {
            path.name for path in each.folder.iterdir()
        }
        assert finished(each) is not None


def test_damaged_folders_are_named_and_the_rest_is_run(tmp_path: Path) -> None:
    config, result, remains, other, fine = (job(tmp_path, seed=seed) for seed in range(5))
    run_all([config, result, remains, other], workers=1)
    (config.folder / "config.toml").write_text("[run\n")
    (result.folder / "result.json").write_text('{"method": "fedavg", "seed": 77, "score": 0.99}')
    (remains.folder / "config.toml").unlink()
    text = (other.folder / "config.toml").read_text()
    (other.folder / "config.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    outcomes = run_all([config, result, remains, other, fine], workers=1)
    assert [outcomes[each.folder].status for each in (config, result, remains, other, fine)] == ["damaged"] * 4 + [
        "done"
    ]
    for each, words in (
        (config, "is damaged"),
        (result, "is damaged"),
        (remains, "files of a run"),
        (other, "rounds 3 instead of 2"),
    ):
        reason = outcomes[each.folder].reason
        assert words in reason and str(each.folder) in reason and "delete" in reason
    assert (config.folder / "config.toml").read_text() == "[run\n"  # left alone


def test_a_broken_result_file_is_written_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    one = job(tmp_path)
    before = run_all([one], workers=1)[one.folder].result
    (one.folder / "result.json").write_text('{"method": ')
    again = run_all([one], workers=1)[one.folder]
    assert again.status == "done" and again.result is not None and before is not None
    assert again.result["score"] == before["score"]


def test_a_broken_result_file_without_checkpoints_is_damage(tmp_path: Path) -> None:
    one = job(tmp_path)
    run_all([one], workers=1)
    (one.folder / "result.json").write_text('{"method": ')
    shutil.rmtree(one.folder / "checkpoints")
    outcome = run_all([one], workers=1)[one.folder]
    assert outcome.status == "damaged"
    assert f"delete {one.folder} to run it again" in outcome.reason


def test_unreadable_checkpoints_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = job(tmp_path)
    play_half(one, monkeypatch)
    tags = list(one.folder.rglob("*.tag"))
    assert tags
    for tag in tags:
        tag.write_bytes(b"x" * 40)
    outcome = run_all([one], workers=1)[one.folder]
    assert outcome.status == "damaged"
    assert "delete" in outcome.reason


def test_missing_data_skips_its_scenario_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_DATA", raising=False)
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ISTHMUS_OFFLINE", "1")
    missing = [job(tmp_path, dataset="flickr", seed=seed) for seed in range(3)]
    fine = job(tmp_path)
    tried: list[Path] = []
    monkeypatch.setattr(batch, "start", lambda settings, folder: tried.append(folder) or start(settings, folder))
    outcomes = run_all([*missing, fine], workers=1)
    assert [outcomes[each.folder].status for each in (*missing, fine)] == ["skipped"] * 3 + ["done"]
    assert "flickr" in outcomes[missing[0].folder].reason.lower()
    assert tried == [missing[0].folder, fine.folder]
    assert not missing[0].folder.exists()


def test_a_failed_run_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, worse, good = (job(tmp_path, seed=seed) for seed in range(3))

    def start_or_fail(settings: Any, folder: Path) -> Any:
        if settings.run.seed == 0:
            raise RunError("lost quorum")
        if settings.run.seed == 1:
            raise ZeroDivisionError("oh")
        return start(settings, folder)

    monkeypatch.setattr(batch, "start", start_or_fail)
    outcomes = run_all([bad, worse, good], workers=1)
    assert [outcomes[each.folder].status for each in (bad, worse, good)] == ["failed", "failed", "done"]
    assert outcomes[bad.folder].reason == "lost quorum"
    assert outcomes[worse.folder].reason == "ZeroDivisionError: oh"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another --out"):
        run_all([job(tmp_path / "file" / "below")], workers=1)


def test_what_a_run_works_out_for_itself_is_no_difference(tmp_path: Path) -> None:
    one = job(tmp_path)
    run_all([one], workers=1)
    assert 'execution = "cohort"' in (one.folder / "config.toml").read_text()
    assert one.settings.run.execution == "auto"
    assert finished(one) is not None
    assert different(one.settings, job(tmp_path, lr=0.5).settings) != []
    assert different(one.settings, job(tmp_path, method="local").settings) == ["method local instead of fedavg"]


# -- other processes -------------------------------------------------------------------------------


def test_processes_give_the_same_numbers_and_survive_a_death(tmp_path: Path) -> None:
    """One worker process: a run, killed while idle, the next run is lost with it, the one after gets a new process."""
    here = run_all([job(tmp_path / "here", seed=seed) for seed in range(3)], workers=1)
    worker = _Worker()
    try:
        first = worker.run(job(tmp_path / "there", seed=0))
        assert first.status == "done"
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
        lost = worker.run(job(tmp_path / "there", seed=1))
        assert lost.status == "failed"
        assert "signal 9" in lost.reason
    finally:
        worker.kill()
    there = run_all([job(tmp_path / "there", seed=seed) for seed in range(3)], workers=2)
    assert sorted(outcome.status for outcome in there.values()) == ["done", "done", "reused"]
    assert scores(there) == scores(here)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_batch import job, run_all
run_all([job(Path(sys.argv[1]), seed=seed, rounds=80) for seed in range(2)], workers=2)
"""


def test_killed_with_its_workers_and_continued(tmp_path: Path) -> None:
    here = Path(__file__).parent
    jobs = [job(tmp_path / "killed", seed=seed, rounds=80) for seed in range(2)]
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "killed"), str(here)], stderr=subprocess.PIPE
    )
    while not list(jobs[0].folder.glob("ledger/00001*.jsonl")):  # the other may be slower, or have finished
        assert parent.poll() is None, parent.stderr and parent.stderr.read()
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    assert not (jobs[0].folder / "result.json").exists()
    # The workers go with their parent and leave their folders free.
    while (outcome := run_all(jobs[:1], workers=1)[jobs[0].folder]).status == "failed" and "in use" in outcome.reason:
        time.sleep(0.05)
    assert outcome.status == "done"
    straight = job(tmp_path / "straight", seed=0, rounds=80)
    assert scores({straight.folder: outcome}) == scores(run_all([straight], workers=1))
    weights = {
        folder: (folder / "models" / "client-0" / "weights.safetensors").read_bytes()
        for folder in (straight.folder, jobs[0].folder)
    }
    assert weights[straight.folder] == weights[jobs[0].folder]
