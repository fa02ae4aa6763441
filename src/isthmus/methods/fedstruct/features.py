"""Node structure features S (spec 3): what an owner can tell of a node's place in the graph, or a free parameter; and
how everybody's part comes together.

degree    one-hot of the degree, clipped to the last of d places; of a directed graph round((in + out) / 2)
walk      (Ah^l)_vv for l = 1 ... r, by default L_s, a by-product of the powers, and the degree in the other places
          (FED*)
hop2vec   learned; N(0, 0.05^2) at the start

Every client needs all of S (Prop. 1). Fixed features go from everybody to everybody once. HOP2VEC's S is kept by the
server, or by every client (the paper's 5.3): then all replicas must stay the same bits, which fingerprints show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import ProtocolError, RunError
from isthmus.federation.messages import Identifier, Message, PartyId, RandomStart, Structure
from isthmus.federation.roles import handler
from isthmus.federation.script import ScriptLine, ask, mail
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.powers import PowerClient
from isthmus.nn.optim import fresh_state
from isthmus.seeds import Stream

NSF = "nsf"
"""Name of S among exported weights and optimiser moments."""
SPREAD = 0.05
"""Standard deviation of HOP2VEC's first values [code]."""


@dataclass(frozen=True)
class NsfBlock(Message):
    """S_i of degrees or walks, with the columns its rows belong to."""

    columns: Identifier[Tensor]
    values: Structure[Tensor]


@dataclass(frozen=True)
class NsfStart(Message):
    """HOP2VEC's first S_i, drawn at random, with the columns its rows belong to."""

    columns: Identifier[Tensor]
    values: RandomStart[Tensor]


@dataclass(frozen=True)
class Fingerprint(Message):
    """Of a replica of S."""

    value: Identifier[int]


class FeatureClient(PowerClient):
    """A client that gives its part of S, and takes everybody's."""

    def own_features(self) -> Tensor:
        """S_i (n_i, d_s), of HOP2VEC as it starts."""
        config, data = self.config, self.data
        if config.learns_nsf:
            # Whoever could repeat the draws would know whose row is whose, whatever the columns are called.
            draws = self.secret_generator("nsf") if self.state.secret else self.stream("nsf")
            values = random_feature(data.num_nodes, config.net(data.num_classes).width, draws)
        elif config.nsf == "degree":
            values = degree_feature(degrees(data), config.nsf_dim)
        else:
            values = walk_feature(self.state.diagonal[:, : config.steps], degrees(data), config.nsf_dim)
        return values.to(config.dtype)

    @handler
    def give_start(self) -> NsfStart:
        """The first S_i of HOP2VEC, to the server where it holds S."""
        if not self.config.learns_nsf:
            raise ProtocolError(f"nsf={self.config.nsf} is fixed and has no random start")
        return NsfStart(self.state.columns, self.own_features())

    @handler
    def share_start(self) -> Mapping[PartyId, NsfStart]:
        """The first S_i of HOP2VEC to all others."""
        return dict.fromkeys(self._everybody, self.give_start())

    @handler
    def take_start(self, mail: Mapping[PartyId, NsfStart]) -> Fingerprint:
        """Everybody's first S_i: a replica of S."""
        nsf = assembled(mail, self.state.owner.numel())
        self.state = replace(self.state, nsf=nsf, nsf_optimizer=fresh_state(self.config.optimizer, {NSF: nsf}))
        return Fingerprint(fingerprint(nsf))

    @handler
    def share_nsf(self) -> Mapping[PartyId, NsfBlock]:
        """S_i of degrees or walks to all others."""
        return dict.fromkeys(self._everybody, NsfBlock(self.state.columns, self.own_features()))

    @handler
    def take_nsf(self, mail: Mapping[PartyId, NsfBlock]) -> Fingerprint:
        nsf = assembled(mail, self.state.owner.numel())
        self.state = replace(self.state, nsf=nsf)
        return Fingerprint(fingerprint(nsf))

    @property
    def _everybody(self) -> tuple[PartyId, ...]:
        return (*self.state.entering, self.party)


def assembled(blocks: Mapping[PartyId, NsfBlock] | Mapping[PartyId, NsfStart], nodes: int) -> Tensor:
    """S from everybody's part."""
    parts: list[NsfBlock | NsfStart] = [*blocks.values()]
    nsf = parts[0].values.new_zeros(nodes, parts[0].values.shape[1])
    for part in parts:
        nsf[part.columns] = part.values
    return nsf


def fingerprint(nsf: Tensor) -> int:
    """63 bits of a hash of all values."""
    return int.from_bytes(hashlib.sha256(nsf.contiguous().numpy().tobytes()).digest()[:8], "big") >> 1


def check_replicas(replies: Mapping[PartyId, Fingerprint]) -> None:
    """All replicas of S are the same bits (spec 14, property 8)."""
    values = {party: reply.value for party, reply in replies.items()}
    first = next(iter(values.values()))
    strayed = [party for party, value in values.items() if value != first]
    if strayed:
        raise RunError(
            f"structure features of {', '.join(strayed)} differ from the others' copies: resume the run from a "
            "checkpoint"
        )


def degrees(data: NodeData) -> NDArray[np.int64]:
    """Of every node, own and cross edges counted; of directed graphs the mean of in and out, rounded."""
    assert data.cross is not None
    own, out = data.cross.own.numpy(), data.cross.outgoing.numpy()
    ends = [*data.edge_index.numpy(), own[out], own[~out]]
    both = np.sum([np.bincount(end, minlength=data.num_nodes) for end in ends], axis=0)
    degree: NDArray[np.int64] = np.rint(both / 2).astype(np.int64)
    return degree


def degree_feature(degree: NDArray[np.int64], width: int) -> Tensor:
    """(n, width), one-hot."""
    out = torch.zeros(len(degree), width)
    out[torch.arange(len(degree)), torch.from_numpy(np.minimum(degree, width - 1))] = 1.0
    return out


def walk_feature(diagonal: Tensor, degree: NDArray[np.int64], width: int) -> Tensor:
    """(n, width): return probabilities of 1 ... L_s steps, then the degree."""
    return torch.cat([diagonal, degree_feature(degree, width - diagonal.shape[1]).to(diagonal.dtype)], dim=1)


def random_feature(nodes: int, width: int, draws: Stream | np.random.Generator) -> Tensor:
    """(n, width), HOP2VEC's start: from the run's streams, or from a generator only its owner can repeat."""
    if isinstance(draws, Stream):
        return torch.randn(nodes, width, generator=draws.torch()) * SPREAD
    return torch.from_numpy(draws.normal(scale=SPREAD, size=(nodes, width)))


def script(config: FedStructConfig) -> tuple[ScriptLine, ...]:
    """S once: to the server where it holds S, otherwise to everybody."""
    if not config.learns_nsf:
        return (mail(FeatureClient.share_nsf, FeatureClient.take_nsf),)
    if config.replicated:
        return (mail(FeatureClient.share_start, FeatureClient.take_start),)
    return (ask(FeatureClient.give_start),)
