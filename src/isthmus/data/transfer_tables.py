"""A network of accounts and transfers as the banks would have it: one folder of tables each, with a common schema.

``isthmus data tables amlsim-cycle FOLDER`` writes it, so that the path of own tables can be tried on known data.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isthmus.data.datasets import load_nodes, with_defaults
from isthmus.data.partition import check_owners, number_of_clients, parse_partition
from isthmus.data.tables.schema import FILE, parse_split_rule
from isthmus.errors import ConfigError, DataError, unknown
from isthmus.seeds import Stream

SCHEMA = """\
[nodes]
file = "accounts.*"
id = "account"
label = "fraud"
classes = ["no", "yes"]
split = "{split}"

[features]
balance = {{ type = "number", scale = "log-standard" }}

[edges]
file = "transfers.*"
source = "from"
target = "to"
directed = true
weight = "amount"
time = "day"
self_loops = "drop"

[edges.features]
in_count = true
in_sum = "amount"
in_mean = ["amount", "day"]
in_std = "day"
out_count = true
out_sum = "amount"
out_mean = ["amount", "day"]
out_std = "day"
"""


def write_tables(
    dataset: str,
    folder: Path,
    *,
    partition: str | None = None,
    clients: int | None = None,
    split: str | None = None,
    seed: int = 0,
) -> dict[str, int]:
    """Write one folder per bank below ``folder``; returns the number of accounts of each.

    Args:
        dataset: A data set with transfers, such as ``amlsim-cycle`` or ``banks``.
        partition, clients, seed: Which bank has which account, drawn as in a run on the data set itself.
        split: Rule for ``schema.toml``: ``stratified:40/20/40``, ``group:ring:40/20/40``, ``time:first_day``, ...
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name another folder")
    asked = with_defaults(dataset, {"partition": partition, "clients": clients, "split": split})
    graph = load_nodes(dataset, Stream(seed, ("data",)))
    if graph.transfers is None or "balance" not in graph.columns:
        raise DataError(f"{dataset} has no single transfers to write: use amlsim-fanin, amlsim-cycle or banks")
    rule = asked["split"] or "stratified:40/20/40"
    column = parse_split_rule(rule).column
    columns = {name: np.asarray(values) for name, values in graph.columns.items()}
    if column is not None and column not in columns:
        raise unknown("column for the split", column, columns)
    chosen = str(asked["partition"] or "random")
    partitioner = parse_partition(chosen)
    count = number_of_clients(partitioner, graph, asked["clients"], chosen)
    assigned = partitioner.assign(graph, count, Stream(seed, ("partition",)))
    check_owners(assigned, count, chosen)
    owner = assigned.numpy()
    names = partitioner.names(graph) or tuple(f"bank-{number:0{len(str(count))}d}" for number in range(1, count + 1))
    ids = np.array([f"A{row:08d}" for row in range(graph.data.num_nodes)])
    fraud = np.where(graph.data.y.numpy() == 1, "yes", "no")
    moved = [values.numpy() for values in vars(graph.transfers).values()]
    for number, name in enumerate(names):
        home = folder / name
        home.mkdir(parents=True)
        (home / FILE).write_text(SCHEMA.format(split=rule), encoding="utf-8")
        own = np.flatnonzero(owner == number)
        cells = (_cells(values[own]) for values in columns.values())
        _write(home / "accounts.csv", ["account", "fraud", *columns], zip(ids[own], fraud[own], *cells, strict=True))
        source, target, amount, day = moved
        seen = np.flatnonzero((owner[source] == number) | (owner[target] == number))
        rows = zip(ids[source[seen]], ids[target[seen]], _cells(amount[seen]), _cells(day[seen]), strict=True)
        _write(home / "transfers.csv", ["from", "to", "amount", "day"], rows)
    return {name: int((owner == number).sum()) for number, name in enumerate(names)}


def _cells(values: NDArray[np.generic]) -> list[str]:
    """Numbers as short as they can be read back; -1 among whole numbers means none and is left empty."""
    if values.dtype.kind in "iu":
        return ["" if value < 0 else str(value) for value in values.tolist()]
    return [repr(value).removesuffix(".0") for value in values.tolist()]


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(header)
        table.writerows(rows)
