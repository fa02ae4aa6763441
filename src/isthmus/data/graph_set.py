"""What one owner holds of a graph task: many small graphs, packed once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isthmus.data.node_data import Samples
from isthmus.data.whole_graph import select_rows


@dataclass(frozen=True)
class GraphSetData(Samples):
    """Labelled graphs of one owner, end to end in one array each.

    Nodes of graph g are rows ``ptr[g] : ptr[g + 1]``, its arcs columns ``edge_ptr[g] : edge_ptr[g + 1]``.

    Args:
        x: Features (n, F) of all nodes, dense float32 or ``torch.sparse_csr``.
        edge_index: Arcs (2, E) as rows of ``x``; an undirected edge is stored in both directions, no self-loops, no
            duplicates.
        ptr: First node of every graph, and the number of nodes (G + 1,).
        edge_ptr: First arc of every graph, and the number of arcs (G + 1,).
        y: Class of each graph (G,), int64.
        train, val, test: Boolean masks (G,).
        graph_id: Position of each graph in its data set (G,), int64.
        num_classes: Number of classes of this data set (owners of other data sets have other classes).
    """

    x: Tensor
    edge_index: Tensor
    ptr: Tensor
    edge_ptr: Tensor
    y: Tensor
    train: Tensor
    val: Tensor
    test: Tensor
    graph_id: Tensor
    num_classes: int

    @property
    def num_graphs(self) -> int:
        return int(self.y.numel())

    @property
    def num_nodes(self) -> int:
        return int(self.x.shape[0])

    @property
    def batch(self) -> Tensor:
        """Graph of each node (n,)."""
        return torch.repeat_interleave(torch.arange(self.num_graphs), self.ptr.diff())

    def select(self, graphs: Tensor) -> GraphSetData:
        """The given graphs (row numbers, any order), packed anew: a mini-batch, or one owner's share."""
        nodes, ptr = _ranges(self.ptr, graphs)
        arcs, edge_ptr = _ranges(self.edge_ptr, graphs)
        shift = ptr[:-1] - self.ptr[:-1][graphs]  # how far each graph's nodes moved
        moved = torch.repeat_interleave(shift, edge_ptr.diff())
        return replace(
            self,
            x=select_rows(self.x, nodes),
            edge_index=self.edge_index[:, arcs] + moved,
            ptr=ptr,
            edge_ptr=edge_ptr,
            y=self.y[graphs],
            train=self.train[graphs],
            val=self.val[graphs],
            test=self.test[graphs],
            graph_id=self.graph_id[graphs],
        )


def _ranges(ptr: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """All positions of the chosen stretches of ``ptr``, and where each stretch now begins."""
    sizes = ptr.diff()[chosen]
    begin = torch.zeros(chosen.numel() + 1, dtype=torch.int64)
    torch.cumsum(sizes, 0, out=begin[1:])
    positions = torch.arange(int(begin[-1])) + torch.repeat_interleave(ptr[:-1][chosen] - begin[:-1], sizes)
    return positions, begin
