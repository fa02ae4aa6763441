r"""FED-PUB -- Baek, Jeong, Jin, Yoon & Hwang, Personalized Subgraph Federated Learning, ICML 2023,
https://arxiv.org/abs/2206.10206. Every client gets an average of its own, over clients whose models behave alike on a
random graph, and picks what it uses of it by a mask of its own.

    paper          here
    W_k            PubState.weights        weights before the mask
    mu_k           PubState.masks          personal mask of every weight matrix, starts at 1, never leaves
    h~_k           Report.embedding        functional embedding: mean embedding of the nodes of a random graph
    S(i, j)        cos(h~_i, h~_j)
    tau            sharpness
    lambda_1       sparsity                of the term || mu ||_1; entries below it are left out when the model is used
    lambda_2       nearness                of the term || W - W_received ||_2, from the second round on

.. math::
    \alpha_{ij} = \frac{\exp(\tau S(i, j))}{\sum_k \exp(\tau S(i, k))}, \qquad W_i \leftarrow \sum_j \alpha_{ij} W_j

The random graph has ``proxy_graphs`` blocks of ``proxy_nodes`` nodes and features from N(0, 1). All clients draw it
from the run's common stream, so it is nobody's data and need not be sent. The server sees every client's weights (not
its mask) and embedding, so there is no secure sum; an embedding is what a model says of public noise, and tells clients
apart over rounds.

# Differs from the paper: the random graph is not sent by the server.
# Differs from the authors' code: there both terms have no gradient, because they are formed of detached tensors
(``terms=false`` trains what it trains), and clients are scored after their local epoch (``score_model=after_local``).
The model is the run's own backbone, the same as that of the methods it is compared with; the functional embedding is
what its last layer is given (the authors' code takes the layer before the last ahead of its ReLU). Its data (largest
component, features divided by their row's sum) are a matter of the scenario, not of the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Embedding, Message, Model
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask
from isthmus.methods.fedavg import FedAvgClient, scored
from isthmus.methods.learners import NodeLearner, dropout_source
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.single_models import OwnModel, OwnModels, SingleModelsConfig, first_models, score_own_models
from isthmus.methods.training import ModelState
from isthmus.nn.inputs import Inputs, build_inputs
from isthmus.nn.optim import fresh_state, step_plan, take_step
from isthmus.nn.train import gradients
from isthmus.seeds import Stream
from isthmus.tensors import Weights, num_values, weighted_mean

MASK = "mask of "


@dataclass(frozen=True)
class FedPubConfig(SingleModelsConfig):
    """Settings of FED-PUB.

    Args:
        sharpness: tau; 0 averages all clients equally, large values leave every client alone.
        sparsity: Weight lambda_1 of the masks' L1 norm, and the size below which an entry of a mask counts as zero.
        nearness: Weight lambda_2 of the distance to what was received.
        terms: False leaves both terms out of the gradient, as the authors' code does.
        train_masks: False keeps the masks at 1.
        proxy_graphs: Blocks of the public random graph.
        proxy_nodes: Nodes of a block of the random graph.
        proxy_degree: Mean degree of a node of the random graph.
    """

    scores_dropped: ClassVar[bool] = True
    sharpness: float = 3.0
    sparsity: float = 1e-3
    nearness: float = 1e-3
    terms: bool = True
    train_masks: bool = True
    proxy_graphs: int = 5
    proxy_nodes: int = 100
    proxy_degree: float = 10.0

    def idle(self) -> dict[str, str]:
        return super().idle() | {
            "weighting": "every client has an average of its own, weighted by how alike models behave",
            "reset_optimizer": "masks and weights keep their optimiser, as in the paper",
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sharpness", "sparsity", "nearness"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.proxy_degree <= 0.0:
            raise ConfigError(f"proxy_degree must be above 0, got {self.proxy_degree}")
        for name in ("proxy_graphs", "proxy_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Report(Message):
    """W_i after the client's epochs, and its functional embedding."""

    weights: Model[Weights]
    embedding: Embedding[Tensor]


@dataclass(frozen=True)
class ServerState(OwnModels):
    """Every client's model, and the last round's alpha (K, K)."""

    alpha: Tensor


@dataclass(frozen=True)
class PubState(ModelState):
    """Weights before the mask, moments of weights and masks, and the masks."""

    masks: Weights


class RandomGraph(NamedTuple):
    """Nodes of the public random graph, as `build_inputs` reads them."""

    x: Tensor
    edge_index: Tensor
    y: Tensor
    num_nodes: int
    edge_weight: Tensor | None = None


