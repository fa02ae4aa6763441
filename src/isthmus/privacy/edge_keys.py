"""Keys that a source shares with a holder, one per message, made known through somebody who must not learn them.

A source draws one X25519 key for a *group* of messages and agrees with each holder's key on a group key; the key of
every message is a block of ChaCha20 under it. What the carrier (the target of the messages) passes on is public: the
group's public key, a proof that holder and source agreed on the same, and for each message its group and number.

Who could link what:

    carrier   knows the senders anyway, and learns no key
    holder    sees which messages are of one group, i.e. of one sender, whose name is nowhere; that two groups have the
              same sender it cannot tell, and no receiver has two messages in one group as long as there are groups
              enough. A group has about `GROUP` messages, drawn at random
    others    nothing

A key per message (`GROUP` = 1) would link nothing and costs an agreement each: about 0.1 ms of processor time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from numpy.typing import NDArray

from isthmus.errors import ProtocolError
from isthmus.privacy.chacha import KEY_BYTES, blocks
from isthmus.privacy.keys import PUBLIC_BYTES, frame
from isthmus.privacy.prg import Keystream

Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]
GROUP = 16
"""Messages of one agreement, on average."""
PROOF_BYTES = 16
_KEYS, _PROOF = (0, 0, 0), (1, 0, 0)
"""Nonces: of the keys of messages (by number), and of the proof."""
_MOST = 2**15
_REDRAWS = 16


@dataclass(frozen=True)
class KeyGroups:
    """What is passed on about the keys of n messages, nothing of it secret.

    Args:
        group, number: (n,), which group a message belongs to and its number in it.
        public: (G, 32), the source's public key of each group.
        proof: (G, T, 16), for each holder.
    """

    group: Rows
    number: Rows
    public: Bytes
    proof: Bytes


def make_keys(holders: Sequence[tuple[bytes, bytes]], target: Rows) -> tuple[Bytes, KeyGroups]:
    """At the source: keys of messages to ``target`` (n,) with every holder, (n, T, 32), and what to pass on.

    Args:
        holders: Public key and context (which run, which holder) of each.
    """
    group, number = deal_groups(target)
    count = int(group.max(initial=-1)) + 1
    public, shared = np.empty((count, PUBLIC_BYTES), np.uint8), np.empty((len(holders), count, KEY_BYTES), np.uint8)
    receivers = [_public(key) for key, _ in holders]
    for row in range(count):
        own = X25519PrivateKey.generate()
        mine = own.public_key().public_bytes_raw()
        public[row] = np.frombuffer(mine, np.uint8)
        for j, ((key, context), receiver) in enumerate(zip(holders, receivers, strict=True)):
            shared[j, row] = np.frombuffer(_agreed(own, receiver, mine, key, context), np.uint8)
    keys = np.empty((target.size, len(holders), KEY_BYTES), np.uint8)
    for j, agreed in enumerate(shared):
        keys[:, j] = _expand(agreed, group, number)
    proof = np.stack([_proof(agreed) for agreed in shared], axis=1)
    return keys, KeyGroups(group, number, public, proof)


def deal_groups(target: Rows, stream: Keystream | None = None) -> tuple[Rows, Rows]:
    """Groups at random, and numbers in them; messages to one target fall into different groups where that can be."""
    stream, count = stream or Keystream.fresh(), -(-target.size // GROUP)
    if not count:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    group = stream.below(count, target.size).astype(np.int64)
    for _ in range(_REDRAWS):
        again = _repeated(target * count + group)
        if not again.size:
            break
        group[again] = stream.below(count, again.size).astype(np.int64)
    kept, group = np.unique(group, return_inverse=True)  # a group nobody was drawn for does not exist
    order = np.lexsort((stream.words(target.size), group))
    sizes = np.bincount(group, minlength=kept.size)
    if int(sizes.max()) >= _MOST:
        raise ProtocolError(f"a group of {int(sizes.max())} keys is too large: repeat the exchange of keys")
    number = np.empty(target.size, np.int64)
    number[order] = np.arange(target.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return group.astype(np.int64), number


def joined_groups(parts: Sequence[KeyGroups], stream: Keystream | None = None) -> KeyGroups:
    """Keys of several sources, one after the other; groups in random order, so that it does not tell whose they are."""
    stream, count = stream or Keystream.fresh(), sum(part.public.shape[0] for part in parts)
    order = np.argsort(stream.words(count))
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    begins = np.cumsum([0, *(part.public.shape[0] for part in parts)])
    group = np.concatenate([part.group + begin for part, begin in zip(parts, begins, strict=False)])
    public, proof = (np.concatenate([getattr(part, name) for part in parts])[order] for name in ("public", "proof"))
    return KeyGroups(place[group], np.concatenate([part.number for part in parts]), public, proof)


class KeyHolder:
    """Whoever shares keys with sources it does not know. Its secret key lives for one exchange of keys.

    Args:
        context: What the keys are for; a group made for anything else is refused.
    """

    def __init__(self, context: bytes) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        self.context = context
        self._seen: set[bytes] = set()

    def keys(self, group: Rows, number: Rows, public: Bytes, proof: Bytes) -> Bytes:
        """Keys of n messages, (n, 32), from what was passed on; ``proof`` (G, 16). Refused: groups that were changed,
        are for somebody else or came before, and a message that is named twice.
        """
        count = public.shape[0]
        if public.shape != (count, PUBLIC_BYTES) or proof.shape != (count, PROOF_BYTES) or group.shape != number.shape:
            raise ProtocolError(
                f"groups of keys have {PUBLIC_BYTES} bytes and a proof of {PROOF_BYTES} each, got {public.shape} and "
                f"{proof.shape}: repeat the exchange of keys"
            )
        if group.size and not (group.min() >= 0 and group.max() < count and number.min() >= 0 and number.max() < _MOST):
            raise ProtocolError("a message names a group of keys that was not passed on: repeat the exchange of keys")
        if _repeated(group * _MOST + number).size:
            raise ProtocolError("a key was passed on twice: a replay; repeat the exchange of keys")
        agreed = np.empty((count, KEY_BYTES), np.uint8)
        for row, (key, shown) in enumerate(zip(agreed, public, strict=True)):
            mine = shown.tobytes()
            if mine in self._seen:
                raise ProtocolError(f"group {row} of keys arrived twice: a replay; repeat the exchange of keys")
            self._seen.add(mine)
            key[:] = np.frombuffer(_agreed(self._private, _public(mine), mine, self.public, self.context), np.uint8)
        if not hmac.compare_digest(_proof(agreed).tobytes(), np.ascontiguousarray(proof).tobytes()):
            raise ProtocolError(
                "groups of keys were changed on their way, or are for another holder: repeat the exchange of keys"
            )
        return _expand(agreed, group, number)


def fresh_keys(*shape: int) -> Bytes:
    """Keys of 32 bytes from the operating system: (*shape, 32)."""
    count = int(np.prod(shape))
    return np.frombuffer(secrets.token_bytes(32 * count), np.uint8).reshape(*shape, 32).copy()


def _repeated(values: Rows) -> Rows:
    """Places of values that were there before."""
    order = np.argsort(values, kind="stable")
    found: Rows = order[1:][values[order[1:]] == values[order[:-1]]]
    return found


def _expand(agreed: Bytes, group: Rows, number: Rows) -> Bytes:
    """Block ``number`` of the stream of each message's group, the first 32 bytes."""
    out = np.empty((group.size, KEY_BYTES), np.uint8)
    for each in range(int(number.max(initial=-1)) + 1):
        rows = np.flatnonzero(number == each)
        out[rows] = _block(agreed[group[rows]], _KEYS, each)[:, :KEY_BYTES]
    return out


def _proof(agreed: Bytes) -> Bytes:
    return np.ascontiguousarray(_block(agreed, _PROOF, 0)[:, :PROOF_BYTES])


def _block(keys: Bytes, nonce: tuple[int, int, int], counter: int) -> Bytes:
    return blocks(keys, nonce, counter).astype("<u4").view(np.uint8).reshape(keys.shape[0], 64)


def _public(key: bytes) -> X25519PublicKey:
    try:
        return X25519PublicKey.from_public_bytes(key)
    except ValueError:
        raise ProtocolError("a public key is not a usable X25519 key: ask its party for a new one") from None


def _agreed(own: X25519PrivateKey, other: X25519PublicKey, source: bytes, holder: bytes, context: bytes) -> bytes:
    try:
        shared = own.exchange(other)
    except ValueError:  # a point of small order
        raise ProtocolError("a public key is not a usable X25519 key: ask its party for a new one") from None
    return hashlib.sha256(frame("isthmus/edge-keys/1", shared, source, holder, context)).digest()
