"""Callbacks of the round loop, e.g. progress and tracking. Methods do not know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a command that only shows its help does not wait for torch
    from isthmus.experiments.config import Settings


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a round."""

    phase: str
    round: int
    rounds: int
    step: int
    steps: int
    seconds_left: float | None
    bytes: Mapping[str, int]
    """Sent so far, setup included, evaluations not, by channel."""
    scores: Mapping[str, Any] | None
    """The metrics line if this round was evaluated."""
    absent: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Clients that are lost: the step from which the run goes on without each, and when that was (seconds since
    1970; after a restart of the server, since then)."""


class Callback:
    """What is told of a run while it runs. Override what you need; ``isthmus.run(..., callbacks=[yours])``.

    An exception that a callback raises ends the run, which can be resumed from its last checkpoint.
    """

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        """Before the first round of this process; ``step`` > 0 after a resume."""

    def on_round(self, progress: Progress) -> None:
        """After each committed round."""

    def on_recover(self, reason: str, step: int) -> None:
        """Parties were lost; the run continues from ``step``."""

    def on_end(self, result: Mapping[str, Any]) -> None:
        """After the last round, with the result."""

    def close(self) -> None:
        """When this process stops working on the run, also after an error or Ctrl-C."""
