r"""Gradients of GIN graph models by hand: one channel (``gin``), or two with GCN beside it (`TwoChannel`).

The same numbers as autograd on their ``forward``, for the two models that FedStar's tables train most. What it saves:
both channels lie side by side in one array, so that neighbours are summed for both in one pass and [h | g] W is one
product; bias, ReLU and dropout are one pass, and so is their backward pass; nothing is kept or copied that the backward
pass does not need.

    layer   forward                                             backward, from the gradient of [h | g]
    first   z = P [x|1] ([pre] W) + P [s|1] ([emb] W) + b       gradients of both factors of the small matrices
    others  a = P [h|g];  z = ReLU(a W + b)                     a^T dz, P^T (dz W^T)
    all     h' = drop(ReLU(z W' + b'))                          where h' > 0: its gradient times 1 / (1 - rate)
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
from isthmus.nn.graph_batch import Batch, Features, sum_rows, transposed_times
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.inputs import Inputs
from isthmus.nn.kernels import Array, Csr, compiled, split, spmm
from isthmus.nn.loss import Loss
from isthmus.nn.two_channel import TwoChannel
from isthmus.tensors import Weights

P, Q = GINConv.propagation, GCNConv.propagation
_FORWARDS = (GraphModel.forward, TwoChannel.forward)
_ROWS = 64


def has_manual_gradient(model: GraphModel, batch: Batch) -> bool:
    """Whether `gin_gradients` supports this model on this batch."""
    if not all(type(conv) is GINConv for conv in model.convs) or type(model).forward not in _FORWARDS:
        return False
    if isinstance(model, TwoChannel):
        if not model.pooled or not all(type(conv) is GCNConv for conv in model.structure.convs):
            return False
        if batch.rows("s", P) is None or batch.rows("s", Q) is None:
            return False
    return batch.rows("x", P) is not None


def gin_gradients(
    model: GraphModel, weights: Weights, batch: Batch, share: Tensor, loss: Loss, dropout: DropoutSource | None
) -> tuple[dict[str, Tensor], float]:
    """Gradients of ``sum over the batch of share * loss``, and its value."""
    one = _Pass(model, weights, batch, dropout)
    layers = one.layers(len(model.convs))
    value, grad = one.readout(layers[-1].out, share, loss)
    for i in range(len(layers) - 1, 0, -1):
        grad = one.next_backward(i, layers[i], layers[i - 1].out, grad)
    one.first_backward(layers[0], grad)
    return {name: one.grads[name] for name in weights}, value


def gin_logits(model: GraphModel, weights: Weights, batch: Batch) -> Tensor:
    """The model's logits, without dropout."""
    one = _Pass(model, weights, batch, None)
    return one.logits(one.layers(len(model.convs))[-1].out)[-1]


@dataclass(frozen=True, eq=False)
class _Layer:
    """What the backward pass needs of a layer: a, ReLU(a W + b), [h' | g'] and Q g."""

    summed: Tensor | None
    inner: Tensor
    out: Tensor
    normalised: Tensor | None


