"""Callbacks of the round loop: progress display, TensorBoard. Methods do not know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
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
    scores: Mapping[str, Any] | None
    """The metrics line if this round was evaluated."""


class Callback:
    """Base class: override what you need."""

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


class TensorBoard(Callback):
    """Scores and bytes as TensorBoard scalars under ``tensorboard/`` of the run folder."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("tensorboard=true needs an extra: pip install 'isthmus[tensorboard]'") from None
        self._factory = SummaryWriter
        self._writer: Any = None
        self._folder: Path | None = None

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        self._folder = folder / "tensorboard"
        self._open(step)

    def _open(self, step: int) -> None:
        # Points of the rounds after ``step`` are removed: those rounds will be repeated.
        self.close()
        self._writer = self._factory(str(self._folder), purge_step=step + 1 if step else None)

    def on_round(self, progress: Progress) -> None:
        for name, value in (progress.scores or {}).items():
            if isinstance(value, float) and name not in ("step", "round"):
                self._writer.add_scalar(name, value, progress.step)
        for channel, value in progress.bytes.items():
            self._writer.add_scalar(f"bytes/{channel}", value, progress.step)

    def on_recover(self, reason: str, step: int) -> None:
        self._open(step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
