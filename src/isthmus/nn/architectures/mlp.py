r"""Multi-layer perceptron: the graph-free control.

.. math:: h^{(l+1)} = \mathrm{ReLU}(h^{(l)}) W^{(l)} + b^{(l)}

Shapes: x (n, F) -> logits (n, C). Initialised as ``torch.nn.Linear``: uniform +-1/sqrt(fan_in).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isthmus.nn.architecture import Architecture
from isthmus.nn.layers import Conv, LinearLayer


@dataclass(frozen=True)
class MLP(Architecture):
    """Linear layers; blind to edges."""

    conv_type: ClassVar[type[Conv]] = LinearLayer
