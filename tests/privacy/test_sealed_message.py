"""Sealed mail: opened by its receiver, once, unchanged; everything else is a ProtocolError."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest

from isthmus.errors import ProtocolError
from isthmus.privacy.keys import Identity, Roster, SessionKey, SignedKey, frame
from isthmus.privacy.sealed_message import OVERHEAD, Envelope, Header, Mailbox

MESSAGE = b"neighbour list of w: 4, 8, 15, 16, 23, 42"
HEADER = Header("run", "hop", 2, 0, 1, "a", "b", "send_products", "Products", len(MESSAGE))


def _pair() -> tuple[Mailbox, Mailbox]:
    identities = {name: Identity() for name in "abc"}
    roster = Roster("run", {name: identity.public for name, identity in identities.items()})
    boxes = {name: Mailbox(name, "run", identities[name], roster) for name in "abc"}
    for one in boxes.values():
        for other in boxes.values():
            if one is not other:
                one.meet(other.announce())
    return boxes["a"], boxes["b"]


def test_mail_arrives_in_both_directions() -> None:
    a, b = _pair()
    sealed = a.seal(HEADER, MESSAGE)
    assert MESSAGE not in sealed.body and len(sealed.body) == len(MESSAGE) + OVERHEAD
    assert b.open(sealed) == MESSAGE
    back = replace(HEADER, sender="b", receiver="a")
    assert a.open(b.seal(back, MESSAGE)) == MESSAGE
    empty = replace(HEADER, sequence=2, size=0)
    assert b.open(a.seal(empty, b"")) == b""
    assert a.seal(HEADER, MESSAGE).body != sealed.body  # a new nonce


def test_directions_have_different_keys() -> None:
    a, b = _pair()
    assert a._out["b"] == b._in["a"] != a._in["b"] == b._out["a"]


@pytest.mark.parametrize("name", [field.name for field in fields(Header)])
def test_every_header_field_is_authenticated(name: str) -> None:
    a, b = _pair()
    value = getattr(HEADER, name)
    changed = replace(
        HEADER,
        **{name: value + 1 if isinstance(value, int) else {"sender": "c", "receiver": "c"}.get(name, value + "x")},
    )
    with pytest.raises(ProtocolError):
        b.open(Envelope(changed, a.seal(HEADER, MESSAGE).body))


def test_every_byte_is_authenticated() -> None:
    a, b = _pair()
    body = a.seal(HEADER, MESSAGE).body
    for at in range(len(body)):
        with pytest.raises(ProtocolError):
            b.open(Envelope(HEADER, body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]))
    assert b.open(Envelope(HEADER, body)) == MESSAGE  # forgeries did not use up the real one


def test_truncated_extended_replayed_misaddressed() -> None:
    a, b = _pair()
    sealed = a.seal(HEADER, MESSAGE)
    for body in (b"", sealed.body[:-1], sealed.body[: OVERHEAD - 1], sealed.body + b"\0"):
        with pytest.raises(ProtocolError, match="cut short"):
            b.open(Envelope(HEADER, body))
    b.open(sealed)
    with pytest.raises(ProtocolError, match="twice"):
        b.open(sealed)
    with pytest.raises(ProtocolError, match="twice"):
        b.open(a.seal(HEADER, MESSAGE))  # sealed again under the same header
    assert b.open(a.seal(replace(HEADER, attempt=1), MESSAGE)) == MESSAGE  # a replayed round is another attempt
    with pytest.raises(ProtocolError, match="reached"):
        a.open(sealed)
    with pytest.raises(ProtocolError, match="reached"):
        b.open(Envelope(replace(HEADER, run="other"), sealed.body))


def test_a_sender_cannot_seal_what_it_may_not() -> None:
    a, _ = _pair()
    for header, message in (
        (replace(HEADER, sender="b"), MESSAGE),
        (replace(HEADER, run="x"), MESSAGE),
        (HEADER, b"short"),
        (replace(HEADER, receiver="z"), MESSAGE),
    ):
        with pytest.raises(ProtocolError):
            a.seal(header, message)


def test_wrong_key() -> None:
    a, b = _pair()
    stranger, _ = _pair()
    with pytest.raises(ProtocolError, match="another key"):
        b.open(stranger.seal(HEADER, MESSAGE))
    with pytest.raises(ProtocolError, match="second session key"):
        box = Mailbox("b", "run")  # unsigned boxes hold to the first key they are given
        box.meet(SignedKey("a", "run", SessionKey().public, b""))
        box.meet(SignedKey("a", "run", SessionKey().public, b""))
    with pytest.raises(ProtocolError, match="exchange keys"):
        Mailbox("b", "run").open(a.seal(HEADER, MESSAGE))
    with pytest.raises(ProtocolError, match="X25519"):
        Mailbox("b", "run").meet(SignedKey("a", "run", bytes(32), b""))
    with pytest.raises(ProtocolError, match="own name"):
        Mailbox("b", "run").meet(SignedKey("b", "run", SessionKey().public, b""))


def test_signed_keys() -> None:
    identity, other = Identity(), Identity()
    roster = Roster("run", {"a": identity.public, "b": other.public})
    signed = identity.sign("a", "run", SessionKey().public)
    assert roster.verify(signed) == signed.key
    wrong = (
        replace(signed, key=SessionKey().public),  # replaced on the way
        replace(signed, party="b"),  # presented as another's
        replace(signed, run="other"),  # of another run
        other.sign("a", "run", signed.key),  # signed by somebody else
        other.sign("c", "run", signed.key),  # not on the roster
        replace(signed, signature=b""),  # not signed
        replace(signed, signature=signed.signature[:-1]),
        replace(signed, signature=bytes(64)),
        replace(signed, key=signed.key[:-1]),
        identity.sign("a", "old-run", signed.key),
    )
    for bad in wrong:
        with pytest.raises(ProtocolError):
            roster.verify(bad)
    with pytest.raises(ProtocolError):
        Roster("run", {"a": b"not a key"}).verify(signed)


def test_identity_can_be_restored_and_secrets_stay() -> None:
    seed = bytes(range(32))
    assert Identity(seed).public == Identity(seed).public != Identity().public
    for secret in (Identity(), SessionKey()):
        with pytest.raises(TypeError, match="never serialised"):
            pickle.dumps(secret)


def test_frames_are_injective() -> None:
    parts = [("ab", "c"), ("a", "bc"), ("abc",), (b"ab", "c"), ("1",), (1,), (-1,), ("",), (), ("", "")]
    assert len({frame(*part) for part in parts}) == len(parts)
