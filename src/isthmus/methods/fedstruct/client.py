"""What a client of FedStruct is made of around the equations of `algorithm.py`: its first state, its rows of Abar, its
scores; and the same for all clients of a process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.federation.roles import Cohort
from isthmus.methods.cohort_training import ModelCohort
from isthmus.methods.evaluation import Evaluation, Tally
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.features import NSF, FeatureClient, Fingerprint, check_replicas, fingerprint
from isthmus.methods.fedstruct.powers_hardened import HardenedPowers
from isthmus.methods.fedstruct.powers_published import PublishedPowers
from isthmus.methods.fedstruct.state import NO_STEPS, FedStructState, block_of
from isthmus.methods.learners import Streams, dropout_source
from isthmus.nn import train
from isthmus.nn.inputs import Inputs, stack_inputs
from isthmus.nn.loss import Shifted, get_loss
from isthmus.nn.optim import fresh_state
from isthmus.nn.structure import Group, Matrix, Reach, StructureNet
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights

FEATURE, STRUCTURE = "feature.", "structure."
"""Prefixes of theta_f and theta_s in the names of weights."""
BETAS = STRUCTURE + StructureNet.BETAS

T = TypeVar("T")


class StructureClient(PublishedPowers, HardenedPowers, FeatureClient):
    """A client with both branches. Features and labels stay in ``self.data``; its part of Abar and S is its state."""

    keeps: ClassVar[tuple[str, ...]] = ("own_nsf", "own_ids")
    keeps_of_data: ClassVar[tuple[str, ...]] = ("owner", "columns", "entering", "combined", "diagonal")

    def setup(self) -> None:
        super().setup()
        self.net = self.config.net(self.data.num_classes)
        self.inputs: Inputs = self.learner.inputs  # type: ignore[attr-defined]
        self._derived: dict[str, tuple[tuple[Tensor, ...], Any]] = {}

    def initial_state(self) -> FedStructState:
        config = self.config
        weights = first_weights(config, get_weights(self.learner.model), self.data.num_classes, self.common)
        optimizer = fresh_state(config.optimizer, weights) if config.algorithm == "fedavg" else NO_STEPS
        diagonal = torch.zeros(self.data.num_nodes, config.powers, dtype=config.dtype)
        secret = b"" if config.protocol == "published" else secrets.token_bytes(32)
        return FedStructState(weights, optimizer, diagonal, secret)

    def export(self) -> Weights:
        replica = {} if self.state.nsf is None or not self.config.learns_nsf else {NSF: self.state.nsf}
        return {**self.state.weights, **replica}

    @property
    def clients(self) -> tuple[StructureClient, ...]:
        """Itself: a cohort of one."""
        return (self,)

    @property
    def group(self) -> Group:
        return Group.of([self.training_reach])

    def keep_rows(self, nsf: Tensor) -> None:
        """Own rows of a learned S, to take away."""
        if self.config.learns_nsf:
            self.state = replace(self.state, own_nsf=nsf[self.state.columns], own_ids=self.data.node_id)

    def nsf(self, given: Tensor | None) -> Tensor:
        """S: what the server has sent, or the client's own copy."""
        nsf = self.state.nsf if given is None else given
        if nsf is None:
            raise RunError("no structure features: run the phases in order")
        return nsf

    # -- Abar --------------------------------------------------------------------------------------

    @property
    def training_reach(self) -> Reach:
        """Abar's rows of the training nodes, on the nodes they reach."""
        rows = torch.nonzero(self.data.train).flatten().numpy()
        return self._once(
            "train", lambda blocks: Reach.of([block_of(block)[rows] for block in blocks], self.config.dtype)
        )

    @property
    def abar(self) -> tuple[Matrix, ...]:
        """Abar's rows of all own nodes, over all nodes; where betas are trained, of every power."""
        return self._once(
            "all", lambda blocks: tuple(Matrix.of(block_of(block), self.config.dtype) for block in blocks)
        )

    def _once(self, name: str, make: Callable[[tuple[Tensor, ...]], T]) -> T:
        """Made from state, so made again when that is another."""
        blocks = self.state.combined
        if not blocks:
            raise RunError("the powers have not been exchanged: run the phases in order")
        kept = self._derived.get(name)
        if kept is None or kept[0] is not blocks:
            self._derived[name] = kept = blocks, make(blocks)
        made: T = kept[1]
        return made

    def restore(self, weights: Weights, kept: Mapping[str, Any], *, as_trained: bool) -> None:
        super().restore({name: tensor for name, tensor in weights.items() if name != NSF}, kept, as_trained=as_trained)

    def logits(self) -> Tensor:
        """What was scored last."""
        if self.state.scored is None:
            raise RunError("no predictions yet: run the phases in order")
        return self.state.scored


