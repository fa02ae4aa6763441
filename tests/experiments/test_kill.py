"""``kill -9`` and Ctrl-C on real processes: ``isthmus resume`` ends bit-equal."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import start, wait_for_lines
from run_helpers import assert_same_run

from isthmus.api.runs import run

ROUNDS = 50
DATASET = "csbm:nodes=300,features=16"
OPTIONS = [
    "--dataset",
    DATASET,
    "--clients",
    "3",
    "--rounds",
    str(ROUNDS),
    "--set",
    "hidden=16",
    "--set",
    "selection=best_val_acc",
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Undisturbed runs, by execution."""
    paths = {}
    for execution in ("each", "cohort"):
        paths[execution] = tmp_path_factory.mktemp("plain") / execution
        settings: dict[str, Any] = {
            "dataset": DATASET,
            "clients": 3,
            "rounds": ROUNDS,
            "hidden": 16,
            "selection": "best_val_acc",
        }
        run("fedavg", **settings, execution=execution, out=paths[execution])
    return paths


@pytest.mark.parametrize(
    ("execution", "every", "kills"), [("each", 1, 6), ("cohort", 3, 6), ("each", 0, 3), ("cohort", 1, 3)]
)
def test_killed_at_random_moments(
    execution: str, every: int, kills: int, plain: dict[str, Path], tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"moments of death: seed {seed}")  # noqa: T201  (shown by pytest if the test fails)
    dice = random.Random(seed)
    path = tmp_path / "run"
    arguments = [
        "run",
        "fedavg",
        *OPTIONS,
        "--set",
        f"execution={execution}",
        "--set",
        f"checkpoint.every={every}",
        "--out",
        str(path),
    ]
    died, reached = 0, 0
    for _ in range(kills):
        process = start(arguments, tmp_path / "log")
        if (path / "config.toml").exists() or dice.random() < 0.8:
            reached = wait_for_lines(path / "metrics.jsonl", min(ROUNDS - 2, reached + dice.randint(1, 10)), process)
        time.sleep(dice.random() * 0.03)
        process.kill()
        process.join()
        died += process.exitcode == -signal.SIGKILL
        if (path / "config.toml").exists():
            arguments = ["resume", str(path), "--json"]
    assert died >= kills - 1, "the run was faster than its killer"
    process = start(arguments if arguments[0] == "resume" else [*arguments, "--json"], tmp_path / "last")
    process.join()
    assert process.exitcode == 0, (tmp_path / "last.err").read_text()
    assert json.loads((tmp_path / "last.out").read_text()) == json.loads((path / "result.json").read_text())
    assert_same_run(path, plain[execution])


def test_the_real_command_line_killed_and_resumed(plain: dict[str, Path], tmp_path: Path) -> None:
    """The same once more with nothing prepared: ``python -m isthmus.cli.main``."""
    path = tmp_path / "run"
    module = [sys.executable, "-m", "isthmus.cli.main"]
    arguments = [
        *module,
        "run",
        "fedavg",
        *OPTIONS,
        "--set",
        "execution=each",
        "--set",
        "checkpoint.every=1",
        "--out",
        str(path),
    ]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while process.poll() is None and not (path / "metrics.jsonl").exists():
        time.sleep(0.002)
    time.sleep(random.random() * 0.3)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (path / "result.json").exists()
    done = subprocess.run(
        [*module, "resume", str(path), "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((path / "result.json").read_text()) and done.stdout.count("\n") == 1
    assert "continued after" in done.stderr and "Traceback" not in done.stderr and "Warning" not in done.stderr
    assert_same_run(path, plain["each"])


def test_ctrl_c_says_how_to_go_on(plain: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "a run"
    process = start(
        ["run", "fedavg", *OPTIONS, "--set", "execution=each", "--out", str(path), "--json"], tmp_path / "log"
    )
    assert wait_for_lines(path / "metrics.jsonl", 10, process) < ROUNDS
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join()
    output = (tmp_path / "log.err").read_text()
    assert process.exitcode == 130, output
    assert f"stopped; continue with: isthmus resume '{path}'" in output and "Traceback" not in output
    assert (tmp_path / "log.out").read_text() == ""
    process = start(["resume", str(path)], tmp_path / "last")
    process.join()
    assert process.exitcode == 0
    assert_same_run(path, plain["each"])


def test_two_processes_on_one_folder(plain: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = start(["run", "fedavg", *OPTIONS, "--set", "execution=each", "--out", str(path)], tmp_path / "first")
    wait_for_lines(path / "metrics.jsonl", 1, first)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)  # so that it cannot finish meanwhile
    second = start(["resume", str(path)], tmp_path / "second")
    second.join()
    os.kill(first.pid, signal.SIGCONT)
    first.join()
    assert second.exitcode == 4
    output = (tmp_path / "second.err").read_text()
    assert output.count("\n") == 1 and "in use by another process" in output
    assert first.exitcode == 0
    assert_same_run(path, plain["each"])
