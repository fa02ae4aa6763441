"""FedGCN as published simulations run it (``legacy=true``), FedStruct's among them: every client is handed the raw
features and edges of its 1- or 2-hop neighbourhood, and any backbone runs on the graph cut out that way.

It shows features and edges of others. Degrees are those of the cut-out graph, so even 2 hops are not quite central.

One hop is one round trip: ask the owners of nodes that known edges name (`Wanted`), get their features and all their
edges (`Raw`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isthmus.data.node_data import CrossEdges, NodeData
from isthmus.errors import DataError
from isthmus.federation.interface import Federation
from isthmus.federation.messages import Feature, Identifier, Message, PartyId, Structure
from isthmus.federation.roles import handler
from isthmus.federation.script import ScriptLine, mail
from isthmus.methods.fedavg import FedAvgClient, FedAvgConfig
from isthmus.methods.training import ModelState
from isthmus.nn.backbone import Backbone
from isthmus.nn.inputs import Inputs, build_inputs
from isthmus.records import Record


@dataclass(frozen=True)
class Wanted(Message):
    """Nodes of the receiver whose features and edges the sender asks for."""

    ids: Identifier[Tensor]


@dataclass(frozen=True)
class Raw(Message):
    """Features of nodes and all their arcs, by global id; of each arc the owner of its foreign end."""

    ids: Identifier[Tensor]
    x: Feature[Tensor]
    source: Structure[Tensor]
    target: Structure[Tensor]
    owner: Identifier[Tensor]


@dataclass(frozen=True)
class Surroundings(Record):
    """What a client received of the graph around its own.

    Args:
        ids: Global ids of foreign nodes (m,).
        x: Their features (m, F).
        edges: Known arcs as global ids (2, E), own ones included.
        owner: Number of the owner of each end (2, E); -1 where the sender itself owns it.
    """

    ids: Tensor
    x: Tensor
    edges: Tensor
    owner: Tensor


@dataclass(frozen=True)
class PublishedState(ModelState):
    """A model and the surroundings."""

    surroundings: Surroundings | None = None


class PublishedClient(FedAvgClient[FedAvgConfig]):
    """What a client does in the published exchange."""

    state: PublishedState
    cross: CrossEdges

    def all_arcs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arcs that touch own nodes as global ids, and for each the owner of its foreign end (own number inside)."""
        ids, cross = self.data.node_id, self.cross
        me = cross.owners.index(self.party) if self.party in cross.owners else -1
        source = torch.cat([ids[self.data.edge_index[0]], torch.where(cross.outgoing, ids[cross.own], cross.other)])
        target = torch.cat([ids[self.data.edge_index[1]], torch.where(cross.outgoing, cross.other, ids[cross.own])])
        return source, target, torch.cat([torch.full((self.data.edge_index.shape[1],), me), cross.owner])

    def surroundings(self) -> Surroundings:
        """What is known so far; before the first hop the arcs that touch own nodes."""
        if self.state.surroundings is not None:
            return self.state.surroundings
        source, target, owner = self.all_arcs()
        ids, x = torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.data.num_features)
        return Surroundings(ids, x, torch.stack([source, target]), torch.stack([owner, owner]))

    @handler
    def ask(self) -> Mapping[PartyId, Wanted]:
        """Foreign nodes that known arcs name and whose features have not been received yet."""
        known = self.surroundings()
        ends, owners = known.edges.flatten(), known.owner.flatten()
        fresh = ~torch.isin(ends, torch.cat([self.data.node_id, known.ids]))
        ends, owners = ends[fresh], owners[fresh]
        mail = {}
        for number, client in enumerate(self.cross.owners):
            wanted = torch.unique(ends[owners == number])
            if client != self.party and wanted.numel():
                mail[client] = Wanted(wanted)
        return mail

    @handler
    def note(self, mail: Mapping[PartyId, Wanted]) -> None:
        self.scratch.wanted = dict(mail)

    @handler
    def answer(self) -> Mapping[PartyId, Raw]:
        source, target, owner = self.all_arcs()
        x = self.data.x.to_dense() if self.data.x.layout != torch.strided else self.data.x
        order = torch.argsort(self.data.node_id)
        mail = {}
        for client, wanted in self.scratch.wanted.items():
            place = torch.searchsorted(self.data.node_id[order], wanted.ids).clamp(max=len(order) - 1)
            if not torch.equal(self.data.node_id[order][place], wanted.ids):
                raise DataError(
                    f"{client} asks {self.party} for nodes it does not own; correct the cross edges of {client}"
                )
            touched = torch.isin(source, wanted.ids) | torch.isin(target, wanted.ids)
            mail[client] = Raw(wanted.ids, x[order[place]], source[touched], target[touched], owner[touched])
        return mail

    @handler
    def learn(self, mail: Mapping[PartyId, Raw]) -> None:
        known, parts = self.surroundings(), list(mail.values())
        owners = [known.owner]
        for part in parts:  # an arc's owner number belongs to whichever end is foreign to the sender
            ends = torch.stack([part.source, part.target])
            owners.append(torch.where(torch.isin(ends, part.ids), -1, part.owner))
        surroundings = Surroundings(
            ids=torch.cat([known.ids, *(part.ids for part in parts)]),
            x=torch.cat([known.x, *(part.x for part in parts)]),
            edges=torch.cat([known.edges, *(torch.stack([part.source, part.target]) for part in parts)], dim=1),
            owner=torch.cat(owners, dim=1),
        )
        self.state = replace(self.state, surroundings=surroundings)


def exchange(federation: Federation, hops: int) -> None:
    """One round trip per hop."""
    for _ in range(hops):
        federation.exchange(PublishedClient.ask, PublishedClient.note)
        federation.exchange(PublishedClient.answer, PublishedClient.learn)


def inputs(data: NodeData, model: Backbone, known: Surroundings, dtype: torch.dtype, mask: Tensor) -> Inputs:
    """Inputs of the own nodes in the mask, over the graph that is now known."""
    beyond = torch.zeros(len(known.ids), dtype=torch.bool)
    return build_inputs(extended_data(data, known), model, torch.cat([mask, beyond]), dtype=dtype)


def extended_data(data: NodeData, known: Surroundings) -> NodeData:
    """Own nodes first, then the foreign ones, with every arc both of whose ends are known."""
    ids = torch.cat([data.node_id, known.ids])
    order = torch.argsort(ids)
    arcs = torch.unique(known.edges[:, torch.isin(known.edges, ids).all(0)], dim=1).contiguous()
    nothing = torch.zeros(len(known.ids), dtype=torch.bool)
    x = data.x.to_dense() if data.x.layout != torch.strided else data.x
    return NodeData(
        x=torch.cat([x, known.x]).to_sparse_csr(),
        edge_index=order[torch.searchsorted(ids[order], arcs)],
        y=torch.cat([data.y.clamp(min=0), torch.zeros(len(known.ids), dtype=data.y.dtype)]),
        train=torch.cat([data.train, nothing]),
        val=torch.cat([data.val, nothing]),
        test=torch.cat([data.test, nothing]),
        node_id=ids,
        num_classes=data.num_classes,
    )


def script(hops: int) -> tuple[ScriptLine, ...]:
    """What is exchanged before training."""
    return (
        mail(PublishedClient.ask, PublishedClient.note, most=hops),
        mail(PublishedClient.answer, PublishedClient.learn, most=hops),
    )
