"""Submits runs and goes on after a crash: a new job continues from the newest tag all parties hold, until the result is
there.

It runs beside the server and looks at three things: what the server says of the job, the heartbeat in the run folder,
and the folder itself. The engine never continues a job by itself; a job of a killed server may even be listed as
running for good.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isthmus.deploy.credentials import Kit
from isthmus.deploy.heartbeat import is_alive, last_beat
from isthmus.deploy.job import write_job
from isthmus.deploy.play import BEAT, Failed, committed_steps, read_failure
from isthmus.errors import RunError

logger = logging.getLogger(__name__)

EVERY = 0.5
FROZEN = 20.0
"""A server job whose heartbeat is older than this is stuck, and aborted."""
NEVER_BEGAN = 120.0
STUCK = 6
"""So many attempts in a row that add no round, and the run is given up; before each the pause doubles."""
PAUSE, LONGEST_PAUSE = 2.0, 30.0
GIVE_UP_ABORT = 25.0
GATE = "isthmus gate"
"""How a refusal by a site's gate begins; another attempt would meet it too."""
STOPPED = "stopped"
"""File in a run folder: somebody wants this run to stop."""


class Admin:
    """A session with the server, opened again whenever it breaks."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self._session: Any = None
        logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what it warns of, we say ourselves

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a function of the session. Whatever fails, the next call begins with a new session."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        try:
            with contextlib.redirect_stdout(
                io.StringIO()
            ):  # the library prints; our standard output may be somebody's JSON
                if self._session is None:
                    self._session = new_secure_session(
                        self.kit.name, str(self.kit.path), timeout=5.0, auto_login_max_tries=1
                    )
                return getattr(self._session, name)(*arguments, **named)
        except Exception as error:
            if type(error).__name__ not in (
                "JobNotRunning",
                "JobNotFound",
                "JobNotDone",
                "InvalidJobDefinition",
                "AuthorizationError",
            ):
                self.close()
            raise

    def sites(self) -> list[str]:
        """Sites that are connected."""
        return sorted(info.name for info in self.ask("get_connected_client_list"))

    def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            try:
                session.close()
            except Exception:
                logger.debug("closing a session", exc_info=True)


class Supervisor:
    """Plays runs to their end.

    Args:
        kit: The coordinator's.
        runs: Folder that holds the run folders.
        sites: Organisations that must take part.
        tick: Called twice a second, e.g. to show progress.
    """

    def __init__(self, kit: Kit, runs: Path, sites: Sequence[str], tick: Callable[[], None] = lambda: None) -> None:
        self.admin = Admin(kit)
        self.runs, self.sites, self.tick = runs, tuple(sites), tick
        self._sign = 0.0  # when the job was last seen to work
        self.attempts: list[dict[str, Any]] = []
        """What happened, attempt by attempt."""

    def play(self, runs: Sequence[str]) -> None:
        """Submit runs as one job, again and again, until each has its result. An error that another attempt would meet
        too is raised.
        """
        stuck, before = 0, -1
        try:
            while not self._finished(runs):
                self._check_stopped(runs)
                steps = sum(committed_steps(self.runs / run) for run in runs)
                stuck = 0 if steps > before else stuck + 1
                if stuck >= STUCK:
                    log = self.runs / runs[0] / "log.txt"
                    raise RunError(
                        f"{STUCK} attempts in a row added no round ({self.attempts[-1]['ended']}); see {log}, then "
                        "submit again"
                    )
                if stuck:
                    self._pause(min(LONGEST_PAUSE, PAUSE * 2 ** (stuck - 1)))
                before = steps
                self._attempt(runs)
        finally:
            self.admin.close()

    def _finished(self, runs: Sequence[str]) -> bool:
        return all((self.runs / run / "result.json").exists() for run in runs)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.tick()
            time.sleep(EVERY)

    def _check_stopped(self, runs: Sequence[str]) -> None:
        for run in runs:
            if (self.runs / run / STOPPED).exists():
                raise RunError(f"{run} was stopped: `isthmus submit --again {run}` goes on with it")

    def _attempt(self, runs: Sequence[str]) -> None:
        number = self._next_number(runs[0])
        self._wait_for_sites()
        self._end_orphans(runs)
        for run in runs:
            Failed.path(self.runs / run).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            job = write_job(Path(folder) / f"{runs[0]}-{number}", runs, number, len(self.sites))
            job_id = str(
                self._persist(lambda: self.admin.ask("submit_job", str(job), submit_token=f"{runs[0]}-{number}"))
            )
        note: dict[str, Any] = {"attempt": number, "job": job_id, "submitted": time.time()}
        self.attempts.append(note)
        logger.info("attempt %d of %s is job %s", number, ", ".join(runs), job_id)
        note["ended"] = self._follow(runs, job_id)
        for run in runs:
            failure = read_failure(self.runs / run)
            if failure is not None and not failure.again:
                raise failure.error()

    def _follow(self, runs: Sequence[str], job_id: str) -> str:
        """Until the job is over, one way or another; returns how."""
        self._sign = time.monotonic()
        while True:
            self.tick()
            if self._finished(runs):
                return "finished"
            self._check_stopped(runs)
            status = self._status(job_id)
            if status is not None and status.startswith("FINISHED"):
                why = self._refusal(job_id, status)
                if GATE in why:
                    raise RunError(f"the job was refused: {why}")
                return why
            reason = self._lost(runs) if status is not None else None
            if reason is not None:
                logger.warning("job %s: %s", job_id, reason)
                self._abort(job_id)
                return reason
            time.sleep(EVERY)

    def _status(self, job_id: str) -> str | None:
        """What the server says; None while it cannot be reached."""
        try:
            return str(self.admin.ask("get_job_status", job_id))
        except Exception as error:
            logger.info("the server does not answer (%s)", type(error).__name__)
            return None

    def _lost(self, runs: Sequence[str]) -> str | None:
        """Why a job that is said to run does not."""
        beats = [beat for run in runs if (beat := last_beat(self.runs / run / BEAT)) is not None]
        if not beats:
            return "it never began" if time.monotonic() - self._sign > NEVER_BEGAN else None
        self._sign = time.monotonic()
        pid, age = min(beats, key=lambda beat: beat[1])
        if not is_alive(pid):
            return "its server process is gone"
        return "its server process is frozen" if age > FROZEN else None

    def _abort(self, job_id: str) -> None:
        """Abort a job; one that the server lists but does not run (a ghost) is left alone."""
        try:
            self.admin.ask("abort_job", job_id)
        except Exception as error:
            logger.info("job %s cannot be aborted (%s)", job_id, type(error).__name__)
            return
        until = time.monotonic() + GIVE_UP_ABORT
        while time.monotonic() < until:
            status = self._status(job_id)
            if status is not None and status.startswith("FINISHED"):
                return
            self.tick()
            time.sleep(EVERY)

    def _refusal(self, job_id: str, status: str) -> str:
        details: Sequence[Any] = ()
        for _ in range(
            5 if "FAILED_TO_RUN" in status else 1
        ):  # the server says that it failed a little before it says why
            try:
                details = self.admin.ask("get_job_meta", job_id).get("job_deploy_detail") or ()
            except Exception as error:
                logger.info("no details of job %s (%s)", job_id, type(error).__name__)
            if details:
                break
            time.sleep(EVERY)
        wrong = [str(line) for line in details if "ERROR" in str(line) or GATE in str(line)]
        return f"{status}: {'; '.join(wrong)}" if wrong else status

    def _wait_for_sites(self) -> None:
        """Until every organisation is connected."""
        told = time.monotonic() - 15.0
        while True:
            try:
                missing = sorted(set(self.sites) - set(self.admin.sites()))
            except Exception as error:
                missing = [f"server ({type(error).__name__})"]
            if not missing:
                return
            if time.monotonic() - told > 30.0:
                logger.warning("waiting for %s", ", ".join(missing))
                told = time.monotonic()
            self.tick()
            time.sleep(EVERY)

    def _persist(self, ask: Callable[[], Any]) -> Any:
        """Submit once even if the connection breaks meanwhile: the token makes a second try the same job."""
        for last in (False, False, True):
            try:
                return ask()
            except Exception as error:
                if last or type(error).__name__ in (
                    "InvalidJobDefinition",
                    "AuthorizationError",
                    "AuthenticationError",
                ):
                    raise RunError(f"the server does not take the job: {type(error).__name__}: {error}") from error
                time.sleep(2 * EVERY)
        raise AssertionError

    def _end_orphans(self, runs: Sequence[str]) -> None:
        """A server process of an earlier attempt must not write beside the next one."""
        for run in runs:
            path = self.runs / run / BEAT
            beat = last_beat(path)
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
    """Whether a process is a job of the server, and not somebody else who got its number."""
    try:
        return b"nvflare" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
