"""A client of FedStruct after the powers: its structure features, its part of the gradient, alone or together with
others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.federation.interface import Stacked
from isthmus.federation.messages import Count, Embedding, Gradient, Identifier, Message, Model, PartyId
from isthmus.federation.roles import Cohort, handler
from isthmus.federation.schema import OnlyTotal, ScaledRows
from isthmus.methods.evaluation import Detail, Evaluation, Tally, detail, tally
from isthmus.methods.learners import dropout_source
from isthmus.methods.structure.config import FEATURE, NSF, STRUCTURE, FedStructConfig
from isthmus.methods.structure.directory import PowerState, block_of
from isthmus.methods.structure.features import degree_feature, degrees, random_feature, walk_feature
from isthmus.methods.structure.powers import PowerClient
from isthmus.methods.training import ModelCohort
from isthmus.nn.inputs import Inputs, stack_inputs
from isthmus.nn.loss import Shifted, get_loss
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.nn.structure import Group, Matrix, Reach, StructureNet
from isthmus.nn.train import gradients
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, scaled

# -- messages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NsfBlock(Message):
    """S_i, with the columns its rows belong to."""

    columns: Identifier[Tensor]
    values: Embedding[Tensor]


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
class NsfStep(Message):
    """G_S: the averaged gradient of S, for replicas to step on."""

    gradient: Gradient[Tensor]


@dataclass(frozen=True)
class Fingerprint(Message):
    """Of a replica of S."""

    value: Identifier[int]


@dataclass(frozen=True)
class Averaged(Message):
    """FedAvg: a client's weights and S after its local steps, times its share."""

    weights: Model[Weights]
    nsf: Embedding[Tensor | None]
    share: Count[float]


@dataclass(frozen=True)
class Ready(Message):
    """The trained model, to be used."""

    weights: Model[Weights]
    nsf: Embedding[Tensor | None]


# -- state -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedStructState(PowerState):
    """The client's rows of Abar, its copy of S where it has one, and the model it was given last.

    Args:
        nsf: S (n, d_s): fixed features of all nodes, or the replica of HOP2VEC's.
        nsf_optimizer: Of the replica; of FedAvg's local steps.
    """

    nsf: Tensor | None
    nsf_optimizer: OptimizerState


# -- client ----------------------------------------------------------------------------------------


class FedStructCohort(Cohort[Any]):
    """FedStruct's clients, differentiated together: g's big products are made once for all (`isthmus.nn.structure`)."""

    def __init__(self, clients: Sequence[FedStructClient]) -> None:
        super().__init__(clients)
        first = clients[0]
        self.config, self.model, self.net = first.config, first.learner.model, first.net
        self.parties = tuple(client.party for client in clients)
        self.inputs = stack_inputs([client.inputs for client in clients])
        self._group: tuple[Any, Group] | None = None
        self._ready: Weights | None = None
        self.nsf: Tensor | None = None
        self.nsf_optimizer = OptimizerState((), {}, {})
        self.moved = False

    @classmethod
    def worthwhile(cls, clients: Sequence[Any]) -> bool:
        return clients[0].config.algorithm == "fedsgd" and ModelCohort.worthwhile(clients)

    def load(self) -> None:
        state = self.clients[0].state
        self.nsf, self.nsf_optimizer, self.moved, self._ready = state.nsf, state.nsf_optimizer, False, None
        if self.config.replicated and state.nsf is not None:
            check_replicas({client.party: Fingerprint(fingerprint(client.state.nsf)) for client in self.clients})

    def store(self) -> None:
        for client in self.clients:
            if self._ready is not None:
                client.state = replace(client.state, weights=self._ready)
            if self.moved:
                client.state = replace(client.state, nsf=self.nsf, nsf_optimizer=self.nsf_optimizer)

    @property
    def group(self) -> Group:
        """The training rows of all clients; made again when their Abar has changed."""
        blocks = tuple(client.state.combined for client in self.clients)
        if self._group is None or any(a is not b for a, b in zip(self._group[0], blocks, strict=True)):
            self._group = blocks, Group.of([client.training_reach for client in self.clients])
        return self._group[1]

    def gradient(self, task: Task) -> Stacked[Step]:
        config = self.config
        nsf = self.nsf if task.nsf is None else task.nsf
        assert nsf is not None
        shares = [client.samples() / task.total for client in self.clients]
        dropout = dropout_source(config, [client.stream for client in self.clients])
        generators = [client.stream("structure").torch() for client in self.clients] if config.dropout else None
        feature, structure, nsf_grad = joint_gradients(
            self.clients[0], task.weights, nsf, self.inputs, self.group, dropout, generators, shares
        )
        share = torch.tensor(shares, dtype=torch.float64)
        count = len(self.parties)
        grads: Any = {name: ScaledRows(tensor, share) for name, tensor in feature.items()}
        grads |= {name: OnlyTotal(tensor, count) for name, tensor in structure.items()}
        nsf_total: Any = None if nsf_grad is None else OnlyTotal(nsf_grad, count)
        stacked_share: Any = share
        return Stacked(Step({name: grads[name] for name in task.weights}, nsf_total, stacked_share), self.parties)

    def advance(self, step: NsfStep) -> Stacked[Fingerprint]:
        assert self.nsf is not None
        self.nsf, self.nsf_optimizer = self.config.stepped_nsf(self.nsf, step.gradient, self.nsf_optimizer)
        self.moved = True
        values: Any = torch.full((len(self.parties),), fingerprint(self.nsf), dtype=torch.int64)
        return Stacked(Fingerprint(values), self.parties)

    def deploy_all(self, ready: Ready) -> Stacked[Evaluation]:
        nsf = self.nsf if ready.nsf is None else ready.nsf
        assert nsf is not None
        self._ready = ready.weights
        embedded = self.net.embed(below(ready.weights, STRUCTURE), nsf)
        rows = [client.score(client.joint_logits(ready.weights, embedded)) for client in self.clients]
        return Stacked(_stack_evaluations(rows), self.parties)


