"""Calls and outcomes as bytes: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.errors import ProtocolError
from isthmus.federation import codec, wire
from isthmus.federation.codec import Limits
from isthmus.federation.interface import Failure
from isthmus.federation.messages import Count, Message, Model, PartyId
from isthmus.federation.party import Invocation, Outcome, Parcel, Turn
from isthmus.federation.roles import Client, Role, RoleTable, handler
from isthmus.federation.secure import MailOrder, MailPlan, Masked, MaskOrder
from isthmus.privacy.masks import SumRoster, SumTag
from isthmus.records import Record


@dataclass(frozen=True)
class Ask(Message):
    weights: Model[Tensor]


@dataclass(frozen=True)
class Reply(Message):
    weights: Model[Tensor]
    share: Count[float]


class Party(Client[Any, Record]):
    @handler
    def train(self, request: Ask) -> Reply:
        return Reply(request.weights, 1.0)

    @handler
    def hush(self) -> None: ...

    @handler
    def post(self) -> Mapping[PartyId, Reply]:
        return {}

    @handler
    def read(self, mail: Mapping[PartyId, Reply]) -> None: ...

    def secret(self, request: Ask) -> Reply:
        return Reply(request.weights, 2.0)


TABLE = RoleTable({"client": Role(Party)})
TURN = Turn(2, "train", 7, 9)
ASK = Ask(torch.arange(6.0))


def call(party: str, handler: str = "train", **columns: Any) -> Invocation:
    return Invocation(party, "client", handler, TURN, 3, **columns)


def there(calls: list[Invocation], table: RoleTable = TABLE) -> list[Invocation]:
    return wire.decode_calls(wire.unpack(wire.pack(wire.encode_calls(calls))), table)


def back(outcomes: Mapping[PartyId, Outcome], calls: list[Invocation], **options: Any) -> dict[PartyId, Outcome]:
    return wire.decode_outcomes(wire.unpack(wire.pack(wire.encode_outcomes(outcomes, **options))), calls, TABLE)


def rewrite(frame: wire.Frame, kind: type[Any], **changes: Any) -> wire.Frame:
    """The same frame with another header."""
    return (wire._write_header(replace(wire._read_header(frame[0], kind, codec.LIMITS), **changes)), *frame[1:])


# -- round trips -----------------------------------------------------------------------------------


def test_a_broadcast_is_one_message() -> None:
    calls = [call(party, argument=ASK) for party in ("a", "b", "c")]
    frame = wire.encode_calls(calls)
    assert len(frame) == 2
    assert frame[1] == codec.encode(ASK), "messages travel exactly as the ledger counts them"
    read = there(calls)
    assert [(c.party, c.role, c.handler, c.turn, c.sequence) for c in read] == [
        (p, "client", "train", TURN, 3) for p in ("a", "b", "c")
    ]
    assert read[0].argument is read[1].argument
    assert isinstance(read[0].argument, Ask) and torch.equal(read[0].argument.weights, ASK.weights)


def test_several_frames_of_a_broadcast_are_encoded_once() -> None:
    writer = wire.Writer()
    first, second = (wire.encode_calls([call(party, argument=ASK)], writer) for party in ("a", "b"))
    assert first[1] is second[1]


def test_messages_of_their_own() -> None:
    calls = [call(party, argument=Ask(torch.full((2,), float(k)))) for k, party in enumerate("abc")]
    for sent, read in zip(calls, there(calls), strict=True):
        assert isinstance(sent.argument, Ask) and isinstance(read.argument, Ask)
        assert torch.equal(sent.argument.weights, read.argument.weights)


def test_calls_without_a_message() -> None:
    assert there([call("a", "hush"), call("b", "hush")]) == [call("a", "hush"), call("b", "hush")]


def test_mail() -> None:
    letter = Reply(torch.ones(2), 0.5)
    calls = [
        call("a", "read", parcels=(Parcel("b", "a", letter), Parcel("c", "a", letter))),
        call("b", "read", parcels=()),
    ]
    first, second = there(calls)
    assert second.parcels == ()
    assert first.parcels is not None and [(p.sender, p.receiver) for p in first.parcels] == [("b", "a"), ("c", "a")]
    assert isinstance(first.parcels[1].content, Reply) and first.parcels[1].content.share == 0.5


def test_orders_of_secure_sums() -> None:
    roster = SumRoster({"a": b"1" * 32, "b": b"2" * 32})
    order = MaskOrder(roster, SumTag("run", "train", 7, 3, "train", 2), (torch.tensor([1, 5]),))
    mail = MailOrder(3, {"b": MaskOrder(roster, SumTag("run", "train", 7, 3, receiver="b"))})
    read = there([call("a", argument=ASK, mask=order), call("b", argument=ASK, mask=order, mail=mail)])
    got = read[0].mask
    assert got is not None and got.roster == roster and got.tag == order.tag and got.supports is not None
    assert torch.equal(got.supports[0], torch.tensor([1, 5]))
    assert read[0].mail is None and read[1].mail == mail
    assert there([call("a", "post", mail=MailOrder(3))])[0].mail == MailOrder(3)


def test_an_order_to_one_party_has_the_keys_of_its_neighbours_only() -> None:
    names = [f"client-{number:02d}" for number in range(30)]
    roster = SumRoster({name: bytes([number]) * 32 for number, name in enumerate(names)}, 6)
    order = MaskOrder(roster, SumTag("run", "train", 7, 3, "train", 2)).seen_by(names[0])
    [read] = there([call(names[0], argument=ASK, mask=order)])
    assert read.mask is not None and read.mask.roster == order.roster
    assert read.mask.roster.neighbours(names[0]) == roster.neighbours(names[0])
    assert len(read.mask.roster) == 30 and len(read.mask.roster.keys) == 1 + len(roster.neighbours(names[0])) < 20
    assert read.mask.roster.fingerprint == roster.fingerprint
    outsider = MaskOrder(roster, SumTag("run", "train", 7, 3, receiver="somebody")).seen_by("somebody")
    assert outsider.roster.parties == roster.parties and not outsider.roster.keys


def test_outcomes() -> None:
    calls = [call(party, argument=ASK) for party in "abc"]
    shared = Reply(torch.ones(3), 0.25)
    sent: dict[PartyId, Outcome] = {
        "c": shared,
        "a": shared,
        "b": Failure("handler", "ValueError", ValueError("a patient's name")),
    }
    read = back(sent, calls)
    assert isinstance(read["a"], Reply) and torch.equal(read["a"].weights, torch.ones(3))
    assert read["b"] == Failure("handler", "ValueError")
    assert isinstance(read["b"], Failure) and read["b"].cause is None, "a text may hold data and stays at home"


def test_texts_of_errors_inside_one_trust_domain() -> None:
    failure = back({"a": Failure("handler", "ValueError", ValueError("why"))}, [call("a", argument=ASK)], explain=True)[
        "a"
    ]
    assert isinstance(failure, Failure) and str(failure.cause) == "why"


def test_outcomes_of_senders() -> None:
    calls = [call("a", "post"), call("b", "post")]
    read = back(
        {"a": (Parcel("a", "b", Reply(torch.ones(1), 1.0)), Parcel("a", "server", Reply(torch.ones(1), 2.0))), "b": ()},
        calls,
    )
    assert read["b"] == ()
    sent = read["a"]
    assert isinstance(sent, tuple) and [(p.sender, p.receiver) for p in sent] == [("a", "b"), ("a", "server")]


def test_no_reply() -> None:
    assert back({"a": None}, [call("a", "hush")]) == {"a": None}


def test_masked_replies_and_plans_only_where_they_were_asked_for() -> None:
    masked = Masked(torch.arange(3), "{}")
    order = MaskOrder(SumRoster({"a": b"1" * 32}), SumTag("run", "train", 7, 3))
    read = back({"a": masked}, [call("a", argument=ASK, mask=order)])["a"]
    assert isinstance(read, Masked) and read.layout == "{}"
    with pytest.raises(ProtocolError, match="did not answer with Reply"):
        back({"a": masked}, [call("a", argument=ASK)])
    with pytest.raises(ProtocolError, match="did not answer with Masked"):
        back({"a": Reply(torch.ones(1), 1.0)}, [call("a", argument=ASK, mask=order)])
    plan = MailPlan(("b",), {})
    assert back({"a": plan}, [call("a", "post", mail=MailOrder(3))])["a"] == plan


def test_wrong_contents_are_one_partys_failure() -> None:
    odd = Reply("not a tensor", 1.0)  # type: ignore[arg-type]
    read = back({"a": odd, "b": Reply(torch.ones(1), 1.0)}, [call("a", argument=ASK), call("b", argument=ASK)])
    assert read["a"] == Failure("protocol", "ProtocolError") and isinstance(read["b"], Reply)
    mailed = (Parcel("a", "b", Reply(torch.ones(1), 1.0)), Parcel("a", "c", odd))
    assert back({"a": mailed}, [call("a", "post")])["a"] == Failure("protocol", "ProtocolError")


# -- what must not get in --------------------------------------------------------------------------


@pytest.mark.parametrize("handler", ["secret", "setup", "__init__", "enter", "no such thing"])
def test_a_handler_that_is_not_on_the_list_is_refused(handler: str) -> None:
    with pytest.raises(ProtocolError, match="unknown handler"):
        there([call("a", handler, argument=ASK)])


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown handler"):
        there([Invocation("a", "device", "train", TURN, 3, argument=ASK)])


def test_a_message_of_another_type_is_refused() -> None:
    with pytest.raises(ProtocolError):
        there([call("a", argument=Reply(torch.ones(1), 1.0))])
    with pytest.raises(ProtocolError, match="takes no message"):
        there([call("a", "hush", argument=ASK)])


def test_truncated_and_random_bytes_are_refused() -> None:
    data = wire.pack(wire.encode_calls([call("a", argument=ASK)]))
    generator = torch.Generator().manual_seed(0)
    for end in range(0, len(data), 7):
        with pytest.raises(ProtocolError):
            wire.decode_calls(wire.unpack(data[:end]), TABLE)
    for _ in range(300):
        at = int(torch.randint(len(data), (1,), generator=generator))
        broken = data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
        with contextlib.suppress(ProtocolError):  # what still is a call is a call; nothing but this error may come out
            wire.decode_calls(wire.unpack(broken), TABLE)
    with pytest.raises(ProtocolError, match="left over"):
        wire.unpack(data + b"x")
    with pytest.raises(ProtocolError, match="no frame"):
        wire.unpack(b"\x80\x04pickle........................")


def test_oversized_frames_are_refused_before_they_are_read() -> None:
    frame = wire.encode_calls([call("a", argument=Ask(torch.zeros(1000)))])
    small = Limits(max_bytes=2000)
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        wire.unpack(wire.pack(frame), small)
    with pytest.raises(ProtocolError, match="more than 2000 bytes"):
        wire.decode_calls(frame, TABLE, small)
    with pytest.raises(ProtocolError, match="truncated"):
        wire.unpack(wire.MAGIC + (2**60).to_bytes(8, "little") + b"\0" * 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"argument": [2]},
        {"argument": [0]},
        {"argument": [-2]},
        {"argument": [1, 1]},
        {"argument": [1.0]},
        {"argument": [True]},
        {"argument": [-1]},
        {"argument": 1},
        {"mask": [1]},
        {"mail": [1]},
        {"mask": []},
        {"parties": []},
        {"parties": [1]},
        {"parties": ["a", "a"], "argument": [1, 1], "mask": [-1, -1], "mail": [-1, -1]},
        {"combine": "product"},
        {"handler": "hush"},
        {"round": 2**70},
        {"round": "7"},
        {"round": None},
        {"phase": 1},
        {"parcels": wire._Parcels(["b"], [""], [1], [1])},
        {"parcels": wire._Parcels(["b"], [""], [0], [0])},
        {"parcels": wire._Parcels(["b"], ["Sealed?"], [0], [1])},
        {"parcels": wire._Parcels(["b"], [""], [0], [])},
    ],
)
def test_headers_that_lie_are_refused(changes: dict[str, Any]) -> None:
    frame = wire.encode_calls([call("a", argument=ASK)])
    with pytest.raises(ProtocolError):
        wire.decode_calls(rewrite(frame, wire._Calls, **changes), TABLE)


def test_parts_nobody_refers_to_are_refused() -> None:
    with pytest.raises(ProtocolError, match="nobody refers"):
        wire.decode_calls((*wire.encode_calls([call("a", argument=ASK)]), b"stowaway"), TABLE)


@pytest.mark.parametrize(
    "changes",
    [
        {"parties": ["b"]},
        {"parties": []},
        {"stand_in": []},
        {"stand_in": ["MailPlan"]},
        {"stand_in": ["Reply"]},
        {"reply": [-1]},
        {"reply": [1.0]},
        {"failed": ["b"], "failures": ["crashed", "", ""]},
        {"failed": ["a"], "failures": ["bribed", "", ""]},
        {"failed": ["a"], "failures": ["crashed"]},
        {"failed": ["a"], "failures": ["crashed", "", ""]},
        {"senders": ["a"]},
        {"senders": ["b"]},
    ],
)
def test_outcomes_that_lie_are_refused(changes: dict[str, Any]) -> None:
    frame = wire.encode_outcomes({"a": Reply(torch.ones(1), 1.0)})
    assert wire.decode_outcomes(frame, [call("a", argument=ASK)], TABLE)
    with pytest.raises(ProtocolError):
        wire.decode_outcomes(rewrite(frame, wire._Outcomes, **changes), [call("a", argument=ASK)], TABLE)


def test_mail_of_a_handler_that_sends_none_is_refused() -> None:
    frame = wire.encode_outcomes({"a": (Parcel("a", "b", Reply(torch.ones(1), 1.0)),)})
    with pytest.raises(ProtocolError, match="sends no mail"):
        wire.decode_outcomes(frame, [call("a", argument=ASK)], TABLE)


def test_calls_of_two_handlers_make_no_frame() -> None:
    with pytest.raises(ValueError, match="one handler"):
        wire.encode_calls([call("a", "hush"), call("b", "post")])
