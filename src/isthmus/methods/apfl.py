r"""APFL -- Deng, Kamani & Mahdavi, Adaptive Personalized Federated Learning, 2020, https://arxiv.org/abs/2003.13461,
Algorithm 1.

    paper        here
    w_i          APFLState.shared, Update     federated copy, averaged as in FedAvg
    v_i          APFLState.private            private model, never leaves
    alpha_i      APFLState.alpha              how much of the private one is deployed, in [0, 1]
    vbar_i       APFLState.weights            alpha v + (1 - alpha) w: what a client is scored with and ends with
    eta          lr                           also the step of alpha (``alpha_lr`` overrides)

One local step is

.. math::
    w \leftarrow w - \eta \nabla f(w), \qquad v \leftarrow v - \eta\, \alpha \nabla f(\bar v), \quad \bar v = \alpha v +
    (1 - \alpha) w

with :math:`\bar v` of before the step, and once per round, at its first step,
:math:`\alpha \leftarrow \mathrm{clip}(\alpha - \eta_\alpha \langle v - w, \nabla f(\bar v) \rangle, 0, 1)`. Both have
their own optimiser (with Adam the factor alpha in front of v's gradient mostly cancels; with SGD it counts).

# Differs from public implementations: they mix outputs in place of parameters, update v against the w of after the
step, and add 0.02 alpha to alpha's gradient. This is the paper's form; mixing outputs is not offered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ask, total
from isthmus.methods import fedavg
from isthmus.methods.averaging import update_line
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.fedavg import Broadcast, FedAvgConfig, ServerState, Update
from isthmus.methods.learners import dropout_source
from isthmus.methods.registry import Log, Phase, register
from isthmus.methods.training import Deployed, ModelState, WeightedClient
from isthmus.nn.optim import OptimizerState, fresh_state, step_plan, take_step
from isthmus.nn.train import gradients, train_locally
from isthmus.tensors import Weights, scaled


@dataclass(frozen=True)
class APFLConfig(FedAvgConfig):
    """Settings of APFL.

    Args:
        mixing: alpha_0, in [0, 1].
        adaptive: Learn alpha; otherwise it stays ``mixing`` (0: what is deployed is FedAvg's model, 1: Local's).
        alpha_lr: Step size of alpha; not given = ``lr``.
    """

    own_start: ClassVar[bool] = True
    scores_after_local: ClassVar[bool] = False
    mixing: float = 0.5
    adaptive: bool = True
    alpha_lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.mixing <= 1.0:
            raise ConfigError(f"mixing must lie in [0, 1], got {self.mixing}")
        if self.alpha_lr is not None and self.alpha_lr < 0.0:
            raise ConfigError(f"alpha_lr must be at least 0, got {self.alpha_lr}")
        if self.dp_clip or self.fraction < 1.0 or self.reset_optimizer:
            raise ConfigError("apfl has neither dp_clip nor fraction nor reset_optimizer: leave them out")


@dataclass(frozen=True)
class APFLState(ModelState):
    """``weights`` is the deployed mixture, ``optimizer`` that of the shared copy."""

    shared: Weights
    private: Weights
    private_optimizer: OptimizerState
    alpha: float


class APFLClient(WeightedClient[APFLConfig]):
    """One client: shares w, keeps v and alpha."""

    def initial_state(self) -> APFLState:
        state = super().initial_state()
        first = state.weights
        private = fresh_state(self.config.optimizer, first)
        return APFLState(first, state.optimizer, first, first, private, self.config.mixing)

    @handler
    def local_update(self, common: Broadcast) -> Update:
        """E steps on w and v side by side, and one on alpha."""
        learner: Any = self.learner
        config, state, lr = self.config, self.state, self.config.rate(self.round)
        assert isinstance(state, APFLState)
        shared, private, alpha = {**state.shared, **common.weights}, dict(state.private), state.alpha
        shared_state, private_state = state.optimizer, state.private_optimizer.copy()
        # Same masks for both: w goes where FedAvg's goes, and with alpha = 1 v goes where Local's goes.
        shared_dropout, private_dropout = (dropout_source(config, [self.stream]) for _ in range(2))
        plans = step_plan(
            config.optimizer, private_state.steps, config.local_epochs, lr, config.weight_decay, config.dtype
        )
        private = {name: tensor.clone() for name, tensor in private.items()}
        # Not isthmus.nn.train.local_epochs: steps of two models alternate, each reading the other.
        for epoch in range(config.local_epochs):
            mixture = mixed(private, shared, alpha)
            grads, _ = gradients(learner.model, mixture, learner.inputs, loss=config.loss, dropout=private_dropout)
            if epoch == 0 and config.adaptive:
                slope = sum(float(((private[name] - shared[name]) * grad).sum()) for name, grad in grads.items())
                after = alpha - (lr if config.alpha_lr is None else config.alpha_lr) * slope
            private_state = take_step(private, scaled(grads, alpha), private_state, replace(plans, step=epoch))
            result = train_locally(
                learner.model,
                shared,
                shared_state,
                learner.inputs,
                epochs=1,
                lr=lr,
                weight_decay=config.weight_decay,
                optimizer=config.optimizer,
                loss=config.loss,
                dropout=shared_dropout,
            )
            shared, shared_state = result.weights, result.optimizer_state
            if epoch == 0 and config.adaptive:
                alpha = min(1.0, max(0.0, after))
        self.state = APFLState(mixed(private, shared, alpha), shared_state, shared, private, private_state, alpha)
        share = self.samples() / common.total
        return Update(scaled({name: shared[name] for name in common.weights}, share), share)

    @handler
    def deploy(self, common: Deployed) -> Evaluation:
        """Mix the common w with the own v, and score that."""
        state = self.state
        assert isinstance(state, APFLState)
        shared = {**state.shared, **common.weights}
        self.state = replace(state, shared=shared, weights=mixed(state.private, shared, state.alpha))
        return self.evaluate()


def mixed(private: Weights, shared: Weights, alpha: float) -> dict[str, Tensor]:
    """vbar = alpha v + (1 - alpha) w; the ends exactly."""
    if alpha in (0.0, 1.0):
        return dict(private if alpha else shared)
    return {name: alpha * private[name] + (1.0 - alpha) * shared[name] for name in private}


def apfl_round(state: ServerState, federation: Federation, config: APFLConfig) -> tuple[ServerState, Log]:
    """The server averages w; alphas and private models are none of its business."""
    if config.bounds:
        return fedavg.bounded_round(state, federation, config, APFLClient.local_update)
    total = federation.sum(APFLClient.local_update, Broadcast(state.weights, state.total))
    return replace(state, round=state.round + 1, weights=total.weights), {}


def script(config: APFLConfig, view: View) -> Script:
    """As FedAvg's."""
    return {
        "setup": (total(APFLClient.size),),
        "train": (update_line(APFLClient.local_update, config, view),),
        "evaluation": (ask(APFLClient.deploy),),
    }


METHOD = register(
    replace(
        fedavg.METHOD,
        name="apfl",
        summary="a private and a federated model at each client, mixed by a weight it learns",
        reference="Deng, Kamani & Mahdavi, Adaptive Personalized Federated Learning, 2020",
        own_backbones=False,
        config=APFLConfig,
        tasks=("node",),
        phases=(Phase("setup", fedavg.count_round, rounds=1, setup=True), Phase("train", apfl_round)),
        roles={"client": Role(APFLClient)},
        script=script,
        privacy=None,
    )
)
