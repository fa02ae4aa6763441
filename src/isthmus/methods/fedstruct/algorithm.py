"""FedStruct -- Aliakbari, Östman & Graell i Amat, ICLR 2025, "Decoupled Subgraph Federated Learning",
https://arxiv.org/abs/2402.19163.

One graph is split over clients that know the edges between them but not each other's features. A client classifies a
node from its own features over its own edges, and from the node's place in the whole graph:

    q_v = h_v + z_v,  yhat_v = softmax(q_v)                                                                     (E1)
    z_v = sum_u Abar_vu g(s_u),  Abar = sum_l beta_l Ah^l,  Ah = Dt^-1 (A + I)                                  (E2)
    L = 1/|Vt| sum_i L_i,  L_i = sum over client i's training nodes v of CE(y_v, yhat_v)                        (E3)

    paper                  here
    h = fGNN(X_i, E_i)     the backbone on the client's own nodes and edges: dgcn (the paper's tables) or sage
    g                      `isthmus.nn.structure.StructureNet`, with the gradients of Props. 2 and 3
    theta_f, theta_s       weights ``feature.*`` and ``structure.*``
    [Ah^l]^[i], Abar^[i]   `FedStructState.power`, `FedStructState.combined`: client i's rows (`powers.py`)
    S (n x d_s)            `features.py`; HOP2VEC's in `ServerState.nsf`, or a replica in every `FedStructState.nsf`
    |Vt|, 1/|Vt| sum_i     `ServerState.total`, ``weighting=train``; ``nodes`` is the reference code's weighting (12.3)
    G_S                    `NsfStep.gradient`

This file has the algorithm in the paper's order: setup (5.1), training (5.2 to 5.4), evaluation. Numbers are sections
of the specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.federation.interface import Federation, Stacked, View
from isthmus.federation.messages import Count, Embedding, Gradient, Identifier, Message, Model, PartyId, Structure
from isthmus.federation.roles import Cohort, handler
from isthmus.federation.schema import OnlyTotal, ScaledRows
from isthmus.federation.script import Script, ScriptLine, ask, total
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedstruct import features, powers, powers_hardened, powers_published
from isthmus.methods.fedstruct.client import (
    BETAS,
    STRUCTURE,
    StructureClient,
    StructureCohort,
    below,
    first_weights,
    logits_of,
    named,
    own_loss,
    stack_evaluations,
)
from isthmus.methods.fedstruct.config import FedStructConfig, StructureConfig
from isthmus.methods.fedstruct.features import NSF, Fingerprint, NsfBlock, assembled, check_replicas, fingerprint
from isthmus.methods.fedstruct.powers import NOTHING_KEPT, Kept, PowerProtocol, next_power
from isthmus.methods.fedstruct.state import NO_STEPS
from isthmus.methods.registry import Log
from isthmus.methods.schedule import rate_factor
from isthmus.methods.training import all_familiar, total_samples
from isthmus.nn.optim import OptimizerState, fresh_state, stepped
from isthmus.nn.structure import combined
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, scaled

# Differs from the paper: ``hardened`` is offered beside what it prints (``published``), which tells neighbour lists.
PROTOCOLS: Mapping[str, PowerProtocol] = {"published": powers_published, "hardened": powers_hardened}


@dataclass(frozen=True)
class ServerState(Record):
    """All the server remembers between rounds."""

    weights: Weights
    optimizer: OptimizerState
    total: float = 0.0  # |Vt|
    nodes: int = 0  # n
    power: int = 0  # l, the last power that is complete
    kept: Kept = NOTHING_KEPT  # of that power, over all clients
    nsf: Tensor | None = None
    nsf_optimizer: OptimizerState = NO_STEPS


def init(view: View, config: FedStructConfig, common: Stream) -> ServerState:
    if not view.alike:
        raise ConfigError(
            "fedstruct classifies nodes of one graph: clients must have the same features and classes; try fedavg"
        )
    weights = first_weights(config, get_weights(config.first_model(view, common)), view.num_classes, common)
    return ServerState(weights, fresh_state(config.optimizer, weights))


# -- setup (5.1) -----------------------------------------------------------------------------------


def setup_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """|Vt|, a common numbering of all nodes, and both ends of every cross edge compared."""
    total = total_samples(federation)
    return replace(state, total=total, nodes=PROTOCOLS[config.protocol].setup(federation)), {}


def power_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """[Ah^l]^[i] at every client i from everybody's [Ah^{l-1}]; Abar^[i] += beta_l [Ah^l]^[i]. Round l of L_s."""
    power = state.power + 1
    kept = next_power(power, state.nodes, federation, config, PROTOCOLS[config.protocol])
    return replace(state, power=power, kept=kept if power <= config.structure_hops else state.kept), {}


