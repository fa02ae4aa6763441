"""Pieces all backbones share: affine maps with or without a client dimension, initialisation, the base of a layer.

Shapes: h (R, in) with R = K p rows of K clients; weight (in, out) and bias (out,), or one of each per client: (K, in,
out) and (K, out).
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.nn.inputs import Inputs
from isthmus.nn.kernels import add_rows, spmm, sum_rows
from isthmus.seeds import Stream
from isthmus.tensors import Weights

_SMALL = 1 << 23
"""Multiplications below which a product is left to numpy, which takes a thread for it. torch wakes all its threads for
a batch of matrices of any size, and where cores are busy waiting for them takes a hundred times as long as the
product."""


def matmul(h: Tensor, weight: Tensor) -> Tensor:
    """``h W``, client by client where the weight has a client dimension. (R, out)"""
    if not (h.requires_grad or weight.requires_grad) and h.numel() * weight.shape[-1] < _SMALL:
        return _numpy_matmul(h.view(*weight.shape[:-2], -1, h.shape[-1]), weight).view(-1, weight.shape[-1])
    if weight.dim() == 2:
        return h @ weight
    return torch.bmm(h.view(weight.shape[0], -1, h.shape[-1]), weight).view(-1, weight.shape[-1])


def add_bias(h: Tensor, bias: Tensor) -> Tensor:
    """``h + b``, client by client where the bias has a client dimension. (R, out) Without autograd in place of
    ``h``.
    """
    if not (h.requires_grad or bias.requires_grad):
        add_rows(h, bias)
        return h
    if bias.dim() == 1:
        return h + bias
    return (h.view(bias.shape[0], -1, h.shape[-1]) + bias.unsqueeze(1)).view(-1, h.shape[-1])


def first_rows(h: Tensor, clients: int, padded: int) -> Tensor:
    """The first ``padded`` rows of every client: the rows of the next level (`Inputs` orders them so)."""
    if h.shape[0] == clients * padded:
        return h
    return h.view(clients, -1, h.shape[-1])[:, :padded].reshape(-1, h.shape[-1])


def matmul_grads(h: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of h (R, in) and of the weight, given that of ``matmul(h, weight)`` (R, out)."""
    rows, values = grad.view(*weight.shape[:-2], -1, grad.shape[-1]), h.view(*weight.shape[:-2], -1, h.shape[-1])
    product = _numpy_matmul if h.numel() * weight.shape[-1] < _SMALL else torch.matmul
    return product(rows, weight.mT).view(-1, h.shape[-1]), product(values.mT, rows)


def _numpy_matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


def bias_grad(grad: Tensor, bias: Tensor) -> Tensor:
    """Gradient of the bias given that of ``add_bias(h, bias)``."""
    return sum_rows(grad, bias.numel() // bias.shape[-1]).view(bias.shape)


def propagate_and_map(h: Tensor, weight: Tensor, inputs: Inputs, level: int) -> Tensor:
    """``M h W`` from ``level - 1`` to ``level``, with the propagation on the narrower side of the map."""
    matrix = inputs.hidden[level - 1]
    if weight.shape[-1] <= weight.shape[-2]:
        return matrix @ matmul(h, weight)
    return matmul(matrix @ h, weight)


def propagate_and_map_grads(
    h: Tensor, weight: Tensor, grad: Tensor, inputs: Inputs, level: int
) -> tuple[Tensor, Tensor]:
    """Gradients of h and of the weight, given that of `propagate_and_map`."""
    matrix = inputs.hidden[level - 1]
    if weight.shape[-1] <= weight.shape[-2]:
        return matmul_grads(h, weight, spmm(matrix.transposed, grad))
    inner, weight_grad = matmul_grads(spmm(matrix.csr, h), weight, grad)
    return spmm(matrix.transposed, inner), weight_grad


def glorot_(tensor: Tensor, generator: torch.Generator) -> None:
    """Uniform +-sqrt(6 / (fan_in + fan_out)) (Glorot & Bengio, 2010)."""
    bound = math.sqrt(6.0 / (tensor.shape[0] + tensor.shape[1]))
    tensor.uniform_(-bound, bound, generator=generator)


def fan_in_(tensor: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Uniform +-1 / sqrt(fan_in), as torch's and PyG's Linear start."""
    bound = 1.0 / math.sqrt(fan_in)
    tensor.uniform_(-bound, bound, generator=generator)


def uniform01_(model: nn.Module, stream: Stream) -> None:
    """Every parameter from U(0, 1): all positive, which trains slowly but is what FedSpray's reference code starts
    from.
    """
    generator = stream.torch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.0, 1.0, generator=generator)


class Layer(nn.Module):
    """A layer of a backbone.

    As first layer it receives the products of its ``terms`` with the constant features; the base class adds them up and
    adds the bias. As a later layer ``run`` runs. A layer that also has ``run_grads``, and says so by ``written_out``,
    trains without autograd, whose bookkeeping would take longer than the arithmetic of a small client.
    """

    written_out: ClassVar[bool] = False

    terms: ClassVar[dict[str, bool]]
    """Attribute name of each weight matrix -> whether what it multiplies is propagated."""
    bias: nn.Parameter

    @staticmethod
    def run(own: Weights, h: Tensor, inputs: Inputs, level: int) -> Tensor:
        """The layer on hidden values ``h`` of the level before ``level``.

        Args:
            own: The layer's weights by attribute name.
        """
        raise NotImplementedError

    @staticmethod
    def run_grads(
        own: Weights, h: Tensor, grad: Tensor, inputs: Inputs, level: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients of ``h`` and of ``own``, given that of the output of `run`."""
        raise NotImplementedError

    def forward(self, h: Tensor, inputs: Inputs, level: int) -> Tensor:
        """`run` with the module's own parameters."""
        return self.run(dict(self.named_parameters(recurse=False)), h, inputs, level)


class LinearLayer(Layer):
    r"""Affine map :math:`h W + b`, initialised as ``torch.nn.Linear``.

    Shapes: h (R, in) -> (R, out).
    """

    terms: ClassVar[dict[str, bool]] = {"weight": False}
    written_out: ClassVar[bool] = True

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        with torch.no_grad():
            fan_in_(self.weight, in_channels, generator)
            fan_in_(self.bias, in_channels, generator)

    @staticmethod
    def run(own: Weights, h: Tensor, inputs: Inputs, level: int) -> Tensor:
        return add_bias(matmul(h, own["weight"]), own["bias"])

    @staticmethod
    def run_grads(
        own: Weights, h: Tensor, grad: Tensor, inputs: Inputs, level: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        h_grad, weight_grad = matmul_grads(h, own["weight"], grad)
        return h_grad, {"weight": weight_grad, "bias": bias_grad(grad, own["bias"])}


class InputNorm(nn.Module):
    """Gain and shift of the layer norm on input features; `isthmus.nn.first_layer_input` applies them without making
    the features dense.

    Shapes: gamma, beta (F,) or (K, F).
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_features))
        self.beta = nn.Parameter(torch.zeros(num_features))
