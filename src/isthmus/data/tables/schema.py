"""``schema.toml``: what the columns of an owner's tables mean. The same bytes at every owner of a federation.

::

    [nodes]
    file = "accounts.*"             # in each owner's folder, .csv or .parquet
    id = "account_id"
    label = "fraud"                 # an empty cell is an unlabelled node
    classes = ["no", "yes"]         # their order gives the class index
    positive = "yes"                # class that auprc and recall look for; default the last
    split = "stratified:40/20/40"   # or a column with train/val/test, or "time:column", "group:column", both also with
                                    # shares: "group:column:60/20/20"
    owner = "bank"                  # only where several owners share one folder (simulation)
    normalise = ["strip", "upper"]  # what is done to ids before they are compared; default strip

    [features]
    balance = { type = "number", scale = "log-standard", missing = "median" }
    country = { type = "category", values = ["DE", "FR", "other"], missing = "other" }
    is_company = { type = "flag", missing = "own" }

    [edges]
    file = "transfers.*"
    source = "from"
    target = "to"
    directed = true
    weight = "amount"
    time = "booked"
    duplicates = "sum"              # of several edges from one node to another: sum | first | error
    self_loops = "error"            # error | drop
    [edges.features]
    in_count = true
    out_sum = ["amount"]

    [graphs]                        # sets of graphs: one row per graph
    file = "molecules.*"
    id = "molecule"
    label = "toxic"
    classes = ["no", "yes"]

A table that is not described here is not opened, a column that is not named is not read.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isthmus.data.column_split import parse_column
from isthmus.data.split import Shares
from isthmus.errors import ConfigError, DataError, unknown

FILE = "schema.toml"
Scale = Literal["standard", "log-standard", "rank", "none"]
SCALES: tuple[Scale, ...] = ("standard", "log-standard", "rank", "none")
Duplicates = Literal["sum", "first", "error"]
NORMALISE = ("strip", "no-spaces", "upper", "lower", "digits", "no-leading-zeros")
"""Rules that bring ids of several owners to one form: white space at the ends or anywhere, case, digits
only, zeros in front."""
STATISTICS = ("count", "sum", "mean", "std")
EDGE_FEATURES = tuple(f"{way}_{what}" for way in ("in", "out") for what in STATISTICS)


@dataclass(frozen=True)
class Feature:
    """A column that is a feature.

    Args:
        name: Of the column; of a feature made from edges, e.g. ``in_sum(amount)``.
        type: ``number``, ``category`` or ``flag``.
        scale: Of a number: ``standard`` (mean 0, deviation 1), ``log-standard`` (of sign(x) log(1 + |x|)), ``rank``
            (share of the federation's values below), ``none``.
        missing: What stands for an empty cell: ``median`` or ``mean`` (numbers), ``own`` (one more column that says
            so), a value of the column, or None: an empty cell is an error.
        values: Of a category, in order.
    """

    name: str
    type: Literal["number", "category", "flag"]
    scale: Scale = "none"
    missing: str | float | bool | None = None
    values: tuple[str, ...] = ()

    @property
    def own_missing(self) -> bool:
        """Whether one more column says that the cell is empty."""
        return self.missing == "own"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of x it becomes."""
        names = tuple(f"{self.name}={value}" for value in self.values) if self.type == "category" else (self.name,)
        return (*names, f"{self.name} is missing") if self.own_missing else names


@dataclass(frozen=True)
class EdgeFeature:
    """A number a node gets from its own edges: ``{in,out}_{count,sum,mean,std}``, of a column but for ``count``."""

    way: Literal["in", "out"]
    statistic: Literal["count", "sum", "mean", "std"]
    column: str | None = None

    @property
    def name(self) -> str:
        return f"{self.way}_{self.statistic}" + (f"({self.column})" if self.column is not None else "")

    @property
    def feature(self) -> Feature:
        """As a feature: sums and counts of transfers are skewed, so their logarithm is standardised."""
        return Feature(self.name, "number", "log-standard", "own" if self.statistic in ("mean", "std") else 0.0)


@dataclass(frozen=True)
class SplitRule:
    """How labelled rows are divided: a ``column`` that says so, ``stratified`` inside every class, by ``time``, or so
    that a ``group`` is in one part only, at all owners.
    """

    kind: Literal["column", "stratified", "time", "group"]
    column: str | None = None
    shares: Shares | None = None

    def __str__(self) -> str:
        if self.kind == "column":
            return f"column {self.column}"
        return ":".join([self.kind, *([self.column] if self.column else []), str(self.shares)])


@dataclass(frozen=True)
class Labels:
    """Label column, classes in order, and the split of labelled rows."""

    column: str | None
    classes: tuple[str, ...]
    positive: int
    split: SplitRule


@dataclass(frozen=True)
class NodeTable:
    """``[nodes]``."""

    file: str
    id: str
    labels: Labels
    owner: str | None = None
    graph: str | None = None
    normalise: tuple[str, ...] = ("strip",)


@dataclass(frozen=True)
class EdgeTable:
    """``[edges]``."""

    file: str
    source: str
    target: str
    directed: bool = False
    weight: str | None = None
    time: str | None = None
    duplicates: Duplicates = "sum"
    self_loops: Literal["error", "drop"] = "error"
    graph: str | None = None
    features: tuple[EdgeFeature, ...] = ()


@dataclass(frozen=True)
class GraphTable:
    """``[graphs]``: one row per graph, which has the label."""

    file: str
    id: str
    labels: Labels
    owner: str | None = None


@dataclass(frozen=True)
class Schema:
    """All of ``schema.toml``. ``text`` are its bytes, which owners compare by ``hash``."""

    nodes: NodeTable
    features: tuple[Feature, ...]
    edges: EdgeTable | None
    graphs: GraphTable | None
    missing_values: tuple[str, ...]
    text: bytes

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    @property
    def labels(self) -> Labels:
        """Of what is classified: graphs where there are graphs, else nodes."""
        return self.graphs.labels if self.graphs is not None else self.nodes.labels

    @property
    def task(self) -> str:
        return "graph" if self.graphs is not None else "node"

    @property
    def owner(self) -> str | None:
        return self.graphs.owner if self.graphs is not None else self.nodes.owner

    @property
    def all_features(self) -> tuple[Feature, ...]:
        """Features of columns, then those made from edges."""
        made = self.edges.features if self.edges is not None else ()
        return (*self.features, *(one.feature for one in made))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of x."""
        return tuple(column for feature in self.all_features for column in feature.columns)


def read_schema(path: Path) -> Schema:
    """Read and check a schema; ``path`` is the file or the folder that holds it."""
    path = path / FILE if path.is_dir() else path
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"there is no {path.name} in {path.parent}: draft one with `isthmus data describe {path.parent}`"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    return parse_schema(text, path.name)


def parse_schema(text: bytes, name: str = FILE) -> Schema:
    """A schema from its bytes; ``name`` is for messages."""
    try:
        raw = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{name} is not valid TOML: {error}") from None
    try:
        return _schema(raw, text)
    except ConfigError as error:
        raise DataError(f"{name}: {error}") from None


def _schema(raw: Mapping[str, Any], text: bytes) -> Schema:
    _known("table", raw, ("nodes", "features", "edges", "graphs", "missing_values"))
    if "nodes" not in raw:
        raise ConfigError("it has no table [nodes]")
    graphs = _graph_table(_Table("graphs", raw["graphs"])) if "graphs" in raw else None
    edges = _edge_table(_Table("edges", raw["edges"])) if "edges" in raw else None
    nodes = _node_table(_Table("nodes", raw["nodes"]), labelled=graphs is None)
    if graphs is not None:
        for name, table in (("nodes", nodes), ("edges", edges)):
            if table is not None and table.graph is None:
                raise ConfigError(f'[{name}] must name the column that says which graph a row is of: graph = "..."')
    features = _features(raw.get("features", {}))
    schema = Schema(nodes, features, edges, graphs, _missing_values(raw.get("missing_values", [""])), text)
    if not schema.columns:
        raise ConfigError("[features] and [edges.features] name no feature: a model needs at least one")
    _check_no_label_feature(schema)
    return schema


def _check_no_label_feature(schema: Schema) -> None:
    special = {"id": schema.nodes.id, "label": schema.nodes.labels.column, "owner": schema.nodes.owner}
    rule = schema.nodes.labels.split
    if rule.kind in ("column", "group"):
        special["split"] = rule.column
    for what, column in special.items():
        if column is not None and column in {feature.name for feature in schema.features}:
            raise ConfigError(f"column {column!r} is the {what} of [nodes] and cannot be a feature too")


class _Table:
    """One table of the schema, whose keys are taken out one by one; what is left over is unknown."""

    def __init__(self, name: str, raw: object) -> None:
        if not isinstance(raw, dict):
            raise ConfigError(f"[{name}] must be a table")
        self.name, self.raw, self.taken = name, raw, set[str]()

    def text(self, key: str, *, needed: bool = False) -> str | None:
        self.taken.add(key)
        value = self.raw.get(key)
        if value is None and not needed:
            return None
        if not isinstance(value, str) or not value:
            raise ConfigError(f'[{self.name}] {key} must be the name of a column or file, e.g. {key} = "{key}"')
        return value

    def required(self, key: str) -> str:
        value = self.text(key, needed=True)
        assert value is not None
        return value

    def texts(self, key: str, default: Sequence[str]) -> tuple[str, ...]:
        self.taken.add(key)
        value = self.raw.get(key, list(default))
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"[{self.name}] {key} must be a list of texts")
        return tuple(value)

    def flag(self, key: str, default: bool) -> bool:
        self.taken.add(key)
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"[{self.name}] {key} must be true or false, got {value!r}")
        return value

    def choice(self, key: str, allowed: Sequence[str]) -> str:
        value = self.text(key) or allowed[0]
        if value not in allowed:
            raise unknown(f"value of {key} in [{self.name}]", value, allowed)
        return value

    def done(self) -> None:
        _known(f"key in [{self.name}]", self.raw, sorted(self.taken))


def _known(what: str, raw: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key in raw:
        if key not in allowed:
            raise unknown(what, key, allowed)


def _node_table(table: _Table, *, labelled: bool) -> NodeTable:
    rules = table.texts("normalise", ("strip",))
    for rule in rules:
        if rule not in NORMALISE:
            raise unknown("rule in [nodes] normalise", rule, NORMALISE)
    nodes = NodeTable(
        file=table.required("file"),
        id=table.required("id"),
        labels=_labels(table, labelled=labelled),
        owner=table.text("owner"),
        graph=table.text("graph"),
        normalise=rules,
    )
    table.done()
    return nodes


def _graph_table(table: _Table) -> GraphTable:
    graphs = GraphTable(
        table.required("file"), table.required("id"), _labels(table, labelled=True), table.text("owner")
    )
    table.done()
    return graphs


def _labels(table: _Table, *, labelled: bool) -> Labels:
    column, classes = table.text("label"), table.texts("classes", ())
    positive, split = table.text("positive"), table.text("split")
    if not labelled:
        if column is not None:
            raise ConfigError("[graphs] has the label of a set of graphs: take label out of [nodes]")
        return Labels(None, (), 0, SplitRule("stratified", shares=Shares.parse("80/10/10")))
    if column is None:
        raise ConfigError(f'[{table.name}] must name the label column: label = "..."')
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise ConfigError(
            f"[{table.name}] classes must list two or more different labels, in the order of class index; an amount to "
            "predict is put into classes first"
        )
    if positive is not None and positive not in classes:
        raise unknown(f"positive class in [{table.name}]", positive, classes)
    index = len(classes) - 1 if positive is None else classes.index(positive)
    return Labels(column, classes, index, parse_split_rule(split or "stratified:40/20/40"))


def parse_split_rule(text: str) -> SplitRule:
    """``stratified:40/20/40``, ``time:COLUMN``, ``group:COLUMN`` or ``group:COLUMN:60/20/20``, else a column."""
    kind, colon, rest = text.partition(":")
    if kind == "stratified" and colon:
        return SplitRule("stratified", shares=Shares.parse(rest))
    if kind in ("time", "group") and colon:
        return SplitRule(kind, *parse_column(kind, rest))  # type: ignore[arg-type]
    return SplitRule("column", text)


def _edge_table(table: _Table) -> EdgeTable:
    raw = table.raw.get("features", {})
    table.taken.add("features")
    if not isinstance(raw, dict):
        raise ConfigError("[edges.features] must be a table")
    edges = EdgeTable(
        file=table.required("file"),
        source=table.required("source"),
        target=table.required("target"),
        directed=table.flag("directed", False),
        weight=table.text("weight"),
        time=table.text("time"),
        duplicates=table.choice("duplicates", ("sum", "first", "error")),  # type: ignore[arg-type]
        self_loops=table.choice("self_loops", ("error", "drop")),  # type: ignore[arg-type]
        graph=table.text("graph"),
        features=tuple(one for key, value in raw.items() for one in _edge_features(key, value)),
    )
    table.done()
    return edges


def _edge_features(key: str, value: object) -> list[EdgeFeature]:
    if key not in EDGE_FEATURES:
        raise unknown("feature in [edges.features]", key, EDGE_FEATURES)
    way, _, statistic = key.partition("_")
    if statistic == "count":
        if not isinstance(value, bool):
            raise ConfigError(f"[edges.features] {key} counts edges: write {key} = true")
        return [EdgeFeature(way, "count")] if value else []  # type: ignore[arg-type]
    columns = [value] if isinstance(value, str) else value
    if not isinstance(columns, list) or not columns or not all(isinstance(one, str) for one in columns):
        raise ConfigError(f'[edges.features] {key} takes a column or a list of columns, e.g. {key} = "amount"')
    return [EdgeFeature(way, statistic, column) for column in columns]  # type: ignore[arg-type]


def _features(raw: object) -> tuple[Feature, ...]:
    if not isinstance(raw, dict):
        raise ConfigError("[features] must be a table")
    return tuple(_feature(name, value) for name, value in raw.items())


def _feature(name: str, raw: object) -> Feature:
    if not isinstance(raw, dict) or "type" not in raw:
        raise ConfigError(f'feature {name!r} needs a type: {name} = {{ type = "number" }} (or category, flag)')
    kind = raw["type"]
    allowed: dict[str, tuple[str, ...]] = {
        "number": ("type", "scale", "missing"),
        "category": ("type", "values", "missing"),
        "flag": ("type", "missing"),
    }
    if kind not in allowed:
        raise unknown(f"type of feature {name}", str(kind), allowed)
    _known(f"key of feature {name}", raw, allowed[kind])
    missing = raw.get("missing")
    if kind == "number":
        scale = raw.get("scale", "standard")
        if scale not in SCALES:
            raise unknown(f"scale of feature {name}", str(scale), SCALES)
        if isinstance(missing, bool) or not (
            missing is None or isinstance(missing, int | float) or missing in ("median", "mean", "own")
        ):
            raise ConfigError(f'feature {name}: missing is "median", "mean", "own" or a number, got {missing!r}')
        return Feature(name, "number", scale, float(missing) if isinstance(missing, int) else missing)
    if kind == "flag":
        if not (missing is None or isinstance(missing, bool) or missing == "own"):
            raise ConfigError(f'feature {name}: missing is true, false or "own", got {missing!r}')
        return Feature(name, "flag", missing=missing)
    values = raw.get("values")
    if not isinstance(values, list) or not values or not all(isinstance(one, str) for one in values):
        raise ConfigError(f'category {name} must list its values: values = ["a", "b"]')
    if len(set(values)) < len(values):
        raise ConfigError(f"category {name} lists a value twice")
    if missing is not None and missing != "own" and missing not in values:
        raise unknown(f"value for missing cells of category {name}", str(missing), [*values, "own"])
    return Feature(name, "category", missing=missing, values=tuple(values))


def _missing_values(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(one, str) for one in raw):
        raise ConfigError('missing_values must be a list of texts that mean an empty cell, e.g. ["", "NA"]')
    return tuple(dict.fromkeys(["", *raw]))


def differences(here: Schema, there: Schema) -> list[str]:
    """What two schemas say differently, by table and column; empty if they mean the same."""
    found = []
    for table in ("nodes", "edges", "graphs"):
        mine, theirs = getattr(here, table), getattr(there, table)
        if (mine is None) != (theirs is None):
            found.append(f"[{table}] is only in {'this' if mine is not None else 'the other'} schema")
        elif mine != theirs:
            keys = [key for key in vars(mine) if vars(mine)[key] != vars(theirs)[key]]
            found.append(f"[{table}] differs in {', '.join(keys)}")
    ours, others = ({feature.name: feature for feature in one.features} for one in (here, there))
    for name in sorted(ours.keys() | others.keys()):
        if name not in others:
            found.append(f"feature {name} is only in this schema")
        elif name not in ours:
            found.append(f"feature {name} is only in the other schema")
        elif ours[name] != others[name]:
            keys = [key for key in vars(ours[name]) if vars(ours[name])[key] != vars(others[name])[key]]
            found.append(f"feature {name} differs in {', '.join(keys)}")
    if not found and [f.name for f in here.features] != [f.name for f in there.features]:
        found.append("[features] are in another order")
    if here.missing_values != there.missing_values:
        found.append("missing_values differ")
    return found


def digests(schema: Schema) -> dict[str, str]:
    """A hash of every table and feature, and of the bytes: enough to name a difference, not to see what it is."""
    parts: dict[str, object] = {f"[{table}]": getattr(schema, table) for table in ("nodes", "edges", "graphs")}
    parts |= {f"feature {feature.name}": feature for feature in schema.features}
    parts["order of features"] = [feature.name for feature in schema.features]
    parts["missing_values"] = schema.missing_values
    hashed = {name: hashlib.sha256(repr(part).encode()).hexdigest()[:16] for name, part in parts.items()}
    return hashed | {"bytes of the file": schema.hash}
