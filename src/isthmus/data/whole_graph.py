"""One whole graph as it is loaded, before partition and split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.graph.normalise import from_torch_csr, to_torch_csr

if TYPE_CHECKING:
    from isthmus.data.transfers import Transfers


@dataclass(frozen=True)
class PublicSplits:
    """Published masks (n, S): S splits side by side."""

    train: Tensor
    val: Tensor
    test: Tensor

    @property
    def num_splits(self) -> int:
        return int(self.train.shape[1])

    def rows(self, keep: Tensor) -> PublicSplits:
        """The masks of some nodes."""
        return PublicSplits(self.train[keep], self.val[keep], self.test[keep])


@dataclass(frozen=True)
class Loaded:
    """One graph, before partition and split.

    Args:
        data: The whole graph; all masks False. A node with ``y < 0`` has no label: it is in no split part.
        source: Where it came from, in words fit for a result.
        public: Published splits, if any.
        owner: Who owns each node where the data say so themselves (n,), else None.
        name: Name in the registry, if it has one.
        owner_names: What the owners are called, sorted; empty where they have numbers only.
        columns: Further values, one per node, which ``--partition column:NAME`` and ``--split group:NAME`` can name.
        transfers: The single transfers that arcs stand for, where the data have them.
        edge_weight: Weight of each arc of ``data``, as given and unchecked (E,), where the data have some
            (`isthmus.data.edge_weights` puts them into ``data`` where models use them).
        kept: Rows of the original graph that are left, and how many it had, where a partition left nodes out.
    """

    data: NodeData
    source: str
    public: PublicSplits | None = None
    owner: Tensor | None = None
    name: str = ""
    owner_names: tuple[str, ...] = ()
    columns: Mapping[str, object] = field(default_factory=dict)
    kept: tuple[Tensor, int] | None = None
    transfers: Transfers | None = None
    edge_weight: Tensor | None = None

    def restricted(self, keep: Tensor) -> Loaded:
        """The subgraph induced by the rows ``keep`` (ascending), renumbered from 0."""
        rows = torch.full((self.data.num_nodes,), -1)
        rows[keep] = torch.arange(keep.numel())
        ends = rows[self.data.edge_index]
        inside = (ends >= 0).all(dim=0)
        data = replace(
            self.data,
            x=select_rows(self.data.x, keep),
            edge_index=ends[:, inside],
            edge_weight=None if self.data.edge_weight is None else self.data.edge_weight[inside],
            y=self.data.y[keep],
            node_id=torch.arange(keep.numel()),
            train=self.data.train[keep],
            val=self.data.val[keep],
            test=self.data.test[keep],
        )
        owner = None if self.owner is None else self.owner[keep]
        public = None if self.public is None else self.public.rows(keep)
        columns = {name: np.asarray(values)[keep.numpy()] for name, values in self.columns.items()}
        return replace(
            self,
            data=data,
            public=public,
            owner=owner,
            columns=columns,
            kept=(keep, self.data.num_nodes),
            transfers=None,
            edge_weight=None if self.edge_weight is None else self.edge_weight[inside],
        )


class MaskFields(TypedDict):
    """The masks of `NodeData`, as keyword arguments."""

    train: Tensor
    val: Tensor
    test: Tensor


def empty_masks(num_nodes: int) -> MaskFields:
    """Masks that hold no node."""
    none = torch.zeros(num_nodes, dtype=torch.bool)
    return {"train": none, "val": none.clone(), "test": none.clone()}


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of a dense or CSR matrix, in the same layout."""
    if x.layout != torch.sparse_csr:
        return x[rows]
    return to_torch_csr(from_torch_csr(x)[rows.numpy()])
