"""FedProx -- Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127, Algorithm 2.

FedAvg with a proximal term in the clients' loss: ``(mu / 2) ||w - w_t||^2`` over the shared tensors, w_t the weights
just received. Its gradient ``mu (w - w_t)`` is added in place, which is cheaper than and identical to differentiating
the term.

# Differs from GCFL's and FedStar's code: they anchor the first round at the client's own first weights; here it is what
was received.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from isthmus.errors import ConfigError
from isthmus.federation.roles import Cohort, Role
from isthmus.methods import fedavg
from isthmus.methods.fedavg import FedAvgClient, FedAvgCohort, FedAvgConfig
from isthmus.methods.registry import register
from isthmus.nn.train import ExtraGradient, Proximal
from isthmus.tensors import Weights


@dataclass(frozen=True)
class FedProxConfig(FedAvgConfig):
    """Settings of FedProx.

    Args:
        mu: Weight of the proximal term; 0 is FedAvg.
    """

    forgets: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = True

    scores_dropped: ClassVar[bool] = True
    mini_batches: ClassVar[bool] = True
    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0.0:
            raise ConfigError(f"mu must be at least 0, got {self.mu}")


class FedProxClient(FedAvgClient[FedProxConfig]):
    """A FedAvg client that does not stray far from the common weights."""

    cohort: ClassVar[type[Cohort[Any]] | None] = FedAvgCohort  # it adds each client's extra_gradient

    def extra_gradient(self, received: Weights) -> ExtraGradient | None:
        return Proximal(self.config.mu, received) if self.config.mu else None


METHOD = register(
    replace(
        fedavg.METHOD,
        name="fedprox",
        summary="FedAvg with a proximal term that keeps clients near the common weights",
        reference="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        config=FedProxConfig,
        roles={"client": Role(FedProxClient)},
    )
)
