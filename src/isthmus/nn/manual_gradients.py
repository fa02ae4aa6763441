"""Gradients of node models by hand: the same numbers as autograd on `Backbone.forward`, without its bookkeeping,
which takes longer than the arithmetic of a small client.

For layers that are their products and a bias, as `Conv.finish` has it (gcn, sage, sgc, mlp).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from isthmus.nn.architecture import Architecture
from isthmus.nn.backbone import Backbone, PlacedLayer
from isthmus.nn.dense import add_bias, add_up, bias_grad, matmul_grads
from isthmus.nn.dropout import DropoutSource, dropout_mask
from isthmus.nn.inputs import Inputs
from isthmus.nn.kernels import activate, activate_grad, spmm
from isthmus.nn.layers import HERE, Conv, Hop
from isthmus.nn.loss import Loss
from isthmus.nn.sparse import Sparse
from isthmus.tensors import Weights

Gradients = tuple[dict[str, Tensor], dict[str, Tensor], Tensor]
"""Gradients of the weights after the first products, gradients of those products, loss of each client (K,)."""


def has_manual_gradient(model: Backbone) -> bool:
    """Whether `manual_gradients` supports this model."""
    return type(model.architecture).after_layers is Architecture.after_layers and all(
        (type(conv).run, type(conv).finish) == (Conv.run, Conv.finish) and not conv.attends for conv in model.convs
    )


def manual_gradients(
    model: Backbone,
    weights: Weights,
    products: Mapping[str, Tensor],
    inputs: Inputs,
    loss: Loss,
    dropout: DropoutSource | None,
) -> Gradients:
    """The chain rule over `Backbone.forward`, from the first layer's products on; their memory is used."""
    z, passed = forward(model, weights, products, inputs, dropout)
    client_loss, grad = loss.value_and_grad(z, inputs)
    grads: dict[str, Tensor] = {}
    for placed, own, hop, h, mask in reversed(passed):
        grad, found = conv_gradients(placed.conv, own, h, grad, hop)
        grads |= {placed.prefix + name: tensor for name, tensor in found.items()}
        if placed.activated:
            grad = activate_grad(grad, h, mask)
    grads["layers.0.bias"] = bias_grad(grad, weights["layers.0.bias"])
    return grads, dict.fromkeys(products, grad), client_loss


def forward(
    model: Backbone,
    weights: Weights,
    products: Mapping[str, Tensor],
    inputs: Inputs,
    dropout: DropoutSource | None = None,
) -> tuple[Tensor, list[tuple[PlacedLayer, Weights, Hop, Tensor, Tensor | None]]]:
    """`Backbone.forward` on named weights, from the first layer's products on; their memory is used. The logits, and of
    each layer after the first its weights, its hop, what it was given and the dropout mask of that.
    """
    z = add_bias(add_up(products.values()), weights["layers.0.bias"])
    passed: list[tuple[PlacedLayer, Weights, Hop, Tensor, Tensor | None]] = []
    for placed in model.layers_after_input:
        mask = None
        if placed.activated:
            level = placed.before
            mask = dropout_mask(dropout, inputs.rows[level], inputs.padded[level], z, model.dropout)
            activate(z, mask)
        own = {
            name.removeprefix(placed.prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(placed.prefix)
        }
        hop = inputs.hop(placed.level) if placed.conv.propagates else HERE
        passed.append((placed, own, hop, z, mask))
        z = placed.conv.run(own, z, hop)
    return z, passed


def conv_gradients(conv: Conv, weights: Weights, h: Tensor, grad: Tensor, hop: Hop) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of ``h`` and of the weights, given that of ``conv.run(weights, h, hop)``."""
    grads = {"bias": bias_grad(grad, weights["bias"])}
    total: Tensor | None = None
    for name, propagated in conv.weight_terms.items():
        if propagated:
            found, grads[name] = _map_gradients(h, weights[name], grad, hop)
            total = found if total is None else total.add_(found)
            continue
        found, grads[name] = matmul_grads(hop.itself(h), weights[name], grad)
        if found.shape == h.shape and total is None:
            total = found
            continue
        total = h.new_zeros(h.shape) if total is None else total
        rows = total.view(hop.clients, -1, h.shape[-1])[:, : hop.rows]
        rows += found.view(rows.shape)
    assert total is not None
    return total, grads


def _map_gradients(h: Tensor, weight: Tensor, grad: Tensor, hop: Hop) -> tuple[Tensor, Tensor]:
    """Gradients of h and of the weight, given that of ``hop.map(h, weight)``."""
    matrix = hop.matrix
    assert isinstance(matrix, Sparse)
    if weight.shape[-1] <= weight.shape[-2]:
        return matmul_grads(h, weight, spmm(matrix.transposed, grad))
    inner, weight_grad = matmul_grads(spmm(matrix.csr, h), weight, grad)
    return spmm(matrix.transposed, inner), weight_grad
