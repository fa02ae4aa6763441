"""Splits by a column of the data: groups that must not be torn apart, and time.

    group:ring              nodes with the same value are in one part only; nodes without a value stand alone
    group:ring:40/20/40     the same with other shares than 60/20/20
    time:opened             the past trains, the future tests
    time:opened:60/20/20    likewise

A random split puts members of one group into training and test, so a method that spreads labels along edges is tested
on what it was told. Columns come with a data set (`isthmus.data.amlsim`), with own data (any attribute of a ``Data``
that has one value per node) or stand in a table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.split import SPLITS, Masks, Shares, labelled, masks_of
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError, DataError, unknown
from isthmus.seeds import Stream

Ints = NDArray[np.int64]
DEFAULT_SHARES = "60/20/20"


@dataclass(frozen=True)
class _OfColumn:
    """A split that looks at a column."""

    prefix: ClassVar[str] = ""
    column: str
    shares: Shares

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        return cls(*parse_column(cls.prefix, rest))

    def values(self, graph: Loaded) -> NDArray[np.generic]:
        """The column's value of every node."""
        if self.column not in graph.columns:
            if not graph.columns:
                raise DataError(
                    f"split {self}: these data have no columns beside features and labels: use another split"
                )
            raise unknown("column of the data", self.column, graph.columns)
        return np.asarray(graph.columns[self.column])

    def __str__(self) -> str:
        return f"{self.prefix}:{self.column}:{self.shares}"


@SPLITS.register("group:COLUMN")
@dataclass(frozen=True)
class GroupSplit(_OfColumn):
    """Nodes with the same value in a column are in one part only, e.g. a laundering ring (`group:ring:40/20/40`).

    Nodes without a value (negative number, empty text, None, NaN) stand alone. Every class has its share in every part
    as far as the groups allow it: they are placed largest first, each where its classes are short most, then nodes
    alone fill up.
    """

    prefix: ClassVar[str] = "group"

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        rows = labelled(graph).numpy()
        group = groups_of(self.values(graph)[rows])
        together = np.unique(group[group >= 0])
        if len(together) < 3 and not (group < 0).any():
            raise DataError(
                f"split {self}: the column has {len(together)} different values and every node has one, but three "
                "parts need at least three groups: use another column"
            )
        part = place_groups(group, graph.data.y.numpy()[rows], self.shares, stream)
        return masks_of(graph, *(torch.from_numpy(rows[part == index]) for index in range(3)))


@SPLITS.register("time:COLUMN")
@dataclass(frozen=True)
class TimeSplit(_OfColumn):
    """The past trains, the future tests: nodes in the order of a column, equal times in one part (`time:first_day`)."""

    prefix: ClassVar[str] = "time"

    def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
        rows = labelled(graph).numpy()
        values = self.values(graph)[rows]
        if values.dtype.kind not in "iufM" or np.isnan(values.astype(np.float64)).any():
            raise DataError(f"split {self}: every labelled node needs a number as its time in column {self.column}")
        part = cut_by_time(values.astype(np.float64), self.shares)
        return masks_of(graph, *(torch.from_numpy(rows[part == index]) for index in range(3)))


def parse_column(kind: str, rest: str | None) -> tuple[str, Shares]:
    """Column and shares of what follows ``group:`` or ``time:``."""
    column, _, shares = (rest or "").partition(":")
    if not column:
        example = {"group": "group:ring", "time": "time:opened"}[kind]
        raise ConfigError(f"split {kind}: name the column, e.g. {example} or {example}:{DEFAULT_SHARES}")
    return column, Shares.parse(shares or DEFAULT_SHARES)


def groups_of(values: NDArray[np.generic]) -> Ints:
    """Number of each value's group from 0, -1 for a value that means none: negative, NaN, None or empty."""
    if values.dtype.kind in "iufb":
        numbers = values.astype(np.float64)
        alone = np.isnan(numbers) | (numbers < 0)
    else:
        alone = np.array([value is None or str(value).strip() in ("", "nan", "None") for value in values.tolist()])
    group = np.full(len(values), -1, dtype=np.int64)
    if not alone.all():
        kept = values[~alone]
        group[~alone] = np.unique(kept if kept.dtype.kind != "O" else kept.astype(str), return_inverse=True)[1]
    return group


def place_groups(group: Ints, y: Ints, shares: Shares, stream: Stream) -> Ints:
    """Part (0, 1, 2) of every labelled node so that no group is in two parts.

    Args:
        group: Group of every node, -1 for a node alone.
        y: Its class.
    """
    rng = stream.numpy()
    classes = int(y.max()) + 1
    totals = np.bincount(y, minlength=classes).astype(np.float64)
    wanted = np.array([float(share) / 100 for share in (shares.train, shares.val, shares.test)])
    lacking = wanted[:, None] * totals  # of every part and class; never asks for more than there is
    part = np.full(len(y), -1, dtype=np.int64)
    numbers = int(group.max(initial=-1)) + 1
    contents = np.zeros((numbers, classes))
    grouped = np.flatnonzero(group >= 0)
    np.add.at(contents, (group[grouped], y[grouped]), 1)
    chosen = np.full(numbers, -1, dtype=np.int64)
    shuffled = rng.permutation(numbers)
    for number in shuffled[np.argsort(-contents[shuffled].sum(1), kind="stable")]:
        # Relative to what a class has in all and a part is to have: rare classes count as much as common ones.
        short = (lacking / np.maximum(totals, 1)) @ contents[number]
        short[wanted == 0] = -np.inf
        chosen[number] = int(np.argmax(short / np.maximum(wanted, 1e-9)))
        lacking[chosen[number]] -= contents[number]
    part[grouped] = chosen[group[grouped]]
    for label in range(classes):
        alone = rng.permutation(np.flatnonzero((group < 0) & (y == label)))
        room = np.maximum(lacking[:, label], 0)
        room = room / room.sum() if room.sum() else wanted
        cuts = np.floor(np.cumsum(room)[:2] * len(alone) + 0.5)
        part[alone] = np.searchsorted(cuts, np.arange(len(alone)), side="right")
    return part


def cut_by_time(times: NDArray[np.float64], shares: Shares) -> Ints:
    """Part (0, 1, 2) of every time: cut where the shares are met best without tearing equal times apart."""
    order = np.sort(times)
    begins = np.flatnonzero(np.concatenate([[True], order[1:] != order[:-1], [True]]))  # a cut may lie here only
    first, second = (
        begins[np.argmin(np.abs(begins - float(share) * len(times) / 100))]
        for share in (shares.train, shares.train + shares.val)
    )
    rank = np.searchsorted(order, times, side="left")
    part: Ints = (rank >= first).astype(np.int64) + (rank >= second)
    return part


def part_by_name(name: str, seed: int, shares: Shares) -> int:
    """Part of a group that several owners have members of: drawn by its name, so they agree without a message."""
    digest = hashlib.sha256(f"isthmus/group/{seed}/{name}".encode()).digest()
    drawn = int.from_bytes(digest[:8], "big") * 100
    return int(drawn >= shares.train * 2**64) + int(drawn >= (shares.train + shares.val) * 2**64)
