"""FedStruct -- Aliakbari, Östman & Graell i Amat, ICLR 2025, "Decoupled Subgraph Federated Learning",
https://arxiv.org/abs/2402.19163.

    paper                   here
    q_v = h_v + z_v         E1: `structure/client.py`, and `isthmus.nn.loss.Shifted` in training
    h = fGNN(X_i, E_i)      the backbone on the client's own nodes and edges: dgcn (as in the paper's tables) or sage
    z = Abar g(S)           E2: `isthmus.nn.structure`; Abar^[i] from `structure/powers.py`
    theta_f, theta_s        weights ``feature.*`` and ``structure.*``
    S (n x d_s)             `structure/features.py`; of HOP2VEC in `ServerState.nsf`, or a replica in every client's
                            `FedStructState.nsf`
    |Vt|, 1/|Vt| sum_i      `WeightedConfig.weighting` = train; `nodes` is the reference code's weighting (12.3)
    G_S                     `NsfStep.gradient`

Training is FedSGD: one averaged gradient per round, one Adam step at the server. The reference code steps an identical
Adam at every party (12.2); the trajectory is the same. S of HOP2VEC is held by the server (``nsf_at=server``) or
replicated (``nsf_at=clients``, the paper's 5.3: every client steps its copy on the same gradient and says the copy's
fingerprint, so that a drift stops the run). Both give the same bits.

# Differs from the paper: Adam in place of plain gradient descent, as its code does; plain descent with
``optimizer=sgd``. # Differs from the paper: protocol=hardened is the default (`structure/powers.py`),
protocol=published is as printed. Accuracy differs by how powers are cut only; without pruning both give the same
Abar. Numbering of columns and S's start are then secrets of their owners, so two hardened runs of one seed differ, as
two runs with noise do; a resumed run goes on with the same secrets. # Differs from the paper: in the direct form S has
a learning rate of its own and no weight decay. With the printed ones S hardly moves and nothing is gained from
structure (spec 13.14).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, Replies, View
from isthmus.federation.ledger import Disclosure
from isthmus.federation.roles import Role
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.structure.client import (
    Averaged,
    FedStructClient,
    Fingerprint,
    NsfBlock,
    NsfStep,
    Ready,
    Step,
    Task,
    assembled,
    check_replicas,
    first_weights,
)
from isthmus.methods.structure.config import NSF, STRUCTURE, FedStructConfig
from isthmus.methods.structure.directory import agree_on_edges, make_directory
from isthmus.methods.structure.powers import Structured, next_power, power_sheet
from isthmus.methods.training import Size, total_samples
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.nn.structure import StructureNet
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, num_values


@dataclass(frozen=True)
class ServerState(Record):
    """All the server remembers between rounds."""

    weights: Weights
    optimizer: OptimizerState
    total: float
    structured: Structured
    nsf: Tensor | None
    nsf_optimizer: OptimizerState


def init(view: View, config: FedStructConfig, common: Stream) -> ServerState:
    if not view.alike:
        raise ConfigError(
            "fedstruct classifies nodes of one graph: clients must have the same features and classes; try fedavg"
        )
    weights = first_weights(config, get_weights(config.first_model(view, common)), view.num_classes, common)
    nothing = OptimizerState((0,), {}, {})
    return ServerState(weights, fresh_state(config.optimizer, weights), 0.0, Structured(0, 0, 0, 0.0, 0), None, nothing)


def setup_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """|Vt|, the directory, and a look at both ends of every cross edge."""
    total = total_samples(federation)
    directory = make_directory(federation, config)
    agree_on_edges(federation, directory)
    return replace(state, total=total, structured=replace(state.structured, nodes=directory.owner.numel())), {}


def power_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """The next power (5.1)."""
    return replace(state, structured=next_power(state.structured, federation, config)), {}


def nsf_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """S once: to everybody, or to the server where it holds S."""
    if not config.learns_nsf or config.replicated:
        check_replicas(federation.exchange(FedStructClient.share_nsf, FedStructClient.take_nsf))
        return state, {}
    nsf = assembled(federation.call(FedStructClient.give_nsf), state.structured.nodes)
    return replace(state, nsf=nsf, nsf_optimizer=fresh_state(config.optimizer, {NSF: nsf})), {}


def train_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """5.2 and 5.3: one averaged gradient, one step."""
    if config.algorithm == "fedavg":
        total = federation.sum(FedStructClient.local_update, Task(state.weights, state.nsf, state.total))
        return replace(state, weights=total.weights, nsf=total.nsf), {}
    for _ in range(config.local_epochs):
        step = federation.sum(FedStructClient.gradient, Task(state.weights, state.nsf, state.total))
        weights, optimizer = config.stepped(state.weights, step.gradients, state.optimizer)
        state = replace(state, weights=weights, optimizer=optimizer)
        if step.nsf is None:
            continue
        if config.replicated:
            check_replicas(federation.call(FedStructClient.advance, NsfStep(step.nsf)))
        elif state.nsf is not None:
            nsf, nsf_optimizer = config.stepped_nsf(state.nsf, step.nsf, state.nsf_optimizer)
            state = replace(state, nsf=nsf, nsf_optimizer=nsf_optimizer)
    return state, {}


def evaluate(state: ServerState, federation: Federation, config: FedStructConfig) -> Replies[Evaluation]:
    """Every client scores the common model on its own nodes."""
    return federation.call(FedStructClient.deploy_all, Ready(state.weights, state.nsf))


def facts(state: ServerState, config: FedStructConfig, scenario: Any) -> dict[str, Any]:
    """What is left of the power after cutting, and the filter where it was learned."""
    known = state.structured
    told: dict[str, Any] = {
        "nodes": known.nodes,
        "entries_per_row": known.entries / known.nodes,
        "kept_row_mass": known.mass / known.nodes,
        "empty_rows": known.empty,
    }
    if config.train_betas:
        told["betas"] = state.weights[STRUCTURE + StructureNet.BETAS].tolist()
    return told


def sheet(config: FedStructConfig) -> tuple[Disclosure, ...]:
    """Who sees what. What remains visible in the hardened protocol is said in docs/methods/fedstruct.md."""
    lines = [Disclosure("setup", "client", "server", Size, "summed"), *power_sheet(config, "setup", "powers")]
    if config.learns_nsf and not config.replicated:
        lines.append(Disclosure("features", "client", "server", NsfBlock))
    else:
        lines += [
            Disclosure("features", "client", "client", NsfBlock),
            Disclosure("features", "client", "server", Fingerprint),
        ]
    lines.append(Disclosure("train", "server", "client", Task))
    lines.append(Disclosure("train", "client", "server", Step if config.algorithm == "fedsgd" else Averaged, "summed"))
    if config.replicated:
        lines += [
            Disclosure("train", "server", "client", NsfStep),
            Disclosure("train", "client", "server", Fingerprint),
        ]
    return (
        *lines,
        Disclosure("evaluation", "server", "client", Ready),
        Disclosure("evaluation", "client", "server", Evaluation),
    )


METHOD = register(
    Method(
        name="fedstruct",
        summary="feature branch on own edges, structure branch over all hops and owners, gradients summed",
        reference="Aliakbari, Östman & Graell i Amat, Decoupled Subgraph Federated Learning, ICLR 2025",
        config=FedStructConfig,
        tasks=("node",),
        init=init,
        phases=(
            Phase("setup", setup_round, rounds=1, setup=True),
            Phase("powers", power_round, rounds=lambda config: int(config.structure_hops), setup=True),
            Phase("features", nsf_round, rounds=1, setup=True),
            Phase("train", train_round),
        ),
        evaluate=evaluate,
        roles={"client": Role(FedStructClient)},
        discloses=sheet(FedStructConfig()),
        sheet=sheet,
        preset="fedstruct",
        cross_edges=True,
        shared_values=lambda state: num_values(state.weights) + (0 if state.nsf is None else state.nsf.numel()),
        facts=facts,
    )
)
