"""A heartbeat file: it holds the process id of its writer, and its modification time is kept recent.

Written by the server job in the run folder; read by ``isthmus submit``, ``status`` and ``stop``.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

INTERVAL = 0.5


class Heartbeat:
    """Touches a file from a thread as long as this process lives and is not frozen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop = threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{os.getpid()}\n")
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                os.utime(self.path)
            except OSError:
                return

    def stop(self) -> None:
        """Stop and remove the file."""
        self._stop.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)


def read_heartbeat(path: Path) -> tuple[int, float] | None:
    """Process id and age in seconds of a heartbeat, or None if there is none."""
    try:
        return int(path.read_text()), max(0.0, time.time() - path.stat().st_mtime)
    except (OSError, ValueError):
        return None