class FedStructClient(PowerClient[FedStructConfig]):
    """One client. Features and labels stay in ``self.data``; its rows of Abar and what it was sent of S are its
    state.
    """

    state: FedStructState
    cohort: ClassVar[type[Cohort[Any]] | None] = FedStructCohort

    def setup(self) -> None:
        super().setup()
        self.net = self.config.net(self.data.num_classes)
        self.inputs: Inputs = self.learner.inputs  # type: ignore[attr-defined]
        self._reaches: dict[str, tuple[tuple[Tensor, ...], Any]] = {}

    def initial_state(self) -> FedStructState:
        weights = first_weights(self.config, get_weights(self.learner.model), self.data.num_classes, self.common)
        fields: dict[str, Any] = self.power_state()
        optimizer = (
            fresh_state(self.config.optimizer, weights)
            if self.config.algorithm == "fedavg"
            else OptimizerState((0,), {}, {})
        )
        return FedStructState(
            weights=weights, optimizer=optimizer, nsf=None, nsf_optimizer=OptimizerState((0,), {}, {}), **fields
        )

    def export(self) -> Weights:
        replica = {} if self.state.nsf is None or not self.config.learns_nsf else {NSF: self.state.nsf}
        return {**self.state.weights, **replica}

    # -- Abar --------------------------------------------------------------------------------------

    @property
    def training_reach(self) -> Reach:
        """Abar's rows of the training nodes."""
        rows = torch.nonzero(self.data.train).flatten().numpy()
        reach: Reach = self._derived(
            "train", lambda blocks: Reach.of([block_of(block)[rows] for block in blocks], self.config.dtype)
        )
        return reach

    @property
    def all_rows(self) -> tuple[Matrix, ...]:
        """Abar's rows of all own nodes, over all nodes."""
        rows: tuple[Matrix, ...] = self._derived(
            "all", lambda blocks: tuple(Matrix.of(block_of(block), self.config.dtype) for block in blocks)
        )
        return rows

    def _derived(self, name: str, make: Any) -> Any:
        """Made from state, so made again when that is another."""
        blocks = self.state.combined
        if not blocks:
            raise RunError("the powers have not been exchanged: play the phases in order")
        kept = self._reaches.get(name)
        if kept is None or kept[0] is not blocks:
            self._reaches[name] = kept = blocks, make(blocks)
        return kept[1]

    # -- structure features ------------------------------------------------------------------------

    def own_nsf(self) -> NsfBlock:
        """S_i."""
        config, columns = self.config, self.state.columns
        if config.nsf == "hop2vec":
            # Whoever could repeat the draws would know whose row is whose, whatever the columns are called.
            draws = self.secret_generator("nsf") if self.hardened else self.stream("nsf")
            values = random_feature(self.data.num_nodes, self.net.width, draws)
        elif config.nsf == "degree":
            values = degree_feature(degrees(self.data), config.nsf_dim)
        else:
            values = walk_feature(self.state.diagonal, degrees(self.data), config.nsf_dim)
        return NsfBlock(columns, values.to(config.dtype))

    @handler
    def give_nsf(self) -> NsfBlock:
        """S_i to the server, who holds S."""
        return self.own_nsf()

    @handler
    def share_nsf(self) -> Mapping[PartyId, NsfBlock]:
        """S_i to all others."""
        block = self.own_nsf()
        return dict.fromkeys([*self.state.entering, self.party], block)

    @handler
    def take_nsf(self, mail: Mapping[PartyId, NsfBlock]) -> Fingerprint:
        nsf = assembled(mail, self.state.owner.numel())
        optimizer = (
            fresh_state(self.config.optimizer, {NSF: nsf}) if self.config.learns_nsf else self.state.nsf_optimizer
        )
        self.state = replace(self.state, nsf=nsf, nsf_optimizer=optimizer)
        return Fingerprint(fingerprint(nsf))

    # -- training ----------------------------------------------------------------------------------

    def _gradients(self, weights: Weights, nsf: Tensor, share: float) -> tuple[dict[str, Tensor], Tensor | None]:
        generators = [self.stream("structure").torch()] if self.config.dropout else None
        dropout = dropout_source(self.config, [self.stream])
        feature, structure, nsf_grad = joint_gradients(
            self, weights, nsf, self.inputs, Group.of([self.training_reach]), dropout, generators, [share]
        )
        grads = {**scaled(feature, share), **structure}
        return {name: grads[name] for name in weights}, nsf_grad

    @handler
    def gradient(self, task: Task) -> Step:
        """dL_i/dtheta and dL_i/dS, times the client's share; exact zeros at a client without training nodes."""
        share = self.samples() / task.total
        grads, nsf_grad = self._gradients(task.weights, self._nsf(task.nsf), share)
        return Step(grads, nsf_grad, share)

    @handler
    def advance(self, step: NsfStep) -> Fingerprint:
        """S <- S - lr_s G_S, by the same optimiser at every client."""
        nsf, optimizer = self.config.stepped_nsf(self._nsf(None), step.gradient, self.state.nsf_optimizer)
        self.state = replace(self.state, nsf=nsf, nsf_optimizer=optimizer)
        return Fingerprint(fingerprint(nsf))

    @handler
    def local_update(self, task: Task) -> Averaged:
        """FedAvg: local steps of the client's own optimiser on its mean loss."""
        config, share = self.config, self.samples() / task.total
        weights, nsf, optimizer, nsf_optimizer = (
            task.weights,
            self._nsf(task.nsf),
            self.state.optimizer,
            self.state.nsf_optimizer,
        )
        if config.learns_nsf and not nsf_optimizer.first and config.optimizer == "adam":
            nsf_optimizer = fresh_state(config.optimizer, {NSF: nsf})
        for _ in range(config.local_epochs if self.data.num_train else 0):
            grads, nsf_grad = self._gradients(weights, nsf, 1.0)
            weights, optimizer = config.stepped(weights, grads, optimizer)
            if nsf_grad is not None:
                nsf, nsf_optimizer = config.stepped_nsf(nsf, nsf_grad, nsf_optimizer)
        self.state = replace(self.state, weights=weights, optimizer=optimizer, nsf_optimizer=nsf_optimizer)
        return Averaged(scaled(weights, share), nsf * share if config.learns_nsf else None, share)

    def _nsf(self, given: Tensor | None) -> Tensor:
        nsf = self.state.nsf if given is None else given
        if nsf is None:
            raise RunError("no structure features: play the phases in order")
        return nsf

    # -- use ---------------------------------------------------------------------------------------

    def joint_logits(self, weights: Weights, embedded: Tensor) -> Tensor:
        """E1 of all own nodes, from g(S)."""
        betas = weights.get(STRUCTURE + StructureNet.BETAS)
        parts = [matrix.times(embedded) for matrix in self.all_rows]
        z = (
            parts[0]
            if betas is None
            else torch.stack([beta * part for beta, part in zip(betas, parts, strict=True)]).sum(0)
        )
        if self.config.inference == "structure":
            return z
        return self.learner.logits(below(weights, FEATURE)) + z

    def score(self, logits: Tensor) -> Evaluation:
        self.scratch.logits = logits
        return Evaluation({part: tally(logits, self.learner.y, mask) for part, mask in self.learner.masks.items()})

    @handler
    def deploy_all(self, ready: Ready) -> Evaluation:
        """Take the trained model and score it on own nodes."""
        self.state = replace(self.state, weights=ready.weights)
        return self.score(
            self.joint_logits(ready.weights, self.net.embed(below(ready.weights, STRUCTURE), self._nsf(ready.nsf)))
        )

    @handler
    def detail(self) -> Detail:
        """Counts for scores beyond accuracy, of what was scored in this round."""
        return detail(self.scratch.logits, self.learner.y, {part: self.learner.masks[part] for part in ("val", "test")})


