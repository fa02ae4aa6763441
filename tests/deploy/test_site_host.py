"""Mail between organisations: the server forwards it and can neither read, change, replay nor redirect it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.deploy.handshake import PeerKeys, SessionKeys
from isthmus.deploy.roster import OrganisationKeys
from isthmus.deploy.site_host import SiteHost
from isthmus.errors import ConfigError, ProtocolError
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.engines.remote import RemoteEngine
from isthmus.federation.host import FrameKind
from isthmus.federation.interface import Failure, QuorumError
from isthmus.federation.messages import SERVER, Embedding, Message, PartyId
from isthmus.federation.party import Invocation, Parcel, Turn
from isthmus.federation.roles import Client, Role, RoleTable, handler
from isthmus.federation.secure import MaskOrder, Sealed
from isthmus.federation.session import Session
from isthmus.federation.wire import Frame, decode_calls, decode_outcomes, encode_calls
from isthmus.privacy.keys import Identity
from isthmus.privacy.mask_graph import choices_for
from isthmus.privacy.masks import SumParty, SumRoster, SumTag
from isthmus.privacy.sealed_message import Mailbox
from isthmus.records import Record
from isthmus.seeds import Stream

CLIENTS = ("client-0", "client-1", "client-2")


@dataclass(frozen=True)
class Nothing(Record):
    """A party without memory."""


@dataclass(frozen=True)
class Letter(Message):
    values: Embedding[Tensor]


class Writer(Client[None, Nothing]):
    """Writes to all parties, itself and the server included."""

    def initial_state(self) -> Nothing:
        return Nothing()

    @handler
    def write(self) -> Mapping[PartyId, Letter]:
        return {other: Letter(self.own(other)) for other in (*CLIENTS, SERVER)}

    @handler
    def write_below(self) -> Mapping[PartyId, Letter]:
        return {f"{self.party}/devices": Letter(self.own("below"))}

    @handler
    def read(self, mail: Mapping[PartyId, Letter]) -> Letter:
        return Letter(torch.stack([mail[sender].values for sender in sorted(mail)]).sum(0) if mail else torch.zeros(4))

    @handler
    def read_sum(self, total: Letter | None) -> Letter:
        return total or Letter(torch.zeros(4))

    def own(self, other: str) -> Tensor:
        return torch.tensor([float(len(other)), float(self.party[7]), 3.0, sum(map(ord, self.party + other)) / 7])


class Below(Client[None, Nothing]):
    def initial_state(self) -> Nothing:
        return Nothing()

    @handler
    def read_below(self, mail: Mapping[PartyId, Letter]) -> Letter:
        (letter,) = mail.values()
        return letter


TABLE = RoleTable({"client": Role(Writer), "device": Role(Below)})


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(dataset="csbm:nodes=40,classes=3,features=5,degree=4", clients=3, split="40/20/40", seed=3)


class SitePerClient(RemoteEngine):
    """A site for each client. ``tamper`` is a dishonest server between them."""

    def __init__(self, scenario: Scenario, signed: bool = True) -> None:
        super().__init__({f"site-{client}": [client] for client in CLIENTS}, TABLE)
        identities = {client: Identity() for client in CLIENTS}
        roster = OrganisationKeys(
            {client: one.public for client, one in identities.items()}, {client: f"site-{client}" for client in CLIENTS}
        )
        self.hosts = {
            f"site-{client}": SiteHost(
                {client: scenario.parts[client]},
                TABLE,
                None,
                Stream(0, ("party",)),
                run="r",
                identity=identities[client] if signed else None,
                organisations=roster,
                write_model=lambda name, weights: None,
            )
            for client in CLIENTS
        }
        self.keys: dict[PartyId, SessionKeys] = {}
        for host in self.hosts.values():
            self.keys |= host.session_keys()
        self.frames: list[Frame] = []
        self.tamper: Callable[[Calls], Calls] = lambda calls: calls

    def distribute_keys(self) -> None:
        for host in self.hosts.values():
            host.accept_keys(PeerKeys(self.keys))

    def carry(self, kind: FrameKind, frames: Mapping[str, Frame], timeout: float | None) -> dict[str, Frame | Failure]:
        answers: dict[str, Frame | Failure] = {}
        for site, frame in frames.items():
            if kind == "call":
                frame = encode_calls(self.tamper(decode_calls(frame, TABLE)))
            answer = self.hosts[site].handle(kind, frame)
            self.frames += [frame, answer]
            answers[site] = answer
        return answers

    def revive(self) -> None: ...
    def keep_tags(self, store: Any) -> None: ...
    def close(self) -> None: ...


Calls = list[Invocation]


def both(scenario: Scenario, secure: bool = False) -> tuple[Session, Session, SitePerClient]:
    engine = SitePerClient(scenario)
    engine.distribute_keys()
    local = LocalEngine(scenario.parts, TABLE, None, Stream(0, ("party",)))
    sessions = Session(local, TABLE, secure=secure), Session(engine, TABLE, secure=secure)
    for session in sessions:
        session.clock.begin("train", 1, 1)
    return *sessions, engine


def test_sealed_mail_is_delivered_and_the_server_cannot_read_it(scenario: Scenario) -> None:
    local, sealed, engine = both(scenario)
    expected, found = (session.exchange(Writer.write, Writer.read) for session in (local, sealed))
    for client in CLIENTS:
        assert torch.equal(expected[client].values, found[client].values)
    assert {party: letter.values.tolist() for party, letter in found.mail.items()} == {
        party: letter.values.tolist() for party, letter in expected.mail.items()
    }
    carried = b"".join(part for frame in engine.frames for part in frame)
    for client in CLIENTS:
        writer = Writer(client, None, None, Stream(0, ()))
        for other in CLIENTS:
            assert writer.own(other).numpy().tobytes() not in carried
        assert writer.own(SERVER).numpy().tobytes() in carried, "mail to the server itself is for the server"


def test_the_ledger_counts_sealed_mail_like_any_other(scenario: Scenario) -> None:
    local, sealed, _ = both(scenario)
    for session in (local, sealed):
        session.exchange(Writer.write, Writer.read)
    (plain, secret) = ([e for e in session.ledger.take() if e.message == "Letter"] for session in (local, sealed))
    assert [(e.sender, e.receiver, e.bytes, dict(e.by_kind), dict(e.kinds)) for e in plain] == [
        (e.sender, e.receiver, e.bytes, dict(e.by_kind), dict(e.kinds)) for e in secret
    ]
    protections = {role: protection for e in secret for role, protection in [(e.roles, e.protection)]}
    assert protections == {("client", "client"): "sealed", ("client", "server"): "clear"}


def test_sums_and_devices(scenario: Scenario) -> None:
    local, sealed, _ = both(scenario)
    expected, found = (session.exchange(Writer.write, Writer.read_sum, combine="sum") for session in (local, sealed))
    assert all(torch.equal(expected[client].values, found[client].values) for client in CLIENTS)
    expected, found = (session.exchange(Writer.write_below, [Below.read_below]) for session in (local, sealed))
    assert {party: letter.values.tolist() for party, letter in found.items()} == {
        party: letter.values.tolist() for party, letter in expected.items()
    }
    assert set(found) == {f"{client}/devices" for client in CLIENTS}


def test_masked_mail_is_sealed_too(scenario: Scenario) -> None:
    local, sealed, _ = both(scenario, secure=True)
    expected, found = (session.exchange(Writer.write, Writer.read_sum, combine="sum") for session in (local, sealed))
    for client in CLIENTS:
        torch.testing.assert_close(expected[client].values, found[client].values)


def _sealed(calls: Calls, change: Callable[[Parcel], Parcel]) -> Calls:
    return [
        replace(call, parcels=tuple(map(change, call.parcels))) if call.parcels is not None else call for call in calls
    ]


def _content(parcel: Parcel, **changes: Any) -> Parcel:
    assert isinstance(parcel.content, Sealed)
    return replace(parcel, content=replace(parcel.content, **changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda parcel: _content(parcel, body=parcel.content.body[:-1] + bytes([parcel.content.body[-1] ^ 1])),
        lambda parcel: _content(parcel, kinds={"model": 1}),
        lambda parcel: _content(parcel, sequence=7),
        lambda parcel: _content(parcel, handler="read"),
        lambda parcel: _content(parcel, message_type="Other"),
        lambda parcel: replace(parcel, sender=CLIENTS[(CLIENTS.index(parcel.sender) + 1) % 3]),
        lambda parcel: replace(parcel, content=Letter(torch.zeros(4))),
    ],
    ids=["body", "kinds", "sequence", "handler", "type", "sender", "not sealed"],
)
def test_changed_mail_is_refused(scenario: Scenario, change: Callable[[Parcel], Parcel]) -> None:
    _, sealed, engine = both(scenario)
    engine.tamper = lambda calls: _sealed(calls, change)
    with pytest.raises((QuorumError, ProtocolError)):
        sealed.exchange(Writer.write, Writer.read)


def test_mail_of_another_round_is_refused(scenario: Scenario) -> None:
    _, sealed, engine = both(scenario)
    kept: list[Parcel] = []

    def keep(parcel: Parcel) -> Parcel:
        kept.append(parcel)
        return parcel

    engine.tamper = lambda calls: _sealed(calls, keep)
    sealed.exchange(Writer.write, Writer.read)
    old = {(parcel.sender, parcel.receiver): parcel for parcel in kept}
    sealed.clock.begin("train", 2, 2)
    engine.tamper = lambda calls: _sealed(calls, lambda parcel: old[parcel.sender, parcel.receiver])
    with pytest.raises(QuorumError):
        sealed.exchange(Writer.write, Writer.read)


def test_a_call_that_arrives_twice_is_answered_from_memory(scenario: Scenario) -> None:
    """Mail can be opened once; a call whose answer was lost is sent again all the same."""
    _, sealed, engine = both(scenario)
    sealed.exchange(Writer.write, Writer.read)
    asked, answered = engine.frames[-2:]
    assert engine.hosts["site-client-2"].handle("call", asked) == answered
    engine.hosts["site-client-2"]._opened_mail.clear()
    again = engine.hosts["site-client-2"].handle("call", asked)
    with pytest.raises(ProtocolError):
        decode_outcomes(again, decode_calls(asked, TABLE), TABLE)


def test_a_server_that_impersonates_a_party_is_detected(scenario: Scenario) -> None:
    """It distributes session keys of its own in client-1's name, which it cannot sign."""
    engine = SitePerClient(scenario)
    mallory = SiteHost(
        {"client-1": scenario.parts["client-1"]},
        TABLE,
        None,
        Stream(0, ("party",)),
        run="r",
        identity=Identity(),
        organisations=None,
        write_model=lambda name, weights: None,
    )
    engine.keys |= mallory.session_keys()
    with pytest.raises(ProtocolError, match="did not sign this key"):
        engine.hosts["site-client-0"].accept_keys(PeerKeys(engine.keys))


