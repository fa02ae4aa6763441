"""Outputs that pages show under a command are what the command prints; times aside, and where the data came from."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from isthmus.api.compare import compare
from isthmus.cli.main import main
from isthmus.data.datasets import load_nodes
from isthmus.errors import DataError
from isthmus.seeds import Stream

ROOT = Path(__file__).resolve().parents[2]


def shown(page: str) -> list[tuple[str, list[str]]]:
    """Commands of a page with the lines below them, where there are any."""
    found = []
    for block in re.findall(r"^```\n\$ (.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        command, *output = block.splitlines()
        if command.startswith(".venv/bin/isthmus ") and output and not any(line.startswith("$ ") for line in output):
            found.append((command, output))
    return found


def comparable(lines: list[str]) -> list[str]:
    lines = [
        re.sub(r" \(\w+\), ", ", ", line.rstrip()) if line.startswith("data ") else line.rstrip() for line in lines
    ]
    return [line for line in lines if not line.startswith("time ")]


def test_what_running_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        load_nodes("cora", Stream(0))
    except DataError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    ((command, output),) = shown("docs/running.md")
    assert main(shlex.split(command)[1:]) == 0
    assert comparable(capsys.readouterr().out.splitlines()) == comparable(output)


def test_what_the_readme_shows_of_a_comparison(tmp_path: Path) -> None:
    """FedStruct's row aside: its first values are secret, so it differs from run to run."""
    block = re.search(r"^```\n(method +ran with.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    shown = {cells[0]: cells for cells in (re.split(r"\s{2,}", line) for line in block[1].splitlines()[1:])}
    methods = ["local", "fedavg", "central"]
    table = compare(methods, dataset="csbm:signal=2", clients=5, rounds=20, runs=2, out=tmp_path, jobs=1).table()
    for row in table.texts:
        cells = dict(zip(table.headings, row, strict=True))
        ran = cells["ran with"].removesuffix(", 20 rounds")
        printed = [cells["method"], ran, *(cells[name] for name in ("score", "to local, paired", "up", "down", "peer"))]
        assert [cell for cell in printed if cell] == shown[cells["method"]]
