"""Secure sums by pairwise masks: the server adds what it is sent and learns the total, nothing of the parts.

Every pair of parties agrees on a secret (X25519); for every sum it is expanded (HKDF, AES-CTR) into one mask per
number, which the one adds and the other subtracts modulo 2^64. Single uploads are uniform; in the sum of all, masks
cancel.

    per session   party.public_key (signed, see ``keys``) -> everybody;   roster = SumRoster({party: key, ...})
    per sum       words = party.mask(values, roster, tag) -> server;   SumServer(roster, tag).add(party, words), then
                                                                       .total(template)

A mask depends on the whole tag (run, phase, round, attempt, sequence, ...) and on the roster, and a party masks once
per tag: no mask is used twice.
Two more words travel with every vector: one that depends on tag and roster, and one that is linear in all the others.
In the total they tell whether all masks cancelled and nothing was lost, so a missing party or a different roster is
reported and never a wrong sum.

What it does not do: it takes part in no recovery of drop-outs (the sum is lost and repeated under a new tag, with the
same roster; see ``guard``), it does not stop a party from sending a false number, and parties that pool their own
values learn the sum of the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from isthmus.errors import ProtocolError
from isthmus.privacy.flatten import FRACTION_BITS, Leaf, LeafTemplate, check_fraction_bits, decode_leaves, encode_all
from isthmus.privacy.guard import RosterGuard
from isthmus.privacy.keys import PUBLIC_BYTES, Roster, SessionKey, SignedKey, frame
from isthmus.privacy.prg import Keystream, Words

CHECK_WORDS = 2
"""Words that travel beside the numbers."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SumTag:
    """Which sum this is. ``attempt`` grows when a round is replayed; ``handler`` makes the numbers; ``receiver`` adds
    up; ``request`` is a digest of what all were asked, so that masks cancel only between parties that were asked the
    same (empty where each is asked something of its own).
    """

    run: str
    phase: str
    round: int
    sequence: int
    handler: str = ""
    attempt: int = 0
    receiver: str = "server"
    request: str = ""

    def encoded(self) -> bytes:
        return frame("isthmus/sum/1", *astuple(self))

    @property
    def content(self) -> str:
        """What is summed, for the guard: the same in every attempt, and in every call of the handler within a round."""
        return f"{self.phase}/{self.round}/{self.handler}/{self.receiver}"

    @property
    def series(self) -> str | None:
        """What is summed over all rounds, where the receiver is the server, who sees them all; who else writes to
        another receiver depends on the data.
        """
        return series_of(self.content)


def series_of(content: str) -> str | None:
    """:attr:`SumTag.series` of a :attr:`SumTag.content`."""
    phase, _, handler, receiver = content.split("/", 3)
    return f"{phase}/{handler}" if receiver == "server" else None


@dataclass(frozen=True)
class SumRoster:
    """Who takes part in a sum, with their session keys.

    Every party builds its own with :meth:`of`: one whose keys came from the server unsigned lets the server impersonate
    all the other parties (``attacks.relay.Impersonator``).
    """

    keys: Mapping[str, bytes]

    @staticmethod
    def of(announcements: Iterable[SignedKey], identities: Roster) -> SumRoster:
        """The roster of parties whose session keys are signed by the long-term keys agreed outside."""
        announced = list(announcements)
        if len({signed.party for signed in announced}) != len(announced):
            raise ProtocolError("a party announced two session keys for one sum: start a new session")
        return SumRoster({signed.party: identities.verify(signed) for signed in announced})

    def __post_init__(self) -> None:
        for party, key in self.keys.items():
            if len(key) != PUBLIC_BYTES:
                raise ProtocolError(f"the session key of {party} must have {PUBLIC_BYTES} bytes, got {len(key)}")
        if len(set(self.keys.values())) != len(self.keys):
            raise ProtocolError("two parties of a sum have the same session key: each must make its own")

    @property
    def parties(self) -> tuple[str, ...]:
        return tuple(sorted(self.keys))

    def fingerprint(self) -> bytes:
        """The same for two rosters only if parties and keys are."""
        return hashlib.sha256(frame(*(part for party in self.parties for part in (party, self.keys[party])))).digest()

    def __len__(self) -> int:
        return len(self.keys)


