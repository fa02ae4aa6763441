"""What clipped and noisy releases are worth: epsilon for a delta, through dp-accounting (extra ``dp``)."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Literal

from isthmus.errors import ConfigError
from isthmus.privacy.dp import Noise

Bound = Literal["rdp", "pld"]


class Accountant:
    """Adds up releases about the same records.

    Args:
        bound: ``rdp`` (Renyi divergence, quick) or ``pld`` (privacy loss distributions: smaller epsilon, slower).
        replace: Neighbouring data sets differ by a replaced record instead of an added or removed one. Then the
            sensitivity of a part
            clipped to C is 2C: the multiplier is halved here.
    """

    def __init__(self, bound: Bound = "rdp", *, replace: bool = False) -> None:
        if bound not in ("rdp", "pld"):
            raise ConfigError(f"an accountant is 'rdp' or 'pld', got {bound!r}")
        self._package = _dp_accounting()
        self._accountant = self._package.rdp.RdpAccountant() if bound == "rdp" else self._package.pld.PLDAccountant()
        self._replace = replace
        self.steps = 0

    def add(self, multiplier: float, steps: int = 1, *, sampling: float = 1.0, noise: Noise = "gaussian") -> Accountant:
        """Releases of ``Mechanism(clip, multiplier, noise)``; each record takes part with probability ``sampling``
        (Poisson).
        """
        if not (multiplier > 0 and steps >= 0 and 0 < sampling <= 1):
            raise ConfigError(
                f"accounting needs multiplier > 0, steps >= 0, sampling in (0, 1]; got {multiplier}, {steps}, "
                f"{sampling}"
            )
        if self._replace and sampling < 1:
            raise ConfigError("accounting by replaced records does not use sampling here: set sampling to 1")
        event = self._event(multiplier / 2 if self._replace else multiplier, noise)
        if sampling < 1:
            event = self._package.PoissonSampledDpEvent(sampling, event)
        with _quiet():
            self._accountant.compose(event, steps)
        self.steps += steps
        return self

    def epsilon(self, delta: float) -> float:
        """The epsilon of all releases together."""
        if not 0 < delta < 1:
            raise ConfigError(f"delta lies in (0, 1), got {delta}")
        with _quiet():
            return float(self._accountant.get_epsilon(delta)) if self.steps else 0.0

    def _event(self, multiplier: float, noise: Noise) -> Any:
        return (
            self._package.GaussianDpEvent(multiplier)
            if noise == "gaussian"
            else self._package.LaplaceDpEvent(multiplier)
        )


class _quiet:
    """dp-accounting warns of Renyi orders it leaves out; leaving one out only makes epsilon larger."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("absl")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)


def _dp_accounting() -> Any:
    try:
        importlib.import_module("dp_accounting.rdp")
        importlib.import_module("dp_accounting.pld")
        return importlib.import_module("dp_accounting")
    except ImportError:
        raise ConfigError("counting epsilon needs dp-accounting: install it with `pip install 'isthmus[dp]'`") from None
