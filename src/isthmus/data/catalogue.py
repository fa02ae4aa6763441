"""What there is, whether it is here and intact: the functions behind ``isthmus data list|get|verify``, ``datasets``,
``partitions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.data import cache_format, store
from isthmus.data.datasets import NODE_SETS, find, load_nodes
from isthmus.data.generators import GENERATORS, GRAPH_GENERATORS
from isthmus.data.graphscenario import dataset_name, task_of
from isthmus.data.graphset_partition import GRAPH_PARTITIONS
from isthmus.data.graphset_split import GRAPH_SPLITS
from isthmus.data.graphsets import GRAPH_SETS, SETTINGS, find_graphs, load_graphs
from isthmus.data.partition import PARTITIONS
from isthmus.data.split import SPLITS
from isthmus.errors import ConfigError, DataError
from isthmus.seeds import Stream


@dataclass(frozen=True)
class Entry:
    """One line of the list of data sets.

    Args:
        name: What ``--dataset`` takes.
        task: ``node`` or ``graph``.
        kind: ``data set``, ``setting`` (several data sets, one client each) or ``generator``.
        size: Counts, or for a setting its data sets, or for a generator its parameters with their defaults.
        where: ``mirror``, ``cache`` or ``generated`` if it can be used now without a network, else None.
    """

    name: str
    task: str
    kind: str
    size: Mapping[str, Any]
    where: str | None

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {**vars(self), "size": dict(self.size)}


def list_datasets() -> list[Entry]:
    """Everything ``--dataset`` takes: node sets, sets of graphs, settings, generators. Nothing is opened or fetched."""
    where_is = {name: store.where(name, raws) for name, raws in places().items()}
    entries = [Entry(name, "node", "data set", vars(item.counts), where_is[name]) for name, item in NODE_SETS.items()]
    entries += [
        Entry(name, "graph", "data set", vars(item.counts), where_is[name]) for name, item in GRAPH_SETS.items()
    ]
    for name, members in SETTINGS.items():
        where = store.where_all(where_is[member] for member in members)
        entries.append(Entry(name, "graph", "setting", {"data sets": list(members), "clients": len(members)}, where))
    for task, kinds in (("node", GENERATORS), ("graph", GRAPH_GENERATORS)):
        entries += [Entry(name, task, "generator", vars(cls()), "generated") for name, cls in kinds.items()]
    return entries


def get(name: str) -> list[tuple[str, str]]:
    """Make a data set (or all of a setting) usable offline: fetch it if need be, verify, convert. Returns (name,
    source) of each.
    """
    dataset_name(name)  # an unknown one is answered with all there are
    kind = name.partition(":")[0].lower()
    if kind in GENERATORS or kind in GRAPH_GENERATORS:
        raise ConfigError(
            f"{kind} is generated when a run begins: there is nothing to get, give it as --dataset {name}"
        )
    if task_of(name) == "node":
        item = find(name)
        return [(item.name, load_nodes(item.name, Stream(0)).source)]
    names = SETTINGS.get(name.lower(), (name,))
    return [(find_graphs(each).name, load_graphs(each)[1]) for each in names]


@dataclass(frozen=True)
class Verified:
    """What became of one data set in `verify`: ``status`` is ``ok``, ``damaged``, ``incomplete`` or ``not here``."""

    name: str
    status: str
    source: str | None
    problems: tuple[str, ...] = ()


def verify(names: Iterable[str] = ()) -> list[Verified]:
    """Check the SHA-256 of every raw file that is here, or of the converted copy where there is nothing else. Nothing
    is fetched.

    Args:
        names: Data sets and settings; all if empty.
    """
    chosen = list(names)
    raws = places()
    if chosen:
        wanted = [member for name in chosen for member in _names(name)]
        raws = {name: raws[name] for name in wanted}
    return [_verify(name, candidates) for name, candidates in raws.items()]


def list_partitions() -> list[dict[str, str]]:
    """Name, task and first line of the description of every partition and split, for ``isthmus partitions``."""
    kinds: tuple[tuple[str, str, Mapping[str, type]], ...] = (
        ("partition", "node", PARTITIONS),
        ("partition", "graph", GRAPH_PARTITIONS),
        ("split", "node", SPLITS),
        ("split", "graph", GRAPH_SPLITS),
    )
    return [
        {"kind": kind, "name": name, "task": task, "what": _first_line(cls)}
        for kind, task, listed in kinds
        for name, cls in listed.items()
    ]


def places() -> dict[str, tuple[store.RawFiles, ...]]:
    """Places each data set can be read from, in the order they are tried; the first gives the key of the converted
    copy.
    """
    raws = {name: (item.raw,) for name, item in NODE_SETS.items()} | {
        name: item.raws for name, item in GRAPH_SETS.items()
    }
    for name, item in NODE_SETS.items():
        if item.variant is not None:
            raws[name] += (store.RawFiles(name, item.variant.package.folder, item.variant.package.files),)
    return raws


def _names(name: str) -> tuple[str, ...]:
    dataset_name(name)
    if task_of(name) == "node":
        return (find(name).name,)
    return SETTINGS.get(name.lower()) or (find_graphs(name).name,)


def _verify(name: str, raws: tuple[store.RawFiles, ...]) -> Verified:
    lost = [f"{raw.folder} of the mirror lacks {', '.join(files)}" for raw in raws if (files := store.lacking(raw))]
    here = [(raw, found) for raw in raws if (found := store.locate(raw, network=False)) is not None]
    if lost and not any(found.source == "mirror" for _, found in here):
        return Verified(name, "incomplete", "mirror", tuple(lost))
    if here:
        raw, found = here[0]
        problems = tuple(_problems(name, raw, found))
        return Verified(name, "damaged" if problems else "ok", found.source, problems)
    if cache_format.is_cached(name, raws[0].key()):
        cached = cache_format.read_cached(name, raws[0].key())
        if cached is None:
            return Verified(
                name, "damaged", "converted copy", ("the converted copy in the cache is not what was written",)
            )
        return Verified(name, "ok", "converted copy")
    return Verified(name, "not here", None)


def _problems(name: str, raw: store.RawFiles, found: store.Found) -> Iterator[str]:
    for file in raw.files:
        expected = store.checksums().get(f"{raw.folder}/{file}")
        if expected is None or (not raw.pinned and found.source != "mirror"):
            continue
        try:
            actual = store.sha256(found.folder / file)
        except OSError as error:
            raise DataError(f"{file} of {name} cannot be read ({error.strerror}): check its permissions") from error
        if actual != expected:
            yield f"{file} has SHA-256 {actual}, expected {expected}"


def _first_line(cls: type[object]) -> str:
    return (cls.__doc__ or "").strip().split("\n", 1)[0].replace("`", "")
