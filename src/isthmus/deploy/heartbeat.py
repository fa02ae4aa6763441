"""Processes that must not outlive those they belong to, and signs of life.

A job's process whose parent was killed would go on for seconds and write beside its successor. So every process of a
federation watches its parent and ends when it is gone.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

SECONDS = 0.5


def end_with_parent() -> None:
    """End this process, at once, when its parent does."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS)
        os._exit(9)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


class Beating:
    """Keeps a file young while this process lives and is not frozen, and its process id in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop = threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{os.getpid()}\n")
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(SECONDS):
            try:
                os.utime(self.path)
            except OSError:
                return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)


def last_beat(path: Path) -> tuple[int, float] | None:
    """Process id and age in seconds of a heartbeat, or None if there is none."""
    try:
        return int(path.read_text()), max(0.0, time.time() - path.stat().st_mtime)
    except (OSError, ValueError):
        return None


def is_alive(pid: int) -> bool:
    """Whether a process exists and is more than a leftover entry."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