class SumParty:
    """One party's side of secure sums in one session.

    Args:
        key: Session key, made here unless it is shared with a mailbox.
        guard: Admits rosters; a party keeps its own, because the server is whom it protects against.
    """

    def __init__(
        self,
        name: str,
        *,
        fraction_bits: int = FRACTION_BITS,
        key: SessionKey | None = None,
        guard: RosterGuard | None = None,
    ) -> None:
        check_fraction_bits(fraction_bits)
        self.name, self.fraction_bits = name, fraction_bits
        self.guard = guard or RosterGuard()
        self._key = key or SessionKey()
        self._pairs: dict[bytes, bytes] = {}
        self._used: set[bytes] = set()

    @property
    def public_key(self) -> bytes:
        """To be published once per session, signed."""
        return self._key.public

    def mask(
        self,
        values: Sequence[Leaf],
        roster: SumRoster,
        tag: SumTag,
        *,
        content: str | None = None,
        context: bytes = b"",
    ) -> Words:
        """Numbers of a message, hidden: a vector of as many words, and :data:`CHECK_WORDS` more.

        Args:
            content: What is summed, for the guard; default that of the tag.
            context: What the parties must have in common beside roster and tag for their masks to cancel.
        """
        words = encode_all(values, parties=max(1, len(roster)), fraction_bits=self.fraction_bits)
        return self.mask_words(words, roster, tag, content=content, context=context)

    def mask_words(
        self, words: Words, roster: SumRoster, tag: SumTag, *, content: str | None = None, context: bytes = b""
    ) -> Words:
        """The same for words the caller encoded."""
        if roster.keys.get(self.name) != self.public_key:
            raise ProtocolError(
                f"{self.name} is not on the roster of this sum with its present key: exchange keys again"
            )
        if tag.encoded() in self._used:
            raise ProtocolError(
                f"{self.name} has already masked for {tag}: masks are never used twice; ask under a new attempt"
            )
        self.guard.admit(
            tag.content if content is None else content, roster.parties, tag.series if content is None else None
        )
        self._used.add(tag.encoded())
        masked = np.concatenate([words, _check_words(words, roster, tag)])
        purpose = frame(tag.encoded(), roster.fingerprint(), context)
        for other, key in roster.keys.items():
            if other != self.name:
                Keystream(self._stream_key(key, purpose)).add_to(masked, subtract=other < self.name)
        return masked

    def _stream_key(self, other: bytes, purpose: bytes) -> bytes:
        if other not in self._pairs:
            self._pairs[other] = self._key.agree(other, "isthmus/sum/1")
        return HKDFExpand(algorithm=hashes.SHA256(), length=32, info=purpose).derive(self._pairs[other])


class SumServer:
    """Adds up one sum, vector by vector: only one total is ever held."""

    def __init__(self, roster: SumRoster, tag: SumTag) -> None:
        self.roster, self.tag = roster, tag
        self._total: Words | None = None
        self._heard: set[str] = set()

    @property
    def missing(self) -> tuple[str, ...]:
        """Parties that have not sent their vector."""
        return tuple(party for party in self.roster.parties if party not in self._heard)

    def add(self, party: str, masked: Words) -> None:
        """Take one party's vector."""
        if party not in self.roster.keys or party in self._heard:
            raise ProtocolError(
                f"{party} {'has already sent its part of' if party in self._heard else 'is not on the roster of'} this "
                "sum"
            )
        if masked.dtype != np.uint64 or masked.ndim != 1 or masked.size < CHECK_WORDS:
            raise ProtocolError(f"{party} sent {masked.dtype} of shape {masked.shape}, not a vector of 64-bit words")
        if self._total is None:
            self._total = masked.copy()
        elif masked.shape != self._total.shape:
            raise ProtocolError(
                f"{party} sent {masked.size} words, others {self._total.size}: messages of one sum have one shape"
            )
        else:
            self._total += masked
        self._heard.add(party)

    def total_words(self) -> Words:
        """The sum, modulo 2^64; refused while masks are left in it."""
        if self.missing or self._total is None:
            raise ProtocolError(
                f"the secure sum is unusable without {', '.join(self.missing) or 'any party'}: "
                "repeat the round under a new attempt when they are back"
            )
        words, checks = self._total[:-CHECK_WORDS], self._total[-CHECK_WORDS:]
        expected = _check_words(words, self.roster, self.tag)
        expected[0] = _times(expected[0], len(self.roster))
        if not np.array_equal(checks, expected):
            raise ProtocolError(
                "masks do not cancel in the secure sum: a party used another roster, key or tag, or a vector was "
                "changed; "
                "exchange keys again and repeat the round"
            )
        return words

    def total(self, template: LeafTemplate, *, fraction_bits: int = FRACTION_BITS) -> list[Leaf]:
        """The sum as tensors and numbers."""
        return decode_leaves(self.total_words(), template, parties=len(self.roster), fraction_bits=fraction_bits)


def _check_words(words: Words, roster: SumRoster, tag: SumTag) -> Words:
    """A word of tag, roster and length, and one that is linear in the numbers: sum_k (2k + 1) phi w_k. Odd factors miss
    no changed word.
    """
    digest = hashlib.sha256(frame("check", tag.encoded(), roster.fingerprint(), words.size)).digest()
    factors = np.arange(1, 2 * words.size, 2, dtype=np.uint64)
    factors *= _GOLDEN
    factors *= words
    return np.array([int.from_bytes(digest[:8], "big"), int(factors.sum(dtype=np.uint64))], dtype=np.uint64)


def _times(word: np.uint64, count: int) -> np.uint64:
    return np.uint64(int(word) * count % 2**64)
