"""What a backbone consumes: constant over rounds, computed once per client.

Training needs only what training nodes can see. With L propagations the output rows are the training nodes, the rows of
the layer before are what they hear from, and so on; the first propagation is multiplied into the features. Rows are
ordered by distance from the training nodes, so the rows of a later layer are always the first rows of the layer before
it. Evaluation keeps all rows in node order.

A cohort is many clients side by side: every client's rows are padded to the largest client's, propagation matrices
become block diagonal, weights get a leading client dimension. One forward then serves all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import DataError
from isthmus.graph.reach import reach
from isthmus.nn.first_layer_input import Operand, build_operand, filled, join_operands, stack_operands
from isthmus.nn.layers import Hop, Propagation
from isthmus.nn.sparse import Sparse, as_csr, block_diagonal, canonical, diagonal, vertical


class Nodes(Protocol):
    """What is read of a client's nodes (`isthmus.data.node_data.NodeData` has it; `nn` does not import `data`)."""

    @property
    def x(self) -> Tensor: ...
    @property
    def edge_index(self) -> Tensor: ...
    @property
    def edge_weight(self) -> Tensor | None: ...
    @property
    def y(self) -> Tensor: ...
    @property
    def num_nodes(self) -> int: ...


class InputSpec(Protocol):
    """What `build_inputs` must know of a backbone."""

    @property
    def hops(self) -> int:
        """Number of levels, 0 for a model that is blind to edges."""
        ...

    @property
    def norm_names(self) -> tuple[str, ...]:
        """Names of the input norm's parameters, empty without one."""
        ...

    @property
    def first_terms(self) -> Mapping[str, bool]:
        """Name of each first-layer weight matrix -> whether its features are propagated."""
        ...

    @property
    def propagation(self) -> Propagation | None:
        """How M is made of edges; None for a model that is blind to them."""
        ...


@dataclass(frozen=True, eq=False)
class Inputs:
    """Constant inputs of K clients. Level l holds the rows after the (l + 1)-th propagation (after the l-th where the
    first is not multiplied into the features); p_l rows per client, padding included.

    Args:
        clients: K.
        first: First-layer operand by name of its weight.
        hidden: ``hidden[l]`` propagates from level l to level l + 1, (K p_{l+1}, K p_l).
        rows: ``rows[l][k]`` real rows of client k at level l.
        padded: ``padded[l]`` = p_l, at least 1.
        y: Class of each output row (K p_last,); 0 in padding.
        weight: Loss weight of each output row (K p_last,): 1 / (number of training rows of its client) on those, 0
            elsewhere.
    """

    clients: int
    first: Mapping[str, Operand]
    hidden: tuple[Sparse, ...]
    rows: tuple[tuple[int, ...], ...]
    padded: tuple[int, ...]
    y: Tensor
    weight: Tensor

    @classmethod
    def labels(cls, y: Tensor, weight: Tensor) -> Inputs:
        """Classes and loss weights of one client's rows alone: what a loss reads."""
        count = (y.numel(),)
        return cls(1, {}, (), (count,), count, y, weight)

    @cached_property
    def num_labels(self) -> int:
        """One more than the largest label."""
        return int(self.y.max()) + 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Real output rows of each client."""
        return self.rows[-1]

    def hop(self, level: int) -> Hop:
        """The propagation from the level before to ``level``."""
        return Hop(self.hidden[level - 1], self.clients, self.padded[level])

    def unpad(self, out: Tensor) -> Tensor:
        """The real output rows, client after client: (K p_last, C) -> (sum n_k, C)."""
        padded = self.padded[-1]
        if all(count == padded for count in self.counts):
            return out
        return torch.cat([out[k * padded : k * padded + count] for k, count in enumerate(self.counts)])

    def split(self, out: Tensor) -> list[Tensor]:
        """Unpadded output rows by client."""
        return list(torch.split(out, list(self.counts)))


def build_inputs(
    data: Nodes,
    backbone: InputSpec,
    mask: Tensor | None = None,
    *,
    restrict: bool = True,
    dtype: torch.dtype = torch.float32,
    steps: sp.csr_matrix | None = None,
) -> Inputs:
    """Inputs of one client.

    Args:
        data: The client's nodes.
        backbone: The model they are for.
        mask: Training nodes (n,), or None for evaluation: all rows in node order, loss weights zero.
        restrict: With a mask, keep only rows the loss depends on; output rows are then the nodes of the mask in node
            order. The loss and its gradients are the same either way (without dropout, which draws one number per row).
        dtype: Of all operands.
        steps: The propagation matrix, where the caller has it already.
    """
    count = data.num_nodes
    if mask is not None and bool((data.y[mask] < 0).any()):
        raise DataError("a training node has a negative label; leave unlabelled nodes out of the training mask")
    if steps is None and backbone.propagation is not None:
        steps = backbone.propagation(data.edge_index, count, data.edge_weight)
    levels = max(1, backbone.hops)
    if mask is not None and restrict:
        orders = _orders(steps, mask.numpy(), levels)
    else:
        orders = [np.arange(count)] * levels
    padded = tuple(max(1, len(order)) for order in orders)
    x = data.x.contiguous().numpy() if filled(data.x) else as_csr(data.x)
    first = {
        name: build_operand(
            x, steps if propagated else None, orders[0], padded[0], input_norm=bool(backbone.norm_names), dtype=dtype
        )
        for name, propagated in backbone.first_terms.items()
    }
    y, weight = torch.zeros(padded[-1], dtype=torch.int64), torch.zeros(padded[-1], dtype=dtype)
    out = torch.from_numpy(orders[-1])
    y[: len(out)] = data.y[out].clamp(min=0)
    if mask is not None:
        weight[: len(out)] = mask[out].to(dtype) / max(1, int(mask.sum()))
    return Inputs(
        1, first, _hidden(steps, orders, padded, dtype), tuple((len(order),) for order in orders), padded, y, weight
    )


def stack_inputs(items: Sequence[Inputs]) -> Inputs:
    """Many clients' inputs (same backbone) as one cohort, in the given order."""
    padded = tuple(max(item.padded[level] for item in items) for level in range(len(items[0].padded)))
    clients = len(items)
    hidden: list[Sparse] = []
    for level in range(len(items[0].hidden)):
        if level and all(item.hidden[level] is item.hidden[level - 1] for item in items):
            hidden.append(hidden[-1])  # evaluation: every layer propagates over the same rows
        else:
            blocks = [item.hidden[level].csr for item in items]
            hidden.append(Sparse(block_diagonal(blocks, padded[level + 1], padded[level])))
    y, weight = items[0].y.new_zeros(clients, padded[-1]), items[0].weight.new_zeros(clients, padded[-1])
    for k, item in enumerate(items):
        y[k, : len(item.y)] = item.y
        weight[k, : len(item.weight)] = item.weight
    return Inputs(
        clients=clients,
        first={name: stack_operands([item.first[name] for item in items], padded[0]) for name in items[0].first},
        hidden=tuple(hidden),
        rows=tuple(tuple(item.rows[level][0] for item in items) for level in range(len(padded))),
        padded=padded,
        y=y.view(-1),
        weight=weight.view(-1),
    )


