"""FedGCN -- Yao, Jin, Ravi & Joe-Wong, NeurIPS 2023, https://arxiv.org/abs/2201.12433: one exchange before training,
then FedAvg.

    paper                      here
    Ahat                       D^-1/2 (A + I) D^-1/2 with degrees of the whole graph; each owner knows those of its
                               nodes
    a_i = sum_j Ahat_ij x_j    `Neighbourhood.sums`     exact for own nodes from 1 hop on: everybody's partial sums are
                                                        added up
    a_j, j in N(V_k)           `Neighbourhood.far_sums` 2 hops: of direct neighbours elsewhere, from their owners
    0 / 1 / 2 hop              ``hops``

With 0 hops this is FedAvg on induced subgraphs. With 1 hop the first layer is exact and the second aggregates over own
edges; with 2 hops
both are: logits of own nodes equal the central two-layer GCN's. Models have at most two propagations.

Where the model starts with a LayerNorm, what is summed is the normalised feature (gain and shift come later,
`isthmus.nn.first_layer_input`), so the sums are exact too.

# Differs from the paper: partial sums are added by the federation's summed mail (masked with ``secure_sum``) in place
of CKKS ciphertexts.

``legacy=true`` is what published simulations do, FedStruct's among them: every client is handed the raw features and
edges of its 1- or 2-hop neighbourhood, degrees are those of the cut-out graph, and any backbone runs on it. It shows
features and edges of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import CrossEdges, NodeData
from isthmus.errors import ConfigError, DataError
from isthmus.federation.interface import Federation
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import Count, Embedding, Identifier, Message, PartyId, Structure
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.graph.normalise import from_torch_csr
from isthmus.methods import fedavg
from isthmus.methods.fedavg import FedAvgClient, FedAvgCohort, FedAvgConfig, ServerState
from isthmus.methods.learners import PARTS, NodeLearner, node_groups
from isthmus.methods.registry import Log, Phase, register
from isthmus.methods.training import ModelState
from isthmus.nn.backbone import Backbone
from isthmus.nn.buffers import Workspace
from isthmus.nn.first_layer_input import LAYER_NORM_EPS, build_operand
from isthmus.nn.inputs import Inputs, build_inputs, stack_inputs
from isthmus.nn.sparse import Sparse, canonical, vertical
from isthmus.records import Record


@dataclass(frozen=True)
class FedGCNConfig(FedAvgConfig):
    """Knobs of FedGCN.

    Args:
        hops: How far a client's knowledge reaches: 0, 1 or 2.
        legacy: Raw features and edges of the neighbourhood in place of exact sums.
    """

    hops: int | None = 2
    legacy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hops not in (0, 1, 2):
            raise ConfigError(f"hops must be 0, 1 or 2, got {self.hops}")
        if self.exact and self.backbone != "gcn":
            raise ConfigError(
                f"exact sums are those of a GCN's layers: use backbone=gcn, or legacy=true for {self.backbone}"
            )
        layers = len(self.hidden) + (0 if self.head else 1)
        if self.exact and layers > 2:
            hidden = list(self.hidden)
            raise ConfigError(
                f"sums of 2 hops are exact for at most 2 layers, hidden={hidden} makes {layers}: use fewer, or "
                "legacy=true"
            )

    @property
    def options(self) -> dict[str, Any]:
        """``hops`` is the exchange's, not the backbone's."""
        return {name: value for name, value in super().options.items() if name != "hops"}

    @property
    def exact(self) -> bool:
        return bool(self.hops) and not self.legacy


# -- messages --------------------------------------------------------------------------------------


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
class Wanted(Message):
    """Nodes of the receiver whose features and edges the sender asks for (legacy)."""

    ids: Identifier[Tensor]


@dataclass(frozen=True)
class Raw(Message):
    """Features of nodes and all their arcs, by global id (legacy)."""

    ids: Identifier[Tensor]
    x: Embedding[Tensor]
    source: Structure[Tensor]
    target: Structure[Tensor]
    owner: Identifier[Tensor]


# -- state -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Neighbourhood(Record):
    """What came of the exchange.

    Args:
        ids: Global ids of foreign nodes it knows something of.
        sums: a_i of own nodes (n_i, F + 2).
        far_sums: a_j of the foreign ones (2 hops).
        degree: d_j of the foreign ones.
        x, edges, owner: Legacy: their features, arcs as global ids (2, E), number of each one's owner.
    """

    ids: Tensor
    sums: Tensor | None
    far_sums: Tensor | None
    degree: Tensor | None
    x: Tensor | None
    edges: Tensor | None
    owner: Tensor | None


@dataclass(frozen=True)
class FedGCNState(ModelState):
    """A model and what is known of the neighbourhood."""

    near: Neighbourhood | None


# -- learner ---------------------------------------------------------------------------------------


class NeighbourLearner(NodeLearner):
    """Own nodes, trained and scored with inputs that know the neighbourhood."""

    def __init__(self, data: NodeData, model: Backbone, config: FedGCNConfig, near: Neighbourhood) -> None:
        self.data, self.model, self.config = data, model, config
        self.y, self.num_samples, self.num_train = data.y, data.num_nodes, data.num_train
        self.masks = {part: getattr(data, part) for part in PARTS} | node_groups(data)
        self._near = near
        self.inputs = self._inputs(data.train)

    @cached_property
    def everything(self) -> Inputs:
        return self._inputs(torch.ones(self.data.num_nodes, dtype=torch.bool))

    def _inputs(self, mask: Tensor) -> Inputs:
        if self.config.legacy:  # type: ignore[attr-defined]
            extended = extended_data(self.data, self._near)
            beyond = torch.zeros(extended.num_nodes - self.data.num_nodes, dtype=torch.bool)
            return build_inputs(extended, self.model, torch.cat([mask, beyond]), dtype=self.config.dtype)
        return exact_inputs(self.data, self.model, self._near, mask, self.config.dtype)


def exact_inputs(data: NodeData, model: Backbone, near: Neighbourhood, mask: Tensor, dtype: torch.dtype) -> Inputs:
    """Inputs whose first product is already aggregated, and whose propagation knows direct neighbours elsewhere."""
    assert near.sums is not None
    sums = near.sums if near.far_sums is None else torch.cat([near.sums, near.far_sums])
    matrix = second_layer(data, near)  # (n_i, n_i + foreign)
    last = np.flatnonzero(mask.numpy())
    orders = [last]
    if model.hops == 2:
        heard = np.setdiff1d(np.unique(matrix[last].indices), last)
        orders = [np.concatenate([last, heard]), last]
    padded = tuple(max(1, len(order)) for order in orders)
    # Columns of the sums: x / sigma, mu / sigma, 1; without LayerNorm x, 0, 1.
    operand = build_operand(
        sp.csr_matrix(sums[:, :-2].numpy()), None, orders[0], padded[0], input_norm=False, dtype=dtype
    )
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


def second_layer(data: NodeData, near: Neighbourhood) -> sp.csr_matrix:
    """Rows of Ahat of own nodes, over own nodes and, with 2 hops, foreign ones."""
    assert data.cross is not None
    scale = 1.0 / np.sqrt(in_degree(data))
    source, target = _inner_arcs(data)
    own = np.arange(data.num_nodes)
    rows, columns = np.append(target, own), np.append(source, own)
    if near.degree is None:
        values = scale[rows] * scale[columns]
        return _summed(values, rows, columns, (data.num_nodes, data.num_nodes))
    arriving = ~data.cross.outgoing.numpy()
    far_scale = 1.0 / np.sqrt(near.degree.numpy())
    far = np.searchsorted(near.ids.numpy(), data.cross.other.numpy()[arriving])
    far_rows, weight = data.cross.own.numpy()[arriving], data.cross.weight.numpy()[arriving]
    values = np.append(scale[rows] * scale[columns], weight * scale[far_rows] * far_scale[far])
    shape = (data.num_nodes, data.num_nodes + len(far_scale))
    return _summed(values, np.append(rows, far_rows), np.append(columns, data.num_nodes + far), shape)


def in_degree(data: NodeData) -> NDArray[np.float64]:
    """d_i in the whole graph, with the self-loop: arcs into i, own and cross."""
    assert data.cross is not None
    _, target = _inner_arcs(data)
    arriving = ~data.cross.outgoing.numpy()
    crossing = np.bincount(
        data.cross.own.numpy()[arriving], weights=data.cross.weight.numpy()[arriving], minlength=data.num_nodes
    )
    return (1.0 + np.bincount(target, minlength=data.num_nodes) + crossing).astype(np.float64)


def extended_data(data: NodeData, near: Neighbourhood) -> NodeData:
    """Legacy: own nodes first, then the neighbourhood, with every arc both of whose ends are known."""
    assert near.x is not None and near.edges is not None
    ids = torch.cat([data.node_id, near.ids])
    order = torch.argsort(ids)
    arcs = near.edges[:, torch.isin(near.edges, ids).all(0)]
    arcs = torch.unique(arcs, dim=1).contiguous()
    beyond = near.ids.numel()
    nothing = torch.zeros(beyond, dtype=torch.bool)
    x = data.x.to_dense() if data.x.layout != torch.strided else data.x
    return NodeData(
        x=torch.cat([x, near.x.to_dense() if near.x.layout != torch.strided else near.x]).to_sparse_csr(),
        edge_index=order[torch.searchsorted(ids[order], arcs)],
        y=torch.cat([data.y.clamp(min=0), torch.zeros(beyond, dtype=data.y.dtype)]),
        train=torch.cat([data.train, nothing]),
        val=torch.cat([data.val, nothing]),
        test=torch.cat([data.test, nothing]),
        node_id=ids,
        num_classes=data.num_classes,
    )


# -- client ----------------------------------------------------------------------------------------

ConfigT = TypeVar("ConfigT", bound=FedGCNConfig)


class FedGCNCohort(FedAvgCohort):
    """FedAvg's cohort on inputs that exist only after the exchange."""

    def __init__(self, clients: Sequence[Any]) -> None:
        Cohort.__init__(self, clients)
        self.model, self.config = clients[0].own_learner.model, clients[0].config
        self.parties = tuple(client.party for client in clients)
        self.workspace = Workspace()
        self._evaluation = None
        self._learners: list[Any] = []

    @classmethod
    def worthwhile(cls, clients: Sequence[Any]) -> bool:
        return (
            len(clients) > 1
            and not clients[0].config.one_by_one
            and getattr(clients[0].own_learner.model, "cohort", True)
        )

    def load(self) -> None:
        learners = [client.learner for client in self.clients]
        if len(learners) != len(self._learners) or any(
            a is not b for a, b in zip(learners, self._learners, strict=True)
        ):
            self._learners, self._evaluation = learners, None
            self.inputs = stack_inputs([learner.inputs for learner in learners])
        super().load()

    def store(self) -> None:
        kept = [client.state.near for client in self.clients]
        super().store()
        for client, near in zip(self.clients, kept, strict=True):
            client.state = FedGCNState(client.state.weights, client.state.optimizer, near)


