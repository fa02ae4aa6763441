"""Settings of FedGCN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from isthmus.errors import ConfigError
from isthmus.methods.fedavg import FedAvgConfig


@dataclass(frozen=True)
class FedGCNConfig(FedAvgConfig):
    """Settings of FedGCN.

    Args:
        hops: How far a client's knowledge reaches: 0, 1 or 2.
        legacy: The published form: raw features and edges of the neighbourhood in place of exact sums.
    """

    hops: int | None = 2
    legacy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hops not in (0, 1, 2):
            raise ConfigError(f"hops must be 0, 1 or 2, got {self.hops}")
        if self.form == "published" or not self.hops:
            return
        if self.backbone != "gcn":
            raise ConfigError(
                f"exact sums are those of a GCN's layers: use backbone=gcn, or legacy=true for {self.backbone}"
            )
        layers = len(self.hidden) + (0 if self.head else 1)
        if layers > 2:
            raise ConfigError(
                f"sums of 2 hops are exact for at most 2 layers, hidden={list(self.hidden)} makes {layers}: use fewer, "
                "or legacy=true"
            )

    @property
    def form(self) -> Literal["exact", "published"]:
        return "published" if self.legacy else "exact"

    @property
    def options(self) -> dict[str, Any]:
        """``hops`` is the exchange's, not the backbone's."""
        return {name: value for name, value in super().options.items() if name != "hops"}
