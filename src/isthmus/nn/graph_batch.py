r"""A client's graphs packed once; a mini-batch is index arithmetic.

Graphs lie end to end, so every matrix that joins nodes is block diagonal with one block per graph, and a batch is a
copy of the chosen blocks with their columns moved: one compiled loop over stretches of memory, no object per graph.
The propagation matrix P of a layer is made once for the whole pack, when the layer first asks for it.

Constant node inputs f (the features ``x``, or more that the caller names) carry a column of ones behind them: a linear
map with its bias is then one matrix, and :math:`P\,(f W + \mathbf 1 b^\top)\,V = P\,[f\,|\,\mathbf 1]\;([W; b]\,V)`.
The left factor is constant, so the first propagation and the first wide product of a model come down to one (mostly
sparse) product, see `Batch.affine`.

Shapes: G graphs, n nodes, B graphs in a batch with m nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import ConfigError, unknown
from isthmus.nn.kernels import Array, compiled, spmm
from isthmus.nn.layers import HERE, Hop, Propagation
from isthmus.nn.sparse import DENSE_ABOVE, as_csr, canonical, constant_product, stored

_ARCS_AT_ONCE = 1 << 21
"""Normalising copies its arcs several times: by stretches of graphs, memory stays at the size of the result."""


class Graphs(Protocol):
    """What is read of a client's graphs (`isthmus.data.graph_set.GraphSetData` has it; this package does not import
    it).
    """

    @property
    def x(self) -> Tensor: ...
    @property
    def edge_index(self) -> Tensor: ...
    @property
    def ptr(self) -> Tensor: ...
    @property
    def edge_ptr(self) -> Tensor: ...
    @property
    def y(self) -> Tensor: ...
    @property
    def num_graphs(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_features(self) -> int: ...
    @property
    def num_classes(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Arrays:
    """A CSR matrix as bare arrays: a batch makes several, and scipy's constructor takes longer than the copy."""

    indptr: Array
    indices: Array
    data: Array
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Pair:
    """A matrix and its transpose, for the backward pass; one object twice where it is symmetric."""

    forward: Arrays
    backward: Arrays

    def __matmul__(self, dense: Tensor) -> Tensor:
        return constant_product(dense, lambda h: spmm(self.forward, h), lambda g: spmm(self.backward, g))


Features = Tensor | Arrays
"""Constant rows (n, F), dense or sparse."""


@dataclass(frozen=True, eq=False)
class Pack:
    """All graphs of one client. Made by `pack_graphs`.

    Args:
        data: The graphs.
        features: Constant node inputs by name, each with a column of ones behind it; ``x`` is always there.
        dtype: Of features and propagation.
    """

    data: Graphs
    features: Mapping[str, sp.csr_matrix]
    dtype: torch.dtype
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_graphs(self) -> int:
        return self.data.num_graphs

    @cached_property
    def ptr(self) -> NDArray[np.int64]:
        """First node of every graph, and the number of nodes (G + 1,)."""
        return np.ascontiguousarray(self.data.ptr.numpy(), dtype=np.int64)

    @property
    def y(self) -> Tensor:
        return self.data.y

    def pair(self, propagation: Propagation) -> Pair:
        """P of all graphs."""
        made: Pair = self._once(propagation, lambda: _pair(self.data, propagation, self.dtype))
        return made

    def rows(self, name: str, propagation: Propagation | None = None) -> Features | None:
        """``[f | 1]``, or ``P [f | 1]``; None where P and f apart take fewer multiplications."""
        if name not in self.features:
            raise unknown("node input", name, self.features)
        made: Features | None = self._once((name, propagation), lambda: self._rows(self.features[name], propagation))
        return made

    def batch(self, graphs: Tensor) -> Batch:
        """The chosen graphs (positions, any order) as a mini-batch."""
        chosen = np.ascontiguousarray(graphs.numpy(), dtype=np.int64)
        sizes = self.ptr[chosen + 1] - self.ptr[chosen]
        begin = np.zeros(len(chosen) + 1, dtype=np.int64)
        np.cumsum(sizes, out=begin[1:])
        return Batch(self, chosen, begin, self.data.y[graphs])

    def pieces(self, graphs: Tensor, nodes: int) -> Iterator[Tensor]:
        """The chosen graphs in stretches of about ``nodes`` nodes (at least one graph), in order: for passes that need
        no batch size.
        """
        ends = np.cumsum(np.diff(self.ptr)[graphs.numpy()])
        begin = 0
        while begin < len(ends):
            done = ends[begin - 1] if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, done + nodes, side="right")))
            yield graphs[begin:end]
            begin = end

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _rows(self, features: sp.csr_matrix, propagation: Propagation | None) -> Features | None:
        if propagation is None:
            return _stored(features, self.dtype)
        nodes = int(self.ptr[-1])
        arcs = self.pair(propagation).forward
        matrix = sp.csr_matrix((arcs.data, arcs.indices, arcs.indptr), shape=arcs.shape)
        limit = matrix.nnz + features.nnz
        # A narrow product is never more than this, whatever it takes to make it once.
        dense = DENSE_ABOVE * nodes * features.shape[1]
        if limit < dense and _num_terms(matrix, features) > 8 * limit:
            return None  # P and f apart are cheaper for certain: do not even multiply
        product = (matrix.astype(np.float64) @ features).tocsr()
        return None if limit < min(float(product.nnz), dense) else _stored(product, self.dtype)


