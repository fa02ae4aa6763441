"""Sums over those who are left: parties may be lost in any step of a secure sum, up to a threshold.

After Bonawitz et al. (Practical Secure Aggregation for Privacy-Preserving Machine Learning, ACM CCS 2017,
https://eprint.iacr.org/2017/281), with masks of `masks` and shares for few holders as in SecAgg+ (`mask_graph`). For
each sum, and for nothing else, a party u makes two secrets: b_u, of a mask that only u adds, and d_u, which opens a
list of the keys of u's masks with its neighbours *in this sum*. No key of the session is ever given away.

    1. share     u -> server   shares of b_u and d_u, one box per holder that only the holder can open; the list, sealed
                               under d_u. Who did this is *present*.
    2. mask      u -> server   its numbers + PRG(b_u) + masks with the present neighbours. Who did this is a *survivor*.
    3. confirm   u -> server   for each of its holders: a code for (present, survivors). u confirms one pair only.
    4. release   u -> server   if enough holders confirmed the same pair to u: for every present v, its share of b_v if
                               v is a survivor, else of d_v; never of both.

The server takes PRG(b_v) of survivors away, and the masks that survivors have with the others. Parties may be lost
before, in and after every step: a vector counts once its sender is a survivor, even if that is lost right after.

Why nobody's own numbers can be computed (`mask_graph.sharing_for` has the numbers): two pairs cannot both be confirmed
to honest parties, as each confirms one; so for every v either b_v or d_v can be put together, never both. A vector
whose b_v is unknown is uniform. One whose b_v is known is masked with an honest holder that took part in opening it,
whose d is unknown: what the server reads is a total of both, and so on to all that such masks connect. With all parties
as holders that is the total over the survivors; with chosen holders it is a quarter of the honest ones at least
(`mask_graph.log2_closed`), whatever the server tells whom. The guard admits the group before it is confirmed: the same
numbers, asked for again, are summed over that group or not at all.

What remains: the server says who is lost. In different rounds groups may differ by one party (see ``guard``), and
from means over many rounds that party's own mean can be estimated; how often groups change is for a site to bound.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from isthmus.errors import ProtocolError, RunError
from isthmus.privacy.keys import frame
from isthmus.privacy.masks import OpenSum, SumParty, SumRoster, SumServer, SumTag
from isthmus.privacy.prg import SHORT_KEY_BYTES, Words, add_streams
from isthmus.privacy.shamir import PRIME, SECRET_BYTES, fresh_secret, recover, share

CODE_BYTES = 16
_TRIES = 2000
"""Sets of shares that are left out before a secret is given up: all pairs of 60."""
_NONCE = bytes(12)
"""Every key seals one message."""


@dataclass(frozen=True)
class SharedSecrets:
    """What a party sends before it masks.

    Args:
        boxes: Shares of its two secrets by holder, each readable by that holder only.
        sealed: Keys of its masks, readable with its second secret.
        digests: Of the two secrets: a false share is found out.
    """

    boxes: Mapping[str, bytes]
    sealed: bytes
    digests: bytes


# -- a party's side --------------------------------------------------------------------------------


def share_secrets(party: SumParty, roster: SumRoster, tag: SumTag, context: bytes = b"") -> SharedSecrets:
    """Step 1. Once per tag."""
    if not roster.at_least or roster.keys.get(party.name) != party.public_key:
        raise ProtocolError(f"{party.name} is not on the roster of this sum with its present key: exchange keys again")
    if tag.encoded in party.shared:
        raise ProtocolError(
            f"{party.name} has already shared secrets for {tag}: they are never used twice; ask under a new attempt"
        )
    neighbours, holders = roster.neighbours(party.name), sorted(roster.holders(party.name))
    party.shared.add(tag.encoded)
    points, threshold = [roster.points[holder] for holder in holders], roster.sharing.threshold
    own_mask, opening = fresh_secret(), fresh_secret()
    shares = dict(
        zip(
            holders,
            zip(share(own_mask, points, threshold), share(opening, points, threshold), strict=True),
            strict=True,
        )
    )
    boxes = {
        holder: AESGCM(_box_key(party, roster, tag, party.name, holder)).encrypt(_NONCE, _packed(pair), None)
        for holder, pair in shares.items()
        if holder != party.name
    }
    keys = party.stream_keys(neighbours, roster, tag, context)
    sealed = AESGCM(_opening_key(opening, tag)).encrypt(_NONCE, b"".join(keys[other] for other in neighbours), None)
    digests = _digest(own_mask, tag) + _digest(opening, tag)
    party.open[tag.encoded] = OpenSum(roster, context, _mask_key(own_mask, tag), shares[party.name])
    return SharedSecrets(boxes, sealed, digests)


def meet(party: SumParty, tag: SumTag, present: Collection[str]) -> None:
    """Before step 2: with whom to mask. Once per tag, and never with fewer than the sum needs."""
    known, group = _known(party, tag), tuple(sorted(set(present)))
    if known.present and known.present != group:
        raise ProtocolError(f"{party.name} masks for {tag} with others already")
    if not set(group) <= known.roster.members or party.name not in group or len(group) < known.roster.at_least:
        raise ProtocolError(
            f"{party.name}: {len(group)} parties are too few for this sum, not on its roster, or without this party; "
            f"at least {known.roster.at_least} must take part"
        )
    holders, threshold = known.roster.holders(party.name) & set(group), known.roster.sharing.threshold
    if len(holders) < threshold:  # or those it masks with could be those that the server declares lost, and no others
        raise ProtocolError(
            f"{party.name}: {len(holders)} of those that hold its shares are present, {threshold} must be: repeat the "
            "round when more of them are back"
        )
    known.present = group


def confirm(party: SumParty, tag: SumTag, survivors: Collection[str]) -> dict[str, bytes]:
    """Step 3: codes by holder, who can check them. One group per tag."""
    known, group = _known(party, tag), tuple(sorted(set(survivors)))
    if known.survivors and known.survivors != group:
        raise ProtocolError(f"{party.name} has confirmed another group for {tag}: it confirms one only")
    if party.name not in group or not set(group) <= set(known.present) or len(group) < known.roster.at_least:
        raise ProtocolError(
            f"{party.name}: a sum over {len(group)} parties is refused: at least {known.roster.at_least} of those that "
            "masked must be left, and this party among them"
        )
    party.guard.admit(tag.content, group, tag.series, changing=True)
    known.survivors = group
    told = known.roster.held_by(party.name) - {party.name}
    return {other: _code(party, known, tag, party.name, other) for other in sorted(told & set(group))}


def release(
    party: SumParty, tag: SumTag, codes: Mapping[str, bytes], boxes: Mapping[str, bytes]
) -> dict[str, tuple[int, int]]:
    """Step 4: by party, which of its secrets (0: of its own mask, 1: of the list) and this party's share of it.

    Args:
        codes: What the others confirmed to this party.
        boxes: Shares of the others that this party holds.
    """
    known = _known(party, tag)
    roster, threshold = known.roster, known.roster.sharing.threshold
    if not known.survivors:
        raise ProtocolError(f"{party.name} has confirmed no group for {tag}")
    holders = roster.holders(party.name) & set(known.survivors)
    right = {party.name}
    for other, code in codes.items():
        if other in holders and other != party.name:
            if not hmac.compare_digest(code, _code(party, known, tag, other, party.name)):
                raise ProtocolError(f"{other} confirmed another group to {party.name}, or its code was changed")
            right.add(other)
    if len(right) < threshold:
        raise ProtocolError(
            f"{party.name}: {len(right)} parties confirmed the group of {tag}, {threshold} must: repeat the round"
        )
    found: dict[str, tuple[int, int]] = {}
    for owner in sorted(roster.held_by(party.name) & set(known.present)):
        which = 0 if owner in known.survivors else 1
        if owner == party.name:
            found[owner] = which, known.own[which]
        elif owner in boxes:
            key = _box_key(party, roster, tag, owner, party.name)
            try:
                pair = _unpacked(AESGCM(key).decrypt(_NONCE, boxes[owner], None))
            except (InvalidTag, ValueError):
                raise ProtocolError(
                    f"the box of {owner} for {party.name} is not of this run and sum, or was changed: repeat the round"
                ) from None
            found[owner] = which, pair[which]
    return found


def _known(party: SumParty, tag: SumTag) -> OpenSum:
    if tag.encoded not in party.open:
        raise ProtocolError(f"{party.name} has shared no secrets for {tag}: repeat the round")
    return party.open[tag.encoded]


def _place(roster: SumRoster, tag: SumTag, what: str, sender: str, receiver: str) -> bytes:
    return frame(what, sender, receiver, tag.encoded, roster.fingerprint)


def _box_key(party: SumParty, roster: SumRoster, tag: SumTag, owner: str, holder: str) -> bytes:
    other = holder if owner == party.name else owner
    return party.pair_key(roster.keys[other], _place(roster, tag, "isthmus/share-box/1", owner, holder))


def _code(party: SumParty, known: OpenSum, tag: SumTag, sender: str, receiver: str) -> bytes:
    """Of the group, and of all that masks depend on, from one party to another."""
    other = receiver if sender == party.name else sender
    place = _place(known.roster, tag, "isthmus/survivors/1", sender, receiver)
    group = hashlib.sha256(frame(known.context, len(known.present), *known.present, *known.survivors)).digest()
    return party.pair_key(known.roster.keys[other], frame(place, group))[:CODE_BYTES]


def _packed(pair: tuple[int, int]) -> bytes:
    return b"".join(number.to_bytes(SECRET_BYTES, "big") for number in pair)


def _unpacked(data: bytes) -> tuple[int, int]:
    if len(data) != 2 * SECRET_BYTES:
        raise ValueError
    return int.from_bytes(data[:SECRET_BYTES], "big"), int.from_bytes(data[SECRET_BYTES:], "big")


def _mask_key(secret: int, tag: SumTag) -> bytes:
    return _hashed("mask", secret, tag)[:SHORT_KEY_BYTES]


def _opening_key(secret: int, tag: SumTag) -> bytes:
    return _hashed("open", secret, tag)


def _digest(secret: int, tag: SumTag) -> bytes:
    return _hashed("digest", secret, tag)


def _hashed(what: str, secret: int, tag: SumTag) -> bytes:
    return hashlib.sha256(
        frame(f"isthmus/survivors/{what}/1", secret.to_bytes(SECRET_BYTES, "big"), tag.encoded)
    ).digest()


# -- the server's side -----------------------------------------------------------------------------


class SurvivorServer(SumServer):
    """Adds up one sum that may lose parties: takes what they send in each step, and gives out what is for others."""

    def __init__(self, roster: SumRoster, tag: SumTag) -> None:
        super().__init__(roster, tag)
        self._secrets: dict[str, SharedSecrets] = {}
        self._codes: dict[str, dict[str, bytes]] = {}
        self._shares: dict[str, dict[str, tuple[int, int]]] = {}  # by holder, then by owner
        self.survivors: tuple[str, ...] = ()

    @property
    def present(self) -> tuple[str, ...]:
        """Who shared secrets."""
        return tuple(sorted(self._secrets))

    def take_secrets(self, party: str, secrets: SharedSecrets) -> None:
        self._once(party, self._secrets, "shared its secrets for")
        wanted = self.roster.holders(party) - {party}
        if secrets.boxes.keys() != wanted or len(secrets.digests) != 2 * 32:
            raise ProtocolError(f"{party} shared its secrets with others than it has to")
        self._secrets[party] = secrets

    def add(self, party: str, masked: Words) -> None:
        if party not in self._secrets:
            raise ProtocolError(f"{party} sent its part of a sum without having shared its secrets")
        super().add(party, masked)

    def settle(self) -> tuple[str, ...]:
        """Who is in the sum: those whose vector came. Too few lose the sum, and nothing is revealed."""
        self.survivors = tuple(sorted(self._heard))
        self._enough(len(self.survivors), self.roster.at_least)
        return self.survivors

    def take_codes(self, party: str, codes: Mapping[str, bytes]) -> None:
        self._once(party, self._codes, "confirmed the group of")
        self._codes[party] = dict(codes)

    def codes_for(self, party: str) -> dict[str, bytes]:
        return {sender: codes[party] for sender, codes in self._codes.items() if party in codes}

    def boxes_for(self, party: str) -> dict[str, bytes]:
        """Shares that a party holds of the others."""
        return {owner: one.boxes[party] for owner, one in self._secrets.items() if party in one.boxes}

    def take_shares(self, party: str, shares: Mapping[str, tuple[int, int]]) -> None:
        """A party's shares, once; the same ones again are no error."""
        known = self._shares.get(party)
        if known is not None and known != dict(shares):
            raise ProtocolError(f"{party} sent its shares twice, with different values: repeat the round without it")
        for owner, (which, number) in shares.items():
            if owner not in self._secrets or which != (owner not in self.survivors) or not 0 <= number < PRIME:
                raise ProtocolError(f"{party} sent a share of {owner} that this sum does not need")
        self._shares[party] = dict(shares)

    def total_words(self) -> Words:
        """The sum over the survivors."""
        if self._total is None or not self.survivors:
            raise ProtocolError("the group of this sum is not settled yet")
        total, own, add, subtract = self._total.copy(), list[bytes](), list[bytes](), list[bytes]()
        for owner in self.present:
            secret = self._recovered(owner)
            if owner in self.survivors:
                own.append(_mask_key(secret, self.tag))
                continue
            for other, key in self._opened(owner, secret).items():
                if other in self.survivors:  # the survivor's mask with the lost one, which nobody subtracts
                    (subtract if owner > other else add).append(key)
        add_streams(total, add, [*own, *subtract])
        return self._checked(total, len(self.survivors))

    def _recovered(self, owner: str) -> int:
        """A secret from the shares of its holders. False ones among more than are needed are passed over, if they are
        few.
        """
        which, threshold = int(owner not in self.survivors), self.roster.sharing.threshold
        digest = self._secrets[owner].digests[32 * which : 32 * (which + 1)]
        shares = {
            self.roster.points[holder]: its[owner][1] for holder, its in sorted(self._shares.items()) if owner in its
        }
        self._enough(len(shares), threshold)
        spare = range(len(shares) - threshold + 1)
        left_out = itertools.chain.from_iterable(itertools.combinations(sorted(shares), count) for count in spare)
        for some in itertools.islice(left_out, _TRIES):
            secret = recover({point: share for point, share in shares.items() if point not in some}, threshold)
            if _digest(secret, self.tag) == digest:
                return secret
        raise ProtocolError(f"the shares of {owner} do not fit: holders sent false ones; repeat the round")

    def _opened(self, owner: str, secret: int) -> dict[str, bytes]:
        neighbours = self.roster.neighbours(owner)
        try:
            data = AESGCM(_opening_key(secret, self.tag)).decrypt(_NONCE, self._secrets[owner].sealed, None)
        except InvalidTag:
            data = b""
        if len(data) != SHORT_KEY_BYTES * len(neighbours):
            raise ProtocolError(f"{owner} sealed another list of keys than its masks have: repeat the round without it")
        return {other: data[SHORT_KEY_BYTES * k : SHORT_KEY_BYTES * (k + 1)] for k, other in enumerate(neighbours)}

    def _enough(self, count: int, wanted: int) -> None:
        if count < wanted:
            raise RunError(
                f"{count} of the {len(self.roster)} parties of a secure sum are left, {wanted} are needed: "
                "repeat the round when more of them are back"
            )

    def _once(self, party: str, known: Mapping[str, object], what: str) -> None:
        if party not in self.roster.members or party in known:
            raise ProtocolError(
                f"{party} {f'has already {what}' if party in known else 'is not on the roster of'} this sum"
            )
