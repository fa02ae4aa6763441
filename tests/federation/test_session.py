"""The verbs: who is asked, who must answer, what is added up, what is delivered, and what the ledger says about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from isthmus.errors import ConfigError, DataError, ProtocolError, RunError
from isthmus.federation import codec
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import Failure, PerClient, QuorumError, Replies, Stacked, total
from isthmus.federation.ledger import Entry
from isthmus.federation.messages import SERVER, Count, Identifier, Message, Metric, Model, PartyId, Structure
from isthmus.federation.party import Invocation, Outcome, Parcel
from isthmus.federation.roles import Client, Cohort, Role, RoleTable, handler
from isthmus.federation.session import Session
from isthmus.records import Record
from isthmus.seeds import Stream

CLIENTS = ("a", "b", "c")
SECRET = "patient 4711 has the disease"


@dataclass(frozen=True)
class State(Record):
    steps: int
    kept: Tensor


@dataclass(frozen=True)
class Ask(Message):
    weights: Model[Tensor]
    text: Identifier[str] = ""


@dataclass(frozen=True)
class Answer(Message):
    weights: Model[Tensor]
    steps: Count[int]
    rate: Count[float]


@dataclass(frozen=True)
class Rows(Message):
    matrix: Structure[Tensor]


@dataclass(frozen=True)
class Named(Message):
    name: Identifier[str]


@dataclass(frozen=True)
class Odd(Message):
    number: Metric[int]
    """Annotated as an integer; a handler below puts something else in."""


def _value(party: PartyId) -> float:
    return float("abc".index(party[0]) + 1)


class Together(Cohort["Member"]):
    """Adds for all clients at once."""

    runs: ClassVar[int] = 0

    def load(self) -> None:
        self.kept = torch.stack([client.state.kept for client in self.clients])
        self.steps = [client.state.steps for client in self.clients]

    def store(self) -> None:
        for client, kept, steps in zip(self.clients, self.kept, self.steps, strict=True):
            client.state = State(steps, kept.clone())

    def train(self, request: Ask | list[Ask]) -> Stacked[Answer]:
        type(self).runs += 1
        requests = request if isinstance(request, list) else [request] * len(self.clients)
        for k, (client, one) in enumerate(zip(self.clients, requests, strict=True)):
            self.kept[k] += one.weights * client.value
            self.steps[k] += 1
        rates: Any = torch.tensor([client.value / 2 for client in self.clients])
        steps: Any = torch.tensor(self.steps)
        return Stacked(Answer(self.kept, steps, rates), tuple(client.party for client in self.clients))

    def hush(self) -> None:
        pass

    def fail(self) -> None:
        self.kept += 99
        raise ValueError(SECRET)

    def name(self) -> Stacked[Any]:
        return Stacked(Odd(torch.zeros(3)), ("a", "b", "c"))  # type: ignore[arg-type]


class Member(Client[Any, State]):
    cohort = Together

    def setup(self) -> None:
        self.value = _value(self.party)
        self.seen: list[Any] = []

    def initial_state(self) -> State:
        return State(0, torch.zeros(2))

    @handler
    def train(self, request: Ask) -> Answer:
        self.seen.append(request)
        self.state = State(self.state.steps + 1, self.state.kept + request.weights * self.value)
        return Answer(self.state.kept, self.state.steps, self.value / 2)

    @handler
    def hush(self) -> None:
        self.seen.append("hush")

    @handler
    def name(self) -> Named:
        return Named(self.party)

    @handler
    def fail(self) -> None:
        raise ValueError(SECRET)

    @handler
    def fail_at_b(self) -> Named:
        if self.party == "b":
            raise ValueError(SECRET)
        return Named(self.party)

    @handler
    def odd(self) -> Odd:
        return Odd("not a number" if self.party == "b" else 1)  # type: ignore[arg-type]

    @handler
    def rows(self) -> Rows:
        return Rows((torch.eye(3) * self.value).to_sparse_csr())

    @handler
    def diverge(self) -> Answer:
        return Answer(torch.tensor([float("nan") if self.party == "b" else 1.0]), 1, 1.0)

    # mail

    @handler
    def post(self) -> Mapping[PartyId, Rows]:
        """a -> a, b, server; b -> a, c; c -> nobody."""
        matrix = torch.zeros(2, 2)
        matrix[0, int(self.value) - 1 if self.value < 3 else 0] = self.value
        receivers = {"a": ("a", "b", SERVER), "b": ("a", "c"), "c": ()}[self.party]
        return {receiver: Rows(matrix.to_sparse_csr()) for receiver in receivers}

    @handler
    def post_to(self, where: Named) -> Mapping[PartyId, Rows]:
        return {where.name: Rows(torch.eye(2))}

    @handler
    def post_to_server(self) -> Mapping[PartyId, Answer]:
        return {SERVER: Answer(torch.full((2,), self.value), 1, 0.5)}

    @handler
    def read(self, mail: Mapping[PartyId, Rows]) -> Named:
        self.seen.append(dict(mail))
        return Named(",".join(mail))

    @handler
    def absorb(self, summed: Rows | None) -> Named:
        self.seen.append(summed)
        return Named("nothing" if summed is None else str(summed.matrix.to_dense().flatten().tolist()))

    @handler
    def drop(self, mail: Mapping[PartyId, Rows]) -> None:
        self.seen.append(dict(mail))

    @handler
    def relay(self, mail: Mapping[PartyId, Rows]) -> Mapping[PartyId, Rows]:
        return mail


class Device(Client[Any, State]):
    def setup(self) -> None:
        self.seen: list[Any] = []

    def initial_state(self) -> State:
        return State(0, torch.zeros(1))

    @handler
    def report(self) -> Named:
        return Named(self.party)

    @handler
    def post_up(self) -> Mapping[PartyId, Rows]:
        silo = self.party.partition("/")[0]
        return {silo: Rows(torch.eye(2)), "a/devices": Rows(torch.eye(2) * 2), SERVER: Rows(torch.eye(2) * 3)}

    @handler
    def hold(self, mail: Mapping[PartyId, Rows]) -> None:
        self.seen.append(dict(mail))


TABLE = RoleTable({"client": Role(Member), "device": Role(Device)})


def _engine(**options: Any) -> LocalEngine:
    return LocalEngine(dict.fromkeys(CLIENTS), TABLE, None, Stream(3), **options)  # type: ignore[arg-type]


def _session(engine: LocalEngine | None = None, **options: Any) -> Session:
    session = Session(engine or _engine(**options), TABLE, seed=3)
    session.clock.begin("train", 1)
    return session


def _client(session: Session, name: PartyId) -> Any:
    engine = session.engine
    assert isinstance(engine, LocalEngine)
    return engine.party(name).client


@pytest.fixture(params=[False, True], ids=["copy", "wire"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    yield _session(wire=request.param)


ASK = Ask(torch.tensor([1.0, 2.0]), "hello")


# -- call ------------------------------------------------------------------------------------------


def test_call_asks_everybody_in_sorted_order(session: Session) -> None:
    replies = session.call(Member.train, ASK)
    assert session.clients == tuple(replies) == CLIENTS and len(replies) == 3
    assert [reply.weights.tolist() for reply in replies.values()] == [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]
    assert replies.failures == {} and replies.mail == {} and replies.stacked is None


def test_call_asks_only_those_in_to(session: Session) -> None:
    assert list(session.call(Member.train, ASK, to=["c", "a", "c"])) == ["a", "c"]
    assert _client(session, "b").seen == []


def test_nothing_is_shared_across_the_wall(session: Session) -> None:
    request = Ask(torch.ones(2))
    reply = session.call(Member.train, request)["a"]
    request.weights.fill_(7.0)
    reply.weights.fill_(9.0)
    client = _client(session, "a")
    assert client.seen[0].weights.tolist() == [1.0, 1.0] and client.state.kept.tolist() == [1.0, 1.0]


def test_per_client_requests(session: Session) -> None:
    requests = PerClient({name: Ask(torch.full((2,), 10.0 ** -_value(name))) for name in reversed(CLIENTS)})
    replies = session.call(Member.train, requests)
    assert [reply.weights[0].item() for reply in replies.values()] == pytest.approx([0.1, 0.02, 0.003])
    assert list(session.call(Member.train, requests, to=["b"])) == ["b"]


def test_per_client_must_cover_those_asked(session: Session) -> None:
    with pytest.raises(ProtocolError, match="no message for b, c"):
        session.call(Member.train, PerClient({"a": ASK}))
    with pytest.raises(ProtocolError, match=r"unknown party 'd'.*allowed: a, b, c"):
        session.call(Member.train, PerClient({"a": ASK, "d": ASK}), to=["a"])


def test_a_call_without_reply(session: Session) -> None:
    replies = session.call(Member.hush)
    assert dict(replies) == {"a": None, "b": None, "c": None}
    assert session.ledger.take() == []


@pytest.mark.parametrize("request_", [None, Answer(torch.ones(1), 1, 1.0), PerClient({name: None for name in CLIENTS})])
def test_a_request_of_another_type_is_refused(session: Session, request_: Any) -> None:
    with pytest.raises(ProtocolError, match="train takes Ask"):
        session.call(Member.train, request_)
    with pytest.raises(ProtocolError, match="takes no message"):
        session.call(Member.hush, ASK)


def test_unknown_parties_are_refused_with_a_list(session: Session) -> None:
    with pytest.raises(ProtocolError, match=r"unknown party 'd'.*allowed: a, b, c"):
        session.call(Member.hush, to=["a", "d"])
    with pytest.raises(ProtocolError, match="nobody to call"):
        session.call(Member.hush, to=[])
    assert _client(session, "a").seen == []


def test_functions_that_cannot_be_called(session: Session) -> None:
    with pytest.raises(TypeError, match="not marked @handler"):
        session.call(Member.setup)
    with pytest.raises(ProtocolError, match=r"tier\('device'\)"):
        session.call(Device.report)
    with pytest.raises(ProtocolError, match=r"use exchange\(\)"):
        session.call(Member.post)
    with pytest.raises(ProtocolError, match=r"receive.*exchange\(\)"):
        session.call(Member.read, Rows(torch.eye(2)))
    with pytest.raises(ProtocolError, match=r"use call\(\) or sum\(\)"):
        session.exchange(Member.name, Member.read)


# -- quorum and retries ----------------------------------------------------------------------------


def test_below_quorum_the_round_is_lost(session: Session) -> None:
    with pytest.raises(
        QuorumError, match=r"train round 1, fail_at_b: 2 of 3 parties answered \(b: handler ValueError"
    ) as caught:
        session.call(Member.fail_at_b)
    assert caught.value.failures == {"b": Failure("handler", "ValueError")}
    assert SECRET not in repr(caught.value.failures)
    assert caught.value.exit_code == 4


def test_above_quorum_failures_are_listed(session: Session) -> None:
    for quorum in (2 / 3, 0.5, 1e-12):
        replies = session.call(Member.fail_at_b, quorum=quorum)
        assert list(replies) == ["a", "c"] and replies.failures == {"b": Failure("handler", "ValueError")}
    with pytest.raises(QuorumError):
        session.call(Member.fail_at_b, quorum=0.67)
    with pytest.raises(QuorumError):
        session.call(Member.fail_at_b, to=["b"], quorum=1e-12)


@pytest.mark.parametrize("quorum", [0.0, -1.0, 1.5])
def test_quorum_is_a_share(session: Session, quorum: float) -> None:
    with pytest.raises(ValueError, match="quorum"):
        session.call(Member.hush, quorum=quorum)


def test_a_reply_with_wrong_contents_fails_its_party_only(session: Session) -> None:
    replies = session.call(Member.odd, quorum=0.5)
    assert replies["a"] == Odd(1) and replies.failures == {"b": Failure("protocol", "ProtocolError")}


class Shaky(LocalEngine):
    """Fails the first ``times`` calls to b with a given kind, answers in another order, and counts."""

    kind: Any = "unavailable"
    times = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.dispatched: list[tuple[PartyId, ...]] = []

    def dispatch(self, calls: Sequence[Invocation], timeout: float | None) -> Mapping[PartyId, Outcome] | Stacked[Any]:
        self.dispatched.append(tuple(call.party for call in calls))
        reached = [call for call in reversed(calls) if call.party != "b" or self.times <= 0]
        outcome = super().dispatch(reached, timeout) if reached else {}
        assert not isinstance(outcome, Stacked)
        if any(call.party == "b" for call in calls) and self.times > 0:
            self.times -= 1
            return {**outcome, "b": Failure(self.kind, "planned")}
        return outcome


def _shaky(kind: str, times: int) -> tuple[Shaky, Session]:
    engine = Shaky(dict.fromkeys(CLIENTS), TABLE, None, Stream(3))  # type: ignore[arg-type]
    engine.kind, engine.times = kind, times
    return engine, _session(engine)


@pytest.mark.parametrize("kind", ["unavailable", "crashed"])
def test_one_retry_for_a_party_that_was_away(kind: str) -> None:
    engine, session = _shaky(kind, 1)
    assert list(session.call(Member.name)) == list(CLIENTS)
    assert engine.dispatched == [CLIENTS, ("b",)]
    engine, session = _shaky(kind, 2)
    with pytest.raises(QuorumError):
        session.call(Member.name)
    assert engine.dispatched == [CLIENTS, ("b",)]


@pytest.mark.parametrize("kind", ["handler", "protocol", "timeout"])
def test_no_retry_for_other_failures(kind: str) -> None:
    engine, session = _shaky(kind, 1)
    with pytest.raises(QuorumError):
        session.call(Member.name)
    assert engine.dispatched == [CLIENTS]


def test_sums_do_not_depend_on_who_answered_first() -> None:
    values = {"a": 1e16, "b": 1.0, "c": -1e16}  # in any other order the sum is another
    request = PerClient(
        {name: Ask(torch.full((2,), value / _value(name), dtype=torch.float64)) for name, value in values.items()}
    )
    _, shaky = _shaky("unavailable", 1)
    steady = _session().sum(Member.train, request)
    assert torch.equal(shaky.sum(Member.train, request).weights, steady.weights)


# -- sum -------------------------------------------------------------------------------------------


def test_sum_adds_every_numeric_field(session: Session) -> None:
    summed = session.sum(Member.train, ASK)
    assert isinstance(summed, Answer)
    assert summed.weights.tolist() == [6.0, 12.0] and summed.steps == 3 and summed.rate == 3.0
    assert session.sum(Member.train, ASK, to=["b"]).weights.tolist() == [4.0, 8.0]


def test_sum_of_csr(session: Session) -> None:
    summed = session.sum(Member.rows).matrix
    assert summed.layout == torch.sparse_csr and torch.equal(summed.to_dense(), torch.eye(3) * 6)


def test_sum_needs_everybody(session: Session) -> None:
    with pytest.raises(QuorumError, match="2 of 3"):
        session.sum(Member.fail_at_b)


def test_sum_needs_messages_that_add_up(session: Session) -> None:
    with pytest.raises(ProtocolError, match="must return one"):
        session.sum(Member.hush)
    with pytest.raises(ProtocolError, match="cannot be summed"):
        session.sum(Member.name)


def test_total_of_nothing_and_of_different_things() -> None:
    with pytest.raises(ProtocolError):
        total([])
    with pytest.raises(ProtocolError):
        total([Named("a"), Odd(1)])


def test_what_is_not_finite_is_named(session: Session) -> None:
    for verb in (session.call, session.sum):
        with pytest.raises(RunError, match="what b returned is not finite"):
            verb(Member.diverge)


# -- exchange --------------------------------------------------------------------------------------


def test_exchange_delivers_each(session: Session) -> None:
    replies = session.exchange(Member.post, Member.read)
    # Everybody who sent or got mail receives, c and its empty hands included.
    assert {party: reply.name for party, reply in replies.items()} == {"a": "a,b", "b": "a", "c": "b"}
    assert list(replies.mail) == ["a"]
    assert torch.equal(replies.mail["a"].matrix.to_dense(), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))  # type: ignore[attr-defined]
    got = _client(session, "a").seen[0]
    assert torch.equal(got["b"].matrix.to_dense(), torch.tensor([[0.0, 2.0], [0.0, 0.0]]))


def test_exchange_sums(session: Session) -> None:
    replies = session.exchange(Member.post, Member.absorb, combine="sum", to=["a", "b"])
    assert replies["a"].name == "[1.0, 2.0, 0.0, 0.0]" and replies["b"].name == "[1.0, 0.0, 0.0, 0.0]"
    assert replies["c"].name == "[0.0, 2.0, 0.0, 0.0]"
    assert _client(session, "a").seen[0].matrix.layout == torch.sparse_csr
    assert list(replies.mail) == ["sum"]


def test_without_mail_a_sum_is_none(session: Session) -> None:
    replies = session.exchange(Member.post, Member.absorb, combine="sum", to=["c"])
    assert {party: reply.name for party, reply in replies.items()} == {"c": "nothing"}
    replies = session.exchange(Member.post, Member.read, to=["c"])
    assert {party: reply.name for party, reply in replies.items()} == {"c": ""}


def test_mail_to_the_server(session: Session) -> None:
    each = session.exchange(Member.post_to_server, Member.drop)
    assert list(each.mail) == list(CLIENTS)
    summed = session.exchange(Member.post_to_server, Member.absorb, combine="sum").mail
    assert list(summed) == ["sum"]
    answer = summed["sum"]
    assert (
        isinstance(answer, Answer)
        and answer.weights.tolist() == [6.0, 6.0]
        and answer.steps == 3
        and answer.rate == 1.5
    )


def test_unknown_receivers_are_refused_with_a_list(session: Session) -> None:
    with pytest.raises(ProtocolError, match=r"unknown receiver 'd'.*allowed: a, b, c, server"):
        session.exchange(Member.post_to, Member.read, Named("d"))
    with pytest.raises(ProtocolError, match="unknown receiver 'a/devices'"):  # nobody was named to receive there
        session.exchange(Member.post_to, Member.read, Named("a/devices"))
    assert _client(session, "a").seen == []


def test_receivers_that_cannot_receive_are_refused_before_anybody_sends(session: Session) -> None:
    for receive, combine in (
        (Member.read, "sum"),
        (Member.absorb, "each"),
        (Member.hush, "each"),
        (Member.relay, "each"),
        ([Member.read, Member.drop], "each"),
    ):
        with pytest.raises(ProtocolError):
            session.exchange(Member.post, receive, combine=combine)  # type: ignore[arg-type]
    assert session.clock.sequence == 0 and session.ledger.take() == []


def test_mail_under_another_name_is_refused() -> None:
    class Forger(LocalEngine):
        change: Any = None

        def dispatch(
            self, calls: Sequence[Invocation], timeout: float | None
        ) -> Mapping[PartyId, Outcome] | Stacked[Any]:
            outcome = super().dispatch(calls, timeout)
            assert not isinstance(outcome, Stacked)
            return {party: self.change(sent) if isinstance(sent, tuple) else sent for party, sent in outcome.items()}

    engine = Forger(dict.fromkeys(CLIENTS), TABLE, None, Stream(3))  # type: ignore[arg-type]
    for change in (lambda sent: tuple(Parcel("c", p.receiver, p.content) for p in sent), lambda sent: sent + sent):
        engine.change = change
        with pytest.raises(ProtocolError, match="mail of a"):
            _session(engine).exchange(Member.post, Member.read)


# -- tiers -----------------------------------------------------------------------------------------


def test_a_tier_is_a_federation_of_another_role(session: Session) -> None:
    devices = session.tier("device")
    assert devices.clients == ("a/devices", "b/devices", "c/devices")
    assert [reply.name for reply in devices.call(Device.report).values()] == list(devices.clients)
    assert devices.ledger is session.ledger and devices.clock is session.clock
    with pytest.raises(ProtocolError, match=r"tier\('client'\)"):
        devices.call(Member.name)
    assert devices.tier("client").clients == CLIENTS
    for role in ("devices", "server"):
        with pytest.raises(ProtocolError, match=r"allowed: client, device"):
            session.tier(role)


def test_mail_between_tiers(session: Session) -> None:
    replies = session.tier("device").exchange(Device.post_up, [Device.hold, Member.read])
    assert {p: r.name for p, r in replies.items() if r is not None} == {name: f"{name}/devices" for name in CLIENTS}
    assert list(_client(session, "a/devices").seen[0]) == ["a/devices", "b/devices", "c/devices"]
    assert _client(session, "b/devices").seen == [{}]
    assert list(replies.mail) == ["a/devices", "b/devices", "c/devices"]
    by_roles = {entry.roles: entry for entry in session.ledger.take() if entry.handler == "post_up"}
    assert set(by_roles) == {("device", "client"), ("device", "device"), ("device", "server")}
    assert by_roles["device", "device"].sender == ("b/devices", "c/devices")  # a's mail to itself is no traffic
    assert all(entry.channel == "device" for entry in by_roles.values())


# -- ledger ----------------------------------------------------------------------------------------


def _lines(session: Session) -> list[Entry]:
    return session.ledger.take()


def test_a_call_is_two_lines(session: Session) -> None:
    replies = session.call(Member.train, ASK)
    down, up = _lines(session)
    size = len(codec.encode(ASK))
    assert (down.message, down.channel, down.sender, down.receiver) == ("Ask", "down", (SERVER,), CLIENTS)
    assert down.bytes == (size,) * 3 and down.total == 3 * size
    assert down.kinds == {"weights": "model", "text": "identifier"} and down.by_kind == {"model": 24, "identifier": 0}
    assert (up.message, up.channel, up.sender, up.protection) == ("Answer", "up", CLIENTS, "clear")
    assert up.receiver == (SERVER,) * 3
    assert up.bytes == tuple(len(codec.encode(reply)) for reply in replies.values())
    assert up.by_kind == {"model": 24, "count": 48}
    for line in (down, up):
        assert (line.attempt, line.phase, line.round, line.sequence, line.handler) == (0, "train", 1, 1, "train")


def test_per_client_requests_are_measured_one_by_one(session: Session) -> None:
    requests = {name: Ask(torch.zeros(2), name * int(10 * _value(name))) for name in CLIENTS}
    session.call(Member.train, PerClient(requests))
    down = _lines(session)[0]
    assert down.sender == (SERVER,) * 3 and down.receiver == CLIENTS
    assert down.bytes == tuple(len(codec.encode(requests[name])) for name in CLIENTS) and len(set(down.bytes)) == 3


def test_a_sum_is_summed(session: Session) -> None:
    session.sum(Member.train, ASK)
    assert [line.protection for line in _lines(session)] == ["clear", "summed"]


def test_mail_in_the_ledger(session: Session) -> None:
    session.exchange(Member.post, Member.read)
    lines = _lines(session)
    assert [(line.channel, line.handler, line.message) for line in lines] == [
        ("peer", "post", "Rows"),
        ("up", "post", "Rows"),
        ("up", "read", "Named"),
    ]
    peer, server, read = lines
    assert list(zip(peer.sender, peer.receiver, strict=True)) == [("a", "b"), ("b", "a"), ("b", "c")]  # not a -> a
    assert server.sender == ("a",) and server.receiver == (SERVER,)
    one = torch.zeros(2, 2)
    one[0, 0] = 1.0
    assert set(peer.bytes) | set(server.bytes) == {len(codec.encode(Rows(one.to_sparse_csr())))}
    assert (peer.sequence, read.sequence) == (1, 2)
    session.exchange(Member.post, Member.absorb, combine="sum")
    assert [line.protection for line in _lines(session)] == ["summed", "summed", "clear"]


def test_failed_parties_have_no_reply_in_the_ledger(session: Session) -> None:
    session.call(Member.fail_at_b, quorum=0.5)
    (up,) = _lines(session)
    assert up.sender == ("a", "c")


def test_copy_and_wire_give_the_same_bits_and_bytes() -> None:
    found = []
    for wire in (False, True):
        session = _session(wire=wire)
        replies = session.call(Member.train, ASK)
        mail = session.exchange(Member.post, Member.absorb, combine="sum")
        found.append(
            (
                [codec.encode(reply) for reply in (*replies.values(), *mail.values())],
                [line.to_json() for line in _lines(session)],
            )
        )
    assert found[0] == found[1]


def test_streams_of_the_server_follow_the_round() -> None:
    session = _session()
    first = session.stream("draw").integer()
    assert session.tier("device").stream("draw").integer() == first != session.stream("other").integer()
    session.clock.begin("train", 2)
    assert session.stream("draw").integer() != first


# -- clients trained together ----------------------------------------------------------------------


@pytest.fixture
def pair() -> tuple[Session, Session]:
    """The same federation, each client alone and all together."""
    Together.runs = 0
    return _session(), _session(cohort=True)


def _same_answers(alone: Replies[Any], together: Replies[Any]) -> None:
    assert list(alone) == list(together) and len(alone) == len(together)
    for party in alone:
        assert codec.encode(alone[party]) == codec.encode(together[party])


def test_stacked_replies_equal_single_ones(pair: tuple[Session, Session]) -> None:
    alone, together = (session.call(Member.train, ASK) for session in pair)
    assert together.stacked is not None and alone.stacked is None and Together.runs == 1
    _same_answers(alone, together)
    one, both = (session.ledger.take() for session in pair)
    assert [(line.bytes, line.by_kind, line.channel) for line in one] == [
        (line.bytes, line.by_kind, line.channel) for line in both
    ]
    assert [(line.sender, line.message, line.kinds) for line in one] == [
        (line.sender, line.message, line.kinds) for line in both
    ]


def test_per_client_requests_together(pair: tuple[Session, Session]) -> None:
    requests = PerClient({name: Ask(torch.full((2,), _value(name))) for name in CLIENTS})
    _same_answers(*(session.call(Member.train, requests) for session in pair))
    assert Together.runs == 1


def test_sums_together(pair: tuple[Session, Session]) -> None:
    alone, together = (session.sum(Member.train, ASK) for session in pair)
    assert codec.encode(alone) == codec.encode(together) and Together.runs == 1


def test_a_part_of_the_clients_runs_alone_on_the_same_state(pair: tuple[Session, Session]) -> None:
    for session in pair:
        session.call(Member.train, ASK)
    _same_answers(*(session.call(Member.train, ASK, to=["a", "b"]) for session in pair))
    _same_answers(*(session.call(Member.train, ASK) for session in pair))
    assert Together.runs == 2


def test_replies_do_not_change_while_the_cohort_trains_on(pair: tuple[Session, Session]) -> None:
    _, session = pair
    first = session.call(Member.train, ASK)
    session.call(Member.train, ASK)
    assert [reply.weights.tolist() for reply in first.values()] == [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]


def test_silence_together(pair: tuple[Session, Session]) -> None:
    assert dict(pair[1].call(Member.hush)) == dict.fromkeys(CLIENTS)
    assert _client(pair[1], "a").seen == []


def test_a_cohort_that_fails_is_a_failure_of_its_parties(pair: tuple[Session, Session]) -> None:
    _, session = pair
    session.call(Member.train, ASK)
    session.engine.commit(1)
    with pytest.raises(QuorumError) as caught:
        session.call(Member.fail)
    assert caught.value.failures == dict.fromkeys(CLIENTS, Failure("handler", "ValueError"))
    assert _client(session, "a").state.kept.tolist() == [1.0, 2.0], "what the cohort had half done is gone"
    with pytest.raises(QuorumError) as caught:
        session.call(Member.name)
    assert {failure.kind for failure in caught.value.failures.values()} == {"protocol"}


def test_rollback_with_a_cohort(pair: tuple[Session, Session]) -> None:
    for session in pair:
        session.call(Member.train, ASK)
        session.engine.commit(1)
        session.call(Member.train, ASK)
        session.engine.commit(2)
        session.call(Member.train, ASK)
        assert session.engine.tags() == (1, 2)
        session.engine.rollback(1)
        assert session.engine.tags() == (1,)
        session.clock.begin("train", 2)
    _same_answers(*(session.call(Member.train, ASK) for session in pair))
    assert _client(pair[1], "a").state.steps == 2


# -- engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["server", "common", "a/devices", ""])
def test_names_that_mean_something_else(name: str) -> None:
    with pytest.raises(DataError, match="cannot be called"):
        LocalEngine({name: None}, TABLE, None, Stream(3))  # type: ignore[dict-item]


def test_an_unknown_party_of_the_engine() -> None:
    with pytest.raises(ConfigError, match=r"unknown party 'd'.*a/devices"):
        _engine().party("d")


def test_order_of_the_parts_does_not_matter() -> None:
    parts: Any = dict.fromkeys(reversed(CLIENTS))
    engine = LocalEngine(parts, TABLE, None, Stream(3))
    assert engine.parties("client") == CLIENTS and engine.parties("nobody") == ()
