r"""MOON -- Li, He & Song, Model-Contrastive Federated Learning, CVPR 2021, https://arxiv.org/abs/2103.16257,
Algorithm 1.

    paper        here
    w^t          Broadcast.weights        the received global model
    w_i^{t-1}    MoonState.previous       the client's own model of the last round it took part in
    z, z_glob, z_prev                     embeddings of a node by the three models: what the last layer is given
    mu           mu
    tau          temperature

FedAvg with a contrastive term in the clients' loss, over nodes v:

.. math::
    \mu \,\frac{1}{n} \sum_v -\log \frac{\exp(\cos(z, z_{glob}) / \tau)}{\exp(\cos(z, z_{glob}) / \tau) +
    \exp(\cos(z, z_{prev}) / \tau)}

z_glob and z_prev are constants of a round, computed without dropout. Where both models are the same (the first round, a
client alone) the term has no gradient and is left out. The messages are FedAvg's. A row of zeros has cosine 0.

# Differs from the authors' code: no projection head is put on the model, since it would be another model than that of
the methods it is compared with. The optimiser's state is kept over rounds as in FedAvg (``reset_optimizer=true`` is the
authors').
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.roles import Cohort, Role
from isthmus.methods import fedavg
from isthmus.methods.fedavg import FedAvgClient, FedAvgConfig
from isthmus.methods.learners import EmbeddingTerm, NodeLearner
from isthmus.methods.registry import register
from isthmus.methods.training import ModelState, NoisyState
from isthmus.nn.inputs import Inputs
from isthmus.tensors import Weights, equal_weights


@dataclass(frozen=True)
class MoonConfig(FedAvgConfig):
    """Settings of MOON.

    Args:
        mu: Weight of the contrastive term; 0 is FedAvg.
        temperature: tau, temperature of the contrastive term.
        contrast: Nodes the term is a mean over: all of the client's, or the ``train`` nodes.
    """

    own_start: ClassVar[bool] = True
    scores_dropped: ClassVar[bool] = True
    mu: float = 1.0
    temperature: float = 0.5
    contrast: Literal["all", "train"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0.0:
            raise ConfigError(f"mu must be at least 0, got {self.mu}")
        if self.temperature <= 0.0:
            raise ConfigError(f"temperature must be above 0, got {self.temperature}")


@dataclass(frozen=True)
class MoonState(NoisyState):
    """FedAvg's state, and the client's own model of last time."""

    previous: Weights


class MoonClient(FedAvgClient[MoonConfig]):
    """A FedAvg client whose embeddings stay near the global model's and away from its own of last round."""

    state: MoonState
    learner: NodeLearner
    cohort: ClassVar[type[Cohort[Any]] | None] = None

    def initial_state(self) -> MoonState:
        state = super().initial_state()
        secret = state.secret if isinstance(state, NoisyState) else b""
        return MoonState(state.weights, state.optimizer, secret, state.weights)

    def train(self, weights: Weights, received: Weights) -> ModelState:
        """FedAvg's epochs, with the contrastive term where it has a gradient."""
        previous = self.state.previous
        self.scratch.term = None
        if self.config.mu and not equal_weights(weights, previous):
            self.scratch.term = self.contrast(weights, previous)
        trained = super().train(weights, received)
        assert isinstance(trained, MoonState)
        return replace(trained, previous=trained.weights)

    def term(self) -> EmbeddingTerm | None:
        term: EmbeddingTerm | None = self.scratch.term
        return term

    def contrast(self, common: Weights, previous: Weights) -> EmbeddingTerm:
        """mu l_con, with z_glob and z_prev of this round."""
        config, everywhere = self.config, self.config.contrast == "all"
        inputs = self.learner.whole if everywhere else self.learner.inputs
        rows = inputs.counts[0]
        anchor, repelled = (
            unit_rows(self.learner.embedding(weights, inputs)[:rows]).detach() for weights in (common, previous)
        )

        def value(embedding: Tensor, inputs: Inputs) -> Tensor:
            z = unit_rows(embedding[:rows])
            nearer = ((z * repelled).sum(1) - (z * anchor).sum(1)) / config.temperature
            # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a))
            return config.mu * torch.nn.functional.softplus(nearer).mean().view(1)

        return EmbeddingTerm(value, everywhere=everywhere)


def unit_rows(z: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays zero, without a gradient."""
    norm = z.norm(dim=1, keepdim=True)
    unit: Tensor = z * (norm > 0) / norm.clamp(min=torch.finfo(z.dtype).tiny)
    return unit


METHOD = register(
    replace(
        fedavg.METHOD,
        name="moon",
        summary="FedAvg with a contrastive term: embeddings near the global model's, away from the client's last",
        reference="Li, He & Song, Model-Contrastive Federated Learning, CVPR 2021",
        config=MoonConfig,
        tasks=("node",),
        own_backbones=False,
        roles={"client": Role(MoonClient)},
    )
)
