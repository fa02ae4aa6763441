r"""All local epochs of a client in one compiled loop: forward pass, backward pass and optimiser, nothing in Python.

The computation is that of `isthmus.nn.manual_gradients` with the steps of `isthmus.nn.fused_optimizer`, written for one
client at a time: its rows, weights and moments stay in cache over its epochs, and clients need no padding to each
other. `isthmus.nn.client_program` lays out what it reads.

Sparse matrices of all clients lie in one set of CSR arrays; matrix m has its rows at ``start[m]``. With `spmm` of a
matrix and a dense array, ``h W`` and so on as in the module docstring of `isthmus.nn.layers`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from isthmus.nn.kernels import Array, add_weighted_rows, compiled, weighted_rows
from isthmus.nn.loss_kernels import label_loss, soft_loss


class Matrices(NamedTuple):
    """CSR matrices one behind the other.

    Args:
        indptr: Absolute places in ``indices``, one more than rows for each matrix.
        start: Where in ``indptr`` each matrix begins.
        ids: Which matrix a client has in which slot, -1 for none (K, slots): for each first term S, S^T, M, M^T (the
            last two where M stays apart), then for each propagation M, M^T.
    """

    indptr: Array
    indices: Array
    values: Array
    start: Array
    ids: Array


class Layout(NamedTuple):
    """Sizes and places.

    Args:
        terms: Products of the first layer.
        first_width: H of the first layer.
        layers: One row per layer after the first: terms, in, out, activated, level before, level after; then for each
            of two terms whether it is propagated and where its weight begins; where its bias begins.
        rows: Rows of each client at each level (K, levels).
        inner: Rows of S of each client and term (K, terms).
        active: Row of the first weights that each row of S^T belongs to, term after term, client after client.
        active_start: Where those of a client and term begin, and one more (K, terms, 2).
        feature: Feature of each row of the first weights.
        norm: Whether there is an input norm; then gamma begins at ``norm_at`` and beta ``features`` behind it.
        u, v: Of each row of S with input norm.
        uv_start: Where those of a client and term begin (K, terms).
        out_start: Where a client's output rows begin (K + 1,).
        y, weight: Class and loss weight of each output row.
        trained: Places of weights after the first that are trained: (begin, end) each.
    """

    terms: int
    first_width: int
    layers: Array
    rows: Array
    inner: Array
    active: Array
    active_start: Array
    feature: Array
    norm: bool
    norm_at: int
    features: int
    u: Array
    v: Array
    uv_start: Array
    out_start: Array
    y: Array
    weight: Array
    trained: Array


class Dropout(NamedTuple):
    """Random bits of each client, epoch after epoch, layer after layer; a value is kept where they reach the
    threshold.
    """

    bits: Array
    start: Array
    threshold: int
    scale: Any
    used: bool


class Plan(NamedTuple):
    """Steps: constants as in `isthmus.nn.fused_optimizer.StepPlan`, and a proximal term: mu, the anchor of first
    weights by feature and term, and of all others; mu is 0 where there is none.
    """

    table: Array
    common: Array
    pull: Any
    anchor: Array
    flat_pull: Array
    flat_anchor: Array


class Aim(NamedTuple):
    """What is minimised: cross entropy to the labels, with ``double`` of the softmax as logits; where ``total`` is not
    empty, cross entropy to soft labels (`isthmus.nn.loss.SoftLabels`) of all clients' output rows, one behind the
    other.
    """

    double: bool
    targets: Array
    total: Array


@compiled
def _times(matrices: Matrices, matrix: int, rows: int, dense: Array, out: Array, add: bool) -> None:
    """out (+)= M dense"""
    indptr, indices, values, at = matrices.indptr, matrices.indices, matrices.values, matrices.start[matrix]
    width = out.shape[1]
    for row in range(rows):
        total = out[row]
        if not add:
            for h in range(width):
                total[h] = 0
        add_weighted_rows(indptr[at + row], indptr[at + row + 1], width, indices, values, dense, total)


# Arrays are indexed by row and column instead of being cut into rows: the compiler then makes vector instructions of a
# step, several times as fast. Moments are None for SGD, of which the compiler makes a version of its own.


@compiled
def _step(
    grad: Array, weights: Array, firsts: Any, seconds: Any, row: int, size: float, scale: float, common: Array
) -> None:
    """A step on one row of weights."""
    beta1, rest1, beta2, rest2, eps = common[0], common[1], common[2], common[3], common[4]
    decay, keep = common[5], common[6]
    if firsts is None:
        for h in range(weights.shape[1]):
            weights[row, h] = keep * weights[row, h] - size * grad[h]
    else:
        for h in range(weights.shape[1]):
            g = grad[h] + decay * weights[row, h]
            m = beta1 * firsts[row, h] + rest1 * g
            v = beta2 * seconds[row, h] + rest2 * g * g
            firsts[row, h] = m
            seconds[row, h] = v
            weights[row, h] = keep * weights[row, h] - size * m / (math.sqrt(v) * scale + eps)


@compiled
def idle_rows(
    idle: Array,
    origin: Array,
    origin_firsts: Any,
    origin_seconds: Any,
    table: Array,
    common: Array,
    pull: float,
    anchor: Array,
    weights: Array,
    firsts: Any,
    seconds: Any,
    rest: Array,
    total: Array,
    add: bool,
) -> None:
    """All steps of rows whose gradient is zero: decay, momentum and the pull to the anchor move them. In one pass with
    what comes before and after: all rows are taken from ``origin``, unless that is empty, and their moments from
    theirs, unless they are None; total (+)= rest * weights row by row, unless ``rest`` is empty.

    Args:
        idle: Which rows are stepped, as a mask; others add nothing to the total.
        table: Step sizes and scales (steps, 2).
    """
    width = weights.shape[1]
    grad = np.zeros(width, dtype=weights.dtype)
    for row in range(len(idle)):
        if len(origin):
            for h in range(width):
                weights[row, h] = origin[row, h]
        if origin_firsts is not None:
            for h in range(width):
                firsts[row, h] = origin_firsts[row, h]
                seconds[row, h] = origin_seconds[row, h]
        if idle[row]:
            for step in range(len(table)):
                if pull != 0:
                    for h in range(width):
                        grad[h] = pull * (weights[row, h] - anchor[row, h])
                _step(grad, weights, firsts, seconds, row, table[step, 0], table[step, 1], common)
        if not len(rest):
            continue
        if not add:
            for h in range(width):
                total[row, h] = 0
        if idle[row]:
            share = rest[row]
            for h in range(width):
                total[row, h] += share * weights[row, h]


class Origin(NamedTuple):
    """First weights (F, H) of the first and second term; both empty where there are none."""

    first: Array
    second: Array


class Sum(NamedTuple):
    """The weighted sum of the clients' first weights, added up while they are in cache: share of each client (K,), and
    the sum (F, H) of each term; shares are empty where it is not wanted.
    """

    shares: Array
    first: Array
    second: Array


@compiled
def take_rows(rows: Array, origin: Array, source: Array, target: Array) -> None:
    """target[rows] = source[origin], row by row."""
    for i in range(len(rows)):
        row, at = rows[i], origin[i]
        for h in range(target.shape[1]):
            target[row, h] = source[at, h]


@compiled
def add_rows_scaled(rows: Array, origin: Array, scale: Array, source: Array, total: Array) -> None:
    """total[rows] += scale * source[origin], row by row."""
    for i in range(len(rows)):
        row, at, factor = rows[i], origin[i], scale[i]
        for h in range(total.shape[1]):
            total[row, h] += factor * source[at, h]


@compiled
def _activate(h: Array, bits: Array, at: int, threshold: int, scale: float, dropped: bool) -> int:
    """h <- relu(h) times the dropout mask; where the next mask begins."""
    rows, width = h.shape
    stride = 4 * ((width + 3) // 4)
    for row in range(rows):
        z = h[row]
        if dropped:
            drawn = bits[at + row * stride : at + row * stride + width]
            for i in range(width):
                kept = z[i] * scale if z[i] > 0 else h.dtype.type(0)
                z[i] = kept if drawn[i] >= threshold else h.dtype.type(0)
        else:
            for i in range(width):
                z[i] = z[i] if z[i] > 0 else h.dtype.type(0)
    return at + rows * stride if dropped else at


@compiled
def _add_bias(z: Array, bias: Array) -> None:
    for row in range(len(z)):
        for h in range(len(bias)):
            z[row, h] += bias[h]


@compiled
def _sum_rows(grad: Array, out: Array) -> None:
    for h in range(len(out)):
        out[h] = 0
    for row in range(len(grad)):
        for h in range(len(out)):
            out[h] += grad[row, h]


@compiled
def _add(out: Array, other: Array) -> None:
    for row in range(len(other)):
        for h in range(other.shape[1]):
            out[row, h] += other[row, h]


@compiled
def _first_product(
    k: int, t: int, matrices: Matrices, layout: Layout, rows: Array, flat: Array, inner: Array, z: Array, add: bool
) -> None:
    """z (+)= the product of term t."""
    slot, count = 4 * t, layout.inner[k, t]
    after = matrices.ids[k, slot + 2]
    target = inner[:count] if after >= 0 else z[:count]
    accumulate = add and after < 0
    if not layout.norm:
        _times(matrices, matrices.ids[k, slot], count, rows, target, accumulate)
    else:
        _normed_product(k, t, matrices, layout, rows, flat, target, accumulate)
    if after >= 0:
        _times(matrices, after, len(z), inner, z, add)


@compiled
def _normed_product(
    k: int, t: int, matrices: Matrices, layout: Layout, rows: Array, flat: Array, out: Array, add: bool
) -> None:
    """S (gamma * W) - u (gamma^T W) + v (beta^T W)"""
    indptr, indices, values = matrices.indptr, matrices.indices, matrices.values
    at, width, features = matrices.start[matrices.ids[k, 4 * t]], out.shape[1], layout.features
    gamma = flat[layout.norm_at : layout.norm_at + features]
    beta = flat[layout.norm_at + features : layout.norm_at + 2 * features]
    feature = layout.feature
    gain, shift = np.zeros(width, dtype=rows.dtype), np.zeros(width, dtype=rows.dtype)
    begin, end = layout.active_start[k, t]
    for j in range(begin, end):
        row, g, b = layout.active[j], gamma[j - begin], beta[j - begin]
        for h in range(width):
            gain[h] += g * rows[row, h]
            shift[h] += b * rows[row, h]
    place = layout.uv_start[k, t]
    for row in range(len(out)):
        total, u, v = out[row], layout.u[place + row], layout.v[place + row]
        if not add:
            for h in range(width):
                total[h] = 0
        for h in range(width):
            total[h] += v * shift[h] - u * gain[h]
        for j in range(indptr[at + row], indptr[at + row + 1]):
            value, source = values[j] * gamma[feature[indices[j]]], rows[indices[j]]
            for h in range(width):
                total[h] += value * source[h]


@compiled
def _first_step(
    k: int,
    t: int,
    matrices: Matrices,
    layout: Layout,
    grad: Array,
    rows: Array,
    firsts: Any,
    seconds: Any,
    flat: Array,
    flat_grad: Array,
    plan: Plan,
    size: float,
    scale: float,
) -> None:
    """The step on the first weights of term t, given the gradient of its inner product."""
    indptr, indices, entries = matrices.indptr, matrices.indices, matrices.values
    at, width = matrices.start[matrices.ids[k, 4 * t + 1]], grad.shape[1]
    active, feature, anchor = layout.active, layout.feature, plan.anchor
    pull, common, norm = plan.pull, plan.common, layout.norm
    gamma_at, beta_at = layout.norm_at, layout.norm_at + layout.features
    total, u_grad, v_grad = (
        np.zeros(width, dtype=grad.dtype),
        np.zeros(width, dtype=grad.dtype),
        np.zeros(width, dtype=grad.dtype),
    )
    if norm:
        place = layout.uv_start[k, t]
        for row in range(layout.inner[k, t]):
            u, v = layout.u[place + row], layout.v[place + row]
            for h in range(width):
                u_grad[h] += u * grad[row, h]
                v_grad[h] += v * grad[row, h]
    begin, end = layout.active_start[k, t]
    for j in range(begin, end):
        here = at + j - begin
        weighted_rows(indptr[here], indptr[here + 1], width, indices, entries, grad, total)
        row = active[j]
        if norm:
            f = j - begin
            gain, shift = flat[gamma_at + f], flat[beta_at + f]
            gain_grad, shift_grad = _norm_grads(total, u_grad, v_grad, rows, row)
            flat_grad[gamma_at + f] += gain_grad
            flat_grad[beta_at + f] += shift_grad
            for h in range(width):
                total[h] = gain * (total[h] - u_grad[h]) + shift * v_grad[h]
        if pull != 0:
            near = t * layout.features + feature[row]
            for h in range(width):
                total[h] += pull * (rows[row, h] - anchor[near, h])
        _step(total, rows, firsts, seconds, row, size, scale, common)


# Here sums may be reordered: a chain of dependent additions would take as long as the rest of the step.
@partial(compiled, fastmath={"contract", "reassoc"})
def _norm_grads(total: Array, u: Array, v: Array, weights: Array, row: int) -> tuple[Any, Any]:
    gain_grad, shift_grad = total[0] * 0, total[0] * 0
    for h in range(len(total)):
        gain_grad += (total[h] - u[h]) * weights[row, h]
        shift_grad += v[h] * weights[row, h]
    return gain_grad, shift_grad


@compiled
def _forward_layer(
    k: int, layer: Array, matrices: Matrices, hop: int, h: Array, flat: Array, spare: Array, z: Array
) -> None:
    """z = the layer of h"""
    given, out = layer[1], layer[2]
    before, after = len(h), len(z)
    for term in range(layer[0]):
        propagated, place = layer[6 + 2 * term], layer[7 + 2 * term]
        weight = flat[place : place + given * out].reshape((given, out))
        if propagated and out <= given:
            mapped = spare[: before * out].reshape((before, out))
            np.dot(h, weight, mapped)
            _times(matrices, matrices.ids[k, hop], after, mapped, z, term > 0)
            continue
        heard = h[:after]
        if propagated:
            heard = spare[: after * given].reshape((after, given))
            _times(matrices, matrices.ids[k, hop], after, h, heard, False)
        if term == 0:
            np.dot(heard, weight, z)
        else:
            _add(z, np.dot(heard, weight))
    _add_bias(z, flat[layer[10] : layer[10] + out])


@compiled
def _backward_layer(
    k: int,
    layer: Array,
    matrices: Matrices,
    hop: int,
    h: Array,
    flat: Array,
    flat_grad: Array,
    spare: Array,
    grad: Array,
    back: Array,
) -> None:
    """back = gradient of h, given that of the layer's output; gradients of its weights go to ``flat_grad``."""
    given, out = layer[1], layer[2]
    before, after = len(h), len(grad)
    _sum_rows(grad, flat_grad[layer[10] : layer[10] + out])
    for term in range(layer[0]):
        propagated, place = layer[6 + 2 * term], layer[7 + 2 * term]
        weight = flat[place : place + given * out].reshape((given, out))
        weight_grad = flat_grad[place : place + given * out].reshape((given, out))
        if propagated and out <= given:
            inner = spare[: before * out].reshape((before, out))
            _times(matrices, matrices.ids[k, hop + 1], before, grad, inner, False)
            np.dot(h.T, inner, weight_grad)
            if term == 0:
                np.dot(inner, weight.T, back)
            else:
                _add(back, np.dot(inner, weight.T))
        elif propagated:
            inner = spare[: after * given].reshape((after, given))
            _times(matrices, matrices.ids[k, hop], after, h, inner, False)
            np.dot(inner.T, grad, weight_grad)
            np.dot(grad, weight.T, inner)
            _times(matrices, matrices.ids[k, hop + 1], before, inner, back, term > 0)
        else:
            np.dot(h[:after].T, grad, weight_grad)
            if term == 0:
                back[after:] = 0
                np.dot(grad, weight.T, back[:after])
            else:
                _add(back, np.dot(grad, weight.T))


