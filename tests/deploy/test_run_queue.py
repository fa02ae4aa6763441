"""So many runs at once, those who submit take turns, and the place of a process that was killed is free again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.deploy import run_queue
from isthmus.deploy.run_queue import QUEUE, RunQueue, Ticket, order
from isthmus.errors import RunError


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "POLL_EVERY", 0.01)


def test_those_who_submit_take_turns() -> None:
    """Eight runs of one submitter, and then one of each of two others."""
    many = [Ticket(f"a{n}", "a", float(n)) for n in range(8)]
    others = [Ticket("b", "b", 20.0), Ticket("c", "c", 21.0)]
    assert [one.run for one in order([*many, *others], {})][:4] == ["a0", "b", "c", "a1"]
    assert [one.run for one in order([*many, *others], {"a": 9.0})][:3] == ["b", "c", "a0"], "a was served before"
    going = [Ticket("a9", "a", 0.0, 1.0), Ticket("b9", "b", 0.0, 1.0), Ticket("a8", "a", 0.0, 1.0)]
    assert [one.run for one in order([*going, *many, *others], {})][:3] == ["c", "b", "a0"], "who has the fewest"


class Submitter(threading.Thread):
    """A run that holds its place until it is told to end."""

    def __init__(self, folder: Path, run: str, by: str, begun: list[str], at_once: int = 2) -> None:
        super().__init__(daemon=True)
        self.queue, self.run_name, self.by, self.begun = RunQueue(folder, at_once), run, by, begun
        self.end, self.numbers = threading.Event(), list[int]()
        self.start()

    def run(self) -> None:
        with self.queue.turn(self.run_name, self.by, self.numbers.append):
            self.begun.append(self.run_name)
            self.end.wait(60.0)


def test_no_more_than_so_many_at_once_and_in_turn(tmp_path: Path) -> None:
    begun: list[str] = []
    threads = {}
    for run, by in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("a4", "a"), ("b1", "b")):
        threads[run] = Submitter(tmp_path, run, by, begun)
        until(lambda run=run: (tmp_path / QUEUE / run).exists() and (run in begun or threads[run].numbers))
    assert begun == ["a1", "a2"]
    assert [one.run for one in RunQueue(tmp_path).waiting()] == ["b1", "a3", "a4"]
    for ended, expected in (("a1", "b1"), ("b1", "a3"), ("a2", "a4")):
        threads[ended].end.set()
        until(lambda expected=expected: expected in begun)
    assert begun == ["a1", "a2", "b1", "a3", "a4"] and set(threads["a3"].numbers) == {1, 2}
    for thread in threads.values():
        thread.end.set()
        thread.join(30.0)
    assert RunQueue(tmp_path).waiting() == [] and not [p for p in (tmp_path / QUEUE).iterdir() if p.name[0] != "."]


def test_a_killed_process_gives_its_place_back(tmp_path: Path) -> None:
    code = (
        f"import time; from pathlib import Path; from isthmus.deploy.run_queue import RunQueue\n"
        f"with RunQueue(Path({str(tmp_path)!r}), 1).turn('a1', 'a', print): print('begun', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    begun: list[str] = []
    waiting = Submitter(tmp_path, "b1", "b", begun, at_once=1)
    until(lambda: waiting.numbers)
    assert not begun
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: begun == ["b1"])
    waiting.end.set()
    waiting.join(30.0)


def test_who_gives_up_waiting_leaves_the_queue(tmp_path: Path) -> None:
    def stopped(_: int) -> None:
        raise RunError("stopped")

    first = Submitter(tmp_path, "a1", "a", [], at_once=1)
    until(lambda: (tmp_path / QUEUE / "a1").exists())
    with pytest.raises(RunError), RunQueue(tmp_path, 1).turn("b1", "b", stopped):
        pass
    assert not (tmp_path / QUEUE / "b1").exists() and RunQueue(tmp_path).waiting() == []
    first.end.set()
    first.join(30.0)