def test_keys_of_another_run_or_of_unknown_parties_are_refused(scenario: Scenario) -> None:
    engine = SitePerClient(scenario)
    keys = engine.keys["client-1"]
    swapped = replace(keys, mail=keys.sums, mail_signature=keys.sums_signature)
    with pytest.raises(ProtocolError, match="did not sign"):
        engine.hosts["site-client-0"].accept_keys(PeerKeys({**engine.keys, "client-1": swapped}))
    with pytest.raises(ConfigError, match="roster has no organisation"):
        engine.hosts["site-client-0"].accept_keys(PeerKeys({**engine.keys, "client-9": keys}))


def test_masks_for_unknown_keys_are_refused(scenario: Scenario) -> None:
    """A roster of invented parties would cancel a client's mask and reveal its values."""
    _, sealed, engine = both(scenario, secure=True)

    def swap(calls: Calls) -> Calls:
        changed = []
        for call in calls:
            order = call.mail.orders if call.mail is not None else None
            if order:
                fake = {
                    party: replace(one, roster=replace(one.roster, keys={**one.roster.keys, "client-1": b"1" * 32}))
                    for party, one in order.items()
                }
                call = replace(call, mail=replace(call.mail, orders=fake))
            changed.append(call)
        return changed

    engine.tamper = swap
    with pytest.raises((QuorumError, ProtocolError)):
        sealed.exchange(Writer.write, Writer.read_sum, combine="sum")


