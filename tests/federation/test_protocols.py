"""The interface carries the papers' protocols: toys with the same messages, each checked against one dense computation.

FedStruct: powers of a distributed adjacency, hop by hop, column stripe by column stripe, delivered as sums
(specs/fedstruct 5.1, 13.1).
HiFGL: additive shares between devices, silo and server per layer, forward and backward (specs/hifgl 11.3, 11.4).
FedGGR: split learning whose autograd graph lives in one round; evaluation that needs messages (specs/fedggr 3).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hosted import HostedEngine
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import Federation, PerClient
from isthmus.federation.messages import (
    SERVER,
    Count,
    Embedding,
    Gradient,
    Identifier,
    Message,
    Model,
    PartyId,
    Share,
    Structure,
)
from isthmus.federation.roles import Client, Role, RoleTable, handler
from isthmus.federation.session import Session
from isthmus.records import Record
from isthmus.seeds import Stream


@dataclass(frozen=True)
class Nothing(Record):
    """A party without memory."""


class Stateless(Client[None, Nothing]):
    def initial_state(self) -> Nothing:
        return Nothing()


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(dataset="csbm:nodes=40,classes=3,features=5,degree=4", clients=3, split="40/20/40", seed=3)


def open_session(scenario: Scenario, roles: Mapping[str, Role], boundary: str = "copies") -> Session:
    table = RoleTable(roles)
    stream = Stream(0, ("party",))
    if boundary == "hosts":
        return Session(HostedEngine(scenario.parts, table, None, stream), table)
    return Session(LocalEngine(scenario.parts, table, None, stream, wire=boundary == "codec"), table)


def dense_adjacency(data: NodeData) -> Tensor:
    adjacency = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    adjacency.index_put_(
        (data.edge_index[0], data.edge_index[1]), torch.tensor(1.0, dtype=torch.float64), accumulate=True
    )
    return adjacency


# -- FedStruct: powers by column stripes
# ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stripe(Message):
    """Which power, for the columns owned by which client."""

    power: Count[int]
    owner: Identifier[str]


@dataclass(frozen=True)
class Block(Message):
    """B_ijk: rows of the receiver (by global id), columns of the stripe."""

    rows: Structure[Tensor]


@dataclass(frozen=True)
class Powers(Record):
    """[A^l]^[i] by stripe, dense here because the toy is small."""

    blocks: Mapping[str, Tensor]


class Hop(Client[None, Powers]):
    """Client k owns the rows of Ah^{l-1} of its nodes and knows the edges that enter them from i."""

    def setup(self) -> None:
        data = self.data
        assert data.cross is not None
        self.total = 40
        out = data.cross.outgoing
        degree = torch.ones(data.num_nodes, dtype=torch.float64)  # A + I
        for ends in (data.edge_index[0], data.cross.own[out]):
            degree += torch.bincount(ends, minlength=data.num_nodes)
        self.degree = degree

    def own_rows(self) -> Tensor:
        """At^[k]: rows of this client over all columns."""
        data = self.data
        assert data.cross is not None
        rows = torch.zeros(data.num_nodes, self.total, dtype=torch.float64)
        one = torch.tensor(1.0, dtype=torch.float64)
        rows.index_put_((torch.arange(data.num_nodes), data.node_id), one, accumulate=True)
        rows.index_put_((data.edge_index[0], data.node_id[data.edge_index[1]]), one, accumulate=True)
        out = data.cross.outgoing
        rows.index_put_((data.cross.own[out], data.cross.other[out]), one, accumulate=True)
        return rows

    def initial_state(self) -> Powers:
        rows = self.own_rows() / self.degree[:, None]
        return Powers({"": rows})

    def entering(self, sender: str) -> Tensor:
        """At_k^[i] with rows by global id of i's nodes: the edges from i that enter this client."""
        data = self.data
        assert data.cross is not None
        block = torch.zeros(self.total, data.num_nodes, dtype=torch.float64)
        entering = ~data.cross.outgoing & (data.cross.owner == data.cross.owners.index(sender))
        block.index_put_(
            (data.cross.other[entering], data.cross.own[entering]),
            torch.tensor(1.0, dtype=torch.float64),
            accumulate=True,
        )
        return block

    @handler
    def contribute(self, stripe: Stripe) -> Mapping[PartyId, Block]:
        assert self.data.cross is not None
        columns = self.columns(stripe.owner)
        power = self.state.blocks[""][:, columns]  # [Ah^{l-1}]_j^[k]
        mail = {i: Block((self.entering(i) @ power).to_sparse_csr()) for i in self.data.cross.owners if i != self.party}
        local = torch.zeros(self.total, self.data.num_nodes, dtype=torch.float64)
        source, target = self.data.edge_index
        local.index_put_((self.data.node_id[source], target), torch.tensor(1.0, dtype=torch.float64), accumulate=True)
        local[self.data.node_id, torch.arange(self.data.num_nodes)] += 1.0
        return {**mail, self.party: Block((local @ power).to_sparse_csr())}

    def columns(self, owner: str) -> Tensor:
        return torch.arange(self.total) % 3 == ["client-0", "client-1", "client-2"].index(owner)  # public stripes

    @handler
    def absorb(self, total: Block | None) -> None:
        assert total is not None
        stripes = self.scratch.stripes = [
            *getattr(self.scratch, "stripes", []),
            total.rows.to_dense()[self.data.node_id],
        ]
        if len(stripes) == 3:
            power = torch.zeros(self.data.num_nodes, self.total, dtype=torch.float64)
            for i, block in enumerate(stripes):
                power[:, self.columns(f"client-{i}")] = block / self.degree[:, None]
            self.state = Powers({"": power})


