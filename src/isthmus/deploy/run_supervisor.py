"""Submits runs as jobs and, after a crash, submits them again: each new job continues from the newest checkpoint that
all parties hold, until the result is there.

Runs in the process of ``isthmus submit`` (or ``isthmus run --engine nvflare``), on the machine of the server. It
watches the job status the server reports, the heartbeat in the run folder, and the folder itself: NVIDIA FLARE never
continues a job, and may list the job of a killed server as running for ever.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isthmus.deploy.admin_session import AdminSession
from isthmus.deploy.heartbeat import read_heartbeat
from isthmus.deploy.job_template import BUSY, REFUSED, write_job
from isthmus.deploy.processes import is_alive
from isthmus.deploy.run_files import BACK
from isthmus.deploy.run_status import (
    FAILED,
    HEARTBEAT,
    RunFailure,
    check_stopped,
    committed_rounds,
    read_progress,
    write_waiting,
)
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import RunError, StorageError

logger = logging.getLogger(__name__)

POLL_EVERY = 0.5
FROZEN_AFTER = 20.0
"""A server job whose heartbeat is older than this is frozen, and aborted."""
START_TIMEOUT = 300.0
"""A job that has written no heartbeat after this time never started. Two minutes were too few where fifteen processes
wanted each core: every attempt was given up before torch was loaded.
"""
MAX_FRUITLESS = 6
"""After so many attempts in a row that add no round the run is given up; before each the pause doubles."""
PAUSE, MAX_PAUSE = 2.0, 30.0
ABORT_TIMEOUT = 25.0
WARN_MISSING_EVERY = 30.0
LOOK_EVERY = 5.0
"""Pause between two looks whether organisations that a run goes on without are back."""
PERMANENT = ("InvalidJobDefinition", "AuthorizationError", "AuthenticationError")
"""Errors of a submission that a second try would get too."""


class RunSupervisor:
    """Finishes runs, with as many jobs as it takes.

    Args:
        kit: The coordinator's.
        runs: Folder that holds the run folders.
        sites: Organisations that must take part.
        on_poll: Called twice a second, e.g. to show progress.
        warn_after: Seconds that an organisation may be absent before a warning names it.
        check: Raises if the runs cannot be finished any more; called before every attempt and while one is awaited.
    """

    def __init__(
        self,
        kit: StartupKit,
        runs: Path,
        sites: Sequence[str],
        on_poll: Callable[[], None] = lambda: None,
        warn_after: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.admin = AdminSession(kit)
        self.runs, self.sites, self.on_poll = runs, tuple(sites), on_poll
        self.warn_after, self.check = warn_after, check
        self._next_look = 0.0  # when to see whether lost organisations are back
        self._last_heartbeat = 0.0  # when the server job was last known to have started
        self.attempts: list[dict[str, Any]] = []
        """What happened, attempt by attempt."""

    def finish(self, runs: Sequence[str]) -> None:
        """Submit runs as one job, again and again, until each has its result. An error that another attempt would meet
        too is raised.
        """
        fruitless, before = 0, -1
        try:
            while not self._finished(runs):
                self._check_stopped(runs)
                rounds = sum(committed_rounds(self.runs / run) for run in runs)
                busy = bool(self.attempts) and BUSY in self.attempts[-1]["ended"]
                fruitless = 0 if rounds > before else fruitless + (not busy)
                if fruitless >= MAX_FRUITLESS:
                    log = self.runs / runs[0] / "log.txt"
                    raise RunError(
                        f"{MAX_FRUITLESS} attempts in a row added no round ({self._last_reason()}); see {log}, "
                        "then submit again"
                    )
                if busy:
                    logger.warning("%s; Ctrl-C ends the waiting", self.attempts[-1]["ended"])
                    self._pause(MAX_PAUSE)
                elif fruitless:
                    self._pause(min(MAX_PAUSE, PAUSE * 2 ** (fruitless - 1)))
                before = rounds
                self._attempt(runs)
        finally:
            self.admin.close()

    def _last_reason(self) -> str:
        last = self.attempts[-1]
        return str(last.get("why", last["ended"]))

    def _finished(self, runs: Sequence[str]) -> bool:
        return all((self.runs / run / "result.json").exists() for run in runs)

    def _poll(self) -> None:
        self.on_poll()
        time.sleep(POLL_EVERY)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._poll()

    def _check_stopped(self, runs: Sequence[str]) -> None:
        for run in runs:
            check_stopped(self.runs / run)

    def _attempt(self, runs: Sequence[str]) -> None:
        number = self._next_number(runs[0])
        self._wait_for_sites(runs)
        self._kill_orphans(runs)
        for run in runs:
            (self.runs / run / FAILED).unlink(missing_ok=True)
            (self.runs / run / BACK).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            job = write_job(Path(folder) / f"{runs[0]}-{number}", runs, number, self.sites)
            job_id = self._submit(job, f"{runs[0]}-{number}")
        attempt: dict[str, Any] = {"attempt": number, "job": job_id, "submitted": time.time()}
        self.attempts.append(attempt)
        logger.info("attempt %d of %s is job %s", number, ", ".join(runs), job_id)
        attempt["ended"] = self._follow(runs, job_id)
        for run in runs:
            failure = RunFailure.read(self.runs / run)
            if failure is None:
                continue
            if not failure.again:
                raise failure.error()
            attempt["why"] = failure.text
            if failure.kind == StorageError.__name__:  # somebody must make room meanwhile
                logger.warning("%s; trying again", failure.text)

    def _submit(self, job: Path, token: str) -> str:
        """Submit a job once even if the connection breaks meanwhile: with the same token a second try is the same
        job.
        """
        for last in (False, False, True):
            try:
                return str(self.admin.call("submit_job", str(job), submit_token=token))
            except Exception as error:
                if last or type(error).__name__ in PERMANENT:
                    raise RunError(f"the server does not accept the job: {type(error).__name__}: {error}") from error
                time.sleep(2 * POLL_EVERY)
        raise AssertionError

    def _follow(self, runs: Sequence[str], job_id: str) -> str:
        """Wait until the job has ended in any way; returns how."""
        self._last_heartbeat = time.monotonic()
        while True:
            if self._finished(runs):
                self.on_poll()
                return "finished"
            self._check_stopped(runs)
            status = self._status(job_id)
            if status is not None and status.startswith("FINISHED"):
                ended = self._with_details(job_id, status)
                if REFUSED in ended:
                    raise RunError(f"the job was refused: {ended}")
                return ended
            reason = self._failure(runs) if status is not None else None
            if reason is not None:
                logger.warning("job %s: %s", job_id, reason)
                self._abort(job_id)
                return reason
            self._note_back(runs)
            self._poll()

    def _note_back(self, runs: Sequence[str]) -> None:
        """Tell runs that go on without somebody when all organisations have given a sign of life since."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY
        progress = {run: read_progress(self.runs / run) for run in runs}
        lost = {run: max(at for _, at in one.absent.values()) for run, one in progress.items() if one and one.absent}
        if not lost:
            return
        try:
            seen = self.admin.last_seen()
        except Exception as error:
            logger.info("the server does not answer (%s)", type(error).__name__)
            return
        oldest = time.time() - max(seen.get(site, math.inf) for site in self.sites)
        for run, since in lost.items():
            if oldest > since + LOOK_EVERY:
                (self.runs / run / BACK).touch()

    def _status(self, job_id: str) -> str | None:
        """The job's status at the server; None while it cannot be reached."""
        try:
            return str(self.admin.call("get_job_status", job_id))
        except Exception as error:
            logger.info("the server does not answer (%s)", type(error).__name__)
            return None

    def _failure(self, runs: Sequence[str]) -> str | None:
        """Why a job that the server lists as running does not run."""
        beats = [beat for run in runs if (beat := read_heartbeat(self.runs / run / HEARTBEAT)) is not None]
        if not beats:
            return "it never started" if time.monotonic() - self._last_heartbeat > START_TIMEOUT else None
        self._last_heartbeat = time.monotonic()
        pid, age = min(beats, key=lambda beat: beat[1])
        if not is_alive(pid):
            return "its server process is gone"
        return "its server process is frozen" if age > FROZEN_AFTER else None

    def _abort(self, job_id: str) -> None:
        """Abort a job; one that the server lists but does not run cannot be aborted and is left alone."""
        try:
            self.admin.call("abort_job", job_id)
        except Exception as error:
            logger.info("job %s cannot be aborted (%s)", job_id, type(error).__name__)
            return
        deadline = time.monotonic() + ABORT_TIMEOUT
        while time.monotonic() < deadline:
            status = self._status(job_id)
            if status is not None and status.startswith("FINISHED"):
                return
            self._poll()

    def _with_details(self, job_id: str, status: str) -> str:
        """A status with the errors of the sites."""
        details: Sequence[Any] = ()
        # The server reports that a job failed a little before it reports why.
        for _ in range(5 if "FAILED_TO_RUN" in status else 1):
            try:
                details = self.admin.call("get_job_meta", job_id).get("job_deploy_detail") or ()
            except Exception as error:
                logger.info("no details of job %s (%s)", job_id, type(error).__name__)
            if details:
                break
            time.sleep(POLL_EVERY)
        errors = [str(line) for line in details if "ERROR" in str(line) or REFUSED in str(line) or BUSY in str(line)]
        return f"{status}: {'; '.join(errors)}" if errors else status

    def _wait_for_sites(self, runs: Sequence[str] = ()) -> None:
        """Wait until every organisation is connected; says at once for whom, and since when."""
        next_warning = time.monotonic() + self.warn_after
        since: dict[str, float] = {}
        named: set[str] = set()
        while True:
            self.check()
            try:
                missing = sorted(set(self.sites) - set(self.admin.sites()))
            except Exception as error:
                missing = [f"server ({type(error).__name__})"]
            since = {name: since.get(name, time.time()) for name in missing}
            for run in runs:
                write_waiting(self.runs / run, since)
            if not missing:
                return
            if time.monotonic() >= next_warning or (named and not set(missing) <= named):
                words = [f"{name} since {time.strftime('%H:%M:%S', time.localtime(since[name]))}" for name in missing]
                logger.warning("waiting for %s; Ctrl-C ends the waiting", ", ".join(words))
                next_warning, named = time.monotonic() + WARN_MISSING_EVERY, set(missing)
            self._poll()

    def _kill_orphans(self, runs: Sequence[str]) -> None:
        """A server job of an earlier attempt must not write beside the next one."""
        for run in runs:
            path = self.runs / run / HEARTBEAT
            beat = read_heartbeat(path)
            if beat is not None:
                if is_alive(beat[0]) and _is_job(beat[0]):
                    os.kill(beat[0], signal.SIGKILL)
                path.unlink(missing_ok=True)

    def _next_number(self, run: str) -> int:
        path = self.runs / run / "attempts.json"
        number = int(json.loads(path.read_text())) + 1 if path.exists() else 0
        path.write_text(json.dumps(number))
        return number


def _is_job(pid: int) -> bool:
    """Whether a process is a job of the server, and not another one that was given its number."""
    try:
        return b"nvflare" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
