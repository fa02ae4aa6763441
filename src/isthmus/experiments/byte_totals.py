"""Bytes a run has sent so far, by part of the run and channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.federation.ledger import Entry, channel_totals

EVALUATION = "evaluation"
"""Phase under which the ledger lists the messages of evaluations."""


@dataclass
class ByteTotals:
    """Bytes per channel of setup, training and evaluation."""

    setup: dict[str, int]
    training: dict[str, int]
    evaluation: dict[str, int]

    @classmethod
    def empty(cls) -> ByteTotals:
        return cls(channel_totals([]), channel_totals([]), channel_totals([]))

    def add(self, entries: Sequence[Entry], setup_phases: frozenset[str]) -> None:
        for entry in entries:
            if entry.phase == EVALUATION:
                totals = self.evaluation
            else:
                totals = self.setup if entry.phase in setup_phases else self.training
            totals[entry.channel] += entry.total
