"""Who owns which column, and which rows a cross edge joins: what FedStruct's parties agree on before the powers.

Everybody's columns have one numbering, the directory. ``protocol=published``: columns are global ids.
``protocol=hardened`` (spec 13.1e): an owner numbers its columns in an order only it knows; its secret never leaves it.

A row of what is sent later is addressed by its *slot*: every client numbers its nodes with outgoing cross edges and
tells the other end of each edge the number. Both ends know the edge already. The same exchange shows whether both ends
agree on their edges.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import CrossEdges
from isthmus.errors import DataError
from isthmus.federation.interface import Federation
from isthmus.federation.messages import Count, Identifier, Message, PartyId, Structure
from isthmus.federation.roles import handler
from isthmus.graph.normalise import from_torch_csr
from isthmus.graph.powers import Block, as_csr, row_mass
from isthmus.methods.structure.config import PowerConfig
from isthmus.methods.training import ModelState, WeightedClient

ConfigT = TypeVar("ConfigT", bound=PowerConfig)


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
    """What does not fit together: edges only the other end lists, edges only this one lists, far ends nobody owns."""

    missing: Count[int]
    unanswered: Count[int]
    unknown: Count[int]


@dataclass(frozen=True)
class PowerState(ModelState):
    """What a client has of the graph.

    Args:
        secret: Where its numbering of columns comes from; never leaves it.
        owner: Number of the owner of every column (n,), from the directory.
        columns: Columns of its own nodes (n_i,).
        far: Columns of the far ends of its outgoing cross edges; only in the published protocol, where they are known.
        entering: Client -> arcs that enter from it, (slots of that client, n_i); empty before the edge lists have come.
        power: [Ah^l]^[i] (n_i, n), sparse or dense; None before the first and after the last.
        combined: Abar^[i], or all powers 0 ... L_s where the betas are trained.
        diagonal: (Ah^l)_vv of its own nodes (n_i, L_s).
    """

    secret: bytes
    owner: Tensor
    columns: Tensor
    far: Tensor
    entering: Mapping[str, Tensor]
    power: Tensor | None
    combined: tuple[Tensor, ...]
    diagonal: Tensor


class DirectoryClient(WeightedClient[ConfigT], Generic[ConfigT]):
    """A client that finds its place in the directory. It reads its own nodes and edges, its state and its mail."""

    state: PowerState

    def setup(self) -> None:
        super().setup()
        data = self.data
        if data.cross is None:
            raise DataError("fedstruct needs the cross edges of every client: give them, or use fedsgd")
        self.cross: CrossEdges = data.cross
        self.out = np.flatnonzero(self.cross.outgoing.numpy())
        source, target = data.edge_index.numpy()
        loops = np.arange(data.num_nodes)
        ones = np.ones(len(source) + len(loops))
        self.inner = as_csr(
            sp.csr_matrix((ones, (np.append(source, loops), np.append(target, loops))), shape=(len(loops), len(loops)))
        )
        weight = self.cross.weight.numpy().astype(np.float64)
        if (weight < 0).any():
            raise DataError(f"{self.party} has cross edges of negative weight; random walks need weights of at least 0")
        crossing = np.bincount(self.cross.own.numpy()[self.out], weights=weight[self.out], minlength=len(loops))
        self.degree = row_mass(self.inner) + crossing  # Dt^[i], self-loop included
        self.boundary = np.unique(self.cross.own.numpy()[self.out])
        self.kind = np.float64 if self.config.precision == "float64" else np.float32

    def power_state(self) -> dict[str, object]:
        """Fields of `PowerState` before anything has arrived."""
        none = torch.zeros(0, dtype=torch.int64)
        diagonal = torch.zeros(self.data.num_nodes, self.config.structure_hops, dtype=self.config.dtype)
        return {
            "secret": secrets.token_bytes(32),
            "owner": none,
            "columns": none,
            "far": none,
            "entering": {},
            "power": None,
            "combined": (),
            "diagonal": diagonal,
        }

    @property
    def hardened(self) -> bool:
        return self.config.protocol == "hardened"

    def secret_generator(self, purpose: str) -> np.random.Generator:
        """Randomness nobody else can repeat: from the party's secret, not from the run's seed, which all parties
        know.
        """
        digest = hashlib.sha256(self.state.secret + purpose.encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))

    # -- directory ---------------------------------------------------------------------------------

    @handler
    def enrol(self) -> Enrolment:
        ids = torch.zeros(0, dtype=torch.int64) if self.hardened else self.data.node_id
        return Enrolment(self.data.num_nodes, ids)

    @handler
    def list_edges(self, directory: Directory) -> Mapping[PartyId, EdgeList]:
        """Take the directory; tell every other client the edges shared with it."""
        owner, me = directory.owner, directory.clients.index(self.party)
        if self.hardened:
            mine = torch.nonzero(owner == me).flatten()
            order = self.secret_generator("columns").permutation(len(mine))
            columns, far = mine[torch.from_numpy(order)], torch.zeros(0, dtype=torch.int64)
        else:
            columns = torch.searchsorted(directory.ids, self.data.node_id)
            # An id nobody owns gets a column all the same; its owner finds out when the edge lists are compared.
            far = torch.searchsorted(directory.ids, self.cross.other[torch.from_numpy(self.out)]).clamp(
                max=owner.numel() - 1
            )
        self.state = replace(self.state, owner=owner, columns=columns, far=far)
        slot = np.full(self.data.num_nodes, -1)
        slot[self.boundary] = np.arange(len(self.boundary))
        mail = {}
        for client in directory.clients:
            arcs = self._shared_with(client)
            outgoing = self.cross.outgoing[arcs]
            own = self.cross.own[arcs]
            slots = torch.where(outgoing, torch.from_numpy(slot)[own], torch.tensor(-1))
            if client != self.party:
                mail[client] = EdgeList(
                    self.data.node_id[own],
                    self.cross.other[arcs],
                    outgoing.long(),
                    self.cross.weight[arcs],
                    slots,
                    len(self.boundary),
                )
        unknown = ~np.isin(np.array(self.cross.owners), [c for c in directory.clients if c != self.party])
        self.scratch.unknown = int(unknown[self.cross.owner.numpy()].sum())
        return mail

    @handler
    def check_edges(self, mail: Mapping[PartyId, EdgeList]) -> EdgeCheck:
        """Keep the arcs that enter; count what only one end knows."""
        row = {int(node): r for r, node in enumerate(self.data.node_id.tolist())}
        missing = unanswered = 0
        entering = {}
        for client, edges in mail.items():
            arcs = self._shared_with(client)
            mine = arc_set(
                self.data.node_id[self.cross.own[arcs]],
                self.cross.other[arcs],
                self.cross.outgoing[arcs].long(),
                self.cross.weight[arcs],
            )
            theirs = arc_set(edges.other, edges.own, 1 - edges.outgoing, edges.weight)
            missing, unanswered = missing + _surplus(theirs, mine), unanswered + _surplus(mine, theirs)
            arriving = np.flatnonzero(edges.outgoing.numpy())
            rows, weight = edges.slot.numpy()[arriving], edges.weight.numpy()[arriving].astype(self.kind)
            targets = np.array([row.get(node, -1) for node in edges.other.numpy()[arriving].tolist()], dtype=np.int64)
            known = (targets >= 0) & (rows >= 0) & (rows < edges.slots)
            shape = (edges.slots, self.data.num_nodes)
            entering[client] = tensor_of(
                as_csr(sp.csr_matrix((weight[known], (rows[known], targets[known])), shape=shape))
            )
        self.state = replace(self.state, entering=entering)
        return EdgeCheck(missing, unanswered, self.scratch.unknown)

    def _shared_with(self, client: str) -> Tensor:
        if client not in self.cross.owners:
            return torch.zeros(0, dtype=torch.int64)
        return torch.nonzero(self.cross.owner == self.cross.owners.index(client)).flatten()


def make_directory(federation: Federation, config: PowerConfig) -> Directory:
    """Everybody's columns in one numbering."""
    enrolled = federation.call(DirectoryClient.enrol)
    clients = tuple(enrolled)
    if config.protocol == "hardened":
        sizes = torch.tensor([reply.nodes for reply in enrolled.values()])
        return Directory(
            clients, torch.repeat_interleave(torch.arange(len(clients)), sizes), torch.zeros(0, dtype=torch.int64)
        )
    ids = torch.cat([reply.ids for reply in enrolled.values()])
    owner = torch.repeat_interleave(
        torch.arange(len(clients)), torch.tensor([reply.ids.numel() for reply in enrolled.values()])
    )
    order = torch.argsort(ids, stable=True)
    ids = ids[order]
    twice = torch.nonzero(ids[1:] == ids[:-1]).flatten()
    if twice.numel():
        raise DataError(
            f"node {int(ids[twice[0]])} has two owners: every node belongs to one client; correct the clients' node ids"
        )
    return Directory(clients, owner[order], ids)


