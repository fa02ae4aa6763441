"""Settings of FedStruct where the server knows the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.errors import ConfigError
from isthmus.graph.graphlets import ORBITS
from isthmus.graph.node2vec import Node2Vec
from isthmus.methods.fedstruct.config import StructureConfig
from isthmus.methods.training import WHOLE_MODEL
from isthmus.nn.graph_structure import GraphStructureNet


@dataclass(frozen=True)
class ServerGraphConfig(StructureConfig):
    """Settings of FedStruct with a server that knows the graph; those of the feature branch are `TrainConfig`'s
    (``backbone=dgcn`` or ``sage``, the paper's DGCN and GNN).

    Args:
        structure_model: Model on structure features: ``dgcn`` (z = Abar g(S)) or ``gnn`` (GraphSAGE on the whole
            graph).
        structure_hops: With ``structure_model=dgcn``, L_s, the highest power of the adjacency matrix.
        structure_hidden: Hidden widths of ``dgcn``'s MLP.
        gnn_hidden: Hidden widths of ``gnn``.
        nsf: Structure feature: ``hop2vec`` (learned), ``degree``, ``walk``, ``gdv`` (graphlet degrees) or ``node2vec``.
        nsf_dim: d_s, number of structure features of a node; graphlet degrees always have 73.
        p: With ``nsf=node2vec``, return parameter of its walks.
        q: With ``nsf=node2vec``, in-out parameter of its walks.
        walks: With ``nsf=node2vec``, walks that start at each node in each epoch.
        walk_length: With ``nsf=node2vec``, nodes of a walk.
        context: With ``nsf=node2vec``, nodes that are less than this many steps apart on a walk are each other's
            context.
        negatives: With ``nsf=node2vec``, how many nodes are drawn against each context.
        nsf_epochs: With ``nsf=node2vec``, how often all walks are drawn again and learned from.
        join: How both branches become logits: ``concat``, a linear head on z and h (the paper), or their ``sum`` (its
            published code).
        gradients: How the structure model gets its gradient. ``residuals``: clients return dL/dz of their training
            nodes, from which the server reads their labels. ``jacobian``: the server sends dz/dtheta_s and clients
            return sums (the paper): training nodes x classes x parameters numbers a round, so small graphs only.
    """

    structure_model: Literal["dgcn", "gnn"] = "dgcn"
    gnn_hidden: tuple[int, ...] = (128, 64, 32)
    nsf: Literal["hop2vec", "degree", "walk", "gdv", "node2vec"] = "hop2vec"
    p: float = 1.0
    q: float = 1.0
    walks: int = 10
    walk_length: int = 20
    context: int = 10
    negatives: int = 1
    nsf_epochs: int = 5
    join: Literal["concat", "sum"] = "concat"
    gradients: Literal["residuals", "jacobian"] = "residuals"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure_model == "gnn" and (self.betas or self.beta0):
            raise ConfigError("betas weigh powers, and structure_model=gnn has none: leave them out, or use dgcn")
        if any(width < 1 for width in self.gnn_hidden):
            raise ConfigError(f"gnn_hidden has widths of at least 1, got {self.gnn_hidden}")
        if not self.gnn_hidden:
            raise ConfigError("structure_model=gnn needs a layer: gnn_hidden=128,64")
        if self.nsf_epochs < 1:
            raise ConfigError(f"nsf_epochs must be at least 1, got {self.nsf_epochs}")
        self.walker  # noqa: B018 -- its settings are checked where they are used

    def idle(self) -> dict[str, str]:
        found = super().idle() | {"first_weights": WHOLE_MODEL}
        if self.structure_model == "dgcn":
            found["gnn_hidden"] = "only structure_model=gnn has these layers"
        if self.nsf != "node2vec":
            of_walks = ("p", "q", "walks", "walk_length", "context", "negatives", "nsf_epochs")
            found |= dict.fromkeys(of_walks, "only nsf=node2vec learns from walks")
        return found

    @property
    def walker(self) -> Node2Vec:
        return Node2Vec(
            self.nsf_dim, self.walks, self.walk_length, self.context, self.negatives, self.nsf_epochs, self.p, self.q
        )

    def net(self, num_classes: int) -> GraphStructureNet:
        return GraphStructureNet(
            kind=self.structure_model,
            width=ORBITS if self.nsf == "gdv" else self.nsf_dim,
            num_classes=num_classes,
            hidden=self.structure_hidden if self.structure_model == "dgcn" else self.gnn_hidden,
            dropout=self.dropout,
            betas=(self.beta0, *self.power_weights),
        )
