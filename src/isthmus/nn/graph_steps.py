r"""Loss and gradients of GIN graph models written out: one channel (`GraphGIN`) or two with GCN beside it
(`TwoChannel`).

The same arithmetic as their ``forward`` with autograd, for the two models that FedStar's tables train most. What it
saves: both channels lie side by side in one array, so that neighbours are summed for both in one pass and [h | g] W is
one product; bias, ReLU and dropout are one pass, and so is their way back; nothing is kept or copied that the way back
does not need.

    layer   forward                                             way back, from the gradient of [h | g]
    first   z = P [x|1] ([pre] W) + P [s|1] ([emb] W) + b       gradients of both factors of the small matrices
    later   a = P [h|g];  z = ReLU(a W + b)                     a^T dz, P^T (dz W^T)
    both    h' = drop(ReLU(z W' + b'))                          where h' > 0: its gradient times 1 / (1 - rate)
            g' = tanh(Q g V + c)                                times 1 - g'^2; Q^T (. V^T) joins that of g

P sums up a neighbourhood, Q is GCN's. Shapes: m nodes, B graphs; channels of width H, 2H side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isthmus.nn.architectures.gcn import GCNConv
from isthmus.nn.architectures.gin import GINConv
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.graph_batch import Batch, Csr, Features, sum_rows, times, transposed_times
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.inputs import Inputs
from isthmus.nn.kernels import Array, compiled, split
from isthmus.nn.loss import Loss
from isthmus.nn.two_channel import TwoChannel
from isthmus.tensors import Weights

SUM, NORMALISED = GINConv.propagation, GCNConv.propagation
_ROWS = 64


def written_out(model: GraphModel, batch: Batch) -> bool:
    """Whether `gradients` knows this model on this batch."""
    if not all(type(conv) is GINConv for conv in model.convs) or type(model).forward not in _FORWARDS:
        return False
    if isinstance(model, TwoChannel):
        if not model.pooled or not all(type(conv) is GCNConv for conv in model.structure.convs):
            return False
        if batch.rows("s", SUM) is None or batch.rows("s", NORMALISED) is None:
            return False
    return batch.rows("x", SUM) is not None


_FORWARDS = (GraphModel.forward, TwoChannel.forward)


@dataclass(frozen=True, eq=False)
class _Layer:
    """What the way back needs of a layer: a, ReLU(a W + b), [h' | g'] and Q g."""

    summed: Tensor | None
    inner: Tensor
    out: Tensor
    near: Tensor | None


def gradients(
    model: GraphModel, weights: Weights, batch: Batch, share: Tensor, loss: Loss, dropout: DropoutSource | None
) -> tuple[dict[str, Tensor], float]:
    """Gradients of ``sum over the batch of share * loss``, and its value."""
    rate = model.dropout if dropout is not None else 0.0
    two = isinstance(model, TwoChannel)
    layers = [_first(weights, batch, dropout, rate, two)]
    for i in range(1, len(model.convs)):
        layers.append(_later(weights, i, layers[-1].out, batch, dropout, rate, two))
    pooled = sum_rows(batch.ptr, layers[-1].out)  # (B, H) or (B, 2H)
    z = pooled
    if two:
        z = torch.addmm(batch.sizes(pooled.dtype) * weights["mix.bias"], pooled, weights["mix.weight"])
    post = z @ weights["post.weight"]
    u = _drop(post, weights["post.bias"], dropout, rate, torch.empty_like(post))
    logits = torch.addmm(weights["readout.bias"], u, weights["readout.weight"])

    count = (batch.y.numel(),)
    value, grad = loss.value_and_grad(logits, Inputs(1, {}, (), (count,), count, batch.y, share))
    grads: dict[str, Tensor] = {"readout.weight": u.T @ grad, "readout.bias": grad.sum(0)}
    grad, grads["post.bias"] = _drop_back(grad @ weights["readout.weight"].T, u, u.shape[1], _scale(rate, dropout))
    grads["post.weight"] = z.T @ grad
    grad = grad @ weights["post.weight"].T
    if two:
        grads["mix.bias"] = (batch.sizes(grad.dtype) * grad).sum(0)
        grads["mix.weight"] = pooled.T @ grad
        grad = grad @ weights["mix.weight"].T
    ptr = torch.from_numpy(batch.ptr)
    grad = torch.repeat_interleave(grad, ptr.diff(), dim=0, output_size=int(ptr[-1]))
    for i in range(len(layers) - 1, 0, -1):
        grad = _later_back(weights, grads, i, layers[i], layers[i - 1].out, grad, batch, _scale(rate, dropout), two)
    _first_back(weights, grads, layers[0], grad, batch, _scale(rate, dropout), two)
    return {name: grads[name] for name in weights}, float(value)


# -- layers ----------------------------------------------------------------------------------------


def _first(weights: Weights, batch: Batch, dropout: DropoutSource | None, rate: float, two: bool) -> _Layer:
    weight = weights["convs.0.inner.weight"]
    pre = _stacked(weights, "pre")
    width = pre.shape[1]
    z = _product(batch.rows("x", SUM), pre @ weight[:width])
    if two:
        embed = _stacked(weights, "structure.embed")
        rows = batch.rows("s", SUM)
        if isinstance(rows, Tensor):
            z.addmm_(rows, embed @ weight[width:])
        else:
            z += _product(rows, embed @ weight[width:])
    out = _empty(z, _wide(weights, 0, two))
    _perceptron(weights, 0, z, out, dropout, rate)
    if two:
        near = _product(batch.rows("s", NORMALISED), embed @ weights["structure.convs.0.weight"])
        _bend(near, weights["structure.convs.0.bias"], out)
    return _Layer(None, z, out, None)


def _later(
    weights: Weights, i: int, before: Tensor, batch: Batch, dropout: DropoutSource | None, rate: float, two: bool
) -> _Layer:
    summed = times(batch.pair(SUM).forward, before)  # P [h | g]
    z = summed @ weights[f"convs.{i}.inner.weight"]
    out = _empty(z, _wide(weights, i, two))
    _perceptron(weights, i, z, out, dropout, rate)
    near = None
    if two:
        half = weights[f"structure.convs.{i}.weight"].shape[0]
        near = _columns_times(batch.pair(NORMALISED).forward, before, before.shape[1] - half, half)  # Q g
        _bend(near @ weights[f"structure.convs.{i}.weight"], weights[f"structure.convs.{i}.bias"], out)
    return _Layer(summed, z, out, near)


def _perceptron(weights: Weights, i: int, z: Tensor, out: Tensor, dropout: DropoutSource | None, rate: float) -> None:
    """ReLU in place of ``z``, then the outer map with what follows it into the first columns of ``out``."""
    _rectify(z, weights[f"convs.{i}.inner.bias"])
    _drop(z @ weights[f"convs.{i}.outer.weight"], weights[f"convs.{i}.outer.bias"], dropout, rate, out)


def _bend(z: Tensor, bias: Tensor, out: Tensor) -> None:
    """tanh(z + c) into the last columns of ``out``; ``z`` may be overwritten."""
    first = out.shape[1] - z.shape[1]
    if z.dtype == torch.float32:
        _bend_rows(z.numpy(), bias.numpy(), first, out.numpy())
        return
    z += bias
    out[:, first:] = z.tanh_()


def _later_back(
    weights: Weights,
    grads: dict[str, Tensor],
    i: int,
    layer: _Layer,
    before: Tensor,
    grad: Tensor,
    batch: Batch,
    scale: float,
    two: bool,
) -> Tensor:
    """The gradient of [h | g] before layer i."""
    assert layer.summed is not None
    inner = _perceptron_back(weights, grads, i, layer, grad, scale)
    grads[f"convs.{i}.inner.weight"] = layer.summed.T @ inner
    back = times(batch.pair(SUM).backward, inner @ weights[f"convs.{i}.inner.weight"].T)
    if two:
        assert layer.near is not None
        name = f"structure.convs.{i}"
        bent, grads[f"{name}.bias"] = _bend_back(grad, layer.out, weights[f"{name}.weight"].shape[1])
        grads[f"{name}.weight"] = layer.near.T @ bent
        half = layer.near.shape[1]
        _add_columns(batch.pair(NORMALISED).backward, bent @ weights[f"{name}.weight"].T, back, before.shape[1] - half)
    return back


def _first_back(
    weights: Weights, grads: dict[str, Tensor], layer: _Layer, grad: Tensor, batch: Batch, scale: float, two: bool
) -> None:
    inner = _perceptron_back(weights, grads, 0, layer, grad, scale)
    weight = weights["convs.0.inner.weight"]
    pre = _stacked(weights, "pre")
    width = pre.shape[1]
    small = _product_back(batch.rows("x", SUM), inner, pre.shape[0])
    parts = [pre.T @ small]
    _split_stacked(grads, "pre", small @ weight[:width].T)
    if two:
        embed, name = _stacked(weights, "structure.embed"), "structure.convs.0"
        small = _product_back(batch.rows("s", SUM), inner, embed.shape[0])
        parts.append(embed.T @ small)
        embed_grad = small @ weight[width:].T
        bent, grads[f"{name}.bias"] = _bend_back(grad, layer.out, weights[f"{name}.weight"].shape[1])
        small = _product_back(batch.rows("s", NORMALISED), bent, embed.shape[0])
        grads[f"{name}.weight"] = embed.T @ small
        _split_stacked(grads, "structure.embed", embed_grad + small @ weights[f"{name}.weight"].T)
    grads["convs.0.inner.weight"] = torch.cat(parts)


def _perceptron_back(
    weights: Weights, grads: dict[str, Tensor], i: int, layer: _Layer, grad: Tensor, scale: float
) -> Tensor:
    """The gradient before the inner ReLU."""
    name = f"convs.{i}"
    outer, grads[f"{name}.outer.bias"] = _drop_back(grad, layer.out, weights[f"{name}.outer.weight"].shape[1], scale)
    grads[f"{name}.outer.weight"] = layer.inner.T @ outer
    inner = outer @ weights[f"{name}.outer.weight"].T
    grads[f"{name}.inner.bias"] = _rectify_back(inner, layer.inner)
    return inner


# -- pieces ----------------------------------------------------------------------------------------


def _stacked(weights: Weights, name: str) -> Tensor:
    return torch.cat([weights[f"{name}.weight"], weights[f"{name}.bias"].unsqueeze(0)])


def _split_stacked(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    grads[f"{name}.weight"], grads[f"{name}.bias"] = grad[:-1].contiguous(), grad[-1].contiguous()


def _wide(weights: Weights, i: int, two: bool) -> int:
    """Columns of [h | g] after layer i."""
    width = weights[f"convs.{i}.outer.bias"].numel()
    return width + weights[f"structure.convs.{i}.bias"].numel() if two else width


def _empty(like: Tensor, width: int) -> Tensor:
    return torch.empty(like.shape[0], width, dtype=like.dtype)


def _product(rows: Features | None, matrix: Tensor) -> Tensor:
    assert rows is not None
    return rows @ matrix if isinstance(rows, Tensor) else times(rows, matrix)


def _product_back(rows: Features | None, grad: Tensor, height: int) -> Tensor:
    """The gradient of the matrix of `_product`."""
    assert rows is not None
    return rows.T @ grad if isinstance(rows, Tensor) else transposed_times(rows, grad, height)


def _scale(rate: float, dropout: DropoutSource | None) -> float:
    return dropout.scale(rate) if dropout is not None and rate else 1.0


def _rectify(z: Tensor, bias: Tensor) -> None:
    values, shift = z.numpy(), bias.numpy()
    split(lambda begin, end: _rectify_rows(begin, end, values, shift), z.shape[0], z.numel())


def _drop(z: Tensor, bias: Tensor, dropout: DropoutSource | None, rate: float, out: Tensor) -> Tensor:
    """ReLU(z + b), dropped where there is a source, into the first columns of ``out``."""
    values, shift, target = z.numpy(), bias.numpy(), out.numpy()
    if dropout is None or not rate:
        split(lambda begin, end: _rectify_into(begin, end, values, shift, target), z.shape[0], z.numel())
        return out
    bits, threshold = dropout.bits(z.shape[0], z.shape[1], rate)
    drawn, scale = bits.numpy(), target.dtype.type(dropout.scale(rate))
    split(
        lambda begin, end: _drop_rows(begin, end, values, shift, drawn, threshold, scale, target), z.shape[0], z.numel()
    )
    return out


def _drop_back(grad: Tensor, out: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """The gradient before ReLU and dropout, from the first columns of ``grad`` and of the result, and its sum over
    rows.
    """
    made = _empty(grad, width)
    _drop_rows_back(grad.numpy(), out.numpy(), made.numpy().dtype.type(scale), made.numpy())
    return made, _total(made)


def _rectify_back(grad: Tensor, out: Tensor) -> Tensor:
    """The gradient before ReLU in place of that after it; returns its sum over rows."""
    _rectify_rows_back(grad.numpy(), out.numpy())
    return _total(grad)


def _bend_back(grad: Tensor, out: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The gradient before tanh, from the last columns, and its sum over rows."""
    made = _empty(grad, width)
    _bend_rows_back(grad.numpy(), out.numpy(), grad.shape[1] - width, made.numpy())
    return made, _total(made)


