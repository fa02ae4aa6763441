"""Many runs, several at a time, each in a folder of its own.

A finished folder is reused, an unfinished one resumed, a damaged one reported and left as it is. With one worker runs
are done in this process; with more, worker processes (`isthmus.experiments.worker`, one torch thread each) do one run
after the other. If a worker dies only its run fails, and all workers end with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from isthmus.errors import ConfigError, DataError, IsthmusError
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.run import resume, start
from isthmus.experiments.variants import AUTO, NONE, with_variant

Status = Literal["done", "reused", "skipped", "damaged", "failed"]
Scenario = tuple[str | int | None, ...]


@dataclass(frozen=True)
class Job:
    """One run and its folder. Without ``models`` a finished run keeps neither models nor its last checkpoint: a table
    is thousands of runs.
    """

    settings: Settings
    folder: Path
    models: bool = True

    @property
    def scenario(self) -> Scenario:
        """Data set, partition, clients, split."""
        run = self.settings.run
        return run.dataset, run.partition, run.clients, run.split


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Args:
        status: ``done`` now; ``reused`` from an earlier call; ``skipped``: its scenario cannot be built here;
            ``damaged``: its folder cannot be used; ``failed``: the run failed.
        result: As in ``result.json``; None unless done or reused.
        reason: One line where there is no result.
        asked_wrong: The reason is a wrong setting, not missing or damaged data.
    """

    job: Job
    status: Status
    result: Mapping[str, Any] | None = None
    reason: str = ""
    asked_wrong: bool = False


OnDone = Callable[[Outcome], None]


def default_workers() -> int:
    """One per core this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    jobs: Sequence[Job], *, workers: int | None = None, on_done: OnDone = lambda outcome: None
) -> dict[Path, Outcome]:
    """Run all jobs; returns their outcomes by folder. Two jobs with one folder are one job.

    Args:
        workers: Processes at a time; 1 runs in this process. Default: one per core.
        on_done: Called in this thread after each job.
    """
    unique = {job.folder: job for job in jobs}
    outcomes: dict[Path, Outcome] = {}

    def record(outcome: Outcome) -> None:
        outcomes[outcome.job.folder] = outcome
        on_done(outcome)

    left: list[Job] = []
    for job in unique.values():
        found = existing_outcome(job)
        if found is None:
            left.append(job)
        else:
            record(found)
    count = min(workers if workers is not None else default_workers(), len(left))
    if count < 1:
        return outcomes
    created = [folder for parent in {job.folder.parent for job in left} for folder in _create(parent)]
    impossible: dict[Scenario, Outcome] = {}

    def attempt(job: Job, runner: Callable[[Job], Outcome]) -> Outcome:
        if job.scenario in impossible:
            return dataclasses.replace(impossible[job.scenario], job=job)
        outcome = runner(job)
        if outcome.status == "skipped":
            impossible[job.scenario] = outcome
        return outcome

    try:
        if count == 1:
            for job in left:
                record(attempt(job, run_job))
        else:
            _in_processes(left, count, attempt, record)
    finally:
        for folder in reversed(created):  # remove folders in which nothing could be run
            with contextlib.suppress(OSError):
                folder.rmdir()
    return outcomes


def _create(folder: Path) -> list[Path]:
    """Make a folder; returns it and those of its parents that were missing, from the top down."""
    missing = [each for each in (*reversed(folder.parents), folder) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from None
    return missing


# -- one run ---------------------------------------------------------------------------------------


def existing_outcome(job: Job) -> Outcome | None:
    """The outcome that a job's folder shows already; None if the run must be started or resumed."""
    try:
        result = finished(job)
    except DataError as error:
        return Outcome(job, "damaged", reason=str(error))
    return None if result is None else Outcome(job, "reused", result)


def finished(job: Job) -> dict[str, Any] | None:
    """The result of a finished run; None if there is none yet. DataError if the folder holds something else, or is
    damaged.
    """
    folder = job.folder
    try:
        if not (folder / "config.toml").exists():
            if (folder / "result.json").exists() or (folder / "metrics.jsonl").exists():
                raise DataError(f"{folder} holds files of a run without config.toml: delete it to run it again")
            return None
        there = settings_from_toml((folder / "config.toml").read_text())
        if differing := different(job.settings, there):
            raise DataError(
                f"{folder} holds a run with other settings ({', '.join(differing)}): delete it or choose another --out"
            )
        if not (folder / "result.json").exists():
            return None
        result = json.loads((folder / "result.json").read_text())
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder} is damaged ({error}): delete it to run it again") from None
    except ValueError:
        return None  # resuming writes the result again if there is a checkpoint, and fails otherwise
    run = job.settings.run
    if (
        not isinstance(result, dict)
        or (result.get("method"), result.get("seed")) != (run.method, run.seed)
        or "score" not in result
    ):
        raise DataError(f"{folder / 'result.json'} is damaged: delete the folder to run it again")
    return result


