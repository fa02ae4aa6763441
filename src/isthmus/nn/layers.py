r"""What a layer is, for node and graph tasks alike: `Conv`, written once per convolution in `isthmus.nn.architectures`.

A convolution multiplies node values with weight matrices, along edges or not, and goes on from there:

.. math:: \mathrm{run}(h) = \mathrm{finish}\big(\{\, M h W \text{ or } h W \,\}_W\big)

M is its propagation matrix. Splitting the two lets a model start from constant features, whose products are made in
other ways (`isthmus.nn.first_layer_input`, `isthmus.nn.graph_batch`), without writing the layer again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from isthmus.nn.dense import add_bias, add_up, first_rows, matmul
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.sparse import Propagator
from isthmus.seeds import Stream
from isthmus.tensors import Weights


class Propagation(Protocol):
    """(edge_index, num_nodes) -> M, so that ``M @ h`` is one propagation. Weights of arcs are given only to a backbone
    that reads them (`isthmus.nn.architecture.Architecture.edge_weights`).
    """

    def __call__(self, edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None = None, /) -> sp.csr_matrix: ...


@dataclass(frozen=True, eq=False)
class Hop:
    """One propagation of K clients' rows.

    Args:
        matrix: M (K p', K p), block diagonal; None where nothing is propagated.
        clients: K.
        rows: p', rows of each client after it, padding included. They are the first of its p rows before.
    """

    matrix: Propagator | None = None
    clients: int = 1
    rows: int | None = None

    @property
    def propagator(self) -> Propagator:
        if self.matrix is None:
            raise ValueError("this layer propagates, but the hop has no matrix; set the layer's propagation")
        return self.matrix

    def itself(self, h: Tensor) -> Tensor:
        """The rows of ``h`` that are left after the hop."""
        return h if self.rows is None else first_rows(h, self.clients, self.rows)

    def map(self, h: Tensor, weight: Tensor) -> Tensor:
        """``M h W``, with the propagation on the narrower side of the map."""
        if weight.shape[-1] <= weight.shape[-2]:
            return self.propagator @ matmul(h, weight)
        return matmul(self.propagator @ h, weight)

    def arc_mask(self, width: int, rate: float, dropout: DropoutSource | None, dtype: torch.dtype) -> Tensor | None:
        """Dropout of arcs: every client draws for its own alone. (E, width), None for none."""
        if dropout is None or not rate or self.rows is None:
            return None
        ends = self.propagator.forward.indptr[np.arange(self.clients + 1) * self.rows]  # first arc of every client
        counts = tuple(int(count) for count in np.diff(ends))
        padded = max(1, *counts)
        mask = dropout.mask(counts, padded, width, rate, dtype)
        return torch.cat([mask[k * padded : k * padded + count] for k, count in enumerate(counts)])


HERE = Hop()
"""No propagation: every row stays where it is."""


class Conv(nn.Module):
    """One layer of a backbone. A sub-class draws its first weights and names:

    weight_terms: Each weight matrix that multiplies node values -> whether the product is propagated.
    propagation: What edges do, None for a layer that is blind to them.
    attends: Whether `finish` reads neighbours itself; the products are then of the rows before the hop.
    """

    weight_terms: ClassVar[Mapping[str, bool]]
    propagation: Propagation | None = None
    attends: ClassVar[bool] = False

    @property
    def propagates(self) -> bool:
        return self.attends or any(self.weight_terms.values())

    def run(self, weights: Weights, h: Tensor, hop: Hop, dropout: DropoutSource | None = None) -> Tensor:
        """The layer without activation. (K p, in) -> (K p', out)

        Args:
            weights: By name, as `named_parameters` has them; with a leading client dimension where K clients differ.
            dropout: The clients' generators in training, for layers that drop something inside.
        """
        products = {}
        for name, propagated in self.weight_terms.items():
            if propagated:
                products[name] = hop.map(h, weights[name])
            else:
                products[name] = matmul(h if self.attends else hop.itself(h), weights[name])
        return self.finish(weights, products, hop, dropout)

    def finish(
        self, weights: Weights, products: Mapping[str, Tensor], hop: Hop, dropout: DropoutSource | None = None
    ) -> Tensor:
        """The layer from its products on; their memory may be used."""
        return add_bias(add_up(products.values()), weights["bias"])

    def forward(self, h: Tensor, hop: Hop = HERE, dropout: DropoutSource | None = None) -> Tensor:
        """`run` with the module's own parameters."""
        return self.run(dict(self.named_parameters()), h, hop, dropout)


def convs_of(modules: nn.ModuleList) -> tuple[Conv, ...]:
    """The modules, which are all layers."""
    return tuple(modules)  # type: ignore[arg-type]


class LinearLayer(Conv):
    r"""Affine map :math:`h W + b`, initialised as ``torch.nn.Linear``."""

    weight_terms: ClassVar[Mapping[str, bool]] = {"weight": False}

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = fan_in((in_channels, out_channels), in_channels, generator)
        self.bias = fan_in((out_channels,), in_channels, generator)

    @property
    def stacked(self) -> Tensor:
        """[W; b] (in + 1, out), for inputs with a column of ones."""
        return torch.cat([self.weight, self.bias.unsqueeze(0)])


class InputNorm(nn.Module):
    """Gain and shift of the layer norm on input features; `isthmus.nn.first_layer_input` applies them without making
    the features dense.

    Shapes: gamma, beta (F,) or (K, F).
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_features))
        self.beta = nn.Parameter(torch.zeros(num_features))


def glorot(shape: tuple[int, int], generator: torch.Generator) -> nn.Parameter:
    """A parameter that starts as `glorot_` draws it."""
    tensor = torch.empty(shape)
    glorot_(tensor, generator)
    return nn.Parameter(tensor)


def fan_in(shape: tuple[int, ...], width: int, generator: torch.Generator) -> nn.Parameter:
    """A parameter that starts as `fan_in_` draws it."""
    tensor = torch.empty(shape)
    fan_in_(tensor, width, generator)
    return nn.Parameter(tensor)


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
