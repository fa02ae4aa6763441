r"""FedGTA -- Li et al., FedGTA: Topology-aware Averaging for Federated Graph Learning, VLDB 2023,
https://arxiv.org/abs/2401.11755. Each client gets an average of its own: over the clients whose smoothed predictions
have similar moments, weighted by how sure they are.

    paper        here
    Y^k          `smoothed`              label propagation of soft labels, k steps
    H_i          Report.confidence       confidence of a client's smoothed predictions, weighted by degree
    M_i          Report.moments          moments of them, orders 1 to ``order`` ("hybrid": raw and central)
    S(i, j)      cos(M_i, M_j)
    epsilon      similarity              client j counts for client i where S(i, j) is above it
    alpha        mix                     of a step of the propagation, 0.5

After local training, with :math:`\hat A = \tilde D^{-1/2} (A + I) \tilde D^{-1/2}`, :math:`Y^0` the labels of training
nodes and the model's soft predictions elsewhere:

.. math::
    Y \leftarrow \alpha \hat A Y + (1 - \alpha) Y^0, \quad Y_{train} \leftarrow Y_{train} + Y^0_{train}

.. math::
    H = \sum_v \deg_v \Bigl( \frac{C}{e} + \sum_c T_{vc} \log T_{vc} \Bigr), \quad T = \mathrm{softmax}(Y / temperature)

:math:`M` is formed of :math:`Q = \mathrm{softmax}(Y)`; rows of training nodes in T and Q are their labels. The server
answers client i with :math:`W_i = \sum_{j \in N_i} H_j W_j / \sum_{j \in N_i} H_j`. It needs every client's model and
report, so there is no secure sum; where a client's N_i has two members, it can subtract itself and learn the other's
model: the result counts how often that was so. The first moment is a mean of labels and soft labels: near the client's
shares of classes where most of its nodes are training nodes.

# Differs from the authors' code: a client is always in its own N_i, and answers go to clients by name, not by place.
The model is the run's own backbone, as that of the methods it is compared with (the authors' best is GAMLP). Which test
and validation labels a client has never enters a report.
# Differs from public ports: they leave predictions of unlabelled nodes out and propagate predictions, not labels, of
training nodes: another statistic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import LabelStatistic, Message, Model
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask
from isthmus.graph.label_propagation import propagated
from isthmus.graph.normalise import gcn_norm
from isthmus.methods.fedavg import FedAvgClient
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.single_models import OwnModel, OwnModels, SingleModelsConfig, first_models, score_own_models
from isthmus.seeds import Stream
from isthmus.tensors import Weights, num_values, weighted_mean


@dataclass(frozen=True)
class FedGTAConfig(SingleModelsConfig):
    """Settings of FedGTA.

    Args:
        order: Highest order of the moments.
        moments: Which moments of the predictions are compared: ``raw``, ``central``, or both (``hybrid``).
        similarity: Cosine of moments above which another client counts, in [-1, 1].
        steps: Steps of the label propagation.
        mix: Share of the neighbours in a step of the label propagation.
        temperature: Temperature of the soft labels whose entropy is the confidence.
    """

    scores_after_local: ClassVar[bool] = False
    scores_dropped: ClassVar[bool] = True
    order: int = 6
    moments: Literal["raw", "central", "hybrid"] = "hybrid"
    similarity: float = 0.5
    steps: int = 5
    mix: float = 0.5
    temperature: float = 20.0

    def idle(self) -> dict[str, str]:
        return super().idle() | {"weighting": "every client has an average of its own, weighted by confidence"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order < 1 or self.steps < 1:
            raise ConfigError(f"order and steps must be at least 1, got {self.order} and {self.steps}")
        if not -1.0 <= self.similarity <= 1.0:
            raise ConfigError(f"similarity must lie in [-1, 1], got {self.similarity}")
        if self.moments == "central" and self.order < 2:
            raise ConfigError("central moments of order 1 are all zero: set order to 2 or more")
        if not 0.0 <= self.mix <= 1.0:
            raise ConfigError(f"mix must lie in [0, 1], got {self.mix}")
        if self.temperature <= 0.0:
            raise ConfigError(f"temperature must be above 0, got {self.temperature}")


@dataclass(frozen=True)
class Report(Message):
    """A client's model after its epochs, and what it says of its predictions."""

    weights: Model[Weights]
    moments: LabelStatistic[Tensor]
    confidence: LabelStatistic[float]


@dataclass(frozen=True)
class ServerState(OwnModels):
    """Every client's model; how many of last round's sets N_i had which size, and how many sets of two there were."""

    sizes: tuple[int, ...] = ()
    pairs: int = 0


