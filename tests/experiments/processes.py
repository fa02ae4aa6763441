"""Real processes of the command line. The fork server has torch loaded already, so that a process costs little and can
be killed often.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path


def command_line(arguments: list[str], output: str) -> None:
    """What ``python -m isthmus.cli.main`` does, with stdout and stderr in files."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    from isthmus.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(arguments))


def start(arguments: list[str], output: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["isthmus.cli.main", "isthmus.experiments.run"])
    process = context.Process(target=command_line, args=(arguments, str(output)))
    process.start()
    return process


def wait_for_lines(path: Path, count: int, process: BaseProcess) -> int:
    """Wait until a run has evaluated ``count`` rounds, or its process has ended; returns how many there are."""
    found, deadline = 0, time.monotonic() + 60
    while process.is_alive() and time.monotonic() < deadline:
        found = path.read_bytes().count(b"\n") if path.exists() else 0
        if found >= count:
            break
        time.sleep(0.001)
    return found
