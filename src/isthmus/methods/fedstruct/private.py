"""FedStruct's private variant -- Aliakbari, Östman & Graell i Amat, ICLR 2025, appendix G.1,
https://arxiv.org/abs/2402.19163.

Nobody receives rows of S of others' nodes. After the powers (5.1), client i sends client j the coefficients Abar_j^[i]
of its rows; j answers with sums over its own nodes:

    sbar_v^(j)  = sum_{u in V_j} Abar_vu g(s_u)                      phase 1, j -> i
    stil_vq^(j) = sum_{u in V_j} Abar_vu dg(s_u)/dtheta_s,q          ditto, ``gradients=jacobian``
    dL_i/dtheta_s,q = sum_v sum_j stil_vq^(j) . r_v                  phase 2, to the server
    R_j = (Abar_j^[i])^T R_i, i -> j; j adds sum_u (dg(s_u)/dtheta_s)^T R_j,u to its own upload
                                                                     ``gradients=residuals`` (13.7), equal and cheap
    dL_i/dS (n x C) to the server; the server adds up and returns to i the rows of V_i        HOP2VEC (direct form)

    paper                  here
    V_j, S_j               `PrivateState.own_s`
    Abar_j^[i] at j        `PrivateState.asked`; which rows are answered: `PrivateState.answered`, `query_guard.py`

Mathematics and accuracy are those of FedStruct where every query is answered. What a client is sent in the powers is as
there: this variant protects S, not edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.federation.interface import Federation, PerClient, View
from isthmus.federation.messages import (
    Count,
    Embedding,
    Gradient,
    Identifier,
    LabelStatistic,
    Message,
    Model,
    PartyId,
    Structure,
)
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ask, mail, total
from isthmus.graph.powers import Block
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedstruct import algorithm, powers
from isthmus.methods.fedstruct.algorithm import (
    PROTOCOLS,
    ModelTask,
    Step,
    power_round,
    setup_round,
    step_nsf,
    step_theta,
)
from isthmus.methods.fedstruct.client import STRUCTURE, StructureClient, below, logits_of, named, own_loss
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.features import NSF
from isthmus.methods.fedstruct.jacobian import check_size, jacobian, pulled_back
from isthmus.methods.fedstruct.query_guard import QueryGuard, Rule
from isthmus.methods.fedstruct.state import NO_COLUMNS, FedStructState, block_of, tensor_of
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.nn.graph_structure import GraphStructureNet
from isthmus.nn.optim import fresh_state
from isthmus.seeds import Stream
from isthmus.tensors import Weights, num_values, scaled

NO_GRAPH: Any = None


@dataclass(frozen=True)
class PrivateConfig(FedStructConfig):
    """Settings of FedStruct's private variant; those of FedStruct that it has no use for are refused.

    Args:
        nsf: ``hop2vec`` in the direct form, as the appendix has it, or ``degree`` or ``walk`` with the MLP g.
        queries: Which queries a client answers: ``none`` refused, ``counted`` or ``safe`` (`query_guard.py`).
        gradients: How theta_s gets its gradient: ``jacobian`` (as printed, small graphs only) or ``residuals``.
    """

    protocol: Literal["streamed", "published", "hardened"] = "hardened"
    form: Literal["headed", "direct"] = "direct"
    queries: Rule = "safe"
    gradients: Literal["residuals", "jacobian"] = "residuals"

    def __post_init__(self) -> None:
        if self.nsf != "hop2vec" and self.form == "direct":
            object.__setattr__(self, "form", "headed")
        super().__post_init__()
        if self.streamed:
            raise ConfigError("fedstruct-private needs rows of powers: set protocol=hardened or published")
        if self.nsf == "hop2vec" and self.form != "direct":
            raise ConfigError("fedstruct-private learns S in the direct form (appendix G.1): leave form out")
        if self.nsf_at == "clients":
            raise ConfigError("fedstruct-private keeps every row of S at its owner: leave nsf_at out")
        if self.train_betas or self.algorithm == "fedavg" or self.local_epochs > 1:
            raise ConfigError(
                "fedstruct-private takes one summed gradient a round with fixed betas: leave out train_betas, "
                "algorithm and local_epochs"
            )

    @property
    def sends_jacobians(self) -> bool:
        return self.gradients == "jacobian" and not self.learns_nsf

    def own_net(self, num_classes: int) -> GraphStructureNet:
        """g of own nodes: a structure model without hops."""
        return GraphStructureNet("dgcn", self.nsf_dim, num_classes, self.structure_hidden, self.dropout, (1.0,))


@dataclass(frozen=True)
class PrivateServerState(algorithm.ServerState):
    """Also which columns belong to whom (phase 3), and how many queries were refused of how many."""

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    asked: int = 0
    refused: int = 0


@dataclass(frozen=True)
class PrivateState(FedStructState):
    """Also what a client holds of S and of others' queries.

    Args:
        own_s: S_i.
        asked: Client -> its coefficients over own nodes, labelled rows first (n_k, n_i).
        labelled: Client -> how many of these rows are labelled.
        answered: Client -> which rows are answered (n_k,).
    """

    own_s: Tensor = NO_COLUMNS
    asked: Mapping[str, Tensor] = field(default_factory=dict)
    labelled: Mapping[str, int] = field(default_factory=dict)
    answered: Mapping[str, Tensor] = field(default_factory=dict)


def init(view: View, config: PrivateConfig, common: Stream) -> PrivateServerState:
    state = algorithm.init(view, config, common)
    return PrivateServerState(state.weights, state.optimizer)


# -- queries ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queries(Message):
    """Abar_j^[i]: the sender's rows over the receiver's nodes, labelled ones first."""

    rows: Structure[Tensor]
    labelled: LabelStatistic[int]


@dataclass(frozen=True)
class Place(Message):
    """Columns of a client, what it was asked, and what it refuses."""

    columns: Identifier[Tensor]
    asked: Count[int]
    refused: Count[int]


def query_round(
    state: PrivateServerState, federation: Federation, config: PrivateConfig
) -> tuple[PrivateServerState, Log]:
    """Everybody's coefficients to everybody, once; what is refused is decided here."""
    replies = federation.exchange(PrivateClient.send_queries, PrivateClient.take_queries)
    asked, refused = (sum(getattr(reply, name) for reply in replies.values()) for name in ("asked", "refused"))
    columns = {client: reply.columns for client, reply in replies.items()}
    return replace(state, columns=columns, asked=asked, refused=refused), {"refused": float(refused)}


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn(Message):
    """theta_s; whether only labelled rows are asked for, or all."""

    weights: Model[Weights]
    training: Count[bool]


