"""The control FedSpray's proxies must beat: a federated MLP teaches the personal GNNs.

It is FedSpray without proxies: the encoder keeps its embedding and its projector q, trained on labels alone (an MLP
under FedAvg), and the GNNs are taught by q in place of p. If this does as well as FedSpray, the proxies add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isthmus.errors import ConfigError
from isthmus.federation.roles import Role
from isthmus.methods import fedspray
from isthmus.methods.fedspray import FedSprayClient, FedSprayConfig
from isthmus.methods.registry import register


@dataclass(frozen=True)
class MLPTeacherConfig(FedSprayConfig):
    """FedSpray's settings; there are no proxies and no classifier."""

    proxies: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proxies:
            raise ConfigError("mlpteacher is FedSpray without proxies: leave proxies out")

    def idle(self) -> dict[str, str]:
        return super().idle() | dict.fromkeys(("lambda2", "projector_init"), "the encoder is taught by labels alone")

    @property
    def classifier(self) -> bool:
        return False


METHOD = register(
    replace(
        fedspray.METHOD,
        name="mlpteacher",
        summary="personal GNNs taught by a federated MLP (control for fedspray)",
        reference="no paper; FedSpray (Fu et al., KDD 2024) with its feature-only head as teacher",
        config=MLPTeacherConfig,
        roles={"client": Role(FedSprayClient)},
    )
)
