"""Which graphs are trained on, selected on, tested on: splits of one client's graphs.

A split is a small frozen object made from a string (`parse_graph_split`). A new one needs nothing but its class, here
or in a file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.parameters import parse_form
from isthmus.data.split import Shares
from isthmus.errors import ConfigError
from isthmus.registry import Registry
from isthmus.seeds import Stream

FEDSTAR_SPLIT_SEED = 123  # of the published code; part of its protocol, so not one of our streams


class GraphSplit(Protocol):
    """A rule that picks training, validation and test graphs of one client."""

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        """From what follows the colon; None where the text has no colon."""
        ...

    def draw(self, y: NDArray[np.int64], stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        """Masks (G,) of training, validation and test graphs; ``y`` (G,) are their classes."""
        ...


GRAPH_SPLITS: Registry[type[GraphSplit]] = Registry("split of graphs", "isthmus.data")
"""Splits of graphs by an example of their form; what precedes the colon is the name. To add one, decorate a frozen
dataclass; the first line of its docstring is what ``isthmus partitions`` shows.
"""


@GRAPH_SPLITS.register("stratified:80/10/10")
@dataclass(frozen=True)
class StratifiedGraphSplit:
    """Stratified split of one client's graphs.

    First the training part is drawn, then the rest is divided, both stratified with the rounding of scikit-learn, which
    the published code uses. Where a class is too small for that, the same sizes are drawn without regard to class, but
    at least one graph for every part.

    Args:
        shares: Percentages.
        fixed: Seed to draw with whatever the scenario's seed; None to follow the scenario.
    """

    shares: Shares
    fixed: int | None = None

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        shares = Shares.parse(rest or "")
        if min(shares.train, shares.val, shares.test) <= 0:
            raise ConfigError(f"split stratified:{rest}: every part needs a share above 0")
        return cls(shares)

    def draw(self, y: NDArray[np.int64], stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        seed = stream.integer() % 2**32 if self.fixed is None else self.fixed
        held = float(self.shares.val + self.shares.test)
        train, rest = _halve(np.arange(len(y)), y, held / 100, seed, least=2)
        val, test = _halve(rest, y[rest], float(self.shares.test) / held, seed, least=1)
        return _mask(len(y), train), _mask(len(y), val), _mask(len(y), test)


@GRAPH_SPLITS.register("fedstar")
@dataclass(frozen=True)
class FedStarSplit(StratifiedGraphSplit):
    """Stratified 80/10/10, drawn with the published code's seed whatever the scenario's (FedStar spec, section 9.8)."""

    @classmethod
    def parse(cls, rest: str | None) -> Self:
        if rest is not None:
            raise ConfigError(f"split fedstar takes no parameters, got {rest!r}")
        return cls(Shares.parse("80/10/10"), FEDSTAR_SPLIT_SEED)


def parse_graph_split(text: str) -> GraphSplit:
    """The split a string such as ``fedstar`` or ``stratified:80/10/10`` describes."""
    return parse_form("split of graphs", text, GRAPH_SPLITS)


def _halve(
    rows: NDArray[np.int64], y: NDArray[np.int64], share: float, seed: int, *, least: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two parts, the second with ``share`` of the rows; stratified if the classes allow it."""
    from sklearn.model_selection import train_test_split

    try:
        first, second = train_test_split(rows, test_size=share, random_state=seed, shuffle=True, stratify=y)
        if len(second) >= least:
            return first, second
    except ValueError:  # a class with one member, or fewer places than classes
        pass
    shuffled = np.random.default_rng(seed).permutation(rows)
    size = min(max(round(share * len(rows)), least), len(rows) - 1)
    return shuffled[size:], shuffled[:size]


def _mask(count: int, rows: NDArray[Any]) -> Tensor:
    mask = torch.zeros(count, dtype=torch.bool)
    mask[torch.from_numpy(np.asarray(rows, dtype=np.int64))] = True
    return mask
