"""A party's runtime: what gets in, what gets out, and what it remembers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.errors import DataError
from isthmus.federation import codec
from isthmus.federation.interface import Failure
from isthmus.federation.messages import Count, Identifier, Message, Model, PartyId
from isthmus.federation.party import Invocation, Parcel, Party, Turn
from isthmus.federation.roles import Client, Role, RoleTable, handler
from isthmus.records import Record
from isthmus.seeds import Stream

SECRET = "patient 4711 has the disease"


@dataclass(frozen=True)
class State(Record):
    steps: int
    weights: Tensor


@dataclass(frozen=True)
class Number(Message):
    value: Count[int]


@dataclass(frozen=True)
class Update(Message):
    weights: Model[Tensor]
    share: Count[float]


@dataclass(frozen=True)
class Update2(Update):
    pass


@dataclass(frozen=True)
class Draw(Message):
    numbers: Model[Tensor]
    who: Identifier[str]


class Member(Client[Any, State]):
    runs: dict[str, int]

    def setup(self) -> None:
        self.runs = {}
        self.doubled = 2 * int(self.config)

    def initial_state(self) -> State:
        return State(0, torch.zeros(2))

    def _count(self, name: str) -> None:
        self.runs[name] = self.runs.get(name, 0) + 1

    @handler
    def train(self, number: Number) -> Update:
        self._count("train")
        self.state = State(self.state.steps + 1, self.state.weights + number.value)
        return Update(self.state.weights, 1.0)

    @handler
    def fail(self, number: Number) -> Update:
        self._count("fail")
        self.state = State(99, torch.full((2,), 99.0))
        raise ValueError(SECRET)

    @handler
    def lie(self) -> Update:
        self.state = State(99, self.state.weights)
        return Number(3)  # type: ignore[return-value]

    @handler
    def exaggerate(self) -> Update:
        return Update2(self.state.weights, 1.0)

    @handler
    def forget(self) -> Update:
        return None  # type: ignore[return-value]

    @handler
    def blurt(self) -> None:
        return Number(1)  # type: ignore[return-value]

    @handler
    def note(self, number: Number) -> None:
        self.scratch.note = number.value

    @handler
    def recall(self) -> Number:
        return Number(getattr(self.scratch, "note", -1))

    @handler
    def draw(self) -> Draw:
        return Draw(torch.rand(3, generator=self.stream("noise").torch()), self.party)

    @handler
    def post(self) -> Mapping[PartyId, Number]:
        return {"c": Number(3), "b": Number(2)}

    @handler
    def post_badly(self) -> Mapping[PartyId, Number]:
        return {"b": Update(torch.zeros(1), 1.0)}  # type: ignore[dict-item]

    @handler
    def post_nowhere(self) -> Mapping[PartyId, Number]:
        return {3: Number(1)}  # type: ignore[dict-item]

    @handler
    def post_nothing(self) -> Mapping[PartyId, Number]:
        return (Number(1),)  # type: ignore[return-value]

    @handler
    def read(self, mail: Mapping[PartyId, Number]) -> Number:
        assert list(mail) == sorted(mail)
        return Number(sum(number.value for number in mail.values()))

    @handler
    def absorb(self, total: Number | None) -> Number:
        return Number(-1 if total is None else total.value)

    def hidden(self) -> Number:
        raise AssertionError("reached from outside")


class Louder(Member):
    def train(self, number: Number) -> Update:  # no mark of its own: the base's mark counts
        super().train(number)
        return Update(self.state.weights * 10, 1.0)


TURN = Turn(0, "train", 1)


def _party(cls: type[Member] = Member, name: PartyId = "a") -> Party:
    return Party(name, "client", lambda: cls(name, None, 5, Stream(7).child(name)), RoleTable({"client": Role(cls)}))


def _call(
    handler: str, argument: Message | None = None, *, sequence: int = 1, turn: Turn = TURN, **more: Any
) -> Invocation:
    return Invocation("a", "client", handler, turn, sequence, argument, **more)


def _failure(outcome: object) -> Failure:
    assert isinstance(outcome, Failure)
    assert SECRET not in outcome.detail and SECRET not in repr(outcome)
    return outcome


# -- calls -----------------------------------------------------------------------------------------


def test_a_call_runs_and_changes_state() -> None:
    party = _party()
    reply = party.invoke(_call("train", Number(3)))
    assert isinstance(reply, Update) and reply.weights.tolist() == [3.0, 3.0]
    assert party.client.state.steps == 1 and party.client.doubled == 10  # type: ignore[attr-defined]


def test_an_overridden_handler_runs() -> None:
    reply = _party(Louder).invoke(_call("train", Number(3)))
    assert isinstance(reply, Update) and reply.weights.tolist() == [30.0, 30.0]


@pytest.mark.parametrize(
    "name", ["hidden", "trian", "setup", "initial_state", "export", "__init__", "_count", "state", "data"]
)
def test_what_is_not_marked_is_out_of_reach(name: str) -> None:
    failure = _failure(_party().invoke(_call(name)))
    assert failure.kind == "protocol"
    assert (
        "client.train" in str(failure.cause)
        and "client.recall" in str(failure.cause)
        and "client.hidden," not in str(failure.cause)
    )


def test_a_call_for_somebody_else_is_refused() -> None:
    party = _party()
    assert _failure(party.invoke(replace(_call("recall"), party="b"))).kind == "protocol"
    assert _failure(party.invoke(replace(_call("recall"), role="device"))).kind == "protocol"


@pytest.mark.parametrize(
    "call",
    [
        _call("train"),
        _call("train", Update(torch.zeros(2), 1.0)),
        _call("recall", Number(1)),
        _call("train", parcels=()),
    ],
)
def test_a_request_of_another_type_is_refused_before_the_handler_runs(call: Invocation) -> None:
    party = _party()
    assert _failure(party.invoke(call)).kind == "protocol"
    assert party.client.runs == {} and party.client.state.steps == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["lie", "exaggerate", "forget", "blurt", "post_badly", "post_nowhere", "post_nothing"])
def test_a_reply_of_another_type_is_a_protocol_failure(name: str) -> None:
    party = _party()
    assert _failure(party.invoke(_call(name))) == Failure("protocol", "ProtocolError")
    assert party.client.state.steps == 0


def test_a_handler_that_raises_leaves_the_state_as_it_was() -> None:
    party = _party()
    party.invoke(_call("train", Number(3)))
    before = party.client.state
    failure = _failure(party.invoke(_call("fail", Number(1), sequence=2)))
    assert failure == Failure("handler", "ValueError") and SECRET in str(failure.cause)
    assert party.client.state is before
    party.invoke(_call("fail", Number(1), sequence=2))  # a failure is no answer: asked again, it runs again
    assert party.client.runs["fail"] == 2  # type: ignore[attr-defined]


def test_a_repeated_sequence_is_answered_from_memory() -> None:
    party = _party()
    first = party.invoke(_call("train", Number(3)))
    assert party.invoke(_call("train", Number(3))) is first
    assert party.client.runs["train"] == 1 and party.client.state.steps == 1  # type: ignore[attr-defined]
    party.invoke(_call("train", Number(3), sequence=2))
    assert party.client.runs["train"] == 2  # type: ignore[attr-defined]


def test_mail_is_remembered_until_other_mail_is_sent() -> None:
    """A round of many exchanges holds the mail of one."""
    party = _party()
    first = party.invoke(_call("post"))
    assert party.invoke(_call("post")) is first
    assert isinstance(first, tuple)
    content = weakref.ref(first[0].content)
    party.invoke(_call("train", Number(3), sequence=2))
    assert party.invoke(_call("post")) is first
    party.invoke(_call("post", sequence=3))
    del first
    gc.collect()
    assert content() is None
    failure = _failure(party.invoke(_call("post")))
    assert failure.kind == "protocol" and "is over" in str(failure.cause)
    party.invoke(_call("train", Number(3), sequence=2))
    assert party.client.runs["train"] == 1, "other answers are remembered for the whole round"  # type: ignore[attr-defined]


def test_none_is_remembered_too() -> None:
    party = _party()
    assert party.invoke(_call("note", Number(3))) is None
    party.client.scratch.note = 8
    assert party.invoke(_call("note", Number(3))) is None
    assert party.invoke(_call("recall", sequence=2)) == Number(8)


def test_a_sequence_belongs_to_one_handler() -> None:
    party = _party()
    party.invoke(_call("note", Number(3)))
    assert _failure(party.invoke(_call("recall"))).kind == "protocol"


def test_memory_ends_with_the_round() -> None:
    party = _party()
    party.invoke(_call("train", Number(3)))
    party.invoke(_call("train", Number(3), turn=Turn(0, "train", 2)))
    assert party.client.state.steps == 2


@pytest.mark.parametrize("turn", [Turn(0, "train", 2), Turn(0, "other", 1), Turn(1, "train", 1)])
def test_scratch_is_empty_in_a_new_round(turn: Turn) -> None:
    party = _party()
    party.invoke(_call("note", Number(3)))
    assert party.invoke(_call("recall", sequence=2)) == Number(3)
    assert party.invoke(_call("recall", sequence=3, turn=turn)) == Number(-1)


def test_an_older_incarnation_is_refused() -> None:
    party = _party()
    party.invoke(_call("train", Number(1), turn=Turn(3, "train", 1)))
    failure = _failure(party.invoke(_call("train", Number(1), turn=Turn(2, "train", 2))))
    assert failure.kind == "protocol" and "incarnation 2" in str(failure.cause)
    assert party.client.state.steps == 1
    assert isinstance(party.invoke(_call("train", Number(1), turn=Turn(4, "train", 1))), Update)


def test_an_older_incarnation_stays_refused_after_a_rollback() -> None:
    """A call that was on its way while everybody rolled back must not train anybody."""
    party = _party()
    party.commit(0)
    party.invoke(_call("train", Number(1), turn=Turn(3, "train", 1)))
    party.rollback(0)
    assert _failure(party.invoke(_call("train", Number(1), turn=Turn(2, "train", 1)))).kind == "protocol"
    assert party.client.state.steps == 0


def test_random_streams_follow_the_call() -> None:
    def drawn(party: Party, sequence: int, turn: Turn) -> Any:
        reply = party.invoke(_call("draw", sequence=sequence, turn=turn))
        assert isinstance(reply, Draw)
        return tuple(reply.numbers.tolist())

    turns = [(1, TURN), (2, TURN), (1, Turn(0, "train", 2)), (1, Turn(0, "other", 2))]
    one, party = [drawn(_party(), *call) for call in turns], _party()
    assert [drawn(party, *call) for call in turns] == one  # what ran before does not matter
    assert len(set(one)) == len(one)
    assert drawn(_party(), 1, Turn(9, "train", 1)) == one[0]  # a replayed round draws the same numbers


# -- mail ------------------------------------------------------------------------------------------


def test_mail_leaves_sorted_under_the_partys_own_name() -> None:
    assert _party().invoke(_call("post")) == (Parcel("a", "b", Number(2)), Parcel("a", "c", Number(3)))


def test_mail_arrives() -> None:
    parcels = (Parcel("c", "a", Number(5)), Parcel("b", "a", Number(2)))
    assert _party().invoke(_call("read", parcels=parcels)) == Number(7)
    assert _party().invoke(_call("read", parcels=())) == Number(0)
    assert _party().invoke(_call("absorb", parcels=parcels, combine="sum")) == Number(7)
    assert _party().invoke(_call("absorb", parcels=(), combine="sum")) == Number(-1)


@pytest.mark.parametrize(
    "call",
    [
        _call("read", parcels=(Parcel("b", "c", Number(1)),)),
        _call("read", parcels=(Parcel("b", "a", Update(torch.zeros(1), 1.0)),)),
        _call("read", parcels=(Parcel("b", "a", Number(1)),), combine="sum"),
        _call("absorb", parcels=(Parcel("b", "a", Number(1)),)),
        _call("recall", parcels=()),
        _call("read", Number(1)),
    ],
)
def test_wrong_mail_is_a_protocol_failure(call: Invocation) -> None:
    assert _failure(_party().invoke(call)).kind == "protocol"


# -- tags ------------------------------------------------------------------------------------------


class MemoryStore:
    """A store as a party would have on its disk: bytes by step."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}

    def save(self, step: int, state: Record) -> None:
        self.files[step] = codec.encode(state)

    def load(self, step: int, record: type[Record]) -> Record:
        if step not in self.files:
            raise DataError(f"no tag {step}")
        return codec.decode(self.files[step], record)

    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self.files))

    def forget(self, keep: Sequence[int]) -> None:
        self.files = {step: data for step, data in self.files.items() if step in keep}


