"""Which nodes are trained on, selected on, tested on.

A split is a small frozen object made from a string (`parse_split`); ``draw`` gives three boolean masks that never
overlap. Nodes without a label (``y < 0``) are in none of them. A new split needs nothing but its class, here or in a
file of its own.

    10/10/80                any shares, uniform over all nodes of the graph (FedStruct)
    client:40/30/30         any shares, drawn inside every client (FedSpray, HiFGL)
    stratified:60/20/20     any shares, drawn inside every class
    client-stratified:...   any shares, drawn inside every class of every client (FedTAD)
    fsg                     the fixed number per class FederatedScope-GNN trains on; not 60/20/20 by class (FedGGR
                            spec, section 9.1)
    group:ring              a column's groups are in one part only (`isthmus.data.column_split`); time:opened likewise
    public                  as published; of several published splits the one with the number ``seed mod count``, or
                            ``public:3``
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from isthmus.data import given
from isthmus.data.graph_set import GraphSetData
from isthmus.data.node_data import NodeData
from isthmus.data.own_graph import mask_of
from isthmus.data.parameters import parse_form
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError, DataError
from isthmus.registry import Registry
from isthmus.seeds import Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Masks:
    """Three boolean masks (n,)."""

    train: Tensor
    val: Tensor
    test: Tensor


class Split(Protocol):
    """A rule that picks training, validation and test nodes."""

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        """From what follows the colon; None where the text has no colon."""
        ...

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        """Masks over all nodes; ``owner`` (n,) is the client of each node, for rules that work inside a client."""
        ...


SPLITS: Registry[type[Split]] = Registry("split", "isthmus.data")
"""Splits of nodes by an example of their form, such as ``client:40/30/30``; what precedes the colon is the name. To add
one, decorate a frozen dataclass; the first line of its docstring is what ``isthmus partitions`` shows.
"""


@dataclass(frozen=True)
class Shares:
    """Percentages of training, validation and test nodes; they add up to 100."""

    train: Fraction
    val: Fraction
    test: Fraction

    @classmethod
    def parse(cls, text: str) -> Shares:
        try:
            train, val, test = (Fraction(part) for part in text.split("/"))
        except (ValueError, ZeroDivisionError):
            raise ConfigError(f"split {text!r} is not train/val/test in percent, such as 10/10/80") from None
        if min(train, val, test) < 0 or train + val + test != 100:
            raise ConfigError(f"split {text!r}: the three percentages must not be negative and must add up to 100")
        return cls(train, val, test)

    def __str__(self) -> str:
        return "/".join(f"{float(share):g}" for share in (self.train, self.val, self.test))

    def __repr__(self) -> str:
        return f"Shares({self})"


@dataclass(frozen=True)
class _OfShares:
    """A split given by three shares and, in its name, how they are drawn."""

    prefix: ClassVar[str] = ""
    shares: Shares

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        return cls(Shares.parse(rest or ""))

    def __str__(self) -> str:
        return f"{self.prefix}{self.shares}"


@SPLITS.register("10/10/80")
@dataclass(frozen=True)
class UniformSplit(_OfShares):
    """Uniform over all nodes of the graph; sizes of train and test are floored, the remainder validates (FedStruct
    spec, section 9).
    """

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        nodes = shuffled(graph, stream)
        train = int(nodes.numel() * self.shares.train / 100)
        test = int(nodes.numel() * self.shares.test / 100)
        return masks_of(graph, nodes[:train], nodes[train : nodes.numel() - test], nodes[nodes.numel() - test :])


@SPLITS.register("client:40/30/30")
@dataclass(frozen=True)
class ClientSplit(_OfShares):
    """Drawn inside every client: a permutation cut at truncated cut points, train then validation then test (FedSpray
    spec, section 6.4).
    """

    prefix: ClassVar[str] = "client:"

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        nodes = shuffled(graph, stream)
        return _cut_inside(graph, nodes, owner[nodes], self.shares, rounded=False)


@SPLITS.register("stratified:60/20/20")
@dataclass(frozen=True)
class StratifiedSplit(_OfShares):
    """Drawn inside every class, cut at rounded cut points: a class of five or more nodes is in every part of
    60/20/20.
    """

    prefix: ClassVar[str] = "stratified:"

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        nodes = shuffled(graph, stream)
        return _cut_inside(graph, nodes, graph.data.y[nodes], self.shares, rounded=True)


@SPLITS.register("client-stratified:20/40/40")
@dataclass(frozen=True)
class ClientStratifiedSplit(_OfShares):
    """Drawn inside every class of every client; sizes of train and validation are floored, the rest tests (rivals
    spec, section 10).
    """

    prefix: ClassVar[str] = "client-stratified:"

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        nodes = shuffled(graph, stream)
        group = owner[nodes] * graph.data.num_classes + graph.data.y[nodes]
        rank, (_, place, counts) = rank_inside(group), torch.unique(group, return_inverse=True, return_counts=True)
        total = counts[place]
        train, val = (_cut_point(total, share, rounded=False) for share in (self.shares.train, self.shares.val))
        kept = train + val
        return masks_of(graph, nodes[rank < train], nodes[(rank >= train) & (rank < kept)], nodes[rank >= kept])


@SPLITS.register("fsg")
@dataclass(frozen=True)
class FsgSplit:
    """The split of FederatedScope-GNN's Planetoid loader: ``floor(0.6 n / C)`` training nodes *per class*, 20 %
    validation, the rest test.

    A class smaller than that is trained on entirely: no test node has it. Kept to compare with published tables; else
    use ``stratified``.
    """

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        if rest is not None:
            raise ConfigError(f"split fsg takes no parameters, got {rest!r}")
        return cls()

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        nodes = labelled(graph)
        nodes = nodes[torch.randperm(nodes.numel(), generator=stream.torch())]
        per_class = 6 * nodes.numel() // (10 * graph.data.num_classes)
        chosen = rank_inside(graph.data.y[nodes]) < per_class
        rest = nodes[~chosen]
        val = (2 * nodes.numel() + 5) // 10  # a fifth, rounded
        return masks_of(graph, nodes[chosen], rest[:val], rest[val:])

    def __str__(self) -> str:
        return "fsg"


@SPLITS.register("public")
@dataclass(frozen=True)
class PublicSplit:
    """The published masks; ``number`` picks one of several, by default ``seed mod count``."""

    number: int | None = None

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        if rest is not None and not rest.isdecimal():
            raise ConfigError(f"split public takes the number of a published split, such as public:0, got {rest!r}")
        return cls(None if rest is None else int(rest))

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        if graph.public is None:
            raise DataError(
                f"no split was published with this data set ({graph.source}): use another split, such as "
                "stratified:60/20/20"
            )
        count = graph.public.num_splits
        number = stream.seed % count if self.number is None else self.number
        if number >= count:
            raise DataError(f"split public:{number} does not exist: {count} were published, numbered from 0")
        return Masks(graph.public.train[:, number], graph.public.val[:, number], graph.public.test[:, number])

    def __str__(self) -> str:
        return "public" if self.number is None else f"public:{self.number}"


@SPLITS.register("masks:FILE")
@dataclass(frozen=True)
class MasksSplit:
    """Given masks: ``masks:FILE.npz`` with boolean arrays train, val and test, or handed over from Python."""

    where: str

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        if not rest:
            raise ConfigError("split masks: name the file, e.g. masks:split.npz with arrays train, val and test")
        return cls(rest)

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        name = f"{given.MASKS}:{self.where}"
        found = given.recall(name, dict) if given.is_given(given.MASKS, name) else read_masks(Path(self.where))
        return masks_for(graph, found)

    def __str__(self) -> str:
        return f"masks:{self.where}"


def masks_for(graph: Loaded, found: Mapping[str, Tensor]) -> Masks:
    """Masks given for all nodes of the data set, for those of them that take part."""
    count = graph.data.num_nodes if graph.kept is None else graph.kept[1]
    masks = {part: mask_of(found.get(part), count, f"mask {part}")[:, 0] for part in ("train", "val", "test")}
    if graph.kept is not None:
        masks = {part: mask[graph.kept[0]] for part, mask in masks.items()}
    return Masks(**{part: mask & (graph.data.y >= 0) for part, mask in masks.items()})


def given_masks(split: object) -> dict[str, Tensor]:
    """Masks handed over from Python: a mapping with train, val and test, or the three in this order."""
    parts = ("train", "val", "test")
    if isinstance(split, Mapping) and set(parts) <= set(split):
        found = [split[part] for part in parts]
    elif isinstance(split, tuple | list) and len(split) == len(parts):
        found = list(split)
    else:
        raise ConfigError("split takes a text such as 10/10/80, or masks: {'train': ..., 'val': ..., 'test': ...}")
    count = len(found[0])
    return {part: mask_of(mask, count, f"mask {part}")[:, 0] for part, mask in zip(parts, found, strict=True)}


def read_masks(path: Path) -> dict[str, Tensor]:
    """Boolean arrays train, val and test of an ``.npz`` file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in ("train", "val", "test")}
    except FileNotFoundError:
        raise DataError(
            f"there is no file {path}: save boolean arrays train, val and test in it with numpy.savez"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} holds no masks ({error}): save boolean arrays train, val and test with numpy.savez"
        ) from None