def joint_gradients(
    client: FedStructClient,
    weights: Weights,
    nsf: Tensor,
    inputs: Inputs,
    group: Group,
    dropout: Any,
    generators: Sequence[torch.Generator] | None,
    shares: Sequence[float],
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """Both branches of one client or of many.

    Returns:
        Gradients of theta_f for every client's own mean loss (stacked for many); of theta_s and of S, weighted by
        shares and summed.
    """
    run = client.net.run(below(weights, STRUCTURE), nsf, group, generators)
    padded = inputs.padded[-1]
    z = torch.zeros(len(run.clients) * padded, client.net.num_classes, dtype=client.config.dtype)
    for k, one in enumerate(run.clients):
        z[k * padded : k * padded + one.z.shape[0]] = one.z
    loss = Shifted(get_loss(client.config.loss), z)
    feature, _ = gradients(client.learner.model, below(weights, FEATURE), inputs, loss=loss.loss, dropout=dropout)
    residuals = [loss.residual[k * padded : k * padded + one.z.shape[0]] for k, one in enumerate(run.clients)]
    structure, nsf_grad = run.gradients(residuals, shares, nsf=client.config.learns_nsf)
    return named(feature, FEATURE), named(structure, STRUCTURE), nsf_grad


# -- what clients and server share -----------------------------------------------------------------


def first_weights(config: FedStructConfig, feature: Weights, num_classes: int, common: Stream) -> dict[str, Tensor]:
    """theta at the start: the feature branch as every other method starts it."""
    structure = config.net(num_classes).first_weights(common.child("structure"), config.dtype)
    if config.train_betas:
        structure[StructureNet.BETAS] = torch.tensor([config.beta0, *config.power_weights], dtype=config.dtype)
    return {**named(feature, FEATURE), **named(structure, STRUCTURE)}


def assembled(blocks: Mapping[PartyId, NsfBlock], nodes: int) -> Tensor:
    """S from everybody's part."""
    parts = list(blocks.values())
    nsf = parts[0].values.new_zeros(nodes, parts[0].values.shape[1])
    for part in parts:
        nsf[part.columns] = part.values
    return nsf


def fingerprint(nsf: Tensor) -> int:
    """63 bits of a hash of all values."""
    return int.from_bytes(hashlib.sha256(nsf.contiguous().numpy().tobytes()).digest()[:8], "big") >> 1


def check_replicas(replies: Mapping[PartyId, Fingerprint]) -> None:
    """(8) All replicas of S are the same bits."""
    values = {party: reply.value for party, reply in replies.items()}
    first = next(iter(values.values()))
    strayed = [party for party, value in values.items() if value != first]
    if strayed:
        raise RunError(
            f"structure features of {', '.join(strayed)} differ from the others' copies: resume the run from a "
            "checkpoint"
        )


def named(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in weights.items()}


def below(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _stack_evaluations(rows: Collection[Evaluation]) -> Evaluation:
    """Tallies of many clients as tensors, one value each."""
    parts: dict[str, Any] = {}
    for part in next(iter(rows)).parts:
        tallies = [row.parts[part] for row in rows]
        correct, total = (torch.tensor([getattr(t, name) for t in tallies]) for name in ("correct", "total"))
        stacked: dict[str, Any] = {
            "correct": correct,
            "total": total,
            "loss": torch.tensor([t.loss for t in tallies], dtype=torch.float64),
        }
        parts[part] = Tally(**stacked)
    return Evaluation(parts)
