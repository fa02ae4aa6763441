r"""FedTAD -- Zhu et al., FedTAD: Topology-aware Data-free Knowledge Distillation for Subgraph Federated Learning, IJCAI
2024, https://arxiv.org/abs/2404.14061. FedAvg, after which the server lets the average learn from every client's model
on a graph it makes up, class by class as far as the client is reliable.

    paper        here
    W, W_k       ServerState.weights, LocalModel.weights
    phi_kc       Reliability.classes          how reliable client k is for class c
    r_kc         ServerState.reliability      phi_kc / sum_j phi_jc
    T            return probabilities of random walks beside a node's features (``topology=walks``)
    G            ServerState.generator        see `distillation`

.. math::
    \phi_{kc} = \sum_{v \in train_k,\, y_v = c} \frac{1 + \sum_{u \in N(v)} \cos(h_v, h_u)}{|N(v)| + 1}, \qquad h_v =
    [x_v, T_{vv}, \dots, (T^p)_{vv}]

The server runs every client's model, so there is no secure sum, and phi tells about the classes of a client's training
nodes. The generator looks for nodes of which clients' models are sure: assume that it shows the server prototypes of
features.

# Differs from the authors' code: its topology code holds node ids of nearly uniform walks, which makes phi the number
of training nodes of a class (``topology=counts`` is what it amounts to); dropout is off where models are scored and
distilled; a class nobody trains has reliability 0, not NaN; a pseudo node's ``pseudo_neighbours`` are others (the
code's top k hold the node itself, which has a loop anyway). A training node whose neighbours are opposite to it
(features below 0) counts 0, not less: shares are never negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import LabelStatistic, Message, Model, PartyId
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask
from isthmus.graph.embedding import walk_embedding
from isthmus.methods import fedavg, gcfl
from isthmus.methods.fedavg import FedAvgClient
from isthmus.methods.fedtad.distillation import Distillation, distil, first_generator, fresh_adam
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.single_models import LocalModel, SingleModelsConfig
from isthmus.nn.backbone import Backbone
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.optim import OptimizerState
from isthmus.nn.sparse import as_csr
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights


@dataclass(frozen=True)
class FedTADConfig(SingleModelsConfig):
    """Settings of FedTAD.

    Args:
        distil_epochs: Pseudo graphs the server makes in a round; 0 is FedAvg.
        generator_steps: Steps of the generator on each pseudo graph.
        model_steps: Steps of the averaged model on each pseudo graph.
        distil_lr: Learning rate of the generator and of the averaged model in distillation, by Adam.
        distil_weight_decay: Weight decay of the generator and of the averaged model in distillation.
        pseudo_nodes: Nodes of a pseudo graph.
        pseudo_neighbours: Neighbours that each node of a pseudo graph gets.
        noise_width: Width of the noise from which the generator starts.
        accuracy: Weight lambda_1 in the generator's loss.
        spread: Weight lambda_2 in the generator's loss.
        topology: How neighbourhoods are compared in addition to features: by return probabilities of ``walks`` (the
            paper), or not at all: reliability is then the number of training nodes (``counts``).
        walk_steps: p, length of the longest walk.
    """

    why_everybody: ClassVar[str] = "the server learns from every client's model"
    scores_dropped: ClassVar[bool] = True
    distil_epochs: int = 5
    generator_steps: int = 1
    model_steps: int = 5
    distil_lr: float = 1e-3
    distil_weight_decay: float = 5e-4
    pseudo_nodes: int = 100
    pseudo_neighbours: int = 5
    noise_width: int = 32
    accuracy: float = 1.0
    spread: float = 1.0
    topology: Literal["walks", "counts"] = "walks"
    walk_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            *("distil_epochs", "generator_steps", "model_steps"),
            *("distil_lr", "distil_weight_decay", "accuracy", "spread"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("noise_width", "walk_steps", "pseudo_neighbours"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.pseudo_nodes < 2:
            raise ConfigError(f"pseudo_nodes must be at least 2, got {self.pseudo_nodes}")

    def personal_prefixes(self, model: Backbone | GraphModel) -> tuple[str, ...]:
        """Nothing: the server runs the whole model, an input norm too (``share_input_norm`` does not act)."""
        return ()

    @property
    def distillation(self) -> Distillation:
        return Distillation(
            epochs=self.distil_epochs,
            generator_steps=self.generator_steps,
            model_steps=self.model_steps,
            nodes=self.pseudo_nodes,
            noise=self.noise_width,
            neighbours=self.pseudo_neighbours,
            accuracy=self.accuracy,
            spread=self.spread,
            lr=self.distil_lr,
            weight_decay=self.distil_weight_decay,
        )


@dataclass(frozen=True)
class Reliability(Message):
    """phi_k (C,)."""

    classes: LabelStatistic[Tensor]


@dataclass(frozen=True)
class Common(Message):
    """W."""

    weights: Model[Weights]


@dataclass(frozen=True)
class ServerState(Record):
    """The average, the generator, an Adam for each, and r (K, C)."""

    weights: Weights
    optimizer: OptimizerState
    generator: Weights
    generator_optimizer: OptimizerState
    clients: tuple[PartyId, ...]
    reliability: Tensor
    num_features: int


class FedTADClient(FedAvgClient[FedTADConfig]):
    """One client; its model is seen, and run, by the server."""

    cohort: ClassVar[type[Cohort[Any]] | None] = None

    @handler
    def reliability(self) -> Reliability:
        """phi_k, once."""
        data = self.data
        known, classes = data.train & (data.y >= 0), data.num_classes
        if self.config.topology == "counts":
            return Reliability(torch.bincount(data.y[known], minlength=classes).double())
        return Reliability(alikeness(data, known, self.config.walk_steps))

    @handler
    def local_model(self, common: Common) -> LocalModel:
        """E epochs from W."""
        self.state = self.train({**self.state.weights, **self.allowed(common.weights)}, received=common.weights)
        return LocalModel({name: self.state.weights[name] for name in common.weights}, self.samples())


def alikeness(data: Any, known: Tensor, steps: int) -> Tensor:
    """phi: training nodes by class, each counted as far as its neighbours look like it. (C,)"""
    nodes, arcs = data.num_nodes, data.edge_index.shape[1]
    walks = walk_embedding(data.edge_index, torch.tensor([0, nodes]), torch.tensor([0, arcs]), steps).double().numpy()
    x = as_csr(data.x).astype(np.float64)
    source, target = data.edge_index.numpy()
    kept = known.numpy()[target] & (source != target)
    source, target = source[kept], target[kept]
    together = np.asarray(x[source].multiply(x[target]).sum(1)).ravel() + (walks[source] * walks[target]).sum(1)
    length = np.sqrt(np.asarray(x.multiply(x).sum(1)).ravel() + np.square(walks).sum(1))
    both = length[source] * length[target]
    cosine = np.divide(together, both, out=np.zeros_like(together), where=both > 0)
    alike, degree = np.zeros(nodes), np.zeros(nodes)
    np.add.at(alike, target, cosine)
    np.add.at(degree, target, 1.0)
    values = torch.from_numpy(np.maximum(0.0, (1.0 + alike) / (degree + 1.0)))
    return torch.zeros(data.num_classes, dtype=torch.float64).index_add_(0, data.y[known], values[known])


def init(view: View, config: FedTADConfig, common: Stream) -> ServerState:
    if not view.alike:
        raise ConfigError("fedtad trains one common model: all clients need the same features and classes")
    weights = get_weights(config.first_model(view, common))
    sizes = view.num_features, view.num_classes
    generator = first_generator(*sizes, config.noise_width, common.child("generator"), config.dtype)
    clients = tuple(view.clients)
    reliability = torch.zeros(len(clients), view.num_classes, dtype=torch.float64)
    return ServerState(
        weights, fresh_adam(weights), generator, fresh_adam(generator), clients, reliability, view.num_features
    )


def reliability_round(state: ServerState, federation: Federation, config: FedTADConfig) -> tuple[ServerState, Log]:
    """r, once: phi normalised over clients, class by class; 0 for a class nobody trains."""
    replies = federation.call(FedTADClient.reliability)
    phi = torch.stack([replies[client].classes for client in state.clients])
    total = phi.sum(0)
    reliability = torch.where(total > 0.0, phi / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)
    return replace(state, reliability=reliability), {}


def fedtad_round(state: ServerState, federation: Federation, config: FedTADConfig) -> tuple[ServerState, Log]:
    """FedAvg, then distillation from every client's model."""
    replies = federation.call(FedTADClient.local_model, Common(state.weights))
    if not any(reply.samples for reply in replies.values()):
        raise RunError("no client has a training node: choose a split with a training part")
    average = gcfl.average(replies)  # sum_k (n_k / n) W_k, with the bits of FedAvg
    if not config.distil_epochs:
        return replace(state, weights=average), {}
    model = config.build(num_features=state.num_features, num_classes=state.reliability.shape[1], stream=Stream(0))
    found = distil(
        model,
        average,
        state.optimizer,
        [replies[client].weights for client in state.clients],
        state.reliability,
        state.generator,
        state.generator_optimizer,
        config.distillation,
        federation.stream("distillation"),
    )
    after = replace(
        state,
        weights=found.weights,
        optimizer=found.optimizer,
        generator=found.generator,
        generator_optimizer=found.generator_optimizer,
    )
    return after, {"distance": found.distance}


def facts(state: ServerState, config: FedTADConfig, scenario: Any) -> Mapping[str, Any]:
    """r, as the server knows it."""
    rows = zip(state.clients, state.reliability.tolist(), strict=True)
    return {"reliability": {client: [round(value, 4) for value in row] for client, row in rows}}


def script(config: FedTADConfig, view: View) -> Script:
    """The server reads every client's reliability, and its model in every round."""
    return {
        "setup": (ask(FedTADClient.reliability),),
        "train": (ask(FedTADClient.local_model),),
        "evaluation": (ask(fedavg.scored(config, FedTADClient)),),
    }


METHOD = register(
    Method(
        name="fedtad",
        summary="FedAvg, then the average learns from every client's model on a made-up graph, class by class",
        reference=(
            "Zhu et al., FedTAD: Topology-aware Data-free Knowledge Distillation for Subgraph Federated Learning, "
            "IJCAI 2024"
        ),
        config=FedTADConfig,
        tasks=("node",),
        init=init,
        phases=(Phase("setup", reliability_round, rounds=1, setup=True), Phase("train", fedtad_round)),
        roles={"client": Role(FedTADClient)},
        script=script,
        needs_single_updates=True,
        preset="fedtad",
        facts=facts,
    )
)
