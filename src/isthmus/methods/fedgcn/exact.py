"""FedGCN's exact form: a client gets the sums over its nodes' neighbours, wherever those are, and no single feature.

1. Each client tells every other which of its nodes have neighbours there, and in which row of the sums (`Slots`).
2. Each sends its part of the sums to every other; the receiver sees only the total (`PartialSums`):
   a_i = sum_j Ahat_ij x_j with Ahat_ij = 1 / sqrt(d_i d_j); each owner knows the degrees of its nodes.
3. With 2 hops, each sends a_j and d_j of its boundary nodes to the owners of their neighbours (`FarSums`).

Models have at most two propagations. Where a model starts with a LayerNorm, what is summed is the normalised feature
(gain and shift come later, `isthmus.nn.first_layer_input`), so the sums are exact too.

# Differs from the paper: partial sums are added by the federation's summed mail (masked with ``secure_sum``), because
masks cost less than CKKS ciphertexts and hide the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import CrossEdges, NodeData
from isthmus.errors import DataError
from isthmus.federation.interface import Federation
from isthmus.federation.messages import Count, Embedding, Identifier, Message, PartyId, Structure
from isthmus.federation.roles import handler
from isthmus.federation.script import ScriptLine, mail
from isthmus.graph.normalise import from_torch_csr
from isthmus.methods.fedavg import FedAvgClient, FedAvgConfig
from isthmus.methods.training import ModelState
from isthmus.nn.backbone import Backbone
from isthmus.nn.first_layer_input import LAYER_NORM_EPS, build_operand
from isthmus.nn.inputs import Inputs
from isthmus.nn.sparse import Sparse, canonical, vertical
from isthmus.records import Record


@dataclass(frozen=True)
class Slots(Message):
    """Which row of the sums each of the sender's nodes has that the receiver sends arcs to."""

    ids: Identifier[Tensor]
    slots: Identifier[Tensor]
    count: Count[int]


@dataclass(frozen=True)
class PartialSums(Message):
    """sum over the sender's nodes j of x_j / sqrt(d_j), for each slot of the receiver; with the two sums a LayerNorm
    needs.
    """

    sums: Embedding[Tensor]


@dataclass(frozen=True)
class FarSums(Message):
    """a_j and d_j of the sender's nodes that the receiver has arcs from."""

    ids: Identifier[Tensor]
    sums: Embedding[Tensor]
    degree: Structure[Tensor]


@dataclass(frozen=True)
class NeighbourSums(Record):
    """What came of the exchange.

    Args:
        own: a_i of own nodes (n_i, F + 2). Columns: x / sigma, mu / sigma, 1; without LayerNorm x, 0, 1.
        far: a_j and d_j of direct neighbours elsewhere, by ascending id; None with 1 hop.
    """

    own: Tensor
    far: FarSums | None = None


@dataclass(frozen=True)
class ExactState(ModelState):
    """A model and the sums."""

    sums: NeighbourSums | None = None


