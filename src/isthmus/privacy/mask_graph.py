"""Who masks with whom: a sparse random graph over the parties of a sum, so that masks cost log K each instead of K.

After SecAgg+ (Bell, Bonawitz, Gascon, Lepoint, Raykova: Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead, ACM CCS 2020, https://eprint.iacr.org/2020/704): what the server can read of masked vectors are the totals
over connected components of the graph of those parties that keep their secrets. If that graph is connected, this is one
total: that of all of them.

Each party chooses ``h`` others, and two parties mask with each other if one of them chose the other. A party's choice
is a pseudorandom function of *its own* session key and the names of the parties, so that

- everybody can check it: the key is signed, the names are those of the contract;
- nobody else can influence it: the server cannot make keys that the party signs, and the keys of others have no part in
  it. There is no common coin that the last one to speak could choose;
- a party that works with the server chooses its own ``h`` neighbours as it likes, and gains nothing: it adds masks to
  honest parties, and takes none away.

    K              parties             names on the roster
    b              bad                 parties whose secrets the server has: those that work with it, and the lost ones
    h              chosen              others that each party chooses
    H = K - b                          the rest

A set S of s honest parties has no neighbour in the rest if all that they chose is in S or bad, and none of the other
H - s chose one of S. So the graph of the honest is not connected with probability at most

    sum over s = 1 .. H/2 of  C(H, s) * [C(s - 1 + b, h) / C(K - 1, h)]^s * [C(K - 1 - s, h) / C(K - 1, h)]^(H - s)

(:func:`log2_disconnected`), for one roster and one set of bad parties that does not depend on the keys of the honest
ones. ``h`` is the smallest number that brings it below 2^-:data:`SECURITY_BITS` with a share of :data:`COLLUDING`.

What remains: whoever can take over parties *after* the keys are published can pick all neighbours of a victim (about 2
h instead of K - 1 of them). A run that is begun again has new keys, hence a new graph: n beginnings have n times the
probability. Where the server chooses the roster itself (``some`` in a script), the graph is complete.

**Sums that may lose parties** (`survivors`). Masks with a lost party are opened, and the server says who is lost,
*after* it has seen the graph: of a graph as thin as above it would declare all neighbours of a victim lost. So there a
party masks with those that hold shares of its secrets, as in SecAgg+, and refuses to mask if too few of its holders are
present (:func:`sharing_for`). With few parties, and where many may be lost, the graph is complete.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

COLLUDING = 0.2
"""Share of the parties that may work with the server."""
SECURITY_BITS = 40
"""The graph of the others is connected but for a probability of 2^-40."""
LEAST_PARTIES = 20
"""Below this everybody masks with everybody."""
LEAST_READ = 0.25
"""Of a sum that may lose parties, share of the honest ones that is in every total the server can read."""


def log2_disconnected(parties: int, chosen: int, bad: int) -> float:
    """Base-2 logarithm of the bound above on the probability that what the honest parties keep secret falls into two
    totals or more.
    """
    honest = parties - bad
    if honest < 2:
        return 0.0
    terms = []
    for size in range(1, honest // 2 + 1):
        inside = _log_choose(size - 1 + bad, chosen) - _log_choose(parties - 1, chosen)
        avoided = _log_choose(parties - 1 - size, chosen) - _log_choose(parties - 1, chosen)
        terms.append(_log_choose(honest, size) + size * inside + (honest - size) * avoided)
    top = max(terms)
    if top == -math.inf:
        return -math.inf
    return min(0.0, (top + math.log(sum(math.exp(term - top) for term in terms))) / math.log(2))


@lru_cache(maxsize=256)
def choices_for(parties: int, at_least: int = 0) -> int:
    """How many others each party of a sum chooses; 0: everybody masks with everybody.

    Args:
        at_least: Parties without which the sum is lost; 0: everybody is needed.
    """
    if at_least:
        return sharing_for(parties, at_least).holders
    if parties < LEAST_PARTIES:
        return 0
    bad = math.ceil(COLLUDING * parties)
    for chosen in range(1, parties - 1):
        if 2 * chosen - chosen**2 / (parties - 1) > 0.8 * (parties - 1):
            return 0  # so dense that a complete graph costs little more
        if log2_disconnected(parties, chosen, bad) <= -SECURITY_BITS:
            return chosen
    return 0


@dataclass(frozen=True)
class Sharing:
    """How the secrets of one sum are shared, so that lost parties do not lose it.

    Args:
        holders: Others that each party gives shares to, beside itself, and masks with; 0: all of them.
        threshold: Shares that give a secret back.
    """

    holders: int
    threshold: int


def least_left(parties: int) -> int:
    """Fewest parties a sum can do with: two such groups of honest parties would have one in common."""
    return (parties + math.ceil(COLLUDING * parties)) // 2 + 1


@lru_cache(maxsize=256)
def sharing_for(parties: int, at_least: int) -> Sharing:
    """Shares for a sum that goes on with ``at_least`` of the parties.

        n            a party and its holders
        t            threshold
        beta         those of the n that work with the server

    A holder gives away its share of one of two secrets of every other party and never of both, so for both it takes
    ``2t`` shares of ``n + beta`` there are: ``2t > n + beta`` keeps one of them. And a party masks only if t of its n
    are present. Its own mask is opened by t of the n, and of those it masks with at least ``2t - n`` opened it, itself
    perhaps among them. More than beta of the others are too many to be all bad: an honest one that opened it took part
    in the sum by itself, so its masks stay closed, and the party's numbers are never read without that one's.

    With all parties as holders (n = K) only one group can win, and t = :func:`least_left` is enough. Where holders are
    chosen, as few as possible such that beta is exceeded, at any party, with probability at most
    2^-:data:`SECURITY_BITS`; that what is read are totals of a share :data:`LEAST_READ` of the honest parties or more
    (:func:`log2_closed`); and that enough holders are left but for 2^-20, if who is lost has nothing to do with keys.
    """
    colluding, gone = math.ceil(COLLUDING * parties), parties - at_least
    small = int(LEAST_READ * (parties - colluding))
    for holders in range(20, int(0.4 * parties) + 1, max(4, parties // 100)):
        bad = _exceeded(parties - 1, colluding, holders, 2.0 ** -(SECURITY_BITS + 1) / parties)
        sharing = Sharing(holders, (holders + bad) // 2 + 2)
        enough = _exceeded(parties - 1, gone, holders, 2.0**-20 / parties) <= holders - sharing.threshold
        if enough and log2_closed(parties, sharing, small) <= -SECURITY_BITS:
            return sharing
    return Sharing(0, least_left(parties))


def log2_closed(parties: int, sharing: Sharing, size: int) -> float:
    """Base-2 logarithm of a bound on the probability that a total of ``size`` honest parties or fewer can be read,
    whoever the server declares lost and whomever it tells what.

    Numbers that are read together are closed: of each party's holders ``2t - n - 1`` or more are bad or in the same
    total (:func:`sharing_for`). Holders are chosen by each party's own key, so a set of s is closed with the s-th power
    of the probability for one, and there are C(H, s) sets.
    """
    bad, inside = math.ceil(COLLUDING * parties), 2 * sharing.threshold - sharing.holders - 2
    terms = [
        _log_choose(parties - bad, s) + s * _log_tails(parties - 1, s - 1 + bad, sharing.holders)[inside]
        for s in range(1, size + 1)
    ]
    return float(np.logaddexp.reduce(terms) / math.log(2))


def _exceeded(others: int, marked: int, drawn: int, probability: float) -> int:
    """The smallest number that the marked ones among ``drawn`` of the ``others`` exceed with no more than this
    probability.
    """
    return int(np.argmax(_log_tails(others, marked, drawn) <= math.log(probability))) - 1


def _log_tails(others: int, marked: int, drawn: int) -> NDArray[np.float64]:
    """Logarithms of the probabilities that of ``drawn`` of the ``others`` at least 0, 1, ... drawn + 1 are marked."""
    factorial, plain = _log_factorials(others), others - marked
    found = np.arange(max(0, drawn - plain), min(marked, drawn) + 1)
    logs = np.full(drawn + 2, -math.inf)
    logs[found] = factorial[marked] - factorial[found] - factorial[marked - found] - _log_choose(others, drawn)
    logs[found] += factorial[plain] - factorial[drawn - found] - factorial[plain - drawn + found]
    return np.logaddexp.accumulate(logs[::-1])[::-1]


@lru_cache(maxsize=8)
def _log_factorials(most: int) -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])


def choices(key: bytes, own: str, parties: Sequence[str], chosen: int) -> frozenset[str]:
    """Whom the party with this session key chooses among the others: the first by a pseudorandom order of their
    names.
    """
    names = tuple(parties)
    order = _order(key, names)
    order[names.index(own)] = np.iinfo(np.uint64).max
    if chosen >= len(names) - 1:
        return frozenset(names) - {own}
    return frozenset(names[i] for i in np.argpartition(order, chosen)[:chosen].tolist())


def neighbours(keys: Mapping[str, bytes], chosen: int) -> dict[str, tuple[str, ...]]:
    """With whom each party masks: those it chose and those that chose it."""
    names = tuple(sorted(keys))
    found: dict[str, set[str]] = {name: set() for name in names}
    for name in names:
        for other in choices(keys[name], name, names, chosen):
            found[name].add(other)
            found[other].add(name)
    return {name: tuple(sorted(others)) for name, others in found.items()}


def _order(key: bytes, names: tuple[str, ...]) -> NDArray[np.uint64]:
    """A number per name: AES under a digest of the key, of a digest of the name."""
    secret = hashlib.sha256(b"isthmus/mask-graph/1" + key).digest()
    encryptor = Cipher(algorithms.AES256(secret), modes.ECB()).encryptor()
    return np.frombuffer(encryptor.update(_digests(names)), "<u8")[::2].astype(np.uint64)


@lru_cache(maxsize=64)
def _digests(names: tuple[str, ...]) -> bytes:
    return b"".join(hashlib.sha256(name.encode()).digest()[:16] for name in names)


def _log_choose(n: int, k: int) -> float:
    return -math.inf if k > n or n < 0 else math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
