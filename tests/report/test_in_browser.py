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
from isthmus.report.tradeoff import Point, write_tradeoff


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


OUTSIDE = """[...document.querySelectorAll('.plot svg text')].filter(text => {
  const box = text.getBoundingClientRect(), svg = text.closest('svg').getBoundingClientRect();
  return box.left < svg.left - 1 || box.right > svg.right + 1 || box.bottom > svg.bottom + 1; })
  .map(text => text.textContent)"""
"""Texts that leave their figure."""


NAMELESS = """[...document.querySelectorAll('table, [role=img], [role=region], progress')]
  .filter(e => !e.ariaLabel && !e.caption).map(e => e.outerHTML.slice(0, 80))"""
"""What a screen reader could not announce."""
LEVELS = """(levels => levels.filter((level, i) => level > (i ? levels[i - 1] : 0) + 1))(
  [...document.querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1]))"""
"""Headings more than one level below the one before."""
CONTRAST = """(() => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  return [...document.querySelectorAll('rect + text[pointer-events=none]')].map(text => {
    const [a, b] = [text, text.previousElementSibling].map(e => light(getComputedStyle(e).fill));
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }); })()"""
"""Of the letters on the cells of a heat map, to their cells."""


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
    assert page.evaluate(OUTSIDE) == []
    # Where the table is wider than the page it can be moved, also with keys.
    hidden = page.evaluate("(t => t.scrollWidth - t.clientWidth)(document.querySelector('.scroll.wide'))")
    assert hidden <= 0 or page.evaluate("document.querySelector('.scroll.wide').tabIndex") == 0
    assert hidden <= 0 or width < 1400
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
    assert dark == (scheme == "dark")
    page.context.close()


@pytest.mark.parametrize("width", [390, 1400])
def test_long_names_are_cut_in_their_middle_and_ticks_are_whole(started: Any, tmp_path: Path, width: int) -> None:
    folders = [
        write_run(tmp_path / str(secure), "fedavg", rounds=10, settings={"secure_sum": secure, "backbone": backbone})
        for secure, backbone in ((True, "a_backbone_of_my_own_in_a_file"), (False, "another_backbone_of_my_own"))
    ]
    page, _ = opened(started, write_report(folders, tmp_path / "report.html").as_uri(), width, "light")
    assert page.evaluate(OUTSIDE) == []
    texts = page.evaluate("[...document.querySelectorAll('#f0-bytes text')].map(text => text.textContent)")
    first = [text for text in texts if text.endswith(" up")]
    assert len(set(first)) == 2 and all("…" in text for text in first)
    ticks = page.evaluate("[...document.querySelectorAll('#f0-val text')].map(text => text.textContent)")
    rounds = [float(text) for text in ticks if "%" not in text and text != "round"]
    assert len(rounds) > 1 and all(tick % 1 == 0 for tick in rounds)
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screen_reader_finds_names_and_levels_and_letters_can_be_read(
    started: Any, pages: dict[int, Path], scheme: str
) -> None:
    page, _ = opened(started, pages[2].as_uri(), 1200, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait_for_function("document.querySelectorAll('.numbers table').length == 9")
    assert page.evaluate(NAMELESS) == [] and page.evaluate(LEVELS) == []
    letters = page.evaluate(CONTRAST)
    assert len(letters) > 5 and min(letters) >= 4.5
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
        page, problems = opened(started, address, 390, "light")
        assert "round 15 of 50" in page.inner_text("body") and page.locator(".curve").count() == 4
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ticks = page.evaluate("[...document.querySelectorAll('.live span')].map(s => s.getBoundingClientRect().left)")
        assert len(ticks) >= 10 and min(ticks) >= 0  # three heights or more, and two rounds, of each picture
        assert page.evaluate(NAMELESS) == [] and page.evaluate(LEVELS) == []
        heights = page.evaluate("[...document.querySelectorAll('.live .y')].map(s => s.textContent)")
        assert {"0 %", "80 %"} <= set(heights) and all(len(height) <= 5 for height in heights)
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "result.json").write_text(json.dumps({"method": "fedavg"}))
        page.wait_for_selector("text=The run is finished", timeout=10_000)
        assert not [problem for problem in problems if "favicon" not in problem]
        page.context.close()
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1400, "dark")])
def test_names_of_the_trilemma_lie_on_nothing(started: Any, tmp_path: Path, width: int, scheme: str) -> None:
    points = [
        Point("local", "general", 0.25, None, 0, {}),
        Point("fedspray", "general", 0.25, 0.01, 700_000, {"server": (0.4, "labels: 4 of 10")}),
        Point("fedavg", "general", 0.22, None, 776_000, {}, untried={"server": "inputs"}),
        Point("fedavg:secure_sum=true", "general", 0.22, None, 900_000, {}),
        Point("central", "general", 0.3, None, 0, {}, "all data in one place"),
    ]
    rows = [[point.method, point.ran] for point in points]
    out = write_tradeoff(
        points, ["server"], "csbm", ["method", "ran with"], rows, ["A note."], tmp_path / "t.html", "auprc"
    )
    page, problems = opened(started, out.as_uri(), width, scheme)
    assert problems == [] and page.evaluate(OUTSIDE) == []
    assert page.evaluate(NAMELESS) == [] and page.evaluate(LEVELS) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    crossing = page.evaluate(
        """(() => {
          const names = ["local", "fedspray", "fedavg", "fedavg:secure_sum=true", "central"];
          const boxes = [...document.querySelectorAll('#f0 svg text')].filter(t => names.includes(t.textContent))
            .concat([...document.querySelectorAll('#f0 svg circle, #f0 svg path[stroke-width]')])
            .map(e => [e.textContent.slice(0, 30), e.getBoundingClientRect()]);
          return boxes.slice(0, names.length).flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
            p.left < q.right && q.left < p.right && p.top + 3 < q.bottom - 3 && q.top + 3 < p.bottom - 3)
            .map(([b]) => [a, b])); })()"""
    )
    assert crossing == []
    assert "test AUPRC, %" in page.evaluate("[...document.querySelectorAll('#f0 svg text')].map(t => t.textContent)")
    # A method that sends nothing has a place of its own on the axis; what was not attacked is a diamond.
    assert "0" in page.evaluate("[...document.querySelectorAll('#f0 svg text')].map(t => t.textContent)")
    assert page.locator("#f0 svg circle").count() == 3
    page.context.close()
