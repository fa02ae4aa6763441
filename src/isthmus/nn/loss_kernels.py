"""Compiled losses of one client's rows, with their gradients: what `isthmus.nn.loss` describes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from isthmus.nn.kernels import Array, compiled


@compiled
def softmax(values: Array, y: int, out: Array) -> Any:
    """Writes the softmax and returns its logarithm at ``y``."""
    top = values[0]
    for c in range(1, len(values)):
        top = max(top, values[c])
    total = values[0] * 0
    for c in range(len(values)):
        out[c] = math.exp(values[c] - top)
        total += out[c]
    for c in range(len(values)):
        out[c] /= total
    return values[y] - top - math.log(total)


@compiled
def label_loss(double: bool, logits: Array, y: Array, weight: Array, grad: Array) -> Any:
    """The weighted cross entropy, with ``double`` of the softmax as logits. Its gradient is (softmax - onehot) times
    the weight of the row, pulled back through the inner softmax.
    """
    rows, classes = logits.shape
    loss = logits.dtype.type(0)
    p, q = np.zeros(classes, dtype=logits.dtype), np.zeros(classes, dtype=logits.dtype)
    for row in range(rows):
        g = grad[row]
        if weight[row] == 0:  # padding, or not a training row
            for c in range(classes):
                g[c] = 0
            continue
        log_p = softmax(logits[row], y[row], p)
        if not double:
            loss -= weight[row] * log_p
            for c in range(classes):
                g[c] = weight[row] * p[c]
            g[y[row]] -= weight[row]
            continue
        loss -= weight[row] * softmax(p, y[row], q)
        q[y[row]] -= 1
        mean = q[0] * p[0]
        for c in range(1, classes):
            mean += q[c] * p[c]
        for c in range(classes):
            g[c] = weight[row] * p[c] * (q[c] - mean)
    return loss


@compiled
def soft_loss(logits: Array, targets: Array, total: Array, grad: Array) -> Any:
    """The cross entropy to rows of targets whose sums are ``total``; rows with 0 are left out."""
    rows, classes = logits.shape
    loss = logits.dtype.type(0)
    p = np.zeros(classes, dtype=logits.dtype)
    for row in range(rows):
        g, t = grad[row], targets[row]
        if total[row] == 0:
            for c in range(classes):
                g[c] = 0
            continue
        at_first = softmax(logits[row], 0, p)
        for c in range(classes):
            loss -= t[c] * (at_first + logits[row, c] - logits[row, 0])
            g[c] = total[row] * p[c] - t[c]
    return loss
