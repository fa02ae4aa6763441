"""How well one client's model does, as counts: enough for pooled and per-client scores, and nothing about a single
node.

Counts of one client under models that the server chooses tell the client's classes: a model that always says class c
has as many right answers as the client has nodes of c. So with secure sums the counts of all clients are summed behind
masks (`scores_of`), and so is what tells how far the clients' scores lie apart (`ScoreBins`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isthmus.errors import ConfigError, DataError
from isthmus.federation.interface import Federation
from isthmus.federation.messages import Count, Identifier, LabelStatistic, Message, Metric, PartyId
from isthmus.metrics.histogram import score_histogram
from isthmus.metrics.registry import parse_metric
from isthmus.metrics.score_bins import bin_score
from isthmus.metrics.scores import accuracy
from isthmus.nn.loss import tallies

ALL_CLIENTS = ""
"""Stands for all clients together where only their sum is known."""
LOSS_UNIT = 2.0**20
"""Masked sums hold real numbers below 8e6 over the number of clients; a summed loss may be larger, so it is masked in
this unit, to 2^-20.
"""
BINNED = ("val", "test", "test:minority", "test:majority")
"""Parts whose scores clients bin."""


@dataclass(frozen=True)
class Tally(Message):
    """Right answers, all answers, and the summed loss, of some samples."""

    correct: Metric[int]
    total: Count[int]
    loss: Metric[float]


@dataclass(frozen=True)
class Evaluation(Message):
    """One client's tallies by part: ``train``, ``val``, ``test``, and groups of the test part such as
    ``test:minority``. Groups of classes make it a statistic of labels, beside the counts and scores in each tally.
    """

    parts: LabelStatistic[Mapping[str, Tally]]

    def summand(self) -> Evaluation:
        return self.with_losses_times(1.0 / LOSS_UNIT)

    def with_losses_times(self, factor: float) -> Evaluation:
        """The same counts; losses multiplied."""
        return Evaluation({part: replace(tally, loss=tally.loss * factor) for part, tally in self.parts.items()})


@dataclass(frozen=True)
class WantedMetric(Message):
    """Which score clients bin."""

    metric: Identifier[str]


@dataclass(frozen=True)
class ScoreBins(Message):
    """Histograms of the clients' scores by part, see `isthmus.metrics.score_bins`; asked for only behind masks."""

    counts: Metric[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Detail(Message):
    """What scores beyond accuracy need, by part (``val``, ``test``). It tells how many samples of each class a client
    has, so it is asked for only where such a score is wanted (``--metric``).

    confusion: (C, C) counts, row = true class. histogram: (C, 2, B) counts of predicted scores, see
    `isthmus.metrics.histogram`.
    """

    confusion: LabelStatistic[Mapping[str, Tensor]]
    histogram: LabelStatistic[Mapping[str, Tensor]]


def tally(logits: Tensor, y: Tensor, mask: Tensor) -> Tally:
    """Count over the rows in ``mask``. Loss is ordinary cross-entropy whatever the training loss, so curves can be
    compared.
    """
    rows, labels = logits[mask], y[mask]
    if labels.numel() == 0:
        return Tally(0, 0, 0.0)
    loss = torch.nn.functional.cross_entropy(rows, labels, reduction="sum")
    return Tally(int((rows.argmax(1) == labels).sum()), int(labels.numel()), float(loss))


class Counter:
    """Counts right answers and losses of clients' samples, all parts of the split in one pass.

    Args:
        y: Classes of each client's samples.
        masks: Of each client, which of its samples belong to which part.
    """

    def __init__(self, y: Sequence[Tensor], masks: Sequence[Mapping[str, Tensor]]) -> None:
        self.parts, self.clients = tuple(masks[0]), len(y)
        self.y = torch.cat(list(y))
        self.owner = torch.repeat_interleave(torch.arange(self.clients), torch.tensor([len(own) for own in y]))
        marks = torch.stack([torch.cat([each[part] for each in masks]) for part in self.parts])
        self.totals = torch.stack([torch.bincount(self.owner[mark], minlength=self.clients) for mark in marks])
        self.bits = (marks.long() << torch.arange(len(marks)).unsqueeze(1)).sum(0)
        scored = self.y[self.bits > 0]
        if bool((scored < 0).any()):
            raise DataError("a sample that is scored has a negative label; leave unlabelled ones out of the split")
        self.classes = int(scored.max()) + 1 if len(scored) else 0

    def count(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Right answers and summed cross entropy of each part at each client (parts, K)."""
        if logits.shape[0] != len(self.y) or logits.shape[1] < self.classes:  # the compiled loop checks no bounds
            raise DataError(
                f"scores of shape {tuple(logits.shape)} do not fit {len(self.y)} samples of {self.classes} classes"
            )
        return tallies(logits.detach(), self.y, self.owner, self.bits, len(self.parts), self.clients)

    def evaluation(self, logits: Tensor) -> Evaluation:
        """Of a single client."""
        correct, losses = self.count(logits)
        columns = (column[:, 0].tolist() for column in (correct, self.totals, losses))
        return Evaluation({part: Tally(*counts) for part, *counts in zip(self.parts, *columns, strict=True)})

    def stacked(self, logits: Tensor) -> Evaluation:
        """Of all clients, as a stack."""
        correct, losses = self.count(logits)
        columns: Any = (table.unbind(0) for table in (correct, self.totals, losses))
        return Evaluation({part: Tally(*counts) for part, *counts in zip(self.parts, *columns, strict=True)})


def detail(logits: Tensor, y: Tensor, masks: Mapping[str, Tensor]) -> Detail:
    """Confusion and score histograms of each part."""
    classes = logits.shape[1]
    confusion, histogram = {}, {}
    for part, mask in masks.items():
        rows, labels = logits[mask], y[mask]
        confusion[part] = torch.bincount(labels * classes + rows.argmax(1), minlength=classes * classes).view(
            classes, classes
        )
        histogram[part] = score_histogram(rows, labels)
    return Detail(confusion, histogram)


def bin_scores(evaluation: Evaluation, metric: str, found: Detail | None = None) -> ScoreBins:
    """A client's own scores, binned: accuracy, or another metric of ``val`` and ``test`` from the counts ``found``."""
    scores = {part: accuracy(evaluation.parts[part]) for part in BINNED if part in evaluation.parts}
    score = parse_metric(metric)
    if score is not None:
        if found is None:
            raise ConfigError(f"clients of this method report only accuracy, not {metric}: leave --metric out")
        scores |= {part: score(found.confusion[part], found.histogram[part]) for part in ("val", "test")}
    return ScoreBins({part: torch.tensor(bin_score(value)) for part, value in scores.items()})


class SummedScores(Mapping[PartyId, Evaluation]):
    """What is known of an evaluation under secure sums: the total over all clients, under `ALL_CLIENTS`.

    Args:
        role: Who was asked.
    """

    def __init__(self, total: Evaluation, role: str) -> None:
        self.total, self.role = total, role

    def __getitem__(self, party: PartyId) -> Evaluation:
        return {ALL_CLIENTS: self.total}[party]

    def __iter__(self) -> Iterator[PartyId]:
        return iter((ALL_CLIENTS,))

    def __len__(self) -> int:
        return 1


def scores_of(
    federation: Federation, handler: Callable[..., Evaluation], request: Any = None
) -> Mapping[PartyId, Evaluation]:
    """Ask all parties for their tallies: of each, or with secure sums only the total of all."""
    arguments = () if request is None else (request,)
    if not federation.secure:
        return federation.call(handler, *arguments)
    total: Evaluation = federation.sum(handler, *arguments, at_least=federation.least)
    return SummedScores(total.with_losses_times(LOSS_UNIT), federation.role)


def details_of(federation: Federation, handler: Callable[..., Detail]) -> Mapping[PartyId, Detail]:
    """Ask all parties for counts by class: of each, or with secure sums only the total of all."""
    return (
        {ALL_CLIENTS: federation.sum(handler, at_least=federation.least)}
        if federation.secure
        else federation.call(handler)
    )