class ExactClient(FedAvgClient[FedAvgConfig]):
    """What a client does in the exact exchange."""

    state: ExactState
    cross: CrossEdges

    def features(self) -> NDArray[np.float64]:
        """(n_i, F + 2): the feature, as the model's first layer will take it, and what a LayerNorm's shift needs."""
        x = from_torch_csr(self.data.x).toarray() if self.data.x.layout == torch.sparse_csr else self.data.x.numpy()
        x = x.astype(np.float64)
        if not self.learner.model.norm_names:
            return np.column_stack([x, np.zeros(len(x)), np.ones(len(x))])
        mean, deviation = x.mean(1), np.sqrt(x.var(1) + LAYER_NORM_EPS)
        return np.column_stack([x / deviation[:, None], mean / deviation, np.ones(len(x))])

    def arriving_rows(self) -> NDArray[np.int64]:
        """Own nodes that arcs from elsewhere enter, ascending: the slots."""
        return np.unique(self.cross.own.numpy()[~self.cross.outgoing.numpy()])

    @handler
    def give_slots(self) -> Mapping[PartyId, Slots]:
        rows, arriving = self.arriving_rows(), ~self.cross.outgoing
        mail = {}
        for number, client in enumerate(self.cross.owners):
            mine = np.unique(self.cross.own[arriving & (self.cross.owner == number)].numpy())
            if client != self.party:
                slots = torch.from_numpy(np.searchsorted(rows, mine))
                mail[client] = Slots(self.data.node_id[torch.from_numpy(mine)], slots, len(rows))
        return mail

    @handler
    def take_slots(self, mail: Mapping[PartyId, Slots]) -> None:
        self.scratch.slots = dict(mail)

    @handler
    def give_sums(self) -> Mapping[PartyId, PartialSums]:
        """Partial sums for every client, zeros included, so that the sender list tells nothing."""
        scaled = self.features() / np.sqrt(in_degree(self.data))[:, None]
        outgoing, owner, other = (getattr(self.cross, name).numpy() for name in ("outgoing", "owner", "other"))
        mail = {}
        for client, slots in self.scratch.slots.items():
            arcs = np.flatnonzero(outgoing & (owner == self.cross.owners.index(client)))
            order = np.argsort(slots.ids.numpy())
            listed = slots.ids.numpy()[order]
            found = np.searchsorted(listed, other[arcs])
            if (found >= len(order)).any() or not np.array_equal(listed[found], other[arcs]):
                raise DataError(
                    f"{client} does not list all its cross edges with {self.party}: both ends must list every cross "
                    "edge"
                )
            weight = self.cross.weight.numpy()[arcs].astype(np.float64)
            shape = (slots.count, self.data.num_nodes)
            matrix = _summed(weight, slots.slots.numpy()[order][found], self.cross.own.numpy()[arcs], shape)
            mail[client] = PartialSums(torch.from_numpy(matrix @ scaled).to(self.config.dtype))
        return mail

    @handler
    def take_sums(self, total: PartialSums | None) -> None:
        """a_i = (own part + that of all others) / sqrt(d_i)."""
        scale = np.sqrt(in_degree(self.data))[:, None]
        target, source, weight = _own_entries(self.data)
        sums = _summed(weight, target, source, (len(scale), len(scale))) @ (self.features() / scale)
        if total is not None:
            sums[self.arriving_rows()] += total.sums.numpy()
        self.state = replace(self.state, sums=NeighbourSums(torch.from_numpy(sums / scale).to(self.config.dtype)))

    @handler
    def give_far(self) -> Mapping[PartyId, FarSums]:
        """2 hops: a_j and d_j to the owners of j's out-neighbours."""
        assert self.state.sums is not None
        degree = torch.from_numpy(in_degree(self.data))
        mail = {}
        for number, client in enumerate(self.cross.owners):
            rows = torch.unique(self.cross.own[self.cross.outgoing & (self.cross.owner == number)])
            if client != self.party and rows.numel():
                mail[client] = FarSums(self.data.node_id[rows], self.state.sums.own[rows], degree[rows])
        return mail

    @handler
    def take_far(self, mail: Mapping[PartyId, FarSums]) -> None:
        assert self.state.sums is not None
        own = self.state.sums.own
        nothing = FarSums(torch.zeros(0, dtype=torch.int64), own[:0], torch.zeros(0, dtype=torch.float64))
        parts = [nothing, *mail.values()]
        ids, sums, degree = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "sums", "degree"))
        order = torch.argsort(ids)
        self.state = replace(self.state, sums=NeighbourSums(own, FarSums(ids[order], sums[order], degree[order])))


def exchange(federation: Federation, hops: int) -> None:
    """Slots, sums, and with 2 hops the neighbours' sums."""
    federation.exchange(ExactClient.give_slots, ExactClient.take_slots)
    federation.exchange(ExactClient.give_sums, ExactClient.take_sums, combine="sum")
    if hops == 2:
        federation.exchange(ExactClient.give_far, ExactClient.take_far)


def script(hops: int) -> tuple[ScriptLine, ...]:
    """What is exchanged before training."""
    lines = (
        mail(ExactClient.give_slots, ExactClient.take_slots),
        mail(ExactClient.give_sums, ExactClient.take_sums, summed=True),
    )
    return (*lines, mail(ExactClient.give_far, ExactClient.take_far)) if hops == 2 else lines