def _train(party: Party, *rounds: int) -> None:
    for number in rounds:
        party.invoke(_call("train", Number(number), turn=Turn(0, "train", number)))
        party.commit(number)


stores = pytest.mark.parametrize("make_store", [lambda: None, MemoryStore], ids=["memory", "store"])


@stores
def test_the_last_two_tags_are_kept(make_store: Callable[[], Any]) -> None:
    party = _party()
    party.store = make_store()
    _train(party, 1, 2, 3, 4)
    assert party.tags() == (3, 4)
    if party.store is not None:
        assert party.store.steps() == (3, 4)


def test_tags_in_a_store_take_no_memory() -> None:
    party = _party()
    party.store = MemoryStore()
    _train(party, 1)
    state = weakref.ref(party.client.state)
    _train(party, 2)
    gc.collect()
    assert state() is None
    party.rollback(1)
    state = weakref.ref(party.client.state)
    _train(party, 2)
    gc.collect()
    assert state() is None and party.tags() == (1, 2)
    party.rollback(1)
    assert party.client.state.steps == 1


@stores
def test_rollback_restores(make_store: Callable[[], Any]) -> None:
    party = _party()
    party.store = make_store()
    _train(party, 1, 2, 3)
    old = party.client
    party.invoke(_call("note", Number(1), turn=Turn(0, "train", 4)))
    party.rollback(2)
    assert party.client is not old and party.client.doubled == 10  # type: ignore[attr-defined]
    assert party.client.state.steps == 2 and party.client.state.weights.tolist() == [3.0, 3.0]
    assert party.tags() == (2,), "tags of what did not happen are gone"
    assert party.invoke(_call("recall", turn=Turn(0, "train", 4))) == Number(-1), (
        "scratch and remembered answers are gone"
    )
    _train(party, 3)
    assert party.tags() == (2, 3) and party.client.state.weights.tolist() == [6.0, 6.0]


