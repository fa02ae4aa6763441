"""What travels in the streamed protocol, and sums over hops as owners keep them (`streamed.py` has the equations)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.federation.messages import Count, Embedding, Gradient, Identifier, Message, Model, Structure
from isthmus.methods.fedstruct.client import BETAS, STRUCTURE, below
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.nn.structure import StructureNet
from isthmus.tensors import Weights

# -- messages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Members(Message):
    """Who takes part."""

    clients: Identifier[tuple[str, ...]]


@dataclass(frozen=True)
class ArcList(Message):
    """All cross edges the sender shares with the receiver, seen from the sender, each with the sender's slot of its own
    end: among its nodes with outgoing cross arcs for those, among its nodes with incoming ones for the others.
    """

    own: Identifier[Tensor]
    other: Identifier[Tensor]
    outgoing: Structure[Tensor]
    weight: Structure[Tensor]
    slot: Identifier[Tensor]
    out_slots: Count[int]
    in_slots: Count[int]


@dataclass(frozen=True)
class ExposedNodes(Message):
    """Nodes of the receiver that the sums given to the sender tell apart from all others; and for each the sender's
    node whose edges to it may stay, -1 for none (`closed_edges.py`).
    """

    ids: Identifier[Tensor]
    keep: Identifier[Tensor]


@dataclass(frozen=True)
class ClosedNodes(Message):
    """Those of them that are training nodes of the sender, which this tells of them: their other edges to the receiver
    are left out.
    """

    ids: Identifier[Tensor]
    keep: Identifier[Tensor]


@dataclass(frozen=True)
class Settled(Message):
    """Whether no edge had to be left out any more."""

    settled: Count[bool]


@dataclass(frozen=True)
class Start(Message):
    """theta (empty: go on with your own), n_t, and whether values are dropped."""

    weights: Model[Weights]
    total: Count[float]
    training: Count[bool]


@dataclass(frozen=True)
class Hop(Message):
    """Which hop, l."""

    hop: Count[int]


@dataclass(frozen=True)
class Forward(Message):
    """sum over own u of At_vu Z_u^(l-1), for each of the receiver's nodes v with outgoing cross arcs."""

    sums: Embedding[Tensor]


@dataclass(frozen=True)
class Backward(Message):
    """sum over own v of At_vu G_v^(l) / Dt_v, for each of the receiver's nodes u with incoming cross arcs."""

    sums: Gradient[Tensor]


@dataclass(frozen=True)
class KnownValues(Message):
    """Of nodes that were there in training, for each of the receiver's nodes with outgoing cross arcs: the sum of their
    values, and of the weights of the arcs to them.
    """

    sums: Embedding[Tensor]
    mass: Structure[Tensor]


@dataclass(frozen=True)
class ThetaStep(Message):
    """An owner's part of the averaged gradient of theta: ready to be summed."""

    gradients: Gradient[Weights]
    share: Count[float]


@dataclass(frozen=True)
class OwnAverage(Message):
    """FedAvg: an owner's weights after its local steps, times its share."""

    weights: Model[Weights]
    share: Count[float]


# -- the hops --------------------------------------------------------------------------------------


class Hops:
    """z = sum_l beta_l Z^(l) of some nodes, term by term, and the same backwards. For one owner, or all of a process.

    Args:
        betas: beta_0 ... beta_L.
        rows: Rows whose z is wanted; None for all.
        keep: Keep every term, for the gradients of the betas.
    """

    def __init__(self, values: Tensor, betas: Sequence[float], rows: Tensor | None, *, keep: bool) -> None:
        self.betas, self.rows, self.keep = betas, rows, keep
        self.terms: list[Tensor] = []
        self.z = torch.zeros_like(values if rows is None else values[rows])
        self.values = values
        self.grad = values
        self._add(0)

    def next(self, values: Tensor, hop: int) -> None:
        """Z^(l) is here."""
        self.values = values
        self._add(hop)

    def _add(self, hop: int) -> None:
        part = self.values if self.rows is None else self.values[self.rows]
        if self.betas[hop]:
            self.z.add_(part, alpha=self.betas[hop])
        if self.keep:
            self.terms.append(part)

    def turn(self, residual: Tensor) -> None:
        """Begin the backward pass: G^(L) = beta_L R."""
        self.residual = residual
        self.grad = torch.zeros_like(self.values)
        self._give(len(self.betas) - 1)

    def back(self, grad: Tensor, hop: int) -> None:
        """G^(l-1) = beta_{l-1} R + Ah^T G^(l), where the second is ``grad``."""
        self.grad = grad
        self._give(hop - 1)

    def _give(self, hop: int) -> None:
        if self.betas[hop]:
            assert self.rows is not None
            self.grad.index_add_(0, self.rows, self.residual, alpha=self.betas[hop])

    def beta_gradients(self) -> Tensor:
        """dL/dbeta_l = <Z^(l), R>."""
        return torch.stack([(term * self.residual).sum() for term in self.terms])


def betas_of(config: FedStructConfig, weights: Weights) -> list[float]:
    """beta_0 ... beta_L."""
    learned = weights.get(BETAS)
    return [config.beta0, *config.power_weights] if learned is None else [float(beta) for beta in learned]


def structure_of(weights: Weights) -> dict[str, Tensor]:
    """theta_s without the betas, which belong to the hops."""
    return {name: tensor for name, tensor in below(weights, STRUCTURE).items() if name != StructureNet.BETAS}