def _total(values: Tensor) -> Tensor:
    """The sum over rows, the same whatever the number of threads."""
    total = np.zeros(values.shape[1])
    _sum_all_rows(values.numpy(), total)
    return torch.from_numpy(total).to(values.dtype)


def _columns_times(matrix: Csr, dense: Tensor, first: int, width: int) -> Tensor:
    """``M @ dense[:, first : first + width]``"""
    out = _empty(dense, width)
    out.zero_()
    _multiply_columns(matrix.indptr, matrix.indices, matrix.data, dense.numpy(), first, out.numpy(), 0, width)
    return out


def _add_columns(matrix: Csr, dense: Tensor, out: Tensor, first: int) -> None:
    """``out[:, first:] += M @ dense``"""
    _multiply_columns(matrix.indptr, matrix.indices, matrix.data, dense.numpy(), 0, out.numpy(), first, dense.shape[1])


@compiled
def _rectify_rows(begin: int, end: int, values: Array, bias: Array) -> None:
    zero = values.dtype.type(0)
    for row in range(begin, end):
        z = values[row]
        for h in range(len(bias)):
            z[h] = max(z[h] + bias[h], zero)


@compiled
def _rectify_into(begin: int, end: int, values: Array, bias: Array, out: Array) -> None:
    zero = values.dtype.type(0)
    for row in range(begin, end):
        z, target = values[row], out[row]
        for h in range(len(bias)):
            target[h] = max(z[h] + bias[h], zero)


