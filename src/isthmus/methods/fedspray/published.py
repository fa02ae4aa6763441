"""FedSpray's messages as published: every client shows the server its label shares, its encoder and its class proxies.

Same mathematics as `algorithm` (equal up to rounding while no class has fewer than ``min_class_count`` training nodes),
other messages. Kept to show what they tell: a_j^k times the number of training nodes is the client's label histogram,
and the proxy of a class with one training node is that node's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Embedding, Message, Model
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ask
from isthmus.methods.fedspray import algorithm
from isthmus.methods.fedspray.algorithm import FedSprayClient, ServerState, aggregated
from isthmus.methods.fedspray.config import FedSprayConfig
from isthmus.methods.registry import Log, Phase, register
from isthmus.seeds import Stream
from isthmus.tensors import Weights, weighted_mean


@dataclass(frozen=True)
class PublishedConfig(FedSprayConfig):
    """FedSpray's settings; every class counts, however few nodes it has."""

    min_class_count: int = 1


@dataclass(frozen=True)
class Download(Message):
    """omega_{r-1} and S_{r-1}."""

    encoder: Model[Weights]
    proxies: Embedding[Tensor]


@dataclass(frozen=True)
class Upload(Message):
    """omega^k and S^k as they are."""

    encoder: Model[Weights]
    proxies: Embedding[Tensor]


@dataclass(frozen=True)
class PublishedState(ServerState):
    """With every client's own numbers."""

    samples: Mapping[str, float]
    shares: Mapping[str, Tensor]


class PublishedClient(FedSprayClient[PublishedConfig]):
    cohort: ClassVar[None] = None  # every client's own upload is asked for

    @handler
    def upload(self, common: Download) -> Upload:
        return Upload(*self.learn(common.encoder, common.proxies))


def init(view: View, config: PublishedConfig, common: Stream) -> PublishedState:
    first = algorithm.init(view, config, common)
    return PublishedState(first.encoder, first.proxies, first.total, first.class_shares, {}, {})


def census_round(state: PublishedState, federation: Federation, config: PublishedConfig) -> tuple[PublishedState, Log]:
    """N^k and a_j^k of every client, once."""
    replies = federation.call(PublishedClient.census)
    samples = {k: reply.samples for k, reply in replies.items()}
    shares = {k: reply.class_shares for k, reply in replies.items()}
    total, class_shares = sum(samples.values()), torch.stack(list(shares.values())).sum(0)
    if total <= 0.0:
        raise RunError("no client has a training node: choose a split with a training part")
    return replace(state, total=total, class_shares=class_shares, samples=samples, shares=shares), {}


def published_round(state: PublishedState, federation: Federation, config: PublishedConfig) -> tuple[ServerState, Log]:
    """Every client learns; the server weights and adds up."""
    replies = federation.call(PublishedClient.upload, Download(state.encoder, state.proxies))
    shares = [state.samples[k] / state.total for k in replies]  # N^k / N
    encoder = weighted_mean([reply.encoder for reply in replies.values()], shares)
    weights = torch.stack([state.shares[k] for k in replies]) / state.class_shares.clamp(min=1e-300)  # a_j^k / a_j
    proxies = torch.stack([reply.proxies for reply in replies.values()])  # (K, C, d_s)
    return aggregated(state, encoder, (proxies * weights.to(proxies.dtype).unsqueeze(2)).sum(0), config)


def script(config: PublishedConfig, view: View) -> Script:
    """Everything in the clear."""
    return {
        "setup": (ask(PublishedClient.census),),
        "train": (ask(PublishedClient.upload),),
        "evaluation": (ask(PublishedClient.evaluate),),
    }


METHOD = register(
    replace(
        algorithm.METHOD,
        name="fedspray-published",
        summary="FedSpray with the published messages: label shares and proxies of every client in the clear",
        config=PublishedConfig,
        init=init,
        phases=(Phase("setup", census_round, rounds=1, setup=True), Phase("train", published_round)),
        roles={"client": Role(PublishedClient)},
        script=script,
        needs_single_updates=True,
    )
)
