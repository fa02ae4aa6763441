"""The command's first seconds."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from isthmus import __version__

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

INTERRUPTED = """
import os, signal, sys, time

class Interrupting:
    # Ctrl-C while isthmus.cli.main is imported.
    def find_spec(self, name, path=None, target=None):
        if name == "isthmus.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["isthmus", "methods"]
from isthmus.cli.entry import entry
sys.exit(entry())
"""


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)


def test_ctrl_c_during_imports_is_quiet() -> None:
    ended = python("-c", INTERRUPTED)
    assert ended.returncode == 130
    assert ended.stderr.strip() == "interrupted" and ended.stdout == ""


def test_the_version_waits_for_nothing() -> None:
    code = (
        "import sys; sys.argv = ['isthmus', '--version']; from isthmus.cli.entry import entry; entry(); "
        "print('torch' in sys.modules)"
    )
    assert python("-c", code).stdout.split("\n")[:2] == [f"isthmus {__version__}", "False"]


def test_the_script_is_this_one() -> None:
    assert tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]["isthmus"] == "isthmus.cli.entry:entry"
    ended = python("-m", "isthmus.cli.entry", "nonsense")
    assert ended.returncode == 2 and "No such command 'nonsense'" in ended.stderr
