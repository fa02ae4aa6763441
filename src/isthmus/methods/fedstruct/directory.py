"""What the clients agree on before any power is exchanged: who owns which column, and which rows a cross edge joins.

The columns of all clients have one numbering, the directory. Each protocol numbers in its own way: by global id
(`powers_published.py`), or in an order only the owner knows (`powers_hardened.py`).

A row of what is sent later is addressed by its *slot*: every client numbers its nodes with outgoing cross edges and
gives the other end of each edge the number. Both ends know the edge already. The same exchange shows whether both ends
agree on their edges. Global ids are opaque: they are compared and sorted, never used as positions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import CrossEdges, NodeData
from isthmus.errors import ConfigError, DataError
from isthmus.federation.interface import Federation
from isthmus.federation.messages import Count, Identifier, Message, PartyId, Structure
from isthmus.federation.roles import handler
from isthmus.graph.normalise import adjacency
from isthmus.graph.powers import as_csr, row_mass
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.state import FedStructState, tensor_of
from isthmus.methods.training import WeightedClient


@dataclass(frozen=True)
class Enrolment(Message):
    """What a client brings to the directory: how many nodes; which, by global id, only in the published protocol."""

    nodes: Count[int]
    ids: Identifier[Tensor]


@dataclass(frozen=True)
class Directory(Message):
    """Owner of every column, by number, and in the published protocol its global id."""

    clients: Identifier[tuple[str, ...]]
    owner: Identifier[Tensor]
    ids: Identifier[Tensor]


@dataclass(frozen=True)
class EdgeList(Message):
    """All cross edges the sender shares with the receiver, seen from the sender; with slots, -1 for arcs that enter the
    sender.
    """

    own: Identifier[Tensor]
    other: Identifier[Tensor]
    outgoing: Structure[Tensor]
    weight: Structure[Tensor]
    slot: Identifier[Tensor]
    slots: Count[int]


@dataclass(frozen=True)
class EdgeCheck(Message):
    """What does not match: edges only the other end lists, edges only this one lists, far ends nobody owns."""

    missing: Count[int]
    unanswered: Count[int]
    unknown: Count[int]


class ListedEdges(Protocol):
    """Edges that another client says it shares with this one, seen from there."""

    @property
    def own(self) -> Tensor: ...
    @property
    def other(self) -> Tensor: ...
    @property
    def outgoing(self) -> Tensor: ...
    @property
    def weight(self) -> Tensor: ...


class EdgeClient(WeightedClient[FedStructConfig]):
    """A client that knows its own edges and its cross edges, and can hold them against what others say."""

    def setup(self) -> None:
        super().setup()
        data = self.data
        self.cross = cross_edges_of(data, self.party)
        self.out = np.flatnonzero(self.cross.outgoing.numpy())
        loops = sp.identity(data.num_nodes, format="csr")
        self.inner = as_csr(adjacency(data.edge_index, data.num_nodes) + loops)  # At_i^[i]
        weight = self.cross.weight.numpy().astype(np.float64)
        crossing = np.bincount(self.cross.own.numpy()[self.out], weights=weight[self.out], minlength=data.num_nodes)
        self.degree = row_mass(self.inner) + crossing  # Dt^[i], self-loop included
        self.boundary = np.unique(self.cross.own.numpy()[self.out])  # row of each slot

    def generator_from(self, secret: bytes, purpose: str) -> np.random.Generator:
        """Randomness nobody else can repeat: from the client's secret, not from the run's seed, which all parties
        know.
        """
        digest = hashlib.sha256(secret + purpose.encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))

    def shared_with(self, client: str) -> Tensor:
        """Positions of the cross edges shared with one other client."""
        if client not in self.cross.owners:
            return torch.zeros(0, dtype=torch.int64)
        return torch.nonzero(self.cross.owner == self.cross.owners.index(client)).flatten()

    def to_strangers(self, others: Sequence[str]) -> int:
        """How many cross edges lead to clients that are not among ``others``."""
        unknown = ~np.isin(np.array(self.cross.owners), others)
        return int(unknown[self.cross.owner.numpy()].sum())

    def disagreement(self, client: str, edges: ListedEdges) -> tuple[int, int]:
        """How many edges only the other end lists, and how many only this one."""
        arcs = self.shared_with(client)
        mine = sorted_arcs(
            self.data.node_id[self.cross.own[arcs]],
            self.cross.other[arcs],
            self.cross.outgoing[arcs],
            self.cross.weight[arcs],
        )
        theirs = sorted_arcs(edges.other, edges.own, 1 - edges.outgoing, edges.weight)
        return surplus(theirs, mine), surplus(mine, theirs)


class DirectoryClient(EdgeClient):
    """A client that finds its place in the directory. It reads its own nodes and edges, its state and its mail."""

    state: FedStructState

    def secret_generator(self, purpose: str) -> np.random.Generator:
        """Of this client's own secret."""
        return self.generator_from(self.state.secret, purpose)

    def edge_lists(self, directory: Directory, columns: Tensor, far: Tensor) -> Mapping[PartyId, EdgeList]:
        """Keep the directory and the client's place in it; tell every other client the edges shared with it."""
        self.state = replace(self.state, owner=directory.owner, columns=columns, far=far)
        slot = np.full(self.data.num_nodes, -1)
        slot[self.boundary] = np.arange(len(self.boundary))
        others = [client for client in directory.clients if client != self.party]
        mail = {}
        for client in others:
            arcs = self.shared_with(client)
            own, outgoing = self.cross.own[arcs], self.cross.outgoing[arcs]
            mail[client] = EdgeList(
                own=self.data.node_id[own],
                other=self.cross.other[arcs],
                outgoing=outgoing.long(),
                weight=self.cross.weight[arcs],
                slot=torch.where(outgoing, torch.from_numpy(slot)[own], torch.tensor(-1)),
                slots=len(self.boundary),
            )
        self.scratch.unknown = self.to_strangers(others)
        return mail

    @handler
    def check_edges(self, mail: Mapping[PartyId, EdgeList]) -> EdgeCheck:
        """Keep the arcs that enter; count what only one end knows."""
        missing = unanswered = 0
        entering = {}
        for client, edges in mail.items():
            only_theirs, only_mine = self.disagreement(client, edges)
            missing, unanswered = missing + only_theirs, unanswered + only_mine
            arriving = np.flatnonzero(edges.outgoing.numpy())
            rows, weight = edges.slot.numpy()[arriving], edges.weight[arriving].to(self.config.dtype).numpy()
            targets = rows_of(edges.other.numpy()[arriving], self.data.node_id.numpy())
            known = (targets >= 0) & (rows >= 0) & (rows < edges.slots)
            shape = (edges.slots, self.data.num_nodes)
            entering[client] = tensor_of(
                as_csr(sp.csr_matrix((weight[known], (rows[known], targets[known])), shape=shape))
            )
        self.state = replace(self.state, entering=entering)
        return EdgeCheck(missing, unanswered, self.scratch.unknown)


