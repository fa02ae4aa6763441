"""Operating-system processes: whether one is alive, its descendants, ending them, ending with the parent.

Used by every process of a federation and by the commands that start them.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import signal
import threading
import time
from pathlib import Path

PARENT_CHECK_INTERVAL = 0.5
KILL_AFTER = 3.0
"""Seconds between SIGTERM and SIGKILL."""
JOB_MODULES = (b"runner_process", b"worker_process")
"""Modules of NVIDIA FLARE that a job process runs, at the server and at a client."""


def exit_with_parent() -> None:
    """End this process at once when its parent does.

    A job process whose parent was killed would otherwise run on for seconds and write beside its successor.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_INTERVAL)
        os._exit(9)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def interrupt_on_terminate() -> None:
    """Handle SIGTERM like Ctrl-C, so that a service manager's stop ends the processes we started too. SIGINT is set as
    well: a shell starts background commands with it ignored.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)


def user() -> str:
    """Who runs this process; the number of one that has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def hold(path: Path) -> int | None:
    """Lock a file that says this process's number, for as long as the process lives, whatever program it becomes.

    Returns the number of the process that holds it, if another one does. A number alone would not do: it is given to
    other processes, and in a container it is 1 at every start.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            os.close(descriptor)
        if (pid := holder(path)) is not None:
            return pid
        time.sleep(0.05)  # somebody only looked who holds it
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    os.set_inheritable(descriptor, True)
    return None


def holder(path: Path) -> int | None:
    """The number of the process that holds a file, if one does."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read())
    except (OSError, ValueError):
        pass
    return None


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def descendants(pid: int) -> list[int]:
    """Children of a process, and their children."""
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


def jobs_of(pid: int) -> list[int]:
    """Processes of the jobs that a parent process runs."""
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if any(name in Path(f"/proc/{child}/cmdline").read_bytes() for name in JOB_MODULES):
                found.append(child)
    return found


def names_of_jobs(pid: int, pattern: re.Pattern[str]) -> frozenset[str]:
    """What of the command lines of a parent's jobs has the form of a job's name."""
    found: set[str] = set()
    for child in jobs_of(pid):
        with contextlib.suppress(OSError):
            found.update(match[0] for match in pattern.finditer(Path(f"/proc/{child}/cmdline").read_text("latin-1")))
    return frozenset(found)


def terminate(pids: list[int]) -> None:
    """Send SIGTERM, and after a few seconds SIGKILL; returns when all are gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + KILL_AFTER
        while time.monotonic() < deadline:
            if not any(is_alive(pid) for pid in pids):
                return
            time.sleep(0.05)
