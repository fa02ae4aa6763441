"""FedSage: FedAvg but for its backbone, which is GraphSAGE -- Hamilton, Ying & Leskovec, Inductive Representation
Learning on Large Graphs, NeurIPS 2017, https://arxiv.org/abs/1706.02216. No neighbours are generated: that is
`fedsageplus`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from isthmus.errors import ConfigError
from isthmus.methods import fedavg
from isthmus.methods.fedavg import FedAvgConfig
from isthmus.methods.registry import register


@dataclass(frozen=True)
class FedSageConfig(FedAvgConfig):
    """Settings of FedAvg; the backbone is given."""

    mini_batches: ClassVar[bool] = True
    backbone: str = "sage"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone not in ("sage", "graphsage"):
            raise ConfigError(f"fedsage is FedAvg with GraphSAGE: for backbone={self.backbone} use the method fedavg")


METHOD = register(
    replace(
        fedavg.METHOD,
        name="fedsage",
        summary="FedAvg with GraphSAGE; no neighbours are generated (fedsageplus does that)",
        reference="Hamilton et al., Inductive Representation Learning on Large Graphs, NeurIPS 2017, with FedAvg",
        own_backbones=False,
        config=FedSageConfig,
    )
)