@compiled
def _drop_rows(
    begin: int, end: int, values: Array, bias: Array, bits: Array, threshold: int, scale: float, out: Array
) -> None:
    zero = values.dtype.type(0)
    for row in range(begin, end):
        z, drawn, target = values[row], bits[row], out[row]
        for h in range(len(bias)):
            value = max(z[h] + bias[h], zero)
            target[h] = value * scale if drawn[h] >= threshold else zero


@compiled
def _drop_rows_back(grad: Array, out: Array, scale: float, made: Array) -> None:
    zero = made.dtype.type(0)
    for row in range(len(made)):
        for h in range(made.shape[1]):
            value = grad[row, h] * scale
            made[row, h] = value if out[row, h] > zero else zero


@compiled
def _rectify_rows_back(grad: Array, out: Array) -> None:
    # A loop of its own: one that may or may not write where it reads is compiled to do one value at a time.
    zero = grad.dtype.type(0)
    for row in range(len(grad)):
        for h in range(grad.shape[1]):
            grad[row, h] = grad[row, h] if out[row, h] > zero else zero


_ODD = np.array(
    [
        -2.76076847742355e-16,
        2.00018790482477e-13,
        -8.60467152213735e-11,
        5.12229709037114e-08,
        1.48572235717979e-05,
        6.37261928875436e-04,
        4.89352455891786e-03,
    ],
    dtype=np.float32,
)
_EVEN = np.array(
    [1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03], dtype=np.float32
)


