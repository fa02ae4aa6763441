"""The notebooks in ``docs/notebooks`` run from top to bottom, in this process; the tutorial is run in a kernel."""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.methods.registry import METHODS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
SHOWS = {
    "quick_start": ("to local, paired", "score_rule"),
    "own_graph": ("lab-0", "tensor("),
    "new_method": ("trimmed", "to fedavg, paired"),
    "privacy_audit": ("client", "pooled test accuracy"),
    "reading_a_report": ("report.html", "pooled test accuracy"),
}


@pytest.fixture(autouse=True)
def methods() -> Iterator[None]:
    yield
    METHODS._entries.pop("trimmed", None)  # other tests are about our own methods


def run(notebook: Any, name: str) -> str:
    """Everything the cells print, and the value of each cell's last line."""
    module = types.ModuleType(f"notebook_{name}")
    sys.modules[module.__name__] = module
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            for cell in notebook.cells:
                if cell.cell_type != "code":
                    continue
                lines = ast.parse(cell.source)
                last = lines.body.pop() if isinstance(lines.body[-1], ast.Expr) else None
                exec(compile(lines, f"{name}.ipynb", "exec"), module.__dict__)
                if isinstance(last, ast.Expr):
                    value = eval(compile(ast.Expression(last.value), f"{name}.ipynb", "eval"), module.__dict__)
                    printed.write(f"{value!r}\n")
    finally:
        del sys.modules[module.__name__]
    return printed.getvalue()


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_a_notebook(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    shown = run(notebook, name)
    for said in SHOWS[name]:
        assert said in shown, shown


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(SHOWS)
