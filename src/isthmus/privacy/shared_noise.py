"""Noise that only a total has in full: every party of a secure sum adds a share of it (distributed differential
privacy).

After Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation,
ICML 2021, https://arxiv.org/abs/2102.06387. A party clips its numbers to L2 norm C, rounds them to a grid, adds a
discrete Gaussian number to each, and masks them. What the server reads has the noise of all who are in the total;
nothing is protected by a party's own share alone.

    paper        here
    c            clip            C, before rounding
    gamma        step            of the grid, chosen so that a share is 2^SCALE_BITS grid steps
    sigma        2^SCALE_BITS    standard deviation of one share, in grid steps
    n            shares          T, the shares that are counted
    tau_n        excess(...)     by how much a sum of n discrete Gaussians may differ from one

**How much.** The noise of T shares has standard deviation ``multiplier * clip`` per number. T is what is left when as
many parties as allowed are lost *and* those that work with the server have told it their shares; noise of further
parties is added after that and takes nothing away. So the guarantee holds for every total in which T honest parties
are, and the noise is larger by sqrt(n / T) where n are.

**Sensitivity.** Numbers are rounded to the nearest grid point: the norm grows by at most sqrt(d) / 2 steps, whatever
the numbers are. The paper rounds at random, and again until the norm is small enough, because its grid is coarse (it
sends few bits); here words have 64 bits, the grid is fine, and the worst case costs next to nothing. All data of a
party replaced: the totals differ by at most ``Delta = 2 (C / step + sqrt(d) / 2)`` in norm.

**Bound.** Proposition 14 of the paper, third bound: for alpha > 1, with sigma >= 1/2,

    D_alpha <= alpha / 2 (Delta / (sqrt(T) sigma) + tau_T sqrt(d))^2,
    tau_T = 10 sum_{k=1}^{T-1} exp(-2 pi^2 sigma^2 k / (k + 1))

which is the Renyi divergence of a Gaussian mechanism; `counted` is its multiplier, for the accountant. With a share of
2^20 steps tau is below 10^(-10^12): it is zero in 64-bit floats, and so is the part that depends on the dimension.

**Randomness.** Shares are drawn exactly (Canonne, Kamath, Steinke: The Discrete Gaussian for Differential Privacy,
NeurIPS 2020, algorithms 1 to 3), in whole numbers: no float takes part, so there is nothing to read from low-order
bits. Standard deviations are powers of two, which makes all fractions of the sampler exact in 64 bits. How long a draw
takes depends on what is drawn; who can time a party to nanoseconds is not covered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.privacy.dp import Release, secret_stream
from isthmus.privacy.kernels import discrete_gaussians
from isthmus.privacy.prg import Keystream
from isthmus.tensors import Weights

SCALE_BITS = 20
"""Standard deviation of a share: 2^20 grid steps. The most for which the sampler's fractions fit in 64 bits."""
SCALE = 1 << SCALE_BITS
MOST_NOISE = 2**11
"""Largest number drawn, in standard deviations: beyond it is drawn again, whose probability is below e^-2000."""
_SLACK = 1 + 2.0**-20
"""Norms are computed in 64-bit floats: more than all their rounding for 10^9 numbers."""
_WORDS_EACH = 24
"""Random words fetched for every number still to be drawn; it takes about 14."""


@dataclass(frozen=True)
class SharedNoise:
    """Clip to norm ``clip``, round to the grid, add one of ``shares`` shares of noise ``multiplier * clip``."""

    clip: float
    multiplier: float
    shares: int

    def __post_init__(self) -> None:
        if not (0 < self.clip < math.inf and 0 < self.multiplier < math.inf and self.shares >= 1):
            raise ConfigError(
                f"shared noise needs clip > 0, noise > 0 and at least one share; got {self.clip}, {self.multiplier}, "
                f"{self.shares}"
            )

    @property
    def step(self) -> float:
        """Width of the grid."""
        return self.multiplier * self.clip / math.sqrt(self.shares) / SCALE

    def norm(self, values: int) -> float:
        """Longest vector of so many numbers that may leave a party, without noise, in grid steps."""
        return self.clip / self.step * _SLACK + math.sqrt(values) / 2

    def counted(self, values: int) -> float:
        """Noise multiplier of the Gaussian mechanism with the same Renyi divergences, for parts of norm 1."""
        own = 1 / (math.sqrt(self.shares) * SCALE)
        return 2 / (2 * self.norm(values) * own + excess(self.shares, SCALE) * math.sqrt(values))

    def check(self, values: int, parties: int) -> None:
        """Refuse noise so small that the total could leave its 64 bits."""
        if parties * (self.norm(values) + MOST_NOISE * SCALE) >= 2.0**62:
            raise ConfigError(f"noise of {self.multiplier:g} is too small to be shared by {parties} parties: raise it")

    def release_update(self, update: Weights, *, secret: bytes, purpose: tuple[str | int, ...]) -> Release:
        """A party's numbers in grid steps, whole numbers, with its share.

        Args:
            secret: Of the party. Noise is a function of secret, purpose, this mechanism and the clipped numbers: a
                round that is replayed releases the same again.
        """
        flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in update.values()])
        length = float(torch.linalg.vector_norm(flat))
        if not math.isfinite(length):
            raise RunError("NaN or infinity has no norm to clip: training has diverged; lower lr or check the features")
        steps = torch.round(flat * (self.clip / max(length, self.clip) / self.step)).long().numpy()
        stream = secret_stream(secret, (*purpose, repr(self), steps.tobytes()))
        noisy = torch.from_numpy(steps + discrete_gaussian(stream, steps.size, SCALE_BITS))
        parts = torch.split(noisy, [tensor.numel() for tensor in update.values()])
        found = {name: part.reshape(update[name].shape) for name, part in zip(update, parts, strict=True)}
        return Release(found, int(length > self.clip), 1)

    def mean(self, total: Weights, parties: int, like: Weights) -> dict[str, Tensor]:
        """The mean of so many parties' numbers, from their total in grid steps."""
        factor = self.step / parties
        return {name: (steps.double() * factor).to(like[name].dtype) for name, steps in total.items()}


def excess(shares: int, scale: float) -> float:
    """tau_n of the paper: how far a sum of discrete Gaussians may be from a discrete Gaussian, per number."""
    return 10 * math.fsum(math.exp(-2 * math.pi**2 * scale**2 * k / (k + 1)) for k in range(1, shares))


def discrete_gaussian(stream: Keystream, count: int, bits: int) -> NDArray[np.int64]:
    """Whole numbers x with probability proportional to exp(-x^2 / (2 sigma^2)), sigma = 2^bits."""
    if not 0 <= bits <= SCALE_BITS:
        raise ValueError(f"the sampler is exact for standard deviations of 2^0 to 2^{SCALE_BITS}, got 2^{bits}")
    out, done, left = np.empty(count, np.int64), 0, np.empty(0, np.uint64)
    while done < count:
        # A number that runs out of words is begun again with the same ones: nothing is chosen by how many it takes.
        left = np.concatenate([left, stream.words(_WORDS_EACH * (count - done) + 256)])
        done, used = discrete_gaussians(out, done, left, bits)
        left = left[used:]
    return out
