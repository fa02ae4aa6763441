"""The table "How to do it" of docs/faq.md: every command and call in it is typed, in an empty folder."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import isthmus
from isthmus.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    tuple(cell.strip() for cell in line.strip("| \n").split(" | "))
    for line in (ROOT / "docs" / "faq.md").read_text().splitlines()
    if re.match(r"\| .* \| (yes|no) \| ", line)
]
CALLS = [
    (wanted, span)
    for wanted, possible, how in ROWS
    for span in re.findall(r"`([^`]+)`", how)
    if possible == "yes" and re.match(r"(isthmus |isthmus\.|result\.)", span) and "nodes=170000" not in span
]


def test_the_table_has_its_rows() -> None:
    assert len(ROWS) >= 24 and {possible for _, possible, _ in ROWS} == {"yes", "no"}
    typed = {wanted for wanted, _ in CALLS}
    assert {wanted for wanted, possible, how in ROWS if possible == "yes" and "](" not in how} <= typed | {
        "progress in a notebook",
        "170,000 nodes",
    }


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader would have there: a graph, tables, a network, a method."""
    folder = tmp_path_factory.mktemp("reader")
    tools = importlib.util.spec_from_file_location("first_steps", ROOT / "tools" / "first_steps.py")
    assert tools is not None and tools.loader is not None
    first_steps = importlib.util.module_from_spec(tools)
    tools.loader.exec_module(first_steps)
    (folder / "net.py").write_text(first_steps.NETWORK)
    (folder / "my_method.py").write_text((ROOT / "examples" / "fedmedian.py").read_text())
    torch.save(names()["data"], folder / "graph.pt")
    made = [sys.executable, str(ROOT / "examples" / "banks" / "make_tables.py"), "banks"]
    subprocess.run(made, cwd=folder, check=True, capture_output=True)
    return folder


def names() -> dict[str, Any]:
    """What the calls name besides isthmus itself."""
    torch.manual_seed(0)
    y = torch.arange(120) % 3
    data = Data(x=torch.randn(120, 6) + y[:, None], edge_index=torch.randint(0, 120, (2, 400)), y=y)
    data.bank = torch.arange(120) % 4
    parts = torch.arange(120) % 5
    return {
        "isthmus": isthmus,
        "data": data,
        "owner": torch.arange(120) % 3,
        "a": parts < 2,
        "b": parts == 2,
        "c": parts > 2,
    }


@pytest.mark.parametrize(("wanted", "call"), CALLS, ids=[f"{wanted}-{call}"[:60] for wanted, call in CALLS])
def test_it_works_as_printed(
    wanted: str, call: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    known = names()
    if call.startswith("isthmus "):
        if call.startswith("isthmus resume"):
            isthmus.run("fedavg", dataset="./graph.pt", clients=3, rounds=2, out="runs/mine", overwrite=True)
        if call.startswith("isthmus report") and not Path("runs/sweep/fedavg").is_dir():
            isthmus.sweep("fedavg", {"lr": [0.01, 0.1]}, dataset="./graph.pt", clients=3, rounds=2)
        assert main(shlex.split(call)[1:]) == 0, capsys.readouterr().err
        return
    if call.startswith("isthmus.resume"):
        isthmus.run("fedavg", dataset=known["data"], clients=3, rounds=2, out="runs/mine", overwrite=True)
    if call.startswith("result."):
        pytest.importorskip("pandas") if "pandas" in call else None
        known["result"] = isthmus.run(
            "fedavg", dataset=known["data"], clients=3, rounds=2, out=f"runs/{abs(hash(call))}"
        )
    assert eval(call, known) is not None
