"""Parent processes, kept running: started again a second after they die, ended together with everything they
started.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from isthmus.deploy.credentials import Kit

logger = logging.getLogger(__name__)

PAUSE = 1.0
TOO_FAST, TRIES = 5.0, 5
"""A process that dies within so many seconds so many times in a row is not started again: something is wrong with
it.
"""
GRACE = 3.0


class Keeper:
    """Keeps one kit's parent process running.

    Args:
        before: Called before every start, while the process is down.
    """

    def __init__(
        self, kit: Kit, environment: Mapping[str, str], log: Path, before: Callable[[], object] = lambda: None
    ) -> None:
        self.kit, self.log = kit, log
        self._environment, self._before = dict(environment), before
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name=f"keeper-{kit.name}", daemon=True)
        self.failed = False

    def start(self) -> Keeper:
        self._thread.start()
        return self

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def wait(self) -> None:
        """Until it is stopped or given up."""
        self._thread.join()

    def _keep(self) -> None:
        fast = 0
        while not self._stopping.is_set():
            self._before()
            begun = time.monotonic()
            with self._guard:
                if self._stopping.is_set():
                    return
                with self.log.open("ab") as log:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-u", "-m", "isthmus.deploy.launch", str(self.kit.path)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, **self._environment},
                        start_new_session=True,
                    )
            code = self._process.wait()
            if self._stopping.is_set():
                return
            fast = fast + 1 if time.monotonic() - begun < TOO_FAST else 0
            if fast >= TRIES:
                logger.error(
                    "%s ended %d times at once (code %d), giving up: see %s", self.kit.name, fast, code, self.log
                )
                self.failed = True
                return
            logger.warning("%s ended (code %d); starting it again", self.kit.name, code)
            self._stopping.wait(PAUSE)

    def stop(self) -> None:
        """End the process and what it started; returns when they are gone."""
        self._stopping.set()
        with self._guard:
            process = self._process
        if process is not None:
            family = [process.pid, *descendants(process.pid)]
            end(family)
        if self._thread.is_alive():
            self._thread.join()


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def end(pids: list[int]) -> None:
    """Ask processes to end, and make them after a while."""
    from isthmus.deploy.heartbeat import is_alive

    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            if not any(is_alive(pid) for pid in pids):
                return
            time.sleep(0.05)
