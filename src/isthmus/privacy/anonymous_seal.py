"""Sealed boxes: mail to a public key from a sender who stays unknown, e.g. through somebody who must not read it.

Every box has an X25519 key of its own, so two boxes of one sender have nothing in common; the receiver's key is long
enough to open all of them and says nothing of who wrote. Agreed secret, both public keys and a context (which run,
which holder) are hashed (SHA-256) into a key that serves for this box alone; AES-256-GCM seals. `envelope` is for mail
whose sender is known.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from isthmus.errors import ProtocolError
from isthmus.privacy.keys import PUBLIC_BYTES, frame

Bytes = NDArray[np.uint8]
BOX_OVERHEAD = PUBLIC_BYTES + 16
"""Bytes that a box adds to what is in it."""
_NONCE = bytes(12)  # one key, one message


def seal_boxes(public: bytes, contents: Bytes, context: bytes) -> Bytes:
    """One box per row: (n, m) -> (n, m + BOX_OVERHEAD)."""
    receiver = _public(public)
    out = np.empty((contents.shape[0], contents.shape[1] + BOX_OVERHEAD), np.uint8)
    for row, content in zip(out, contents, strict=True):
        own = X25519PrivateKey.generate()
        ephemeral = own.public_key().public_bytes_raw()
        key = _key(own.exchange(receiver), ephemeral, public, context)
        row[:] = np.frombuffer(ephemeral + AESGCM(key).encrypt(_NONCE, content.tobytes(), context), np.uint8)
    return out


class BoxHolder:
    """Whoever boxes are for. Its secret key lives for one exchange of boxes; nothing is opened twice.

    Args:
        context: What the boxes are for; a box made for anything else does not open.
    """

    def __init__(self, context: bytes) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        self.context = context
        self._seen: set[bytes] = set()

    def open(self, boxes: Bytes) -> Bytes:
        """Contents of all boxes (n, m + BOX_OVERHEAD) -> (n, m); one that was changed, is for somebody else or came
        before is refused.
        """
        if boxes.dtype != np.uint8 or boxes.ndim != 2 or boxes.shape[1] <= BOX_OVERHEAD:
            raise ProtocolError(
                f"sealed boxes are rows of more than {BOX_OVERHEAD} bytes, got {boxes.dtype} {boxes.shape}"
            )
        out = np.empty((boxes.shape[0], boxes.shape[1] - BOX_OVERHEAD), np.uint8)
        for number, (row, box) in enumerate(zip(out, boxes, strict=True)):
            ephemeral, body = box[:PUBLIC_BYTES].tobytes(), box[PUBLIC_BYTES:].tobytes()
            if ephemeral in self._seen:
                raise ProtocolError(f"sealed box {number} arrived twice: a replay; repeat the exchange of keys")
            try:
                key = _key(self._private.exchange(_public(ephemeral)), ephemeral, self.public, self.context)
                row[:] = np.frombuffer(AESGCM(key).decrypt(_NONCE, body, self.context), np.uint8)
            except (InvalidTag, ValueError):
                raise ProtocolError(
                    f"sealed box {number} was changed on its way, or is for another holder: repeat the exchange"
                ) from None
            self._seen.add(ephemeral)
        return out


def fresh_keys(*shape: int) -> Bytes:
    """Keys of 32 bytes from the operating system: (*shape, 32)."""
    count = int(np.prod(shape))
    return np.frombuffer(secrets.token_bytes(32 * count), np.uint8).reshape(*shape, 32).copy()


def _public(key: bytes) -> X25519PublicKey:
    try:
        return X25519PublicKey.from_public_bytes(key)
    except ValueError:
        raise ProtocolError("a public key is not a usable X25519 key: ask its party for a new one") from None


def _key(shared: bytes, ephemeral: bytes, receiver: bytes, context: bytes) -> bytes:
    return hashlib.sha256(frame("isthmus/box/1", shared, ephemeral, receiver, context)).digest()