@pytest.mark.parametrize("boundary", ["copies", "codec", "hosts"])
def test_fedstruct_powers_by_column_stripes_equal_the_dense_power(scenario: Scenario, boundary: str) -> None:
    session = open_session(scenario, {"client": Role(Hop)}, boundary)
    for power in (2, 3):
        session.clock.begin("powers", power)
        for owner in session.clients:
            session.exchange(Hop.contribute, Hop.absorb, Stripe(power, owner), combine="sum")
    adjacency = dense_adjacency(scenario.whole) + torch.eye(40, dtype=torch.float64)
    expected = torch.linalg.matrix_power(adjacency / adjacency.sum(1, keepdim=True), 3)
    for client, data in scenario.parts.items():
        state = session.engine.party(client).client.state  # type: ignore[attr-defined]
        torch.testing.assert_close(state.blocks[""], expected[data.node_id], atol=1e-12, rtol=0)
    entries = session.ledger.take()
    mail = [entry for entry in entries if entry.message == "Block"]
    assert {entry.channel for entry in mail} == {"peer"} and {entry.protection for entry in mail} == {"summed"}
    assert all(
        sender != receiver for entry in mail for sender, receiver in zip(entry.sender, entry.receiver, strict=True)
    )


# -- HiFGL: shares between devices, silo and server, forward and backward
# --------------------------------------------------------

P = 2**31 - 1
SCALE = 2**16


def encode(x: Tensor) -> Tensor:
    return (x * SCALE).round().long() % P