@dataclass(frozen=True)
class Sums(Message):
    """sbar_v^(j) of the receiver's rows, zero where the query is refused, and stil where gradients go as Jacobians:
    (t, C, ...) of every parameter.
    """

    sums: Embedding[Tensor]
    answered: Count[Tensor]
    jacobian: Gradient[Weights]


@dataclass(frozen=True)
class Pulled(Message):
    """R_j = (Abar_j^[i])^T R_i: weighted residuals at the receiver's nodes (n_j, C)."""

    residuals: LabelStatistic[Tensor]


@dataclass(frozen=True)
class OwnRows(Message):
    """Phase 3: rows of 1/|Vt| sum_i dL_i/dS that belong to the receiver's nodes."""

    gradient: Gradient[Tensor]


def train_round(
    state: PrivateServerState, federation: Federation, config: PrivateConfig
) -> tuple[PrivateServerState, Log]:
    """Phases 1 to 3."""
    theta_s = below(state.weights, STRUCTURE)
    federation.exchange(PrivateClient.answer, PrivateClient.take_sums, Turn(theta_s, True))
    federation.call(PrivateClient.differentiate, ModelTask(state.weights, state.total))
    if not config.learns_nsf and config.gradients == "residuals":
        federation.exchange(PrivateClient.send_residuals, PrivateClient.take_residuals)
    average = federation.sum(PrivateClient.upload)
    weights, optimizer = step_theta(config, state.weights, average.gradients, state.optimizer, federation.round)
    if average.nsf is not None:
        rows = {client: OwnRows(average.nsf[columns]) for client, columns in state.columns.items()}
        federation.call(PrivateClient.step_own, PerClient(rows))
    return replace(state, weights=weights, optimizer=optimizer), {}