def join_inputs(items: Sequence[Inputs]) -> Inputs:
    """Many clients' inputs as those of one client with all their rows, for clients that share all weights: nothing is
    padded.
    """
    hidden: list[Sparse] = []
    for level in range(len(items[0].hidden)):
        if level and all(item.hidden[level] is item.hidden[level - 1] for item in items):
            hidden.append(hidden[-1])
        else:
            hidden.append(Sparse(diagonal([item.hidden[level].csr for item in items])))
    padded = tuple(sum(item.padded[level] for item in items) for level in range(len(items[0].padded)))
    return Inputs(
        clients=1,
        first={name: join_operands([item.first[name] for item in items]) for name in items[0].first},
        hidden=tuple(hidden),
        rows=tuple((count,) for count in padded),
        padded=padded,
        y=torch.cat([item.y for item in items]),
        weight=torch.cat([item.weight for item in items]),
    )


def _orders(steps: sp.csr_matrix | None, seeds: NDArray[np.bool_], levels: int) -> list[NDArray[np.int64]]:
    """Rows needed at each level, nearest to the seeds first; each list starts with the next one."""
    order = np.flatnonzero(seeds)
    orders = [order]
    for hops in range(1, levels):
        assert steps is not None
        needed = reach(steps, seeds, hops)
        needed[order] = False
        order = np.concatenate([order, np.flatnonzero(needed)])
        orders.append(order)
    return orders[::-1]


def _hidden(
    steps: sp.csr_matrix | None, orders: Sequence[NDArray[np.int64]], padded: Sequence[int], dtype: torch.dtype
) -> tuple[Sparse, ...]:
    matrices: list[Sparse] = []
    for level in range(1, len(orders)):
        assert steps is not None
        if orders[level] is orders[level - 1] and matrices:
            matrices.append(matrices[-1])
            continue
        part = steps[orders[level]][:, orders[level - 1]].tocsr()
        matrices.append(Sparse(vertical([canonical(part, dtype)], padded[level], padded[level - 1])))
    return tuple(matrices)
