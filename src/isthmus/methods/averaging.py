"""How a server forms one step from its clients' updates: the mean, or something that one client cannot move far.

A client that sends ``w_t - b u`` in the place of ``w_t + u`` turns a mean around as soon as b is as large as the number
of clients; masks hide it, too. What can be done depends on what the server sees:

    without masks    every update               ``aggregation=median``, ``trimmed`` or ``bounded`` over clients
    behind masks     one total of everybody     ``max_step``: the total may not move further than that
                     one total per group        ``groups=G`` and an aggregation over the groups' means

Groups are the same in every round of every run of the same clients (`fixed_groups`): from totals over changing groups a
server computes what single clients sent. A group hides a client among its members only, so it has at least
`LEAST_IN_SUM` of them.

    mean       sum_k (n_k / n) step_k
    median     of every number for itself; the mean of the two in the middle where they are even
    trimmed    of every number for itself, the mean without the ``trim`` share at either end
    bounded    the mean of steps none of which is longer than their median length

All but the mean count every client (or group) the same, whatever n_k it claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Message, PartyId
from isthmus.federation.script import ScriptLine, ask, total
from isthmus.methods.training import WHOLE_MODEL, WeightedConfig
from isthmus.privacy.guard import LEAST_IN_SUM, fixed_groups
from isthmus.privacy.mask_graph import COLLUDING
from isthmus.privacy.shared_noise import SharedNoise
from isthmus.tensors import Weights, scaled

LEAST_GROUPS = 3
"""With two groups nobody can say which is the odd one."""


@dataclass(frozen=True)
class AveragingConfig(WeightedConfig):
    """Training whose results one server averages, with bounds on what a client can do to the average.

    Args:
        aggregation: How updates become one: ``mean``, or what a single client cannot move far: ``median``, ``trimmed``
            mean, ``bounded`` (no step longer than the median one). All but the mean need every client's update, or with
            ``groups`` every group's.
        trim: Share of the updates that ``aggregation=trimmed`` leaves out at either end.
        groups: Number of fixed groups whose totals are aggregated, of at least 3 clients each; 0 = none. With secure
            sums the server then reads one total per group.
        max_step: L2 norm to which a longer step of the total is scaled down; 0 = no bound. For fedsgd, the norm of the
            total gradient.
        dp_noise_in: Where the noise of ``dp_noise * dp_clip`` is: in every client's ``update``, or only in the
            ``total`` of a secure sum, to which each client adds a share.
        dp_shares: With ``dp_noise_in=total``, how many clients' shares make up the noise; the others may be lost, or
            work with the server. Default: ``least_clients`` (or all) less a fifth of the clients.
    """

    forgets: ClassVar[bool] = True
    """Whether clients of a method with exactly this config answer from the request and their data alone, so that one
    that was absent answers as if it had not been; a subclass says so for itself.
    """

    shares_noise: ClassVar[bool] = True
    """Whether a method with exactly this config forms its step from one total of all clients, so that only the total
    needs noise; a subclass says so for itself.
    """

    own_start: ClassVar[bool] = False
    """Whether a client keeps weights that it never receives: those start from its own `first_weights`."""

    mini_batches: ClassVar[bool] = True
    aggregation: Literal["mean", "median", "trimmed", "bounded"] = "mean"
    trim: float = 0.2
    groups: int = 0
    max_step: float = 0.0
    dp_noise_in: Literal["update", "total"] = "update"
    dp_shares: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_noise()
        if not 0.0 < self.trim < 0.5:
            raise ConfigError(f"trim must lie in (0, 0.5), got {self.trim}")
        if self.max_step < 0.0 or not math.isfinite(self.max_step):
            raise ConfigError(f"max_step must be at least 0, got {self.max_step}")
        if self.groups and self.groups < LEAST_GROUPS:
            raise ConfigError(f"groups must be 0 or at least {LEAST_GROUPS}: of two, none is the odd one")
        if self.groups and self.aggregation == "mean":
            raise ConfigError("groups without aggregation change nothing: set aggregation=median or bounded, too")
        if self.groups:
            self._check_trim(self.groups, "groups")

    def idle(self) -> dict[str, str]:
        found = super().idle() | ({} if self.own_start else {"first_weights": WHOLE_MODEL})
        unless = {} if self.aggregation == "trimmed" else {"trim": "only aggregation=trimmed leaves updates out"}
        return found | unless

    def _check_noise(self) -> None:
        if self.dp_noise_in == "update":
            if self.dp_shares is not None:
                raise ConfigError("dp_shares counts shares of noise in a total: set dp_noise_in=total, or leave it out")
            return
        if not vars(type(self)).get("shares_noise"):
            raise ConfigError("dp_noise_in=total is for fedavg, fedprox and fedsgd: leave it out, or use one of them")
        if not self.dp_noise:
            raise ConfigError("dp_noise_in=total shares dp_noise between the clients: set dp_noise and dp_clip above 0")
        if self.bounds:
            raise ConfigError(f"dp_noise_in=total is for the plain mean: leave {' and '.join(self.bounds)} out")
        if self.dp_shares is not None and self.dp_shares < 1:
            raise ConfigError(f"dp_shares must be at least 1, got {self.dp_shares}")

    @property
    def shared_noise(self) -> SharedNoise | None:
        """The noise of which each client adds a share; None where each update has its own, or none."""
        if self.dp_noise_in == "update":
            return None
        if self.dp_shares is None:
            raise ConfigError("dp_noise_in=total needs to know how many clients there are: set clients, or dp_shares")
        return SharedNoise(self.dp_clip, self.dp_noise, self.dp_shares)

    def remains(self, secure: bool) -> str:
        if self.dp_noise_in == "update":
            return super().remains(secure)
        return (
            "dp_noise_in=total: a client's share of the noise protects nothing by itself; a total with fewer than "
            f"{self.dp_shares} clients that keep theirs secret has less noise than the result states"
        )

    def check_sums(self, *, secure: bool, parties: int) -> None:
        """Refuse noise that the sums of a run do not add up to.

        Args:
            parties: Clients that are at least in a total.
        """
        noise = self.shared_noise
        if noise is None:
            return
        if not secure:
            raise ConfigError(
                "dp_noise_in=total protects nobody without secure sums, as each client adds a share of the noise only: "
                "set secure_sum=true, or dp_noise_in=update"
            )
        if noise.shares > parties:
            raise ConfigError(
                f"dp_shares={noise.shares} is more than the {parties} clients that a total is sure to have: set it "
                "lower, or leave it out"
            )

    def _check_trim(self, count: int, what: str) -> None:
        if self.aggregation == "trimmed" and int(self.trim * count) < 1:
            raise ConfigError(
                f"trim={self.trim:g} of {count} {what} leaves nobody out: set trim to at least "
                f"{math.ceil(1000 / count) / 1000:g}, or aggregation=median"
            )

    @property
    def bounds(self) -> tuple[str, ...]:
        """Names of the options above that are in use."""
        used = {"aggregation": self.aggregation != "mean", "groups": self.groups, "max_step": self.max_step}
        return tuple(name for name, value in used.items() if value)

    @property
    def sees_single_updates(self) -> bool:
        """Whether the server reads every client's update."""
        return self.aggregation != "mean" and not self.groups

    def why_not_masked(self) -> str:
        if self.sees_single_updates:
            return (
                f"aggregation={self.aggregation} needs every client's update, which secure_sum=true hides: set "
                f"groups={LEAST_GROUPS} or more to aggregate totals of groups, or max_step to bound the total"
            )
        return super().why_not_masked()

    def why_all_clients(self) -> str:
        """Why a round needs everybody; empty where it can do with those who are left."""
        if not vars(type(self)).get("forgets"):
            return "its clients remember earlier rounds, and one that missed some would answer something else"
        return f"{self.bounds[0]} is formed of all of them" if self.bounds else ""

    def check_clients(self, view: View) -> None:
        """Refuse what this many clients cannot do."""
        clients = len(view.clients)
        if self.groups and clients < self.groups * LEAST_IN_SUM:
            raise ConfigError(
                f"groups={self.groups} needs at least {self.groups * LEAST_IN_SUM} clients, {LEAST_IN_SUM} in each, "
                f"and there are {clients}: set fewer groups, or leave them out"
            )
        if not self.groups:
            self._check_trim(clients, "clients")


