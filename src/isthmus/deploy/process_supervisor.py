"""Keeps a parent process of NVIDIA FLARE running: restarted a second after it dies, ended with all it started.

Runs in a thread of ``isthmus server start``, ``isthmus client start`` and ``isthmus run --engine nvflare``.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from isthmus.deploy.processes import descendants, terminate
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import RunError

logger = logging.getLogger(__name__)

RESTART_AFTER = 1.0
TOO_FAST, MAX_FAST_EXITS = 5.0, 5
"""A process that ends within so many seconds so many times in a row is not restarted: something is wrong with it."""


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
        self.failed = False

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
            code = self._process.wait()
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
            self._stopping.wait(RESTART_AFTER)

    def stop(self) -> None:
        """End the process and all it started; returns when they are gone."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            terminate([process.pid, *descendants(process.pid)])
        if self._thread.is_alive():
            self._thread.join()