class StructureCohort(Cohort[StructureClient]):
    """Clients of one process, differentiated together: the large products of g are made once for all
    (`isthmus.nn.structure`). Clients keep their own state; replicas of S are one tensor.
    """

    def __init__(self, clients: Sequence[StructureClient]) -> None:
        super().__init__(clients)
        self.parties = tuple(client.party for client in clients)
        self.inputs = stack_inputs([client.inputs for client in clients])
        self._group: tuple[Any, Group] | None = None

    @classmethod
    def worthwhile(cls, clients: Sequence[StructureClient]) -> bool:
        return clients[0].config.algorithm == "fedsgd" and ModelCohort.worthwhile(clients)

    def load(self) -> None:
        replicas = {client.party: client.state.nsf for client in self.clients if client.state.nsf is not None}
        if replicas and self.clients[0].config.replicated:
            check_replicas({party: Fingerprint(fingerprint(nsf)) for party, nsf in replicas.items()})

    @property
    def group(self) -> Group:
        """The training rows of all clients; made again when their Abar has changed."""
        blocks = tuple(client.state.combined for client in self.clients)
        if self._group is None or any(a is not b for a, b in zip(self._group[0], blocks, strict=True)):
            self._group = blocks, Group.of([client.training_reach for client in self.clients])
        return self._group[1]


def first_weights(config: FedStructConfig, feature: Weights, num_classes: int, common: Stream) -> dict[str, Tensor]:
    """theta at the start: the feature branch as every other method starts it."""
    structure = config.net(num_classes).first_weights(common.child("structure"), config.dtype)
    if config.train_betas:
        structure[StructureNet.BETAS] = torch.tensor([config.beta0, *config.power_weights], dtype=config.dtype)
    return {**named(feature, FEATURE), **named(structure, STRUCTURE)}


def own_loss(
    client: Any, inputs: Inputs, weights: Weights, z: Sequence[Tensor], streams: Collection[Streams]
) -> tuple[dict[str, Tensor], Tensor]:
    """The mean loss of q_v = h_v + z_v (E1, E3) of every client by itself, differentiated.

    Args:
        client: One of them, for the settings and the model.
        z: Of the training nodes of each client.

    Returns:
        dL_i/dtheta_f = sum_v (dh_v/dtheta_f)^T r_v, stacked for many; r_v = yhat_v - y_v of all training nodes.
    """
    config, loss = client.config, Shifted(get_loss(client.config.loss), padded(z, inputs))
    dropout = dropout_source(config, streams)
    model, theta_f = client.learner.model, below(weights, FEATURE)
    theta_f, _ = train.gradients(model, theta_f, inputs, loss=loss.loss, dropout=dropout)
    return named(theta_f, FEATURE), inputs.unpad(loss.residual)


def logits_of(client: Any, weights: Weights, z: Tensor) -> Tensor:
    """E1 of own nodes: h + z, or z alone with ``inference=structure``."""
    return z if client.config.inference == "structure" else client.learner.logits(below(weights, FEATURE)) + z


def named(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights with a prefix to their names."""
    return {prefix + name: tensor for name, tensor in weights.items()}


def below(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights whose names have a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def stack_evaluations(rows: Sequence[Evaluation]) -> Evaluation:
    """Tallies of many clients as tensors, one value each."""
    parts: dict[str, Any] = {}
    for part in rows[0].parts:
        tallies = [row.parts[part] for row in rows]
        correct: Any = torch.tensor([t.correct for t in tallies])
        total: Any = torch.tensor([t.total for t in tallies])
        loss: Any = torch.tensor([t.loss for t in tallies], dtype=torch.float64)
        parts[part] = Tally(correct, total, loss)
    return Evaluation(parts)


def padded(rows: Sequence[Tensor], inputs: Inputs) -> Tensor:
    """Rows of each client, one client below the other as the feature branch has them: inverse of ``inputs.unpad``."""
    return torch.cat([torch.nn.functional.pad(part, (0, 0, 0, inputs.padded[-1] - len(part))) for part in rows])
