r"""A graph learned from embeddings: generator and adjacency processor of SLAPS -- Fatemi, El Asri & Kazemi, NeurIPS
2021, https://arxiv.org/abs/2102.05034 -- as FedGGR's server uses them.

    paper        here
    MLP-D        `generate`     :math:`H = \mathrm{relu}(E \odot w_1) \odot w_2`, rows divided by their length
    kNN          `Pattern`      the k + 1 largest entries of each row of :math:`H H^\top`, the node itself among them; a
                                constant
    P            `non_negative` :math:`P(t) = \mathrm{elu}(s t - s) + 1`, s = 6
    A*           `Adjacency`    :math:`A^* = \tfrac12 D^{-1/2} (P(\tilde A) + P(\tilde A)^\top) D^{-1/2}`, D the degrees
                                of what is between

Cosine is symmetric, so a pair that both ends have chosen has weight P, a pair that one end has chosen P / 2. Only
chosen pairs are ever computed; P is applied to them alone. (SLAPS' dense path applies P after the mask: every non-edge
then weighs exp(-6), on PubMed 49 a row, more than all chosen neighbours together.) The diagonal is P(1) = 1, a constant
also for a zero row, whose cosine with itself would be 0: a node without an embedding keeps to itself.

Shapes: N nodes, U unordered pairs of different nodes, p columns; E, H (N, p), w (p,).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.nn.kernels import Array, compiled, split, spmm, weighted_rows
from isthmus.nn.sparse import canonical

SLOPE = 6.0


def generate(embeddings: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """H with rows of length one; zero rows stay zero. Differentiable with respect to w1 and w2; E is a constant. (N,
    p)
    """
    rows: Tensor = _Generate.apply(embeddings, w1, w2)  # type: ignore[no-untyped-call]
    return rows


def non_negative(similarity: Tensor) -> Tensor:
    """P: positive, monotone, 1 at 1."""
    return torch.nn.functional.elu(SLOPE * similarity - SLOPE) + 1.0


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which pairs are joined.

    Args:
        num_nodes: N.
        low, high: The ends of each pair, low < high (U,), int64.
        half: True where one end has chosen the other, not both (U,).
        matrix: The pairs as CSR (N, N), both directions, no diagonal; its values are numbers of pairs.
    """

    num_nodes: int
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    half: NDArray[np.bool_]
    matrix: sp.csr_matrix

    @classmethod
    def of(cls, neighbours: Tensor) -> Pattern:
        """From the rows of a search (`isthmus.graph.knn`): (N, k + 1), each row with its own index."""
        chosen = neighbours.numpy()
        count = len(chosen)
        rows = np.repeat(np.arange(count, dtype=np.int64), chosen.shape[1])
        columns = chosen.reshape(-1).astype(np.int64)
        other = rows != columns
        rows, columns = rows[other], columns[other]
        keys, times = np.unique(np.minimum(rows, columns) * count + np.maximum(rows, columns), return_counts=True)
        low, high = keys // count, keys % count
        number = np.arange(len(keys), dtype=np.int64)
        both = (np.concatenate([number, number]), (np.concatenate([low, high]), np.concatenate([high, low])))
        matrix = sp.csr_matrix(both, shape=(count, count), dtype=np.int64)
        return cls(count, low, high, times == 1, canonical(matrix))

    @property
    def num_pairs(self) -> int:
        return len(self.low)

    def degrees(self) -> Tensor:
        """Neighbours of each node after symmetrisation, itself left out (N,): at least k, hubs have many more."""
        return torch.from_numpy(np.diff(self.matrix.indptr).astype(np.int64))


@dataclass(frozen=True, eq=False)
class Adjacency:
    """A*, kept as its factors.

    Args:
        pattern: Which pairs are joined.
        weight: Of each pair before normalisation (U,); the diagonal is 1.
        scale: D^{-1/2} (N,).
    """

    pattern: Pattern
    weight: Tensor
    scale: Tensor

    @classmethod
    def of(cls, pattern: Pattern, rows: Tensor) -> Adjacency:
        """The processed adjacency of generated rows H, differentiable with respect to them."""
        similarity: Tensor = _PairDots.apply(rows, pattern)  # type: ignore[no-untyped-call]
        factor = torch.where(torch.from_numpy(pattern.half), 0.5, 1.0).to(rows.dtype)
        weight = non_negative(similarity) * factor
        low, high = torch.from_numpy(pattern.low), torch.from_numpy(pattern.high)
        degree = torch.ones(pattern.num_nodes, dtype=rows.dtype).index_add(0, low, weight).index_add(0, high, weight)
        return cls(pattern, weight, degree.rsqrt())

    def __matmul__(self, h: Tensor) -> Tensor:
        """``A* h``, differentiable with respect to h, weights and degrees. (N, H)"""
        out: Tensor = _Propagate.apply(self.weight, self.scale, h, self.pattern)  # type: ignore[no-untyped-call]
        return out

    def to_dense(self) -> Tensor:
        """(N, N), for tests and small graphs."""
        return self @ torch.eye(self.pattern.num_nodes, dtype=self.weight.dtype)


