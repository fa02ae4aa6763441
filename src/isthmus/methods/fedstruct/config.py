"""Settings of FedStruct."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from isthmus.errors import ConfigError
from isthmus.methods.training import WeightedConfig
from isthmus.nn.structure import StructureNet

DIRECT_LR = 0.5
"""Learning rate of S in the direct form: the best on validation of 0.05, 0.1, 0.2, 0.5 and 1 (Cora)."""


@dataclass(frozen=True)
class StructureConfig(WeightedConfig):
    """Settings of the structure branch that all of FedStruct's methods have; those of the feature branch are
    `TrainConfig`'s.

    Args:
        structure_hops: L_s, the highest power of the adjacency matrix.
        betas: Weight of each power 1 ... L_s; not given = only the last (the paper's experiments).
        beta0: Weight of the identity (power 0).
        nsf: Structure feature.
        nsf_dim: d_s, number of structure features of a node.
        walk_steps: r, how many return probabilities ``nsf=walk`` (FED*) uses; not given = L_s.
        structure_hidden: Hidden widths of g, the MLP on structure features.
        nsf_lr: Learning rate of a learned S; not given = ``lr``.
        nsf_weight_decay: Weight decay of a learned S; not given = ``weight_decay``.
    """

    backbone: str = "dgcn"
    structure_hops: int = 2
    betas: tuple[float, ...] = ()
    beta0: float = 0.0
    nsf: str = "hop2vec"
    nsf_dim: int = 256
    walk_steps: int | None = None
    structure_hidden: tuple[int, ...] = (256,)
    nsf_lr: float | None = None
    nsf_weight_decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure_hops < 1:
            raise ConfigError(f"structure_hops must be at least 1, got {self.structure_hops}")
        if self.nsf_dim < 1 or any(width < 1 for width in self.structure_hidden):
            raise ConfigError(
                f"nsf_dim and structure_hidden are widths of at least 1, got {self.nsf_dim} and {self.structure_hidden}"
            )
        if self.betas and len(self.betas) != self.structure_hops:
            raise ConfigError(
                f"betas must name one weight per power: structure_hops={self.structure_hops}, got {len(self.betas)}"
            )
        if self.walk_steps is not None and self.walk_steps < 1:
            raise ConfigError(f"walk_steps must be at least 1, got {self.walk_steps}")
        if self.nsf == "walk" and self.nsf_dim <= self.steps:
            raise ConfigError(f"nsf=walk has {self.steps} walk values and the degree: nsf_dim must be above that")
        if self.nsf_lr is not None and self.nsf_lr <= 0.0:
            raise ConfigError(f"nsf_lr must be above 0, got {self.nsf_lr}")
        if self.nsf_weight_decay is not None and self.nsf_weight_decay < 0.0:
            raise ConfigError(f"nsf_weight_decay must be at least 0, got {self.nsf_weight_decay}")
        if self.dp_clip:
            raise ConfigError("FedStruct has no differential privacy: leave dp_clip out, or use fedsgd")

    def idle(self) -> dict[str, str]:
        return super().idle() | ({} if self.nsf == "walk" else {"walk_steps": "only nsf=walk walks at random"})

    @property
    def power_weights(self) -> tuple[float, ...]:
        """beta_1 ... beta_Ls."""
        return self.betas or (0.0,) * (self.structure_hops - 1) + (1.0,)

    @property
    def steps(self) -> int:
        """r, return probabilities of nsf=walk."""
        return self.structure_hops if self.walk_steps is None else self.walk_steps

    @property
    def learns_nsf(self) -> bool:
        return self.nsf == "hop2vec"

    @property
    def nsf_rates(self) -> tuple[float, float]:
        """Learning rate and weight decay of S."""
        decay = self.weight_decay if self.nsf_weight_decay is None else self.nsf_weight_decay
        return self.lr if self.nsf_lr is None else self.nsf_lr, decay


@dataclass(frozen=True)
class FedStructConfig(StructureConfig):
    """Settings of FedStruct; those of the feature branch are `TrainConfig`'s.

    Args:
        train_betas: Also learn beta0 and betas, starting from the values given.
        prune: p, entries kept per row of Abar on average; 0 keeps all.
        prune_mode: Which entries pruning keeps: the largest of a ``block``, of a ``row``, or of all rows (``global``);
            `powers.py`.
        renormalise: Scale pruned rows back to sum 1 (the paper does not).
        protocol: How clients obtain z. ``streamed``: values and gradients are sent hop by hop, nothing is pruned, S
            stays with its owners. ``hardened`` or ``published``: clients obtain their rows of Abar first.
        forward_noise: With ``protocol=streamed``, standard deviation of Gaussian noise on every sum that a client
            receives in the forward pass; each sender adds a share. This is not differential privacy.
        withhold_exposed: With ``protocol=streamed``, leave out the edges between a client and those training nodes
            whose single values, and so labels, it could work out from the sums it receives.
        nsf: Structure feature: ``degree``, ``walk`` or ``hop2vec``.
        walk_steps: r, how many return probabilities ``nsf=walk`` (FED*) uses; not given = L_s, which the powers give
            anyway. More steps need more powers (the paper's code has 50).
        form: HOP2VEC with the MLP g on top (``headed``, what the published numbers come from) or without (``direct``,
            the paper's Eq. 15).
        nsf_at: Where HOP2VEC's S is kept: at the ``server``, or as a replica at all ``clients``.
        nsf_lr: Learning rate of S; not given = ``lr``, and with ``form=direct`` 0.5.
        nsf_weight_decay: Weight decay of S; not given = ``weight_decay``, and with ``form=direct`` 0.
        algorithm: How the common weights are trained: ``fedsgd`` (the paper), or ``fedavg`` (local optimiser steps,
            averaged weights).
        inference: What a prediction uses: ``both`` branches, or only z (``structure``).
    """

    train_betas: bool = False
    prune: int = 30
    prune_mode: Literal["block", "row", "global"] = "row"
    renormalise: bool = False
    protocol: Literal["streamed", "published", "hardened"] = "streamed"
    forward_noise: float = 0.0
    withhold_exposed: bool = False
    nsf: Literal["degree", "walk", "hop2vec"] = "hop2vec"
    form: Literal["headed", "direct"] = "headed"
    nsf_at: Literal["server", "clients"] = "server"
    algorithm: Literal["fedsgd", "fedavg"] = "fedsgd"
    inference: Literal["both", "structure"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prune < 0:
            raise ConfigError(f"prune must be at least 0 (0 keeps everything), got {self.prune}")
        if self.form == "direct" and self.nsf != "hop2vec":
            raise ConfigError(f"form=direct has no head to read nsf={self.nsf} with: use nsf=hop2vec, or form=headed")
        if self.algorithm == "fedavg" and self.nsf_at == "clients":
            raise ConfigError("algorithm=fedavg averages S with the rest, at the server: use nsf_at=server")
        self._check_streamed()
        self.net(2)

    def _check_streamed(self) -> None:
        """What only one kind of protocol can do."""
        if self.forward_noise < 0.0:
            raise ConfigError(f"forward_noise must be at least 0, got {self.forward_noise}")
        if self.streamed and self.nsf == "walk":
            raise ConfigError(
                "nsf=walk reads the diagonals of the powers, which protocol=streamed never forms: set "
                "protocol=hardened, or nsf=hop2vec or degree"
            )
        if self.streamed and self.nsf_at == "clients":
            raise ConfigError(
                "protocol=streamed keeps every row of S at its owner: leave nsf_at out, or set protocol=hardened"
            )
        for name in ("forward_noise", "withhold_exposed"):
            if getattr(self, name) and not self.streamed:
                raise ConfigError(f"{name} protects sums of hops: set protocol=streamed, or leave it out")

    @property
    def streamed(self) -> bool:
        return self.protocol == "streamed"

    def why_not_unmasked(self) -> str:
        if not self.streamed:
            return super().why_not_unmasked()
        return (
            "protocol=streamed sends sums of every hop, which sender by sender tell the values of most foreign "
            "neighbours: set secure_sum=true (three clients or more)"
        )

    def remains(self, secure: bool) -> str:
        if not self.streamed:
            return super().remains(secure)
        where = "(Cora, 10 clients at random; docs/methods/fedstruct.md)"
        if not secure:
            return f"Sums can be read sender by sender, and tell most labels of adjacent training nodes {where}."
        if self.withhold_exposed:
            return (
                f"A client named 0 of 685 adjacent training nodes with their labels, and read 411 labels that one of "
                f"several has {where}."
            )
        return (
            f"A client named 71 of 685 adjacent training nodes with their labels, all right, and read 643 labels that "
            f"one of several has {where}; with withhold_exposed=true it named 0, for 1.1 points of accuracy."
        )

    @property
    def one_by_one(self) -> bool:
        return super().one_by_one or self.forward_noise > 0.0

    @property
    def numpy_dtype(self) -> type[np.float32] | type[np.float64]:
        """Of the powers."""
        return np.float64 if self.precision == "float64" else np.float32

    @property
    def powers(self) -> int:
        """Powers that are exchanged: L_s, or r where nsf=walk needs more."""
        return max(self.structure_hops, self.steps) if self.nsf == "walk" else self.structure_hops

    @property
    def prunes(self) -> bool:
        return self.prune > 0 and self.structure_hops > 1

    def net(self, num_classes: int) -> StructureNet:
        """g."""
        direct = self.form == "direct"
        return StructureNet(
            width=num_classes if direct else self.nsf_dim,
            num_classes=num_classes,
            hidden=None if direct else self.structure_hidden,
            dropout=self.dropout,
        )

    @property
    def replicated(self) -> bool:
        return self.learns_nsf and self.nsf_at == "clients"

    @property
    def nsf_rates(self) -> tuple[float, float]:
        """Learning rate and weight decay of S."""
        lr, decay = super().nsf_rates
        if self.form == "direct":
            lr = DIRECT_LR if self.nsf_lr is None else lr
            decay = 0.0 if self.nsf_weight_decay is None else decay
        return lr, decay
