"""The published tables: grammar, facts of the data, search, and what a slip in a file costs."""

from __future__ import annotations

import re

import pytest

from isthmus.errors import ConfigError, DataError
from isthmus.papers.cells import Cell, Published, parse_cell
from isthmus.papers.tables import Table, find_tables, load_paper, matching, paper_names, read_paper, select

TABLES = {
    "fedstruct": [
        "10.1",
        "10.2",
        "10.3",
        "6.4a",
        "6.4b",
        "6.4c",
        "6.4d",
        "6.4e",
        "6.4f",
        "check.chameleon",
        "check.profiles",
        "check.walks",
    ],
    "fedggr": [
        "8.2",
        "check.printed",
        "check.decay",
        "9.1",
        "4.controls",
        "10.encoders",
        "4.graph",
        "10.protections",
        "8.3",
        "4.backbones",
        "4.k",
        "4.widths",
    ],
    "fedtad": ["10.1", "check.last", "check.rows", "check.causes"],
    "rivals": ["fedstruct", "fedggr", "hifgl"],
    "hifgl": ["9.1", "9.2", "9.3", "9.4", "9.5", "9.6", "9.7", "check.pubmed", "check.protocols"],
    "fedspray": ["8.2", "8.3", "8.5", "4.lambda1", "4.ds", "4.motivation", "check.teacher", "check.last"],
    "fedstar": ["8.1", "8.2", "8.3", "8.4", "8.10", "4.clients", "check.fedper", "check.splits"],
}


def table(name: str) -> Table:
    (found,) = find_tables(name)[1]
    return found


def cell(name: str, only: str) -> Cell:
    (found,) = select([table(name)], only)
    return found


# -- the grammar -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mean", "spread", "gain", "approximate"),
    [
        ("79.34+-.85", 79.34, 0.85, None, False),
        ("66.3", 66.3, None, None, False),
        ("75.26+-2.00 (-0.13)", 75.26, 2.0, -0.13, False),
        ("~76", 76.0, None, None, True),
        ("?", None, None, None, False),
    ],
)
def test_a_cell_is_read(
    text: str, mean: float | None, spread: float | None, gain: float | None, approximate: bool
) -> None:
    assert parse_cell(text) == Published(text, mean, spread, gain, approximate)


def test_fractions_become_percent_but_gains_do_not() -> None:
    assert parse_cell(".8095+-.0149 (80.14)", fraction=True) == Published(".8095+-.0149 (80.14)", 80.95, 1.49, 80.14)


def test_an_absent_cell() -> None:
    assert parse_cell("-") is None


@pytest.mark.parametrize(
    "text", ["", "79.34+-", "79.34±.85", "79,34", "79.34 +- .85", "1e3", "nan", "79.34+-.85 (", "--", "-3"]
)
def test_what_is_no_cell(text: str) -> None:
    with pytest.raises(DataError, match="is not a cell"):
        parse_cell(text)


# -- the data --------------------------------------------------------------------------------------


def test_every_table_is_there() -> None:
    assert paper_names() == sorted(TABLES)
    assert {name: [table.key for table in load_paper(name).tables] for name in TABLES} == TABLES


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("fedstruct/10.1", 9 * 18 + 6),
        ("fedstruct/10.2", 17 * 18 + 2 * 9 + 2 * 6),
        ("fedstruct/10.3", 6 * 18 + 6),
        ("fedggr/8.2", 84),
        ("hifgl/9.1", 27),
        ("hifgl/9.2", 33),
        ("fedspray/8.2", 168),
        ("fedstar/8.1", 32),
        ("fedstar/8.10", 9),
    ],
)
def test_no_cell_is_lost(name: str, cells: int) -> None:
    assert len(table(name).cells) == cells


@pytest.mark.parametrize(
    ("name", "only", "mean", "spread"),
    [
        ("fedstruct/10.1", "fedsgd cora 10", 66.00, 1.51),
        ("fedstruct/10.1", "central photo", 94.10, 0.30),
        ("fedstruct/10.2", "fedavg gnn cora random", 64.64, 1.87),
        ("fedstruct/10.2", "h2v-f pubmed k-means", 85.47, 0.57),
        ("fedstruct/10.3", "gnn+n2v ratings louvain", 40.96, 0.33),
        ("fedggr/8.2", "fedggr computers 3", 89.8, 0.1),
        ("hifgl/9.1", "hifgl-graphsage cora", 86.42, 2.88),
        ("hifgl/9.3", "acc 16", 26.02, None),
        ("fedspray/8.2", "fedspray wikics sgc min", 46.60, 0.0),
        ("fedstar/8.1", "fedstar bio-sn-cv", 69.49, 1.81),
    ],
)
def test_single_numbers(name: str, only: str, mean: float, spread: float | None) -> None:
    found = cell(name, only).published
    assert (found.mean, found.spread) == (pytest.approx(mean), spread if spread is None else pytest.approx(spread))