class _Generate(torch.autograd.Function):
    """`generate` in one pass over E and one back: with wide embeddings of many nodes every pass takes as long as the
    global GNN.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, embeddings: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        out = torch.empty_like(embeddings, memory_format=torch.contiguous_format)
        lengths = torch.empty(embeddings.shape[0], dtype=embeddings.dtype)
        arrays = _arrays(embeddings, w1, w2, out, lengths)
        split(lambda begin, end: _generate(begin, end, *arrays), out.shape[0], out.numel())
        ctx.save_for_backward(embeddings, w1, w2, out, lengths)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        totals = np.zeros((2, saved[1].numel()))
        _generate_back(*_arrays(grads[0], *saved), totals)
        first, second = torch.from_numpy(totals).to(grads[0].dtype)
        return None, first, second


def _arrays(*tensors: Tensor) -> tuple[Array, ...]:
    return tuple(tensor.detach().contiguous().numpy() for tensor in tensors)


class _PairDots(torch.autograd.Function):
    """<h_i, h_j> of every pair of a pattern."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, rows: Tensor, pattern: Pattern) -> Tensor:
        ctx.pattern = pattern  # type: ignore[attr-defined]
        ctx.save_for_backward(rows)
        return _dots(pattern, rows, rows)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        pattern: Pattern = ctx.pattern  # type: ignore[attr-defined]
        (rows,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return _times(pattern, grads[0], rows), None


class _Propagate(torch.autograd.Function):
    """s (I + S) s h, with s on a diagonal and S the symmetric weights of pairs, nothing on its diagonal. In few passes:
    on many nodes each of them takes as long as a product of the global GNN.

    With x = s h, y = (I + S) x and out = s y, of a gradient g: that of y is s g, that of x is (I + S) s g.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, weight: Tensor, scale: Tensor, h: Tensor, pattern: Pattern
    ) -> Tensor:
        scaled = scale[:, None] * h
        out = torch.empty_like(scaled)
        arrays = (*_entries(pattern, weight), *_arrays(scale, scaled, out))
        split(lambda begin, end: _propagate(begin, end, *arrays), *_cost(pattern, out))
        ctx.pattern = pattern  # type: ignore[attr-defined]
        ctx.save_for_backward(weight, scale, scaled, out)
        return out

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        pattern: Pattern = ctx.pattern  # type: ignore[attr-defined]
        weight, scale, scaled, out = ctx.saved_tensors  # type: ignore[attr-defined]
        needs: tuple[bool, ...] = ctx.needs_input_grad  # type: ignore[attr-defined]
        grad = scale[:, None] * grads[0]
        weight_grad = _dots_both_ways(pattern, grad, scaled) if needs[0] else None
        h_grad, scale_grad = torch.empty_like(grad), torch.empty_like(scale)
        arrays = (*_entries(pattern, weight), *_arrays(scale, scaled, out, grad, h_grad, scale_grad))
        split(lambda begin, end: _propagate_back(begin, end, *arrays), *_cost(pattern, out))
        return weight_grad, scale_grad if needs[1] else None, h_grad if needs[2] else None, None


def _entries(pattern: Pattern, weight: Tensor) -> tuple[Array, Array, Array]:
    """S as CSR."""
    return pattern.matrix.indptr, pattern.matrix.indices, weight.detach().numpy()[pattern.matrix.data]


def _cost(pattern: Pattern, out: Tensor) -> tuple[int, int]:
    return pattern.num_nodes, (pattern.num_nodes + 2 * pattern.num_pairs) * out.shape[1]


def _times(pattern: Pattern, weight: Tensor, h: Tensor) -> Tensor:
    return spmm(pattern.matrix, h, weight.detach().numpy()[pattern.matrix.data])


def _dots(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """<a_i, b_j> of every pair i < j (U,)."""
    out = torch.empty(pattern.num_pairs, dtype=a.dtype)
    arrays = pattern.low, pattern.high, a.detach().contiguous().numpy(), b.detach().contiguous().numpy(), out.numpy()

    def work(begin: int, end: int) -> None:
        _pair_dots(begin, end, *arrays)

    split(work, pattern.num_pairs, pattern.num_pairs * a.shape[1])
    return out


def _dots_both_ways(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """<a_i, b_j> + <b_i, a_j> of every pair (U,)."""
    out = torch.empty(pattern.num_pairs, dtype=a.dtype)
    arrays = (pattern.low, pattern.high, *_arrays(a, b, out))
    split(lambda begin, end: _pair_dots_both_ways(begin, end, *arrays), len(out), 2 * len(out) * a.shape[1])
    return out


# Sums may be reordered within a row:
@partial(compiled, fastmath={"contract", "reassoc"})
def _generate(begin: int, end: int, embeddings: Array, w1: Array, w2: Array, out: Array, lengths: Array) -> None:
    zero = out.dtype.type(0)
    for row in range(begin, end):
        square = zero
        for h in range(len(w1)):
            value = max(embeddings[row, h] * w1[h], zero) * w2[h]
            out[row, h] = value
            square += value * value
        lengths[row] = np.sqrt(square)
        if lengths[row] > zero:
            for h in range(len(w1)):
                out[row, h] /= lengths[row]


@partial(compiled, fastmath={"contract", "reassoc"})
def _generate_back(
    grad: Array, embeddings: Array, w1: Array, w2: Array, out: Array, lengths: Array, totals: Array
) -> None:
    """With g the gradient of a row h of length one, that of the row before is (g - <g, h> h) / length."""
    zero = out.dtype.type(0)
    block = 64  # sums over a block of rows are added up in double precision
    part = np.zeros((2, len(w1)), dtype=out.dtype)
    for first in range(0, len(out), block):
        for row in range(first, min(first + block, len(out))):
            if lengths[row] > zero:
                along = zero
                for h in range(len(w1)):
                    along += grad[row, h] * out[row, h]
                for h in range(len(w1)):
                    before = (grad[row, h] - along * out[row, h]) / lengths[row]
                    passed = max(embeddings[row, h] * w1[h], zero)
                    part[1, h] += before * passed
                    part[0, h] += before * w2[h] * embeddings[row, h] if passed > zero else zero
        for h in range(len(w1)):
            totals[0, h] += part[0, h]
            totals[1, h] += part[1, h]
        part[:] = 0


# Sums may be reordered within a pair: a chain of dependent additions would take longer than reading the rows.
@partial(compiled, fastmath={"contract", "reassoc"})
def _pair_dots(begin: int, end: int, low: Array, high: Array, a: Array, b: Array, out: Array) -> None:
    width = a.shape[1]
    for pair in range(begin, end):
        left, right = a[low[pair]], b[high[pair]]
        total = left[0] * 0
        for h in range(width):
            total += left[h] * right[h]
        out[pair] = total


@partial(compiled, fastmath={"contract", "reassoc"})
def _pair_dots_both_ways(begin: int, end: int, low: Array, high: Array, a: Array, b: Array, out: Array) -> None:
    width = a.shape[1]
    for pair in range(begin, end):
        left, right, to_right, to_left = a[low[pair]], b[high[pair]], b[low[pair]], a[high[pair]]
        total = left[0] * 0
        for h in range(width):
            total += left[h] * right[h] + to_right[h] * to_left[h]
        out[pair] = total


@compiled
def _propagate(
    begin: int, end: int, indptr: Array, indices: Array, values: Array, scale: Array, scaled: Array, out: Array
) -> None:
    width = out.shape[1]
    for row in range(begin, end):
        total, own, factor = out[row], scaled[row], scale[row]
        weighted_rows(indptr[row], indptr[row + 1], width, indices, values, scaled, total)
        for h in range(width):
            total[h] = factor * (own[h] + total[h])


@partial(compiled, fastmath={"contract", "reassoc"})
def _propagate_back(
    begin: int,
    end: int,
    indptr: Array,
    indices: Array,
    values: Array,
    scale: Array,
    scaled: Array,
    out: Array,
    grad: Array,
    h_grad: Array,
    scale_grad: Array,
) -> None:
    """``grad`` is that of y. Of s: <gradient of out, y> + <gradient of x, h>, the first <grad, out> / s^2."""
    width = out.shape[1]
    for row in range(begin, end):
        total, own, before, after, factor = h_grad[row], grad[row], scaled[row], out[row], scale[row]
        weighted_rows(indptr[row], indptr[row + 1], width, indices, values, grad, total)
        along = factor * 0
        for h in range(width):
            through = own[h] + total[h]
            along += own[h] * after[h] / factor + through * before[h]
            total[h] = factor * through
        scale_grad[row] = along / factor
