"""An owner in the streamed protocol: its part of every hop, forth and back (`streamed.py` has the equations)."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import RunError
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Cohort, handler
from isthmus.graph.powers import as_csr
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.fedstruct.algorithm import step_nsf, step_theta
from isthmus.methods.fedstruct.client import BETAS, STRUCTURE, first_weights, logits_of, named, own_loss
from isthmus.methods.fedstruct.closed_edges import closed_arcs, told_apart
from isthmus.methods.fedstruct.directory import EdgeCheck, EdgeClient, rows_of
from isthmus.methods.fedstruct.features import NSF, degree_feature, degrees, random_feature
from isthmus.methods.fedstruct.state import NO_COLUMNS, NO_STEPS, block_of, tensor_of
from isthmus.methods.fedstruct.streamed_cohort import StreamedCohort
from isthmus.methods.fedstruct.streamed_hops import (
    ArcList,
    Backward,
    ClosedNodes,
    ExposedNodes,
    Forward,
    Hop,
    Hops,
    KnownValues,
    Members,
    OwnAverage,
    Settled,
    Start,
    ThetaStep,
    betas_of,
    structure_of,
)
from isthmus.methods.training import ModelState
from isthmus.nn.inputs import Inputs
from isthmus.nn.kernels import spmm
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.nn.sparse import Sparse, canonical
from isthmus.nn.structure import Group, Pass, Reach
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, scaled

KEPT_VALUES = 2**23
"""Hidden values of g that an owner keeps from the forward to the backward pass; with more it computes them again."""
NO_ARCS = tensor_of(sp.csr_matrix(np.zeros((0, 0), dtype=np.float32)))

FIXED_FEATURES: Mapping[str, Callable[[NodeData, int], Tensor]] = {
    "degree": lambda data, width: degree_feature(degrees(data), width)
}
"""Structure features that an owner makes of its own nodes and their edges alone: (data, width) -> (n_i, width)."""


# -- client ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamedState(ModelState):
    """The model it was given last, and what it has of the graph.

    Args:
        secret: Source of the randomness nobody else can repeat; never leaves the client.
        forward: (out-slots of all others, n_i) weights of arcs from others' nodes to own ones.
        backward: (in-slots of all others, n_i) weights of arcs from own nodes to others' ones.
        out_slots, in_slots: Slots of each other client, in the order of the rows.
        trained_ids: Own nodes that had a training label when edges were compared first, see ``withhold_exposed``.
        own_nsf, own_ids: Its rows of S, and whose they are; None and empty where S is not learned.
        nsf_optimizer: Of its rows of S.
        scored: What the model said of its nodes when it was scored last (n_i, C).
    """

    secret: bytes
    forward: Tensor = NO_ARCS
    backward: Tensor = NO_ARCS
    out_slots: Mapping[str, int] = field(default_factory=dict)
    in_slots: Mapping[str, int] = field(default_factory=dict)
    trained_ids: Tensor = NO_COLUMNS
    own_nsf: Tensor | None = None
    own_ids: Tensor = NO_COLUMNS
    nsf_optimizer: OptimizerState = NO_STEPS
    scored: Tensor | None = None


class StreamedClient(EdgeClient):
    """One owner. Features, labels and its rows of S stay here; sums over its nodes leave."""

    state: StreamedState
    keeps: ClassVar[tuple[str, ...]] = ("secret", "own_nsf", "own_ids", "trained_ids")
    keeps_of_data: ClassVar[tuple[str, ...]] = ("forward", "backward", "out_slots", "in_slots")
    cohort: ClassVar[type[Cohort[Any]] | None] = StreamedCohort

    def setup(self) -> None:
        super().setup()
        self.net = self.config.net(self.data.num_classes)
        self.inputs: Inputs = self.learner.inputs  # type: ignore[attr-defined]
        self.train_rows = torch.nonzero(self.data.train).flatten()
        self.group = Group.of([Reach.itself(self.data.num_nodes)])
        self.entered = np.unique(self.cross.own.numpy()[~self.cross.outgoing.numpy()])  # row of each in-slot
        self._kept: dict[str, tuple[Tensor, sp.csr_matrix]] = {}
        steps = sp.csr_matrix(sp.diags(1.0 / self.degree) @ self.inner)
        self.steps = Sparse(canonical(steps, self.config.dtype))  # Dt^-1 At, own columns
        self.inverse = torch.from_numpy(1.0 / self.degree).to(self.config.dtype).unsqueeze(1)

    def initial_state(self) -> StreamedState:
        config = self.config
        weights = first_weights(config, get_weights(self.learner.model), self.data.num_classes, self.common)
        optimizer = fresh_state(config.optimizer, weights) if config.algorithm == "fedavg" else NO_STEPS
        return StreamedState(weights, optimizer, secrets.token_bytes(32))

    def logits(self) -> Tensor:
        """What was scored last."""
        if self.state.scored is None:
            raise RunError("no predictions yet: run the phases in order")
        return self.state.scored

    # -- setup -------------------------------------------------------------------------------------

    @handler
    def list_arcs(self, members: Members) -> Mapping[PartyId, ArcList]:
        """Tell every other client the edges shared with it, and the slots of own ends."""
        others = [client for client in members.clients if client != self.party]
        slots = np.full((2, self.data.num_nodes), -1)
        for way, rows in enumerate((self.entered, self.boundary)):
            slots[way, rows] = np.arange(len(rows))
        self.scratch.unknown = self.to_strangers(others)
        found = {}
        for client in others:
            arcs = self.shared_with(client)
            own, outgoing = self.cross.own[arcs], self.cross.outgoing[arcs].long()
            found[client] = ArcList(
                own=self.data.node_id[own],
                other=self.cross.other[arcs],
                outgoing=outgoing,
                weight=self.cross.weight[arcs],
                slot=torch.from_numpy(slots[outgoing.numpy(), own.numpy()]),
                out_slots=len(self.boundary),
                in_slots=len(self.entered),
            )
        return found

    @handler
    def check_arcs(self, mail: Mapping[PartyId, ArcList]) -> EdgeCheck:
        """Keep where sums over own nodes belong; count what only one end knows."""
        missing = unanswered = 0
        for client, edges in sorted(mail.items()):
            only_theirs, only_mine = self.disagreement(client, edges)
            missing, unanswered = missing + only_theirs, unanswered + only_mine
        arcs = dict(sorted(mail.items()))
        self._place(arcs)
        if self.config.withhold_exposed:
            self.scratch.arcs = arcs
        if not self.state.trained_ids.numel():
            self.state = replace(self.state, trained_ids=self.data.node_id[self.data.train])
        if self.config.learns_nsf and self.state.own_nsf is None:
            # Whoever could repeat the draws would know every value of the first round.
            draws = self.generator_from(self.state.secret, "nsf")
            first = random_feature(self.data.num_nodes, self.net.width, draws).to(self.config.dtype)
            self.state = replace(self.state, own_nsf=first, own_ids=self.data.node_id)
        return EdgeCheck(missing, unanswered, self.scratch.unknown)

    def _place(self, arcs: Mapping[PartyId, ArcList]) -> None:
        """Keep the matrices of sums over own nodes that go to the others' slots."""
        if not arcs:
            return
        # An arc that leaves the other's node enters ours: forward sums go along it, backward ones against it.
        forward = [self._placed(edges, edges.outgoing == 1, edges.out_slots) for edges in arcs.values()]
        backward = [self._placed(edges, edges.outgoing == 0, edges.in_slots) for edges in arcs.values()]
        self.state = replace(
            self.state,
            forward=tensor_of(as_csr(sp.vstack(forward, format="csr"))),
            backward=tensor_of(as_csr(sp.vstack(backward, format="csr"))),
            out_slots={client: edges.out_slots for client, edges in arcs.items()},
            in_slots={client: edges.in_slots for client, edges in arcs.items()},
        )

    def _placed(self, edges: ArcList, chosen: Tensor, slots: int) -> sp.csr_matrix:
        """Weights of arcs by the other's slot and the own node. (slots, n_i)"""
        rows, weight = edges.slot[chosen].numpy(), edges.weight[chosen].to(self.config.dtype).numpy()
        own = rows_of(edges.other[chosen].numpy(), self.data.node_id.numpy())
        known = (own >= 0) & (rows >= 0) & (rows < slots)
        shape = (slots, self.data.num_nodes)
        return sp.csr_matrix((weight[known], (rows[known], own[known])), shape=shape)

    @handler
    def tell_exposed(self) -> Mapping[PartyId, ExposedNodes]:
        """Tell every other client which of its nodes the sums this one is given tell apart from all others."""
        found = told_apart(self.scratch.arcs)
        return {client: ExposedNodes(*(torch.from_numpy(part) for part in parts)) for client, parts in found.items()}

    @handler
    def note_exposed(self, mail: Mapping[PartyId, ExposedNodes]) -> None:
        """Own training nodes that somebody could tell apart are closed towards it."""
        chosen = {client: torch.isin(told.ids, self.state.trained_ids) for client, told in mail.items()}
        self.scratch.closed = {
            client: ClosedNodes(told.ids[chosen[client]], told.keep[chosen[client]]) for client, told in mail.items()
        }

    @handler
    def tell_closed(self) -> Mapping[PartyId, ClosedNodes]:
        """Tell whoever could tell own training nodes apart that their edges are left out between the two."""
        closed: Mapping[PartyId, ClosedNodes] = self.scratch.closed
        return closed

    @handler
    def close(self, mail: Mapping[PartyId, ClosedNodes]) -> Settled:
        """Leave out edges of closed nodes, own ones and others'."""
        settled = True
        for client, edges in self.scratch.arcs.items():
            mine, theirs = self.scratch.closed.get(client), mail.get(client)
            shut = torch.zeros(len(edges.own), dtype=torch.bool)
            if mine is not None:
                shut |= closed_arcs(edges.other, edges.own, mine.ids, mine.keep)
            if theirs is not None:
                shut |= closed_arcs(edges.own, edges.other, theirs.ids, theirs.keep)
            if bool(shut.any()):
                parts = {name: getattr(edges, name)[~shut] for name in ("own", "other", "outgoing", "weight", "slot")}
                self.scratch.arcs[client] = replace(edges, **parts)
                settled = False
        if not settled:
            self._place(self.scratch.arcs)
        return Settled(settled)

    # -- forward -----------------------------------------------------------------------------------

    @handler
    def begin(self, start: Start) -> None:
        """Z^(0) = g(S) of own nodes."""
        weights = start.weights or self.scratch.weights
        rows = self.rows_of_s()
        values = self.first_values(weights, training=start.training, keep=rows.numel() <= KEPT_VALUES)
        self.start_hops(weights, values, start.total, training=start.training)

    def start_hops(self, weights: Weights, values: Tensor, total: float, *, training: bool) -> None:
        self.scratch.weights, self.scratch.total = weights, total
        rows = self.train_rows if training else None
        keep = training and self.config.train_betas
        self.scratch.hops = Hops(values, betas_of(self.config, weights), rows, keep=keep)

    def first_values(self, weights: Weights, *, training: bool, keep: bool = False) -> Tensor:
        """g(S) of own nodes; in training with dropout, and with ``keep`` what the backward pass needs. (n_i, C)"""
        rows = self.rows_of_s()
        if not training:
            return self.net.embed(structure_of(weights), rows)
        self.scratch.drops = self.stream("structure")
        structure = self.structure_pass(weights)
        self.scratch.structure = structure if keep else None
        return structure.clients[0].z

    def structure_pass(self, weights: Weights) -> Pass:
        """g on own nodes, ready for the backward pass; the same every time it is asked for in a round."""
        drops: Stream = self.scratch.drops
        masks = [drops.torch()] if self.config.dropout else None
        return self.net.run(structure_of(weights), self.rows_of_s(), self.group, masks)

    def rows_of_s(self) -> Tensor:
        """S_i: own rows of structure features."""
        config = self.config
        if not config.learns_nsf:
            if not hasattr(self, "_fixed"):
                self._fixed = FIXED_FEATURES[config.nsf](self.data, config.nsf_dim).to(config.dtype)
            return self._fixed
        if self.state.own_nsf is None:
            raise RunError("no structure features: run the phases in order")
        return self.state.own_nsf

    @handler
    def send_forward(self, hop: Hop) -> Mapping[PartyId, Forward]:
        """Sums of Z^(l-1) over own nodes, to everybody: zeros where there is no edge, so that mail tells of none."""
        self.scratch.hop = hop.hop
        sums = spmm(self.arcs("forward"), self.scratch.hops.values)
        return {client: Forward(self._noisy(part, client)) for client, part in self._split(sums, self.state.out_slots)}

    def _noisy(self, sums: Tensor, client: PartyId) -> Tensor:
        """Sums with this sender's share of the noise: of the same sums always the same, or whoever is given them again
        and again, as in predictions, would average it away; of others another, or differences would be without any.
        """
        if not self.config.forward_noise:
            return sums
        content = hashlib.sha256(sums.contiguous().numpy().tobytes()).hexdigest()
        generator = self.generator_from(self.state.secret, f"forward noise {client} {content}")
        scale = self.config.forward_noise / np.sqrt(len(self.state.out_slots))
        return sums + torch.from_numpy(generator.normal(scale=scale, size=tuple(sums.shape))).to(sums.dtype)

    @handler
    def take_forward(self, mail: Forward | None) -> None:
        """Z^(l) = Dt^-1 (own part + what came)."""
        hops: Hops = self.scratch.hops
        values = spmm(self.steps.csr, hops.values)
        if mail is not None:
            rows = torch.from_numpy(self.boundary)
            values.index_add_(0, rows, mail.sums.to(values.dtype) * self.inverse[rows])
        hops.next(values, self.scratch.hop)

    # -- backward ----------------------------------------------------------------------------------

    @handler
    def differentiate(self) -> None:
        """Own loss (E1, E3): the gradient of theta_f, and R, in units of 1/n_t."""
        weights, hops = self.scratch.weights, self.scratch.hops
        self.scratch.theta_f, residual = own_loss(self, self.inputs, weights, [hops.z], [self.stream])
        hops.turn(residual * self.samples())

    @handler
    def send_backward(self, hop: Hop) -> Mapping[PartyId, Backward]:
        """Sums of G^(l) / Dt over own nodes, to everybody."""
        self.scratch.hop = hop.hop
        sums = spmm(self.arcs("backward"), self.scratch.hops.grad * self.inverse)
        return {client: Backward(part) for client, part in self._split(sums, self.state.in_slots)}

    @handler
    def take_backward(self, mail: Backward | None) -> None:
        """G^(l-1) = beta_{l-1} R + Ah^T G^(l)."""
        hops: Hops = self.scratch.hops
        grad = spmm(self.steps.transposed, hops.grad)
        if mail is not None:
            grad.index_add_(0, torch.from_numpy(self.entered), mail.sums.to(grad.dtype))
        hops.back(grad, self.scratch.hop)

    @handler
    def finish(self) -> ThetaStep:
        """Step own rows of S; give the part of theta."""
        grads, share = self.finished(self.scratch.hops.grad)
        if self.config.train_betas:
            grads[BETAS] = self.scratch.hops.beta_gradients() / self.scratch.total
        theta = {**scaled(self.scratch.theta_f, share), **grads}
        return ThetaStep({name: theta[name] for name in self.scratch.weights}, share)

    def finished(self, grad: Tensor) -> tuple[dict[str, Tensor], float]:
        """From G^(0) in units of 1/n_t: the gradient of theta_s over own nodes (Prop. 3); rows of S have stepped."""
        config, scratch = self.config, self.scratch
        structure: Pass = scratch.structure or self.structure_pass(scratch.weights)
        theta_s, nsf_grad = structure.gradients([grad / scratch.total], [1.0], nsf=config.learns_nsf)
        scratch.structure = None
        del structure  # a step takes as much memory again
        if nsf_grad is not None:  # Prop. 2
            nsf, optimizer = self.rows_of_s(), self.state.nsf_optimizer
            if config.optimizer != "sgd" and not optimizer.first:
                optimizer = fresh_state(config.optimizer, {NSF: nsf})
            nsf, optimizer = step_nsf(config, nsf, nsf_grad, optimizer, self.round)
            self.state = replace(self.state, own_nsf=nsf, nsf_optimizer=optimizer)
        return named(theta_s, STRUCTURE), self.samples() / scratch.total

    # -- FedAvg (5.4) ------------------------------------------------------------------------------

    @handler
    def step_locally(self) -> None:
        """A step of the owner's own optimiser, on the gradient of the whole loss for its own copy of theta, over its
        share: so one plain step averages to the step of FedSGD. An owner without a share keeps theta: what its nodes
        would give theta_s is left out.
        """
        step = self.finish()
        if step.share:
            grads = scaled(step.gradients, 1.0 / step.share)
            weights, optimizer = step_theta(self.config, self.scratch.weights, grads, self.state.optimizer, self.round)
            self.scratch.weights = weights
            self.state = replace(self.state, optimizer=optimizer)
        self.scratch.share = step.share

    @handler
    def average(self) -> OwnAverage:
        return OwnAverage(scaled(self.scratch.weights, self.scratch.share), self.scratch.share)

    # -- scores and prediction ---------------------------------------------------------------------

    @handler
    def score(self) -> Evaluation:
        """Score the model on own nodes."""
        self.classify()
        return self.evaluate()

    @handler
    def classify(self) -> None:
        """What the model says of own nodes, into the client's state."""
        self.keep_scores(self.scratch.weights, self.scratch.hops.z)

    def keep_scores(self, weights: Weights, z: Tensor) -> None:
        self.state = replace(self.state, weights=weights, scored=logits_of(self, weights, z))

    @handler
    def begin_known(self) -> None:
        """Z^(0) of the nodes that were there in training; zeros for new ones."""
        nodes, weights = self.data.node_id, self.state.weights
        known = np.ones(len(nodes), dtype=bool)
        if self.config.learns_nsf:
            if self.state.own_nsf is None:
                raise RunError("no structure features: train before you predict")
            place = rows_of(nodes.numpy(), self.state.own_ids.numpy())
            known = place >= 0
            found = self.net.embed(structure_of(weights), self.state.own_nsf[torch.from_numpy(place[known])])
            values = found.new_zeros(len(nodes), found.shape[1])
            values[torch.from_numpy(known)] = found
        else:
            values = self.first_values(weights, training=False)
        self.scratch.known = torch.from_numpy(known)
        self.start_hops(weights, values, 1.0, training=False)

    @handler
    def send_known(self) -> Mapping[PartyId, KnownValues]:
        """Sums of Z^(0) over own known nodes, and their weight."""
        matrix, known = self.arcs("forward"), self.scratch.known.to(self.config.dtype).unsqueeze(1)
        sums, mass = spmm(matrix, self.scratch.hops.values * known), spmm(matrix, known)
        parts = zip(self._split(sums, self.state.out_slots), self._split(mass, self.state.out_slots), strict=True)
        return {client: KnownValues(self._noisy(part, client), weight) for (client, part), (_, weight) in parts}

    @handler
    def take_known(self, mail: KnownValues | None) -> None:
        """The value of a new node is the mean of its known neighbours' values; without any, that of the owner's known
        nodes.
        """
        known, values = self.scratch.known, self.scratch.hops.values
        inner = canonical(self.inner, self.config.dtype)
        ones = known.to(values.dtype).unsqueeze(1)
        sums, mass = spmm(inner, values * ones), spmm(inner, ones)
        if mail is not None:
            rows = torch.from_numpy(self.boundary)
            sums.index_add_(0, rows, mail.sums.to(values.dtype))
            mass.index_add_(0, rows, mail.mass.to(values.dtype))
        near = mass.flatten() > 1e-9  # masked sums are exact to 1e-12
        elsewhere = values[known].mean(0) if bool(known.any()) else torch.zeros(values.shape[1], dtype=values.dtype)
        guessed = torch.where(near.unsqueeze(1), sums / mass.clamp(min=1e-12), elsewhere)
        self.start_hops(self.scratch.weights, torch.where(known.unsqueeze(1), values, guessed), 1.0, training=False)

    # -- own ---------------------------------------------------------------------------------------

    def arcs(self, name: str) -> sp.csr_matrix:
        """A matrix of the state, made ready once."""
        tensor: Tensor = getattr(self.state, name)
        kept = self._kept.get(name)
        if kept is None or kept[0] is not tensor:
            matrix = block_of(tensor) if tensor.shape[1] else sp.csr_matrix((0, self.data.num_nodes))
            self._kept[name] = kept = tensor, canonical(as_csr(matrix), self.config.dtype)
        return kept[1]

    @staticmethod
    def _split(sums: Tensor, slots: Mapping[str, int]) -> list[tuple[str, Tensor]]:
        """Rows of each other client."""
        return list(zip(slots, torch.split(sums, list(slots.values())) if slots else (), strict=True))