def nsf_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """S once: i -> all others : S_i, or to the server where it holds S."""
    if not config.learns_nsf:
        check_replicas(federation.exchange(FedStructClient.share_nsf, FedStructClient.take_nsf))
        return state, {}
    if config.replicated:
        check_replicas(federation.exchange(FedStructClient.share_start, FedStructClient.take_start))
        return state, {}
    # Differs from the paper: one S at the server (nsf_at=server) in place of a copy at every client; same bits.
    nsf = assembled(federation.call(FedStructClient.give_start), state.nodes)
    return replace(state, nsf=nsf, nsf_optimizer=fresh_state(config.optimizer, {NSF: nsf})), {}


# -- training (5.2, 5.3) ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Task(Message):
    """theta, S where the server holds it, and |Vt|."""

    weights: Model[Weights]
    nsf: Embedding[Tensor | None]
    total: Count[float]


@dataclass(frozen=True)
class Step(Message):
    """Client i's part of the averaged gradient, of theta and of S: ready to be summed."""

    gradients: Gradient[Weights]
    nsf: Gradient[Tensor | None]
    share: Count[float]


@dataclass(frozen=True)
class ModelTask(Message):
    """theta and |Vt|, for clients that are not given S."""

    weights: Model[Weights]
    total: Count[float]


@dataclass(frozen=True)
class NsfStep(Message):
    """G_S: the averaged gradient of S, for replicas to step on."""

    gradient: Gradient[Tensor]


def train_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """FedSGD: everybody's gradients, averaged, and one step on them."""
    if config.algorithm == "fedavg":
        return fedavg_round(state, federation), {}
    for _ in range(config.local_epochs):
        task = Task(state.weights, state.nsf, state.total)
        average = federation.sum(FedStructClient.gradient, task)  # 1/|Vt| sum_i dL_i/dtheta, 1/|Vt| sum_i dL_i/dS
        weights, optimizer = step_theta(config, state.weights, average.gradients, state.optimizer, federation.round)
        state = replace(state, weights=weights, optimizer=optimizer)
        if average.nsf is None:  # S is fixed (5.2)
            continue
        if state.nsf is None:  # S is at the clients (5.3)
            check_replicas(federation.call(FedStructClient.advance, NsfStep(average.nsf)))
        else:
            nsf, nsf_optimizer = step_nsf(config, state.nsf, average.nsf, state.nsf_optimizer, federation.round)
            state = replace(state, nsf=nsf, nsf_optimizer=nsf_optimizer)
    return state, {}


