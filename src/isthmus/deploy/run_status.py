"""The state of a run in its folder, for the processes that watch it: heartbeat, progress, failure.

Written by the server job (``server_run``); read by ``isthmus submit``, ``status``, ``stop`` and ``run``, which are
other processes on the same machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.deploy.run_files import BACK, FAILED, HEARTBEAT, PROGRESS, STOPPED, WAITING, committed_rounds
from isthmus.errors import IsthmusError, RunError, StorageError
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import Settings
from isthmus.experiments.round_loop import RECOVERABLE
from isthmus.federation.host import ERRORS
from isthmus.federation.interface import QuorumError

__all__ = [
    "FAILED",
    "HEARTBEAT",
    "STOPPED",
    "ProgressFollower",
    "ProgressWriter",
    "RunFailure",
    "SitesBackError",
    "TakeBack",
    "check_stopped",
    "committed_rounds",
    "read_progress",
    "read_waiting",
    "write_waiting",
]


class SitesBackError(RunError):
    """A run ends its job so that the next one has organisations again that were lost."""


@dataclass(frozen=True)
class RunFailure:
    """Why a run stopped, and whether another attempt may help (``again``)."""

    kind: str
    text: str
    again: bool

    @classmethod
    def of(cls, error: BaseException) -> RunFailure:
        failures = error.failures.values() if isinstance(error, QuorumError) else ()
        full = isinstance(error, StorageError) or any(one.detail == StorageError.__name__ for one in failures)
        again = full or any(one.kind in RECOVERABLE for one in failures) or type(error) is SitesBackError
        again = again or not isinstance(error, IsthmusError)
        kind = StorageError if full else type(error)
        name = kind.__name__ if kind.__name__ in ERRORS else "RunError"
        text = str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
        return cls(name, text, again)

    @classmethod
    def read(cls, folder: Path) -> RunFailure | None:
        """Why the last attempt stopped, if it wrote that."""
        try:
            return cls(**json.loads((folder / FAILED).read_text()))
        except (OSError, ValueError, RecursionError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        (folder / FAILED).write_text(json.dumps(asdict(self)))

    def error(self) -> IsthmusError:
        return ERRORS.get(self.kind, RunError)(self.text)


def check_stopped(folder: Path) -> None:
    """Raise if somebody wants a run to stop."""
    if (folder / STOPPED).exists():
        raise RunError(f"{folder.name} was stopped: `isthmus submit --again {folder.name}` continues it")


def read_progress(folder: Path) -> Progress | None:
    """Where a run stands after its last round, if there was one."""
    try:
        return Progress(**json.loads((folder / PROGRESS).read_text()))
    except (OSError, ValueError, RecursionError, TypeError):
        return None


def read_waiting(folder: Path) -> dict[str, float]:
    """For whom a run waits, and since when (seconds since 1970); written by ``isthmus submit``."""
    try:
        found: dict[str, float] = json.loads((folder / WAITING).read_text())
        return found
    except (OSError, ValueError, RecursionError):
        return {}


def write_waiting(folder: Path, missing: Mapping[str, float]) -> None:
    if missing:
        (folder / WAITING).write_text(json.dumps(dict(missing)))
    else:
        (folder / WAITING).unlink(missing_ok=True)


class ProgressWriter(Callback):
    """Writes the progress of each round into the run folder."""

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        self._folder = folder

    def on_round(self, progress: Progress) -> None:
        temporary = self._folder / f".{PROGRESS}.tmp"
        temporary.write_text(json.dumps(asdict(progress)))
        temporary.rename(self._folder / PROGRESS)


class TakeBack(Callback):
    """Ends the job of a run at the end of a round when organisations it goes on without are connected again: NVIDIA
    FLARE lets nobody rejoin a job, and the next one has them. The supervisor says when.
    """

    def __init__(self, checkpoint: Callable[[], None]) -> None:
        self._checkpoint = checkpoint

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        self._folder = folder

    def on_round(self, progress: Progress) -> None:
        told = self._folder / BACK
        if not progress.absent:
            told.unlink(missing_ok=True)  # it was about somebody who has been taken back
        if not progress.absent or progress.step == progress.steps or not told.exists():
            return
        self._checkpoint()  # no round is begun twice: a sum of the same numbers over another group would be refused
        raise SitesBackError(f"{', '.join(progress.absent)} can take part again: the next job begins with everybody")


class ProgressFollower:
    """Calls callbacks with the progress another process writes."""

    def __init__(self, folder: Path, settings: Settings, callbacks: Sequence[Callback]) -> None:
        self.folder, self.settings, self.callbacks = folder, settings, callbacks
        self._step = committed_rounds(folder)

    def start(self) -> None:
        for callback in self.callbacks:
            callback.on_start(self.settings, self.folder, self._step, self.settings.total_rounds)

    def poll(self) -> None:
        """Report the newest round, if it is a new one."""
        progress = read_progress(self.folder)
        if progress is not None and progress.step != self._step:
            self._step = progress.step
            for callback in self.callbacks:
                callback.on_round(progress)
