"""Lost calls, lost answers and lost parties: nobody trains twice, and a rollback brings everybody back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from faults import Fault, FaultyEngine

from isthmus.federation.interface import Failure, QuorumError
from isthmus.federation.messages import Count, Message
from isthmus.federation.roles import Client, Role, RoleTable, handler
from isthmus.federation.session import Session
from isthmus.records import Record
from isthmus.seeds import Stream

CLIENTS = ("a", "b", "c")


@dataclass(frozen=True)
class State(Record):
    steps: int


@dataclass(frozen=True)
class Number(Message):
    value: Count[int]


class Member(Client[Any, State]):
    def initial_state(self) -> State:
        return State(0)

    @handler
    def train(self) -> Number:
        self.state = State(self.state.steps + 1)
        return Number(self.state.steps)

    @handler
    def other(self) -> Number:
        return Number(0)


TABLE = RoleTable({"client": Role(Member)})


def _start(*plan: Fault) -> tuple[FaultyEngine, Session]:
    parts: Any = dict.fromkeys(CLIENTS)
    engine = FaultyEngine(parts, TABLE, None, Stream(1), plan=plan)
    session = Session(engine, TABLE)
    session.clock.begin("train", 1)
    engine.commit(0)
    return engine, session


def _steps(engine: FaultyEngine) -> list[int]:
    return [engine.party(name).client.state.steps for name in CLIENTS]


def _values(session: Session) -> list[int]:
    return [reply.value for reply in session.call(Member.train).values()]


@pytest.mark.parametrize("after", [False, True], ids=["lost call", "lost answer"])
def test_a_loss_is_made_good_by_the_retry(after: bool) -> None:
    engine, session = _start(Fault("b", "train", 1, "train", after=after))
    assert _values(session) == [1, 1, 1]
    assert _steps(engine) == [1, 1, 1], "b trained once"
    session.clock.begin("train", 2)
    assert _values(session) == [2, 2, 2]


def test_a_loss_that_lasts_ends_the_round() -> None:
    engine, session = _start(Fault("b", "train", 1, "train", times=2))
    with pytest.raises(QuorumError) as caught:
        session.call(Member.train)
    assert caught.value.failures == {"b": Failure("unavailable", "planned")}
    assert _steps(engine) == [1, 0, 1]


def test_lost_answers_twice_over_still_train_once() -> None:
    engine, session = _start(Fault("b", "train", 1, "train", times=2, after=True))
    replies = session.call(Member.train, quorum=0.5)
    assert list(replies) == ["a", "c"] and list(replies.failures) == ["b"]
    assert _steps(engine) == [1, 1, 1]


@pytest.mark.parametrize("kind", ["handler", "protocol", "timeout"])
def test_kinds_that_are_not_tried_again(kind: Any) -> None:
    engine, session = _start(Fault("b", "train", 1, "train", kind=kind))
    with pytest.raises(QuorumError):
        session.call(Member.train)
    assert _steps(engine) == [1, 0, 1]


@pytest.mark.parametrize(
    "miss",
    [
        Fault("b", "train", 2, "train", times=9),
        Fault("b", "setup", 1, "train", times=9),
        Fault("b", "train", 1, "other", times=9),
    ],
)
def test_a_fault_strikes_only_where_it_aims(miss: Fault) -> None:
    _, session = _start(miss)
    assert _values(session) == [1, 1, 1]


@pytest.mark.parametrize("after", [False, True])
def test_a_crashed_party_stays_away_until_the_rollback(after: bool) -> None:
    engine, session = _start(Fault("b", "train", 2, "train", kind="crashed", after=after))
    assert _values(session) == [1, 1, 1]
    engine.commit(1)
    session.clock.begin("train", 2)
    for verb in (Member.train, Member.other):
        with pytest.raises(QuorumError) as caught:
            session.call(verb)
        assert caught.value.failures["b"].kind == "crashed"
    engine.rollback(1)
    assert engine.rollbacks == 1 and _steps(engine) == [1, 1, 1]
    again = Session(engine, TABLE, incarnation=1)
    again.clock.begin("train", 2)
    assert _values(again) == [2, 2, 2], "the replayed round ends as if nothing had happened"


def test_a_call_of_the_lost_attempt_is_refused_by_everybody() -> None:
    engine, session = _start()
    again = Session(engine, TABLE, incarnation=1)
    again.clock.begin("train", 1)
    assert _values(again) == [1, 1, 1]
    with pytest.raises(QuorumError) as caught:
        session.call(Member.train)
    assert {failure.kind for failure in caught.value.failures.values()} == {"protocol"}
    assert _steps(engine) == [1, 1, 1]
