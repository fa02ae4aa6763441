"""Figures of the papers: drawn from our means, and the papers' claims checked against them."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from isthmus.errors import DataError
from isthmus.papers.figures import Drawing, draw
from isthmus.papers.judge import Comparison, compare_table
from isthmus.papers.svg import Map, Mark, Series, chart, heat_maps, scatter
from isthmus.papers.tables import Table, load_paper, matching, paper_names, read_paper

PAPER = """
title = "A Paper"
cite = "Somebody, 2020"
runs = 2
spread = "population"
run = { split = "10/10/80" }
[label]
"a <5" = { dataset = "cora" }
"b" = { dataset = "citeseer" }
"c" = { dataset = "pubmed" }
"Ours" = { method = "fedavg" }
"Theirs" = { method = "local" }
[[table]]
key = "1"
title = "t"
figure = true
plot = { PLOT }
columns = ["a <5", "b", "c"]
rows = [["Ours", "?", "?", "?"], ["Theirs", "?", "?", "?"]]
"""
MEANS = {
    ("Ours", "a <5"): 0.8, ("Ours", "b"): 0.79, ("Ours", "c"): 0.81,
    ("Theirs", "a <5"): 0.82, ("Theirs", "b"): 0.6, ("Theirs", "c"): 0.4,
}  # fmt: skip


def drawn(table: Table, rows: list[Comparison], results: Any) -> Drawing:
    """The only figure of a table."""
    (plot,) = table.plots
    found = draw(table, plot, rows, results)
    assert found is not None
    return found


def compared(plot: str) -> tuple[Table, list[Comparison], Any]:
    (table,) = read_paper("mini", PAPER.replace("PLOT", plot)).tables
    curve = {"round": [1, 2], "test": [0.1, 0.2], "clients": {"client-0": [0.3, None]}}
    clients = {"Ours": (0.5, 0.4), "Theirs": (0.3, 0.45)}

    def results(cell: Any) -> dict[int, dict[str, Any]]:
        score = MEANS[cell.row, cell.column]
        rows = [
            {"client": f"client-{k}", "test_score": share / (1 + seed), "test_minority": share / (2 + seed)}
            for seed in range(2)
            for k, share in enumerate(clients[cell.row])
        ]
        return {
            seed: {
                "seed": seed,
                "score": score + 0.01 * seed,
                "curve": curve,
                "per_client": rows[2 * seed : 2 * seed + 2],
            }
            for seed in range(2)
        }

    return table, compare_table(table, table.cells, results), results


def test_lines_and_bars_stand_over_the_columns_in_their_order() -> None:
    for kind in ("lines", "bars"):
        table, rows, results = compared(f'kind = "{kind}", axis = "data", claim = "C."')
        picture = drawn(table, list(reversed(rows)), results).picture
        texts = [element.text for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
        assert [text for text in texts if text in table.columns] == ["a <5", "b", "c"]
        assert {"Ours", "Theirs", "data", "accuracy, %"} <= set(texts)
    assert draw(table, table.plots[0], [], results) is None


def test_a_plot_shows_the_cells_that_its_words_pick() -> None:
    table, rows, results = compared('claim = "C.", cells = ["theirs b", "theirs c"], holds = ["Theirs > Ours"]')
    picture, verdict = drawn(table, rows, results)
    texts = [element.text for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in table.columns] == ["b", "c"] and "Ours" not in texts
    assert verdict == "Claimed: C. Ours: Theirs above Ours: not run."
    with pytest.raises(DataError, match="table 1: no cell matches the plot's 'theirs d'"):
        compared('claim = "C.", cells = ["theirs d"]')


def test_bars_of_clients_are_those_of_the_first_seed() -> None:
    plot = 'kind = "client-bars", claim = "C.", cells = ["b"], holds = ["Ours > Theirs", "flat Ours 5"]'
    table, rows, results = compared(plot)
    picture, verdict = drawn(table, rows, results)
    texts = [element.text for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"client-0", "client-1", "Ours", "Theirs"} <= set(texts)
    told = "Claimed: C. Ours: Ours lies above Theirs at 1 of 2 places (not at client-1); Ours"
    assert verdict == f"{told} is not flat (its values span 10.0 points)."
    table, rows, results = compared(f'{plot}, score = "test_minority"')
    assert drawn(table, rows, results).verdict == f"{told} is flat (its values span 5.0 points)."


def test_a_table_may_have_several_plots() -> None:
    text = PAPER.replace("plot = { PLOT }", 'plot = [{ claim = "A." }, { kind = "bars", claim = "B." }]')
    (table,) = read_paper("mini", text).tables
    assert [plot.claim for plot in table.plots] == ["A.", "B."]


def test_curves_come_from_records() -> None:
    table, rows, results = compared('kind = "curves", claim = "C.", cells = ["Ours / b"]')
    picture = drawn(table, rows, results).picture
    assert "Ours / b" in picture and "Theirs" not in picture
    table, rows, results = compared('kind = "clients", claim = "C.", cells = ["Ours / b"]')
    assert "client-0" in drawn(table, rows, results).picture
    assert draw(table, table.plots[0], rows, lambda cell: {}) is None


def test_claims_about_curves_are_checked_round_by_round() -> None:
    holds = '"Ours / b > Theirs / b", "rises Ours / b"'
    table, rows, results = compared(f'kind = "curves", claim = "C.", holds = [{holds}]')
    assert drawn(table, rows, results).verdict == (
        "Claimed: C. Ours: Ours / b lies above Theirs / b at 0 of 2 places; "
        "Ours / b rises (+10.0 from the first place to the last)."
    )


def test_claims_are_checked() -> None:
    holds = (
        '"Ours > Theirs", "flat Ours 5", "flat Theirs 5", "falls Theirs", "falls Ours", "Ours > Nobody", "rises Nobody"'
    )
    table, rows, results = compared(f'claim = "C.", holds = [{holds}]')
    told = drawn(table, rows, results).verdict
    assert told.startswith(
        "Claimed: C. Ours: Ours lies above Theirs at 2 of 3 places (not at a <5); "
        "Ours is flat (its values span 2.0 points);"
    )
    assert "Theirs is not flat (its values span 42.0 points); Theirs falls (-42.0 from the first place" in told
    assert "Ours does not fall (+1.0 from the first place to the last); Ours above Nobody: not run;" in told
    assert told.endswith("Nobody: not run at two places.")


def test_a_claim_is_checked_on_the_seeds_that_both_have() -> None:
    table, _, _ = compared('claim = "C.", cells = ["<5"], holds = ["Ours > Theirs"]')
    scores = {"Ours": {0: 0.8}, "Theirs": {0: 0.85, 1: 0.6}}

    def results(cell: Any) -> dict[int, dict[str, Any]]:
        return {seed: {"seed": seed, "score": score} for seed, score in scores[cell.row].items()}

    verdict = drawn(table, compare_table(table, table.cells, results), results).verdict
    assert verdict == "Claimed: C. Ours: Ours lies above Theirs at 0 of 1 places."


def test_a_slip_in_a_plot_is_told() -> None:
    with pytest.raises(
        DataError, match=r"a plot is lines, bars, curves, clients, client-bars over rows or .*, not pie"
    ):
        compared('kind = "pie", claim = "C."')


def test_statements_of_the_papers_name_what_their_figures_show() -> None:
    for name in paper_names():
        for table in load_paper(name).tables:
            for plot in table.plots:
                chosen = [cell for words in plot.cells for cell in matching(table.cells, words)] or table.cells
                known = {cell.name for cell in chosen} | {cell.row for cell in chosen}
                known |= {
                    " / ".join([cell.row if plot.x == "columns" else cell.column, *cell.parts[:1]]) for cell in chosen
                }
                for text in plot.holds:
                    for series in text.split(" > ") if " > " in text else [text.partition(" ")[2].rsplit(" ", 1)[0]]:
                        assert series in known or text.partition(" ")[2] in known, (table.name, text)


def test_marks_on_one_another_are_named_together() -> None:
    marks = [Mark("a", 1.0, 50.0, 0.0), Mark("b", 1.1, 50.1, 1.0), Mark("c", 900.0, 80.0, None)]
    picture = scatter(marks, x="MB", y="score", shade="share")
    root = ElementTree.fromstring(picture)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "b and 1 more" in texts and "c" in texts and "1000" in texts
    fills = [element.get("fill") for element in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert fills == ["none", "rgb(8, 66, 127)", "rgb(241, 245, 249)"]


def test_a_chart_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a value"):
        chart(["a"], [Series("s", (None,))], x="", y="")


def test_heat_maps_shade_by_the_logarithm_on_one_scale_and_leave_nothing_white() -> None:
    picture = heat_maps(
        [Map("a <b>", [[1.0, None], [0.01, 0.1]]), Map("second", [[0.1, 0.0], [None, 0.1]])],
        every=1,
        note="n",
        shades=3,
    )
    root = ElementTree.fromstring(picture)
    name = "{http://www.w3.org/2000/svg}"
    groups = [
        [(path.get("fill"), path.get("d")) for path in group.iter(f"{name}path") if path.get("fill") != "none"]
        for group in root.iter(f"{name}g")
    ]
    low, middle, high = (colour for colour, _ in groups[0])
    cell = "h1v1h-1z"
    assert groups[0] == [(low, f"M0 1{cell}"), (middle, f"M1 1{cell}"), (high, f"M0 0{cell}")]
    assert len({low, middle, high}) == 3
    assert groups[1] == [(middle, f"M0 0{cell}M1 1{cell}")]
    texts = [element.text for element in root.iter(f"{name}text")]
    assert texts[:2] == ["a <b>", "second"] and "1.0e-02" in str(texts[-1])
    with pytest.raises(ValueError, match="needs a value"):
        heat_maps([Map("empty", [[None]])], every=1, note="")
