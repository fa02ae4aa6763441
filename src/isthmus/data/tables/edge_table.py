"""One owner's table of edges: which lie inside, which lead to others, and what nodes learn from their own edges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.data.tables.frames import pl
from isthmus.data.tables.ids import check_filled, normalised
from isthmus.data.tables.reader import Problem, Problems, Table, find_file, has_rows
from isthmus.data.tables.schema import EdgeFeature, EdgeTable, Schema

Ints = NDArray[np.int64]
Raw = NDArray[np.float64]


@dataclass(frozen=True)
class OwnerEdges:
    """Edges of one owner, one entry per pair of nodes and direction.

    Args:
        source, target: Rows of edges with both ends here (E,).
        weight: Of these (E,); 1, or the number of rows that were joined, where the schema names no weight.
        own: Row of the own end of every edge that leads elsewhere (X,).
        far: Id of the other end, normalised (X,).
        outgoing: True where the edge runs from the own end (X,).
        far_weight: Of these (X,).
        features: What nodes learn from their edges, those towards others included: name -> (n,).
        lines: Rows of the file.
    """

    source: Ints
    target: Ints
    weight: Raw
    own: Ints
    far: pl.Series
    outgoing: NDArray[np.bool_]
    far_weight: Raw
    features: dict[str, Raw]
    lines: int


def read_edges(
    folder: Path, schema: Schema, ids: Any, graph: NDArray[np.int64] | None, problems: Problems
) -> OwnerEdges:
    """Read the edges of one owner whose nodes have these ids."""
    edges = schema.edges
    if edges is None:
        return _no_edges((), len(ids))
    values = sorted({one.column for one in edges.features if one.column is not None})
    path = find_file(folder, edges.file)
    if not has_rows(path):
        problems.warnings.append(Problem(path.name, "has no rows: this owner has no edges"))
        return _no_edges(edges.features, len(ids))
    table = Table(
        path,
        [edges.source, edges.target, edges.weight, edges.time, edges.graph, *values],
        schema.missing_values,
        problems,
    )
    rows, far = {}, {}
    for name, column in (("source", edges.source), ("target", edges.target)):
        texts = normalised(table, column, schema)
        table.forget(column)
        check_filled(table, column, texts, "both ends of its edge")
        rows[name] = _rows(ids, texts)
        far[name] = texts.filter(rows[name] < 0)  # of the text, only what names somebody else's node is kept
    weight = _weights(table, edges)
    columns = {column: _values(table, edges, column) for column in values}
    nowhere = (rows["source"] < 0) & (rows["target"] < 0)
    if nowhere.any():
        table.report(np.flatnonzero(nowhere), None, "neither end is a node of this owner: take the row out")
    loops = (rows["source"] == rows["target"]) & ~nowhere
    if loops.any() and edges.self_loops == "error":
        table.report(
            np.flatnonzero(loops),
            None,
            'leads from a node to itself: take it out, or write self_loops = "drop" in [edges] of schema.toml',
        )
    if graph is not None:
        _check_graphs(table, rows, graph)
    kept = ~loops & ~nowhere
    features = _features(edges.features, rows, columns, kept, len(ids))
    del columns
    own = _inside(table, edges, rows, weight, kept, len(ids))
    away = _across(table, edges, rows, far, weight, kept)
    return OwnerEdges(
        *own,
        away["a"].to_numpy().astype(np.int64),
        away["far"],
        away["out"].to_numpy(),
        away["weight"].to_numpy(),
        features,
        len(table),
    )


def _no_edges(wanted: tuple[EdgeFeature, ...], nodes: int) -> OwnerEdges:
    none, zero = np.zeros(0, dtype=np.int64), np.zeros(0)
    columns = {one.column: zero for one in wanted if one.column is not None}
    features = _features(wanted, {"source": none, "target": none}, columns, none.astype(bool), nodes)
    return OwnerEdges(none, none, zero, none, pl.Series("id", [], pl.String), none.astype(bool), zero, features, 0)


def _rows(ids: Any, ends: Any) -> Ints:
    """Row of each end among the owner's nodes, -1 for an id of somebody else's."""
    known = pl.DataFrame({"id": ids, "row": np.arange(len(ids))}).unique("id", keep="first")
    joined = pl.DataFrame({"id": ends}).join(known, on="id", how="left", maintain_order="left")
    found: Ints = joined["row"].fill_null(-1).to_numpy().astype(np.int64)
    return found


def _weights(table: Table, edges: EdgeTable) -> Raw:
    if edges.weight is None:
        return np.ones(len(table))
    weight = table.numbers(edges.weight)
    empty = np.isnan(weight)
    if empty.any() and not table.problems.errors:
        table.report(np.flatnonzero(empty), edges.weight, "is empty: every edge needs a weight")
    negative = weight < 0
    if negative.any():
        table.report(np.flatnonzero(negative), edges.weight, "is negative: weights of edges must be at least 0")
    return weight


def _values(table: Table, edges: EdgeTable, column: str) -> Raw:
    found = table.times(column) if column == edges.time else table.numbers(column)
    if column != edges.weight:
        table.forget(column)
    return found


def _check_graphs(table: Table, rows: dict[str, Ints], graph: Ints) -> None:
    apart = (rows["source"] >= 0) & (rows["target"] >= 0) & (graph[rows["source"]] != graph[rows["target"]])
    if apart.any():
        table.report(np.flatnonzero(apart), None, "joins nodes of two graphs")
    elsewhere = (rows["source"] < 0) != (rows["target"] < 0)
    if elsewhere.any():
        table.report(
            np.flatnonzero(elsewhere), None, "one end is no node of this owner: graphs of a set lie whole at one"
        )


def _features(
    wanted: tuple[EdgeFeature, ...], rows: dict[str, Ints], columns: dict[str, Raw], kept: NDArray[np.bool_], nodes: int
) -> dict[str, Raw]:
    """``in`` looks at edges that arrive at a node, ``out`` at those that leave it; empty cells do not count."""
    found = {}
    for one in wanted:
        own = rows["target" if one.way == "in" else "source"]
        chosen = kept & (own >= 0)
        if one.column is not None:
            chosen &= ~np.isnan(columns[one.column])
        node = own[chosen]
        count = np.bincount(node, minlength=nodes).astype(np.float64)
        if one.column is None:
            found[one.name] = count
            continue
        values = columns[one.column][chosen]
        total: Raw = np.bincount(node, weights=values, minlength=nodes).astype(np.float64)
        if one.statistic == "sum":
            found[one.name] = total
            continue
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / count  # NaN, an empty cell, for a node without such edges
            if one.statistic == "std":
                apart = np.bincount(node, weights=(values - mean[node]) ** 2, minlength=nodes).astype(np.float64)
                found[one.name] = np.sqrt(apart / count)
            else:
                found[one.name] = mean
    return found


def _inside(
    table: Table, edges: EdgeTable, rows: dict[str, Ints], weight: Raw, kept: NDArray[np.bool_], nodes: int
) -> tuple[Ints, Ints, Raw]:
    """Edges with both ends here, one per pair. An undirected edge is the same whichever way it is listed."""
    line = np.flatnonzero(kept & (rows["source"] >= 0) & (rows["target"] >= 0))
    a, b = rows["source"][line], rows["target"][line]
    if not edges.directed:
        a, b = np.minimum(a, b), np.maximum(a, b)
    pair = a * nodes + b
    order = np.argsort(pair, kind="stable")
    pair = pair[order]
    first = np.ones(len(pair), dtype=bool)
    first[1:] = pair[1:] != pair[:-1]
    _again(table, edges, line[order[~first]])
    weights = weight[line][order]
    begin = np.flatnonzero(first)
    joined = np.add.reduceat(weights, begin) if edges.duplicates == "sum" and len(begin) else weights[begin]
    source, target = pair[begin] // nodes, pair[begin] % nodes
    if edges.directed:
        return source, target, joined
    return np.concatenate([source, target]), np.concatenate([target, source]), np.concatenate([joined, joined])


def _across(
    table: Table, edges: EdgeTable, rows: dict[str, Ints], far: dict[str, Any], weight: Raw, kept: NDArray[np.bool_]
) -> Any:
    """Edges with one end elsewhere, likewise."""
    frames = []
    for own, other in (("source", "target"), ("target", "source")):
        mine = rows[other] < 0  # rows of the file whose other end is elsewhere, as ``far`` lists them
        line = np.flatnonzero(mine)
        frame = pl.DataFrame({"a": rows[own][line], "far": far[other], "weight": weight[line], "line": line})
        out = own == "source" or not edges.directed
        frames.append(frame.filter(kept[line]).with_columns(out=pl.lit(out)))
    away = pl.concat(frames).sort("line")
    again = ~away.select(pl.struct("a", "far", "out").is_first_distinct()).to_series()
    _again(table, edges, away.filter(again)["line"].to_numpy())
    how = pl.col("weight").sum() if edges.duplicates == "sum" else pl.col("weight").first()
    away = away.group_by("a", "far", "out").agg(how).sort("a", "far", "out")
    return away if edges.directed else pl.concat([away, away.with_columns(out=~pl.col("out"))])


def _again(table: Table, edges: EdgeTable, lines: Ints) -> None:
    if len(lines) and edges.duplicates == "error":
        table.report(
            np.sort(lines),
            None,
            'lists an edge of an earlier row again: take it out, or write duplicates = "sum" in [edges] of schema.toml',
        )
