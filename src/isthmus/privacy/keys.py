"""Keys: long-term identities, session keys signed by them, and what two session keys agree on.

Each organisation holds a long-term Ed25519 key; the roster of their public halves is agreed outside the federation. For
a run it makes an X25519 session key and signs it together with run and name. Without the signature whoever relays the
keys could sit in the middle (``attacks.relay``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isthmus.errors import ProtocolError, unknown

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64


def frame(*parts: str | int | bytes) -> bytes:
    """Parts as bytes that no other parts have: typed and length-prefixed, so ``("ab", "c")`` and ``("a", "bc")``
    differ.
    """
    framed = bytearray()
    for part in parts:
        if isinstance(part, bytes):
            data = b"b" + part
        elif isinstance(part, str):
            data = b"s" + str.__str__(part).encode()
        else:
            data = b"i" + str(int(part)).encode()
        framed += len(data).to_bytes(8, "big") + data
    return bytes(framed)


@dataclass(frozen=True)
class SignedKey:
    """A party's session key for one run, as it is published."""

    party: str
    run: str
    key: bytes
    signature: bytes

    def signed(self) -> bytes:
        return frame("isthmus/session-key/1", self.run, self.party, self.key)


class Identity:
    """The long-term signing key of a party. ``seed`` restores one; without it a new one is made."""

    def __init__(self, seed: bytes | None = None) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed) if seed is not None else Ed25519PrivateKey.generate()

    @property
    def public(self) -> bytes:
        """What the others put on their roster."""
        return self._private.public_key().public_bytes_raw()

    @property
    def seed(self) -> bytes:
        """The secret half, for its owner's own disk and nobody else."""
        return self._private.private_bytes_raw()

    def sign(self, party: str, run: str, key: bytes) -> SignedKey:
        """Vouch for a session key."""
        unsigned = SignedKey(party, run, key, b"")
        return SignedKey(party, run, key, self.sign_bytes(unsigned.signed()))

    def sign_bytes(self, content: bytes) -> bytes:
        """Sign what :func:`frame` made, whose first part names its purpose."""
        return self._private.sign(content)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an identity holds a secret key and is never serialised")


def signed_by(public: bytes, content: bytes, signature: bytes) -> bool:
    """Whether the holder of a long-term key signed these bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Roster:
    """Long-term public keys of the parties of a run, agreed outside the federation."""

    run: str
    identities: Mapping[str, bytes]

    def verify(self, signed: SignedKey) -> bytes:
        """The session key, if the party it names signed it in this run."""
        if signed.party not in self.identities:
            raise unknown("party", signed.party, self.identities, error=ProtocolError)
        if signed.run != self.run:
            raise ProtocolError(
                f"the key of {signed.party} was signed for run {signed.run!r}, this is {self.run!r}: ask it for a new "
                "one"
            )
        if len(signed.key) != PUBLIC_BYTES or len(signed.signature) != SIGNATURE_BYTES:
            raise ProtocolError(f"the signed key of {signed.party} is cut short or too long")
        if not signed_by(self.identities[signed.party], signed.signed(), signed.signature):
            raise ProtocolError(
                f"{signed.party} did not sign this key: it was replaced, the roster holds an old identity, or "
                f"{signed.party} joined another run or contract"
            )
        return signed.key


class SessionKey:
    """A secret X25519 key, made for one run and gone with the process."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree(self, other: bytes, *purpose: str | int | bytes) -> bytes:
        """32 bytes that only the holders of the two keys know, for one purpose (HKDF-SHA256; both public keys are the
        salt).
        """
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise ProtocolError("a public key is not a usable X25519 key: ask its party for a new one") from None
        salt = hashlib.sha256(b"".join(sorted([self.public, other]))).digest()
        return HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=frame(*purpose)).derive(shared)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session key is secret and never serialised")