def evaluate(state: PrivateServerState, federation: Federation, config: PrivateConfig) -> Mapping[PartyId, Evaluation]:
    """Sums for all rows, then every client scores its own nodes."""
    federation.exchange(PrivateClient.answer, PrivateClient.take_sums, Turn(below(state.weights, STRUCTURE), False))
    return scores_of(federation, PrivateClient.deploy_private, ModelTask(state.weights, state.total))


class PrivateClient(StructureClient):
    """A client that answers queries about its own rows of S and asks others about theirs."""

    config: PrivateConfig
    state: PrivateState
    cohort: ClassVar[Any] = None
    keeps: ClassVar[tuple[str, ...]] = ()
    keeps_of_data: ClassVar[tuple[str, ...]] = ("scored",)

    def initial_state(self) -> PrivateState:
        first = super().initial_state()
        return PrivateState(first.weights, first.optimizer, first.diagonal, first.secret)

    @property
    def order(self) -> Tensor:
        """Own nodes as queries list them: labelled ones first."""
        return torch.argsort(~self.data.train, stable=True)

    def block(self, client: PartyId) -> sp.csr_matrix:
        """Abar_j^[i], columns in the order of j's column numbers, rows in `order`."""
        rows = sp.csr_matrix(block_of(self.state.combined[0]))[self.order.numpy()]
        return sp.csr_matrix(rows[:, self.columns_of(client).numpy()])

    def columns_of(self, client: PartyId) -> Tensor:
        """Numbers of a client's columns, ascending."""
        owners = sorted({*self.state.entering, self.party})
        return torch.nonzero(self.state.owner == owners.index(client)).flatten()

    @handler
    def send_queries(self) -> Mapping[PartyId, Queries]:
        """Coefficients over their nodes to all others."""
        labelled = int(self.data.train.sum())
        return {client: Queries(tensor_of(self.block(client)), labelled) for client in self.state.entering}

    @handler
    def take_queries(self, mail: Mapping[PartyId, Queries]) -> Place:
        """Draw or compute S_i; decide which queries are answered: all others count as one, labelled rows first."""
        config, data = self.config, self.data
        classes, own = data.num_classes, self.own_features()
        place = torch.argsort(self.state.columns)  # rows of S in the order others address them
        guard = QueryGuard(config.queries, data.num_nodes, own.shape[1])
        sent = num_values(below(self.state.weights, STRUCTURE)) if config.sends_jacobians else 0
        dense = {client: sp.csr_matrix(block_of(queries.rows)).toarray() for client, queries in sorted(mail.items())}
        answered = {client: np.zeros(len(rows), dtype=bool) for client, rows in dense.items()}
        for part in ("labelled", "others"):
            for client, rows in dense.items():
                count = mail[client].labelled
                rows_of = slice(0, count) if part == "labelled" else slice(count, None)
                numbers = classes * (1 + sent) if part == "labelled" else classes
                answered[client][rows_of] = guard.answered(rows[rows_of], numbers)
        self.state = replace(
            self.state,
            own_s=own[place],
            nsf_optimizer=fresh_state(config.optimizer, {NSF: own}),
            asked={client: queries.rows for client, queries in mail.items()},
            labelled={client: queries.labelled for client, queries in mail.items()},
            answered={client: torch.from_numpy(kept) for client, kept in answered.items()},
        )
        total_rows = sum(len(kept) for kept in answered.values())
        columns = self.state.columns[place]
        return Place(columns, total_rows, total_rows - sum(int(kept.sum()) for kept in answered.values()))

    def coefficients(self, client: PartyId, training: bool) -> Tensor:
        """Rows that are answered, the others zero; in training the labelled ones alone."""
        if client == self.party:
            return self._dense(self.block(client), int(self.data.train.sum()) if training else None)
        rows = self._dense(block_of(self.state.asked[client]), self.state.labelled[client] if training else None)
        return rows * self.state.answered[client][: len(rows)].unsqueeze(1)

    def _dense(self, block: Block, count: int | None) -> Tensor:
        """The first rows of a block."""
        return torch.from_numpy(sp.csr_matrix(block)[:count].toarray()).to(self.config.dtype)

    @handler
    def answer(self, turn: Turn) -> Mapping[PartyId, Sums]:
        """Phase 1: sums over own nodes for everybody who asked, and for oneself."""
        config, training = self.config, turn.training
        theta = {name: tensor.clone().requires_grad_() for name, tensor in turn.weights.items()}
        draws = self.stream("structure").torch() if training and config.dropout else None
        if config.learns_nsf:
            embedded = self.state.own_s
        else:
            net = config.own_net(self.data.num_classes)
            embedded = net.embed(theta, self.state.own_s, NO_GRAPH, draws)
        self.scratch.theta, self.scratch.embedded = theta, embedded
        self.scratch.pulled = torch.zeros_like(embedded)
        found = {}
        for client in (*self.state.asked, self.party):
            sums = self.coefficients(client, training) @ embedded
            wanted = training and config.sends_jacobians
            answered = torch.ones(len(sums), dtype=torch.bool)
            if client != self.party:
                answered = self.state.answered[client][: len(sums)]
            if wanted:
                check_size(sums.numel(), theta)
            found[client] = Sums(sums.detach(), answered, jacobian(sums, theta) if wanted else {})
        return found

    @handler
    def take_sums(self, mail: Mapping[PartyId, Sums]) -> None:
        """z of own rows: what everybody has summed, added up."""
        self.scratch.z = torch.stack([mail[client].sums for client in sorted(mail)]).sum(0)
        self.scratch.answered = {client: mail[client].answered for client in mail}
        self.scratch.jacobians = [mail[client].jacobian for client in sorted(mail)]

    @handler
    def differentiate(self, task: ModelTask) -> None:
        """The loss of own training nodes: gradients of theta_f, residuals."""
        share = self.samples() / task.total
        theta_f, residual = own_loss(self, self.inputs, task.weights, [self.scratch.z], [self.stream])
        self.scratch.theta_f, self.scratch.share = scaled(theta_f, share), share
        self.scratch.residual = residual * share  # R_i
        self.scratch.pulled = self.coefficients(self.party, True).mT @ self.scratch.residual
        self.scratch.names = tuple(task.weights)

    @handler
    def send_residuals(self) -> Mapping[PartyId, Pulled]:
        """13.7: R_j to every other client."""
        count = int(self.data.train.sum())
        found = {}
        for client in self.state.asked:
            found[client] = Pulled(self._dense(self.block(client), count).mT @ self._answered_residual(client))
        return found

    def _answered_residual(self, client: PartyId) -> Tensor:
        """R_i without the rows that this client has refused: what is not in z has no gradient."""
        residual: Tensor = self.scratch.residual * self.scratch.answered[client].unsqueeze(1)
        return residual

    @handler
    def take_residuals(self, mail: Mapping[PartyId, Pulled]) -> None:
        """Others' residuals at own nodes."""
        for client in sorted(mail):
            self.scratch.pulled = self.scratch.pulled + mail[client].residuals

    @handler
    def upload(self) -> Step:
        """Phase 2."""
        config, grads = self.config, dict(self.scratch.theta_f)
        nsf = None
        if config.learns_nsf:
            nsf = self.scratch.residual.new_zeros(self.state.owner.numel(), self.scratch.residual.shape[1])
            for client in (*self.state.asked, self.party):
                block = self.block(client)[: len(self.scratch.residual)]
                nsf[self.columns_of(client)] = torch.from_numpy(
                    np.asarray(block.T @ self._answered_residual(client).numpy())
                )  # dL_i/dS = Abar^T R_i, Prop. 2
        else:
            theta, values = self.scratch.theta, list(self.scratch.theta.values())
            if config.gradients == "residuals":
                found = torch.autograd.grad(self.scratch.embedded, values, self.scratch.pulled)
                theta_s = dict(zip(theta, found, strict=True))
            else:
                every = [pulled_back(self.scratch.residual, part) for part in self.scratch.jacobians]
                theta_s = {name: torch.stack([part[name] for part in every]).sum(0) for name in theta}
            grads |= named(theta_s, STRUCTURE)
        return Step({name: grads[name] for name in self.scratch.names}, nsf, self.scratch.share)

    @handler
    def step_own(self, rows: OwnRows) -> None:
        """Phase 3: S_i <- S_i - lr_s G_i."""
        own, optimizer = step_nsf(self.config, self.state.own_s, rows.gradient, self.state.nsf_optimizer, self.round)
        self.state = replace(self.state, own_s=own, nsf_optimizer=optimizer)

    @handler
    def deploy_private(self, ready: ModelTask) -> Evaluation:
        """h + z of own nodes."""
        z = torch.empty_like(self.scratch.z)
        z[self.order] = self.scratch.z
        self.state = replace(self.state, weights=ready.weights, scored=logits_of(self, ready.weights, z))
        return self.evaluate()

    def logits(self) -> Tensor:
        if self.state.scored is None or len(self.state.scored) != self.data.num_nodes:
            raise RunError("fedstruct-private predicts only what it scored in training: train again, or use fedstruct")
        return self.state.scored


