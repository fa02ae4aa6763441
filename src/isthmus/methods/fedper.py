"""FedPer -- Arivazhagan et al., 2019, https://arxiv.org/abs/1912.00818.

FedAvg on the base of the model; the last ``personal_layers`` layers are personal and never leave their client. With
none it is FedAvg, with all of them Local. HiFGL's paper leaves the split open; the last layer is our choice there too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from isthmus.errors import ConfigError
from isthmus.federation.roles import Role
from isthmus.methods import fedavg
from isthmus.methods.fedavg import FedAvgClient, FedAvgConfig
from isthmus.methods.registry import register
from isthmus.nn.backbone import Backbone
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.own_module import layer_prefixes


@dataclass(frozen=True)
class FedPerConfig(FedAvgConfig):
    """Settings of FedPer.

    Args:
        personal_layers: How many layers, from the output back, stay with the client (K_P).
    """

    own_start: ClassVar[bool] = True
    mini_batches: ClassVar[bool] = True
    personal_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal_layers < 0:
            raise ConfigError(f"personal_layers must be at least 0, got {self.personal_layers}")

    def personal_prefixes(self, model: Backbone | GraphModel) -> tuple[str, ...]:
        if isinstance(model, GraphModel):
            if self.personal_layers > 1:
                raise ConfigError(
                    f"personal_layers={self.personal_layers}: in models of graphs the convolutions are shared and the "
                    "linear layers before "
                    "and after them personal (1), or everything is shared (0)"
                )
            # FedStar: the base is the convolutions.
            return ("pre.", "post.", "readout.") if self.personal_layers else super().personal_prefixes(model)
        groups = model.shared_groups if isinstance(model, Backbone) else layer_prefixes(model)
        if self.personal_layers > len(groups):
            raise ConfigError(
                f"personal_layers={self.personal_layers}: this model has {len(groups)} layers; use fewer, or method "
                "local"
            )
        return (*super().personal_prefixes(model), *groups[max(0, len(groups) - self.personal_layers) :])


METHOD = register(
    replace(
        fedavg.METHOD,
        name="fedper",
        summary="FedAvg on all but the last layers, which stay personal",
        reference="Arivazhagan et al., Federated Learning with Personalization Layers, 2019",
        config=FedPerConfig,
        roles={"client": Role(FedAvgClient)},
    )
)