def inputs(data: NodeData, model: Backbone, known: NeighbourSums, dtype: torch.dtype, mask: Tensor) -> Inputs:
    """Inputs of the nodes in the mask: their first product is already aggregated, and their propagation knows direct
    neighbours elsewhere.
    """
    sums = known.own if known.far is None else torch.cat([known.own, known.far.sums])
    matrix = second_layer(data, known.far)  # (n_i, n_i + foreign)
    last = np.flatnonzero(mask.numpy())
    orders = [last]
    if model.hops == 2:
        further = np.setdiff1d(np.unique(matrix[last].indices), last)
        orders = [np.concatenate([last, further]), last]
    padded = tuple(max(1, len(order)) for order in orders)
    features = sp.csr_matrix(sums[:, :-2].numpy())
    operand = build_operand(features, None, orders[0], padded[0], input_norm=False, dtype=dtype)
    if model.norm_names:
        u, v = (_padded(sums[torch.from_numpy(orders[0]), column].to(dtype), padded[0]) for column in (-2, -1))
        operand = replace(operand, u=u, v=v)
    hidden: tuple[Sparse, ...] = ()
    if model.hops == 2:
        part = matrix[orders[1]][:, orders[0]].tocsr()
        hidden = (Sparse(vertical([canonical(part, dtype)], padded[1], padded[0])),)
    rows = torch.from_numpy(last)
    y, weight = torch.zeros(padded[-1], dtype=torch.int64), torch.zeros(padded[-1], dtype=dtype)
    y[: len(rows)] = data.y[rows].clamp(min=0)
    weight[: len(rows)] = 1.0 / max(1, len(rows))
    (name,) = model.first_terms
    return Inputs(1, {name: operand}, hidden, tuple((len(order),) for order in orders), padded, y, weight)


def second_layer(data: NodeData, far: FarSums | None) -> sp.csr_matrix:
    """Rows of Ahat of own nodes, over own nodes and, with 2 hops, foreign ones: Ahat_ij = 1 / sqrt(d_i d_j)."""
    assert data.cross is not None
    scale = 1.0 / np.sqrt(in_degree(data))
    rows, columns, own_weight = _own_entries(data)
    values = own_weight * scale[rows] * scale[columns]
    if far is None:
        return _summed(values, rows, columns, (data.num_nodes, data.num_nodes))
    arriving = ~data.cross.outgoing.numpy()
    far_scale = 1.0 / np.sqrt(far.degree.numpy())
    number = np.searchsorted(far.ids.numpy(), data.cross.other.numpy()[arriving])
    far_rows, weight = data.cross.own.numpy()[arriving], data.cross.weight.numpy()[arriving]
    values = np.append(values, weight * scale[far_rows] * far_scale[number])
    shape = (data.num_nodes, data.num_nodes + len(far_scale))
    return _summed(values, np.append(rows, far_rows), np.append(columns, data.num_nodes + number), shape)


def in_degree(data: NodeData) -> NDArray[np.float64]:
    """d_i in the whole graph, with the self-loop: arcs into i, own and cross."""
    assert data.cross is not None
    arriving = ~data.cross.outgoing.numpy()
    weight = data.cross.weight.numpy()[arriving]
    crossing = np.bincount(data.cross.own.numpy()[arriving], weights=weight, minlength=data.num_nodes)
    target, _, own_weight = _own_entries(data)
    inside = np.bincount(target, weights=own_weight, minlength=data.num_nodes)
    return (inside + crossing).astype(np.float64)


def _own_entries(data: NodeData) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Targets, sources and weights of own arcs, with exactly one self-loop of weight 1 at every node
    (`graph.normalise.gcn_norm`).
    """
    source, target = data.edge_index.numpy()
    other, own = source != target, np.arange(data.num_nodes)
    weight = np.ones(len(source)) if data.edge_weight is None else data.edge_weight.numpy().astype(np.float64)
    return np.append(target[other], own), np.append(source[other], own), np.append(weight[other], np.ones(len(own)))


def _summed(
    values: NDArray[np.float64], rows: NDArray[np.int64], columns: NDArray[np.int64], shape: tuple[int, int]
) -> sp.csr_matrix:
    matrix = sp.csr_matrix((values, (rows, columns)), shape=shape)
    matrix.sum_duplicates()
    return matrix


def _padded(rows: Tensor, count: int) -> Tensor:
    return rows.contiguous() if rows.shape[0] == count else torch.cat([rows, rows.new_zeros(count - rows.shape[0])])
