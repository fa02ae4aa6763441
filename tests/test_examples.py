"""The method in the README is the file in ``examples/``, and it passes the kit: one file plus one test line."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from isthmus.testing import check_method

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def fedmedian() -> None:
    spec = importlib.util.spec_from_file_location("fedmedian", ROOT / "examples" / "fedmedian.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_example_method_has_the_general_properties() -> None:
    ran = check_method("fedmedian")
    assert "resume_is_bit_equal" in ran and "wire_equals_declaration" in ran


def test_the_readme_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert (ROOT / "examples" / "fedmedian.py").read_text() in blocks
