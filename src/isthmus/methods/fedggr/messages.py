"""What FedGGR's parties send each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isthmus.federation.messages import Count, Embedding, Gradient, Message, Model
from isthmus.tensors import Weights


@dataclass(frozen=True)
class Encoder(Message):
    """The common auto-encoder, and n for the clients to weight by."""

    weights: Model[Weights]
    total: Count[float]


@dataclass(frozen=True)
class Uploaded(Message):
    """E_i (|V_i|, p); the order of its rows is known to the client alone."""

    rows: Embedding[Tensor]


@dataclass(frozen=True)
class Turn(Message):
    """W_C and Z_glob^i."""

    weights: Model[Weights]
    rows: Embedding[Tensor]


@dataclass(frozen=True)
class Returned(Message):
    """grad Z^i of the client's mean loss (|V_i|, F_g); zero where a node has no training label."""

    rows: Gradient[Tensor]


@dataclass(frozen=True)
class Total(Message):
    """n, for the clients to weight by."""

    total: Count[float]


@dataclass(frozen=True)
class Deployment(Message):
    """W_C and Z_glob^i, sent to be used."""

    weights: Model[Weights]
    rows: Embedding[Tensor]


@dataclass(frozen=True)
class GlobalRows(Message):
    """Z_glob^i, for a model that the client has already."""

    rows: Embedding[Tensor]
