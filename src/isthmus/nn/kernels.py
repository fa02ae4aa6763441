"""Compiled loops of local training: the sparse-dense product, activation, bias; and how all compiled loops are run.

torch's own sparse product goes through a solver handle, a zero fill and a copy per call, which for a client's few
hundred rows costs several times the product. Its elementwise operations wake all threads for a few ten thousand values,
and where cores are busy, waiting for them takes a hundred times as long as the operation.

Loops are sequential and release the interpreter lock; `split` runs them on stretches of rows in as many threads as
torch uses. Every
output row is computed by one thread in one order: the number of threads does not change a bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.compiling import machine_code
from isthmus.errors import ProtocolError

Array = NDArray[Any]

_WORK_PER_THREAD = 1 << 20
"""Values a thread must have to work on before starting it pays."""

# "contract" lets a * b + c become one instruction; nothing else about rounding is relaxed. The numpy error model drops
# the division-by-zero branch that would keep the loops from being vectorised.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`machine_code` with these options."""
    return machine_code(function, **(_OPTIONS | options))


class Csr(Protocol):
    """A sparse matrix by rows, scipy's or bare arrays."""

    @property
    def indptr(self) -> Array: ...
    @property
    def indices(self) -> Array: ...
    @property
    def data(self) -> Array: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def spmm(matrix: Csr, dense: Tensor, values: Array | None = None) -> Tensor:
    """``matrix @ dense``: (m, n) x (n, H) -> (m, H). ``values`` replaces the values of the matrix."""
    out = torch.empty(matrix.shape[0], dense.shape[1], dtype=dense.dtype)
    spmm_into(matrix, dense, out, values)
    return out


def spmm_into(matrix: Csr, dense: Tensor, out: Tensor, values: Array | None = None) -> None:
    """`spmm` into memory the caller has."""
    data = matrix.data if values is None else values
    if dense.shape[0] != matrix.shape[1] or out.shape != (matrix.shape[0], dense.shape[1]) or out.dtype != dense.dtype:
        # Compiled loops check no bounds, so this is the place.
        raise ProtocolError(
            f"inputs of shape {matrix.shape} do not fit weights of shape {tuple(dense.shape)}; build the inputs with "
            "that model"
        )
    source, target = dense.detach().contiguous().numpy(), out.numpy()

    def work(begin: int, end: int) -> None:
        _spmm(begin, end, matrix.indptr, matrix.indices, data, source, target)

    split(work, int(matrix.shape[0]), (len(matrix.indices) + int(matrix.shape[0])) * dense.shape[1])


def activate(z: Tensor, mask: Tensor | None) -> None:
    """``z <- max(z, 0) * mask`` in place; (R, H)."""
    values = z.numpy()
    scale = values if mask is None else mask.numpy()

    def work(begin: int, end: int) -> None:
        _activate(begin, end, values, scale, mask is not None)

    split(work, z.shape[0], z.numel())


def activate_grad(grad: Tensor, h: Tensor, mask: Tensor | None) -> Tensor:
    """The gradient of z given that of ``h = max(z, 0) * mask``, in memory of its own."""
    out = torch.empty_like(grad)
    source, kept, target = grad.numpy(), h.numpy(), out.numpy()
    scale = kept if mask is None else mask.numpy()

    def work(begin: int, end: int) -> None:
        _activate_grad(begin, end, source, kept, scale, mask is not None, target)

    split(work, out.shape[0], out.numel())
    return out


def scaled_mask(bits: Tensor, width: int, threshold: int, scale: float, dtype: torch.dtype) -> Tensor:
    """``scale`` where a value of ``bits`` (R, >= width), int16, reaches the threshold, else 0. (R, width)"""
    out = torch.empty(bits.shape[0], width, dtype=dtype)
    source, target = bits.numpy(), out.numpy()
    value = target.dtype.type(scale)

    def work(begin: int, end: int) -> None:
        _scaled_mask(begin, end, source, threshold, value, target)

    split(work, out.shape[0], out.numel())
    return out


