"""SCAFFOLD -- Karimireddy et al., ICML 2020, https://arxiv.org/abs/1910.06378, Algorithm 1: control variates that keep
clients with different data from drifting apart during local training. A method whose clients remember something.

paper      here
x          ServerState.weights     the common model
c          ServerState.control     mean of the clients' control variates
c_i        ScaffoldState.control   stays with client i between rounds
y_i        Update.weights          what client i ends its K local steps with
eta_g      server_lr

c_i is the gradient of client i at the common model (option I of the paper), which holds for every optimiser; option II
reads it off the distance walked, which is right for plain SGD only. All clients take part in every round, so that
x + eta_g mean(y_i - x) and c + mean(c_i' - c_i) need nothing but the sums of y_i and of c_i'.
"""

from dataclasses import dataclass, replace

import torch

import isthmus.methods as fl


@dataclass(frozen=True)
class ScaffoldConfig(fl.TrainConfig):
    """Settings of SCAFFOLD.

    Args:
        server_lr: Step of the server towards the mean of the clients' models (eta_g); 1 takes the mean.
    """

    server_lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.server_lr <= 1.0:
            raise fl.ConfigError(f"server_lr must lie in (0, 1], got {self.server_lr}")


@dataclass(frozen=True)
class Broadcast(fl.Message):
    """x and c."""

    weights: fl.Model[fl.Weights]
    control: fl.Gradient[fl.Weights]


@dataclass(frozen=True)
class Update(fl.Message):
    """y_i and the new c_i; the server is given their sums over clients."""

    weights: fl.Model[fl.Weights]
    control: fl.Gradient[fl.Weights]


@dataclass(frozen=True)
class ServerState(fl.Record):
    weights: fl.Weights
    control: fl.Weights


@dataclass(frozen=True)
class ScaffoldState(fl.ModelState):
    """A client's model, its optimiser and c_i: all it remembers between rounds, and all its checkpoints hold."""

    control: fl.Weights


class ScaffoldClient(fl.ModelClient[ScaffoldConfig]):
    state: ScaffoldState

    def initial_state(self) -> ScaffoldState:
        first = super().initial_state()
        return ScaffoldState(first.weights, first.optimizer, zeros_like(first.weights))

    def extra_gradient(self, received: fl.Weights) -> fl.ExtraGradient:
        """c - c_i, added to the gradient of every local step."""
        own, common = self.state.control, self.scratch.control  # scratch lives for one round

        def add(weights: fl.Weights, gradients: fl.Weights) -> None:
            for name, gradient in gradients.items():
                gradient.add_(common[name] - own[name])

        return add

    @fl.handler
    def local_update(self, common: Broadcast) -> Update:
        self.scratch.control = common.control
        control = self.learner.gradients(common.weights, self.stream)  # c_i' = g_i(x)
        trained = self.train(common.weights, received=common.weights)  # y_i <- y_i - eta_l (g_i(y_i) - c_i + c)
        self.state = replace(self.state, weights=trained.weights, optimizer=trained.optimizer, control=control)
        return Update(self.state.weights, control)


def zeros_like(weights: fl.Weights) -> fl.Weights:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def init(view: fl.View, config: ScaffoldConfig, common: fl.Stream) -> ServerState:
    weights = fl.first_global_model(view, config, common).weights
    return ServerState(weights, zeros_like(weights))


def scaffold_round(state: ServerState, federation: fl.Federation, config: ScaffoldConfig) -> tuple[ServerState, fl.Log]:
    total = federation.sum(ScaffoldClient.local_update, Broadcast(state.weights, state.control))
    share = 1.0 / len(federation.clients)
    mean, control = fl.scaled(total.weights, share), fl.scaled(total.control, share)  # c <- mean of c_i'
    weights = {name: x.lerp(mean[name], config.server_lr) for name, x in state.weights.items()}  # x + eta_g (mean - x)
    return ServerState(weights, control), {}


METHOD = fl.register(
    fl.Method(
        name="scaffold",
        summary="FedAvg with control variates against client drift",
        reference="Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
        config=ScaffoldConfig,
        init=init,
        phases=(fl.Phase("train", scaffold_round),),
        roles={"client": fl.Role(ScaffoldClient)},
        discloses=(
            fl.Disclosure("train", "server", "client", Broadcast),
            fl.Disclosure("train", "client", "server", Update, "summed"),
            *fl.EVALUATION_SHEET,
        ),
    )
)
