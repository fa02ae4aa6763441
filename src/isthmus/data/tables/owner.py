"""One owner's folder of tables, read: ids, raw features, labels, split and edges. Nothing of it is scaled yet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.data.column_split import cut_by_time, part_by_name
from isthmus.data.split import Shares
from isthmus.data.tables.edge_table import OwnerEdges, read_edges
from isthmus.data.tables.frames import pl
from isthmus.data.tables.ids import check_filled, normalised
from isthmus.data.tables.reader import Problem, Problems, Table, find_file
from isthmus.data.tables.schema import Feature, Labels, Schema, SplitRule, read_schema
from isthmus.errors import DataError
from isthmus.seeds import Stream

PARTS = ("train", "val", "test")
LINK_KEY, LINK_KEY_BYTES = "link.key", 32
Raw = NDArray[np.float64]


@dataclass(frozen=True)
class OwnerTables:
    """What one owner holds. It is the owner's alone: ids and cells never leave.

    Args:
        owner: Name of the owner.
        schema: What the columns mean.
        ids: Id of every node, normalised.
        features: Raw values of every feature (n,): numbers and flags with NaN for an empty cell, positions of
            categories with -1. In the order of ``schema.all_features``.
        y: Class of every labelled thing, -1 without a label: of nodes, or of graphs in a graph task.
        part: 0, 1, 2 for train, val, test, -1 for none of them.
        edges: Edges inside and towards others.
        graph: Graph of every node in a graph task (n,), else None.
        graph_ids: Ids of the graphs.
        problems: Warnings met on the way.
        link_key: What ``link.key`` of the folder holds, where there is one.
    """

    owner: str
    schema: Schema
    ids: pl.Series
    features: dict[str, Raw]
    y: NDArray[np.int64]
    part: NDArray[np.int64]
    edges: OwnerEdges
    graph: NDArray[np.int64] | None
    graph_ids: pl.Series | None
    problems: Problems
    link_key: bytes | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.ids)


def read_owner(
    folder: Path,
    owner: str,
    *,
    seed: int,
    schema: Schema | None = None,
    problems: Problems | None = None,
    only: str | None = None,
    labelled: bool = True,
) -> OwnerTables:
    """Read the tables of one owner.

    Args:
        folder: Holds the files and, unless it is given, ``schema.toml``.
        owner: Name of the owner; keys the draw of a split by rule.
        seed: Of a split by rule.
        problems: Collects what is wrong; by default the first problem is raised.
        only: Keep the rows whose owner column says this (several owners in one folder).
        labelled: False where nothing is trained: then no row needs a label.
    """
    found = problems if problems is not None else Problems()
    schema = schema if schema is not None else read_schema(folder)
    nodes = schema.nodes
    rule = nodes.labels.split
    table = Table(
        find_file(folder, nodes.file),
        [
            nodes.id,
            nodes.labels.column,
            nodes.owner if only is not None else None,
            nodes.graph,
            rule.column if nodes.labels.column is not None else None,
            *(feature.name for feature in schema.features),
        ],
        schema.missing_values,
        found,
    )
    if only is not None:
        table = _rows_of(table, str(nodes.owner), only)
    ids = normalised(table, nodes.id, schema)
    _check_ids(table, nodes.id, ids)
    features = {feature.name: _raw(table, feature) for feature in schema.features}
    stream = Stream(seed, ("split", owner))
    if schema.graphs is None:
        y, part = _labels(table, nodes.labels, stream, labelled)
        graph = graph_ids = None
    else:
        y, part, graph_ids = _graphs(folder, schema, stream, found, only, labelled)
        graph = _graph_of_rows(table, str(nodes.graph), graph_ids)
    edges = read_edges(folder, schema, ids, graph, found)
    features |= edges.features
    if problems is None:
        found.stop()
    for name, values in features.items():
        present = values[~np.isnan(values)]
        if len(present) and (present == present[0]).all() and len(values) > 1:
            found.warnings.append(Problem(table.path.name, "has one value only, so it tells nothing", name))
    key = _link_key(folder)
    return OwnerTables(owner, schema, ids, features, y, part, edges, graph, graph_ids, found, key)


def _link_key(folder: Path) -> bytes | None:
    path = folder / LINK_KEY
    if not path.exists():
        return None
    try:
        key = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError, UnicodeDecodeError):
        key = b""
    if len(key) != LINK_KEY_BYTES:
        raise DataError(f"{path.name} must hold {LINK_KEY_BYTES} bytes as {2 * LINK_KEY_BYTES} hexadecimal digits")
    return key


def owners_in(folder: Path, schema: Schema) -> list[str]:
    """Names in the owner column of a folder that several owners share, sorted."""
    assert schema.owner is not None
    source = schema.graphs if schema.graphs is not None else schema.nodes
    table = Table(find_file(folder, source.file), [schema.owner], schema.missing_values, Problems())
    texts = table.texts(schema.owner)
    if texts.null_count():
        line = table.line(int(texts.is_null().arg_max() or 0))
        raise DataError(f"{table.path.name}, line {line}, column {schema.owner}: every row needs an owner")
    return sorted(texts.unique().to_list())


def _rows_of(table: Table, column: str, owner: str) -> Table:
    table.keep(table.texts(column) == owner)
    if not len(table):
        raise DataError(f"{table.path.name}, column {column}: no row belongs to {owner}")
    return table


def _check_ids(table: Table, column: str, ids: Any) -> None:
    check_filled(table, column, ids, "an id")
    again = (ids.is_duplicated() & ~ids.is_first_distinct() & ids.is_not_null()).to_numpy()
    if again.any():
        table.report(np.flatnonzero(again), column, "is the id of an earlier row too: ids must differ")


def _raw(table: Table, feature: Feature) -> Raw:
    if feature.type == "number":
        values = table.numbers(feature.name)
    elif feature.type == "flag":
        values = table.flags(feature.name)
    else:
        codes = table.categories(feature.name, feature.values)
        values = np.where(codes < 0, np.nan, codes.astype(np.float64))
    if feature.missing is None and np.isnan(values).any():
        known = {(problem.line, problem.column) for problem in table.problems.errors}
        empty = [row for row in np.flatnonzero(np.isnan(values)) if (table.line(int(row)), feature.name) not in known]
        if table.texts(feature.name).null_count():
            table.report(
                np.array(empty, dtype=np.int64), feature.name, 'is empty: fill it, or give the feature missing = "..."'
            )
    return values


def _labels(
    table: Table, labels: Labels, stream: Stream, labelled: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    assert labels.column is not None
    y = table.categories(labels.column, labels.classes)
    if not labelled and not (y >= 0).any():
        return y, np.full(len(y), -1, dtype=np.int64)
    part = draw_split(table, labels.split, y, stream)
    if labelled and not table.problems.errors:
        _check_parts(table, labels, y, part)
    return y, part


def _check_parts(table: Table, labels: Labels, y: NDArray[np.int64], part: NDArray[np.int64]) -> None:
    problems, name = table.problems, table.path.name
    if not (y >= 0).any():
        text = "no row has a label: this owner trains on nothing and scores nothing; models of others serve it"
        problems.warnings.append(Problem(name, text, labels.column))
    elif not (part == 0).any():
        text = f"the split ({labels.split}) leaves no training rows: models of others serve this owner"
        problems.warnings.append(Problem(name, text, labels.column))
    elif len(np.unique(y[part == 0])) == 1:
        problems.warnings.append(
            Problem(name, f"all training rows are of class {labels.classes[int(y[part == 0][0])]}", labels.column)
        )


def draw_split(table: Table, rule: SplitRule, y: NDArray[np.int64], stream: Stream) -> NDArray[np.int64]:
    """0, 1, 2 for train, val, test and -1 for none, of every row; rows without a label are in none."""
    part = np.full(len(y), -1, dtype=np.int64)
    rows = np.flatnonzero(y >= 0)
    if rule.kind == "column":
        assert rule.column is not None
        part = table.categories(rule.column, PARTS)
        return np.where(y >= 0, part, -1)
    assert rule.shares is not None
    if rule.kind == "time":
        assert rule.column is not None
        times = table.times(rule.column)
        empty = rows[np.isnan(times[rows])]
        if len(empty):
            table.report(empty, rule.column, "is empty: a split by time needs the time of every labelled row")
        part[rows] = cut_by_time(np.nan_to_num(times[rows]), rule.shares)
        return part
    if rule.kind == "group":
        assert rule.column is not None
        part = _group_parts(table, rule.column, stream.seed, rule.shares)
        part[y < 0] = -1
        rows = rows[part[rows] < 0]  # those in no group are drawn as in a stratified split
    shuffled = rows[stream.numpy().permutation(len(rows))]
    for label in np.unique(y[rows]).tolist():
        mine = shuffled[y[shuffled] == label]
        part[mine] = _cut(np.arange(len(mine)), len(mine), rule)
    return part


def _group_parts(table: Table, column: str, seed: int, shares: Shares) -> NDArray[np.int64]:
    """Part of every row's group, -1 for a row in none (empty or a negative number). Owners with the same seed agree."""
    names = table.texts(column)
    alone = (names.is_null() | (names.cast(pl.Float64, strict=False) < 0).fill_null(False)).to_numpy()
    found = {name: part_by_name(name, seed, shares) for name in names.unique().to_list() if name is not None}
    parts = np.array([found.get(name, -1) for name in names.to_list()], dtype=np.int64)
    return np.where(alone, -1, parts)