def add_rows(h: Tensor, bias: Tensor) -> None:
    """``h <- h + b`` in place: (R, H) with (H,), or (K, H) for K stretches of rows."""
    values, rows = h.numpy(), bias.view(-1, bias.shape[-1]).numpy()

    def work(begin: int, end: int) -> None:
        _add_rows(begin, end, len(values) // len(rows), values, rows)

    split(work, h.shape[0], h.numel())


def sum_rows(h: Tensor, clients: int) -> Tensor:
    """The sum over each client's rows: (K p, H) -> (K, H)."""
    out = torch.zeros(clients, h.shape[-1], dtype=h.dtype)
    values, target = h.numpy(), out.numpy()

    def work(begin: int, end: int) -> None:
        _sum_rows(begin, end, len(values) // clients, values, target)

    split(work, clients, h.numel())
    return out


def threads_for(cost: int) -> int:
    """How many threads `split` takes."""
    return max(1, min(torch.get_num_threads(), cost // _WORK_PER_THREAD))


def split(work: Callable[[int, int], None], rows: int, cost: int) -> None:
    """Run ``work(begin, end)`` over all rows, in several threads where the work is worth it."""
    threads = threads_for(cost)
    if threads == 1:
        work(0, rows)
        return
    bounds = [rows * part // threads for part in range(threads + 1)]
    others = [threading.Thread(target=work, args=(bounds[part], bounds[part + 1])) for part in range(1, threads)]
    for thread in others:
        thread.start()
    work(bounds[0], bounds[1])
    for thread in others:
        thread.join()


@compiled
def _spmm(begin: int, end: int, indptr: Array, indices: Array, values: Array, dense: Array, out: Array) -> None:
    width = dense.shape[1]
    for row in range(begin, end):
        total = out[row]
        weighted_rows(indptr[row], indptr[row + 1], width, indices, values, dense, total)


# Inlined: called for every row, and a call that the compiler leaves takes as long as a dozen products.
@partial(compiled, inline="always")
def weighted_rows(begin: int, end: int, width: int, indices: Array, values: Array, dense: Array, total: Array) -> None:
    """total = sum_j values[j] * dense[indices[j]]"""
    for h in range(width):
        total[h] = 0
    add_weighted_rows(begin, end, width, indices, values, dense, total)


@partial(compiled, inline="always")
def add_weighted_rows(
    begin: int, end: int, width: int, indices: Array, values: Array, dense: Array, total: Array
) -> None:
    """total += sum_j values[j] * dense[indices[j]], added in this order."""
    # Four at a time: the total is read and written once for four products instead of for each.
    fours = begin + (end - begin) // 4 * 4
    for j in range(begin, fours, 4):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        p, q, r, s = dense[indices[j]], dense[indices[j + 1]], dense[indices[j + 2]], dense[indices[j + 3]]
        for h in range(width):
            added = total[h]
            added += a * p[h]
            added += b * q[h]
            added += c * r[h]
            added += d * s[h]
            total[h] = added
    for j in range(fours, end):
        value, row = values[j], dense[indices[j]]
        for h in range(width):
            total[h] += value * row[h]


@compiled
def _activate(begin: int, end: int, values: Array, mask: Array, masked: bool) -> None:
    for row in range(begin, end):
        z, scale = values[row], mask[row]
        for h in range(len(z)):
            if z[h] < 0:
                z[h] = 0
        if masked:
            for h in range(len(z)):
                z[h] *= scale[h]


@compiled
def _activate_grad(begin: int, end: int, grad: Array, h: Array, mask: Array, masked: bool, out: Array) -> None:
    # Not in place: a loop that may or may not write where it reads is compiled to do one value at a time.
    zero = out.dtype.type(0)
    for row in range(begin, end):
        source, kept, scale, target = grad[row], h[row], mask[row], out[row]
        if masked:
            for i in range(len(target)):
                passed = source[i] * scale[i]
                target[i] = passed if kept[i] > zero else zero
        else:
            for i in range(len(target)):
                target[i] = source[i] if kept[i] > zero else zero


@compiled
def _scaled_mask(begin: int, end: int, bits: Array, threshold: int, scale: float, out: Array) -> None:
    for row in range(begin, end):
        source, target = bits[row], out[row]
        for h in range(len(target)):
            target[h] = scale if source[h] >= threshold else 0


@compiled
def _add_rows(begin: int, end: int, padded: int, values: Array, bias: Array) -> None:
    for row in range(begin, end):
        value, shift = values[row], bias[row // padded]
        for h in range(len(value)):
            value[h] += shift[h]


@compiled
def _sum_rows(begin: int, end: int, padded: int, values: Array, out: Array) -> None:
    for client in range(begin, end):
        total = out[client]
        for row in range(client * padded, (client + 1) * padded):
            value = values[row]
            for h in range(len(total)):
                total[h] += value[h]