@dataclass(frozen=True, eq=False)
class Batch:
    """Some graphs of a pack, one behind the other.

    Args:
        pack: Where they are from.
        graphs: Their positions (B,).
        ptr: First node of each, and the number of nodes (B + 1,).
        y: Their classes (B,).
    """

    pack: Pack
    graphs: NDArray[np.int64]
    ptr: NDArray[np.int64]
    y: Tensor
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_graphs(self) -> int:
        return len(self.graphs)

    @property
    def num_nodes(self) -> int:
        return int(self.ptr[-1])

    @cached_property
    def nodes(self) -> Tensor:
        """Rows of the pack's nodes (m,)."""
        first = self.pack.ptr[self.graphs] - self.ptr[:-1]
        return torch.from_numpy(np.arange(self.num_nodes) + np.repeat(first, np.diff(self.ptr)))

    def sizes(self, dtype: torch.dtype) -> Tensor:
        """Nodes of each graph (B, 1)."""
        return torch.from_numpy(np.diff(self.ptr)).to(dtype).unsqueeze(1)

    def affine(self, name: str, weight: Tensor, propagation: Propagation | None = None) -> Tensor:
        """``[f | 1] W``, with a propagation ``P [f | 1] W``: an affine map of constant inputs, differentiable in W.

        Args:
            name: Of the inputs.
            weight: (F + 1, H); the last row is the bias.
        """
        rows = self.rows(name, propagation)
        if rows is None:
            assert propagation is not None
            return self.pair(propagation) @ self.affine(name, weight)
        if isinstance(rows, Tensor):
            return rows @ weight
        product: Tensor = _ConstantRows.apply(weight, rows)  # type: ignore[no-untyped-call]
        return product

    def hop(self, propagation: Propagation | None) -> Hop:
        """A propagation over all nodes."""
        return HERE if propagation is None else Hop(self.pair(propagation), 1, self.num_nodes)

    def pool(self, h: Tensor) -> Tensor:
        """Sum over the nodes of each graph; zero for a graph without nodes. (m, H) -> (B, H)"""
        product: Tensor = _Pool.apply(h, self.ptr)  # type: ignore[no-untyped-call]
        return product

    def pair(self, propagation: Propagation) -> Pair:
        """P of the batch's graphs, and its transpose."""
        if propagation not in self._made:
            pair = self.pack.pair(propagation)
            forward = self._take(pair.forward, move=True)
            backward = forward if pair.backward is pair.forward else self._take(pair.backward, move=True)
            self._made[propagation] = Pair(forward, backward)
        made: Pair = self._made[propagation]
        return made

    def rows(self, name: str, propagation: Propagation | None = None) -> Features | None:
        """``[f | 1]``, or ``P [f | 1]``, of the batch's nodes; None where P and f apart are cheaper."""
        key = (name, propagation)
        if key not in self._made:
            rows = self.pack.rows(name, propagation)
            if isinstance(rows, Arrays):
                rows = self._take(rows, move=False)
            elif rows is not None:
                rows = rows[self.nodes]
            self._made[key] = rows
        made: Features | None = self._made[key]
        return made

    def _take(self, matrix: Arrays, *, move: bool) -> Arrays:
        """The blocks of the batch's graphs; with ``move`` their columns are nodes and follow their rows."""
        ptr = self.pack.ptr
        entries = matrix.indptr[ptr[self.graphs + 1]] - matrix.indptr[ptr[self.graphs]]
        total = int(entries.sum())
        taken = Arrays(
            np.empty(self.num_nodes + 1, dtype=matrix.indptr.dtype),
            np.empty(total, dtype=matrix.indices.dtype),
            np.empty(total, dtype=matrix.data.dtype),
            (self.num_nodes, self.num_nodes if move else matrix.shape[1]),
        )
        source, target = ((each.indptr, each.indices, each.data) for each in (matrix, taken))
        _take_blocks(self.graphs, ptr, self.ptr, move, *source, *target)
        return taken


