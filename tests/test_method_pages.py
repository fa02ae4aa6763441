"""Every method has a page that the guide links, and pages made from the code name settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isthmus.experiments.describe import settings_of
from isthmus.methods.registry import METHODS

DOCS = Path(__file__).parent.parent / "docs"
MARK = "<!-- written by tools/method_pages.py -->"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_has_a_page_that_the_guide_links(method: str) -> None:
    page = (DOCS / "methods" / f"{method}.md").read_text()
    assert f"(methods/{method}.md)" in (DOCS / "methods.md").read_text()
    if MARK not in page:
        return
    parts = {"## Who sees what", "## Settings", "## Our figures"}
    assert parts <= set(page.splitlines()), "run python tools/method_pages.py"
    named = re.findall(r"^\| `(\w+)` \|", page.partition("## Settings")[2].partition("## Our figures")[0], re.MULTILINE)
    assert set(named) <= {each.key for each in settings_of(method)}, "run python tools/method_pages.py"
    (code,) = re.findall(r"^The code: `(.+)`\.$", page, re.MULTILINE)
    assert re.search(rf'name="{method}"', (DOCS.parent / code).read_text()), "the page describes another file"