@compiled
def _bend_rows(values: Array, bias: Array, first: int, out: Array) -> None:
    """tanh as a quotient of polynomials (the one of Eigen, which most frameworks share; off by at most 3e-7): together
    with bias and copy it takes a fifth of the time of torch's, which was a tenth of a round."""
    top, bottom = np.float32(7.90531110763549805), np.float32(-7.90531110763549805)  # beyond, single precision says 1
    for row in range(len(values)):
        z, target = values[row], out[row, first:]
        for h in range(len(bias)):
            x = min(max(z[h] + bias[h], bottom), top)
            y = x * x
            odd = _ODD[0]
            for i in range(1, 7):
                odd = odd * y + _ODD[i]
            even = _EVEN[0]
            for i in range(1, 4):
                even = even * y + _EVEN[i]
            target[h] = x * odd / even


@compiled
def _bend_rows_back(grad: Array, out: Array, first: int, made: Array) -> None:
    one = made.dtype.type(1)
    for row in range(len(made)):
        source, bent = grad[row, first:], out[row, first:]
        for h in range(made.shape[1]):
            made[row, h] = source[h] * (one - bent[h] * bent[h])


@compiled
def _sum_all_rows(values: Array, total: Array) -> None:
    part = np.zeros(len(total), dtype=values.dtype)  # of some rows; their sums are added up in double precision
    for begin in range(0, len(values), _ROWS):
        for row in range(begin, min(begin + _ROWS, len(values))):
            for h in range(len(part)):
                part[h] += values[row, h]
        for h in range(len(part)):
            total[h] += part[h]
            part[h] = 0


@compiled
def _multiply_columns(
    indptr: Array, indices: Array, values: Array, dense: Array, dense_first: int, out: Array, out_first: int, width: int
) -> None:
    for row in range(len(indptr) - 1):
        target = out[row, out_first : out_first + width]
        for j in range(indptr[row], indptr[row + 1]):
            value, source = values[j], dense[indices[j], dense_first : dense_first + width]
            for h in range(width):
                target[h] += value * source[h]
