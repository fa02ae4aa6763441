"""Differential privacy of what clients send in training: clipping, noise, and the guarantee that follows.

Every client clips its own update (FedAvg: ``w_k - w_t``; FedSGD: its gradient) to ``dp_clip`` in L2 norm over all
shared tensors and adds Gaussian noise of standard deviation ``dp_noise * dp_clip`` to every number, before anything
leaves it. So the guarantee needs no trust in the server. Its unit is the client: what is sent would look nearly the
same had *all* data of the client been other data, hence the sensitivity ``2 dp_clip``. A client counts one release per
round, also where fewer are drawn: the server knows whom it drew.

With ``dp_noise_in=total`` (FedAvg, FedProx, FedSGD behind secure sums) a client adds a share of discrete Gaussian
noise only, and totals have noise of standard deviation ``dp_noise * dp_clip`` (`isthmus.privacy.shared_noise`). That is
sqrt(clients) less noise in a mean for the same epsilon, and needs trust in masks and in others: the guarantee is
towards who sees totals, as long as ``dp_shares`` clients of each total add their shares and tell nobody. All clients
take part in every round: a server that draws some of them knows whom, so sampling makes nothing more private here.

The noise is a function of a secret of the party, of the call, and of the clipped numbers. A round that is replayed
after a crash, with the same bits, therefore releases the same numbers again and costs nothing; anything else gets noise
of its own. Two runs with one seed still differ. Epsilon counts the rounds of one run: more runs on the same data
cost more. A site refuses calls beyond the rounds of a run, and runs beyond the budget of its policy (docs/policy.md).
"""

from __future__ import annotations

import math
from typing import Any

from isthmus.methods.training import WeightedConfig
from isthmus.privacy.accountant import Accountant
from isthmus.privacy.dp import Mechanism, noise_warning
from isthmus.privacy.shared_noise import SharedNoise
from isthmus.tensors import Weights, num_values


def statement(
    *,
    clip: float,
    noise: float,
    delta: float,
    releases: int,
    values: int,
    parties: int,
    masked: bool,
    setting: str = "dp_noise",
) -> dict[str, Any]:
    """The ``privacy`` of a result.

    Args:
        releases: How often a client sends something.
        values: Numbers in what it sends.
        parties: Clients per sum.
        setting: Name of the setting that adds noise, for who left it out.
        masked: Whether sums are secure. Then ``epsilon_of_totals`` is that of the totals alone, if all clients
            add their noise.
    """
    mechanism = Mechanism(clip, noise)
    guarantee: dict[str, Any] = {"epsilon": None}
    warning: str | None = (
        f"clipping without noise bounds what one client can change, and guarantees no privacy: set {setting} above 0"
    )
    if noise > 0.0:
        guarantee["epsilon"] = _epsilon(noise, releases, delta)
        if masked:
            guarantee["epsilon_of_totals"] = _epsilon(noise * math.sqrt(parties), releases, delta)
        warning = noise_warning(mechanism, values, parties)
    return {
        **guarantee,
        "delta": delta,
        "unit": "client",
        "neighbours": "all data of one client replaced",
        "mechanism": "gaussian",
        "clip": clip,
        "noise": noise,
        "releases": releases,
        "values": values,
        "not_covered": "counts and losses of evaluation, "
        + ("whose totals have no noise" if masked else "which clients send as they are"),
        "warning": warning,
    }


def shared_statement(noise: SharedNoise, *, delta: float, releases: int, values: int, clients: int) -> dict[str, Any]:
    """The ``privacy`` of a result where clients add shares of the noise of a total."""
    noise.check(values, clients)
    return {
        "epsilon": _epsilon(noise.counted(values), releases, delta),
        "delta": delta,
        "unit": "client",
        "neighbours": "all data of one client replaced",
        "mechanism": "discrete gaussian, in shares",
        "clip": noise.clip,
        "noise": noise.multiplier,
        "shares": noise.shares,
        "relies_on": f"secure sums and the noise of {noise.shares} of {clients} clients: the other "
        f"{clients - noise.shares} may be lost or work with the server",
        "releases": releases,
        "values": values,
        "not_covered": "counts and losses of evaluation, whose totals have no noise",
        # All clients add a share, and the mean is over all of them.
        "warning": noise_warning(Mechanism(noise.clip, noise.multiplier / math.sqrt(noise.shares)), values, clients),
    }


def updates_statement(
    config: WeightedConfig, weights: Weights, *, releases: int, parties: int, masked: bool
) -> dict[str, Any] | None:
    """`statement` of clients that send as many numbers as ``weights`` has, clipped and noised as the config says; None
    where nothing is clipped.
    """
    if not config.dp_clip:
        return None
    values = num_values(weights)
    if config.shared_noise is not None:
        shared, delta = config.shared_noise, config.dp_delta
        return shared_statement(shared, delta=delta, releases=releases, values=values, clients=parties)
    return statement(
        clip=config.dp_clip,
        noise=config.dp_noise,
        delta=config.dp_delta,
        releases=releases,
        values=values,
        parties=parties,
        masked=masked,
    )


def _epsilon(multiplier: float, releases: int, delta: float) -> float | None:
    """None where no finite epsilon can be stated."""
    epsilon = Accountant(replace=True).add(multiplier, releases).epsilon(delta)
    return epsilon if math.isfinite(epsilon) else None