class FedGCNClient(FedAvgClient[ConfigT], Generic[ConfigT]):
    """FedAvg's client, after it has heard from its neighbours."""

    state: FedGCNState
    cohort: ClassVar[type[Cohort[Any]] | None] = FedGCNCohort

    def setup(self) -> None:
        self._derived: tuple[Neighbourhood, NeighbourLearner] | None = None
        super().setup()
        if self.data.cross is None:
            raise DataError("fedgcn needs the cross edges of every client: give them, or use fedavg")
        self.cross: CrossEdges = self.data.cross

    @property
    def learner(self) -> Any:
        """On the induced subgraph, until the neighbourhood is known."""
        near = getattr(self, "state", None) and self.state.near
        if near is None:
            return self.own_learner
        if self._derived is None or self._derived[0] is not near:
            self._derived = near, NeighbourLearner(self.data, self.own_learner.model, self.config, near)
        return self._derived[1]

    @learner.setter
    def learner(self, learner: Any) -> None:
        self.own_learner = learner

    def initial_state(self) -> ModelState:
        state = super().initial_state()
        return FedGCNState(state.weights, state.optimizer, None)

    # -- exact sums --------------------------------------------------------------------------------

    def _features(self) -> NDArray[np.float64]:
        """(n_i, F + 2): the feature, as the model's first layer will take it, and what a LayerNorm's shift needs."""
        x = from_torch_csr(self.data.x).toarray() if self.data.x.layout == torch.sparse_csr else self.data.x.numpy()
        x = x.astype(np.float64)
        if not self.own_learner.model.norm_names:
            return np.column_stack([x, np.zeros(len(x)), np.ones(len(x))])
        mean, deviation = x.mean(1), np.sqrt(x.var(1) + LAYER_NORM_EPS)
        return np.column_stack([x / deviation[:, None], mean / deviation, np.ones(len(x))])

    def _arriving_rows(self) -> NDArray[np.int64]:
        """Own nodes that arcs from elsewhere enter, ascending: the slots."""
        return np.unique(self.cross.own.numpy()[~self.cross.outgoing.numpy()])

    @handler
    def give_slots(self) -> Mapping[PartyId, Slots]:
        rows, arriving = self._arriving_rows(), ~self.cross.outgoing
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
        """Partial sums for everybody, zeros included: who writes tells nothing."""
        scaled = self._features() / np.sqrt(in_degree(self.data))[:, None]
        mail = {}
        for client, slots in self.scratch.slots.items():
            arcs = np.flatnonzero(
                self.cross.outgoing.numpy() & (self.cross.owner.numpy() == self.cross.owners.index(client))
            )
            order = np.argsort(slots.ids.numpy())
            found = np.searchsorted(slots.ids.numpy()[order], self.cross.other.numpy()[arcs])
            listed = slots.ids.numpy()[order]
            if (found >= len(order)).any() or not np.array_equal(listed[found], self.cross.other.numpy()[arcs]):
                raise DataError(
                    f"{client} does not list all its cross edges with {self.party}: both ends must list every cross "
                    "edge"
                )
            rows = slots.slots.numpy()[order][found]
            matrix = _summed(
                self.cross.weight.numpy()[arcs].astype(np.float64),
                rows,
                self.cross.own.numpy()[arcs],
                (slots.count, self.data.num_nodes),
            )
            mail[client] = PartialSums(torch.from_numpy(matrix @ scaled).to(self.config.dtype))
        return mail

    @handler
    def take_sums(self, total: PartialSums | None) -> None:
        """a_i = (own part + everybody's) / sqrt(d_i)."""
        degree, features = in_degree(self.data), self._features()
        source, target = _inner_arcs(self.data)
        own = np.arange(len(degree))
        matrix = _summed(
            np.ones(len(source) + len(own)), np.append(target, own), np.append(source, own), (len(own), len(own))
        )
        sums = matrix @ (features / np.sqrt(degree)[:, None])
        if total is not None:
            sums[self._arriving_rows()] += total.sums.numpy()
        exact = torch.from_numpy(sums / np.sqrt(degree)[:, None]).to(self.config.dtype)
        self.state = replace(
            self.state, near=Neighbourhood(torch.zeros(0, dtype=torch.int64), exact, None, None, None, None, None)
        )

    @handler
    def give_far(self) -> Mapping[PartyId, FarSums]:
        """2 hops: a_j and d_j to the owners of j's out-neighbours."""
        assert self.state.near is not None and self.state.near.sums is not None
        degree = torch.from_numpy(in_degree(self.data))
        mail = {}
        for number, client in enumerate(self.cross.owners):
            rows = torch.unique(self.cross.own[self.cross.outgoing & (self.cross.owner == number)])
            if client != self.party and rows.numel():
                mail[client] = FarSums(self.data.node_id[rows], self.state.near.sums[rows], degree[rows])
        return mail

    @handler
    def take_far(self, mail: Mapping[PartyId, FarSums]) -> None:
        parts = list(mail.values())
        assert self.state.near is not None and self.state.near.sums is not None
        width = self.state.near.sums.shape[1]
        ids = torch.cat([part.ids for part in parts]) if parts else torch.zeros(0, dtype=torch.int64)
        sums = torch.cat([part.sums for part in parts]) if parts else torch.zeros(0, width, dtype=self.config.dtype)
        degree = torch.cat([part.degree for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)
        order = torch.argsort(ids)
        self.state = replace(
            self.state, near=replace(self.state.near, ids=ids[order], far_sums=sums[order], degree=degree[order])
        )

    # -- legacy ------------------------------------------------------------------------------------

    def _all_arcs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arcs that touch own nodes as global ids, and for each the owner of its foreign end (own number inside)."""
        ids, cross = self.data.node_id, self.cross
        me = cross.owners.index(self.party) if self.party in cross.owners else -1
        source = torch.cat([ids[self.data.edge_index[0]], torch.where(cross.outgoing, ids[cross.own], cross.other)])
        target = torch.cat([ids[self.data.edge_index[1]], torch.where(cross.outgoing, cross.other, ids[cross.own])])
        return source, target, torch.cat([torch.full((self.data.edge_index.shape[1],), me), cross.owner])

    @handler
    def ask(self) -> Mapping[PartyId, Wanted]:
        """Nodes elsewhere that known arcs name and nobody has told about yet."""
        near = self.state.near
        source, target, owner = self._all_arcs()
        if near is None:
            known = self.data.node_id
            ends, owners = torch.cat([source, target]), torch.cat([owner, owner])
        else:
            assert near.edges is not None and near.owner is not None
            known = torch.cat([self.data.node_id, near.ids])
            ends, owners = near.edges.flatten(), near.owner.flatten()
        fresh = ~torch.isin(ends, known)
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
        source, target, owner = self._all_arcs()
        x = self.data.x.to_dense() if self.data.x.layout != torch.strided else self.data.x
        order = torch.argsort(self.data.node_id)
        mail = {}
        for client, wanted in self.scratch.wanted.items():
            place = torch.searchsorted(self.data.node_id[order], wanted.ids).clamp(max=len(order) - 1)
            if not torch.equal(self.data.node_id[order][place], wanted.ids):
                raise DataError(
                    f"{client} asks {self.party} for nodes it does not own; correct the cross edges of {client}"
                )
            rows = order[place]
            touched = torch.isin(source, wanted.ids) | torch.isin(target, wanted.ids)
            mail[client] = Raw(wanted.ids, x[rows], source[touched], target[touched], owner[touched])
        return mail

    @handler
    def learn(self, mail: Mapping[PartyId, Raw]) -> None:
        near, parts = self.state.near, list(mail.values())
        if near is None:
            source, target, owner = self._all_arcs()
            empty = torch.zeros(0, self.data.num_features)
            none = torch.zeros(0, dtype=torch.int64)
            near = Neighbourhood(
                none, None, None, None, empty, torch.stack([source, target]), torch.stack([owner, owner])
            )
        assert near.x is not None and near.edges is not None and near.owner is not None
        owners = [near.owner]
        for part in parts:  # an arc's owner number belongs to whichever end is foreign to the teller
            mine = torch.isin(part.source, part.ids)
            theirs = torch.isin(part.target, part.ids)
            owners.append(torch.stack([torch.where(mine, -1, part.owner), torch.where(theirs, -1, part.owner)]))
        self.state = replace(
            self.state,
            near=replace(
                near,
                ids=torch.cat([near.ids, *(part.ids for part in parts)]),
                x=torch.cat([near.x, *(part.x for part in parts)]),
                edges=torch.cat([near.edges, *(torch.stack([part.source, part.target]) for part in parts)], dim=1),
                owner=torch.cat(owners, dim=1),
            ),
        )


def exchange_round(state: ServerState, federation: Federation, config: FedGCNConfig) -> tuple[ServerState, Log]:
    """What comes before FedAvg."""
    if config.legacy and config.hops:
        for _ in range(config.hops):
            federation.exchange(FedGCNClient.ask, FedGCNClient.note)
            federation.exchange(FedGCNClient.answer, FedGCNClient.learn)
    elif config.hops:
        federation.exchange(FedGCNClient.give_slots, FedGCNClient.take_slots)
        federation.exchange(FedGCNClient.give_sums, FedGCNClient.take_sums, combine="sum")
        if config.hops == 2:
            federation.exchange(FedGCNClient.give_far, FedGCNClient.take_far)
    return state, {}


def sheet(config: FedGCNConfig) -> tuple[Disclosure, ...]:
    """Who sees what."""
    lines: list[Disclosure] = []
    if config.legacy and config.hops:
        lines = [Disclosure("exchange", "client", "client", Wanted), Disclosure("exchange", "client", "client", Raw)]
    elif config.hops:
        lines = [
            Disclosure("exchange", "client", "client", Slots),
            Disclosure("exchange", "client", "client", PartialSums, "summed"),
        ]
        if config.hops == 2:
            lines.append(Disclosure("exchange", "client", "client", FarSums))
    return (*lines, *fedavg.DISCLOSES)


def _inner_arcs(data: NodeData) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Own arcs without self-loops: every node gets exactly one (`graph.normalise.gcn_norm`)."""
    source, target = data.edge_index.numpy()
    other = source != target
    return source[other], target[other]


def _summed(
    values: NDArray[np.float64], rows: NDArray[np.int64], columns: NDArray[np.int64], shape: tuple[int, int]
) -> sp.csr_matrix:
    matrix = sp.csr_matrix((values, (rows, columns)), shape=shape)
    matrix.sum_duplicates()
    return matrix


def _padded(rows: Tensor, count: int) -> Tensor:
    return rows.contiguous() if rows.shape[0] == count else torch.cat([rows, rows.new_zeros(count - rows.shape[0])])


setup_phase, train_phase = fedavg.METHOD.phases

METHOD = register(
    replace(
        fedavg.METHOD,
        name="fedgcn",
        summary="neighbour sums exchanged once, exact over 0, 1 or 2 hops, then FedAvg",
        reference="Yao et al., FedGCN: Convergence-Communication Tradeoffs in Federated Training of GCNs, NeurIPS 2023",
        config=FedGCNConfig,
        tasks=("node",),
        phases=(setup_phase, Phase("exchange", exchange_round, rounds=1, setup=True), train_phase),
        roles={"client": Role(FedGCNClient)},
        discloses=sheet(FedGCNConfig()),
        sheet=sheet,
        cross_edges=True,
    )
)
