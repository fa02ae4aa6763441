"""The node model of every architecture: [input norm], layers with ReLU and dropout between, [linear head].

Without head the last layer puts out the classes. With head a linear classifier comes on top of the last layer
(FedStruct's GNN): ReLU and dropout stand between the layers, nothing after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from isthmus.errors import ConfigError
from isthmus.nn.architecture import Architecture
from isthmus.nn.dense import activate
from isthmus.nn.dropout import DropoutSource, dropout_mask
from isthmus.nn.first_layer_input import Norm
from isthmus.nn.inputs import Inputs
from isthmus.nn.layers import HERE, Conv, InputNorm, LinearLayer, Propagation, convs_of
from isthmus.seeds import Stream

NORM = "input_norm"
"""Name of the sub-module with the input norm; its parameters are ``input_norm.gamma`` and ``input_norm.beta``."""


class PlacedLayer(NamedTuple):
    """A layer and where it stands: prefix of its parameters, levels (see `Inputs`) of the rows it reads and puts out,
    and whether ReLU and dropout come before it.
    """

    prefix: str
    conv: Conv
    before: int
    level: int
    activated: bool


class Backbone(nn.Module):
    """A node classifier over constant `Inputs`.

    The weights may have a leading client dimension (K, ...), given by ``torch.func.functional_call``; then every client
    of the inputs uses its own.

    Args:
        architecture: What it is made of.
        num_features: F.
        num_classes: C.
        hidden: Widths of the hidden layers.
        dropout: Share of hidden values dropped in training, in [0, 1).
        input_norm: Learnable layer norm on the input features.
        head: Linear classifier on top of the last hidden layer.
        stream: Where all first weights come from: same stream, same weights.
    """

    def __init__(
        self,
        architecture: Architecture,
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
        if head and (architecture.linear or not hidden):
            raise ConfigError(
                "a linear head needs a hidden layer below it; "
                + ("this backbone has none: " if architecture.linear else "give hidden widths or ")
                + "set head=false"
            )
        generator = architecture.layer_stream(stream).torch()
        self.architecture, self.dropout = architecture, dropout
        self.input_norm = InputNorm(num_features) if input_norm else None
        widths = [num_features, *hidden] if head else [num_features, *hidden, num_classes]
        shapes = list(pairwise([widths[0], widths[-1]] if architecture.linear else widths))
        self.layers = nn.ModuleList(
            architecture.conv(a, b, generator, classes=not head and i == len(shapes))
            for i, (a, b) in enumerate(shapes, 1)
        )
        self.head = LinearLayer(widths[-1], num_classes, generator) if head else None
        for name, tensor in architecture.first_weights().items():
            self.register_parameter(name, nn.Parameter(tensor))
        kinds = {self.convs[0].propagation, architecture.propagation_after} - {None}
        if len(kinds) > 1:
            raise ConfigError("a node model has one propagation matrix: its layers and what follows them must share it")
        self.propagation: Propagation | None = kinds.pop() if kinds else None

    @cached_property
    def convs(self) -> tuple[Conv, ...]:
        return convs_of(self.layers)

    @cached_property
    def first_level(self) -> int:
        """The level the first layer puts out: the first propagation is multiplied into the features, unless it comes
        after the layer's products."""
        return 1 if self.convs[0].attends else 0

    @cached_property
    def layers_after_input(self) -> tuple[PlacedLayer, ...]:
        """The layers after the first, in order, head included."""
        placed, level = [], self.first_level
        for i, conv in enumerate(self.convs[1:], start=1):
            placed.append(PlacedLayer(f"layers.{i}.", conv, level, level + conv.propagates, True))
            level = placed[-1].level
        if self.head is not None:
            # FedStruct (12.7) has nothing after its last convolution; after linear layers, a linear head adds nothing
            # without an activation before it.
            placed.append(PlacedLayer("head.", self.head, level, level, not self.convs[-1].propagates))
        return tuple(placed)

    @cached_property
    def last_level(self) -> int:
        """The level the last layer puts out."""
        return self.first_level + sum(conv.propagates for conv in self.convs[1:])

    @property
    def hops(self) -> int:
        """Number of levels of the inputs, 0 for a model that is blind to edges: a level per propagation, and one more
        where none of them is multiplied into the features.
        """
        return 0 if self.propagation is None else self.last_level + self.architecture.hops_after + 1

    @cached_property
    def first_terms(self) -> Mapping[str, bool]:
        """Name of each first-layer weight matrix -> whether its features are propagated."""
        return {f"layers.0.{name}": propagated for name, propagated in self.convs[0].weight_terms.items()}

    @cached_property
    def norm_names(self) -> tuple[str, ...]:
        """Names of (gamma, beta), empty without input norm."""
        return () if self.input_norm is None else (f"{NORM}.gamma", f"{NORM}.beta")

    @property
    def shared_groups(self) -> tuple[str, ...]:
        """Prefixes of parameter names, layer by layer from input to output. FedPer's base is all but the last;
        FedStruct's reference code keeps the first one at home where it is ``input_norm.``."""
        norm = () if self.input_norm is None else (f"{NORM}.",)
        head = () if self.head is None else ("head.",)
        layers = (f"layers.{i}." for i in range(len(self.layers)))
        return (*norm, *layers, *head, *self.architecture.first_weights())

    def norm(self) -> Norm | None:
        """(gamma, beta), or None without input norm."""
        return None if self.input_norm is None else (self.input_norm.gamma, self.input_norm.beta)

    def products(self, inputs: Inputs) -> dict[str, Tensor]:
        """The first layer's products with the constant features, by name of the weight."""
        weights, norm = dict(self.layers.named_parameters("layers")), self.norm()
        return {name: inputs.first[name].product(weights[name], norm) for name in self.first_terms}

    def forward(
        self, inputs: Inputs, dropout: DropoutSource | None = None, products: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Logits of the output rows, padding included. (K p_last, C)

        Args:
            inputs: What `isthmus.nn.inputs.build_inputs` made for this backbone.
            dropout: The clients' generators in training; None in evaluation.
            products: `products` where the caller has them already; their memory may be used.
        """
        return self.with_embedding(inputs, dropout, products)[0]

    def with_embedding(
        self, inputs: Inputs, dropout: DropoutSource | None = None, products: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits as in `forward`, and the embedding the last layer is given: the activations of the layer before it,
        or what the only layer puts out. Its rows are those of an earlier level, the output rows first. (K p, d)
        """
        products = self.products(inputs) if products is None else products
        first = self.convs[0]
        h = first.finish(
            dict(first.named_parameters()),
            {name.removeprefix("layers.0."): product for name, product in products.items()},
            inputs.hop(self.first_level) if first.attends else HERE,
            dropout,
        )
        embedding = h
        for _, conv, before, level, activated in self.layers_after_input:
            if activated:
                h = activate(h, dropout_mask(dropout, inputs.rows[before], inputs.padded[before], h, self.dropout))
            embedding = h
            h = conv(h, inputs.hop(level) if conv.propagates else HERE, dropout)
        return self._after_layers(h, inputs, dropout), embedding

    def _after_layers(self, h: Tensor, inputs: Inputs, dropout: DropoutSource | None) -> Tensor:
        level = self.last_level

        def drop(z: Tensor, rate: float) -> Tensor:
            mask = dropout_mask(dropout, inputs.rows[level], inputs.padded[level], z, rate)
            return z if mask is None else z * mask

        weights = {name: getattr(self, name) for name in self.architecture.first_weights()}
        hops = [inputs.hop(level + hop) for hop in range(1, self.architecture.hops_after + 1)]
        return self.architecture.after_layers(weights, h, hops, drop)