@compiled
def _activate_grad(grad: Array, h: Array, scale: float) -> None:
    """grad <- gradient before relu and dropout: what is zero after them passes nothing."""
    zero = grad.dtype.type(0)
    for row in range(len(h)):
        g, kept = grad[row], h[row]
        for i in range(len(kept)):
            g[i] = g[i] * scale if kept[i] > zero else zero


@compiled
def train_clients(
    clients: Array,
    matrices: Matrices,
    layout: Layout,
    drop: Dropout,
    plan: Plan,
    aim: Aim,
    loss: Array,
    origin: Origin,
    added: Sum,
    weights: Array,
    firsts: Any,
    seconds: Any,
    flats: Array,
    flat_firsts: Any,
    flat_seconds: Any,
) -> None:
    """The epochs of the clients, one after the other; ``loss`` gets what the last epoch began with.

    Args:
        origin: First weights from which all clients start, of each term; empty where each starts from its own.
    """
    layers, flat_places = layout.layers, flats.shape[1]
    kind, first_width = weights.dtype, layout.first_width
    flat_grad = np.zeros(flat_places, dtype=kind)
    widest = first_width
    for l in range(len(layers)):  # noqa: E741
        widest = max(widest, layers[l, 2])
    for k in clients:
        most = 1
        for level in range(layout.rows.shape[1]):
            most = max(most, layout.rows[k, level])
        apart = 1
        for t in range(layout.terms):
            apart = max(apart, layout.inner[k, t])
        size = layout.rows[k, 0] * first_width
        for l in range(len(layers)):  # noqa: E741
            size += layout.rows[k, layers[l, 5]] * layers[l, 2]
        kept = np.empty(size, dtype=kind)
        spare, inner = np.empty(most * widest, dtype=kind), np.empty((apart, first_width), dtype=kind)
        one, two = np.empty(most * widest, dtype=kind), np.empty(most * widest, dtype=kind)
        flat = flats[k]
        bit = drop.start[k]
        if len(origin.first):
            for t in range(layout.terms):
                begin, end = layout.active_start[k, t]
                source = origin.first if t == 0 else origin.second
                for j in range(begin, end):
                    row = layout.active[j]
                    here = layout.feature[row]
                    for i in range(first_width):
                        weights[row, i] = source[here, i]
        for epoch in range(len(plan.table)):
            # Forward.
            place, count, width = 0, layout.rows[k, 0], first_width
            z = kept[: count * width].reshape((count, width))
            for t in range(layout.terms):
                _first_product(k, t, matrices, layout, weights, flat, inner, z, t > 0)
            _add_bias(z, flat[:width])
            hop = 4 * layout.terms
            for l in range(len(layers)):  # noqa: E741
                layer = layers[l]
                if layer[3]:
                    bit = _activate(z, drop.bits, bit, drop.threshold, drop.scale, drop.used)
                place += count * width
                after, width = layout.rows[k, layer[5]], layer[2]
                following = kept[place : place + after * width].reshape((after, width))
                _forward_layer(k, layer, matrices, hop + 2 * (layer[5] - 1), z, flat, spare, following)
                z, count = following, after
            # Loss and backward.
            grad = one[: count * width].reshape((count, width))
            rows = slice(layout.out_start[k], layout.out_start[k + 1])
            if len(aim.total):
                loss[k] = soft_loss(z, aim.targets[rows], aim.total[rows], grad)
            else:
                loss[k] = label_loss(aim.double, z, layout.y[rows], layout.weight[rows], grad)
            use_two = True
            for l in range(len(layers) - 1, -1, -1):  # noqa: E741
                layer = layers[l]
                before, width = layout.rows[k, layer[4]], layer[1]
                place -= before * width
                h = kept[place : place + before * width].reshape((before, width))
                buffer = two if use_two else one
                back = buffer[: before * width].reshape((before, width))
                _backward_layer(k, layer, matrices, hop + 2 * (layer[5] - 1), h, flat, flat_grad, spare, grad, back)
                if layer[3]:
                    _activate_grad(back, h, drop.scale)
                grad, use_two = back, not use_two
            _sum_rows(grad, flat_grad[:first_width])
            # Steps.
            step_size, step_scale = plan.table[epoch, k, 0], plan.table[epoch, k, 1]
            if layout.norm:
                flat_grad[layout.norm_at : layout.norm_at + 2 * layout.features] = 0
            for t in range(layout.terms):
                heard = grad
                if matrices.ids[k, 4 * t + 3] >= 0:
                    heard = inner[: layout.inner[k, t]]
                    _times(matrices, matrices.ids[k, 4 * t + 3], len(heard), grad, heard, False)
                _first_step(
                    k,
                    t,
                    matrices,
                    layout,
                    heard,
                    weights,
                    firsts,
                    seconds,
                    flat,
                    flat_grad,
                    plan,
                    step_size,
                    step_scale,
                )
            if plan.pull != 0:
                for i in range(flat_places):
                    flat_grad[i] += plan.flat_pull[i] * (flat[i] - plan.flat_anchor[i])
            for part in range(len(layout.trained)):
                a, b = layout.trained[part]
                _step(
                    flat_grad[a:b],
                    flats[:, a:b],
                    _columns(flat_firsts, a, b),
                    _columns(flat_seconds, a, b),
                    k,
                    step_size,
                    step_scale,
                    plan.common,
                )
        if len(added.shares):
            share = added.shares[k]
            for t in range(layout.terms):
                begin, end = layout.active_start[k, t]
                total = added.first if t == 0 else added.second
                for j in range(begin, end):
                    row = layout.active[j]
                    here = layout.feature[row]
                    for i in range(first_width):
                        total[here, i] += share * weights[row, i]


@compiled
def _columns(array: Any, begin: int, end: int) -> Any:
    """Some columns, None of none."""
    return None if array is None else array[:, begin:end]