def different(wanted: Settings, there: Settings) -> list[str]:
    """Settings in which two runs differ, as text. Those a run resolves itself (clients, execution) count only where
    given.
    """
    texts = []
    if wanted.run.method != there.run.method:
        return [f"method {there.run.method} instead of {wanted.run.method}"]
    if (wanted.run.variant, wanted.run.preset) == (AUTO, there.run.preset) and there.run.variant not in (AUTO, NONE):
        wanted = with_variant(wanted, there.run.variant)  # the one validation chose
    for mine, theirs in ((wanted.run, there.run), (wanted.method_config, there.method_config)):
        for field in dataclasses.fields(mine):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            unset = mine is wanted.run and (a is None or (field.name, a) == ("execution", "auto"))
            if a != b and not unset and field.name not in ("tensorboard", "checkpoint_every"):
                texts.append(f"{field.name} {b} instead of {a}")
    return texts


def run_job(job: Job) -> Outcome:
    """Start or resume one run in this process. Raises nothing but an interrupt."""
    existed = (job.folder / "config.toml").exists()
    try:
        result = resume(job.folder) if existed else start(job.settings, job.folder)
        if not job.models:
            for name in ("models", "checkpoints"):
                shutil.rmtree(job.folder / name, ignore_errors=True)
        return Outcome(job, "done", result)
    except (DataError, ConfigError) as error:
        # Without a folder the cause is the scenario or the settings, with one it is the folder.
        reason = f"{error} (delete {job.folder} to run it again)" if existed else str(error)
        status: Status = "damaged" if existed else "skipped"
        return Outcome(job, status, reason=reason, asked_wrong=isinstance(error, ConfigError))
    except IsthmusError as error:
        return Outcome(job, "failed", reason=str(error))
    except Exception as error:
        return Outcome(job, "failed", reason=f"{type(error).__name__}: {error}")


# -- many processes --------------------------------------------------------------------------------


def _in_processes(
    jobs: Sequence[Job], count: int, attempt: Callable[[Job, Callable[[Job], Outcome]], Outcome], record: OnDone
) -> None:
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    workers = [_Worker() for _ in range(count)]

    def serve(worker: _Worker) -> None:
        try:
            while True:
                done.put(attempt(todo.get_nowait(), worker.run))
        except queue.Empty:
            worker.stop()
        except BaseException as error:  # the main thread would wait for ever otherwise
            done.put(error)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for _ in jobs:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            record(outcome)
    finally:
        for worker in workers:
            worker.kill()


class _Worker:
    """A process that does one run after the other; started at its first job, and again after it died."""

    THREADS: Mapping[str, str] = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
    )

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None
        self._lock = threading.Lock()
        self._killed = False

    def run(self, job: Job) -> Outcome:
        try:
            answer = self._request({"config": job.settings.to_toml(), "folder": str(job.folder), "models": job.models})
        except OSError as error:
            return Outcome(job, "failed", reason=f"cannot start a worker process: {error.strerror or error}")
        if answer is None:
            return Outcome(job, "failed", reason=self._cause_of_death())
        return Outcome(job, answer["status"], answer["result"], answer["reason"])

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        return json.loads(line) if line.endswith("\n") else None

    def _started(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._killed:
                raise OSError("stopped")
            if self._process is None:
                self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "isthmus.experiments.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    text=True,
                    env={**os.environ, **self.THREADS},
                )
            return self._process

    def _cause_of_death(self) -> str:
        """Why the process is gone, as far as it is known."""
        with self._lock:
            process, errors = self._process, self._errors
            self._process = self._errors = None
        if process is None or errors is None:
            return "stopped"
        code = process.wait()
        errors.seek(0)
        last = next((line.strip() for line in reversed(errors.read().splitlines()) if line.strip()), "")
        errors.close()
        how = (
            f"was killed by signal {-code} (9 is often a lack of memory: try fewer --jobs)"
            if code < 0
            else f"ended with code {code}"
        )
        return f"its process {how}{f': {last}' if last else ''}; the same command continues it"

    def stop(self) -> None:
        """No more jobs: the process ends by itself once its input is closed."""
        with self._lock:
            process, self._process = self._process, None
            self._killed = True
        if process is not None:
            process.communicate()

    def kill(self) -> None:
        """End the process at once; its run can be resumed."""
        with self._lock:
            self._killed = True
            process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            deadline = time.monotonic() + 5
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
