"""What a command imports before it does anything: help, mistakes and listings do not wait for large libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCHED = ("torch", "torch_geometric", "numba", "sklearn", "plotly", "pandas")


def imported_by(code: str) -> set[str]:
    shown = f"import sys\n{code}\nprint(*(name for name in {WATCHED!r} if name in sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    return set(lines[-1].split()) if lines else set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["compare", "--help"],
        ["run", "--nosuch"],
        ["nosuch"],
        ["methods"],
        ["methods", "nosuch"],
        ["datasets", "--json"],
        ["partitions"],
        ["run", "nosuch"],
        ["run", "fedavg"],
        ["run", "fedavg", "--dataset", "nosuch"],
        ["run", "fedavg", "--dataset", "./nowhere.pt"],
        ["run", "fedavg", "--dataset", "/nowhere/tables"],
        ["run", "fedavg", "--dataset", "cora", "--set", "nosuch=1"],
        ["run", "fedavg", "--config", "nowhere.toml"],
        ["run", "./nowhere.py", "--dataset", "cora"],
        ["compare", "fedavg", "nosuch", "--dataset", "cora"],
        ["resume", "nowhere"],
        ["audit", "nowhere"],
        ["watch", "nowhere"],
        ["report", "nowhere"],
        ["status", "nowhere"],
        ["predict", "nowhere", "--out", "p.csv"],
    ],
    ids=" ".join,
)
def test_lists_help_and_common_mistakes_import_nothing_large(arguments: list[str]) -> None:
    assert imported_by(f"from isthmus.cli.main import main\nmain({arguments!r})") == set()


def test_the_script_of_a_method_leaves_torch_geometric_out() -> None:
    found = imported_by("from isthmus.cli.main import main\nmain(['methods', 'fedavg'])")
    assert "torch" in found and "torch_geometric" not in found