def agree_on_edges(federation: Federation, directory: Directory) -> None:
    """Hand out the directory and compare both ends of every cross edge."""
    checks = federation.exchange(DirectoryClient.list_edges, DirectoryClient.check_edges, directory)
    for client, check in checks.items():
        if check.unknown:
            raise DataError(
                f"{client} has {check.unknown} cross edges to clients that take no part: remove them, or let those "
                "clients in"
            )
        if check.missing or check.unanswered:
            raise DataError(
                f"cross edges of {client} and of the others do not match: {check.missing} it does not list but the "
                "other end does, "
                f"{check.unanswered} it lists but the other end does not own or list; both ends must list every cross "
                "edge"
            )


def tensor_of(block: Block) -> Tensor:
    if isinstance(block, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(block))
    matrix = block if block.has_sorted_indices else block.sorted_indices()
    return torch.sparse_csr_tensor(
        torch.from_numpy(matrix.indptr.astype(np.int64)),
        torch.from_numpy(matrix.indices.astype(np.int64)),
        torch.from_numpy(np.ascontiguousarray(matrix.data)),
        size=(int(matrix.shape[0]), int(matrix.shape[1])),
        check_invariants=False,
    )


def block_of(tensor: Tensor) -> Block:
    return tensor.numpy() if tensor.layout == torch.strided else from_torch_csr(tensor)


def arc_set(own: Tensor, other: Tensor, outgoing: Tensor, weight: Tensor) -> NDArray[np.float64]:
    """Rows (own, other, direction, weight), sorted."""
    rows = np.stack([tensor.numpy().astype(np.float64) for tensor in (own, other, outgoing, weight)], axis=1)
    return rows[np.lexsort(rows.T[::-1])]


def _surplus(a: NDArray[np.float64], b: NDArray[np.float64]) -> int:
    """Rows of a that are not in b."""
    if a.shape == b.shape and np.array_equal(a, b):
        return 0
    return (Counter(map(tuple, a.tolist())) - Counter(map(tuple, b.tolist()))).total()