def parse_split(text: str) -> Split:
    """The split a string such as ``10/10/80`` or ``stratified:60/20/20`` describes."""
    if ":" not in text and "/" in text:
        return UniformSplit.parse(text)  # the one form without a name
    return parse_form("split", text, SPLITS)


def rank_inside(group: Tensor) -> Tensor:
    """How many earlier entries belong to the same group (n,)."""
    order = torch.argsort(group, stable=True)
    sizes = torch.unique_consecutive(group[order], return_counts=True)[1]
    begin = torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(group.numel()) - begin
    return rank


def _cut_inside(graph: Loaded, nodes: Tensor, group: Tensor, shares: Shares, *, rounded: bool) -> Masks:
    """Cut the (already shuffled) nodes of every group at its shares."""
    rank = rank_inside(group)
    size = torch.unique(group, return_inverse=True, return_counts=True)
    total = size[2][size[1]]
    first, second = (_cut_point(total, share, rounded=rounded) for share in (shares.train, shares.train + shares.val))
    return masks_of(graph, nodes[rank < first], nodes[(rank >= first) & (rank < second)], nodes[rank >= second])


def _cut_point(total: Tensor, share: Fraction, *, rounded: bool) -> Tensor:
    # Whole numbers throughout: 0.7 * 90 is 62.999... in floating point, where int(.7 n) of published code cuts one node
    # earlier.
    top, bottom = share.numerator, share.denominator * 100
    return (2 * total * top + bottom) // (2 * bottom) if rounded else total * top // bottom


