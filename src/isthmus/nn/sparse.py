"""Constant sparse matrices that autograd can multiply with.

A propagation matrix or a feature matrix never changes during training, and the backward product needs its transpose.
Both are kept as CSR, because a CSR product writes each output row once; the transpose is made once, on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.graph.normalise import from_torch_csr
from isthmus.nn.kernels import Csr, spmm

DENSE_ABOVE = 0.35
"""Share of non-zeros above which a matrix is stored dense: a dense product does about ten times the operations per
second of a sparse one, and a CSR entry takes two to three times the memory of a dense one."""
_INT32_LIMIT = 2**31 - 1
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


class Propagator(Protocol):
    """A constant matrix M."""

    @property
    def forward(self) -> Csr:
        """M itself, for layers that do more than multiply with it."""
        ...

    def __matmul__(self, dense: Tensor) -> Tensor:
        """``M @ dense``; gradients flow to ``dense`` only."""
        ...


@dataclass(frozen=True, eq=False)
class Sparse:
    """A constant matrix (m, n) with its transpose on demand. Made by `canonical`, so that kernels find one layout."""

    csr: sp.csr_matrix

    @property
    def forward(self) -> sp.csr_matrix:
        return self.csr

    @cached_property
    def transposed(self) -> sp.csr_matrix:
        """The transpose (n, m), CSR again."""
        return canonical(self.csr.T.tocsr())

    def __matmul__(self, dense: Tensor) -> Tensor:
        return constant_product(dense, lambda h: spmm(self.csr, h), lambda g: spmm(self.transposed, g))


def constant_product(dense: Tensor, times: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """``M h`` of a constant M that is given by ``times`` (h -> M h) and ``back`` (g -> M^T g)."""
    if not dense.requires_grad:
        return times(dense)
    product: Tensor = _ConstantProduct.apply(dense, times, back)  # type: ignore[no-untyped-call]
    return product


class _ConstantProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        dense: Tensor,
        times: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = back  # type: ignore[attr-defined]
        return times(dense)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None  # type: ignore[attr-defined]


def torch_dtype(values: Tensor | sp.csr_matrix) -> torch.dtype:
    """The torch type of a dense or sparse matrix."""
    if isinstance(values, Tensor):
        return values.dtype
    return torch.float32 if values.dtype == np.float32 else torch.float64


def canonical(matrix: sp.csr_matrix, dtype: torch.dtype | None = None) -> sp.csr_matrix:
    """Sorted, contiguous, of the given type, with 32-bit indices where they fit (half the index traffic)."""
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    index = np.int32 if max(matrix.nnz, *matrix.shape) <= _INT32_LIMIT else np.int64
    values = matrix.data if dtype is None else matrix.data.astype(_NUMPY[dtype], copy=False)
    result = sp.csr_matrix(matrix.shape, dtype=values.dtype)
    result.data = np.ascontiguousarray(values)
    # Set one by one: the constructor would choose the index type by its own rule.
    result.indices = np.ascontiguousarray(matrix.indices, dtype=index)
    result.indptr = np.ascontiguousarray(matrix.indptr, dtype=index)
    return result


def as_csr(x: Tensor) -> sp.csr_matrix:
    """Features, dense or CSR."""
    return from_torch_csr(x) if x.layout == torch.sparse_csr else sp.csr_matrix(x.numpy())


def stored(matrix: sp.csr_matrix, dtype: torch.dtype) -> Tensor | sp.csr_matrix:
    """Dense where more than `DENSE_ABOVE` of it is filled, else CSR."""
    if matrix.nnz > DENSE_ABOVE * matrix.shape[0] * matrix.shape[1]:
        return torch.from_numpy(matrix.toarray()).to(dtype)
    return canonical(matrix, dtype)


def block_diagonal(blocks: Sequence[sp.csr_matrix], height: int, width: int) -> sp.csr_matrix:
    """Blocks along the diagonal, each padded with empty rows and columns to (height, width)."""
    return spread(vertical(blocks, height, width), len(blocks))


def diagonal(blocks: Sequence[sp.csr_matrix]) -> sp.csr_matrix:
    """Blocks of any sizes along the diagonal."""
    counts = np.array([[*block.shape, block.nnz] for block in blocks], dtype=np.int64)
    columns, entries = (np.cumsum(counts[:, i]) - counts[:, i] for i in (1, 2))
    indices = np.concatenate([block.indices.astype(np.int64) + at for block, at in zip(blocks, columns, strict=True)])
    indptr = [block.indptr[:-1].astype(np.int64) + at for block, at in zip(blocks, entries, strict=True)]
    parts = (np.concatenate([block.data for block in blocks]), indices, np.concatenate([*indptr, [len(indices)]]))
    return canonical(sp.csr_matrix(parts, shape=tuple(counts[:, :2].sum(0))))


def vertical(blocks: Sequence[sp.csr_matrix], height: int, width: int) -> sp.csr_matrix:
    """Blocks one above the other, each padded with empty rows to ``height``; columns keep their place, ``width`` in
    all.
    """
    lengths = np.zeros((len(blocks), height), dtype=np.int64)
    for length, block in zip(lengths, blocks, strict=True):
        length[: block.shape[0]] = np.diff(block.indptr)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    parts = (
        np.concatenate([block.data for block in blocks]),
        np.concatenate([block.indices for block in blocks]),
        indptr,
    )
    return canonical(sp.csr_matrix(parts, shape=(len(blocks) * height, width)))


def spread(stacked: sp.csr_matrix, blocks: int) -> sp.csr_matrix:
    """Vertically stacked blocks (blocks * h, w) moved onto the diagonal of (blocks * h, blocks * w)."""
    if blocks == 1:
        return stacked
    rows, width = stacked.shape
    owner = np.repeat(np.arange(rows, dtype=np.int64) // (rows // blocks), np.diff(stacked.indptr))
    indices = stacked.indices.astype(np.int64) + owner * width
    return canonical(sp.csr_matrix((stacked.data, indices, stacked.indptr), shape=(rows, blocks * width)))
