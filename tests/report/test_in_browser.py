"""The report and the live page in a real browser: nothing is cut off, everything is drawn, keys suffice."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import browser
from fake_runs import write_run

from isthmus.cli.watch import HOST, serve
from isthmus.report import write_report


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Reports of 2 and of 100 clients."""
    found = {}
    for clients in (2, 100):
        base = tmp_path_factory.mktemp(f"clients{clients}")
        folders = [write_run(base / m, m, clients=clients) for m in ("local", "fedavg", "fedsgd", "central")]
        found[clients] = write_report(folders, base / "report.html")
    return found


def opened(started: Any, address: str, width: int, scheme: str) -> tuple[Any, list[str]]:
    page = started.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url != address else None)
    page.goto(address)
    return page, [problem for problem in problems if not problem.startswith("data:")]


@pytest.mark.parametrize("clients", [2, 100])
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (900, "light"), (1400, "dark")])
def test_nothing_is_cut_off_and_every_figure_is_drawn(
    started: Any, pages: dict[int, Path], clients: int, width: int, scheme: str
) -> None:
    page, problems = opened(started, pages[clients].as_uri(), width, scheme)
    assert problems == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    drawn = page.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('path, rect, circle').length)"
    )
    assert len(drawn) == 9 and min(drawn) >= 2  # two clients have one pair of cross edges, drawn twice
    # Text of a figure stays inside it.
    outside = page.evaluate(
        """[...document.querySelectorAll('.plot svg text')].filter(text => {
          const box = text.getBoundingClientRect(), svg = text.closest('svg').getBoundingClientRect();
          return box.left < svg.left - 1 || box.right > svg.right + 1 || box.bottom > svg.bottom + 1; }).length"""
    )
    assert outside == 0
    # Where the table is wider than the page it can be moved, also with keys.
    hidden = page.evaluate("(t => t.scrollWidth - t.clientWidth)(document.querySelector('.scroll.wide'))")
    assert hidden <= 0 or page.evaluate("document.querySelector('.scroll.wide').tabIndex") == 0
    assert hidden <= 0 or width < 1400
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
    assert dark == (scheme == "dark")
    page.context.close()


def test_the_table_sorts_by_keys_and_series_can_be_hidden(started: Any, pages: dict[int, Path]) -> None:
    page, _ = opened(started, pages[2].as_uri(), 1200, "light")
    names = "[...document.querySelectorAll('table.results tbody th')].map(th => th.innerText.split(' ')[0].trim())"
    assert page.evaluate(names) == ["local", "fedavg", "fedsgd", "central"]
    button = page.get_by_role("button", name="score (%)")
    button.focus()
    page.keyboard.press("Enter")
    assert page.evaluate(names) == ["central", "fedsgd", "fedavg", "local"]
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("score (%)")
    page.keyboard.press("Enter")
    assert page.evaluate(names) == ["local", "fedavg", "fedsgd", "central"]
    count = "document.querySelectorAll('#f0-test path').length"
    before = page.evaluate(count)
    page.locator(".legend button", has_text="fedavg").first.focus()
    page.keyboard.press("Space")
    assert page.evaluate(count) < before
    assert page.locator(".legend button", has_text="fedavg").first.get_attribute("aria-pressed") == "false"
    # The numbers behind a figure are there as text.
    page.locator(".numbers summary").first.click()
    assert "fedsgd" in page.locator(".numbers table").first.inner_text()
    assert all(page.locator(".plot").nth(i).get_attribute("aria-label") for i in range(page.locator(".plot").count()))
    page.context.close()


def test_the_live_page_follows_a_run(started: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "fedavg", rounds=50)
    (folder / "result.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:10])
    server = serve(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://{HOST}:{server.server_address[1]}/"
        page, problems = opened(started, address, 800, "light")
        assert "round 15 of 50" in page.inner_text("body") and page.locator("polyline").count() == 4
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "result.json").write_text(json.dumps({"method": "fedavg"}))
        page.wait_for_selector("text=The run is finished", timeout=10_000)
        assert not [problem for problem in problems if "favicon" not in problem]
        page.context.close()
    finally:
        server.shutdown()
        server.server_close()