@stores
def test_rollback_of_an_unknown_tag_is_a_data_error(make_store: Callable[[], Any]) -> None:
    party = _party()
    party.store = make_store()
    _train(party, 1, 2, 3)
    before = party.client.state
    for step in (1, 7):
        with pytest.raises(DataError):
            party.rollback(step)
    assert party.client.state is before and party.tags() == (2, 3)


def test_a_party_started_again_reads_its_store() -> None:
    party, store = _party(), MemoryStore()
    party.store = store
    _train(party, 1, 2)
    party.select()
    _train(party, 3)
    again = _party()
    again.store = store
    assert again.tags() == (2, 3)
    again.rollback(3)
    assert again.client.state.steps == 3 and torch.equal(again.client.state.weights, party.client.state.weights)
    again.restore_selected()
    assert again.client.state.steps == 2
    _train(again, 4)
    assert again.tags() == (3, 4)


@stores
def test_rollback_takes_the_selection_back_too(make_store: Callable[[], Any]) -> None:
    party = _party()
    party.store = make_store()
    _train(party, 1)
    party.select()
    _train(party, 2, 3)
    party.select()  # validation picked round 3, which then was lost
    party.rollback(2)
    party.restore_selected()
    assert party.client.state.steps == 1


def test_without_a_selection_restoring_it_changes_nothing() -> None:
    party = _party()
    _train(party, 1)
    party.restore_selected()
    assert party.client.state.steps == 1


def test_a_call_of_an_earlier_step_is_refused_even_in_the_same_incarnation() -> None:
    """A call delayed on the way must not run in a round that is over."""
    party = _party()
    party.invoke(_call("train", Number(1), turn=Turn(0, "train", 2, step=2)))
    failure = _failure(party.invoke(_call("train", Number(1), turn=Turn(0, "train", 1, step=1))))
    assert failure.kind == "protocol" and "step 1" in str(failure.cause)
    assert party.client.state.steps == 1
    assert isinstance(party.invoke(_call("train", Number(1), turn=Turn(0, "evaluation", 2, step=2))), Update)
