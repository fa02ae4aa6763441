"""Differential privacy: clip and noise for updates, gradients and embeddings, and what it costs.

Noise comes from the party's own secret stream. It is made of 64-bit floats, so the guarantee holds for the real-number
mechanism; attacks on low-order bits of floats (Mironov, 2012) are not excluded. What a number of releases is worth is
said by ``accountant``, or, in closed form, by zero-concentrated privacy below.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.privacy.keys import frame
from isthmus.privacy.prg import Keystream
from isthmus.tensors import Weights

Noise = Literal["gaussian", "laplace"]


@dataclass(frozen=True)
class Release:
    """What may leave, and how many of its parts (the update, or rows) had to be clipped."""

    weights: Mapping[str, Tensor]
    clipped: int
    parts: int


@dataclass(frozen=True)
class Mechanism:
    """Clip to norm ``clip``, then add noise of scale ``multiplier * clip`` to every number.

    Gaussian noise goes with the L2 norm (scale = standard deviation), Laplace noise with the L1 norm (scale = b).
    Sensitivity is ``clip`` where a part is added or removed and ``2 * clip`` where it is replaced; the accountant's
    multiplier counts in that unit.
    """

    clip: float
    multiplier: float
    noise: Noise = "gaussian"

    def __post_init__(self) -> None:
        if not (0 < self.clip < math.inf and 0 <= self.multiplier < math.inf):
            raise ConfigError(f"dp needs clip > 0 and multiplier >= 0, got {self.clip} and {self.multiplier}")
        if self.noise not in ("gaussian", "laplace"):
            raise ConfigError(f"dp noise is 'gaussian' or 'laplace', got {self.noise!r}")

    @property
    def scale(self) -> float:
        """Scale of the noise on one number."""
        return self.multiplier * self.clip

    def release_update(
        self, weights: Weights, *, secret: bytes | None = None, purpose: tuple[str | int, ...] = ()
    ) -> Release:
        """One update or gradient, clipped as a whole: its norm is over all tensors.

        Args:
            secret: Of the party, 32 bytes or more. With it, noise is a function of secret, purpose and the clipped
                numbers: asked for the same thing twice, e.g. after a crash, the party releases the same numbers and
                nothing new. Without, noise is always fresh.
        """
        flat = (
            torch.cat([tensor.detach().reshape(-1).double() for tensor in weights.values()])
            if weights
            else torch.empty(0).double()
        )
        rows, clipped = self._clip(flat[None])
        noisy = self._noisy(rows, None if secret is None else _derived(secret, purpose, rows)).reshape(-1)
        parts = torch.split(noisy, [tensor.numel() for tensor in weights.values()])
        result = {
            name: part.reshape(tensor.shape).to(tensor.dtype)
            for (name, tensor), part in zip(weights.items(), parts, strict=True)
        }
        return Release(result, clipped, 1)

    def release_rows(
        self, rows: Tensor, *, secret: bytes | None = None, purpose: tuple[str | int, ...] = ()
    ) -> tuple[Tensor, int]:
        """Embeddings or gradients per node, each row clipped on its own: (n, d) -> (n, d) and how many rows were
        clipped.

        ``secret`` and ``purpose`` as in :meth:`release_update`.
        """
        kept, clipped = self._clip(rows.detach().reshape(rows.shape[0], -1).double())
        return self._noisy(kept, None if secret is None else _derived(secret, purpose, kept)).reshape(rows.shape).to(
            rows.dtype
        ), clipped

    def _clip(self, rows: Tensor) -> tuple[Tensor, int]:
        if not bool(torch.isfinite(rows).all()):
            raise RunError("NaN or infinity has no norm to clip: training has diverged; lower lr or check the features")
        norms = torch.linalg.vector_norm(rows, ord=2 if self.noise == "gaussian" else 1, dim=1, keepdim=True)
        return rows * (self.clip / norms.clamp(min=self.clip)), int((norms > self.clip).sum())

    def _noisy(self, rows: Tensor, stream: Keystream | None = None) -> Tensor:
        if self.multiplier == 0:
            return rows
        stream = stream or Keystream.fresh()
        drawn: NDArray[np.float64] = (
            stream.normal(rows.numel()) if self.noise == "gaussian" else stream.laplace(rows.numel())
        )
        return rows + self.scale * torch.from_numpy(drawn).reshape(rows.shape)


def _derived(secret: bytes, purpose: tuple[str | int, ...], rows: Tensor) -> Keystream:
    """A stream that other numbers would not share: the same noise on two different updates would show their
    difference.
    """
    return secret_stream(secret, (*purpose, hashlib.sha256(rows.numpy().tobytes()).digest()))


def secret_stream(secret: bytes, purpose: tuple[str | int | bytes, ...]) -> Keystream:
    """The stream a party's secret (32 bytes or more) has for one purpose: nobody else knows it, and a replayed round
    draws it again.
    """
    if len(secret) < 32:
        raise ValueError(f"a secret for noise has 32 bytes or more, got {len(secret)}")
    return Keystream(hmac.digest(secret, frame("isthmus/dp/1", *purpose), "sha256"))


# -- zero-concentrated differential privacy (Bun and Steinke, 2016)
# ------------------------------------------------------------------


def zcdp_rho(releases: int, clip: float, sigma: float) -> float:
    """rho = R (2C)^2 / (2 sigma^2) for R Gaussian releases of a part clipped to C, replaced by any other (HiFGL spec,
    section 11.7).
    """
    if releases < 1 or clip <= 0 or sigma <= 0:
        raise ConfigError(f"zCDP needs releases >= 1, clip > 0 and sigma > 0; got {releases}, {clip}, {sigma}")
    return releases * (2 * clip) ** 2 / (2 * sigma**2)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """eps = rho + 2 sqrt(rho ln(1/delta))."""
    _check_delta(delta)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"delta lies in (0, 1), got {delta}; a common choice is below one over the number of records")


# -- warnings --------------------------------------------------------------------------------------


def noise_warning(mechanism: Mechanism, dimension: int, parties: int = 1) -> str | None:
    """A sentence for log and report when noise is much larger than what is released, else None.

    The signal can be at most ``clip`` long; noise is about ``scale * sqrt(d)`` long (Laplace: sqrt(2) more) and,
    averaged over parties that each add their own, sqrt(parties) shorter.
    """
    per_number = mechanism.scale * (1.0 if mechanism.noise == "gaussian" else math.sqrt(2.0))
    ratio = per_number * math.sqrt(dimension / max(1, parties)) / mechanism.clip
    if ratio <= 1:
        return None
    total = "expect accuracy near chance" if ratio > 10 else "expect a clear loss of accuracy"
    return (
        f"noise is about {ratio:.3g} times as long as the longest signal that clipping at {mechanism.clip:g} lets "
        "through "
        f"({dimension} numbers, {parties} parties): {total}; release less often, fewer numbers, or allow a larger "
        "epsilon"
    )
