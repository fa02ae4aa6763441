"""What passes between the parties of HiFGL. The comment at a message says who sends it to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from isthmus.federation.messages import Ciphertext, Count, Embedding, Gradient, Identifier, Message, Model, Share
from isthmus.privacy.secmp import Exchange
from isthmus.tensors import Weights


@dataclass(frozen=True)
class Pass(Message):
    """server -> devices, silos: which exchange is due, and how wide it is."""

    round: Count[int]
    layer: Count[int]
    backward: Identifier[bool]
    evaluation: Identifier[bool]
    part: Count[int]
    width: Count[int]

    @property
    def exchange(self) -> Exchange:
        return Exchange(self.round, self.layer, self.backward, self.evaluation, self.part)


# -- model and gradients ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Common(Message):
    """server -> silo: theta, and what steps are weighted by: all labelled devices, silos that have some, all silos; the
    rate.
    """

    weights: Model[Weights]
    labelled: Count[float]
    silos: Count[float]
    members: Count[int]
    lr: Count[float]


@dataclass(frozen=True)
class Down(Message):
    """silo -> own devices: the model, and the weight of a labelled device's loss."""

    weights: Model[Weights]
    weight: Count[float]
    training: Identifier[bool]


@dataclass(frozen=True)
class DeviceGradients(Message):
    """devices -> own silo: the sum over all of them; behind masks where devices are separate (spec 11.5)."""

    gradients: Gradient[Weights]
    loss: Count[float]
    clipped: Count[int]


@dataclass(frozen=True)
class Labelled(Message):
    """devices -> own silo: how many have a training label (a sum over devices)."""

    devices: Count[int]


@dataclass(frozen=True)
class Sizes(Message):
    """silo -> server, summed: labelled devices, whether there are any."""

    labelled: Count[float]
    silos: Count[float]


@dataclass(frozen=True)
class Update(Message):
    """silo -> server, summed: the silo's share of the new weights, or its part of the gradient; loss and clipped
    numbers of its devices.
    """

    weights: Model[Weights]
    loss: Count[float]
    clipped: Count[float]


# -- hardened --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HolderKey(Message):
    """silo -> server: its public key for sealed boxes of this setup."""

    key: Identifier[bytes]


@dataclass(frozen=True)
class HolderKeys(Message):
    """server -> devices: public keys of all who hold shares."""

    keys: Identifier[Mapping[str, bytes]]


@dataclass(frozen=True)
class EdgeKeys(Message):
    """devices -> devices, once: for each pair of neighbours one sealed key per holder, (E, T, 80) bytes the receiver
    cannot open.

    The two ends of an edge know each other; the ids make sure that they agree which edges there are.
    """

    source: Identifier[Tensor]
    target: Identifier[Tensor]
    boxes: Ciphertext[Tensor]


@dataclass(frozen=True)
class SlotBoxes(Message):
    """devices -> holders, once: sealed keys under made-up handles, shuffled and filled up to powers of two
    (``sizes``).
    """

    sizes: Count[Tensor]
    boxes: Ciphertext[Tensor]


@dataclass(frozen=True)
class ShareRows(Message):
    """devices -> devices: share 1 of each message, (E, d)."""

    rows: Share[Tensor]


@dataclass(frozen=True)
class HeldSums(Message):
    """holder -> devices: its summed shares by handle, (H, d)."""

    rows: Share[Tensor]


# -- published -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskRequest(Message):
    """devices -> silo of a neighbour: who asks for mu. That alone tells the silo of edges (spec 11.2 f)."""

    devices: Identifier[Tensor]


@dataclass(frozen=True)
class Masks(Message):
    """silo -> devices that asked: the masks of mu, (T, D)."""

    masks: Share[Tensor]


@dataclass(frozen=True)
class CodedRows(Message):
    """devices -> devices: all T + 1 shares of each message, (T + 1, E, d)."""

    rows: Share[Tensor]


@dataclass(frozen=True)
class CodedSums(Message):
    """devices -> own silo: sums by device and share, (T + 1, n, d)."""

    rows: Share[Tensor]


@dataclass(frozen=True)
class Decoded(Message):
    """silo -> own devices: the sums in the clear, which the silo has now seen (spec 11.2 e)."""

    rows: Embedding[Tensor]


# -- plain -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainRows(Message):
    """devices -> devices: values in the clear, (E, d)."""

    rows: Embedding[Tensor]
