"""The supervisor of a parent process, with a stand-in for Python as the process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.deploy import process_supervisor
from isthmus.deploy.process_supervisor import MAX_FAST_EXITS, ProcessSupervisor
from isthmus.deploy.processes import is_alive, names_of_jobs
from isthmus.deploy.startup_kit import JOB_ID, StartupKit
from isthmus.errors import RunError


def supervisor(folder: Path, before_start: Callable[[], object] | None = None) -> ProcessSupervisor:
    kit = StartupKit(folder, "server", "localhost", "x", ("localhost", 1))
    return ProcessSupervisor(kit, {}, folder / "log.txt", before_start)


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(process_supervisor, "RESTART_AFTER", 0.01)


def test_a_process_that_keeps_ending_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "echo started; exit 3", monkeypatch)
    with pytest.raises(RunError, match=rf"the server does not stay up: see {tmp_path}/log\.txt"):
        supervisor(tmp_path).start().run_until_stopped()
    assert (tmp_path / "log.txt").read_text() == "started\n" * MAX_FAST_EXITS


def test_a_killed_process_is_restarted_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "exec sleep 60", monkeypatch)
    starts: list[float] = []
    running = supervisor(tmp_path, lambda: starts.append(time.monotonic())).start()
    try:
        first = _pid(running)
        os.kill(first, signal.SIGKILL)
        second = _pid(running, other_than=first)
        assert len(starts) == 2 and not is_alive(first)
    finally:
        running.stop()
    assert running.pid is None and not is_alive(second) and not running.failed


def _pid(running: ProcessSupervisor, other_than: int | None = None) -> int:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if (pid := running.pid) not in (None, other_than):
            return int(pid or 0)
        time.sleep(0.01)
    raise AssertionError("no process was started")


def test_a_process_that_runs_for_months_is_tidied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the folder of a job that runs, however old it is; the log goes on in the same file."""
    jobs = [tmp_path / f"76ca07c9-86b6-47a7-b5e9-63e265e30f{number:02d}" for number in range(30)]
    program(tmp_path, f"sh -c 'sleep 60; true' worker_process {jobs[0].name} & echo begun; sleep 60", monkeypatch)
    for name, value in {"TIDY_EVERY": 0.0, "CHECK_CERTIFICATE_EVERY": 0.05, "MAX_LOG_BYTES": 3}.items():
        monkeypatch.setattr(process_supervisor, name, value)
    running = supervisor(tmp_path).start()
    try:
        pid = _pid(running)
        _wait_until(lambda: names_of_jobs(pid, JOB_ID) == {jobs[0].name})
        for number, job in reversed(list(enumerate(jobs))):
            job.mkdir()
            os.utime(job, (number, number))
        _wait_until(lambda: [job for job in jobs if job.exists()] == [jobs[0], *jobs[10:]])
        _wait_until(lambda: not (tmp_path / "log.txt").read_text())
        assert (tmp_path / "log.txt.1").read_text() == "begun\n"
    finally:
        running.stop()


def _wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