def facts(state: PrivateServerState, config: PrivateConfig, scenario: Any) -> dict[str, Any]:
    """How many queries were refused."""
    return {"queries": state.asked, "queries_refused": state.refused, "query_rule": config.queries}


def script(config: PrivateConfig, view: View) -> Script:
    protocol = PROTOCOLS[config.protocol].script(config, view)
    pulled = not config.learns_nsf and config.gradients == "residuals"
    answers = mail(PrivateClient.answer, PrivateClient.take_sums)
    return {
        "setup": (total(PrivateClient.size), *protocol["setup"]),
        "powers": (*protocol["powers"], *powers.script(config)),
        "queries": (mail(PrivateClient.send_queries, PrivateClient.take_queries),),
        "train": (
            answers,
            ask(PrivateClient.differentiate),
            *((mail(PrivateClient.send_residuals, PrivateClient.take_residuals),) if pulled else ()),
            total(PrivateClient.upload),
            *((ask(PrivateClient.step_own, each=True),) if config.learns_nsf else ()),
        ),
        "evaluation": (answers, ask(PrivateClient.deploy_private)),
    }


METHOD = register(
    Method(
        name="fedstruct-private",
        summary="FedStruct where nobody receives structure features of others, only sums; queries counted",
        reference="Aliakbari, Östman & Graell i Amat, Decoupled Subgraph Federated Learning, ICLR 2025, appendix G.1",
        config=PrivateConfig,
        tasks=("node",),
        init=init,
        phases=(
            Phase("setup", setup_round, rounds=1, setup=True),
            Phase("powers", power_round, rounds=lambda config: int(config.powers), setup=True),
            Phase("queries", query_round, rounds=1, setup=True),
            Phase("train", train_round),
        ),
        evaluate=evaluate,
        roles={"client": Role(PrivateClient)},
        script=script,
        preset="fedstruct",
        cross_edges=True,
        shared_values=lambda state: num_values(state.weights),
        facts=facts,
    )
)
