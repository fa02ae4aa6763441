"""Whoever relays unsigned session keys can hand out its own: sit in the middle of mail, or impersonate all the other
parties of a sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from isthmus.privacy.keys import SessionKey, SignedKey
from isthmus.privacy.masks import CHECK_WORDS, SumParty, SumRoster, SumServer, SumTag
from isthmus.privacy.prg import Words
from isthmus.privacy.sealed_message import Envelope, Mailbox


class Relay:
    """A hub between two parties. Against signed keys :meth:`replace` yields keys that nobody accepts.

    Args:
        first, second: The session keys the two parties published.
    """

    def __init__(self, run: str, first: SignedKey, second: SignedKey) -> None:
        self._key = SessionKey()
        self._boxes = {}
        for own, other in ((first, second), (second, first)):
            self._boxes[own.party] = Mailbox(own.party, run, key=self._key)  # poses as `own` towards `other`
            self._boxes[own.party].meet(other)

    def replace(self, published: SignedKey) -> SignedKey:
        """What is passed on instead of a published key: own key, the party's name, the only signature there is."""
        return SignedKey(published.party, published.run, self._key.public, published.signature)

    def read(self, envelope: Envelope) -> tuple[bytes, Envelope]:
        """The message inside, and an envelope for its receiver that looks like the sender's."""
        message = self._boxes[envelope.header.receiver].open(envelope)
        return message, self._boxes[envelope.header.sender].seal(envelope.header, message)


class Impersonator:
    """A server that impersonates everybody in a secure sum but its victim.

    Args:
        others: Names of the parties it impersonates.
    """

    def __init__(self, victim: SignedKey, others: Iterable[str]) -> None:
        self._victim = victim
        self._others = {name: SumParty(name) for name in others}
        self.roster = SumRoster(
            {victim.party: victim.key} | {name: other.public_key for name, other in self._others.items()}
        )

    def announcements(self) -> list[SignedKey]:
        """Keys for the victim, without the signatures it cannot make."""
        return [
            self._victim,
            *(SignedKey(name, self._victim.run, other.public_key, b"") for name, other in self._others.items()),
        ]

    def read(self, masked: Words, tag: SumTag) -> Words:
        """The victim's own numbers: the sum with impersonated parties that have nothing to add."""
        server = SumServer(self.roster, tag)
        server.add(self._victim.party, masked)
        for name, other in self._others.items():
            server.add(name, other.mask_words(np.zeros(masked.size - CHECK_WORDS, np.uint64), self.roster, tag))
        return server.total_words()