def gradients(
    who: StructureClient | StructureCohort, shares: Sequence[float], weights: Weights, nsf: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """Both branches, forward and backward, of one client or of many together.

    Returns:
        Gradients of theta_f for every client's own mean loss (stacked for many); of theta_s and of S, weighted by
        shares and summed.
    """
    first, inputs, streams = who.clients[0], who.inputs, [client.stream for client in who.clients]
    config = first.config
    masks = [stream("structure").torch() for stream in streams] if config.dropout else None
    structure = first.net.run(below(weights, STRUCTURE), nsf, who.group, masks)
    z = [client.z for client in structure.clients]  # E2: z_v = sum_u Abar_vu g(s_u)
    theta_f, residuals = own_loss(first, inputs, weights, z, streams)  # E1, E3
    theta_s, nsf_grad = structure.gradients(inputs.split(residuals), shares, nsf=config.learns_nsf)  # Props. 3 and 2
    return theta_f, named(theta_s, STRUCTURE), nsf_grad


def step_theta(
    config: StructureConfig, weights: Weights, grads: Weights, state: OptimizerState, round: int
) -> tuple[dict[str, Tensor], OptimizerState]:
    """theta <- theta - lr dL/dtheta.

    # Differs from the paper: Adam in place of plain gradient descent, as in its code; plain with ``optimizer=sgd``. One
    step at the server, where the code steps an identical Adam at every party (12.2): the trajectory is the same.
    """
    rest = {name: grad for name, grad in grads.items() if name != BETAS}
    lr = config.rate(round)
    new, after = stepped(weights, rest, state, optimizer=config.optimizer, lr=lr, weight_decay=config.weight_decay)
    if BETAS not in grads:
        return new, after
    # Betas are a filter, not weights of a layer: no decay pulls them to zero.
    betas, before = {BETAS: grads[BETAS]}, replace(after, steps=state.steps)
    return stepped(new, betas, before, optimizer=config.optimizer, lr=lr, weight_decay=0.0)


def step_nsf(
    config: StructureConfig, nsf: Tensor, grad: Tensor, state: OptimizerState, round: int
) -> tuple[Tensor, OptimizerState]:
    """S <- S - lr_s G_S.

    # Differs from the paper: in the direct form S has a learning rate of its own and no weight decay
    (`FedStructConfig.nsf_rates`). With the printed ones S hardly moves and nothing is gained from structure (13.14).
    """
    lr, decay = config.nsf_rates
    lr *= rate_factor(config, round)
    new, after = stepped({NSF: nsf}, {NSF: grad}, state, optimizer=config.optimizer, lr=lr, weight_decay=decay)
    return new[NSF], after


@dataclass(frozen=True)
class TrainedRows(Message):
    """A client's columns, which of them are nodes of the training, and the rows of S of those."""

    columns: Identifier[Tensor]
    known: Structure[Tensor]
    values: Embedding[Tensor]


@dataclass(frozen=True)
class Known(Message):
    """S, of all nodes of now; None where every client has it."""

    nsf: Embedding[Tensor | None]


class FedStructCohort(StructureCohort):
    """`FedStructClient`'s handlers, of many clients together."""

    only_totals = frozenset({"gradient"})

    def gradient(self, task: Task) -> Stacked[Step]:
        nsf, count = self.clients[0].nsf(task.nsf), len(self.clients)
        shares = [client.samples() / task.total for client in self.clients]
        theta_f, theta_s, nsf_grad = gradients(self, shares, task.weights, nsf)
        share: Any = torch.tensor(shares, dtype=torch.float64)
        grads: Any = {name: ScaledRows(tensor, share) for name, tensor in theta_f.items()}
        grads |= {name: OnlyTotal(tensor, count) for name, tensor in theta_s.items()}
        total: Any = None if nsf_grad is None else OnlyTotal(nsf_grad, count)
        return Stacked(Step({name: grads[name] for name in task.weights}, total, share), self.parties)

    def advance(self, step: NsfStep) -> Stacked[Fingerprint]:
        first = self.clients[0]
        nsf, optimizer = step_nsf(first.config, first.nsf(None), step.gradient, first.state.nsf_optimizer, first.round)
        for client in self.clients:
            client.state = replace(client.state, nsf=nsf, nsf_optimizer=optimizer)
        values: Any = torch.full((len(self.clients),), fingerprint(nsf), dtype=torch.int64)
        return Stacked(Fingerprint(values), self.parties)

    def deploy_all(self, ready: Ready) -> Stacked[Evaluation]:
        first = self.clients[0]
        embedded = first.net.embed(below(ready.weights, STRUCTURE), first.nsf(ready.nsf))
        for client in self.clients:
            client.keep_rows(first.nsf(ready.nsf))
        rows = [scored(client, ready.weights, embedded) for client in self.clients]
        return Stacked(stack_evaluations(rows), self.parties)


class FedStructClient(StructureClient):
    """One client."""

    cohort: ClassVar[type[Cohort[Any]] | None] = FedStructCohort

    @handler
    def gradient(self, task: Task) -> Step:
        """1/|Vt| dL_i/dtheta and 1/|Vt| dL_i/dS; exact zeros at a client without training nodes."""
        share = self.samples() / task.total
        grads, nsf = self._gradients(task.weights, self.nsf(task.nsf), share)
        return Step(grads, nsf, share)

    def _gradients(self, weights: Weights, nsf: Tensor, share: float) -> tuple[dict[str, Tensor], Tensor | None]:
        theta_f, theta_s, nsf_grad = gradients(self, [share], weights, nsf)
        grads = {**scaled(theta_f, share), **theta_s}
        return {name: grads[name] for name in weights}, nsf_grad

    @handler
    def advance(self, step: NsfStep) -> Fingerprint:
        """5.3: every client steps its replica of S by the same optimiser."""
        nsf, optimizer = step_nsf(self.config, self.nsf(None), step.gradient, self.state.nsf_optimizer, self.round)
        self.state = replace(self.state, nsf=nsf, nsf_optimizer=optimizer)
        return Fingerprint(fingerprint(nsf))

    @handler
    def local_update(self, task: Task) -> Averaged:
        """FedAvg (5.4): local steps of the client's own optimiser on its mean loss."""
        config, share = self.config, self.samples() / task.total
        weights, optimizer = task.weights, self.state.optimizer
        nsf, nsf_optimizer = self.nsf(task.nsf), self.state.nsf_optimizer
        if config.learns_nsf and not nsf_optimizer.first:
            nsf_optimizer = fresh_state(config.optimizer, {NSF: nsf})
        for _ in range(config.local_epochs if self.data.num_train else 0):
            grads, nsf_grad = self._gradients(weights, nsf, 1.0)
            weights, optimizer = step_theta(config, weights, grads, optimizer, self.round)
            if nsf_grad is not None:
                nsf, nsf_optimizer = step_nsf(config, nsf, nsf_grad, nsf_optimizer, self.round)
        self.state = replace(self.state, weights=weights, optimizer=optimizer, nsf_optimizer=nsf_optimizer)
        return Averaged(scaled(weights, share), nsf * share if config.learns_nsf else None, share)

    @handler
    def deploy_all(self, ready: Ready) -> Evaluation:
        """Take the trained model and score it on own nodes."""
        self.keep_rows(self.nsf(ready.nsf))
        return scored(self, ready.weights, self.net.embed(below(ready.weights, STRUCTURE), self.nsf(ready.nsf)))

    # Prediction.

    @handler
    def give_trained_nsf(self) -> TrainedRows:
        """Own rows of S, of the nodes that were there in training."""
        ids, order = self.data.node_id, torch.argsort(self.state.own_ids)
        trained = self.state.own_ids[order]
        place = torch.searchsorted(trained, ids).clamp(max=max(0, len(trained) - 1))
        known = trained[place] == ids if len(trained) else torch.zeros_like(ids, dtype=torch.bool)
        assert self.state.own_nsf is not None
        return TrainedRows(self.state.columns, known, self.state.own_nsf[order[place[known]]])

    @handler
    def give_new_nsf(self, given: KnownRows) -> NsfBlock:
        """Rows of S of own new nodes: the mean of the known rows of the nodes they reach, weighted by Abar; of a node
        that reaches none, the mean of all known rows.
        """
        new = ~given.known[self.state.columns]
        known = given.known.to(given.nsf.dtype).unsqueeze(1)
        reached = [(power.times(given.nsf), power.times(known)) for power in self.abar]
        total, mass = (torch.stack(part).sum(0)[new] for part in zip(*reached, strict=True))
        values = torch.where(
            mass > 0, total / mass.clamp(min=torch.finfo(mass.dtype).tiny), given.nsf[given.known].mean(0)
        )
        return NsfBlock(self.state.columns[new], values)

    @handler
    def classify_with(self, given: Known) -> None:
        """Predict own nodes with the trained model."""
        weights = self.state.weights
        classify(self, weights, self.net.embed(below(weights, STRUCTURE), self.nsf(given.nsf)))


# -- FedAvg (5.4) ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Averaged(Message):
    """A client's weights and S after its local steps, times its share."""

    weights: Model[Weights]
    nsf: Embedding[Tensor | None]
    share: Count[float]


def fedavg_round(state: ServerState, federation: Federation) -> ServerState:
    """Local optimiser steps, averaged weights; the paper reports it for the feature branch alone."""
    average = federation.sum(FedStructClient.local_update, Task(state.weights, state.nsf, state.total))
    return replace(state, weights=average.weights, nsf=average.nsf)


# -- evaluation ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready(Message):
    """The trained model, to be used."""

    weights: Model[Weights]
    nsf: Embedding[Tensor | None]


def evaluate(state: ServerState, federation: Federation, config: FedStructConfig) -> Mapping[PartyId, Evaluation]:
    """Every client scores the common model on its own nodes."""
    return scores_of(federation, FedStructClient.deploy_all, Ready(state.weights, state.nsf))


def scored(client: StructureClient, weights: Weights, embedded: Tensor) -> Evaluation:
    """Predictions for all own nodes, from theta and g(S)."""
    classify(client, weights, embedded)
    return client.evaluate()


def classify(client: StructureClient, weights: Weights, embedded: Tensor) -> None:
    """What the model says of own nodes, into the client's state."""
    z = combined([power.times(embedded) for power in client.abar], weights.get(BETAS))  # E2
    client.state = replace(client.state, weights=weights, scored=logits_of(client, weights, z))


# -- prediction after training ---------------------------------------------------------------------


@dataclass(frozen=True)
class KnownRows(Message):
    """S as far as it is known: a row of zeros for every node that was not there in training."""

    nsf: Embedding[Tensor]
    known: Structure[Tensor]


def predict(state: ServerState, federation: Federation, config: FedStructConfig) -> None:
    """z of the data of now. Where those are the data of the training, Abar is known; otherwise it is made again, and
    nodes that are new get rows of S from the nodes they reach (`FedStructClient.row_for_new`).
    """
    familiar = all_familiar(federation)
    if not familiar:
        federation.call(FedStructClient.forget_data)
        protocol = PROTOCOLS[config.protocol]
        nodes = protocol.setup(federation)
        for power in range(1, config.powers + 1):
            next_power(power, nodes, federation, config, protocol)
    if not config.learns_nsf:
        check_replicas(federation.exchange(FedStructClient.share_nsf, FedStructClient.take_nsf))
        federation.call(FedStructClient.classify_with, Known(None))
        return
    rows = federation.call(FedStructClient.give_trained_nsf)
    known = known_rows(rows)
    if not bool(known.known.all()):
        nsf = known.nsf.clone()
        for reply in federation.call(FedStructClient.give_new_nsf, known).values():
            nsf[reply.columns] = reply.values
        known = KnownRows(nsf, torch.ones_like(known.known))
    federation.call(FedStructClient.classify_with, Known(known.nsf))


def known_rows(replies: Mapping[PartyId, TrainedRows]) -> KnownRows:
    """S from everybody's rows."""
    parts = list(replies.values())
    nodes = sum(part.columns.numel() for part in parts)
    nsf, known = parts[0].values.new_zeros(nodes, parts[0].values.shape[1]), torch.zeros(nodes, dtype=torch.bool)
    for part in parts:
        nsf[part.columns[part.known]] = part.values
        known[part.columns] = part.known
    if not bool(known.any()):
        raise RunError("no client has a node of the training left, so nothing is known of S: train again")
    return KnownRows(nsf, known)


def facts(state: ServerState, config: FedStructConfig, scenario: Any) -> dict[str, Any]:
    """What is left of the power after pruning, and the filter where it was learned."""
    return {
        "nodes": state.nodes,
        "entries_per_row": state.kept.entries / state.nodes,
        "kept_row_mass": state.kept.mass / state.nodes,
        "empty_rows": state.kept.empty,
        **({"betas": state.weights[BETAS].tolist()} if config.train_betas else {}),
    }


# -- what is called when -----------------------------------------------------------------------------


def script(config: FedStructConfig, view: View) -> Script:
    """What remains visible in the hardened protocol is said in docs/methods/fedstruct.md."""
    protocol, steps = PROTOCOLS[config.protocol].script(config, view), config.local_epochs
    replicas = (ask(FedStructClient.advance, most=steps),) if config.replicated else ()
    gradients = (total(FedStructClient.gradient, most=steps), *replicas)
    return {
        "setup": (total(FedStructClient.size), *protocol["setup"]),
        "powers": (*protocol["powers"], *powers.script(config)),
        "features": features.script(config),
        "train": gradients if config.algorithm == "fedsgd" else (total(FedStructClient.local_update),),
        "evaluation": (ask(FedStructClient.deploy_all),),
    }


def predict_script(config: FedStructConfig, view: View) -> tuple[ScriptLine, ...]:
    """Calls of :func:`predict`: for data that are not those of the training all of setup, in one round."""
    protocol = PROTOCOLS[config.protocol].script(config, view)
    every_power = [*protocol["powers"], *powers.script(config)] * config.powers
    shared = (
        (ask(FedStructClient.give_trained_nsf), ask(FedStructClient.give_new_nsf))
        if config.learns_nsf
        else features.script(config)
    )
    return (
        ask(FedStructClient.familiar),
        ask(FedStructClient.forget_data),
        *protocol["setup"],
        *every_power,
        *shared,
        ask(FedStructClient.classify_with),
    )
