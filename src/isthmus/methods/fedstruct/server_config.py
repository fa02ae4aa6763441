"""Settings of FedStruct where the server knows the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.errors import ConfigError
from isthmus.graph.graphlets import ORBITS
from isthmus.graph.node2vec import Node2Vec
from isthmus.methods.training import WeightedConfig
from isthmus.nn.graph_structure import GraphStructureNet


@dataclass(frozen=True)
class ServerGraphConfig(WeightedConfig):
    """Settings of FedStruct with a server that knows the graph; those of the feature branch are `TrainConfig`'s
    (``backbone=dgcn`` or ``sage``, the paper's DGCN and GNN).

    Args:
        structure_model: ``dgcn`` (z = Abar g(S)) or ``gnn`` (GraphSAGE on the whole graph).
        structure_hops: L_s, the highest power; of ``dgcn`` only.
        betas: Weight of each power 1 ... L_s; not given = only the last.
        beta0: Weight of the identity.
        structure_hidden, gnn_hidden: Hidden widths of ``dgcn``'s MLP and of ``gnn``.
        nsf: Structure feature: ``hop2vec`` (learned), ``degree``, ``walk``, ``gdv`` (graphlet degrees) or ``node2vec``.
        nsf_dim: d_s; graphlet degrees always have 73 values.
        walk_steps: Return probabilities of nsf=walk; not given = L_s.
        p, q, walks, walk_length, context, negatives, nsf_epochs: Of node2vec (`isthmus.graph.node2vec.Node2Vec`).
        join: How both branches become logits: ``concat``, a linear head on z and h (the paper), or their ``sum`` (its
            code).
        gradients: How the structure model gets its gradient. ``residuals``: clients return dL/dz of their training
            nodes, from which the server reads their labels. ``jacobian``: the server sends dz/dtheta_s and clients
            return sums (the paper): training nodes x classes x parameters numbers a round, so small graphs only.
        nsf_lr, nsf_weight_decay: Of a learned S; not given = those of theta.
    """

    backbone: str = "dgcn"
    structure_model: Literal["dgcn", "gnn"] = "dgcn"
    structure_hops: int = 2
    betas: tuple[float, ...] = ()
    beta0: float = 0.0
    structure_hidden: tuple[int, ...] = (256,)
    gnn_hidden: tuple[int, ...] = (128, 64, 32)
    nsf: Literal["hop2vec", "degree", "walk", "gdv", "node2vec"] = "hop2vec"
    nsf_dim: int = 256
    walk_steps: int | None = None
    p: float = 1.0
    q: float = 1.0
    walks: int = 10
    walk_length: int = 20
    context: int = 10
    negatives: int = 1
    nsf_epochs: int = 5
    join: Literal["concat", "sum"] = "concat"
    gradients: Literal["residuals", "jacobian"] = "residuals"
    nsf_lr: float | None = None
    nsf_weight_decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure_hops < 1:
            raise ConfigError(f"structure_hops must be at least 1, got {self.structure_hops}")
        if self.betas and len(self.betas) != self.structure_hops:
            raise ConfigError(
                f"betas must name one weight per power: structure_hops={self.structure_hops}, got {len(self.betas)}"
            )
        if self.structure_model == "gnn" and (self.betas or self.beta0):
            raise ConfigError("betas weigh powers, and structure_model=gnn has none: leave them out, or use dgcn")
        if self.nsf_dim < 1 or any(width < 1 for width in (*self.structure_hidden, *self.gnn_hidden)):
            raise ConfigError(
                "nsf_dim, structure_hidden and gnn_hidden are widths of at least 1, got "
                f"{self.nsf_dim}, {self.structure_hidden} and {self.gnn_hidden}"
            )
        if not self.gnn_hidden:
            raise ConfigError("structure_model=gnn needs a layer: gnn_hidden=128,64")
        if self.walk_steps is not None and self.walk_steps < 1:
            raise ConfigError(f"walk_steps must be at least 1, got {self.walk_steps}")
        if self.nsf == "walk" and self.nsf_dim <= self.steps:
            raise ConfigError(f"nsf=walk has {self.steps} walk values and the degree: nsf_dim must be above that")
        if self.dp_clip:
            raise ConfigError("fedstruct-server has no differential privacy: leave dp_clip out, or use fedsgd")
        for name in ("nsf_lr", "nsf_weight_decay"):
            value = getattr(self, name)
            if value is not None and (value < 0.0 or (name == "nsf_lr" and value == 0.0)):
                raise ConfigError(f"{name} must be {'above' if name == 'nsf_lr' else 'at least'} 0, got {value}")
        self.walker  # noqa: B018 -- its settings are checked where they are used

    @property
    def steps(self) -> int:
        """r, return probabilities of nsf=walk."""
        return self.structure_hops if self.walk_steps is None else self.walk_steps

    @property
    def walker(self) -> Node2Vec:
        return Node2Vec(
            self.nsf_dim, self.walks, self.walk_length, self.context, self.negatives, self.nsf_epochs, self.p, self.q
        )

    @property
    def learns_nsf(self) -> bool:
        return self.nsf == "hop2vec"

    @property
    def powers(self) -> tuple[float, ...]:
        """beta_0 ... beta_Ls."""
        return (self.beta0, *(self.betas or (0.0,) * (self.structure_hops - 1) + (1.0,)))

    def net(self, num_classes: int) -> GraphStructureNet:
        return GraphStructureNet(
            kind=self.structure_model,
            width=ORBITS if self.nsf == "gdv" else self.nsf_dim,
            num_classes=num_classes,
            hidden=self.structure_hidden if self.structure_model == "dgcn" else self.gnn_hidden,
            dropout=self.dropout,
            betas=self.powers,
        )

    @property
    def nsf_rates(self) -> tuple[float, float]:
        """Learning rate and weight decay of S."""
        decay = self.weight_decay if self.nsf_weight_decay is None else self.nsf_weight_decay
        return self.lr if self.nsf_lr is None else self.nsf_lr, decay