def shares_counted(parties: int, at_least: int) -> int:
    """How many shares make up the noise by default: those of a total of ``at_least`` of the parties, less a fifth of
    all parties (`COLLUDING`), who work with the server and tell it theirs.
    """
    return max(1, (at_least or parties) - math.ceil(COLLUDING * parties))


def groups_of_draws(clients: Iterable[PartyId], drawn: int) -> tuple[tuple[PartyId, ...], ...]:
    """The groups of which a round behind masks takes one, in the place of ``drawn`` clients: as small as they can be
    with at least that many, and at least `LEAST_IN_SUM`, in each.
    """
    everyone = tuple(clients)
    return fixed_groups(everyone, max(1, len(everyone) // max(drawn, LEAST_IN_SUM)))


def update_line(
    handler: Callable[..., Message],
    config: AveragingConfig,
    view: View,
    *,
    drawn: int | None = None,
    most: int = 1,
    survivors: bool = False,
) -> ScriptLine:
    """How clients are asked for updates, in a script.

    Args:
        drawn: Clients of a round; None for all.
        survivors: The rounds pass ``at_least=federation.least``.
    """
    part = drawn is not None and drawn < len(view.clients)
    if config.sees_single_updates:
        return ask(handler, most=most, some=part)
    if drawn is not None and part:
        return drawn_line(handler, view, drawn)
    return total(handler, most=most, groups=config.groups, survivors=survivors and not config.why_all_clients())


def drawn_line(handler: Callable[..., Message], view: View, drawn: int) -> ScriptLine:
    """A sum over so many clients drawn anew in every round, behind masks over one of the fixed groups."""
    if drawn >= len(view.clients):
        return total(handler)
    return total(handler, some=True, groups=len(groups_of_draws(view.clients, drawn)))


def parties_of_sum(config: AveragingConfig, drawn: int, clients: int, masked: bool) -> int:
    """Fewest clients in one total that the server reads, with ``drawn`` of all clients in a round."""
    if config.sees_single_updates:
        return 1
    names = [str(client) for client in range(clients)]
    groups = fixed_groups(names, config.groups) if config.groups else ()
    if masked and drawn < clients:
        groups = groups_of_draws(names, drawn)
    return min((len(group) for group in groups), default=drawn)


def bounded_step(
    federation: Federation,
    handler: Callable[[Any, Any], Message],
    request: Message,
    config: AveragingConfig,
    *,
    to: tuple[PartyId, ...] | None = None,
    read: Callable[[Any], Weights],
    before: Weights,
) -> tuple[Weights, float] | None:
    """A step of the common numbers from ``before`` and its length, as the options say.

    Args:
        read: The pre-weighted numbers in a reply.
        before: What the clients' numbers are compared with: w_t, or zeros for gradients.

    Returns:
        None where nobody asked has a training sample, or none of their numbers can be used.
    """
    to = federation.clients if to is None else to
    parts: Sequence[Any]
    if config.groups:
        parts = [federation.sum(handler, request, to=group) for group in fixed_groups(to, config.groups)]
    elif config.sees_single_updates:
        parts = list(federation.call(handler, request, to=to).values())
    else:
        parts = [federation.sum(handler, request, to=to)]
    means = [scaled(read(part), 1.0 / part.share) for part in parts if part.share > 0.0]
    # A share that is far too small makes numbers infinite; one such client must not spoil the others' step.
    means = [mean for mean in means if all(bool(tensor.isfinite().all()) for tensor in mean.values())]
    if not means:
        return None
    steps = {name: torch.stack([mean[name] - start for mean in means]) for name, start in before.items()}  # (K, ...)
    step = {name: tensor[0] for name, tensor in steps.items()}
    if config.aggregation != "mean":
        step = aggregated(steps, config.aggregation, config.trim)
    length = norm(step)
    if config.max_step and length > config.max_step:
        step = scaled(step, config.max_step / length)
    return step, length


def aggregated(steps: Weights, aggregation: str, trim: float) -> dict[str, Tensor]:
    """One step from several, stacked (K, ...)."""
    if aggregation == "bounded":
        return _bounded(steps)
    count = len(next(iter(steps.values())))
    out = (count - 1) // 2 if aggregation == "median" else int(trim * count)
    return {name: tensor.sort(dim=0).values[out : count - out].mean(0) for name, tensor in steps.items()}


def _bounded(steps: Weights) -> dict[str, Tensor]:
    """Mean of the steps, each scaled down to the median of their lengths."""
    lengths = torch.stack([tensor.flatten(1).double().square().sum(1) for tensor in steps.values()]).sum(0).sqrt()
    middle = lengths.quantile(0.5)
    factors = (middle / lengths.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    return {
        name: (tensor * factors.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))).mean(0)
        for name, tensor in steps.items()
    }


def norm(step: Weights) -> float:
    """L2 norm over all tensors."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in step.values()))
