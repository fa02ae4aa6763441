"""The common frame of node backbones: [input norm], layers with ReLU and dropout between them, [linear head].

Without head the last layer puts out the classes. With head a linear classifier comes on top of the last layer
(FedStruct's GNN): ReLU and dropout stand between the layers, nothing after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, TypedDict

import scipy.sparse as sp
import torch
from torch import Tensor, nn

from isthmus.errors import ConfigError
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.first_layer_input import Norm
from isthmus.nn.inputs import Inputs
from isthmus.nn.layers import InputNorm, Layer, LinearLayer, add_bias
from isthmus.seeds import Stream

NORM = "input_norm"
"""Name of the sub-module with the input norm; its parameters are ``input_norm.gamma`` and ``input_norm.beta``."""


class Common(TypedDict):
    """What every backbone is built from; a backbone with options of its own passes these on."""

    num_features: int
    num_classes: int
    hidden: Sequence[int]
    dropout: float
    input_norm: bool
    head: bool
    stream: Stream


class Backbone(nn.Module):
    """A node classifier over constant `Inputs`.

    The weights may have a leading client dimension (K, ...), given by ``torch.func.functional_call``; then every client
    of the inputs uses its own.

    Args:
        num_features: F.
        num_classes: C.
        hidden: Widths of the hidden layers.
        dropout: Share of hidden values dropped in training, in [0, 1).
        input_norm: Learnable layer norm on the input features.
        head: Linear classifier on top of the last hidden layer.
        stream: Where all first weights come from: same stream, same weights.
    """

    layer_type: ClassVar[type[Layer]]
    activate_head: ClassVar[bool] = False
    """Whether ReLU and dropout stand before the linear head too. Not on top of convolutions (FedStruct
    spec, section 12.7: nothing after the last one); on top of linear layers, where a linear head would add nothing
    without.
    """

    def __init__(
        self,
        *,
        num_features: int,
        num_classes: int,
        hidden: Sequence[int],
        dropout: float,
        input_norm: bool,
        head: bool,
        stream: Stream,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout must lie in [0, 1), got {dropout}")
        if min((num_features, num_classes, *hidden)) < 1:
            raise ConfigError(
                f"widths must be at least 1, got features {num_features}, hidden {tuple(hidden)}, classes {num_classes}"
            )
        if head and not hidden:
            raise ConfigError("a linear head needs at least one hidden layer; give hidden widths or set head=false")
        generator = stream.torch()
        self.dropout = dropout
        self.input_norm = InputNorm(num_features) if input_norm else None
        widths = [num_features, *hidden] if head else [num_features, *hidden, num_classes]
        self.layers = nn.ModuleList(self.make_layer(a, b, generator) for a, b in pairwise(widths))
        self.head = LinearLayer(widths[-1], num_classes, generator) if head else None

    @classmethod
    def make_layer(cls, in_channels: int, out_channels: int, generator: torch.Generator) -> Layer:
        """One layer with its first weights drawn."""
        raise NotImplementedError

    def propagation(self, edge_index: Tensor, num_nodes: int) -> sp.csr_matrix:
        """M, so that ``M @ h`` is one propagation of this backbone."""
        raise NotImplementedError

    @property
    def hops(self) -> int:
        """Number of propagations: how far away a node's output can see."""
        return len(self.layers) if any(self.layer_type.terms.values()) else 0

    @property
    def first_terms(self) -> Mapping[str, bool]:
        """Name of each first-layer weight matrix -> whether its features are propagated."""
        return {f"layers.0.{name}": propagated for name, propagated in self.layer_type.terms.items()}

    @property
    def norm_names(self) -> tuple[str, ...]:
        """Names of (gamma, beta), empty without input norm."""
        return () if self.input_norm is None else (f"{NORM}.gamma", f"{NORM}.beta")

    @property
    def shared_groups(self) -> tuple[str, ...]:
        """Prefixes of parameter names, layer by layer from input to output. FedPer's base is all but the last;
        FedStruct's reference code keeps the first one at home where it is ``input_norm.``."""
        norm = () if self.input_norm is None else (f"{NORM}.",)
        head = () if self.head is None else ("head.",)
        return (*norm, *(f"layers.{i}." for i in range(len(self.layers))), *head)

    @property
    def later(self) -> tuple[tuple[str, Layer], ...]:
        """The layers after the first, by prefix, in order."""
        layers: list[tuple[str, Layer]] = [(f"layers.{i}.", layer) for i, layer in enumerate(self.layers)]  # type: ignore[misc]
        return (*layers[1:], *(() if self.head is None else (("head.", self.head),)))

    def norm(self) -> Norm | None:
        """(gamma, beta), or None without input norm."""
        return None if self.input_norm is None else (self.input_norm.gamma, self.input_norm.beta)

    def products(self, inputs: Inputs) -> dict[str, Tensor]:
        """The first layer's products with the constant features, by name of the weight."""
        first = self.layers[0]
        norm = self.norm()
        return {
            name: inputs.first[name].product(getattr(first, term), norm)
            for name, term in zip(self.first_terms, self.layer_type.terms, strict=True)
        }

    def forward(
        self, inputs: Inputs, dropout: DropoutSource | None = None, products: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Logits of the output rows, padding included. (K p_last, C)

        Args:
            inputs: What `isthmus.nn.inputs.build_inputs` made for this backbone.
            dropout: The clients' generators in training; None in evaluation.
            products: `products` where the caller has them already; their memory may be used.
        """
        products = self.products(inputs) if products is None else products
        h = add_bias(add_up([products[name] for name in self.first_terms]), self.layers[0].bias)  # type: ignore[arg-type]
        for i in range(1, len(self.layers)):
            h = self._activate(h, inputs, inputs.level(i - 1), dropout)
            h = self.layers[i](h, inputs, inputs.level(i))
        if self.head is not None:
            h = self.head(self.before_head(h, inputs, inputs.level(len(self.layers) - 1), dropout), inputs, -1)
        return h

    def before_head(self, h: Tensor, inputs: Inputs, level: int, dropout: DropoutSource | None) -> Tensor:
        """What the head reads: the last layer as it is, or activated where the layers are linear themselves."""
        return self._activate(h, inputs, level, dropout) if self.activate_head else h

    def _activate(self, h: Tensor, inputs: Inputs, level: int, dropout: DropoutSource | None) -> Tensor:
        h = torch.relu(h)
        if dropout is None or self.dropout == 0.0:
            return h
        return h * dropout.mask(inputs.rows[level], inputs.padded[level], h.shape[-1], self.dropout, h.dtype)


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum; of one tensor, itself."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
