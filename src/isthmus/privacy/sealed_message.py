"""Sealed mail between parties: whoever carries it sees sender, receiver, type and size, and can change nothing.

X25519 agreement, HKDF-SHA256 per direction, AES-256-GCM with a random 96-bit nonce; the header is authenticated with
the body. The carrier still learns who sends to whom, how much and when.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import astuple, dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from isthmus.errors import ProtocolError
from isthmus.privacy.keys import Identity, Roster, SessionKey, SignedKey, frame

_VERSION = b"\x01"
_NONCE = 12
_TAG = 16
OVERHEAD = len(_VERSION) + _NONCE + _TAG
"""Bytes that sealing adds to a message."""
_MOST_MESSAGES = 2**32
"""Random nonces of 96 bits must not be used more often under one key."""
_MOST_BYTES = 2**31 - 1


@dataclass(frozen=True)
class Header:
    """What a carrier may see. ``attempt`` tells a replayed round from the first one; ``size`` is that of the message
    before sealing.
    """

    run: str
    phase: str
    round: int
    attempt: int
    sequence: int
    sender: str
    receiver: str
    handler: str
    message_type: str
    size: int

    def encoded(self) -> bytes:
        return frame("isthmus/envelope/1", *astuple(self))


@dataclass(frozen=True)
class Envelope:
    """A clear, authenticated header and a sealed body."""

    header: Header
    body: bytes


class Mailbox:
    """One party's sealing and opening of mail in one run.

    Args:
        roster: Long-term keys of all parties; None takes session keys unsigned, which protects against a curious
            carrier but not against one that replaces keys.
    """

    def __init__(
        self,
        party: str,
        run: str,
        identity: Identity | None = None,
        roster: Roster | None = None,
        key: SessionKey | None = None,
    ) -> None:
        self.party, self.run = party, run
        self._identity, self._roster = identity, roster
        self._key = key or SessionKey()
        self._out: dict[str, bytes] = {}
        self._in: dict[str, bytes] = {}
        self._sent: dict[str, int] = {}
        self._seen: set[bytes] = set()

    def announce(self) -> SignedKey:
        """This party's session key for the others; unsigned (an empty signature) without an identity."""
        if self._identity is None:
            return SignedKey(self.party, self.run, self._key.public, b"")
        return self._identity.sign(self.party, self.run, self._key.public)

    def meet(self, other: SignedKey) -> None:
        """Accept another party's session key: verified against the roster, and not exchanged for another one within a
        session.
        """
        key = self._roster.verify(other) if self._roster is not None else other.key
        if other.party == self.party:
            raise ProtocolError(f"{self.party} was given its own name as a correspondent")
        into = self._key.agree(key, "isthmus/envelope/1", self.run, other.party, self.party)
        if self._in.setdefault(other.party, into) != into:
            raise ProtocolError(f"{other.party} came with a second session key: start a new session")
        self._out[other.party] = self._key.agree(key, "isthmus/envelope/1", self.run, self.party, other.party)

    def meet_self(self) -> None:
        """Let this party write to itself: somebody else may carry that mail too."""
        key = self._key.agree(self._key.public, "isthmus/envelope/1", self.run, self.party, self.party)
        self._in[self.party] = self._out[self.party] = key

    def seal(self, header: Header, message: bytes) -> Envelope:
        """Close a message under its header."""
        if header.sender != self.party or header.run != self.run:
            raise ProtocolError(
                f"{self.party} in run {self.run!r} cannot seal mail of {header.sender} in run {header.run!r}"
            )
        if header.size != len(message) or len(message) > _MOST_BYTES - OVERHEAD:
            raise ProtocolError(
                f"the header says {header.size} bytes, the message has {len(message)} (at most "
                f"{_MOST_BYTES - OVERHEAD})"
            )
        key = self._known(self._out, header.receiver)
        self._sent[header.receiver] = self._sent.get(header.receiver, 0) + 1
        if self._sent[header.receiver] > _MOST_MESSAGES:
            raise ProtocolError("too many messages under one session key: start a new session")
        nonce = secrets.token_bytes(_NONCE)
        return Envelope(header, _VERSION + nonce + AESGCM(key).encrypt(nonce, message, header.encoded()))

    def open(self, envelope: Envelope) -> bytes:
        """The message, once. Refused: tampered, cut, misaddressed, of another run, of a stranger, opened before."""
        header, body = envelope.header, envelope.body
        if header.receiver != self.party or header.run != self.run:
            raise ProtocolError(
                f"mail for {header.receiver} in run {header.run!r} reached {self.party} in run {self.run!r}"
            )
        key = self._known(self._in, header.sender)
        if len(body) != header.size + OVERHEAD or body[:1] != _VERSION:
            raise ProtocolError(f"mail from {header.sender} is cut short, too long or of another version")
        try:
            message = AESGCM(key).decrypt(body[1 : 1 + _NONCE], body[1 + _NONCE :], header.encoded())
        except InvalidTag:
            raise ProtocolError(
                f"mail from {header.sender} was changed on its way, or sealed with another key"
            ) from None
        digest = hashlib.sha256(header.encoded()).digest()[:16]
        if digest in self._seen:  # only after authentication: a forgery must not block the real message
            raise ProtocolError(
                f"mail from {header.sender} ({header.handler}, sequence {header.sequence}) arrived twice"
            )
        self._seen.add(digest)
        return message

    def _known(self, keys: dict[str, bytes], party: str) -> bytes:
        if party not in keys:
            raise ProtocolError(f"{self.party} has no session key of {party}: exchange keys first")
        return keys[party]