def decode(a: Tensor) -> Tensor:
    return torch.where(a > P // 2, a - P, a).double() / SCALE


def uniform(shape: tuple[int, ...]) -> Tensor:
    """Fresh masks from the party's own entropy, never from a seeded stream."""
    count = int(np.prod(shape))
    raw = np.frombuffer(secrets.token_bytes(8 * count), dtype=np.uint64) % P
    return torch.from_numpy(raw.astype(np.int64)).reshape(shape)


@dataclass(frozen=True)
class Pass(Message):
    """Forward: neighbours' values flow along arcs; backward: gradients flow against them."""

    backward: Identifier[bool]


@dataclass(frozen=True)
class Shares(Message):
    """One share of each message, for target nodes by global id."""

    targets: Identifier[Tensor]
    values: Share[Tensor]


@dataclass(frozen=True)
class Sums(Message):
    """Summed shares by target."""

    targets: Identifier[Tensor]
    values: Share[Tensor]


def add_up(mail: Mapping[PartyId, Shares]) -> Sums:
    targets = torch.cat([message.targets for message in mail.values()])
    values = torch.cat([message.values for message in mail.values()])
    unique, inverse = torch.unique(targets, return_inverse=True)
    return Sums(unique, torch.zeros(len(unique), values.shape[1], dtype=torch.int64).index_add_(0, inverse, values) % P)


class Silo(Stateless):
    """Knows identities only. Holds the second share of everything and can open nothing."""

    @handler
    def hold(self, mail: Mapping[PartyId, Shares]) -> None:
        self.scratch.sums = add_up(mail)

    @handler
    def give_back(self) -> Mapping[PartyId, Sums]:
        return {f"{self.party}/devices": self.scratch.sums}


class Devices(Stateless):
    """All devices of a silo, vectorised: values, arcs and the first share."""

    def setup(self) -> None:
        data = self.data
        assert data.cross is not None
        out, arriving = data.cross.outgoing, ~data.cross.outgoing
        self.index = {int(node): row for row, node in enumerate(data.node_id)}
        home = torch.full((data.edge_index.shape[1],), data.cross.owners.index(self.party.split("/")[0]))
        source, target = data.edge_index

        def arcs(near: Tensor, far: Tensor, cross: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Own row, far id, far owner."""
            assert data.cross is not None
            ids = torch.cat([data.node_id[far], data.cross.other[cross]])
            return torch.cat([near, data.cross.own[cross]]), ids, torch.cat([home, data.cross.owner[cross]])

        # Arcs this silo's devices start (forward) and end (backward).
        self.arcs = {False: arcs(source, target, out), True: arcs(target, source, arriving)}
        self.owners = data.cross.owners

    @handler
    def share(self, which: Pass) -> Mapping[PartyId, Shares]:
        values = self.scratch.gradients if which.backward else getattr(self.scratch, "values", self.data.x.double())
        rows, targets, owner = self.arcs[which.backward]
        secret = encode(values)[rows]
        first = uniform(tuple(secret.shape))
        second = (secret - first) % P
        mail: dict[PartyId, Shares] = {}
        for i, silo in enumerate(self.owners):
            mine = owner == i
            mail[f"{silo}/devices"] = Shares(targets[mine], first[mine])
            mail[silo] = Shares(targets[mine], second[mine])
        mail[SERVER] = Shares(torch.empty(0, dtype=torch.int64), torch.empty(0, 1, dtype=torch.int64))
        return mail

    @handler
    def hold(self, mail: Mapping[PartyId, Shares]) -> None:
        self.scratch.sums = add_up(mail)

    @handler
    def open(self, mail: Mapping[PartyId, Sums]) -> None:
        (theirs,) = mail.values()
        mine: Sums = self.scratch.sums
        assert torch.equal(mine.targets, theirs.targets)
        total = torch.zeros(self.data.num_nodes, mine.values.shape[1], dtype=torch.float64)
        total[[self.index[int(node)] for node in mine.targets]] = decode((mine.values + theirs.values) % P)
        self.scratch.received = total

    @handler
    def activate(self, layer: Weights1) -> None:
        """The rest of a layer at the device: h = tanh(s W)."""
        self.scratch.values = torch.tanh(self.scratch.received @ layer.matrix)

    @handler
    def start_backward(self) -> Embeddings:
        """Loss sum_u s_u^2 / 2 at the top: its gradient with respect to the received sums is s itself."""
        self.scratch.gradients = self.scratch.received
        return Embeddings(self.scratch.received)

    @handler
    def report(self) -> Embeddings:
        return Embeddings(self.scratch.received)


@dataclass(frozen=True)
class Weights1(Message):
    matrix: Model[Tensor]


@dataclass(frozen=True)
class Embeddings(Message):
    values: Embedding[Tensor]


def identities(data: NodeData) -> Tensor:
    return data.node_id


def pass_messages(federation: Federation, *, backward: bool) -> int:
    """One layer of secret message passing; returns how many messages the server itself was given."""
    devices = federation.tier("device")
    replies = devices.exchange(Devices.share, (Devices.hold, Silo.hold), Pass(backward))
    federation.exchange(Silo.give_back, Devices.open)
    return len(replies.mail)


@pytest.mark.parametrize("boundary", ["copies", "codec", "hosts"])
def test_hifgl_shares_give_forward_and_backward_of_two_layers(scenario: Scenario, boundary: str) -> None:
    session = open_session(scenario, {"client": Role(Silo, holds=identities), "device": Role(Devices)}, boundary)
    matrix = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    session.clock.begin("train", 1)
    devices = session.tier("device")
    assert devices.clients == ("client-0/devices", "client-1/devices", "client-2/devices")
    assert pass_messages(session, backward=False) == 3
    devices.call(Devices.activate, Weights1(matrix))
    pass_messages(session, backward=False)
    devices.call(Devices.start_backward)
    pass_messages(session, backward=True)
    replies = devices.call(Devices.report)

    adjacency = dense_adjacency(scenario.whole).T  # row u sums over arcs v -> u
    hidden = torch.tanh(adjacency @ scenario.whole.x.double() @ matrix).requires_grad_()
    loss = (adjacency @ hidden).pow(2).sum() / 2
    (expected,) = torch.autograd.grad(loss, hidden)
    for client, data in scenario.parts.items():
        torch.testing.assert_close(replies[f"{client}/devices"].values, expected[data.node_id], atol=2e-2, rtol=1e-3)
    entries = session.ledger.take()
    roles = {entry.roles for entry in entries if entry.message in ("Shares", "Sums")}
    assert roles == {("device", "device"), ("device", "client"), ("device", "server"), ("client", "device")}
    assert {entry.channel for entry in entries if entry.message == "Shares"} == {"device"}


def test_hifgl_silo_object_holds_neither_features_nor_edges(scenario: Scenario) -> None:
    session = open_session(scenario, {"client": Role(Silo, holds=identities), "device": Role(Devices)})
    silo = session.engine.party("client-0").client  # type: ignore[attr-defined]
    assert torch.equal(silo.data, scenario.parts["client-0"].node_id)


# -- FedGGR: split learning in one round
# ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uploaded(Message):
    rows: Embedding[Tensor]


@dataclass(frozen=True)
class Turned(Message):
    """S->C: the client model and the rows of Z_glob of this client's nodes."""

    head: Model[Tensor]
    rows: Embedding[Tensor]


@dataclass(frozen=True)
class Returned(Message):
    """C->S: gradient of the mean loss with respect to the head and to the rows."""

    head: Gradient[Tensor]
    rows: Gradient[Tensor]
    nodes: Count[int]


class SplitClient(Stateless):
    @handler
    def upload(self) -> Uploaded:
        return Uploaded(self.data.x.double())

    def loss(self, turned: Turned) -> Tensor:
        logits = turned.rows @ turned.head
        return torch.nn.functional.cross_entropy(logits[self.data.train], self.data.y[self.data.train])

    @handler
    def turn(self, turned: Turned) -> Returned:
        leaf = Turned(turned.head.requires_grad_(), turned.rows.requires_grad_())
        head, rows = torch.autograd.grad(self.loss(leaf), (leaf.head, leaf.rows))
        return Returned(head, rows, self.data.num_nodes)

    @handler
    def predict(self, turned: Turned) -> Uploaded:
        return Uploaded(turned.rows @ turned.head)


@dataclass(frozen=True)
class SplitState(Record):
    embeddings: Mapping[str, Tensor]
    generator: Tensor
    head: Tensor


def upload_round(state: SplitState, federation: Federation) -> SplitState:
    replies = federation.call(SplitClient.upload)
    return replace(state, embeddings={client: reply.rows for client, reply in replies.items()})


def z_global(state: SplitState, generator: Tensor) -> Tensor:
    return torch.cat(list(state.embeddings.values())) * generator


def split_round(state: SplitState, federation: Federation, lr: float) -> SplitState:
    """The autograd graph of Z_glob is a local variable: it lives from sending the rows to receiving their gradients."""
    generator = state.generator.clone().requires_grad_()
    z = z_global(state, generator)
    sizes = [len(rows) for rows in state.embeddings.values()]
    rows = dict(zip(state.embeddings, z.detach().split(sizes), strict=True))
    replies = federation.call(
        SplitClient.turn, PerClient({client: Turned(state.head, rows[client]) for client in federation.clients})
    )
    total = sum(reply.nodes for reply in replies.values())
    z.backward(torch.cat([reply.rows * (reply.nodes / total) for reply in replies.values()]))
    assert generator.grad is not None
    head = state.head - lr * torch.stack([reply.head * (reply.nodes / total) for reply in replies.values()]).sum(0)
    return replace(state, generator=state.generator - lr * generator.grad, head=head)


@pytest.mark.parametrize("boundary", ["copies", "codec", "hosts"])
def test_fedggr_split_round_equals_one_centralised_step_and_evaluates_through_messages(
    scenario: Scenario, boundary: str
) -> None:
    session = open_session(scenario, {"client": Role(SplitClient)}, boundary)
    head = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    state = SplitState({}, torch.ones(5, dtype=torch.float64), head)
    session.clock.begin("upload", 1)
    state = upload_round(state, session)
    session.clock.begin("train", 1)
    new = split_round(state, session, lr=0.1)

    generator, common = state.generator.clone().requires_grad_(), head.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for data in scenario.parts.values():
        logits = (data.x.double() * generator) @ common
        loss = loss + data.num_nodes / 40 * torch.nn.functional.cross_entropy(logits[data.train], data.y[data.train])
    loss.backward()
    torch.testing.assert_close(new.generator, state.generator - 0.1 * generator.grad, atol=1e-12, rtol=0)
    torch.testing.assert_close(new.head, head - 0.1 * common.grad, atol=1e-12, rtol=0)

    # Evaluation needs messages too: the server sends fresh rows, clients classify.
    session.clock.begin("evaluation", 1)
    sizes = [len(rows) for rows in new.embeddings.values()]
    rows = dict(zip(new.embeddings, z_global(new, new.generator).split(sizes), strict=True))
    answers = session.call(
        SplitClient.predict, PerClient({client: Turned(new.head, rows[client]) for client in session.clients})
    )
    for client, data in scenario.parts.items():
        torch.testing.assert_close(
            answers[client].rows, (data.x.double() * new.generator) @ new.head, atol=1e-12, rtol=0
        )
    assert {entry.channel for entry in session.ledger.take()} == {"up", "down"}
