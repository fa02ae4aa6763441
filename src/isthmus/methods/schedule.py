"""Learning rates that change over the rounds of a run, for every method.

    schedule    rate of round t, from 1
    constant    lr
    decay       lr * lr_decay^floor((t - 1) / lr_step)
    cosine      lr * (1 + cos(pi (t - 1) / T)) / 2      T = ``schedule_rounds``; near 0 at the end

Cosine -- Loshchilov & Hutter, ICLR 2017, https://arxiv.org/abs/1608.03983, without restarts. Everybody knows the number
of the round, so nobody sends a rate.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

from isthmus.errors import ConfigError

Schedule = Literal["constant", "cosine", "decay"]


class Scheduled(Protocol):
    """What is read of a method's config."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def lr_decay(self) -> float: ...
    @property
    def lr_step(self) -> int: ...
    @property
    def schedule_rounds(self) -> int | None: ...


def rate_factor(config: Scheduled, round: int) -> float:
    """What a rate is multiplied by in a round, from 1."""
    if config.schedule == "decay":
        return config.lr_decay ** ((round - 1) // config.lr_step)
    if config.schedule == "cosine":
        rounds = max(config.schedule_rounds or round, 1)
        return (1.0 + math.cos(math.pi * min(1.0, (round - 1) / rounds))) / 2.0
    return 1.0


def check_schedule(config: Scheduled) -> None:
    """Refuse numbers that make no schedule."""
    if config.lr_decay <= 0.0:
        raise ConfigError(f"lr_decay must be above 0, got {config.lr_decay}")
    if config.lr_step < 1:
        raise ConfigError(f"lr_step must be at least 1, got {config.lr_step}")
    if config.schedule_rounds is not None and config.schedule_rounds < 1:
        raise ConfigError(f"schedule_rounds must be at least 1, got {config.schedule_rounds}")
