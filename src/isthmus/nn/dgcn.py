r"""Decoupled GCN: learn first, propagate after -- FedStruct's feature branch (Aliakbari, Östman & Graell i Amat, 2024,
https://arxiv.org/abs/2402.19163), after Dong et al., WWW 2021, https://arxiv.org/abs/2010.12408.

.. math:: H = \hat A^{L}\, \mathrm{MLP}(X), \qquad \hat A = \tilde D^{-1} (A + I), \text{ row = source}

L is ``hops``. The power is never formed: L sparse products on as many columns as there are classes. Only rows that
training nodes reach take part.
Shapes: x (n, F), edges (2, E) -> logits (n, C); MLP weights (in, out), initialised as ``torch.nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.graph.normalise import row_norm
from isthmus.nn.backbone import Backbone, Common
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import Inputs
from isthmus.nn.layers import Layer, LinearLayer, add_bias


class PlainLayer(LinearLayer):
    """`LinearLayer` in a model whose forward is its own: the loop leaves it to autograd."""

    written_out: ClassVar[bool] = False


class Decoupled(Backbone):
    """An MLP on every node, then ``num_steps`` propagations of its output. What comes of them is left to `spread`.

    Level 0 of the inputs are the nodes the MLP runs on, level l those the l-th propagation puts out.
    """

    layer_type: ClassVar[type[Layer]] = PlainLayer
    activate_head: ClassVar[bool] = True

    def __init__(self, *, num_steps: int, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        if num_steps < 0:
            raise ConfigError(f"hops must be at least 0, got {num_steps}")
        self.num_steps = num_steps

    @classmethod
    def make_layer(cls, in_channels: int, out_channels: int, generator: torch.Generator) -> Layer:
        return PlainLayer(in_channels, out_channels, generator)

    @property
    def hops(self) -> int:
        """One level more than propagations: none of them is multiplied into the features."""
        return self.num_steps + 1

    @property
    def later(self) -> tuple[tuple[str, Layer], ...]:
        """With the first layer: the loop must not think that nothing follows it where it is the only one."""
        first: Layer = self.layers[0]  # type: ignore[assignment]
        return (("layers.0.", first), *super().later)

    def spread(self, z: Tensor, inputs: Inputs, dropout: DropoutSource | None) -> Tensor:
        """Logits of the output rows from the MLP's output. (K p_0, C) -> (K p_last, C)"""
        raise NotImplementedError

    def forward(
        self, inputs: Inputs, dropout: DropoutSource | None = None, products: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        products = self.products(inputs) if products is None else products
        h = add_bias(products["layers.0.weight"], self.layers[0].bias)  # type: ignore[arg-type]
        others = [*self.layers[1:], *(() if self.head is None else (self.head,))]
        for layer in others:
            h = layer(self._activate(h, inputs, 0, dropout), inputs, 0)
        return self.spread(h, inputs, dropout)


class DGCN(Decoupled):
    """The decoupled GCN.

    Args:
        hops: L, number of propagations.
    """

    def __init__(self, *, hops: int = 2, **common: Unpack[Common]) -> None:
        super().__init__(num_steps=hops, **common)

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        return row_norm(edge_index, num_nodes)

    def spread(self, z: Tensor, inputs: Inputs, dropout: DropoutSource | None) -> Tensor:
        for matrix in inputs.hidden:
            z = matrix @ z
        return z