def test_rows_that_stand_in_two_tables_agree() -> None:
    clients, partitions = table("fedstruct/10.1"), table("fedstruct/10.2")
    rows = [row for row in clients.rows if row in partitions.rows]
    assert len(rows) == 9
    for row in rows:
        for column in clients.columns:
            (a,) = [c for c in clients.cells if (c.row, c.column, c.parts) == (row, column, ("10 clients",))]
            (b,) = [c for c in partitions.cells if (c.row, c.column, c.parts) == (row, column, ("random",))]
            assert a.published == b.published, (row, column)
            assert a.run == b.run, (row, column)


def test_printed_gains_follow_from_the_accuracies() -> None:
    """HiFGL spec, section 12.17, and FedStar's gains: a slip in a transcribed digit would show."""
    for name, tolerance in (("hifgl/9.1", 0.06), ("fedstar/8.1", 0.021)):
        found = table(name)
        assert found.gain is not None
        means = {(c.row, c.column): c.published.mean for c in found.cells}
        checked = 0
        for c in found.cells:
            if c.published.gain is None:
                continue
            low = means[found.gain.low, c.column]
            high = next(
                (means[row, c.column] for ending, row in found.gain.high.items() if c.row.endswith(ending)), None
            )
            assert c.published.mean is not None and low is not None
            gain = c.published.mean - low if high is None else 100 * (c.published.mean - low) / (high - low)
            assert gain == pytest.approx(c.published.gain, abs=tolerance), c.name
            checked += 1
        assert checked >= 24


def test_misprints_are_told_and_corrected() -> None:
    found = cell("fedstruct/10.1", "local pubmed 5")
    assert found.published.mean == 79.0
    assert [note.printed for note in found.notes] == ["9.00+-.67"]
    assert cell("fedstruct/10.2", "central mlp cora").notes[0].printed == "65.47+-0.019"


def test_a_number_for_all_parts_is_one_cell() -> None:
    found = cell("fedstruct/10.1", "central gnn cora")
    assert found.parts == ("5 clients", "10 clients", "20 clients")
    assert found.run["clients"] == 10


def test_settings_of_rows_do_not_hide_those_of_columns() -> None:
    assert cell("fedspray/8.5", "fedavg e=10 all").run["local_epochs"] == 10
    assert cell("fedggr/8.2", "fedavg-gcn computers 3").run["split"] == "60/20/20"


@pytest.mark.parametrize("paper", TABLES)
def test_every_cell_says_how_it_is_run(paper: str) -> None:
    for found in load_paper(paper).tables:
        for c in found.cells:
            assert c.skip is not None or {"method", "dataset", "split"} <= set(c.run), c.name
        names = [c.name for c in found.cells]
        assert len(set(names)) == len(names)


# -- finding tables and cells ----------------------------------------------------------------------


def test_tables_by_key_alias_and_section() -> None:
    assert table("fedstruct/10.1") is table("fedstruct/table2") is table("FedStruct/Table2/")
    assert [t.key for t in find_tables("fedstar/8")[1]] == ["8.1", "8.2", "8.3", "8.4", "8.10"]
    assert [t.key for t in find_tables("fedstruct/6.4")[1]] == ["6.4a", "6.4b", "6.4c", "6.4d", "6.4e", "6.4f"]
    assert [t.key for t in find_tables("fedstar/8.1")[1]] == ["8.1"]
    assert table("fedstruct/fig4a") is table("fedstruct/figure4a") is table("fedstruct/6.4a")


def test_unknown_paper_and_table_list_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"unknown paper 'fedstrut': did you mean 'fedstruct'\?.*hifgl"):
        find_tables("fedstrut/10.1")
    with pytest.raises(ConfigError, match=r"unknown table of fedggr 'table9'.*8\.2.*table3"):
        find_tables("fedggr/table9")


