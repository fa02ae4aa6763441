"""GCFL+ -- Xie, Ma, Xiong & Yang, NeurIPS 2021, https://arxiv.org/abs/2106.13423: GCFL that cuts by the course of
gradient norms.

    paper      here
    g_i^t      LocalSeries.gradient_norm    norm of the shared layers' gradient at client i's last step of round t
    d          window                       last values that are compared
    Q          ServerState.series           norms by client since the last cut
    dist_ij    `isthmus.metrics.time_warping.dtw`
    alpha_ij   max dist - dist_ij           what is cut, once every client has d values; any cut clears all series

Two clusters may be cut in the same round, by the same series; those are cleared after the round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Count, Message, Metric, Model
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ask
from isthmus.methods import gcfl
from isthmus.methods.gcfl import Cluster, ClusterModel, GCFLClient, GCFLConfig, cluster_and_average, per_client
from isthmus.methods.registry import Log, Phase, register
from isthmus.metrics.time_warping import dtw
from isthmus.nn.train import ExtraGradient
from isthmus.seeds import Stream
from isthmus.tensors import Weights


@dataclass(frozen=True)
class GCFLPlusConfig(GCFLConfig):
    """Settings of GCFL+.

    Args:
        window: Values of each series that are compared (d).
        standardise: Divide each series by its standard deviation first.
    """

    scores_dropped: ClassVar[bool] = True
    window: int = 5
    standardise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(f"window must be at least 1, got {self.window}")


@dataclass(frozen=True)
class LocalSeries(Message):
    """theta + Delta theta_i, n_i, and g_i^t."""

    weights: Model[Weights]
    samples: Count[float]
    gradient_norm: Metric[float]


@dataclass(frozen=True)
class ServerState(gcfl.ServerState):
    """And the gradient norms of each client, oldest first, at most d of them."""

    series: Mapping[str, tuple[float, ...]] | None = None


class GCFLPlusClient(GCFLClient):
    """A client that also tells how large its gradient was."""

    config: GCFLPlusConfig

    def extra_gradient(self, received: Weights) -> ExtraGradient | None:
        """Adds nothing, and keeps the norm of what it is shown: the last step's remains."""

        def look(weights: Weights, grads: Mapping[str, Tensor]) -> None:
            shared = [grads[name].double().square().sum() for name in received if name in grads]
            self.scratch.norm = float(torch.stack(shared).sum().sqrt()) if shared else 0.0

        return look

    @handler
    def series_update(self, cluster: ClusterModel) -> LocalSeries:
        self.scratch.norm = 0.0  # of a client without training data
        weights = self.from_cluster(cluster.weights)
        return LocalSeries(weights, self.samples(), self.scratch.norm)


def init(view: View, config: GCFLPlusConfig, common: Stream) -> ServerState:
    start = gcfl.init(view, config, common)
    return ServerState(start.round, start.clusters, start.weights, series={client: () for client in view.clients})


def gcflplus_round(state: ServerState, federation: Federation, config: GCFLPlusConfig) -> tuple[ServerState, Log]:
    """A round of GCFL with another matrix to cut."""
    replies = federation.call(GCFLPlusClient.series_update, per_client(state, ClusterModel))
    assert state.series is not None
    series = {client: (*past, replies[client].gradient_norm)[-config.window :] for client, past in state.series.items()}

    def affinities(cluster: Cluster, updates: Tensor) -> Tensor | None:
        if any(len(values) < config.window for values in series.values()):
            return None
        return similarity([series[client] for client in cluster], standardise=config.standardise)

    after, log = cluster_and_average(state, replies, config, affinities)
    if len(after.clusters) > len(state.clusters):
        series = dict.fromkeys(series, ())
    return replace(after, series=series), log


def similarity(series: list[tuple[float, ...]], *, standardise: bool) -> Tensor:
    """max dist - dist of all pairs."""
    values = torch.tensor(series, dtype=torch.float64)
    if standardise:
        deviation = values.std(dim=1, correction=0, keepdim=True)
        values = values / torch.where(deviation > 0.0, deviation, torch.ones_like(deviation))
    rows: list[list[float]] = values.tolist()
    distance = torch.tensor([[dtw(a, b) for b in rows] for a in rows], dtype=torch.float64)
    return distance.max() - distance


def script(config: GCFLPlusConfig, view: View) -> Script:
    """GCFL's, with gradient norms."""
    return {
        "train": (ask(GCFLPlusClient.series_update, each=True),),
        "evaluation": (ask(GCFLPlusClient.deploy, each=True),),
    }


METHOD = register(
    replace(
        gcfl.METHOD,
        name="gcflplus",
        summary="GCFL that cuts clusters by the course of gradient norms",
        config=GCFLPlusConfig,
        init=init,
        phases=(Phase("train", gcflplus_round),),
        roles={"client": Role(GCFLPlusClient)},
        script=script,
    )
)