class FedPubClient(FedAvgClient[FedPubConfig]):
    """One client: its masks stay."""

    state: PubState
    learner: NodeLearner
    cohort: ClassVar[type[Cohort[Any]] | None] = None

    def initial_state(self) -> PubState:
        weights = super().initial_state().weights
        masks = {name: torch.ones_like(tensor) for name, tensor in weights.items() if tensor.dim() > 1}
        both = {**weights, **_named(masks)} if self.config.train_masks else weights
        return PubState(weights, fresh_state(self.config.optimizer, both), masks)

    @handler
    def report_update(self, own: OwnModel) -> Report:
        """E epochs on weights and masks from W_i, then the functional embedding."""
        self.learn(self.allowed(own.weights))
        weights = {name: self.state.weights[name] for name in own.weights}
        rows = self.learner.embedding(self.used(), self.random_inputs)
        return Report(weights, rows.mean(0))

    def learn(self, received: Weights) -> None:
        """CE(W * mu) + lambda_1 ||mu||_1 + lambda_2 ||W - W_received||_2."""
        config, state = self.config, self.state
        weights = {name: tensor.clone() for name, tensor in {**state.weights, **received}.items()}
        masks = {name: tensor.clone() for name, tensor in state.masks.items()}
        named = _named(masks) if config.train_masks else {}
        moments, dropout = state.optimizer.copy(), dropout_source(config, [self.stream])
        lr = config.rate(self.round)
        plan = step_plan(config.optimizer, moments.steps, config.local_epochs, lr, config.weight_decay, config.dtype)
        # Not isthmus.nn.train.local_epochs: a step is on two factors of each weight.
        for epoch in range(config.local_epochs):
            found, _ = gradients(
                self.learner.model,
                _masked(weights, masks),
                self.learner.inputs,
                loss=config.loss,
                dropout=dropout,
            )
            steps: dict[str, Tensor] = {}
            for name, gradient in found.items():
                mask = masks.get(name)
                steps[name] = gradient if mask is None else gradient * mask
                if config.terms and config.nearness and name in received and self.round > 1:
                    away = weights[name] - received[name]
                    length = away.norm()
                    if float(length) > 0.0:
                        steps[name] = steps[name] + config.nearness * away / length
                if mask is not None and config.train_masks:
                    steps[MASK + name] = gradient * weights[name]
                    if config.terms:
                        steps[MASK + name] += config.sparsity * mask.sign()
            moments = take_step({**weights, **named}, steps, moments, replace(plan, step=epoch))
        self.state = PubState(weights, moments, masks)

    def used(self) -> Weights:
        """Weights behind their masks, entries of which below ``sparsity`` are left out."""
        masks = {name: mask * (mask.abs() >= self.config.sparsity) for name, mask in self.state.masks.items()}
        return _masked(self.state.weights, masks)

    def logits(self) -> Tensor:
        return self.learner.logits(self.used())

    def export(self) -> Weights:
        return self.used()

    @cached_property
    def random_inputs(self) -> Inputs:
        """The public random graph, the same at every client."""
        graph = random_graph(self.config, self.data.num_features, self.common.child("random graph"))
        return build_inputs(graph, self.learner.model, dtype=self.config.dtype)


def random_graph(config: FedPubConfig, num_features: int, stream: Stream) -> RandomGraph:
    """Blocks without edges between them; inside a block every pair is linked with the same probability."""
    generator = stream.numpy()
    nodes, blocks = config.proxy_nodes, config.proxy_graphs
    chance = min(1.0, config.proxy_degree / max(1, nodes - 1))
    edges = []
    for block in range(blocks):
        upper = np.argwhere(np.triu(generator.random((nodes, nodes)) < chance, k=1)) + block * nodes
        edges += [upper, upper[:, ::-1]]
    x = torch.from_numpy(generator.standard_normal((nodes * blocks, num_features)))
    edge_index = torch.from_numpy(np.concatenate(edges).T.copy())
    return RandomGraph(x, edge_index, torch.zeros(nodes * blocks, dtype=torch.int64), nodes * blocks)


def _masked(weights: Weights, masks: Weights) -> dict[str, Tensor]:
    return {name: tensor * masks[name] if name in masks else tensor for name, tensor in weights.items()}


def _named(masks: Weights) -> dict[str, Tensor]:
    return {MASK + name: mask for name, mask in masks.items()}


def init(view: View, config: FedPubConfig, common: Stream) -> ServerState:
    first = first_models(view, config, common)
    count = len(first.clients)
    return ServerState(first.clients, first.models, torch.full((count, count), 1.0 / count))


def fedpub_round(state: ServerState, federation: Federation, config: FedPubConfig) -> tuple[ServerState, Log]:
    """Every client trains and reports; every client gets its own average."""
    reports = federation.call(FedPubClient.report_update, state.each(OwnModel))
    alpha = similarity([reports[client].embedding for client in state.clients], config.sharpness)
    models = [reports[client].weights for client in state.clients]
    after = tuple(weighted_mean(models, row) for row in alpha.tolist())  # W_i = sum_j alpha_ij W_j
    own = float(alpha.diagonal().mean())
    return ServerState(state.clients, after, alpha), {"own_share": own}


def similarity(embeddings: list[Tensor], sharpness: float) -> Tensor:
    """alpha: softmax over clients of tau times the cosine of embeddings. (K, K)"""
    rows = torch.nn.functional.normalize(torch.stack(embeddings).double(), dim=1)
    return torch.softmax(sharpness * (rows @ rows.T), dim=1)


def facts(state: ServerState, config: FedPubConfig, scenario: Any) -> Mapping[str, Any]:
    """How much of itself a client's average holds: 1 / K where similarities tell nothing apart."""
    own = state.alpha.diagonal()
    summary = f"a client's own model is {float(own.mean()):.0%} of its average (1 / K is {1 / len(own):.0%})"
    return {"summary": summary, "alpha": [[round(value, 4) for value in row] for row in state.alpha.tolist()]}


def script(config: FedPubConfig, view: View) -> Script:
    """The server reads every client's weights and embedding."""
    handler = scored(config, FedPubClient)
    each = handler is not FedPubClient.evaluate  # everybody gets its own model
    return {"train": (ask(FedPubClient.report_update, each=True),), "evaluation": (ask(handler, each=each),)}


METHOD = register(
    Method(
        name="fedpub",
        summary="an average of its own for every client, over clients whose models behave alike, behind personal masks",
        reference="Baek et al., Personalized Subgraph Federated Learning, ICML 2023",
        config=FedPubConfig,
        edge_weights=True,
        tasks=("node",),
        init=init,
        phases=(Phase("train", fedpub_round),),
        evaluate=score_own_models,
        roles={"client": Role(FedPubClient)},
        script=script,
        needs_single_updates=True,
        shared_values=lambda state: num_values(state.models[0]),
        facts=facts,
    )
)