def labelled(graph: Loaded) -> Tensor:
    """Rows of nodes with a label."""
    return torch.nonzero(graph.data.y >= 0).flatten()


def shuffled(graph: Loaded, stream: Stream) -> Tensor:
    """Rows of nodes with a label, in random order."""
    nodes = labelled(graph)
    return nodes[torch.randperm(nodes.numel(), generator=stream.torch())]


def masks_of(graph: Loaded, train: Tensor, val: Tensor, test: Tensor) -> Masks:
    """Masks from three lists of rows."""

    def mask(rows: Tensor) -> Tensor:
        out = torch.zeros(graph.data.num_nodes, dtype=torch.bool)
        out[rows] = True
        return out

    return Masks(mask(train), mask(val), mask(test))


def check_masks(masks: Masks, split: str) -> None:
    """Raise if a part is empty or two parts overlap."""
    for part in ("train", "val", "test"):
        if not bool(getattr(masks, part).any()):
            raise DataError(f"split {split} leaves no {part} nodes: use other shares or a larger graph")
    if bool((masks.train & masks.val | masks.train & masks.test | masks.val & masks.test).any()):
        raise DataError(f"split {split} puts a node into two parts: give masks that do not overlap")


def unseen_classes(data: NodeData | GraphSetData) -> list[int]:
    """Classes that are scored but never trained on."""
    return sorted(set(data.y[data.val | data.test].tolist()) - set(data.y[data.train].tolist()))


def check_classes(data: NodeData, split: str) -> None:
    """Say which classes are scored but never trained on. Published splits of small sets have such classes, so it is no
    error.
    """
    if absent := unseen_classes(data):
        names = ", ".join(map(str, absent))
        log.warning(
            "split %s leaves class %s without a training node: no method can predict it; train on more, or take shares "
            "of every class (split=stratified:40/20/40)",
            split,
            names,
        )
