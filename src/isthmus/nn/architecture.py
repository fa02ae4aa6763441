"""What a backbone is made of: `Architecture`, one per file of `isthmus.nn.architectures`, named as its file.

Both models are assembled from it: `isthmus.nn.backbone.Backbone` for nodes, `isthmus.nn.graph_models.GraphModel` for
graphs. A new file in that folder is a new backbone of both; nothing else needs to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isthmus.nn.layers import Conv, Hop, Propagation
from isthmus.seeds import Stream
from isthmus.tensors import Weights

Drop = Callable[[Tensor, float], Tensor]
"""(values, share) -> values with that share dropped in training; as they are in evaluation."""


@dataclass(frozen=True)
class Architecture:
    """Convolutions with ReLU and dropout between, and perhaps propagation after the last. Its fields are the backbone's
    options; a sub-class checks them in ``__post_init__``.
    """

    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names of the backbone."""
    conv_type: ClassVar[type[Conv]]
    """What every layer is, unless `conv` says otherwise."""
    edge_weights: ClassVar[bool] = False
    """Whether its propagation takes weights of arcs; a run with ``edge_weights=use`` is refused otherwise."""
    linear: ClassVar[bool] = False
    """Whether the model is a single layer, from the first width to the last, with nothing after it."""
    own_dropout: ClassVar[bool] = False
    """Whether something else than hidden values is dropped in training, so also where ``dropout`` is 0."""
    drops_output: ClassVar[bool] = False
    """Whether `after_layers` drops values of the last layer: a model that activates that layer leaves dropout to it."""

    def conv(self, in_channels: int, out_channels: int, generator: torch.Generator, *, classes: bool = False) -> Conv:
        """A layer with its first weights drawn.

        Args:
            classes: Whether it puts out the classes.
        """
        return self.conv_type(in_channels, out_channels, generator)

    def layer_stream(self, stream: Stream) -> Stream:
        """Where a node model draws its layers from."""
        return stream

    @property
    def propagation_after(self) -> Propagation | None:
        """What `after_layers` propagates with."""
        return None

    @property
    def hops_after(self) -> int:
        """Number of propagations after the last layer."""
        return 0

    def first_weights(self) -> dict[str, Tensor]:
        """Weights of `after_layers` at the start."""
        return {}

    def after_layers(self, weights: Weights, z: Tensor, hops: Sequence[Hop], drop: Drop) -> Tensor:
        """What follows the last layer.

        Args:
            weights: Those of `first_weights`, perhaps with a leading client dimension.
            z: The last layer's output.
            hops: The `hops_after` propagations.
            drop: Dropout of ``z``.
        """
        return z
