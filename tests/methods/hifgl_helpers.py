"""HiFGL on small graphs, exchange by exchange, and the dense computation it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from faults import Fault
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.messages import address
from isthmus.methods.hifgl.algorithm import Devices, ServerState, Silo, setup_round, train_round
from isthmus.methods.hifgl.messages import Common, Down, Pass
from isthmus.methods.hifgl.method import protocol
from isthmus.tensors import Weights

SMALL = "csbm:nodes=48,classes=3,features=9,degree=4"


def small(clients: int = 3, dataset: str = SMALL, seed: int = 5) -> Scenario:
    return build_scenario(dataset=dataset, clients=clients, split="40/20/40", seed=seed)


def experiment_of(
    scenario: Scenario, *, engine: type[LocalEngine] = LocalEngine, plan: Sequence[Fault] | None = None, **settings: Any
) -> SimulatedRun:
    given = {
        "preset": "hifgl",
        "hidden": (6,),
        "one_neighbour": "allow",
        "rounds": 3,
        "precision": "float64",
        "clients": len(scenario.parts),
    }
    options: dict[str, Any] = {} if plan is None else {"plan": plan}
    return SimulatedRun(
        resolve("hifgl", {"dataset": "csbm", "seed": 5, **given, **settings}), scenario, engine=engine, **options
    )


class Driver:
    """A federation at hand: setup done, one training pass at a time."""

    def __init__(self, scenario: Scenario, **settings: Any) -> None:
        self.experiment = experiment_of(scenario, **settings)
        self.config: Any = self.experiment.settings.method_config
        self.session = self.experiment.loop.session
        self.state: Any = self.experiment.loop.state
        self.session.clock.begin("setup", 1, 1)
        self.secmp = protocol(self.config)
        self.state, _ = setup_round(self.state, self.session, self.secmp)

    @property
    def silos(self) -> tuple[str, ...]:
        return self.session.clients

    def devices(self, silo: str) -> Devices[Any]:
        client: Any = self.experiment.engine.party(address(silo, "device")).client
        assert isinstance(client, Devices)
        return client

    def silo(self, silo: str) -> Silo[Any]:
        client: Any = self.experiment.engine.party(silo).client
        assert isinstance(client, Silo)
        return client

    def differentiate(self) -> None:
        """Forward and backward with the server's weights; gradients stay at the devices."""
        session, state, config, round = self.session, self.state, self.config, self.state.round + 1
        session.clock.begin("train", state.round + 1, state.round + 2)
        if config.mode == "cross-device":
            session.tier("device").call(Devices.take, Down(state.weights, 1.0, True))
        else:
            session.call(Silo.begin, Common(state.weights, state.labelled, state.silos, len(self.silos), config.lr))
            session.exchange(Silo.hand_down, Devices.take_model)
        plan = config.plan(state.features, state.classes)
        for backward, widths in ((False, plan.forward), (True, plan.backward)):
            for layer, width in widths.items():
                self.secmp.sum_over_neighbours(state, session, Pass(round, layer, backward, False, 0, width))

    def round(self) -> ServerState:
        self.session.clock.begin("train", self.state.round + 1, self.state.round + 2)
        self.state, self.log = train_round(self.state, self.session, self.secmp)
        return self.state

    def logits(self) -> Tensor:
        """Of all devices, by node id."""
        out = torch.zeros(sum(self.devices(silo).where.count for silo in self.silos), 3, dtype=torch.float64)
        for silo in self.silos:
            devices = self.devices(silo)
            out[devices.data.node_id] = devices.scratch.model.logits.double()
        return out

    def gradients(self) -> dict[str, Tensor]:
        """Sum over all devices."""
        models = [self.devices(silo).scratch.model for silo in self.silos]
        return {name: torch.stack([model.gradients[name] for model in models]).sum(0) for name in models[0].gradients}


def matrix_of(kind: str, data: NodeData) -> Tensor:
    """The propagation matrix in double precision, written out."""
    source, target = data.edge_index
    counts = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    counts.index_put_((target, source), torch.ones(source.numel(), dtype=torch.float64), accumulate=True)
    if kind == "sage":
        return counts / counts.sum(1, keepdim=True).clamp(min=1.0)
    counts.fill_diagonal_(1.0)
    scale = counts.sum(1).rsqrt()
    return scale[:, None] * counts * scale


def dense_logits(kind: str, data: NodeData, weights: Weights, matrix: Tensor | None = None) -> Tensor:
    """The model of the whole graph in one place."""
    a = matrix_of(kind, data) if matrix is None else matrix
    h = data.x.to_dense().double() if data.x.layout != torch.strided else data.x.double()
    layers = 1 + max(int(name.split(".")[1]) for name in weights)
    for layer in range(layers):
        if kind == "gcn":
            p = a @ h @ weights[f"layers.{layer}.weight"]
        else:
            p = a @ h @ weights[f"layers.{layer}.neighbour"] + h @ weights[f"layers.{layer}.root"]
        p = p + weights[f"layers.{layer}.bias"]
        h = torch.relu(p)
    return p


def silo_balanced_loss(logits: Tensor, scenario: Scenario) -> Tensor:
    """Mean over silos of the mean over their labelled devices."""
    losses = [
        torch.nn.functional.cross_entropy(logits[part.node_id[part.train]], part.y[part.train])
        for part in scenario.parts.values()
        if bool(part.train.any())
    ]
    return torch.stack(losses).mean()


def dense_gradients(kind: str, scenario: Scenario, weights: Weights, *, pooled: bool = False) -> dict[str, Tensor]:
    leaves = {name: tensor.double().clone().requires_grad_() for name, tensor in weights.items()}
    logits = dense_logits(kind, scenario.whole, leaves)
    whole = scenario.whole
    loss = (
        torch.nn.functional.cross_entropy(logits[whole.train], whole.y[whole.train])
        if pooled
        else silo_balanced_loss(logits, scenario)
    )
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def with_edges(scenario: Scenario, edges: list[tuple[int, int]], clients: int = 3) -> Scenario:
    """The same nodes with other arcs, given one by one."""
    from isthmus.data.split_graph import split_graph

    whole = replace(scenario.whole, edge_index=torch.tensor(edges).T.reshape(2, -1))
    owner = torch.empty(whole.num_nodes, dtype=torch.int64)
    for number, part in enumerate(scenario.parts.values()):
        owner[part.node_id] = number
    return replace(scenario, whole=whole, parts=split_graph(whole, owner, tuple(scenario.parts)))
