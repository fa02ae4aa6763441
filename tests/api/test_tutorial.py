"""The tutorial notebook runs from top to bottom and shows what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "tutorial.ipynb"


def outputs(cell: Any) -> str:
    return "".join(
        str(output.get("text", "")) + "".join(map(str, output.get("data", {}).values())) for output in cell["outputs"]
    )


def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    code = [outputs(cell) for cell in notebook.cells if cell.cell_type == "code"]
    trained = next(text for text in code if "<svg" in text)
    assert "fedavg on own" in trained and "<progress" in trained, "scores, curves and a progress bar"
    assert any("(50, 0." in text for text in code), "more rounds"
    assert any("to local, paired" in text and "<table" in text for text in code)
    assert any("PlainNet(" in text for text in code)
    assert any("Explanation(id=" in text for text in code)
    assert r"\begin{tabular}" in code[-1]
    assert (tmp_path / "runs" / "tutorial" / "report.html").is_file()