def agree_on_edges(
    federation: Federation, list_edges: Callable[[Any, Directory], Mapping[PartyId, EdgeList]], directory: Directory
) -> None:
    """Hand out the directory and compare both ends of every cross edge.

    Args:
        list_edges: Handler of the protocol: finds the client's columns, then `DirectoryClient.edge_lists`.
    """
    check_agreement(federation.exchange(list_edges, DirectoryClient.check_edges, directory))


def check_agreement(checks: Mapping[PartyId, EdgeCheck]) -> None:
    """Stop where two owners disagree on their edges."""
    for client, check in checks.items():
        if check.unknown:
            raise DataError(
                f"{client} has {check.unknown} cross edges to clients that take no part: remove them, or let those "
                "clients in"
            )
        if check.missing or check.unanswered:
            raise DataError(
                f"cross edges of {client} and of the others do not match: {check.missing} it does not list but the "
                f"other end does, {check.unanswered} it lists but the other end does not own or list; both ends must "
                "list every cross edge"
            )


def check_hidden(federation: Federation) -> None:
    """Behind masks an owner is given sums over the others: of two owners each would be given the other's values."""
    if federation.secure and len(federation.clients) == 2:
        raise ConfigError(
            "two owners cannot hide in sums over each other's nodes: let a third one take part, or set secure_sum=false"
        )


def cross_edges_of(data: NodeData, party: PartyId) -> CrossEdges:
    """The edges a client has to nodes of others, which every FedStruct needs."""
    if data.cross is None:
        raise DataError("fedstruct needs the cross edges of every client: give them, or use fedsgd")
    if bool((data.cross.weight < 0).any()):
        raise DataError(f"{party} has cross edges of negative weight; random walks need weights of at least 0")
    return data.cross


def rows_of(wanted: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Position in ``ids`` of each wanted id; -1 where it is not there."""
    if not len(ids):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(ids)
    found = order[np.searchsorted(ids[order], wanted).clip(max=len(ids) - 1)]
    return np.where(ids[found] == wanted, found, -1)


def sorted_arcs(own: Tensor, other: Tensor, outgoing: Tensor, weight: Tensor) -> NDArray[np.int64]:
    """Rows (own, other, direction, bits of the weight), sorted. Ids need all 63 bits: as floats, two could be one."""
    bits = (weight.numpy().astype(np.float64) + 0.0).view(np.int64)  # + 0.0: no negative zero
    rows = np.stack([own.numpy(), other.numpy(), outgoing.numpy().astype(np.int64), bits], axis=1)
    return rows[np.lexsort(rows.T[::-1])]


def surplus(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Rows of a that are not in b."""
    if np.array_equal(a, b):
        return 0
    return (Counter(map(tuple, a.tolist())) - Counter(map(tuple, b.tolist()))).total()
