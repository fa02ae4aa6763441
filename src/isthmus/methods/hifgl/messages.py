"""Messages of HiFGL that every protocol sends; a protocol's own are in its file. Each says who sends it to whom."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isthmus.federation.messages import Count, Gradient, Identifier, LabelStatistic, Message, Metric, Model
from isthmus.privacy.secmp import Exchange
from isthmus.tensors import Weights


@dataclass(frozen=True)
class Pass(Message):
    """server -> devices, silos: which exchange is due, and how many numbers a message in it has."""

    round: Count[int]
    layer: Count[int]
    backward: Identifier[bool]
    evaluation: Identifier[bool]
    part: Count[int]
    width: Count[int]

    @property
    def exchange(self) -> Exchange:
        return Exchange(self.round, self.layer, self.backward, self.evaluation, self.part)


@dataclass(frozen=True)
class Common(Message):
    """server -> silo: theta, the learning rate, and what steps are weighted by: the number of all labelled devices, of
    silos that have some, and of all silos.
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
    loss: Metric[float]
    clipped: Count[int]


@dataclass(frozen=True)
class Labelled(Message):
    """devices -> own silo: how many have a training label (a sum over devices)."""

    devices: Count[int]


@dataclass(frozen=True)
class ClassCounts(Message):
    """devices -> own silo -> devices, with ``class_weight=balanced``: training labels of each class in the silo."""

    devices: LabelStatistic[Tensor]


@dataclass(frozen=True)
class Sizes(Message):
    """silo -> server, summed: labelled devices, and 1 where there are any."""

    labelled: Count[float]
    silos: Count[float]


@dataclass(frozen=True)
class Update(Message):
    """silo -> server, summed: the silo's share of the new weights, or its part of the gradient; loss and number of
    clipped values of its devices.
    """

    weights: Model[Weights]
    loss: Metric[float]
    clipped: Count[float]