def pack_graphs(data: Graphs, *, extra: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float32) -> Pack:
    """Pack a client's graphs.

    Args:
        data: The graphs.
        extra: Further constant node inputs by name, (n, F) each, dense or CSR (a structure embedding, say).
        dtype: Of features and propagation.
    """
    given = {"x": data.x, **(extra or {})}
    features = {}
    for name, rows in given.items():
        if rows.shape[0] != data.num_nodes:
            raise ConfigError(f"node input {name!r} has {rows.shape[0]} rows, the graphs have {data.num_nodes} nodes")
        ones = sp.csr_matrix(np.ones((data.num_nodes, 1)))
        features[name] = sp.csr_matrix(sp.hstack([as_csr(rows).astype(np.float64), ones], format="csr"))
    return Pack(data, features, dtype)


@dataclass(frozen=True)
class _OneGraph:
    """Nodes of one graph as a set of one graph."""

    x: Tensor
    edge_index: Tensor
    num_nodes: int
    num_classes: int
    y: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    num_graphs: int = 1

    @property
    def ptr(self) -> Tensor:
        return torch.tensor([0, self.num_nodes])

    @property
    def edge_ptr(self) -> Tensor:
        return torch.tensor([0, self.edge_index.shape[1]])

    @property
    def num_features(self) -> int:
        return int(self.x.shape[1])


