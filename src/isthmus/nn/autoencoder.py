r"""An auto-encoder of node features: what FedGGR's clients compress their nodes with before the federation begins.

.. math::
    E = \hat A\,\mathrm{relu}(\hat A X W_1 + b_1) W_2 + b_2, \qquad
    X' = \hat A\,\mathrm{relu}(\hat A E W_3 + b_3) W_4 + b_4, \qquad \mathcal L = \tfrac1n \lVert X - X' \rVert_F^2

Encoder and decoder are two-layer GCNs; with ``hops = 0`` they see no neighbours (:math:`\hat A = I`). Despite its usual
name (GAE) it reconstructs features, not edges. The loss is the mean squared error times the number of features: Adam
does not care, but its epsilon does where features are sparse and the error per number is tiny.

X' is as large as the features made dense. It is never formed: with :math:`G = \hat A\,\mathrm{relu}(\cdot)` (n, d),

.. math:: \lVert G W + 1 b^\top - X \rVert^2 = \lVert X \rVert^2 - 2 \langle G, X W^\top \rangle + \langle G^\top G\, W,
W \rangle + \dots

so loss and gradients need products of the sparse X with d columns and of d x d matrices with W: for CiteSeer 30 times
less work, exactly.
Shapes: x (n, F); W_1 (F, hidden), W_2 (hidden, p), W_3 (p, hidden), W_4 (hidden, F).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.graph.normalise import gcn_norm
from isthmus.nn.first_layer_input import Operand, build_operand
from isthmus.nn.inputs import Nodes
from isthmus.nn.kernels import spmm
from isthmus.nn.layers import glorot_
from isthmus.nn.optim import OptimizerState, Stepper
from isthmus.nn.sparse import Sparse, as_csr, canonical, stored
from isthmus.nn.train import local_epochs
from isthmus.seeds import Stream
from isthmus.tensors import Weights


def first_autoencoder(
    num_features: int, hidden: int, width: int, stream: Stream, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """First weights, Glorot and zero."""
    if min(num_features, hidden, width) < 1:
        raise ConfigError(
            f"widths of the auto-encoder must be at least 1, got features {num_features}, hidden {hidden}, embedding "
            f"{width}"
        )
    generator = stream.torch()
    weights: dict[str, Tensor] = {}
    widths = num_features, hidden, width, hidden, num_features
    for name, shape in zip(("encoder.0", "encoder.1", "decoder.0", "decoder.1"), pairwise(widths), strict=True):
        weights[f"{name}.weight"] = torch.empty(shape)
        glorot_(weights[f"{name}.weight"], generator)
        weights[f"{name}.bias"] = torch.zeros(shape[1])
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


@dataclass(frozen=True, eq=False)
class FeatureTask:
    """What is constant while one client's auto-encoder is trained.

    Args:
        first: :math:`\\hat A X` as operand.
        steps: :math:`\\hat A`, or None without neighbours.
        target: X (n, F).
        square: :math:`\\lVert X \\rVert^2`.
        total: Sum of X over nodes (F,).
    """

    first: Operand
    steps: Sparse | None
    target: Sparse | Tensor
    square: float
    total: Tensor

    @classmethod
    def of(cls, data: Nodes, *, hops: bool = True, dtype: torch.dtype = torch.float32) -> FeatureTask:
        x = as_csr(data.x)
        count = data.num_nodes
        propagation = gcn_norm(data.edge_index, count) if hops else None
        first = build_operand(x, propagation, np.arange(count), max(1, count), input_norm=False, dtype=dtype)
        target = stored(x, dtype)
        return cls(
            first=first,
            steps=None if propagation is None else Sparse(canonical(propagation, dtype)),
            target=target if isinstance(target, Tensor) else Sparse(target),
            square=float(x.astype(np.float64).multiply(x).sum()),
            total=torch.from_numpy(np.asarray(x.astype(np.float64).sum(axis=0)).ravel()).to(dtype),
        )

    @property
    def num_nodes(self) -> int:
        return int(self.target.shape[0] if isinstance(self.target, Tensor) else self.target.csr.shape[0])

    def propagate(self, h: Tensor) -> Tensor:
        return h if self.steps is None else self.steps @ h


def encode(weights: Weights, task: FeatureTask) -> Tensor:
    """E (n, p)."""
    hidden = torch.relu(task.first.product(weights["encoder.0.weight"]) + weights["encoder.0.bias"])
    return task.propagate(hidden @ weights["encoder.1.weight"]) + weights["encoder.1.bias"]


def reconstruction_loss(weights: Weights, task: FeatureTask) -> Tensor:
    """Squared error per node, differentiable."""
    hidden = torch.relu(task.propagate(encode(weights, task) @ weights["decoder.0.weight"]) + weights["decoder.0.bias"])
    loss: Tensor = _SquaredError.apply(  # type: ignore[no-untyped-call]
        task.propagate(hidden), weights["decoder.1.weight"], weights["decoder.1.bias"], task
    )
    return loss / task.num_nodes


def train_autoencoder(
    weights: Weights, state: OptimizerState, task: FeatureTask, *, epochs: int, lr: float
) -> tuple[dict[str, Tensor], OptimizerState, float]:
    """``epochs`` full-batch steps of Adam; also the loss before the last one."""
    current = {name: tensor.detach().clone() for name, tensor in weights.items()}
    stepper = Stepper("adam", current, state.copy(), steps=epochs, lr=lr)

    def gradients(_: None) -> tuple[dict[str, Tensor], Tensor]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in current.items()}
        loss = reconstruction_loss(leaves, task)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)), loss.detach()

    loss = local_epochs(gradients, stepper, epochs)
    return current, stepper.state, float(loss)


def project(task: FeatureTask, width: int, common: Stream, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""A public random projection in place of an encoder: rows of :math:`\hat A^2 X R`, each of length sqrt(p). (n, p)

    R is Gaussian and the same for everybody, so all clients' rows lie in one space, and cosines are kept up to 1 /
    sqrt(p) (Johnson and Lindenstrauss, 1984). Nothing is trained. Whoever knows R can decode, as with an auto-encoder.
    """
    features = int(task.total.shape[0])
    matrix = torch.randn(features, width, generator=common.child("projection").torch()).to(dtype)
    rows = task.propagate(task.first.forward(matrix))
    return torch.nn.functional.normalize(rows, dim=1) * math.sqrt(width)