def test_mail_needs_keys(scenario: Scenario) -> None:
    engine = SitePerClient(scenario)
    session = Session(engine, TABLE)
    session.clock.begin("train", 1, 1)
    with pytest.raises(QuorumError, match="protocol"):
        session.exchange(Writer.write, Writer.read)


def test_outcomes_report_their_size(scenario: Scenario) -> None:
    """A site that understates the size of its mail would falsify the ledger; the server checks."""
    engine = SitePerClient(scenario)
    engine.distribute_keys()
    call = Invocation("client-0", "client", "write", Turn(0, "train", 1, 1), 1)
    answer = engine.hosts["site-client-0"].handle("call", encode_calls([call]))
    outcome = decode_outcomes(answer, [call], TABLE)["client-0"]
    assert isinstance(outcome, tuple)
    from isthmus.federation.bookkeeping import measured

    sealed = next(parcel.content for parcel in outcome if parcel.receiver == "client-1")
    assert isinstance(sealed, Sealed)
    measured(sealed)
    with pytest.raises(ProtocolError, match="another size"):
        measured(replace(sealed, size=1))


def test_a_site_masks_with_all_its_neighbours_whatever_keys_it_is_given(scenario: Scenario) -> None:
    """Who chose a party, a server could keep from it, and leave it with its own choice alone: of 1,000 parties that all
    of one's choice work with the server has a probability of 2^-25, and that all its neighbours do one of 2^-40.
    """
    parts = {"client-0": scenario.parts["client-0"]}
    given: Any = {"run": "r", "identity": None, "organisations": None, "write_model": lambda name, weights: None}
    host = SiteHost(parts, TABLE, None, Stream(0, ("party",)), **given)
    others = {f"client-{k}": SumParty(f"client-{k}").public_key for k in range(1, 24)}
    mail = Mailbox("client-1", "r").announce().key
    host.accept_keys(PeerKeys({party: SessionKeys(mail, b"", key, b"") for party, key in others.items()}))
    whole = SumRoster({**others, "client-0": host.sum_keys("client")["client-0"]}, choices_for(24))
    own = whole.holders("client-0")
    assert own - {"client-0"} < set(whole.neighbours("client-0"))
    few = SumRoster({party: whole.keys[party] for party in own}, whole.chosen, whole.parties)
    assert set(few.neighbours("client-0")) == own - {"client-0"}, "without the host it would mask with these"
    call = Invocation(
        "client-0", "client", "write", Turn(0, "train", 1), 1, mask=MaskOrder(few, SumTag("r", "t", 1, 1))
    )
    [admitted] = host.admit([call])
    assert admitted.mask is not None
    assert admitted.mask.roster.neighbours("client-0") == whole.neighbours("client-0")
    assert admitted.mask.roster.fingerprint == whole.fingerprint
    twice = SumRoster({**whole.keys, "client-3": b"3" * 32}, whole.chosen)
    with pytest.raises(ProtocolError, match="the key of client-3 for this sum is not the one its organisation signed"):
        host.admit([replace(call, mask=MaskOrder(twice, SumTag("r", "t", 1, 1)))])
