"""What FedGGR's parties send each other, and the disclosure sheet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import Count, Embedding, Gradient, Message, Model
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.fedavg import Update
from isthmus.methods.fedggr.config import FedGGRConfig
from isthmus.methods.training import Size
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


DISCLOSES = (
    Disclosure("setup", "client", "server", Size, "summed"),
    Disclosure("setup", "server", "client", Encoder),
    Disclosure("setup", "client", "server", Update, "summed"),
    Disclosure("setup", "client", "server", Uploaded),
    Disclosure("train", "server", "client", Turn),
    Disclosure("train", "client", "server", Returned),
    Disclosure("train", "server", "client", Total),
    Disclosure("train", "client", "server", Update, "summed"),
    Disclosure("evaluation", "server", "client", Deployment),
    Disclosure("evaluation", "client", "server", Evaluation),
)
"""With the default settings."""


def sheet(config: FedGGRConfig) -> tuple[Disclosure, ...]:
    """Who sees what; only a federated auto-encoder's weights travel."""
    weights = () if config.encoder == "federated" else (Encoder, Update)
    return tuple(line for line in DISCLOSES if not (line.phase == "setup" and line.message in weights))
