"""Keeps a parent process of NVIDIA FLARE running: restarted a second after it dies, ended with all it started.

Runs in a thread of ``isthmus server start``, ``isthmus client start`` and ``isthmus run --engine nvflare``.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography import x509

from isthmus.deploy.certificates import now, read_certificate
from isthmus.deploy.processes import descendants, jobs_of, names_of_jobs, terminate
from isthmus.deploy.startup_kit import JOB_ID, StartupKit, certificate_file
from isthmus.errors import ConfigError, RunError

logger = logging.getLogger(__name__)

RESTART_AFTER = 1.0
TOO_FAST, MAX_FAST_EXITS = 5.0, 5
"""A process that ends within so many seconds so many times in a row is not restarted: something is wrong with it."""


CHECK_CERTIFICATE_EVERY = 1.0
TIDY_EVERY = 60.0
"""A process runs for months, and every job leaves a folder."""
MAX_LOG_BYTES = 20 * 2**20
TAKE_OVER = datetime.timedelta(seconds=60)
"""So long before its certificate expires a process is restarted with the new one even if a job runs."""


class ProcessSupervisor:
    """Keeps the parent process of one startup kit running.

    Args:
        before_start: Called before every start, while the process is down.
    """

    def __init__(
        self,
        kit: StartupKit,
        environment: Mapping[str, str],
        log: Path,
        before_start: Callable[[], object] | None = None,
    ) -> None:
        self.kit, self.log = kit, log
        self._environment, self._before_start = dict(environment), before_start
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._supervise, name=f"supervise-{kit.name}", daemon=True)
        self.failed, self.restarts = False, 0

    def start(self) -> ProcessSupervisor:
        self._thread.start()
        return self

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def run_until_stopped(self) -> None:
        """Wait in the foreground of a command; raises if the process keeps dying."""
        try:
            self._thread.join()
        finally:
            self.stop()
        if self.failed:
            who = "the server" if self.kit.kind == "server" else self.kit.name
            raise RunError(f"{who} does not stay up: see {self.log}")

    def _supervise(self) -> None:
        fast_exits = 0
        while not self._stopping.is_set():
            if self._before_start is not None:
                self._before_start()
            self.kit.prune_jobs()
            started = time.monotonic()
            with self._lock:
                if self._stopping.is_set():
                    return
                with self.log.open("ab") as log:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-u", "-m", "isthmus.deploy.parent_process", str(self.kit.path)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, **self._environment},
                        start_new_session=True,
                    )
            code = self._wait(self._process)
            if self._stopping.is_set():
                return
            fast_exits = fast_exits + 1 if time.monotonic() - started < TOO_FAST else 0
            if fast_exits >= MAX_FAST_EXITS:
                logger.error(
                    "%s ended %d times within %.0f s of its start (code %d), giving up: see %s",
                    self.kit.name,
                    fast_exits,
                    TOO_FAST,
                    code,
                    self.log,
                )
                self.failed = True
                return
            logger.warning("%s ended (code %d); restarting it", self.kit.name, code)
            self.restarts += 1
            self._stopping.wait(RESTART_AFTER)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until the process has ended. One whose certificate was renewed is ended between two jobs, or shortly
        before the old certificate expires, so that it connects with the new one.
        """
        used, tidied = self._certificate(), time.monotonic()
        while True:
            try:
                return process.wait(timeout=CHECK_CERTIFICATE_EVERY)
            except subprocess.TimeoutExpired:
                held = self._certificate()
            if time.monotonic() - tidied > TIDY_EVERY:
                self._tidy(process.pid)
                tidied = time.monotonic()
            if held is None or used is None or held == used:
                continue
            if used.not_valid_after_utc - now() < TAKE_OVER or not jobs_of(process.pid):
                logger.warning("%s has a new certificate: connecting again with it", self.kit.name)
                terminate([process.pid, *descendants(process.pid)])
                return process.wait()

    def _tidy(self, pid: int) -> None:
        """Remove old folders of jobs; a log that has grown large begins anew, with the one before beside it."""
        try:
            self.kit.prune_jobs(running=names_of_jobs(pid, JOB_ID))
            if self.log.stat().st_size > MAX_LOG_BYTES:
                shutil.copyfile(self.log, self.log.with_name(f"{self.log.name}.1"))
                os.truncate(self.log, 0)  # the process goes on writing to its end
        except OSError as error:
            logger.warning("%s cannot be tidied: %s", self.kit.path, error)

    def _certificate(self) -> x509.Certificate | None:
        with contextlib.suppress(ConfigError):
            return read_certificate(self.kit.startup / certificate_file(self.kit.kind))
        return None

    def stop(self) -> None:
        """End the process and all it started; returns when they are gone."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            terminate([process.pid, *descendants(process.pid)])
        if self._thread.is_alive():
            self._thread.join()
