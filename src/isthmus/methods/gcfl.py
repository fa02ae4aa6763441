r"""GCFL -- Xie, Ma, Xiong & Yang, Federated Graph Classification over Non-IID Graphs, NeurIPS 2021,
https://arxiv.org/abs/2106.13423.

FedAvg within clusters of clients; a cluster is cut in two where its clients' updates diverge.

    paper            here
    C_k              ServerState.clusters    clients, a partition that is only ever refined; one cluster at the start
    theta_k          ServerState.weights     shared weights of each cluster
    Delta theta_i    `_update`               what client i would change them by in this round
    delta_mean       mean_norm               || mean over the cluster of Delta theta_i ||, every client the same
    delta_max        max_norm                max over the cluster of || Delta theta_i ||
    eps_1, eps_2     eps1, eps2              split where delta_mean < eps_1 and delta_max > eps_2 ...
                     warmup, 2               ... after these rounds, in clusters of more than two
    alpha_ij         1 + cos(Delta theta_i, Delta theta_j)    edges of the graph whose minimum cut (Stoer-Wagner)
                                                              divides the cluster

The thresholds depend on rate, steps and number of shared values: with other models they may never or always be met, so
both norms of every cluster are in the log of evaluated rounds, and those of every cut in the result. Clients send their
shared weights rather than the difference: the server knows where they started, and a cluster that is never cut is then
FedAvg (nodes) or FedPer (graphs) bit for bit. On graphs the convolutions are shared; on nodes all layers
(``share_input_norm`` as in FedAvg). The local steps are FedAvg's (`FedAvgClient.train`).

# Differs from the published code: it reports for each client the best test accuracy over all cached cluster models,
which looks at the test set. Here a client is scored with the model of the cluster it ends in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import igraph
import torch
from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.federation.interface import Federation, PerClient, Replies, View
from isthmus.federation.messages import Message, Model, PartyId
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.fedavg import FedAvgClient
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.single_models import LocalModel, SingleModelsConfig
from isthmus.methods.training import Deployed
from isthmus.nn.backbone import Backbone
from isthmus.nn.graph_models import GraphModel
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, num_values, scaled

Cluster = tuple[PartyId, ...]


@dataclass(frozen=True)
class GCFLConfig(SingleModelsConfig):
    """Settings of GCFL.

    Args:
        eps1: Upper bound of the norm of a cluster's mean update for a split; 0 never splits.
        eps2: Lower bound of the largest norm of a client's update for a split.
        warmup: Rounds before the first split.
    """

    scores_after_local: ClassVar[bool] = False
    scores_dropped: ClassVar[bool] = True
    why_everybody: ClassVar[str] = "clusters are cut by the updates of all their clients"
    eps1: float = 0.05
    eps2: float = 0.1
    warmup: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("eps1", "eps2", "warmup"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    def personal_prefixes(self, model: Backbone | GraphModel) -> tuple[str, ...]:
        if isinstance(model, GraphModel):
            return tuple(group for group in model.shared_groups if group not in model.conv_groups)
        return super().personal_prefixes(model)


@dataclass(frozen=True)
class ClusterModel(Message):
    """theta of the client's cluster."""

    weights: Model[Weights]


@dataclass(frozen=True)
class ServerState(Record):
    """All the server remembers between rounds.

    Args:
        splits: Rounds in which a cluster was cut.
        norms: delta_mean and delta_max of the cluster that was, for each of them.
    """

    round: int
    clusters: tuple[Cluster, ...]
    weights: tuple[Weights, ...]
    splits: tuple[int, ...] = ()
    norms: tuple[tuple[float, float], ...] = ()


StateT = TypeVar("StateT", bound=ServerState)


class GCFLClient(FedAvgClient[GCFLConfig]):
    """One client; its updates are seen one by one."""

    cohort: ClassVar[type[Cohort[Any]] | None] = None

    def from_cluster(self, shared: Weights) -> Weights:
        """E epochs from the cluster's weights; the shared part of where they lead."""
        self.state = self.train({**self.state.weights, **self.allowed(shared)}, received=shared)
        return {name: self.state.weights[name] for name in shared}

    @handler
    def cluster_update(self, cluster: ClusterModel) -> LocalModel:
        return LocalModel(self.from_cluster(cluster.weights), self.samples())


def init(view: View, config: GCFLConfig, common: Stream) -> ServerState:
    """One cluster of all, with the shared part of the common first model."""
    model = config.first_model(view, common)
    weights = get_weights(model)
    return ServerState(0, (tuple(view.clients),), ({name: weights[name] for name in config.shared_names(model, view)},))


def gcfl_round(state: ServerState, federation: Federation, config: GCFLConfig) -> tuple[ServerState, Log]:
    """Every client trains from its cluster's weights; clusters are cut where need be, and averaged."""
    replies = federation.call(GCFLClient.cluster_update, per_client(state, ClusterModel))

    def affinities(cluster: Cluster, updates: Tensor) -> Tensor:
        unit = updates / updates.norm(dim=1, keepdim=True).clamp(min=torch.finfo(updates.dtype).tiny)
        alpha: Tensor = 1.0 + unit @ unit.T  # alpha_ij
        return alpha

    return cluster_and_average(state, replies, config, affinities)


