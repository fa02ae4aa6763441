"""The supervisor of runs, with a fake server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.deploy import run_supervisor
from isthmus.deploy.job_template import busy
from isthmus.deploy.run_files import BACK
from isthmus.deploy.run_status import HEARTBEAT, STOPPED, RunFailure, SitesBackError, TakeBack
from isthmus.deploy.run_supervisor import MAX_FRUITLESS, RunSupervisor
from isthmus.errors import ConfigError, RunError, StorageError
from isthmus.experiments.callbacks import Progress


class FakeServer:
    """An admin session; ``jobs`` are functions that give the status of each job in turn."""

    def __init__(self, jobs: list[Callable[[], str]], sites: list[list[str]] | None = None) -> None:
        self.jobs, self._sites = jobs, sites or []
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.details: list[str] = []
        self.seen: dict[str, float] = {}
        self.closed = False

    def sites(self) -> list[str]:
        return self._sites.pop(0) if self._sites else ["a", "b"]

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        if name == "submit_job":
            assert sorted(path.name for path in Path(arguments[0]).rglob("*") if path.is_file()) == [
                "config_fed_client.json",
                "config_fed_server.json",
                "meta.json",
            ]
            self.submitted.append(named["submit_token"])
            return f"job-{len(self.submitted)}"
        if name == "get_job_status":
            return self.jobs[min(len(self.submitted), len(self.jobs)) - 1]()
        if name == "get_job_meta":
            return {"job_deploy_detail": self.details}
        if name == "abort_job":
            self.aborted.append(arguments[0])
            return None
        raise AssertionError(name)

    def last_seen(self) -> dict[str, float]:
        return self.seen

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("POLL_EVERY", 0.001), ("PAUSE", 0.001), ("ABORT_TIMEOUT", 0.05)):
        monkeypatch.setattr(run_supervisor, name, value)


def supervise(tmp_path: Path, server: FakeServer) -> tuple[RunSupervisor, Path]:
    run = tmp_path / "r"
    (run / "ledger").mkdir(parents=True)
    supervisor = RunSupervisor.__new__(RunSupervisor)
    supervisor.__dict__ |= {
        "admin": server,
        "runs": tmp_path,
        "sites": ("a", "b"),
        "on_poll": lambda: None,
        "attempts": [],
        "_last_heartbeat": 0.0,
        "_next_look": 0.0,
        "warn_after": 0.0,
        "check": lambda: None,
    }
    return supervisor, run


def finish(run: Path) -> Callable[[], str]:
    def status() -> str:
        (run / "result.json").write_text("{}")
        return "RUNNING"

    return status


def a_round_then(run: Path, status: str) -> Callable[[], str]:
    def status_() -> str:
        (run / "ledger" / f"{len(list((run / 'ledger').iterdir())) + 1:06d}.jsonl").touch()
        return status

    return status_


def test_a_job_that_ends_without_result_is_submitted_again(tmp_path: Path) -> None:
    server = FakeServer([])
    supervisor, run = supervise(tmp_path, server)
    server.jobs = [
        a_round_then(run, "FINISHED:EXECUTION_EXCEPTION"),
        a_round_then(run, "FINISHED:ABANDONED"),
        finish(run),
    ]
    supervisor.finish(["r"])
    assert server.submitted == ["r-0", "r-1", "r-2"] and server.closed
    assert [attempt["ended"] for attempt in supervisor.attempts] == [
        "FINISHED:EXECUTION_EXCEPTION",
        "FINISHED:ABANDONED",
        "finished",
    ]
    assert json.loads((run / "attempts.json").read_text()) == 2


def test_a_full_disk_is_tried_again_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer([])
    supervisor, run = supervise(tmp_path, server)

    def full() -> str:
        RunFailure.of(StorageError("b: cannot keep its state (No space left on device)")).write(run)
        return "FINISHED:EXECUTION_EXCEPTION"

    server.jobs = [full, full, finish(run)]
    supervisor.finish(["r"])
    assert len(server.submitted) == 3
    assert caplog.messages == ["b: cannot keep its state (No space left on device); trying again"] * 2
    (run / "result.json").unlink()
    server.jobs = [full]
    with pytest.raises(RunError, match=r"added no round \(b: cannot keep its state \(No space left on device\)\)"):
        supervisor.finish(["r"])


def test_a_refusal_by_a_job_validator_is_final(tmp_path: Path) -> None:
    server = FakeServer([lambda: "FINISHED:FAILED_TO_RUN"])
    server.details = ["a: OK", "b: NVFLARE_ERROR: isthmus job validator: folder custom not permitted"]
    supervisor, _ = supervise(tmp_path, server)
    with pytest.raises(RunError, match=r"the job was refused: .*folder custom not permitted"):
        supervisor.finish(["r"])
    assert len(server.submitted) == 1


def test_a_site_that_is_busy_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_supervisor, "MAX_PAUSE", 0.001)
    server = FakeServer([])
    supervisor, run = supervise(tmp_path, server)
    server.details = ["a: OK", f"b: {busy('1', 1)}"]
    server.jobs = [*[lambda: "FINISHED:FAILED_TO_RUN"] * (MAX_FRUITLESS + 2), finish(run)]
    supervisor.finish(["r"])
    assert len(server.submitted) == MAX_FRUITLESS + 3
    assert "b: isthmus site busy: it runs 1 at once" in supervisor.attempts[0]["ended"]


def test_gives_up_after_attempts_without_progress(tmp_path: Path) -> None:
    server = FakeServer([lambda: "FINISHED:ABNORMAL"])
    supervisor, _ = supervise(tmp_path, server)
    with pytest.raises(RunError, match=r"added no round \(FINISHED:ABNORMAL\)"):
        supervisor.finish(["r"])
    assert len(server.submitted) == MAX_FRUITLESS


def test_a_permanent_error_is_raised(tmp_path: Path) -> None:
    server = FakeServer([])
    supervisor, run = supervise(tmp_path, server)

    def fail() -> str:
        RunFailure.of(ConfigError("bank-b: seed is 3 here")).write(run)
        return "FINISHED:EXECUTION_EXCEPTION"

    server.jobs = [fail]
    with pytest.raises(ConfigError, match="bank-b: seed is 3 here"):
        supervisor.finish(["r"])


def test_waits_for_all_organisations(tmp_path: Path) -> None:
    server = FakeServer([], [[], ["a"], ["a", "b"]])
    supervisor, run = supervise(tmp_path, server)
    server.jobs = [finish(run)]
    supervisor.finish(["r"])
    assert server._sites == []


def test_a_job_whose_process_is_gone_is_aborted(tmp_path: Path) -> None:
    server = FakeServer([])
    supervisor, run = supervise(tmp_path, server)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    def vanish() -> str:
        (run / HEARTBEAT).write_text(f"{gone.pid}\n")
        return "RUNNING"

    server.jobs = [vanish, finish(run)]
    supervisor.finish(["r"])
    assert server.aborted == ["job-1"] and supervisor.attempts[0]["ended"] == "its server process is gone"


def test_a_frozen_process_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    server = FakeServer([])
    supervisor, run = supervise(tmp_path, server)

    def freeze() -> str:
        (run / HEARTBEAT).write_text(f"{os.getpid()}\n")
        os.utime(run / HEARTBEAT, (1.0, 1.0))
        return "RUNNING"

    server.jobs = [freeze, finish(run)]
    monkeypatch.setattr(run_supervisor, "_is_job", lambda pid: False)  # it is this test's own process
    supervisor.finish(["r"])
    assert supervisor.attempts[0]["ended"] == "its server process is frozen"


def test_a_stopped_run_is_not_submitted_again(tmp_path: Path) -> None:
    server = FakeServer([])
    supervisor, run = supervise(tmp_path, server)

    def stop() -> str:
        (run / STOPPED).touch()
        return "RUNNING"

    server.jobs = [stop]
    with pytest.raises(RunError, match="r was stopped: `isthmus submit --again r` continues it"):
        supervisor.finish(["r"])


def test_waits_for_an_unreachable_server(tmp_path: Path) -> None:
    server = FakeServer([])
    supervisor, run = supervise(tmp_path, server)
    answers = iter([ConnectionError, ConnectionError, None])

    def unreachable() -> str:
        error = next(answers)
        if error is not None:
            raise error
        return finish(run)()

    server.jobs = [unreachable]
    supervisor.finish(["r"])
    assert len(server.submitted) == 1 and not server.aborted


def test_says_at_once_for_whom_it_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer([], [["a"], ["a", "b"]])
    supervisor, run = supervise(tmp_path, server)
    server.jobs = [finish(run)]
    supervisor.finish(["r"])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.fullmatch(r"waiting for b since \d\d:\d\d:\d\d; Ctrl-C ends the waiting", warning)


def test_a_run_is_told_when_a_lost_organisation_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life from before the loss say nothing, and one organisation that gave none is enough to wait."""
    server = FakeServer([])
    supervisor, run = supervise(tmp_path, server)
    monkeypatch.setattr(run_supervisor, "LOOK_EVERY", 0.0)
    progress, now = {"phase": "train", "round": 3, "rounds": 9, "step": 3, "steps": 9}, time.time()
    progress |= {"seconds_left": None, "bytes": {}, "scores": None}

    def told(absent: dict[str, Any], **seen: float) -> bool:
        (run / BACK).unlink(missing_ok=True)
        (run / "progress.json").write_text(json.dumps({**progress, "absent": absent}))
        server.seen = seen
        supervisor._note_back(["r"])
        return (run / BACK).exists()

    lost = {"client-1": [3, now - 20.0]}
    assert not told({}, a=0.0, b=0.0), "nobody is missing"
    assert not told(lost, a=1.0), "b is not connected"
    assert not told(lost, a=1.0, b=30.0), "b was seen before it was lost"
    assert told(lost, a=1.0, b=2.0)


def test_a_job_ends_after_a_round_when_somebody_is_back(tmp_path: Path) -> None:
    kept: list[str] = []
    callback = TakeBack(lambda: kept.append("checkpoint"))
    callback.on_start(None, tmp_path, 0, 9)  # type: ignore[arg-type]

    def round(step: int, **absent: Any) -> None:
        callback.on_round(Progress("train", step, 9, step, 9, None, {}, None, absent))

    round(1, bank=(1, 0.0))  # nobody says that it is back
    (tmp_path / BACK).touch()
    round(2)
    assert not (tmp_path / BACK).exists(), "it was said of an earlier loss"
    round(3, bank=(1, 0.0))
    (tmp_path / BACK).touch()
    round(9, bank=(1, 0.0))  # the last round: nothing to come back for
    assert not kept
    with pytest.raises(SitesBackError, match="bank can take part again") as raised:
        round(3, bank=(1, 0.0))
    assert kept == ["checkpoint"] and RunFailure.of(raised.value).again
