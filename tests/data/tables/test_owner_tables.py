"""One owner's folder read: every number by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from table_helpers import ACCOUNTS, SCHEMA, TRANSFERS, write_owner

pl = pytest.importorskip("polars", reason="needs the extra tables")

from isthmus.data.tables.describe import draft_schema  # noqa: E402
from isthmus.data.tables.owner import owners_in, read_owner  # noqa: E402
from isthmus.data.tables.schema import parse_schema, read_schema  # noqa: E402
from isthmus.errors import DataError  # noqa: E402


def test_cells_labels_and_parts(tmp_path: Path) -> None:
    tables = read_owner(write_owner(tmp_path), "bank", seed=0)
    assert tables.ids.to_list() == ["a1", "a2", "a3", "a4", "a5"]
    np.testing.assert_array_equal(tables.features["balance"], [100, np.nan, 5.5, 7, 9])
    np.testing.assert_array_equal(tables.features["country"], [0, 1, np.nan, 0, 1])
    np.testing.assert_array_equal(tables.features["company"], [1, 0, 0, 0, 1])
    assert tables.y.tolist() == [0, 1, 0, -1, 1]
    assert tables.part.tolist() == [0, 0, 1, -1, 2]


def test_edges_inside_towards_others_and_what_nodes_learn_from_them(tmp_path: Path) -> None:
    edges = read_owner(write_owner(tmp_path), "bank", seed=0).edges
    assert list(zip(edges.source.tolist(), edges.target.tolist(), edges.weight.tolist(), strict=True)) == [
        (0, 1, 15.0),  # two transfers are one edge, their amounts added up
        (1, 2, 1.0),
    ]
    away = sorted(zip(edges.own.tolist(), edges.far.to_list(), edges.outgoing.tolist(), strict=True))
    assert away == [(0, "x1", False), (2, "x2", True)]
    np.testing.assert_array_equal(edges.features["in_count"], [1, 2, 1, 0, 0])  # the transfer from x1 counts
    np.testing.assert_array_equal(edges.features["out_sum(amount)"], [15, 1, 4, 0, 0])
    np.testing.assert_array_equal(edges.features["in_mean(amount)"], [3, 7.5, 1, np.nan, np.nan])
    days = edges.features["in_mean(day)"] - 20454  # days since 2026-01-01
    np.testing.assert_array_equal(days, [1, 1, 1, np.nan, np.nan])


def test_undirected_edges_are_one_whichever_way_they_are_listed(tmp_path: Path) -> None:
    text = TRANSFERS + "a3,a2,1,2026-01-09\n"
    schema = SCHEMA.replace("directed = true", "directed = false")
    edges = read_owner(write_owner(tmp_path, schema=schema, transfers=text), "bank", seed=0).edges
    arcs = sorted(zip(edges.source.tolist(), edges.target.tolist(), edges.weight.tolist(), strict=True))
    assert arcs == [(0, 1, 15.0), (1, 0, 15.0), (1, 2, 2.0), (2, 1, 2.0)]
    assert sorted(zip(edges.own.tolist(), edges.far.to_list(), edges.outgoing.tolist(), strict=True)) == [
        (0, "x1", False),
        (0, "x1", True),
        (2, "x2", False),
        (2, "x2", True),
    ]


@pytest.mark.parametrize(("rule", "weight"), [("sum", 15.0), ("first", 10.0)])
def test_duplicates(rule: str, weight: float, tmp_path: Path) -> None:
    schema = SCHEMA.replace('time = "day"', f'time = "day"\nduplicates = "{rule}"')
    assert read_owner(write_owner(tmp_path, schema=schema), "bank", seed=0).edges.weight[0] == weight


def test_self_loops_can_be_dropped(tmp_path: Path) -> None:
    schema = SCHEMA.replace('time = "day"', 'time = "day"\nself_loops = "drop"')
    tables = read_owner(
        write_owner(tmp_path, schema=schema, transfers=TRANSFERS + "a4,a4,9,2026-01-01\n"), "bank", seed=0
    )
    assert 3 not in tables.edges.source
    assert tables.features["in_count"][3] == 0


def test_ids_are_compared_as_the_schema_says(tmp_path: Path) -> None:
    schema = SCHEMA.replace('id = "account"', 'id = "account"\nnormalise = ["no-spaces", "upper", "no-leading-zeros"]')
    accounts, transfers = ACCOUNTS.replace("a3,no", "00A 3,no"), TRANSFERS.replace("a2,a3", " a2 ,a3")
    tables = read_owner(write_owner(tmp_path, schema=schema, accounts=accounts, transfers=transfers), "bank", seed=0)
    assert tables.ids.to_list()[2] == "A3"
    assert (1, 2) in set(zip(tables.edges.source.tolist(), tables.edges.target.tolist(), strict=True))


def test_parquet_says_the_same_as_csv(tmp_path: Path) -> None:
    plain = read_owner(write_owner(tmp_path / "csv"), "bank", seed=0)
    folder = write_owner(tmp_path / "parquet")
    for name in ("accounts", "transfers"):
        pl.read_csv(folder / f"{name}.csv", try_parse_dates=True).write_parquet(folder / f"{name}.parquet")
        (folder / f"{name}.csv").unlink()
    other = read_owner(folder, "bank", seed=0)
    assert other.ids.to_list() == plain.ids.to_list()
    for name, values in plain.features.items():
        np.testing.assert_array_equal(other.features[name], values)
    np.testing.assert_array_equal(other.edges.weight, plain.edges.weight)


def many(rows: int) -> str:
    head = ACCOUNTS.splitlines()[0].replace("part", "opened")
    lines = (f"c{i},{'yes' if i % 10 == 0 else 'no'},1,DE,no,{(37 * i) % 1000}" for i in range(rows))
    return "\n".join([head, *lines]) + "\n"


def test_stratified_split_by_the_owners_seed(tmp_path: Path) -> None:
    schema = SCHEMA.replace('split = "part"', 'split = "stratified:40/20/40"')
    folder = write_owner(tmp_path, schema=schema, accounts=many(200), transfers="from,to,amount,day\nc1,c2,1,1\n")
    tables = read_owner(folder, "bank", seed=0)
    assert [int(((tables.part == k) & (tables.y == 1)).sum()) for k in range(3)] == [8, 4, 8]
    assert [int(((tables.part == k) & (tables.y == 0)).sum()) for k in range(3)] == [72, 36, 72]
    np.testing.assert_array_equal(tables.part, read_owner(folder, "bank", seed=0).part)
    assert (tables.part != read_owner(folder, "bank", seed=1).part).any()
    assert (tables.part != read_owner(folder, "other", seed=0).part).any()


def test_split_by_time_tests_on_the_future(tmp_path: Path) -> None:
    schema = SCHEMA.replace('split = "part"', 'split = "time:opened:50/25/25"')
    folder = write_owner(tmp_path, schema=schema, accounts=many(100), transfers="from,to,amount,day\nc1,c2,1,1\n")
    part = read_owner(folder, "bank", seed=0).part
    times = (37 * np.arange(100)) % 1000
    assert [int((part == k).sum()) for k in range(3)] == [50, 25, 25]
    assert times[part == 0].max() < times[part == 1].min() and times[part == 1].max() < times[part == 2].min()


def test_several_owners_in_one_folder(tmp_path: Path) -> None:
    schema = SCHEMA.replace('split = "part"', 'split = "part"\nowner = "bank"')
    accounts = "\n".join(
        f"{line},{'bank' if i == 0 else 'north' if i < 4 else 'south'}" for i, line in enumerate(ACCOUNTS.splitlines())
    )
    folder = write_owner(
        tmp_path,
        schema=schema,
        accounts=accounts.replace("a5,yes,9,FR,yes,test", "a5,yes,9,FR,yes,train"),
        transfers="from,to,amount,day\na1,a2,1,1\na1,a4,1,1\n",
    )
    assert owners_in(folder, read_schema(folder)) == ["north", "south"]
    with pytest.raises(DataError, match="neither end"):
        read_owner(folder, "south", seed=0, only="south")


def test_a_draft_is_a_schema_that_can_be_read(tmp_path: Path) -> None:
    folder = write_owner(tmp_path)
    schema = parse_schema(draft_schema(folder).encode())
    assert schema.nodes.id == "account" and schema.nodes.labels.column == "fraud"
    assert {feature.name: feature.type for feature in schema.features} == {
        "balance": "number",
        "country": "category",
        "company": "flag",
    }
    assert schema.edges is not None and (schema.edges.source, schema.edges.target) == ("from", "to")


@pytest.mark.parametrize(
    ("values", "label", "said"),
    [
        ([f"kind-{number}" for number in range(30)], "outcome", ""),
        (
            [f"{number / 7:.3f}" for number in range(150)],
            "LABEL",
            "# outcome: 150 different values, no classes as they are",
        ),
    ],
)
def test_a_draft_never_takes_the_label_for_a_feature(values: list[str], label: str, said: str, tmp_path: Path) -> None:
    rows = "".join(f"n{number},{value},{number % 7}\n" for number, value in enumerate([*values, values[0]]))
    (tmp_path / "nodes.csv").write_text(f"id,outcome,age\n{rows}")
    draft = draft_schema(tmp_path)
    assert f'label = "{label}"' in draft and said in draft
    assert "outcome = {" not in draft and "age = {" in draft


def test_a_draft_finds_what_stands_for_an_empty_cell_among_numbers(tmp_path: Path) -> None:
    rows = "".join(f"n{number},{'NaN' if number % 3 else number},{('NA', 'DE')[number % 2]}\n" for number in range(40))
    (tmp_path / "nodes.csv").write_text(f"id,age,country\n{rows}")
    draft = draft_schema(tmp_path)
    assert draft.startswith('missing_values = ["", "NaN"]\n')
    assert 'age = { type = "number", scale = "standard", missing = "median" }' in draft
    assert 'values = ["DE", "NA"]' in draft, "in a column of texts it is one of them"
