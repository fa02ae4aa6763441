"""Progress and failures in a run folder, from the server job to the processes that watch it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from in_process_sites import settings_of

from isthmus.deploy.run_files import run_state
from isthmus.deploy.run_status import (
    FAILED,
    ProgressFollower,
    ProgressWriter,
    RunFailure,
    committed_rounds,
    read_progress,
)
from isthmus.errors import ConfigError, RunError, StorageError
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import Settings
from isthmus.federation.interface import Failure, QuorumError


def progress(step: int, scores: Mapping[str, Any] | None = None) -> Progress:
    return Progress("train", step, 9, step, 9, 1.5, {"up": 3}, scores)


class Calls(Callback):
    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.rounds: list[Progress] = []

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        self.started.append((step, steps))

    def on_round(self, progress: Progress) -> None:
        self.rounds.append(progress)


def test_progress_is_reported_once_per_round(tmp_path: Path) -> None:
    settings, calls, writer = settings_of(rounds=9), Calls(), ProgressWriter()
    follower = ProgressFollower(tmp_path, settings, [calls])
    follower.start()
    writer.on_start(settings, tmp_path, 0, settings.total_rounds)
    assert calls.started == [(0, settings.total_rounds)] and settings.total_rounds >= 9
    follower.poll()
    for step in (1, 2):
        writer.on_round(progress(step, {"val": 0.5}))
        follower.poll()
        follower.poll()
    assert calls.rounds == [progress(1, {"val": 0.5}), progress(2, {"val": 0.5})]


def test_what_is_agreed_before_the_first_round_is_no_round(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    for number in range(3):
        (tmp_path / "ledger" / f"{number:06d}.jsonl").touch()
    assert committed_rounds(tmp_path) == 2


@pytest.mark.parametrize("content", ['{"step": ', "[]", "[" * 100_000])
def test_damaged_files_are_ignored(tmp_path: Path, content: str) -> None:
    for name in ("progress.json", FAILED):
        (tmp_path / name).write_text(content)
    assert read_progress(tmp_path) is None and RunFailure.read(tmp_path) is None
    assert run_state(tmp_path) == "waiting"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (QuorumError("train", {"a": Failure("unavailable")}, 1, 2), True),
        (QuorumError("train", {"a": Failure("handler")}, 1, 2), False),
        (ConfigError("x"), False),
        (RunError("diverged"), False),
        (StorageError("full"), True),
        (MemoryError(), True),
    ],
)
def test_which_failures_are_worth_another_attempt(tmp_path: Path, error: Exception, again: bool) -> None:
    RunFailure.of(error).write(tmp_path)
    found = RunFailure.read(tmp_path)
    assert found is not None and found.again is again
