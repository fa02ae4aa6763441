r"""The first layer's input, which never changes.

The first layer of every backbone multiplies something constant with a weight matrix: :math:`S W`, where S is X (an MLP,
the root term of GraphSAGE) or M X (a propagated term). M X is multiplied out once per client where that leaves less to
do per step than :math:`M (X W)`; on sparse features with many neighbours in common it does not, and the two stay apart.
With a learnable layer norm on the input features,

.. math::
    \mathrm{LN}(x) = \gamma \odot (x - \mu)/\sigma + \beta, \qquad
    M\,\mathrm{LN}(X)\,W = S\,(\gamma \odot W) - u\,(\gamma^\top W) + v\,(\beta^\top W),

    S = M\,\mathrm{diag}(1/\sigma)\,X, \quad u = M(\mu/\sigma), \quad v = M\mathbf 1,

which is exact and keeps S as sparse as M X (Ba, Kiros & Hinton, 2016, https://arxiv.org/abs/1607.06450; biased variance
and eps 1e-5 as in torch).

Shapes: K clients of p padded rows each, F features, H outputs; S (K p, F); weights (F, H), or (K, F, H) with one matrix
per client. Where M stays apart (``after``), S stands for its inner part, diag(1/sigma) X with u = mu/sigma and v = 1,
on the q rows M reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.nn.buffers import empty
from isthmus.nn.fused_optimizer import StepPlan, StepTensors, step_rows, step_rows_normed
from isthmus.nn.kernels import Array, compiled, split, spmm, spmm_into
from isthmus.nn.sparse import (
    DENSE_ABOVE,
    Sparse,
    block_diagonal,
    canonical,
    diagonal,
    spread,
    stored,
    torch_dtype,
    vertical,
)

LAYER_NORM_EPS = 1e-5

Vectors = tuple[NDArray[np.float64], NDArray[np.float64]]
"""(u, v) while an operand is built."""

Norm = tuple[Tensor, Tensor]
"""(gamma, beta) of the input norm, (F,) each, or (K, F)."""


@dataclass(frozen=True, eq=False)
class Operand:
    """S of the module docstring for K clients, one above the other.

    Args:
        clients: K.
        matrix: S (K p, F), or (K q, F) where M stays apart; dense tensor or scipy CSR. A row of padding is zero.
        u, v: One value per row of ``matrix``, present with input norm only.
        after: M (K p, K q), block diagonal, where it stays apart.
    """

    clients: int
    matrix: Tensor | sp.csr_matrix
    u: Tensor | None = None
    v: Tensor | None = None
    after: Sparse | None = None

    @cached_property
    def sparse(self) -> Sparse | None:
        """S (K p, F) where it is sparse: for clients that share one weight matrix."""
        return None if isinstance(self.matrix, Tensor) else Sparse(self.matrix)

    @cached_property
    def blocks(self) -> Sparse | None:
        """S on a block diagonal (K p, K F) where it is sparse: one product then serves every client's own weight
        matrix.
        """
        return None if isinstance(self.matrix, Tensor) else Sparse(spread(self.matrix, self.clients))

    def product(self, weight: Tensor, norm: Norm | None = None) -> Tensor:
        """``S W``, or with ``norm`` the product with normalised features, differentiable. (K p, H)"""
        gamma, beta = norm or (None, None)
        product: Tensor = _Product.apply(weight, gamma, beta, self)  # type: ignore[no-untyped-call]
        return product

    def forward(self, weight: Tensor, norm: Norm | None = None) -> Tensor:
        """`product` without autograd. With norm, gamma and beta are per client exactly if the weight is."""
        product = self._inner(weight, norm)
        return product if self.after is None else spmm(self.after.csr, product)

    def _inner(self, weight: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return self._times(weight, None)
        gamma, beta = norm
        product = self._times(weight, gamma)
        sums = torch.stack([gamma, beta], dim=-2) @ weight  # (.., 2, H): gamma^T W and beta^T W
        factors = torch.stack([-self._vector(self.u), self._vector(self.v)], dim=-1).view(*weight.shape[:-2], -1, 2)
        rows = product.view(*weight.shape[:-2], -1, weight.shape[-1])
        if weight.dim() == 2:
            rows.addmm_(factors, sums)
        else:
            rows.baddbmm_(factors, sums)
        return product

    def backward(
        self, grad: Tensor, weight: Tensor, norm: Norm | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of weight, gamma, beta given that of the product.

        Args:
            grad: (K p, H).
            out: Where to write the gradient of the weight. With many clients it is the largest tensor of a step, and
                asking the system for fresh memory every time costs more than the product itself.
        """
        grad = self._before_after(grad)
        result = empty(tuple(weight.shape), weight.dtype) if out is None else out
        self._transposed_times(grad, result)  # S^T G
        if norm is None:
            return result, None, None
        gamma, beta = norm
        u_grad, v_grad = self._row_sums(grad, weight.shape[:-2])
        result.sub_(u_grad)  # now the gradient of gamma * W
        gamma_grad = (result * weight).sum(-1)
        beta_grad = (weight @ v_grad.mT).squeeze(-1)
        result.mul_(gamma.unsqueeze(-1)).addcmul_(beta.unsqueeze(-1), v_grad)
        return result, gamma_grad, beta_grad

    def step(
        self, grad: Tensor, tensors: StepTensors, plan: StepPlan, norm: Norm | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """`backward` and the optimiser's step in one pass, for a sparse operand.

        Args:
            grad: Gradient of the product (K p, H).
            tensors: The weight and what belongs to it; one per client, but its source may be common where there is no
                norm.
            plan: Which step of how many this is, and of which optimiser.
            norm: gamma and beta, per client exactly if the weight is.

        Returns:
            Gradients of gamma and beta with norm, else None.
        """
        if self.blocks is None:
            raise ValueError("a dense operand has no sparse rows to step on; use backward")
        grad = self._before_after(grad)
        if norm is None:
            step_rows(self.blocks.transposed, grad, tensors, plan)
            return None
        sums = self._row_sums(grad, tensors.weight.shape[:-2])
        return step_rows_normed(self.blocks.transposed, grad, tensors, plan, norm, sums)

    def _before_after(self, grad: Tensor) -> Tensor:
        """The gradient of the inner product given that of the product."""
        return grad if self.after is None else spmm(self.after.transposed, grad)

    def _times(self, weight: Tensor, gamma: Tensor | None) -> Tensor:
        """``S (gamma * W)``. Scaling the few values of S in place of the many of W is the same."""
        if isinstance(self.matrix, Tensor):
            scaled = weight if gamma is None else weight * gamma.unsqueeze(-1)
            return (
                torch.mm(self.matrix, scaled)
                if weight.dim() == 2
                else torch.bmm(self._batches, scaled).view(-1, weight.shape[-1])
            )
        sparse = self.sparse if weight.dim() == 2 else self.blocks
        assert sparse is not None
        values = None if gamma is None else sparse.csr.data * gamma.detach().reshape(-1).numpy()[sparse.csr.indices]
        return spmm(sparse.csr, weight.reshape(-1, weight.shape[-1]), values)

    def _transposed_times(self, grad: Tensor, out: Tensor) -> None:
        grad = grad.contiguous()
        if isinstance(self.matrix, Tensor):
            if out.dim() == 2:
                torch.mm(self.matrix.mT, grad, out=out)
            else:
                torch.bmm(self._batches.mT, grad.view(self.clients, -1, grad.shape[-1]), out=out)
            return
        sparse = self.sparse if out.dim() == 2 else self.blocks
        assert sparse is not None
        spmm_into(sparse.transposed, grad, out.view(-1, out.shape[-1]))

    @property
    def _batches(self) -> Tensor:
        assert isinstance(self.matrix, Tensor)
        return self.matrix.view(self.clients, -1, self.matrix.shape[1])

    def _vector(self, vector: Tensor | None) -> Tensor:
        if vector is None:
            raise ValueError("these inputs were built without input norm; build them with the model they are used with")
        return vector

    def _row_sums(self, grad: Tensor, lead: Sequence[int]) -> tuple[Tensor, Tensor]:
        """u^T G and v^T G, (.., 1, H) each."""
        rows = grad.reshape(*lead, -1, grad.shape[-1])
        u, v = (self._vector(vector).view(*lead, 1, -1) @ rows for vector in (self.u, self.v))
        return u, v


class _Product(torch.autograd.Function):
    """`Operand.forward` and `Operand.backward` as one autograd node."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        weight: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        operand: Operand,
    ) -> Tensor:
        ctx.operand = operand  # type: ignore[attr-defined]
        saved = (weight,) if gamma is None or beta is None else (weight, gamma, beta)
        ctx.save_for_backward(*saved)
        return operand.forward(weight, _norm(saved))

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        operand: Operand = ctx.operand  # type: ignore[attr-defined]
        return *operand.backward(grads[0], saved[0], _norm(saved)), None


def _norm(saved: Sequence[Tensor]) -> Norm | None:
    return (saved[1], saved[2]) if len(saved) == 3 else None


def build_operand(
    x: sp.csr_matrix | NDArray[Any],
    propagation: sp.csr_matrix | None,
    rows: NDArray[np.int64],
    padded: int,
    *,
    input_norm: bool,
    dtype: torch.dtype,
) -> Operand:
    """The operand of one client.

    Args:
        x: Features (n, F), an array where they are `filled`.
        propagation: M (n, n), or None for the features as they are.
        rows: Rows of S to keep, in this order.
        padded: Number of rows to pad to.
        input_norm: Prepare u and v and divide by sigma.
    """
    if isinstance(x, np.ndarray):
        return _filled_operand(x, propagation, rows, padded, input_norm=input_norm, dtype=dtype)
    features = x.astype(
        np.float64
    )  # moments are sums over F numbers and S sums over neighbours: rounded once, at the end
    vectors: Vectors | None = None
    if input_norm:
        width = features.shape[1]
        mean = np.asarray(features.sum(axis=1)).ravel() / width
        square = np.asarray(features.multiply(features).sum(axis=1)).ravel() / width
        deviation = np.sqrt(np.maximum(square - mean**2, 0.0) + LAYER_NORM_EPS)
        features = (sp.diags(1.0 / deviation) @ features).tocsr()
        vectors = (mean / deviation, np.ones(len(mean)))
    if propagation is None:
        return _operand(features[rows], vectors and (vectors[0][rows], vectors[1][rows]), padded, dtype)
    part = propagation[rows].astype(np.float64)
    read = np.unique(part.indices)
    multiplied, inner = (part @ features).tocsr(), features[read]
    if not len(read) or not _apart(multiplied, inner, part):
        return _operand(multiplied, vectors and (part @ vectors[0], part @ vectors[1]), padded, dtype)
    after = Sparse(vertical([canonical(part[:, read].tocsr(), dtype)], padded, len(read)))
    return replace(_operand(inner, vectors and (vectors[0][read], vectors[1][read]), len(read), dtype), after=after)


def filled(x: Tensor) -> bool:
    """Whether features are dense and mostly not zero: a sparse copy would take several times their memory."""
    return x.layout == torch.strided and x.dtype == torch.float32 and int(x.count_nonzero()) > DENSE_ABOVE * x.numel()


def _filled_operand(
    x: NDArray[Any],
    propagation: sp.csr_matrix | None,
    rows: NDArray[np.int64],
    padded: int,
    *,
    input_norm: bool,
    dtype: torch.dtype,
) -> Operand:
    """`build_operand` without a copy of the features in float64: sums are made row by row, rounded once."""
    if propagation is None and not input_norm and padded == len(x) and _all_rows(rows, len(x)):
        return Operand(1, torch.from_numpy(x).to(dtype))  # the features themselves: no copy
    scale, vectors = np.ones(len(x)), None
    if input_norm:
        mean, deviation = np.empty(len(x)), np.empty(len(x))
        _moments(x, mean, deviation)
        scale, vectors = 1.0 / deviation, (mean / deviation, np.ones(len(x)))
    if propagation is None:
        part = sp.csr_matrix((np.ones(len(rows)), rows, np.arange(len(rows) + 1)), shape=(len(rows), len(x)))
    else:
        part = propagation if _all_rows(rows, len(x)) else propagation[rows]
    after = None
    if propagation is not None and DENSE_ABOVE * x.shape[1] * len(rows) > part.nnz:
        read = np.unique(part.indices)
        if len(read) and DENSE_ABOVE * x.shape[1] * len(read) + part.nnz < DENSE_ABOVE * x.shape[1] * len(rows):
            after = Sparse(vertical([canonical(part[:, read].tocsr(), dtype)], padded, len(read)))
            part = sp.csr_matrix((np.ones(len(read)), read, np.arange(len(read) + 1)), shape=(len(read), len(x)))
            padded = len(read)
    matrix = torch.zeros(padded, x.shape[1], dtype=dtype)
    target = matrix.numpy()

    def work(begin: int, end: int) -> None:
        _times_filled(begin, end, part.indptr, part.indices, part.data, scale, x, target)

    split(work, int(part.shape[0]), part.nnz * x.shape[1])
    if vectors is None:
        return Operand(1, matrix, after=after)
    exact = part.astype(np.float64)
    u, v = (_pad(torch.from_numpy(exact @ vector).to(dtype), padded) for vector in vectors)
    return Operand(1, matrix, u, v, after)


def _all_rows(rows: NDArray[np.int64], count: int) -> bool:
    return len(rows) == count and bool((rows == np.arange(count)).all())


@compiled
def _moments(x: Array, mean: Array, deviation: Array) -> None:
    for row in range(len(x)):
        total, square = 0.0, 0.0
        for h in range(x.shape[1]):
            value = np.float64(x[row, h])
            total += value
            square += value * value
        mean[row] = total / x.shape[1]
        deviation[row] = math.sqrt(max(square / x.shape[1] - mean[row] * mean[row], 0.0) + LAYER_NORM_EPS)


@compiled
def _times_filled(
    begin: int, end: int, indptr: Array, indices: Array, values: Array, scale: Array, x: Array, out: Array
) -> None:
    total = np.zeros(x.shape[1])
    for row in range(begin, end):
        total[:] = 0.0
        for j in range(indptr[row], indptr[row + 1]):
            source, value = x[indices[j]], np.float64(values[j]) * scale[indices[j]]
            for h in range(len(total)):
                total[h] += value * source[h]
        target = out[row]
        for h in range(len(total)):
            target[h] = total[h]


def operand_rows(operand: Operand, rows: NDArray[np.int64]) -> Operand:
    """Some rows of one client's operand, in this order: the input of a mini-batch."""
    after, inner = None, rows
    if operand.after is not None:
        part = operand.after.csr[rows]
        inner = np.unique(part.indices)
        after = Sparse(canonical(part[:, inner].tocsr()))
    places = torch.from_numpy(inner)
    matrix = operand.matrix[places] if isinstance(operand.matrix, Tensor) else canonical(operand.matrix[inner])
    u, v = (None if vector is None else vector[places] for vector in (operand.u, operand.v))
    return Operand(1, matrix, u, v, after)


def stack_operands(operands: Sequence[Operand], padded: int) -> Operand:
    """The operands of single clients as one of all, each padded to ``padded`` rows."""
    width = int(operands[0].matrix.shape[1])
    apart = any(operand.after is not None for operand in operands)
    inner = max(int(operand.matrix.shape[0]) for operand in operands) if apart else padded
    dense = [operand.matrix for operand in operands if isinstance(operand.matrix, Tensor)]
    matrix: Tensor | sp.csr_matrix
    if len(dense) == len(operands):
        matrix = torch.cat([_pad(tensor, inner) for tensor in dense])
    else:
        parts = [
            sp.csr_matrix(part.matrix.numpy()) if isinstance(part.matrix, Tensor) else part.matrix for part in operands
        ]
        matrix = vertical(parts, inner, width)
        matrix = stored(matrix, torch_dtype(matrix)) if dense else matrix
    u, v = (
        [t for t in tensors if t is not None]
        for tensors in zip(*((operand.u, operand.v) for operand in operands), strict=True)
    )
    return Operand(
        clients=len(operands),
        matrix=matrix,
        u=torch.cat([_pad(t, inner) for t in u]) if u else None,
        v=torch.cat([_pad(t, inner) for t in v]) if v else None,
        after=Sparse(block_diagonal([_after(operand) for operand in operands], padded, inner)) if apart else None,
    )


def join_operands(operands: Sequence[Operand]) -> Operand:
    """The operands of single clients as one of a client with all their rows."""
    apart = any(operand.after is not None for operand in operands)
    dense = [operand.matrix for operand in operands if isinstance(operand.matrix, Tensor)]
    matrix: Tensor | sp.csr_matrix
    if len(dense) == len(operands):
        matrix = torch.cat(dense)
    else:
        parts = [
            sp.csr_matrix(part.matrix.numpy()) if isinstance(part.matrix, Tensor) else part.matrix for part in operands
        ]
        matrix = canonical(sp.csr_matrix(sp.vstack(parts, format="csr")))
    u, v = ([getattr(part, name) for part in operands if getattr(part, name) is not None] for name in ("u", "v"))
    return Operand(
        clients=1,
        matrix=matrix,
        u=torch.cat(u) if u else None,
        v=torch.cat(v) if v else None,
        after=Sparse(diagonal([_after(operand) for operand in operands])) if apart else None,
    )


def _operand(matrix: sp.csr_matrix, vectors: Vectors | None, padded: int, dtype: torch.dtype) -> Operand:
    rows = vertical([canonical(matrix, dtype)], padded, int(matrix.shape[1]))
    rows.sum_duplicates()
    rows.eliminate_zeros()
    if vectors is None:
        return Operand(1, stored(rows, dtype))
    u, v = (_pad(torch.from_numpy(vector).to(dtype), padded) for vector in vectors)
    return Operand(1, stored(rows, dtype), u, v)


def _after(operand: Operand) -> sp.csr_matrix:
    """What comes after the inner product; nothing is the identity."""
    if operand.after is not None:
        return operand.after.csr
    return canonical(sp.eye(operand.matrix.shape[0], format="csr", dtype=np.float64), torch_dtype(operand.matrix))


def _apart(multiplied: sp.csr_matrix, inner: sp.csr_matrix, part: sp.csr_matrix) -> bool:
    """Whether M and X apart take fewer multiplications per output column than M X; dense ones count by what they are
    worth.
    """
    m, x = (min(float(matrix.nnz), DENSE_ABOVE * matrix.shape[0] * matrix.shape[1]) for matrix in (multiplied, inner))
    return x + part.nnz < m


def _pad(tensor: Tensor, rows: int) -> Tensor:
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded
