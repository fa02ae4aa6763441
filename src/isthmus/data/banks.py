"""Accounts at several banks, the payments between them, and laundering schemes planted across banks.

Made so that the truth is known: no account of a ring stands out much by itself, and no payment of a scheme stays inside
one bank. A bank alone therefore sees ordinary customers; whoever can use payments across banks sees members of a ring
next to each other.

    fan-in           many accounts pay one collector
    fan-out          one account pays many
    cycle            money returns to where it began
    scatter-gather   one account pays many, who all pay one other
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.data.from_arrays import node_data, simple, undirected
from isthmus.data.generators import GENERATORS
from isthmus.data.parameters import need
from isthmus.data.whole_graph import Loaded
from isthmus.seeds import Stream

PATTERNS = ("fan-in", "fan-out", "cycle", "scatter-gather")
FEATURES = (
    "log age",
    "log balance",
    "payments",
    "mean amount",
    "cash share",
    "foreign share",
    "night share",
    "complaints",
)
"""Account features, standardised. Members of a ring differ from others by ``signal`` standard deviations, spread over
all of them.
"""


@GENERATORS.register("banks")
@dataclass(frozen=True)
class Banks:
    """A payment network of several banks (class 1 = member of a laundering ring).

    Args:
        banks: Number of banks, at least 3; sizes differ by up to a factor of three.
        accounts: Number of accounts of all banks.
        rate: Share of accounts in rings.
        payments: Mean number of ordinary payments an account makes; ``inside`` of them to its own bank, most to a few
            busy receivers.
        inside: Share of ordinary payments that stay inside a bank.
        signal: How far members of a ring differ from other accounts, in standard deviations: small means no account
            stands out.
        schemes: Schemes a ring of accounts runs among its members.
        directed: 1 = an arc runs from payer to payee; 0 = both directions, for models that read undirected graphs.
    """

    banks: int = 8
    accounts: int = 4000
    rate: float = 0.04
    payments: float = 4.0
    inside: float = 0.7
    signal: float = 1.0
    schemes: int = 3
    directed: int = 0

    def __post_init__(self) -> None:
        need("banks", "banks", self.banks >= 3, "at least 3")
        need("banks", "accounts", self.accounts >= 20 * self.banks, "at least 20 per bank")
        need("banks", "rate", 0.0 < self.rate <= 0.2, "above 0 and at most 0.2")
        need("banks", "payments", self.payments >= 0, "at least 0")
        need("banks", "inside", 0.0 <= self.inside <= 1.0, "in [0, 1]")
        need("banks", "schemes", self.schemes >= 1, "at least 1")
        need("banks", "directed", self.directed in (0, 1), "0 or 1")

    def draw(self, stream: Stream) -> Loaded:
        return self.network(stream).loaded(directed=bool(self.directed))

    def network(self, stream: Stream) -> BankNetwork:
        """The same with the planted truth beside it."""
        bank = self._banks(stream.child("banks").numpy())
        ring, schemes = self._schemes(bank, stream.child("schemes").numpy())
        illicit = simple(np.concatenate([scheme.payments for scheme in schemes], axis=1), self.accounts)
        licit = self._payments(bank, stream.child("payments").numpy())
        y = (ring >= 0).astype(np.int64)
        rng = stream.child("features").numpy()
        direction = rng.choice([-1.0, 1.0], size=len(FEATURES)) / np.sqrt(len(FEATURES))
        x = rng.normal(size=(self.accounts, len(FEATURES))) + self.signal * y[:, None] * direction
        return BankNetwork(x, y, bank, licit, illicit, ring, tuple(schemes))

    def _banks(self, rng: np.random.Generator) -> NDArray[np.int64]:
        share = rng.uniform(1.0, 3.0, self.banks)
        least = np.repeat(np.arange(self.banks), 10)  # no bank is tiny
        rest = rng.choice(self.banks, self.accounts - len(least), p=share / share.sum())
        bank: NDArray[np.int64] = rng.permutation(np.concatenate([least, rest]))
        return bank

    def _payments(self, bank: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Ordinary payments (2, m): busy receivers (shops, landlords) get most of them, at every bank."""
        count = rng.poisson(self.payments, self.accounts)
        payer = np.repeat(np.arange(self.accounts), count)
        popularity = rng.pareto(1.5, self.accounts) + 0.2
        where = bank[payer]
        other = (where + rng.integers(1, self.banks, len(payer))) % self.banks
        wanted = np.where(rng.random(len(payer)) < self.inside, where, other)
        members = np.argsort(bank, kind="stable")
        heap = np.cumsum(popularity[members])
        size = np.bincount(bank, minlength=self.banks)
        end = np.cumsum(size)
        upper = heap[end - 1]
        lower = np.concatenate([[0.0], upper[:-1]])
        position = np.searchsorted(heap, lower[wanted] + rng.random(len(payer)) * (upper - lower)[wanted], side="right")
        return simple(np.stack([payer, members[position.clip((end - size)[wanted], end[wanted] - 1)]]), self.accounts)

    def _schemes(self, bank: NDArray[np.int64], rng: np.random.Generator) -> tuple[NDArray[np.int64], list[Scheme]]:
        """Ring of every account (-1: none) and the schemes the rings run, ``schemes`` each."""
        ring = np.full(self.accounts, -1, dtype=np.int64)
        free = rng.permutation(self.accounts)
        schemes: list[Scheme] = []
        wanted, placed, rings = max(round(self.rate * self.accounts), 6), 0, 0
        while placed < wanted:
            size = min(int(rng.integers(8, 17)), max(wanted - placed, 6))
            members = free[placed : placed + size]
            if len(np.unique(bank[members])) < 3:  # a ring that fits into two banks would be theirs to see
                members = self._spread(bank, free[placed:], size)
                free = np.concatenate([free[:placed], members, np.setdiff1d(free[placed:], members)])
            ring[members] = rings
            for number in range(self.schemes):
                pattern = PATTERNS[(rings + number) % len(PATTERNS)]
                schemes.append(Scheme(rings, pattern, payments_of(pattern, members, bank, rng)))
            schemes.append(Scheme(rings, "extra", join_left_out(members, schemes[-self.schemes :], bank, rng)))
            placed += size
            rings += 1
        return ring, schemes

    def _spread(self, bank: NDArray[np.int64], free: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """Free accounts, one bank after the other."""
        turn = np.empty(len(free), dtype=np.int64)
        for index in range(self.banks):
            here = bank[free] == index
            turn[here] = np.arange(int(here.sum()))
        return free[np.argsort(turn, kind="stable")[:size]]


@dataclass(frozen=True)
class Scheme:
    """One laundering scheme: the ring that runs it, its pattern, its payments (2, m), each between two banks."""

    ring: int
    pattern: str
    payments: NDArray[np.int64]


@dataclass(frozen=True)
class BankNetwork:
    """A drawn network with the planted truth.

    Args:
        x: Account features (n, 8).
        y: 1 for accounts in a ring.
        bank: Bank of every account.
        licit, illicit: Ordinary payments and payments of schemes (2, m).
        ring: Ring of every account, -1 for none.
        schemes: What the rings did.
    """

    x: NDArray[np.float64]
    y: NDArray[np.int64]
    bank: NDArray[np.int64]
    licit: NDArray[np.int64]
    illicit: NDArray[np.int64]
    ring: NDArray[np.int64]
    schemes: tuple[Scheme, ...]

    def loaded(self, *, directed: bool) -> Loaded:
        """As a data set whose natural owners are the banks."""
        payments = np.concatenate([self.licit, self.illicit], axis=1)
        arcs = simple(payments, len(self.y)) if directed else undirected(payments, len(self.y))
        return Loaded(node_data(self.x, arcs, self.y, 2), "generated", owner=torch.from_numpy(self.bank))


def payments_of(
    pattern: str, members: NDArray[np.int64], bank: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Payments of one scheme among members of a ring; whoever would have to pay inside a bank sits out."""
    members = rng.permutation(members)
    if pattern == "cycle":
        walk = [int(members[0])]
        for member in members[1:]:
            if bank[member] != bank[walk[-1]]:
                walk.append(int(member))
        while bank[walk[-1]] == bank[walk[0]]:  # there are three banks or more, so this ends before the walk is empty
            walk.pop()
        return np.array([walk, walk[1:] + walk[:1]], dtype=np.int64)
    first, second = members[:2]
    if pattern == "scatter-gather":
        middle = members[2:][(bank[members[2:]] != bank[first]) & (bank[members[2:]] != bank[second])]
        return np.concatenate(
            [_both(np.full(len(middle), first), middle), _both(middle, np.full(len(middle), second))], axis=1
        )
    others = members[bank[members] != bank[first]]
    hub = np.full(len(others), first)
    return _both(others, hub) if pattern == "fan-in" else _both(hub, others)


def join_left_out(
    members: NDArray[np.int64], schemes: list[Scheme], bank: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """One payment for every member that sat out all schemes, to a member at another bank."""
    active = np.unique(np.concatenate([scheme.payments.ravel() for scheme in schemes]))
    pairs = [
        (int(member), int(rng.choice(members[bank[members] != bank[member]])))
        for member in np.setdiff1d(members, active)
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T


def _both(source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([source, target]).astype(np.int64)
