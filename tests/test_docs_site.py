"""The sources of the documentation site: every page of the navigation, every command, every public name, and a check of
links that can fail. `make docs` builds the site itself.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import isthmus

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return tool("build_docs")


def test_every_page_of_the_navigation_is_there(build: ModuleType, tmp_path: Path) -> None:
    build.write_pages(tmp_path)
    named = [page for _, part in build.NAV for page in ([part] if isinstance(part, str) else [p for _, p in part])]
    assert len(named) == len(set(named)) and not [page for page in named if not (tmp_path / page).is_file()]
    # Every page of docs/ itself is named; of methods, results and specifications the site lists more.
    assert not [path.name for path in (ROOT / "docs").glob("*.md") if path.name not in named]
    # A page that the navigation does not name is listed all the same; results and specifications list their own.
    (tmp_path / "new.md").write_text("# Something new\n")
    assert '{ "Something new" = "new.md" }' in build.settings(tmp_path)
    commands = (tmp_path / "commands.md").read_text()
    assert "## `isthmus run`" in commands and "## `isthmus data check`" in commands and "`--overwrite`" in commands
    api = (tmp_path / "api.md").read_text()
    assert all(f"### `isthmus.{name}`" in api for name in isthmus.__all__)
    assert "- methods: Names, with own settings" in api


def test_links_are_those_of_the_site(build: ModuleType) -> None:
    page = ROOT / "docs" / "methods" / "fedstar.md"
    text = (
        "[a](../results/README.md#x) [b](../../src/isthmus/errors.py) [c](../../README.md) [d](https://x.org) [e](#h)"
    )
    assert build.relinked(text, page) == ("[a](../results/index.md#x) b [c](../index.md) [d](https://x.org) [e](#h)")
    assert build.relinked("[t](docs/tutorial.ipynb)", ROOT / "README.md") == "[t](tutorial.md)"


def test_the_check_of_built_links_can_fail(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="one"></h1><a href="b.html#two">x</a><a href="#one">y</a>')
    (tmp_path / "b.html").write_text('<h1 id="two"></h1><a href="a.html#three">x</a><img src="c.png">')
    assert build.broken(tmp_path) == ["b.html: a.html#three has no such heading", "b.html: c.png is not there"]


def test_first_steps_are_found() -> None:
    first = tool("first_steps")
    found = [step for page in first.PAGES if page.endswith(".md") for step in first.steps(ROOT / page)]
    assert sum(step.startswith(".venv/bin/isthmus") for step in found) > 10
    assert any(step.startswith("python\n") and "isthmus.run" in step for step in found)
