r"""Ditto -- Li, Hu, Beirami & Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
https://arxiv.org/abs/2012.04221, Algorithm 1.

    paper        here
    w            DittoState.shared, Update    federated model, trained and averaged as in FedAvg
    v_k          DittoState.weights           personal model, never leaves; what a client is scored with and ends with
    lambda       pull                         how strongly v_k is pulled to w
    eta          lr                           of both models

One round at a client: E steps on w from what was received, as in FedAvg, and E steps on v of

.. math::
    F_k(v_k) + \frac{\lambda}{2} \lVert v_k - w \rVert^2

with w as it was received. The messages are FedAvg's, and so is the way w goes, whatever ``pull`` is: FedAvg scores it.
With ``pull=0`` v is Local's model. Under Adam the pull is rescaled like every gradient, so values are not comparable
with SGD's.

# Differs from the authors' code: they alternate single steps on v and w; both read only the received w, so the order
changes nothing. They average the drawn clients' updates with equal weights; here as ``weighting`` says, so that w is
FedAvg's. Which lambda is best on validation is left to a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask
from isthmus.methods import fedavg
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedavg import Broadcast, FedAvgClient, FedAvgConfig, ServerState, Update
from isthmus.methods.registry import register
from isthmus.methods.training import NoisyState
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.nn.train import Proximal
from isthmus.tensors import Weights


@dataclass(frozen=True)
class DittoConfig(FedAvgConfig):
    """Settings of Ditto.

    Args:
        pull: Weight lambda of the distance between the personal and the received model; 0 is Local.
    """

    own_start: ClassVar[bool] = True
    scores_after_local: ClassVar[bool] = False
    mini_batches: ClassVar[bool] = True
    pull: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pull < 0.0:
            raise ConfigError(f"pull must be at least 0, got {self.pull}")
        if self.optimizer == "sgd" and self.lr * self.pull > 2.0:
            raise ConfigError(
                f"with sgd steps of lr={self.lr} and pull={self.pull} overshoot and diverge: keep lr * pull below 2"
            )


@dataclass(frozen=True)
class DittoState(NoisyState):
    """``weights`` and ``optimizer`` are the personal model's, ``shared`` and ``shared_optimizer`` those of the
    federated one.
    """

    shared: Weights
    shared_optimizer: OptimizerState


class DittoClient(FedAvgClient[DittoConfig]):
    """One client: shares w, keeps v."""

    state: DittoState
    cohort: ClassVar[type[Cohort[Any]] | None] = None

    def initial_state(self) -> DittoState:
        state = super().initial_state()
        secret = state.secret if isinstance(state, NoisyState) else b""
        again = fresh_state(self.config.optimizer, state.weights)
        return DittoState(state.weights, state.optimizer, secret, state.weights, again)

    @handler
    def local_update(self, common: Broadcast) -> Update:
        """E steps on v, pulled to the received w; then FedAvg's on w."""
        before, anchor = self.state, {**self.state.shared, **self.allowed(common.weights)}
        pull = Proximal(self.config.pull, anchor) if self.config.pull else None
        # Same dropout masks for both: w goes where FedAvg's goes, and without pull v goes where Local's goes.
        own = self.learner.train(
            before.weights, before.optimizer, self.stream, pull, (), lr=self.config.rate(self.round)
        )
        self.state = replace(before, weights=before.shared, optimizer=before.shared_optimizer)
        update: Update = super().local_update(common)
        trained = self.state
        self.state = DittoState(own.weights, own.optimizer_state, before.secret, trained.weights, trained.optimizer)
        return update


def evaluate(state: ServerState, federation: Federation, config: DittoConfig) -> Mapping[PartyId, Evaluation]:
    """Every client scores its personal model."""
    return scores_of(federation, DittoClient.evaluate)


def script(config: DittoConfig, view: View) -> Script:
    """FedAvg's, but that personal models are scored."""
    return {**fedavg.script(config, view), "evaluation": (ask(DittoClient.evaluate),)}


METHOD = register(
    replace(
        fedavg.METHOD,
        name="ditto",
        summary="a personal model at each client, pulled to the one FedAvg trains",
        reference=(
            "Li, Hu, Beirami & Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
        ),
        config=DittoConfig,
        evaluate=evaluate,
        script=script,
        roles={"client": Role(DittoClient)},
    )
)