class FedGTAClient(FedAvgClient[FedGTAConfig]):
    """One client; its model and report are seen one by one."""

    cohort: ClassVar[type[Cohort[Any]] | None] = None

    @handler
    def report_update(self, own: OwnModel) -> Report:
        """E epochs from W_i, then moments and confidence of the smoothed predictions."""
        self.state = self.train({**self.state.weights, **self.allowed(own.weights)}, received=own.weights)
        weights = {name: self.state.weights[name] for name in own.weights}
        known, y = self.data.train, self.data.y
        labels = torch.nn.functional.one_hot(y[known], self.data.num_classes).double()
        smoothed = self.smoothed(torch.softmax(self.logits().double(), dim=1), labels, known)
        soft, flat = (torch.softmax(smoothed / heat, dim=1) for heat in (1.0, self.config.temperature))
        soft[known], flat[known] = labels, labels
        degree = torch.bincount(self.data.edge_index[1], minlength=len(y)).double()
        return Report(weights, moments(soft, self.config.order, self.config.moments), confidence(flat, degree))

    def smoothed(self, predicted: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        """Y after the propagation. (n, C)"""
        start = predicted.clone()
        start[known] = labels
        return propagated(self.adjacency(), start, known, steps=self.config.steps, mix=self.config.mix)

    def adjacency(self) -> sp.csr_matrix:
        """A-hat, computed once per process."""
        if not hasattr(self, "_adjacency"):
            self._adjacency = gcn_norm(self.data.edge_index, self.data.num_nodes)
        return self._adjacency


def moments(soft: Tensor, order: int, kind: str) -> Tensor:
    """Means of powers of the rows, raw and about their mean. (order C,) or (2 order C,)"""
    mean = soft.mean(0)
    raw = [soft.pow(p).mean(0) for p in range(1, order + 1)] if kind != "central" else []
    central = [(soft - mean).pow(p).mean(0) for p in range(1, order + 1)] if kind != "raw" else []
    return torch.cat([*raw, *central])


def confidence(soft: Tensor, degree: Tensor) -> float:
    """Bound of the entropy minus the entropy, summed over nodes by degree. Above 0 where the client has an edge."""
    bound = soft.shape[1] / np.e  # -t log t is at most 1 / e
    return float((degree * (bound + (soft * torch.log(soft + 1e-8)).sum(1))).sum())


def init(view: View, config: FedGTAConfig, common: Stream) -> ServerState:
    first = first_models(view, config, common)
    return ServerState(first.clients, first.models)


def fedgta_round(state: ServerState, federation: Federation, config: FedGTAConfig) -> tuple[ServerState, Log]:
    """Every client trains and reports; every client gets its own average."""
    reports = federation.call(FedGTAClient.report_update, state.each(OwnModel))
    sets = neighbour_sets([reports[client].moments for client in state.clients], config.similarity)
    sure = [reports[client].confidence for client in state.clients]
    models = [reports[client].weights for client in state.clients]
    after = tuple(averaged(models, sure, members) for members in sets)
    sizes = tuple(len(members) for members in sets)
    pairs = state.pairs + sizes.count(2)
    return ServerState(state.clients, after, sizes, pairs), {"mean_set": float(np.mean(sizes))}


def neighbour_sets(reported: list[Tensor], threshold: float) -> list[list[int]]:
    """N_i: the client itself, and every other whose moments have a cosine above the threshold."""
    rows = torch.nn.functional.normalize(torch.stack(reported).double(), dim=1)
    near = (rows @ rows.T).clamp(max=1.0) > threshold  # rounding goes beyond 1
    near.fill_diagonal_(True)
    return [torch.nonzero(row).flatten().tolist() for row in near]


def averaged(models: list[Weights], sure: list[float], members: list[int]) -> Weights:
    """W_i = sum_{j in N_i} H_j W_j / sum_{j in N_i} H_j; a set without any confidence counts its members the same."""
    if len(members) == 1:
        return models[members[0]]
    total = sum(sure[j] for j in members)
    shares = [sure[j] / total if total > 0.0 else 1.0 / len(members) for j in members]
    return weighted_mean([models[j] for j in members], shares)


def facts(state: ServerState, config: FedGTAConfig, scenario: Any) -> Mapping[str, Any]:
    """How large the last round's sets were, and how often a client could work out another's model."""
    sizes = list(state.sizes)
    summary = f"a client's average is over {np.mean(sizes):.1f} of {len(state.clients)} clients" if sizes else ""
    if state.pairs:
        summary += f"; {state.pairs} times it was over two, so that one could work out the other's model"
    return {"summary": summary, "set_sizes": sizes, "sets_of_two": state.pairs}


def script(config: FedGTAConfig, view: View) -> Script:
    """The server reads every client's model and report."""
    return {
        "train": (ask(FedGTAClient.report_update, each=True),),
        "evaluation": (ask(FedGTAClient.deploy, each=True),),
    }


METHOD = register(
    Method(
        name="fedgta",
        summary="an average of its own for every client, over clients with similar smoothed predictions",
        reference="Li et al., FedGTA: Topology-aware Averaging for Federated Graph Learning, VLDB 2023",
        config=FedGTAConfig,
        tasks=("node",),
        init=init,
        phases=(Phase("train", fedgta_round),),
        evaluate=score_own_models,
        roles={"client": Role(FedGTAClient)},
        script=script,
        needs_single_updates=True,
        shared_values=lambda state: num_values(state.models[0]),
        facts=facts,
    )
)