def cluster_and_average(
    state: StateT, replies: Mapping[PartyId, Any], config: GCFLConfig, affinities: Any
) -> tuple[StateT, Log]:
    """The server's half of a round: cut clusters, then theta_c += sum_i (n_i / n_c) Delta theta_i in each.

    Args:
        affinities: (cluster, updates (clients, values)) -> symmetric matrix to cut, or None where it cannot tell yet.
    """
    if not any(reply.samples for reply in replies.values()):
        raise RunError("no client has a training sample: choose a split with a training part, or weighting=uniform")
    clusters: list[Cluster] = []
    weights: list[Weights] = []
    log: dict[str, float] = {}
    splits, norms = state.splits, state.norms
    for number, (cluster, shared) in enumerate(zip(state.clusters, state.weights, strict=True)):
        updates = torch.stack([_update(replies[client].weights, shared) for client in cluster])
        mean_norm, max_norm = float(updates.mean(0).norm()), float(updates.norm(dim=1).max())  # delta_mean, delta_max
        log |= {f"mean_norm_{number}": mean_norm, f"max_norm_{number}": max_norm}
        parts = [cluster]
        if mean_norm < config.eps1 and max_norm > config.eps2 and len(cluster) > 2 and state.round >= config.warmup:
            matrix = affinities(cluster, updates)
            if matrix is not None:
                parts = minimum_cut(cluster, matrix)
                splits, norms = (*splits, state.round + 1), (*norms, (mean_norm, max_norm))
        for part in parts:
            clusters.append(part)
            mine = {client: replies[client] for client in part}
            idle = not any(reply.samples for reply in mine.values())  # cut off without a sample: it stays where it was
            weights.append(shared if idle else average(mine))
    log["clusters"] = float(len(clusters))
    after = replace(
        state, round=state.round + 1, clusters=tuple(clusters), weights=tuple(weights), splits=splits, norms=norms
    )
    return after, log


def average(replies: Mapping[PartyId, Any]) -> Weights:
    """sum_i (n_i / n) theta_i: the cluster's weights plus its mean update, with the bits of FedAvg."""
    total = sum(reply.samples for reply in replies.values())
    first, *others = (scaled(reply.weights, reply.samples / total) for reply in replies.values())
    for other in others:
        for name, tensor in other.items():
            first[name].add_(tensor)
    return first


def minimum_cut(cluster: Cluster, matrix: Tensor) -> list[Cluster]:
    """The two sides of the cheapest cut of the complete graph (Stoer & Wagner, 1997), the one with the first client
    first.
    """
    # Pairs that cost nothing are left out: with edges of capacity 0 igraph finds the value of a free cut, but other
    # sides.
    pairs = [(i, j) for i in range(len(cluster)) for j in range(i) if matrix[i, j] > 0.0]
    graph = igraph.Graph(n=len(cluster), edges=pairs)
    sides: Sequence[Sequence[int]] = graph.mincut(capacity=[float(matrix[i, j]) for i, j in pairs]).partition
    return [tuple(cluster[i] for i in sorted(side)) for side in sorted(sides, key=min)]


def _update(weights: Weights, shared: Weights) -> Tensor:
    """Delta theta_i as one vector; norms of small differences are taken in double precision."""
    return torch.cat([(weights[name].double() - tensor.double()).flatten() for name, tensor in shared.items()])


def per_client(state: ServerState, kind: type[Any]) -> PerClient[Any]:
    """Each client's cluster model."""
    pairs = zip(state.clusters, state.weights, strict=True)
    return PerClient({client: kind(shared) for cluster, shared in pairs for client in cluster})


def evaluate(state: ServerState, federation: Federation, config: GCFLConfig) -> Replies[Evaluation]:
    """Every client scores the model of its cluster (with its personal part)."""
    return federation.call(GCFLClient.deploy, per_client(state, Deployed))


def facts(state: ServerState, config: GCFLConfig, scenario: Any) -> Mapping[str, Any]:
    """The clusters a run ended with, when they were cut, and how far their clients' updates had diverged."""
    cuts = [
        f"{at} (mean {mean:.3f}, largest {largest:.3f})"
        for at, (mean, largest) in zip(state.splits, state.norms, strict=True)
    ]
    summary = f"one cluster, never cut (eps1 {config.eps1}, eps2 {config.eps2}, not before round {config.warmup + 1})"
    if cuts:
        summary = f"{len(state.clusters)} clusters, cut in round {', '.join(cuts)}"
    return {
        "summary": summary,
        "clusters": [list(cluster) for cluster in state.clusters],
        "splits": list(state.splits),
        "norms": [list(pair) for pair in state.norms],
        "eps1": config.eps1,
        "eps2": config.eps2,
    }


def script(config: GCFLConfig, view: View) -> Script:
    """Clusters differ in what they are sent, not in what they are asked."""
    return {"train": (ask(GCFLClient.cluster_update, each=True),), "evaluation": (ask(GCFLClient.deploy, each=True),)}


METHOD = register(
    Method(
        name="gcfl",
        summary="FedAvg within clusters that are cut where clients' updates diverge",
        reference="Xie et al., Federated Graph Classification over Non-IID Graphs, NeurIPS 2021",
        config=GCFLConfig,
        init=init,
        phases=(Phase("train", gcfl_round),),
        evaluate=evaluate,
        edge_weights=True,
        own_backbones=True,
        roles={"client": Role(GCFLClient)},
        script=script,
        needs_single_updates=True,
        shared_values=lambda state: num_values(state.weights[0]),
        facts=facts,
    )
)
