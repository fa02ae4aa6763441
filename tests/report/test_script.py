"""The script of a report is JavaScript that a browser can read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from isthmus.report.style import SCRIPT


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "script.js").write_text(SCRIPT)
    checked = subprocess.run(["node", "--check", str(tmp_path / "script.js")], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
