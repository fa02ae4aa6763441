"""The examples of ``docs/python.md`` give what the page says."""

from __future__ import annotations

import doctest
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_the_examples_of_the_page(tmp_path: Path) -> None:
    parser = doctest.DocTestParser()
    test = parser.get_doctest(PAGE.read_text().replace("```", ""), {"folder": tmp_path}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) > 5
    said: list[str] = []
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(optionflags=flags)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
