"""Messages of the preparation. Statistics are summed over owners; what links owners goes from owner to owner alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isthmus.federation.messages import Ciphertext, Count, FeatureStatistic, Identifier, Message, Structure


@dataclass(frozen=True)
class CellCounts(Message):
    """Owner -> server, summed: filled cells of every numeric feature in fixed buckets (J, 257)."""

    cells: Count[Tensor]


@dataclass(frozen=True)
class Known(Message):
    """Server -> owners: what is known so far of every numeric feature (J,)."""

    number: Count[Tensor]
    exponent: FeatureStatistic[Tensor]
    mean: FeatureStatistic[Tensor]
    std: FeatureStatistic[Tensor]


@dataclass(frozen=True)
class FeatureSums(Message):
    """Owner -> server, summed: sums of values, or of squares (J,)."""

    values: FeatureStatistic[Tensor]


@dataclass(frozen=True)
class FeatureShapes(Message):
    """Owner -> server, summed: sums of standardised values and their squares (J,), cells in fine bins."""

    first: FeatureStatistic[Tensor]
    second: FeatureStatistic[Tensor]
    median_bins: FeatureStatistic[Tensor]
    rank_bins: FeatureStatistic[Tensor]


@dataclass(frozen=True)
class Totals(Message):
    """Server -> owners: the last sum, from which each works out scaling and imputation."""

    known: Known
    shapes: FeatureShapes


@dataclass(frozen=True)
class Partners(Message):
    """Server -> owners: who takes part."""

    owners: Identifier[tuple[str, ...]]


@dataclass(frozen=True)
class LinkKey(Message):
    """First owner -> the others, sealed: the key ids are hashed with. The server never has it."""

    key: Identifier[bytes]


@dataclass(frozen=True)
class LinkRequest(Message):
    """Owner -> owner: its edges that lead elsewhere, each under a secret power."""

    request: Ciphertext[bytes]


@dataclass(frozen=True)
class LinkAnswer(Message):
    """Owner -> owner: the same under both powers, and its own edges under its power."""

    answer: Ciphertext[bytes]


@dataclass(frozen=True)
class ListedEdges(Message):
    """Owner -> owner, only in one process (``link=plain``): its edges that lead elsewhere, in the clear."""

    items: Structure[bytes]


@dataclass(frozen=True)
class Links(Message):
    """Owner -> owner: the edges both list, which both know already."""

    items: Structure[bytes]
