"""How FedStruct obtains Abar: settings of `directory.py` and `powers.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.errors import ConfigError
from isthmus.methods.training import WeightedConfig


@dataclass(frozen=True)
class PowerConfig(WeightedConfig):
    """How Abar is obtained.

    Args:
        structure_hops: L_s, the highest power.
        betas: Weight of each power 1 ... L_s; not given = only the last (the paper's experiments).
        beta0: Weight of the identity.
        train_betas: Learn beta0 and betas with the rest, from these values.
        prune: p, entries kept per row on average; 0 keeps all.
        prune_mode: ``block``, ``row`` or ``global``, see `powers.py`.
        renormalise: Scale cut rows back to sum 1 (the paper does not).
        protocol: ``published``, or ``hardened``: own numbering of columns, delivery of sums only.
    """

    structure_hops: int = 2
    betas: tuple[float, ...] = ()
    beta0: float = 0.0
    train_betas: bool = False
    prune: int = 30
    prune_mode: Literal["block", "row", "global"] = "row"
    renormalise: bool = False
    protocol: Literal["published", "hardened"] = "hardened"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure_hops < 1:
            raise ConfigError(f"structure_hops must be at least 1, got {self.structure_hops}")
        if self.prune < 0:
            raise ConfigError(f"prune must be at least 0 (0 keeps everything), got {self.prune}")
        if self.betas and len(self.betas) != self.structure_hops:
            raise ConfigError(f"betas must name one weight per power: structure_hops={self.structure_hops}, got {len(self.betas)}")
        if self.dp_clip:
            raise ConfigError("fedstruct has no differential privacy: leave dp_clip out, or use fedsgd")
        if self.protocol == "hardened" and self.prune and self.prune_mode == "block":
            raise ConfigError("prune_mode=block is the published protocol's: use prune_mode=row, or protocol=published")

    @property
    def power_weights(self) -> tuple[float, ...]:
        """beta_1 ... beta_Ls."""
        return self.betas or (0.0,) * (self.structure_hops - 1) + (1.0,)

    @property
    def prunes(self) -> bool:
        return self.prune > 0 and self.structure_hops > 1
