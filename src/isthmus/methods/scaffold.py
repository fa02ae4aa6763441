r"""SCAFFOLD -- Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020,
https://arxiv.org/abs/1910.06378, Algorithm 1: control variates that keep clients with different data from drifting
apart during local training.

    paper        here
    x            ServerState.weights      the common model
    c            ServerState.control      mean of the clients' control variates
    c_i          ScaffoldState.control    stays with client i between rounds
    y_i - x      Update.change            how far client i went in its K local steps
    c_i^+ - c_i  Update.control_change
    eta_l        lr
    eta_g        server_lr
    K            steps of a round         local_epochs with full batches, more with batches of graphs
    S, N         fraction of the clients, all clients

A local step is :math:`y_i \leftarrow y_i - \eta_l (g_i(y_i) - c_i + c)`, afterwards

.. math::
    c_i^+ = g_i(x) \quad \text{(option I)} \qquad \text{or} \qquad c_i^+ = c_i - c + \frac{x - y_i}{K \eta_l} \quad
    \text{(option II)}

with weight decay counted in both (not adamw's, which is no part of a gradient). The server takes :math:`x + \eta_g
\frac{1}{|S|} \sum_S (y_i - x)` and :math:`c + \frac{1}{N} \sum_S (c_i^+ - c_i)`: sums suffice.

Option II reads the mean gradient off the distance walked, which is right for plain SGD only: under Adam a step is about
``lr`` long whatever the gradient, and the correction would be far larger than the gradient. So ``option=auto`` is II
for SGD and I for Adam, and II with Adam is refused.

# Differs from public ports: they take option II with Adam (``option=ports``), and weight changes by the clients' nodes;
here every client counts the same in both sums, as in the paper, without which c is not the mean of all c_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Gradient, Message, Model
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ask
from isthmus.methods.averaging import drawn_line
from isthmus.methods.fedavg import chosen_clients, drawn
from isthmus.methods.global_model import first_global_model
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import WHOLE_MODEL, ModelClient, ModelState, TrainConfig
from isthmus.nn.train import ExtraGradient
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights


@dataclass(frozen=True)
class ScaffoldConfig(TrainConfig):
    """Settings of SCAFFOLD.

    Args:
        server_lr: Step of the server along the mean of the clients' changes (eta_g); 1 takes the mean of their models.
        option: How a client renews its control variate: ``I`` by its gradient at the common model, ``II`` by the
            distance it walked (plain SGD only), ``auto`` by the optimiser; ``ports`` is II whatever the optimiser, as
            public ports have it, to compare with them.
        fraction: Share of the clients drawn in a round, in (0, 1]; behind masks one of the fixed groups (`averaging`).
    """

    server_lr: float = 1.0
    option: Literal["auto", "I", "II", "ports"] = "auto"
    fraction: float = 1.0

    def idle(self) -> dict[str, str]:
        return super().idle() | {"first_weights": WHOLE_MODEL}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_lr <= 0.0:
            raise ConfigError(f"server_lr must be above 0, got {self.server_lr}")
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"fraction must lie in (0, 1], got {self.fraction}")
        if self.option == "II" and self.optimizer != "sgd":
            raise ConfigError(
                f"option=II reads gradients off the distance walked, which {self.optimizer} does not tell: use "
                "optimizer=sgd, or option=I"
            )

    @property
    def by_distance(self) -> bool:
        """Option II."""
        return self.option in ("II", "ports") or (self.option == "auto" and self.optimizer == "sgd")


@dataclass(frozen=True)
class Broadcast(Message):
    """x and c."""

    weights: Model[Weights]
    control: Gradient[Weights]


@dataclass(frozen=True)
class Update(Message):
    """y_i - x and c_i^+ - c_i: the server is given their sums over clients."""

    change: Model[Weights]
    control_change: Gradient[Weights]


@dataclass(frozen=True)
class ServerState(Record):
    weights: Weights
    control: Weights


@dataclass(frozen=True)
class ScaffoldState(ModelState):
    """A client's model, its optimiser and c_i."""

    control: Weights


@dataclass(frozen=True)
class Correction:
    """c - c_i, added to the gradient of every local step."""

    common: Weights
    own: Weights

    def __call__(self, weights: Weights, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            gradient.add_(self.common[name] - self.own[name])


class ScaffoldClient(ModelClient[ScaffoldConfig]):
    """One client: its control variate stays."""

    state: ScaffoldState

    def initial_state(self) -> ScaffoldState:
        first = super().initial_state()
        return ScaffoldState(first.weights, first.optimizer, zeros_like(first.weights))

    def extra_gradient(self, received: Weights) -> ExtraGradient:
        return Correction(self.scratch.control, self.state.control)  # scratch lives for one round

    @handler
    def local_update(self, common: Broadcast) -> Update:
        """K corrected steps from x, and a new control variate."""
        self.scratch.control = common.control
        x, before = self.allowed(common.weights), self.state.control
        trained = self.train(x, received=x)  # y_i <- y_i - eta_l (g_i(y_i) - c_i + c)
        change = {name: trained.weights[name] - tensor for name, tensor in x.items()}
        steps = trained.optimizer.steps[0] - self.state.optimizer.steps[0]
        after: Weights
        if self.config.by_distance and steps:  # c_i^+ = c_i - c + (x - y_i) / (K eta_l)
            walked = 1.0 / (steps * self.config.rate(self.round))
            after = {name: before[name] - common.control[name] - change[name] * walked for name in x}
        else:  # c_i^+ = g_i(x)
            after = self.gradient(x)
        self.state = replace(self.state, weights=trained.weights, optimizer=trained.optimizer, control=after)
        return Update(change, {name: after[name] - before[name] for name in x})

    def gradient(self, weights: Weights) -> Weights:
        """g_i as a step has it: with weight decay, which adamw keeps out of it."""
        gradients = self.learner.gradients(weights, self.stream)
        decay = 0.0 if self.config.optimizer == "adamw" else self.config.weight_decay
        return {name: gradients[name] + decay * tensor for name, tensor in weights.items()}


def zeros_like(weights: Weights) -> Weights:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def init(view: View, config: ScaffoldConfig, common: Stream) -> ServerState:
    weights = first_global_model(view, config, common).weights
    return ServerState(weights, zeros_like(weights))


def scaffold_round(state: ServerState, federation: Federation, config: ScaffoldConfig) -> tuple[ServerState, Log]:
    """The server moves the common model and the mean control variate by what the drawn clients report."""
    chosen = chosen_clients(federation, config.fraction)
    added = federation.sum(ScaffoldClient.local_update, Broadcast(state.weights, state.control), to=chosen)
    step, share = config.server_lr / len(chosen), 1.0 / len(federation.clients)
    weights = {name: x.add(added.change[name], alpha=step) for name, x in state.weights.items()}
    control = {name: c.add(added.control_change[name], alpha=share) for name, c in state.control.items()}
    return ServerState(weights, control), {}


def script(config: ScaffoldConfig, view: View) -> Script:
    """Sums of changes in every round."""
    return {
        "train": (drawn_line(ScaffoldClient.local_update, view, drawn(len(view.clients), config.fraction)),),
        "evaluation": (ask(ScaffoldClient.deploy),),
    }


METHOD = register(
    Method(
        name="scaffold",
        summary="FedAvg with control variates against client drift",
        reference="Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
        config=ScaffoldConfig,
        init=init,
        phases=(Phase("train", scaffold_round),),
        roles={"client": Role(ScaffoldClient)},
        edge_weights=True,
        own_backbones=True,
        script=script,
    )
)