def node_batch(
    x: Tensor,
    edge_index: Tensor,
    y: Tensor,
    num_classes: int,
    *,
    extra: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """All nodes of one graph as a batch whose ``y`` are the classes of its nodes, for models that do not pool; -1
    counts as class 0.
    """
    pack = pack_graphs(_OneGraph(x, edge_index, int(y.numel()), num_classes), extra=extra, dtype=dtype)
    return replace(pack.batch(torch.zeros(1, dtype=torch.int64)), y=y.clamp(min=0))


def batches(rows: Tensor, batch_size: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """The rows cut into pieces of ``batch_size``, the last one shorter; shuffled where a generator is given."""
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
    if generator is not None:
        rows = rows[torch.randperm(rows.numel(), generator=generator)]
    return iter(torch.split(rows, batch_size)) if rows.numel() else iter(())


def _pair(data: Graphs, propagation: Propagation, dtype: torch.dtype) -> Pair:
    """P of all graphs, a stretch of graphs at a time."""
    ptr, edge_ptr = data.ptr.numpy(), data.edge_ptr.numpy()
    parts: list[sp.csr_matrix] = []
    flipped: list[sp.csr_matrix] = []
    begins: list[int] = []
    graph, symmetric = 0, True
    while graph < data.num_graphs:
        end = max(graph + 1, int(np.searchsorted(edge_ptr, edge_ptr[graph] + _ARCS_AT_ONCE, side="right")) - 1)
        begins.append(int(ptr[graph]))
        arcs = data.edge_index[:, int(edge_ptr[graph]) : int(edge_ptr[end])] - begins[-1]
        part = canonical(propagation(arcs, int(ptr[end] - ptr[graph])), dtype)
        transposed = canonical(part.T.tocsr())
        symmetric = symmetric and _equal(part, transposed)
        parts.append(part)
        flipped.append(part if symmetric else transposed)
        graph = end
    forward = _below(parts, begins)
    # A part kept for its transpose while all were symmetric is its transpose.
    return Pair(forward, forward if symmetric else _below(flipped, begins))


def _equal(a: sp.csr_matrix, b: sp.csr_matrix) -> bool:
    return (
        np.array_equal(a.indptr, b.indptr) and np.array_equal(a.indices, b.indices) and np.array_equal(a.data, b.data)
    )


def _below(parts: list[sp.csr_matrix], begins: list[int]) -> Arrays:
    """Blocks along the diagonal."""
    if not parts:
        return Arrays(np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), (0, 0))
    entries = sum(part.nnz for part in parts)
    rows = sum(part.shape[0] for part in parts)
    index = np.int32 if max(entries, rows) < 2**31 else np.int64
    lengths = np.concatenate([np.diff(part.indptr) for part in parts])
    indptr = np.zeros(rows + 1, dtype=index)
    np.cumsum(lengths, out=indptr[1:])
    indices, values = np.empty(entries, dtype=index), np.empty(entries, dtype=parts[0].data.dtype)
    place = 0
    for part, begin in zip(parts, begins, strict=True):
        np.add(part.indices, begin, out=indices[place : place + part.nnz], casting="unsafe")
        values[place : place + part.nnz] = part.data
        place += part.nnz
    return Arrays(indptr, indices, values, (rows, rows))


def _num_terms(matrix: sp.csr_matrix, features: sp.csr_matrix) -> int:
    """Multiplications of the product."""
    return int(np.diff(features.indptr)[matrix.indices].sum(dtype=np.int64))


def _stored(matrix: sp.csr_matrix, dtype: torch.dtype) -> Features:
    rows = stored(matrix, dtype)
    return rows if isinstance(rows, Tensor) else Arrays(rows.indptr, rows.indices, rows.data, matrix.shape)


class _ConstantRows(torch.autograd.Function):
    """``S W`` of sparse constant S."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, weight: Tensor, rows: Arrays) -> Tensor:
        ctx.rows = rows  # type: ignore[attr-defined]
        return spmm(rows, weight)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return transposed_times(ctx.rows, grads[0]), None  # type: ignore[attr-defined]


class _Pool(torch.autograd.Function):
    """Sums of consecutive rows."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, h: Tensor, ptr: NDArray[np.int64]) -> Tensor:
        ctx.ptr = ptr  # type: ignore[attr-defined]
        return sum_rows(ptr, h)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        ptr = torch.from_numpy(ctx.ptr)  # type: ignore[attr-defined]
        return torch.repeat_interleave(grads[0], ptr.diff(), dim=0, output_size=int(ptr[-1])), None


def transposed_times(matrix: Arrays, dense: Tensor) -> Tensor:
    """``M^T @ dense``"""
    out = torch.zeros(matrix.shape[1], dense.shape[1], dtype=dense.dtype)
    _scatter_rows(matrix.indptr, matrix.indices, matrix.data, dense.detach().contiguous().numpy(), out.numpy())
    return out


def sum_rows(ptr: NDArray[np.int64], h: Tensor) -> Tensor:
    """Sums of the rows of each stretch."""
    out = torch.zeros(len(ptr) - 1, h.shape[1], dtype=h.dtype)
    _sum_rows(ptr, h.detach().contiguous().numpy(), out.numpy())
    return out


@compiled
def _take_blocks(
    graphs: Array,
    ptr: Array,
    begin: Array,
    move: bool,
    indptr: Array,
    indices: Array,
    data: Array,
    out_indptr: Array,
    out_indices: Array,
    out_data: Array,
) -> None:
    place = 0
    for b in range(len(graphs)):
        first, last = ptr[graphs[b]], ptr[graphs[b] + 1]
        shift = begin[b] - first if move else 0
        start, stop = indptr[first], indptr[last]
        for row in range(first, last):
            out_indptr[begin[b] + row - first] = place + indptr[row] - start
        for j in range(start, stop):
            out_indices[place + j - start] = indices[j] + shift
            out_data[place + j - start] = data[j]
        place += stop - start
    out_indptr[len(out_indptr) - 1] = place


@compiled
def _scatter_rows(indptr: Array, indices: Array, values: Array, grad: Array, out: Array) -> None:
    """out += S^T G. One thread: ``out`` has as many rows as there are features and stays in cache."""
    width = grad.shape[1]
    for row in range(len(indptr) - 1):
        source = grad[row]
        for j in range(indptr[row], indptr[row + 1]):
            target, value = out[indices[j]], values[j]
            for h in range(width):
                target[h] += value * source[h]


@compiled
def _sum_rows(ptr: Array, rows: Array, out: Array) -> None:
    width = rows.shape[1]
    for graph in range(len(ptr) - 1):
        total = out[graph]
        for row in range(ptr[graph], ptr[graph + 1]):
            source = rows[row]
            for h in range(width):
                total[h] += source[h]
