"""What ``--dataset`` takes besides names: ``./graph.pt``, ``./folder`` of tables, and data handed over from Python."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Literal

from isthmus.data import given
from isthmus.data.own_graph import OwnGraphs, content_hash, read_pt
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError, DataError, no_tables

SITE_TABLES = "tables"
"""Data set of a run between organisations: the tables each of them has."""
Kind = Literal["memory", "file", "tables", "site tables"]


def kind_of(dataset: str) -> Kind | None:
    """Which kind of own data a text stands for; None for the name of a data set. A path has a slash or ends in .pt."""
    if dataset == SITE_TABLES:
        return "site tables"
    if given.is_given(given.OWN, dataset):
        return "memory"
    if dataset.endswith(".pt"):
        return "file"
    return "tables" if "/" in dataset or "\\" in dataset or dataset in (".", "..") else None


def load_own(dataset: str) -> Loaded | OwnGraphs:
    """Own data that are no tables."""
    if kind_of(dataset) == "memory":
        own = given.recall(dataset, object)
        assert isinstance(own, Loaded | OwnGraphs)
        return own
    path = Path(dataset).expanduser()
    try:
        facts = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {dataset}: {error.strerror}") from None
    return _read_file(path, facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=2)  # task, contents and data are asked for one after the other
def _read_file(path: Path, _changed: int, _size: int) -> Loaded | OwnGraphs:
    return read_pt(path)


def load_own_nodes(dataset: str) -> Loaded:
    """Own data of a node task."""
    own = load_own(dataset)
    if not isinstance(own, Loaded):
        raise ConfigError(f"{dataset} holds sets of graphs: it needs a method for graph tasks")
    return own


def task_of_own(dataset: str) -> str:
    """``node`` or ``graph``."""
    kind = kind_of(dataset)
    if kind == "site tables":
        return "node"  # what sites hold is seen when they join
    if kind == "tables":
        from isthmus.data.tables.check import first_schema

        return first_schema(tables_folder(dataset)).task
    return "graph" if isinstance(load_own(dataset), OwnGraphs) else "node"


def tables_folder(dataset: str) -> Path:
    """The folder of tables a data set names."""
    folder = Path(dataset).expanduser()
    if not folder.exists():
        raise no_tables(dataset)
    return folder


def contents_of(dataset: str) -> str | None:
    """SHA-256 of own data, so that a run can be continued with the same only; None for data sets with a name."""
    kind = kind_of(dataset)
    if kind in (None, "site tables"):
        return None
    return _folder_hash(tables_folder(dataset)) if kind == "tables" else content_hash(load_own(dataset))


def _folder_hash(folder: Path) -> str:
    """Over names and bytes of all tables and schemas in a folder and its folders."""
    found = hashlib.sha256(b"isthmus/tables")
    endings = (".csv", ".parquet", ".toml", ".key")
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file()):
        found.update(str(path.relative_to(folder)).encode() + b"\0")
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
