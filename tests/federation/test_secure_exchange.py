"""``exchange(..., combine="sum")`` with secure sums: a receiver reads only the total of its mail, and nothing is summed
by mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Fault, FaultyEngine
from test_protocols import Hop, Stripe, dense_adjacency
from torch import Tensor

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ProtocolError, RunError
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import QuorumError
from isthmus.federation.messages import SERVER, Count, Embedding, Message, PartyId, Structure
from isthmus.federation.party import Parcel
from isthmus.federation.roles import Client, Role, RoleTable, handler
from isthmus.federation.secure import MailOrder, MailOrders, MailPlan, Masked
from isthmus.federation.session import Session
from isthmus.federation.transcript import Transcript, received
from isthmus.privacy.attacks.uniform import uniformity
from isthmus.privacy.flatten import error_bound
from isthmus.records import Record
from isthmus.seeds import Stream

PARTIES = tuple(f"client-{i}" for i in range(4))
BOUND = 2 * error_bound(4)


@dataclass(frozen=True)
class Seen(Record):
    rows: Tensor
    steps: int
    draw: float


@dataclass(frozen=True)
class Rows(Message):
    rows: Embedding[Tensor]
    steps: Count[int]


@dataclass(frozen=True)
class Sparse(Message):
    first: Structure[Tensor]
    dense: Embedding[Tensor]
    second: Structure[Mapping[str, Tensor]]


class Neighbour(Client[None, Seen]):
    width = 128

    def initial_state(self) -> Seen:
        return Seen(torch.zeros(0), 0, 0.0)

    @property
    def number(self) -> int:
        return PARTIES.index(self.party)

    def rows(self, purpose: str) -> Tensor:
        return torch.randn(self.width, 4, generator=self.stream(purpose).torch(), dtype=torch.float64)

    @handler
    def post(self) -> Mapping[PartyId, Rows]:
        """Everybody writes to everybody, itself and the server included."""
        return {party: Rows(self.rows(party), self.number) for party in (*PARTIES, SERVER)}

    @handler
    def post_to_some(self) -> Mapping[PartyId, Rows]:
        """1 and 2 write to 0, who writes to itself; 3 writes to nobody."""
        receivers = {0: ["client-0"], 1: ["client-0"], 2: ["client-0"], 3: []}[self.number]
        return {party: Rows(self.rows(party), 1) for party in receivers}

    @handler
    def post_alone(self) -> Mapping[PartyId, Rows]:
        return {"client-0": Rows(self.rows("x"), 1)} if self.number in (0, 1) else {}

    @handler
    def post_uneven(self) -> Mapping[PartyId, Rows]:
        return {"client-0": Rows(torch.ones(self.number), 1)} if self.number else {}

    @handler
    def post_sparse(self) -> Mapping[PartyId, Sparse]:
        return {party: self.sparse(party) for party in PARTIES}

    def sparse(self, purpose: str) -> Sparse:
        chosen = torch.rand(10, 30, generator=self.stream(f"{purpose}-where").torch()) < 0.05
        values = torch.randn(10, 30, generator=self.stream(purpose).torch(), dtype=torch.float64) * chosen
        return Sparse(values.to_sparse_csr(), torch.ones(3), {"x": values[:, :7].float().to_sparse_csr()})

    @handler
    def absorb(self, total: Rows | None) -> None:
        draw = float(torch.rand(1, generator=self.stream("draw").torch()))
        self.state = Seen(torch.zeros(0), -1, draw) if total is None else Seen(total.rows, total.steps, draw)

    @handler
    def absorb_sparse(self, total: Sparse | None) -> None:
        assert total is not None and total.first.layout == torch.sparse_csr and total.second["x"].dtype == torch.float32
        flat = torch.cat(
            [total.first.to_dense().flatten(), total.dense.double(), total.second["x"].to_dense().double().flatten()]
        )
        self.state = Seen(flat, total.first.values().numel(), 0.0)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(dataset="csbm:nodes=80,classes=3,features=4,degree=4", clients=4, split="30/20/50", seed=5)


class Recording(LocalEngine):
    """Writes down what leaves each party."""

    left: list[Any]

    def _invoke(self, call: Any) -> Any:
        outcome = super()._invoke(call)
        self.__dict__.setdefault("left", []).append(outcome)
        return outcome


def open_session(
    scenario: Scenario, secure: bool = True, engine: type[LocalEngine] = LocalEngine, **options: Any
) -> Session:
    table = RoleTable({"client": Role(Neighbour)})
    session = Session(engine(scenario.parts, table, None, Stream(3), **options), table, secure=secure)
    session.clock.begin("train", 1, 1)
    return session


def state(session: Session, party: str = "client-0") -> Seen:
    engine: Any = session.engine
    seen = engine.party(party).client.state
    assert isinstance(seen, Seen)
    return seen


@pytest.mark.parametrize("wire", [False, True])
def test_everybody_receives_what_the_plain_exchange_gives(scenario: Scenario, wire: bool) -> None:
    plain, masked = (open_session(scenario, secure, wire=wire) for secure in (False, True))
    expected, given = (session.exchange(Neighbour.post, Neighbour.absorb, combine="sum") for session in (plain, masked))
    for party in PARTIES:
        torch.testing.assert_close(state(masked, party).rows, state(plain, party).rows, atol=BOUND, rtol=0)
        assert not torch.equal(state(masked, party).rows, state(plain, party).rows), "fixed point was used"
        assert state(masked, party).steps == state(plain, party).steps == 6
        assert state(masked, party).draw == state(plain, party).draw, "masks do not shift the handlers' random numbers"
    assert list(given.mail) == ["sum"]
    torch.testing.assert_close(given.mail["sum"].rows, expected.mail["sum"].rows, atol=BOUND, rtol=0)  # type: ignore[attr-defined]


def test_own_mail_is_added_in_the_clear_and_nobody_without_mail_is_forgotten(scenario: Scenario) -> None:
    plain, masked = (open_session(scenario, secure) for secure in (False, True))
    for session in (plain, masked):
        session.exchange(Neighbour.post_to_some, Neighbour.absorb, combine="sum")
    torch.testing.assert_close(state(masked).rows, state(plain).rows, atol=BOUND, rtol=0)
    assert state(masked).steps == 3 and state(masked, "client-3").steps == -1, "the one gets a sum, the other None"


def test_sparse_mail_is_summed_over_announced_positions(scenario: Scenario) -> None:
    plain, masked = open_session(scenario, secure=False), open_session(scenario, engine=Recording)
    for session in (plain, masked):
        session.exchange(Neighbour.post_sparse, Neighbour.absorb_sparse, combine="sum")
    for party in PARTIES:
        torch.testing.assert_close(state(masked, party).rows, state(plain, party).rows, atol=1e-6, rtol=0)
    engine: Any = masked.engine
    plans = [plan for plan in engine.left if isinstance(plan, MailPlan)]
    assert len(plans) == 4
    for party, plan in zip(PARTIES, plans, strict=True):
        client = engine.party(party).client
        client.enter("train", 1, 1)
        for receiver, (first, _) in plan.announced.items():
            real = client.sparse(receiver).first.to_dense().flatten().nonzero().flatten()
            assert set(real.tolist()) <= set(first.tolist()) and len(first) >= 2 * len(real), (
                "at least one dummy per entry"
            )


def test_what_one_sender_sends_is_uniform(scenario: Scenario) -> None:
    session = open_session(scenario, engine=Recording)
    session.exchange(Neighbour.post, Neighbour.absorb, combine="sum")
    engine: Any = session.engine
    parcels = [parcel for outcome in engine.left if isinstance(outcome, tuple) for parcel in outcome]
    assert all(isinstance(parcel.content, Masked) and parcel.sender != parcel.receiver for parcel in parcels)
    assert len(parcels) == 4 * 4, "three others and the server; mail to oneself never leaves"
    words = np.concatenate([parcel.content.words.numpy().view(np.uint64) for parcel in parcels])
    assert uniformity(words) > 1e-4
    assert not any(isinstance(outcome, Rows) for outcome in engine.left)


def test_the_ledger_says_masked_and_counts_what_masks_cost(scenario: Scenario) -> None:
    session = open_session(scenario)
    session.exchange(Neighbour.post, Neighbour.absorb, combine="sum")
    entries = session.ledger.take()
    rows = [entry for entry in entries if entry.message == "Rows"]
    assert {entry.protection for entry in rows} == {"masked"} and {entry.channel for entry in rows} == {"up", "peer"}
    assert sum(len(entry.bytes) for entry in rows) == 16
    framework = {entry.message: entry for entry in entries if entry.message != "Rows"}
    assert set(framework) == {"SumKey", "SumKeys", MailPlan.__name__, MailOrders.__name__} and all(
        entry.total for entry in framework.values()
    )


def test_a_single_foreign_sender_is_refused(scenario: Scenario) -> None:
    with pytest.raises(RunError, match=r"only client-1 writes to client-0.*without secure_sum"):
        open_session(scenario).exchange(Neighbour.post_alone, Neighbour.absorb, combine="sum")


def test_messages_of_different_shape_are_refused(scenario: Scenario) -> None:
    with pytest.raises(QuorumError, match="different shape"):
        open_session(scenario).exchange(Neighbour.post_uneven, Neighbour.absorb, combine="sum")


def test_a_missing_sender_aborts(scenario: Scenario) -> None:
    fault = Fault("client-2", "train", 1, "post", kind="timeout", times=99)
    session = open_session(scenario, engine=FaultyEngine, plan=[fault])
    with pytest.raises(QuorumError, match="3 of 4"):
        session.exchange(Neighbour.post, Neighbour.absorb, combine="sum")
    assert state(session).steps == 0, "nobody received anything"


def test_a_lost_answer_is_given_again_and_not_masked_twice(scenario: Scenario) -> None:
    fault = Fault("client-2", "train", 1, "post", after=True)
    faulty, sound = open_session(scenario, engine=FaultyEngine, plan=[fault]), open_session(scenario)
    for session in (faulty, sound):
        session.exchange(Neighbour.post, Neighbour.absorb, combine="sum")
    assert torch.equal(state(faulty).rows, state(sound).rows)


def test_a_parcel_that_was_lost_or_changed_or_sent_in_the_clear_is_noticed(scenario: Scenario) -> None:
    def tampered(change: Any) -> Session:
        class Relay(LocalEngine):
            def _invoke(self, call: Any) -> Any:
                if call.parcels and call.party == "client-0":
                    call = change(call)
                return super()._invoke(call)

        return open_session(scenario, engine=Relay)

    def flip(call: Any) -> Any:
        first = call.parcels[0]
        words = first.content.words.clone()
        words[0] += 1
        return replace(
            call, parcels=(Parcel(first.sender, first.receiver, replace(first.content, words=words)), *call.parcels[1:])
        )

    for change, complaint in (
        (lambda call: replace(call, parcels=call.parcels[1:]), "unusable without client-1"),
        (flip, "do not cancel"),
        (
            lambda call: replace(
                call, parcels=(Parcel("client-1", "client-0", Rows(torch.ones(4), 1)), *call.parcels[1:])
            ),
            "not masked",
        ),
        (lambda call: replace(call, mail=MailOrder(call.mail.held, {})), "without its roster"),
    ):
        with pytest.raises(QuorumError, match=complaint) as caught:
            tampered(change).exchange(Neighbour.post, Neighbour.absorb, combine="sum")
        assert isinstance(caught.value.failures["client-0"].cause, ProtocolError)


def test_the_powers_of_fedstruct_behind_masks(scenario: Scenario) -> None:
    """Sparse products between three clients, self-mail included, over two hops."""
    split = build_scenario(dataset="csbm:nodes=40,classes=3,features=4,degree=6", clients=3, split="30/20/50", seed=3)
    table = RoleTable({"client": Role(Hop)})
    session = Session(LocalEngine(split.parts, table, None, Stream(0)), table, secure=True)
    for power in (2, 3):
        session.clock.begin("powers", power, power)
        for owner in session.clients:
            session.exchange(Hop.contribute, Hop.absorb, Stripe(power, owner), combine="sum")
    adjacency = dense_adjacency(split.whole) + torch.eye(40, dtype=torch.float64)
    expected = torch.linalg.matrix_power(adjacency / adjacency.sum(1, keepdim=True), 3)
    for client, data in split.parts.items():
        engine: Any = session.engine
        torch.testing.assert_close(
            engine.party(client).client.state.blocks[""], expected[data.node_id], atol=1e-10, rtol=0
        )
    mail = [entry for entry in session.ledger.take() if entry.message == "Block"]
    assert {entry.protection for entry in mail} == {"masked"} and {entry.channel for entry in mail} == {"peer"}


@pytest.mark.parametrize("secure", [False, True])
def test_a_transcript_keeps_mail_with_its_receiver_as_it_arrived(
    scenario: Scenario, tmp_path: Path, secure: bool
) -> None:
    table = RoleTable({"client": Role(Neighbour)})
    session = Session(
        LocalEngine(scenario.parts, table, None, Stream(3)), table, secure=secure, transcript=Transcript(tmp_path)
    )
    session.clock.begin("train", 1, 1)
    session.exchange(Neighbour.post, Neighbour.absorb, combine="sum")
    for party in PARTIES:
        seen = list(received(tmp_path, party, table))
        assert [line.sender for line, _ in seen] == [other for other in PARTIES if other != party], (
            "not its mail to itself"
        )
        assert {type(message) for _, message in seen} == {Masked if secure else Rows}
    mail = [
        (line.sender, type(message))
        for line, message in received(tmp_path, SERVER, table)
        if not isinstance(message, MailPlan)
    ]
    assert mail == [(party, Masked if secure else Rows) for party in PARTIES], (
        "what clients write to each other is not the server's"
    )