def _cut(rank: NDArray[np.int64], total: int, rule: SplitRule) -> NDArray[np.int64]:
    """Part of each rank 0 ... total-1, cut at the shares, rounded half up."""
    assert rule.shares is not None
    first, second = (
        math.floor(share * total / 100 + Fraction(1, 2))
        for share in (rule.shares.train, rule.shares.train + rule.shares.val)
    )
    return (rank >= first).astype(np.int64) + (rank >= second)


def _graphs(
    folder: Path, schema: Schema, stream: Stream, problems: Problems, only: str | None, labelled: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], Any]:
    graphs = schema.graphs
    assert graphs is not None
    rule = graphs.labels.split
    table = Table(
        find_file(folder, graphs.file),
        [graphs.id, graphs.labels.column, rule.column, graphs.owner if only is not None else None],
        schema.missing_values,
        problems,
    )
    if only is not None:
        table = _rows_of(table, str(graphs.owner), only)
    ids = table.texts(graphs.id)
    _check_ids(table, graphs.id, ids)
    y, part = _labels(table, graphs.labels, stream, labelled)
    unlabelled = np.flatnonzero(y < 0)
    if labelled and len(unlabelled) and not problems.errors:
        table.report(unlabelled, graphs.labels.column, "is empty: every graph needs a label")
    return y, part, ids


def _graph_of_rows(table: Table, column: str, graph_ids: Any) -> NDArray[np.int64]:
    """Position of each node's graph."""
    numbers = pl.DataFrame({"graph": graph_ids, "number": range(len(graph_ids))}).unique("graph", keep="first")
    found: NDArray[np.int64] = (
        pl.DataFrame({"graph": table.texts(column)})
        .join(numbers, on="graph", how="left", maintain_order="left")["number"]
        .fill_null(-1)
        .to_numpy()
        .astype(np.int64)
    )
    if (found < 0).any():
        table.report(np.flatnonzero(found < 0), column, "names a graph that is not in the table of graphs")
    return found
