"""How well one client's model does, as counts: enough for pooled and per-client scores, and nothing about a single node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.federation.messages import Message, Metric
from isthmus.records import Record


@dataclass(frozen=True)
class Tally(Record):
    """Right answers, all answers, and the summed loss, of one part of the split."""

    correct: int
    total: int
    loss: float


@dataclass(frozen=True)
class Evaluation(Message):
    """One client's tallies by part: ``train``, ``val``, ``test``."""

    parts: Metric[Mapping[str, Tally]]


def tally(logits: Tensor, y: Tensor, mask: Tensor) -> Tally:
    """Count over the rows in ``mask``. Loss is ordinary cross-entropy whatever the training loss, so curves can be compared."""
    rows, labels = logits[mask], y[mask]
    if labels.numel() == 0:
        return Tally(0, 0, 0.0)
    loss = torch.nn.functional.cross_entropy(rows, labels, reduction="sum")
    return Tally(int((rows.argmax(1) == labels).sum()), int(labels.numel()), float(loss))
