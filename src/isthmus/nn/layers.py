"""Pieces all backbones share: affine maps with or without a client dimension, initialisation, the base of a layer.

Shapes: h (R, in) with R = K p rows of K clients; weight (in, out) and bias (out,), or one of each per client: (K, in, out) and (K, out).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from isthmus.nn.inputs import Inputs


def matmul(h: Tensor, weight: Tensor) -> Tensor:
    """``h W``, client by client where the weight has a client dimension. (R, out)"""
    if weight.dim() == 2:
        return h @ weight
    return torch.bmm(h.view(weight.shape[0], -1, h.shape[-1]), weight).view(-1, weight.shape[-1])


def add_bias(h: Tensor, bias: Tensor) -> Tensor:
    """``h + b``, client by client where the bias has a client dimension. (R, out)"""
    if bias.dim() == 1:
        return h + bias
    return (h.view(bias.shape[0], -1, h.shape[-1]) + bias.unsqueeze(1)).view(-1, h.shape[-1])


def first_rows(h: Tensor, clients: int, padded: int) -> Tensor:
    """The first ``padded`` rows of every client: the rows of the next level (`Inputs` orders them so)."""
    if h.shape[0] == clients * padded:
        return h
    return h.view(clients, -1, h.shape[-1])[:, :padded].reshape(-1, h.shape[-1])


def propagate_and_map(h: Tensor, weight: Tensor, inputs: Inputs, level: int) -> Tensor:
    """``M h W`` from ``level - 1`` to ``level``, with the propagation on the narrower side of the map."""
    matrix = inputs.hidden[level - 1]
    if weight.shape[-1] <= weight.shape[-2]:
        return matrix @ matmul(h, weight)
    return matmul(matrix @ h, weight)


def glorot_(tensor: Tensor, generator: torch.Generator) -> None:
    """Uniform +-sqrt(6 / (fan_in + fan_out)) (Glorot & Bengio, 2010)."""
    bound = math.sqrt(6.0 / (tensor.shape[0] + tensor.shape[1]))
    tensor.uniform_(-bound, bound, generator=generator)


def fan_in_(tensor: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Uniform +-1 / sqrt(fan_in), as torch's and PyG's Linear start."""
    bound = 1.0 / math.sqrt(fan_in)
    tensor.uniform_(-bound, bound, generator=generator)


class Layer(nn.Module):
    """A layer of a backbone.

    As first layer it receives the products of its ``terms`` with the constant features; the base class adds them up and adds the bias.
    As a later layer its ``forward`` runs.
    """

    terms: ClassVar[dict[str, bool]]
    """Attribute name of each weight matrix -> whether what it multiplies is propagated."""
    bias: nn.Parameter

    def first(self, *products: Tensor) -> Tensor:
        """The layer on constant features, given ``S W`` for each term in order."""
        total = products[0]
        for product in products[1:]:
            total = total + product
        return add_bias(total, self.bias)

    def forward(self, h: Tensor, inputs: Inputs, level: int) -> Tensor:
        """The layer on hidden values of the level before ``level``."""
        raise NotImplementedError


class LinearLayer(Layer):
    r"""Affine map :math:`h W + b`, initialised as ``torch.nn.Linear``.

    Shapes: h (R, in) -> (R, out).
    """

    terms: ClassVar[dict[str, bool]] = {"weight": False}

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        with torch.no_grad():
            fan_in_(self.weight, in_channels, generator)
            fan_in_(self.bias, in_channels, generator)

    def forward(self, h: Tensor, inputs: Inputs, level: int) -> Tensor:
        return add_bias(matmul(h, self.weight), self.bias)


class InputNorm(nn.Module):
    """Gain and shift of the layer norm on input features; `isthmus.nn.operand` applies them without making the features dense.

    Shapes: gamma, beta (F,) or (K, F).
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_features))
        self.beta = nn.Parameter(torch.zeros(num_features))
