"""``docs/deployment.md`` names every module of the package, and no file that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "isthmus"
PAGE = (ROOT / "docs" / "deployment.md").read_text()


def test_every_module_is_on_the_page() -> None:
    modules = {path.name for path in (PACKAGE / "deploy").glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if name not in PAGE} == set()


def test_every_file_on_the_page_exists() -> None:
    named = set(re.findall(r"[\w/]+\.py\b", PAGE))
    places = (PACKAGE / "deploy", PACKAGE, ROOT)
    assert {name for name in named if not any((place / name).is_file() for place in places)} == set()
