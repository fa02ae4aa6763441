"""Secure sums by pairwise masks: the server adds what it is sent and learns the total, nothing of the parts.

Two neighbours (``mask_graph``: about 3 log2 K for each of K parties, below 20 parties everybody) agree on a secret
(X25519), once per session; for every sum it is expanded (HKDF, AES-CTR) into one mask per number, which the one adds
and the other subtracts modulo 2^64. Single uploads are uniform; in the sum of all, masks cancel.

    per session   party.public_key (signed, see ``keys``) -> everybody;   roster = SumRoster({party: key, ...})
    per sum       words = party.mask(values, roster, tag) -> server;   SumServer(roster, tag).add(party, words), then
                                                                       .total(template)

A mask depends on the whole tag (run, phase, round, attempt, sequence, ...) and on the roster, and a party masks once
per tag: no mask is used twice.
Two more words travel with every vector: one that depends on tag and roster, and one that is linear in all the others.
In the total they tell whether all masks cancelled and nothing was lost, so a missing party or a different roster is
reported and never a wrong sum.

A lost party loses the sum, which is repeated under a new tag with the same roster (see ``guard``), unless the parties
agreed to sums over those who are left: ``survivors``. Nothing here stops a party from sending a false number, and
parties that pool their own values learn the sum of the rest.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from isthmus.errors import ProtocolError
from isthmus.privacy.flatten import (
    FRACTION_BITS,
    Leaf,
    LeafTemplate,
    WordRows,
    check_fraction_bits,
    decode_leaves,
    encode_all,
)
from isthmus.privacy.guard import RosterGuard
from isthmus.privacy.kernels import odd_multiples
from isthmus.privacy.keys import PUBLIC_BYTES, Roster, SessionKey, SignedKey, frame
from isthmus.privacy.mask_graph import Sharing, choices, least_left, neighbours, sharing_for
from isthmus.privacy.prg import SHORT_KEY_BYTES, Words, add_streams

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

    @cached_property
    def encoded(self) -> bytes:
        return frame("isthmus/sum/1", *(getattr(self, each.name) for each in fields(self)))

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


@dataclass
class OpenSum:
    """What a party remembers of a sum that may lose parties, until its round is over.

    Args:
        self_mask: Key of the stream that only it adds, and that shares give back if its vector counts.
        context: What masks depend on beside tag and roster.
        own: Its own shares of its two secrets.
        present: Who shared secrets: with these it masks.
        survivors: The one group it confirmed.
    """

    roster: SumRoster
    context: bytes
    self_mask: bytes
    own: tuple[int, int]
    present: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()


@dataclass(frozen=True)
class SumRoster:
    """Who takes part in a sum, with session keys.

    Every party builds its own with :meth:`of`: one whose keys came from the server unsigned lets the server impersonate
    all the other parties (``attacks.relay.Impersonator``).

    Args:
        keys: Session keys by party.
        chosen: How many others each party chooses to mask with (`mask_graph.choices_for`); 0: everybody masks with
            everybody.
        names: All parties, where ``keys`` has only those that one party needs (:meth:`seen_by`).
        at_least: Parties without which the sum is lost (`survivors`); 0: everybody is needed.
    """

    keys: Mapping[str, bytes]
    chosen: int = 0
    names: tuple[str, ...] = ()
    at_least: int = 0

    @staticmethod
    def of(announcements: Iterable[SignedKey], identities: Roster, *, chosen: int = 0) -> SumRoster:
        """The roster of parties whose session keys are signed by the long-term keys agreed outside."""
        announced = list(announcements)
        if len({signed.party for signed in announced}) != len(announced):
            raise ProtocolError("a party announced two session keys for one sum: start a new session")
        return SumRoster({signed.party: identities.verify(signed) for signed in announced}, chosen)

    def __post_init__(self) -> None:
        for party, key in self.keys.items():
            if len(key) != PUBLIC_BYTES:
                raise ProtocolError(f"the session key of {party} must have {PUBLIC_BYTES} bytes, got {len(key)}")
        if len(set(self.keys.values())) != len(self.keys):
            raise ProtocolError("two parties of a sum have the same session key: each must make its own")
        if self.chosen < 0 or len(self.members) != len(self.parties) or not self.keys.keys() <= self.members:
            raise ProtocolError("the roster of a sum names a party twice, or has keys of others than its parties")
        if self.at_least and not least_left(len(self.parties)) <= self.at_least <= len(self.parties):
            raise ProtocolError(
                f"a sum of {len(self.parties)} parties cannot do with {self.at_least}: it needs at least "
                f"{least_left(len(self.parties))}, or those who work with the server could open more than the sum"
            )
        if self.at_least and self.chosen != self.sharing.holders:
            raise ProtocolError(
                f"parties of a sum that may lose some mask with those that hold their shares: each chooses "
                f"{self.sharing.holders or 'all'} of the others, not {self.chosen or 'all'}"
            )

    @cached_property
    def sharing(self) -> Sharing:
        """How secrets of a sum that may lose parties are shared."""
        return sharing_for(len(self.parties), self.at_least)

    @cached_property
    def parties(self) -> tuple[str, ...]:
        return tuple(sorted(self.names or self.keys))

    @cached_property
    def members(self) -> frozenset[str]:
        return frozenset(self.parties)

    def seen_by(self, party: str) -> SumRoster:
        """The same roster with no other keys than this party needs: its own and its neighbours'."""
        if not self.chosen:
            return self
        if party not in self._views:
            needed = {party, *self.neighbours(party)} if party in self.members else set[str]()
            keys = {name: self.keys[name] for name in self.parties if name in needed}
            self._views[party] = SumRoster(keys, self.chosen, self.parties, self.at_least)
        return self._views[party]

    @cached_property
    def points(self) -> dict[str, int]:
        """Where each party's shares are taken."""
        return {party: number for number, party in enumerate(self.parties, 1)}

    def holders(self, party: str) -> frozenset[str]:
        """Who holds shares of a party's secrets: itself, and those it chooses to mask with."""
        if party not in self._holders:
            chosen = choices(self.keys[party], party, self.parties, self.chosen) if self.chosen else self.members
            self._holders[party] = chosen | {party}
        return self._holders[party]

    def held_by(self, party: str) -> frozenset[str]:
        """Whose secrets a party holds shares of: its own, and those of its neighbours that chose it."""
        if party not in self._held:
            some = (name for name in self.neighbours(party) if party in self.holders(name))
            self._held[party] = frozenset({party, *some})
        return self._held[party]

    def neighbours(self, party: str) -> tuple[str, ...]:
        """Whom a party masks with, in order. Of a roster as the party sees it, the neighbours are checked: its own
        choice is all there, and everybody else chose it.
        """
        if len(self.keys) == len(self.parties):
            return self._graph[party] if self.chosen else tuple(name for name in self.parties if name != party)
        if party not in self._checked:
            self._checked[party] = self._check_neighbours(party)
        return self._checked[party]

    def _check_neighbours(self, party: str) -> tuple[str, ...]:
        others = self.keys.keys() - {party}
        if not self.chosen or party not in self.keys or not self.holders(party) <= self.keys.keys():
            raise ProtocolError(f"{party} has no keys of the parties it has to mask with: exchange keys again")
        for other in others - self.holders(party):
            if party not in self.holders(other):
                raise ProtocolError(f"{other} is no neighbour of {party} in this sum: repeat it with the right ones")
        return tuple(sorted(others))

    @cached_property
    def _graph(self) -> dict[str, tuple[str, ...]]:
        return neighbours(self.keys, self.chosen)

    @cached_property
    def _views(self) -> dict[str, SumRoster]:
        return {}

    @cached_property
    def _checked(self) -> dict[str, tuple[str, ...]]:
        return {}

    @cached_property
    def _holders(self) -> dict[str, frozenset[str]]:
        return {}

    @cached_property
    def _held(self) -> dict[str, frozenset[str]]:
        return {}

    @cached_property
    def fingerprint(self) -> bytes:
        """The same for two rosters only if parties, number of neighbours and of those that may be lost are. Keys need
        not be in it: masks of two parties who see other keys of each other do not cancel.
        """
        lossy = (self.at_least,) if self.at_least else ()
        return hashlib.sha256(frame("isthmus/sum-roster/2", self.chosen, *lossy, *self.parties)).digest()

    def __len__(self) -> int:
        return len(self.parties)


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
        self.shared: set[bytes] = set()
        """Tags that secrets were shared for, in all of this session: those of one tag open the same masks."""
        self.open: dict[bytes, OpenSum] = {}
        """Sums that may lose parties, by tag: what this party shared, masked and confirmed (`survivors`)."""

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
        rows: WordRows | None = None,
    ) -> Words:
        """Numbers of a message, hidden: a vector of as many words, and :data:`CHECK_WORDS` more.

        Args:
            content: What is summed, for the guard; default that of the tag.
            context: What the parties must have in common beside roster and tag for their masks to cancel.
            rows: Where the vector is made.
        """
        words = encode_all(
            values, parties=max(1, len(roster)), fraction_bits=self.fraction_bits, spare=CHECK_WORDS, rows=rows
        )
        return self._mask(words, roster, tag, content, context)

    def mask_words(
        self, words: Words, roster: SumRoster, tag: SumTag, *, content: str | None = None, context: bytes = b""
    ) -> Words:
        """The same for words the caller encoded."""
        return self._mask(np.concatenate([words, np.zeros(CHECK_WORDS, np.uint64)]), roster, tag, content, context)

    def _mask(self, masked: Words, roster: SumRoster, tag: SumTag, content: str | None, context: bytes) -> Words:
        """Words with room for the check words behind them, masked in place."""
        if roster.keys.get(self.name) != self.public_key:
            raise ProtocolError(
                f"{self.name} is not on the roster of this sum with its present key: exchange keys again"
            )
        if tag.encoded in self._used:
            raise ProtocolError(
                f"{self.name} has already masked for {tag}: masks are never used twice; ask under a new attempt"
            )
        neighbours, own = roster.neighbours(self.name), list[bytes]()
        if roster.at_least:  # the group is known, and admitted by the guard, when it is confirmed
            shared = self.open.get(tag.encoded)
            if shared is None or shared.context != context or len(shared.present) < roster.at_least:
                raise ProtocolError(f"{self.name} has shared no secrets for {tag}, or others: repeat the round")
            neighbours = tuple(name for name in neighbours if name in shared.present)
            own = [shared.self_mask]
        else:
            self.guard.admit(
                tag.content if content is None else content, roster.members, tag.series if content is None else None
            )
        self._used.add(tag.encoded)
        masked[-CHECK_WORDS:] = check_words(masked[:-CHECK_WORDS], roster, tag)
        keys = self.stream_keys(neighbours, roster, tag, context)
        add_streams(
            masked,
            [*own, *(key for other, key in keys.items() if other > self.name)],
            [key for other, key in keys.items() if other < self.name],
        )
        return masked

    def stream_keys(self, others: Iterable[str], roster: SumRoster, tag: SumTag, context: bytes) -> dict[str, bytes]:
        """Of the masks of one sum with each of these parties."""
        purpose = frame(tag.encoded, roster.fingerprint, context)
        # AES-128: X25519 has no more than 128 bits of security either, and streams are most of what a sum costs.
        return {other: self.pair_key(roster.keys[other], purpose)[:SHORT_KEY_BYTES] for other in others}

    def pair_key(self, other: bytes, purpose: bytes) -> bytes:
        """32 bytes for one purpose: HKDF-Expand of the secret two parties agreed on, which is kept for the session."""
        if other not in self._pairs:
            self._pairs[other] = self._key.agree(other, "isthmus/sum/1")
        return hmac.digest(self._pairs[other], purpose + b"\x01", "sha256")


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
        if party not in self.roster.members or party in self._heard:
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
        return self._checked(self._total, len(self.roster))

    def _checked(self, total: Words, parties: int) -> Words:
        """The numbers of a total of so many parties, if no mask is left in it."""
        words, checks = total[:-CHECK_WORDS], total[-CHECK_WORDS:]
        expected = check_words(words, self.roster, self.tag)
        expected[0] = _times(expected[0], parties)
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


def check_words(words: Words, roster: SumRoster, tag: SumTag) -> Words:
    """A word of tag, roster and length, and one that is linear in the numbers: sum_k (2k + 1) phi w_k. Odd factors miss
    no changed word.
    """
    digest = hashlib.sha256(frame("check", tag.encoded, roster.fingerprint, words.size)).digest()
    return np.array([int.from_bytes(digest[:8], "big"), int(odd_multiples(words, _GOLDEN))], dtype=np.uint64)


def _times(word: np.uint64, count: int) -> np.uint64:
    return np.uint64(int(word) * count % 2**64)