def test_words_pick_cells() -> None:
    found = select([table("fedstruct/10.1")], "cora 10")
    assert {c.column for c in found} == {"Cora"}
    assert all(c.parts == ("10 clients",) or len(c.parts) == 3 for c in found)
    assert len(found) == 10


def test_or_joins_cells_in_the_order_of_the_table() -> None:
    found = select([table("fedstruct/10.1")], "20 fedsgd cora or fedsgd cora 5 or 5 cora fedsgd")
    assert [c.parts for c in found] == [("5 clients",), ("20 clients",)]
    with pytest.raises(ConfigError, match="matches 'corra'"):
        select([table("fedstruct/10.1")], "fedsgd cora or corra")


@pytest.mark.parametrize(
    ("only", "rows"),
    [
        ("h2v", {"FedStruct H2V"}),  # a whole word goes before a piece of one
        ("h2v-f", {"FedStruct H2V-F"}),
        ("FEDST", {"FedStruct DEG", "FedStruct FED*", "FedStruct H2V", "FedStruct H2V-F"}),
        ("local", {"Local GNN"}),
    ],
)
def test_whole_words_then_pieces_then_beginnings(only: str, rows: set[str]) -> None:
    assert {c.row for c in select([table("fedstruct/10.1")], only)} == rows


def test_numbers_are_not_beginnings() -> None:
    assert matching(table("fedstruct/10.1").cells, "1") == []
    assert {c.parts for c in matching(table("fedstruct/10.1").cells, "5 fedsgd cora")} == {("5 clients",)}


@pytest.mark.parametrize("name", ["FE GIN / GCN", "fe gin  /  gcn"])
def test_the_printed_name_means_that_cell_alone(name: str) -> None:
    (found,) = select([table("fedstar/8.10")], name)
    assert (found.row, found.column) == ("FE GIN", "GCN")
    assert {c.name for c in select([table("fedstar/8.10")], "gin gcn")} == {
        "FE GIN / GCN",
        "FE GCN / GIN",
    }  # words cannot tell them apart


def test_no_such_cell_lists_rows_and_columns() -> None:
    with pytest.raises(
        ConfigError, match=r"no cell of fedstruct/10\.1 matches 'corra 10'.*FedSGD GNN.*Cora.*10 clients"
    ):
        select([table("fedstruct/10.1")], "corra 10")


# -- a file with a slip ----------------------------------------------------------------------------

MINI = """
title = "T"
cite = "C"
runs = 2
spread = "population"
[label]
"A" = { method = "local" }
"X" = { dataset = "cora" }
"p" = { clients = 2 }
"q" = { clients = 3 }
[[table]]
key = "1"
title = "t"
run = { split = "10/10/80" }
columns = ["X"]
parts = ["p", "q"]
rows = [["A", "1.0+-.1 / 2.0"]]
[[table.note]]
only = "A p"
note = "n"
"""


def test_a_small_file() -> None:
    (found,) = read_paper("mini", MINI).tables
    assert [(c.name, c.run["clients"], len(c.notes)) for c in found.cells] == [("A / X / p", 2, 1), ("A / X / q", 3, 0)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"1.0+-.1 / 2.0"', '"1.0+-.1 / 2.0 / 3.0"', "3 numbers for 2 parts"),
        ('"1.0+-.1 / 2.0"', '"1.0+-.1 / 2.0", "3"', "2 numbers for 1 columns"),
        ('"1.0+-.1 / 2.0"', '"1.0+-.1 / two"', "'two' is not a cell"),
        ('["A", "1.0', '["B", "1.0', "unknown label in table 1 'B'"),
        ('only = "A p"', 'only = "A z"', "no cell matches the note"),
        ('spread = "population"', 'spread = "sample"', "unknown kind of spread"),
        ('method = "local"', 'unit = "kg", method = "local"', "unknown unit"),
        ('method = "local"', "rounds = 3", "no method"),
        ('key = "1"', 'key = "1"\nreference = "Z"', "no row 'Z'"),
        ('key = "1"', 'key = "1"\nalias = ["1"]', "1 names two tables"),
        ('title = "t"', "", "KeyError"),
        ("runs = 2", "runs = = 2", "TOMLDecodeError"),
    ],
)
def test_a_slip_is_named(old: str, new: str, message: str) -> None:
    assert old in MINI
    with pytest.raises(DataError, match=re.escape(message)):
        read_paper("mini", MINI.replace(old, new))
