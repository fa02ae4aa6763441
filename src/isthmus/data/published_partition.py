"""Partitions of well-known graphs that were published with a paper's code, as lists of nodes, some with their split.

    fedspray   PubMed, Physics, WikiCS, Flickr   one Louvain community per client (xbfu/FedSpray)
    fedtad     Cora, 10 clients, with masks      Louvain (zyl24/FedTAD)
    openfgl    Cora, 20 clients                  Louvain (xkLi-Allen/OpenFGL)
    fedaux     Cora, 10 clients, with masks      METIS of the largest component, as FED-PUB does it (JhuoW/FedAux)

The files are looked for in ``partitions/<name>`` of the mirror (``ISTHMUS_DATA``): ``Cora_00.txt`` ... with one row
number per line, ``Cora_masks.npz`` with boolean arrays train, val and test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from torch import Tensor

from isthmus.data import store
from isthmus.data.partition import PARTITIONS, ListPartition, Partitioner, read_rows
from isthmus.data.split import SPLITS, Masks, masks_for, read_masks
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError, DataError, unknown
from isthmus.seeds import Stream


class PublishedPartition(Partitioner):
    """Base of partitions that were published as lists of nodes."""

    name: ClassVar[str]
    titles: ClassVar[Mapping[str, str]] = {"cora": "Cora"}
    """How the files call each data set."""
    instead: ClassVar[str] = "louvain"
    masks: ClassVar[bool] = False

    def natural_clients(self, graph: Loaded) -> int | None:
        return self._lists(graph).natural_clients(graph)

    def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
        return self._lists(graph).assign(graph, clients, stream)

    def natural_split(self) -> str | None:
        return f"published:{self.name}" if self.masks else None

    def _lists(self, graph: Loaded) -> ListPartition:
        files = published_files(type(self), graph, "*[0-9].txt")
        return ListPartition(tuple(read_rows(file) for file in files))


@PARTITIONS.register("fedspray")
@dataclass(frozen=True)
class FedSprayPartition(PublishedPartition):
    """The lists FedSpray published with its code, a Louvain community per client (PubMed, Physics, WikiCS, Flickr)."""

    name: ClassVar[str] = "fedspray"
    titles: ClassVar[Mapping[str, str]] = {
        "pubmed": "PubMed",
        "coauthor-physics": "Physics",
        "wikics": "WikiCS",
        "flickr": "Flickr",
    }
    instead: ClassVar[str] = "louvain-top"


@PARTITIONS.register("fedtad")
@dataclass(frozen=True)
class FedTadPartition(PublishedPartition):
    """The lists FedTAD published for Cora, 10 clients; with their masks (split `published:fedtad`)."""

    name: ClassVar[str] = "fedtad"
    masks: ClassVar[bool] = True


@PARTITIONS.register("openfgl")
@dataclass(frozen=True)
class OpenFglPartition(PublishedPartition):
    """The lists OpenFGL published for Cora, 20 clients."""

    name: ClassVar[str] = "openfgl"


@PARTITIONS.register("fedaux")
@dataclass(frozen=True)
class FedAuxPartition(PublishedPartition):
    """The lists FedAux published for Cora's largest component, 10 clients by METIS; with masks (`published:fedaux`)."""

    name: ClassVar[str] = "fedaux"
    instead: ClassVar[str] = "metis"
    masks: ClassVar[bool] = True


PUBLISHED: tuple[type[PublishedPartition], ...] = (
    FedSprayPartition,
    FedTadPartition,
    OpenFglPartition,
    FedAuxPartition,
)


@SPLITS.register("published:fedtad")
@dataclass(frozen=True)
class PublishedSplit:
    """The masks that were published with a partition (fedtad, fedaux); the default of that partition."""

    name: str

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        known = [each.name for each in PUBLISHED if each.masks]
        if rest not in known:
            raise unknown("published split", rest or "", known)
        return cls(rest)

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        (kind,) = (each for each in PUBLISHED if each.name == self.name)
        (file,) = published_files(kind, graph, "masks.npz")
        return masks_for(graph, read_masks(file))

    def __str__(self) -> str:
        return f"published:{self.name}"


def published_files(kind: type[PublishedPartition], graph: Loaded, ending: str) -> list[Path]:
    """Verified files of a published partition for this graph, in order of their names."""
    if graph.name not in kind.titles:
        names = ", ".join(sorted(kind.titles))
        raise ConfigError(f"{kind.name} was published for {names} only: use partition {kind.instead} elsewhere")
    root, title = store.mirror(), kind.titles[graph.name]
    folder = root / "partitions" / kind.name if root else None
    files = sorted(folder.glob(f"{title}_{ending}")) if folder else []
    if not files:
        raise DataError(
            f"the files of {kind.name} for {graph.name} are not here: put the published {title}_{ending} into "
            f"partitions/{kind.name}/ of the folder in ISTHMUS_DATA, or use {kind.instead}, the rule they were made by"
        )
    if "," in graph.source:  # a variant: other files, nodes in another order
        raise DataError(
            f"the lists of {kind.name} number the nodes of the published {graph.name}, and this copy ({graph.source}) "
            "has another order: put the published raw files into the folder in ISTHMUS_DATA"
        )
    for file in files:
        expected = store.checksums().get(f"partitions/{kind.name}/{file.name}")
        if expected is not None and store.sha256(file) != expected:
            raise DataError(f"{file.name} is damaged or not the published file: replace it")
    return files