class _Pass:
    """One forward and backward pass; ``grads`` fills up on the latter."""

    def __init__(self, model: GraphModel, weights: Weights, batch: Batch, dropout: DropoutSource | None) -> None:
        self.weights, self.batch, self.dropout = weights, batch, dropout
        self.two = isinstance(model, TwoChannel)
        self.rate = model.dropout if dropout is not None else 0.0
        self.scale = dropout.scale(self.rate) if dropout is not None and self.rate else 1.0
        self.grads: dict[str, Tensor] = {}

    def layers(self, count: int) -> list[_Layer]:
        found = [self.first()]
        for i in range(1, count):
            found.append(self.next(i, found[-1].out))
        return found

    def first(self) -> _Layer:
        weights, batch = self.weights, self.batch
        weight, pre = weights["convs.0.inner.weight"], _stacked(weights, "pre")
        width = pre.shape[1]
        z = _product(batch.rows("x", P), pre @ weight[:width])
        if self.two:
            embed = _stacked(weights, "structure.embed")
            rows = batch.rows("s", P)
            if isinstance(rows, Tensor):
                z.addmm_(rows, embed @ weight[width:])
            else:
                z += _product(rows, embed @ weight[width:])
        out = self._perceptron(0, z)
        if self.two:
            z_structure = _product(batch.rows("s", Q), embed @ weights["structure.convs.0.weight"])
            _tanh(z_structure, weights["structure.convs.0.bias"], out)
        return _Layer(None, z, out, None)

    def next(self, i: int, before: Tensor) -> _Layer:
        weights, batch = self.weights, self.batch
        summed = spmm(batch.pair(P).forward, before)  # P [h | g]
        z = summed @ weights[f"convs.{i}.inner.weight"]
        out, normalised = self._perceptron(i, z), None
        if self.two:
            half = weights[f"structure.convs.{i}.weight"].shape[0]
            normalised = _columns_times(batch.pair(Q).forward, before, before.shape[1] - half, half)  # Q g
            _tanh(normalised @ weights[f"structure.convs.{i}.weight"], weights[f"structure.convs.{i}.bias"], out)
        return _Layer(summed, z, out, normalised)

    def _perceptron(self, i: int, z: Tensor) -> Tensor:
        """ReLU in place of ``z``, then the outer map with what follows it, into the first columns of [h' | g']."""
        weights, name = self.weights, f"convs.{i}"
        width = weights[f"{name}.outer.bias"].numel()
        out = _empty(z, width + weights[f"structure.{name}.bias"].numel() if self.two else width)
        _rectify(z, weights[f"{name}.inner.bias"])
        return self._drop(z @ weights[f"{name}.outer.weight"], weights[f"{name}.outer.bias"], out)

    def logits(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From the last [h | g] to its sums, what ``mix`` and ``post`` make of them, and the logits."""
        weights, batch = self.weights, self.batch
        z = pooled = sum_rows(batch.ptr, out)  # (B, H) or (B, 2H)
        if self.two:
            z = torch.addmm(batch.sizes(pooled.dtype) * weights["mix.bias"], pooled, weights["mix.weight"])
        post = z @ weights["post.weight"]
        u = self._drop(post, weights["post.bias"], torch.empty_like(post))
        return pooled, z, u, torch.addmm(weights["readout.bias"], u, weights["readout.weight"])

    def readout(self, out: Tensor, share: Tensor, loss: Loss) -> tuple[float, Tensor]:
        """From the last [h | g] to the loss, and back to the gradient of that [h | g]."""
        weights, batch, grads = self.weights, self.batch, self.grads
        pooled, z, u, logits = self.logits(out)
        value, grad = loss.value_and_grad(logits, Inputs.labels(batch.y, share))
        grads |= {"readout.weight": u.T @ grad, "readout.bias": grad.sum(0)}
        grad, grads["post.bias"] = _drop_backward(grad @ weights["readout.weight"].T, u, u.shape[1], self.scale)
        grads["post.weight"] = z.T @ grad
        grad = grad @ weights["post.weight"].T
        if self.two:
            grads["mix.bias"] = (batch.sizes(grad.dtype) * grad).sum(0)
            grads["mix.weight"] = pooled.T @ grad
            grad = grad @ weights["mix.weight"].T
        ptr = torch.from_numpy(batch.ptr)
        return float(value), torch.repeat_interleave(grad, ptr.diff(), dim=0, output_size=int(ptr[-1]))

    def next_backward(self, i: int, layer: _Layer, before: Tensor, grad: Tensor) -> Tensor:
        """The gradient of [h | g] before layer i."""
        weights, batch, name = self.weights, self.batch, f"structure.convs.{i}"
        assert layer.summed is not None
        inner = self._perceptron_backward(i, layer, grad)
        self.grads[f"convs.{i}.inner.weight"] = layer.summed.T @ inner
        total = spmm(batch.pair(P).backward, inner @ weights[f"convs.{i}.inner.weight"].T)
        if self.two:
            assert layer.normalised is not None
            z_grad = self._tanh_backward(name, layer, grad)
            self.grads[f"{name}.weight"] = layer.normalised.T @ z_grad
            half = layer.normalised.shape[1]
            _add_columns(batch.pair(Q).backward, z_grad @ weights[f"{name}.weight"].T, total, before.shape[1] - half)
        return total

    def first_backward(self, layer: _Layer, grad: Tensor) -> None:
        weights, batch, name = self.weights, self.batch, "structure.convs.0"
        inner = self._perceptron_backward(0, layer, grad)
        weight, pre = weights["convs.0.inner.weight"], _stacked(weights, "pre")
        width = pre.shape[1]
        small = _product_grad(batch.rows("x", P), inner)
        parts = [pre.T @ small]
        self._split_stacked("pre", small @ weight[:width].T)
        if self.two:
            embed = _stacked(weights, "structure.embed")
            small = _product_grad(batch.rows("s", P), inner)
            parts.append(embed.T @ small)
            embed_grad = small @ weight[width:].T
            small = _product_grad(batch.rows("s", Q), self._tanh_backward(name, layer, grad))
            self.grads[f"{name}.weight"] = embed.T @ small
            self._split_stacked("structure.embed", embed_grad + small @ weights[f"{name}.weight"].T)
        self.grads["convs.0.inner.weight"] = torch.cat(parts)

    def _perceptron_backward(self, i: int, layer: _Layer, grad: Tensor) -> Tensor:
        """The gradient before the inner ReLU."""
        name, weight = f"convs.{i}", self.weights[f"convs.{i}.outer.weight"]
        outer, self.grads[f"{name}.outer.bias"] = _drop_backward(grad, layer.out, weight.shape[1], self.scale)
        self.grads[f"{name}.outer.weight"] = layer.inner.T @ outer
        inner = outer @ weight.T
        self.grads[f"{name}.inner.bias"] = _rectify_backward(inner, layer.inner)
        return inner

    def _tanh_backward(self, name: str, layer: _Layer, grad: Tensor) -> Tensor:
        """The gradient before tanh, from the last columns."""
        found = _empty(grad, self.weights[f"{name}.weight"].shape[1])
        _tanh_rows_backward(grad.numpy(), layer.out.numpy(), grad.shape[1] - found.shape[1], found.numpy())
        self.grads[f"{name}.bias"] = _total(found)
        return found

    def _split_stacked(self, name: str, grad: Tensor) -> None:
        self.grads[f"{name}.weight"], self.grads[f"{name}.bias"] = grad[:-1].contiguous(), grad[-1].contiguous()

    def _drop(self, z: Tensor, bias: Tensor, out: Tensor) -> Tensor:
        """ReLU(z + b), dropped where there is a source, into the first columns of ``out``."""
        values, shift, target = z.numpy(), bias.numpy(), out.numpy()
        if self.dropout is None or not self.rate:
            split(lambda begin, end: _rectify_into(begin, end, values, shift, target), z.shape[0], z.numel())
            return out
        bits, threshold = self.dropout.bits(z.shape[0], z.shape[1], self.rate)
        drawn, scale = bits.numpy(), target.dtype.type(self.scale)

        def work(begin: int, end: int) -> None:
            _drop_rows(begin, end, values, shift, drawn, threshold, scale, target)

        split(work, z.shape[0], z.numel())
        return out


def _stacked(weights: Weights, name: str) -> Tensor:
    return torch.cat([weights[f"{name}.weight"], weights[f"{name}.bias"].unsqueeze(0)])


def _empty(like: Tensor, width: int) -> Tensor:
    return torch.empty(like.shape[0], width, dtype=like.dtype)


def _product(rows: Features | None, matrix: Tensor) -> Tensor:
    assert rows is not None
    return rows @ matrix if isinstance(rows, Tensor) else spmm(rows, matrix)


def _product_grad(rows: Features | None, grad: Tensor) -> Tensor:
    """The gradient of the matrix of `_product`."""
    assert rows is not None
    return rows.T @ grad if isinstance(rows, Tensor) else transposed_times(rows, grad)


def _rectify(z: Tensor, bias: Tensor) -> None:
    values, shift = z.numpy(), bias.numpy()
    split(lambda begin, end: _rectify_rows(begin, end, values, shift), z.shape[0], z.numel())


def _drop_backward(grad: Tensor, out: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """The gradient before ReLU and dropout, from the first columns of ``grad`` and of the result, and its sum over
    rows.
    """
    found = _empty(grad, width)
    _drop_rows_backward(grad.numpy(), out.numpy(), found.numpy().dtype.type(scale), found.numpy())
    return found, _total(found)


def _rectify_backward(grad: Tensor, out: Tensor) -> Tensor:
    """The gradient before ReLU in place of that after it; returns its sum over rows."""
    _rectify_rows_backward(grad.numpy(), out.numpy())
    return _total(grad)


def _tanh(z: Tensor, bias: Tensor, out: Tensor) -> None:
    """tanh(z + c) into the last columns of ``out``; ``z`` may be overwritten."""
    first = out.shape[1] - z.shape[1]
    if z.dtype == torch.float32:
        _tanh_rows(z.numpy(), bias.numpy(), first, out.numpy())
        return
    z += bias
    out[:, first:] = z.tanh_()


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
def _drop_rows_backward(grad: Array, out: Array, scale: float, found: Array) -> None:
    zero = found.dtype.type(0)
    for row in range(len(found)):
        for h in range(found.shape[1]):
            value = grad[row, h] * scale
            found[row, h] = value if out[row, h] > zero else zero


@compiled
def _rectify_rows_backward(grad: Array, out: Array) -> None:
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
def _tanh_rows(values: Array, bias: Array, first: int, out: Array) -> None:
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
def _tanh_rows_backward(grad: Array, out: Array, first: int, found: Array) -> None:
    one = found.dtype.type(1)
    for row in range(len(found)):
        source, result = grad[row, first:], out[row, first:]
        for h in range(found.shape[1]):
            found[row, h] = source[h] * (one - result[h] * result[h])


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
