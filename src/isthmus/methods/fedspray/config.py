"""Settings of FedSpray. Where paper and reference code differ, ``--profile paper`` or ``reference`` picks a side:

    setting            paper            reference code
    proxy_reset        all              unlabelled     training nodes' proxies restart from S[y_i], or go on from their
                                                       last value
    projector_init     projector        classifier     what the local projector starts from in phase 2
    kd_confidence      0                0.7            teach all nodes, or besides training nodes only those with max_j
                                                       q_ij above it
    init               standard         uniform01      first weights of the GNN
    proxy_start        gaussian         ramp           s_j drawn small, or 0.01 j in every coordinate

Every node proxy s_i starts at 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.errors import ConfigError
from isthmus.methods.training import WeightedConfig


@dataclass(frozen=True)
class FedSprayConfig(WeightedConfig):
    """Settings of FedSpray.

    Args:
        lambda1: Weight of the encoder's teaching in the GNN's loss; 0 is Local.
        lambda2: Weight of the GNN's teaching in the encoder's loss.
        proxy_width: d_s, width of proxies and encoder.
        encoder_lr: Learning rate of the encoder.
        proxy_lr: Learning rate of the proxies.
        proxies: ``false`` fixes all proxies at zero (S = 0).
        proxy_reset: Which node proxies restart from the class proxies in a round: ``all``, or only those of nodes
            without a training label (``unlabelled``, the reference code).
        projector_init: What the local projector starts from in phase 2: the common ``projector``, or the ``classifier``
            (the reference code).
        kd_confidence: Nodes without a training label are taught only where the teacher's largest probability is above
            this; 0 teaches all (the paper), the reference code has 0.7.
        proxy_start: First class proxies: small random numbers (``gaussian``), or 0.01 j in every coordinate of class j
            (``ramp``, the reference code).
        reset_optimizer: Start all optimiser states afresh in each round.
        min_class_count: How many training nodes of a class a client needs before its proxy of that class counts.
    """

    lambda1: float = 5.0
    lambda2: float = 1.0
    proxy_width: int = 64
    encoder_lr: float = 0.003
    proxy_lr: float = 0.02
    proxies: bool = True
    proxy_reset: Literal["all", "unlabelled"] = "all"
    projector_init: Literal["projector", "classifier"] = "projector"
    kd_confidence: float = 0.0
    proxy_start: Literal["gaussian", "ramp"] = "gaussian"
    reset_optimizer: bool = False
    min_class_count: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("lambda1", 0.0), ("lambda2", 0.0), ("proxy_width", 1), ("min_class_count", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low:g}, got {getattr(self, name)}")
        for name in ("encoder_lr", "proxy_lr"):
            if getattr(self, name) <= 0.0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0.0 <= self.kd_confidence <= 1.0:
            raise ConfigError(f"kd_confidence is a probability and must lie in [0, 1], got {self.kd_confidence}")
        if self.dp_clip:
            raise ConfigError("fedspray adds no noise of its own: leave dp_clip out (fedavg and fedsgd have it)")

    def idle(self) -> dict[str, str]:
        of_proxies = () if self.proxies else ("proxy_lr", "proxy_reset", "proxy_start", "min_class_count")
        return super().idle() | dict.fromkeys(of_proxies, "there are no proxies to train")

    @property
    def classifier(self) -> bool:
        """Whether the encoder has the classifier p; the control without one (`mlpteacher`) teaches by q."""
        return True
