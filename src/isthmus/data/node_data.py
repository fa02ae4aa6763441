"""What one owner holds of a node task."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class CrossEdges:
    """Edges with one end at this owner and the other elsewhere. Both ends know the edge; features of the far end are
    unknown.

    Shapes: all tensors (E,).

    Args:
        own: Row of the own end in the owner's node order.
        owner: Owner of the far end, as an index into ``owners``.
        other: Global id of the far end.
        outgoing: True where the arc runs from the own end to the far end.
        weight: Edge weight, 1 where models do not use weights.
        owners: Client ids, sorted.
    """

    own: Tensor
    owner: Tensor
    other: Tensor
    outgoing: Tensor
    weight: Tensor
    owners: tuple[str, ...]

    @property
    def num_edges(self) -> int:
        return int(self.own.numel())


class Samples:
    """What nodes of one graph and graphs of a set have in common."""

    x: Tensor
    train: Tensor

    @property
    def num_features(self) -> int:
        return int(self.x.shape[1])

    @property
    def num_train(self) -> int:
        return int(self.train.sum())


@dataclass(frozen=True)
class NodeData(Samples):
    """One owner's part of one graph.

    Args:
        x: Features (n, F), dense float32 or ``torch.sparse_csr``.
        edge_index: Own edges (2, E) as row positions, source above target; an undirected edge is stored in both
            directions.
        y: Class of each node (n,), int64.
        train, val, test: Boolean masks (n,).
        node_id: Global node ids (n,), int64.
        num_classes: Number of classes of the task (common to all owners).
        cross: Cross edges, or None where the method must not use them.
        edge_weight: Weight of each own arc (E,), finite and at least 0; None where models do not use weights.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    train: Tensor
    val: Tensor
    test: Tensor
    node_id: Tensor
    num_classes: int
    cross: CrossEdges | None = None
    edge_weight: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return int(self.y.numel())

    def without_cross(self) -> NodeData:
        """The same data for a method that must not know cross edges."""
        return replace(self, cross=None)