def decode(weights: Weights, embeddings: Tensor, steps: Sparse | None = None) -> Tensor:
    """X' (n, F) from embeddings; whoever does not know the edges can try without."""

    def spread(h: Tensor) -> Tensor:
        return h if steps is None else steps @ h

    hidden = torch.relu(spread(embeddings @ weights["decoder.0.weight"]) + weights["decoder.0.bias"])
    return spread(hidden @ weights["decoder.1.weight"]) + weights["decoder.1.bias"]


class _SquaredError(torch.autograd.Function):
    r""":math:`\lVert G W + 1 b^\top - X \rVert^2` of the module docstring, and its gradients."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, g: Tensor, weight: Tensor, bias: Tensor, task: FeatureTask
    ) -> Tensor:
        x = task.target
        if isinstance(x, Tensor):
            x_weight, x_g = x @ weight.mT, (x.mT @ g).mT
        else:
            x_weight = spmm(x.csr, weight.detach().mT.contiguous())  # X W^T (n, d)
            x_g = spmm(x.transposed, g).mT  # (X^T G)^T (d, F)
        gram, sums = g.mT @ g, g.sum(0)
        gram_weight = gram @ weight
        weight_sums = weight.mT @ sums
        count = g.shape[0]
        parts = (
            -2 * (g * x_weight).sum(),
            -2 * (bias * task.total).sum(),
            (gram_weight * weight).sum(),
            2 * (bias * weight_sums).sum(),
        )
        loss = sum((part.double() for part in parts), start=count * bias.double().square().sum()) + task.square
        ctx.save_for_backward(
            2 * (g @ (weight @ weight.mT) + weight @ bias - x_weight),
            2 * (gram_weight + torch.outer(sums, bias) - x_g),
            2 * (weight_sums + count * bias - task.total),
        )
        return loss.to(g.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        g, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0] * g, grads[0] * weight, grads[0] * bias, None
