"""Accounts at several banks, the transfers between them, and laundering schemes planted across banks.

Made so that the truth is known and the network behaves like one of banks: a transfer has an amount and a day, and the
features of an account are what its bank derives from its own side of them (`isthmus.data.transfers`). Transfers of a
scheme are smaller than ordinary ones, much alike, and lie within a few weeks; they are mixed with ordinary transfers of
the same accounts, and most run from one bank to another. So an account of a ring stands out a little by itself, more
when banks train together, and most for whoever can use transfers across banks, where most members of a ring meet.

    fan-in           many accounts pay one collector
    fan-out          one account pays many
    cycle            money returns to where it began
    scatter-gather   one account pays many, who all pay one other
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.data.from_arrays import node_data, simple, undirected
from isthmus.data.generators import GENERATORS
from isthmus.data.parameters import need
from isthmus.data.transfers import Transfers, account_features, first_days
from isthmus.data.whole_graph import Loaded
from isthmus.seeds import Stream

PATTERNS = ("fan-in", "fan-out", "cycle", "scatter-gather")
TYPICAL = 5.0
"""Logarithm of a typical amount."""
JITTER = 0.05
"""Deviation of the logarithm of amounts within a scheme."""


@GENERATORS.register("banks")
@dataclass(frozen=True)
class Banks:
    """A network of transfers between accounts of several banks (class 1 = member of a laundering ring).

    Args:
        banks: Number of banks, at least 3; sizes differ by up to a factor of three.
        accounts: Number of accounts of all banks.
        rate: Share of accounts in rings.
        payments: Mean number of ordinary transfers an account makes, most to a few busy receivers.
        inside: Share of ordinary transfers that stay inside a bank.
        spread: Deviation of the logarithm of amounts.
        shift: By how much the logarithm of amounts in schemes lies below that of ordinary ones: 0 means amounts tell
            nothing.
        window: Days within which a scheme runs, of ``days`` in all.
        schemes: Schemes a ring of accounts runs among its members.
        home: Share of a ring's accounts at one bank; the others are spread over two other banks or more.
        directed: 1 = an arc runs from payer to payee; 0 = both directions, for models that read undirected graphs.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "partition": "owner",
        "split": "stratified:40/20/40",
        "metric": "auprc",
    }

    banks: int = 8
    accounts: int = 5000
    rate: float = 0.09
    payments: float = 4.0
    inside: float = 0.7
    spread: float = 0.4
    shift: float = 0.5
    window: float = 20.0
    days: float = 200.0
    schemes: int = 2
    home: float = 0.6
    directed: int = 0

    def __post_init__(self) -> None:
        need("banks", "banks", self.banks >= 3, "at least 3")
        need("banks", "accounts", self.accounts >= 20 * self.banks, "at least 20 per bank")
        need("banks", "rate", 0.0 < self.rate <= 0.2, "above 0 and at most 0.2")
        need("banks", "payments", self.payments >= 0, "at least 0")
        need("banks", "inside", 0.0 <= self.inside <= 1.0, "in [0, 1]")
        need("banks", "spread", self.spread >= 0, "at least 0")
        need("banks", "window", 0 <= self.window <= self.days, "at least 0 and at most days")
        need("banks", "schemes", self.schemes >= 1, "at least 1")
        need("banks", "home", 0 <= self.home <= 1, "in [0, 1]")
        need("banks", "directed", self.directed in (0, 1), "0 or 1")

    def draw(self, stream: Stream) -> Loaded:
        return self.network(stream).loaded(directed=bool(self.directed))

    def network(self, stream: Stream) -> BankNetwork:
        """The same with the planted truth beside it."""
        bank = self._banks(stream.child("banks").numpy())
        ring, schemes = self._schemes(bank, stream.child("schemes").numpy())
        licit = self._payments(bank, stream.child("payments").numpy())
        transfers = self._transfers(licit, schemes, stream.child("transfers").numpy())
        balance = np.exp(stream.child("balances").numpy().normal(TYPICAL + 2, 1.0, self.accounts))
        illicit = simple(np.concatenate([scheme.payments for scheme in schemes], axis=1), self.accounts)
        y = (ring >= 0).astype(np.int64)
        return BankNetwork(balance, y, bank, licit, illicit, ring, tuple(schemes), transfers)

    def _transfers(self, licit: NDArray[np.int64], schemes: list[Scheme], rng: np.random.Generator) -> Transfers:
        """Amount and day of every payment, ordinary ones first."""
        count = licit.shape[1]
        ends, logs, days = [licit], [rng.normal(TYPICAL, self.spread, count)], [rng.uniform(0, self.days, count)]
        for scheme in schemes:
            number = scheme.payments.shape[1]
            middle = rng.normal(TYPICAL - self.shift, self.spread)
            begin = rng.uniform(0, self.days - self.window)
            ends.append(scheme.payments)
            logs.append(rng.normal(middle, JITTER, number))
            days.append(begin + rng.uniform(0, self.window, number))
        source, target = np.concatenate(ends, axis=1)
        amount, day = np.round(np.exp(np.concatenate(logs)), 2), np.floor(np.concatenate(days))
        return Transfers(*(torch.from_numpy(values) for values in (source, target, amount, day)))

    def _banks(self, rng: np.random.Generator) -> NDArray[np.int64]:
        share = rng.uniform(1.0, 3.0, self.banks)
        least = np.repeat(np.arange(self.banks), 10)  # no bank is tiny
        rest = rng.choice(self.banks, self.accounts - len(least), p=share / share.sum())
        bank: NDArray[np.int64] = rng.permutation(np.concatenate([least, rest]))
        return bank

    def _payments(self, bank: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Ordinary payments (2, m), each pair once: busy receivers (shops, landlords) get most, at every bank."""
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
        schemes: list[Scheme] = []
        wanted, placed, rings = max(round(self.rate * self.accounts), 6), 0, 0
        while placed < wanted:
            size = min(int(rng.integers(8, 17)), max(wanted - placed, 6))
            members = self._members(np.flatnonzero(ring < 0), bank, size, rng)
            ring[members] = rings
            for number in range(self.schemes):
                pattern = PATTERNS[(rings + number) % len(PATTERNS)]
                schemes.append(Scheme(rings, pattern, payments_of(pattern, rng.permutation(members))))
            placed += size
            rings += 1
        return ring, schemes

    def _members(
        self, free: NDArray[np.int64], bank: NDArray[np.int64], size: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Accounts of a new ring: ``home`` of them at one bank, the others at two other banks or more."""
        home = int(bank[rng.choice(free)])
        here, elsewhere = (rng.permutation(free[where]) for where in (bank[free] == home, bank[free] != home))
        two = np.unique(bank[elsewhere], return_index=True)[1][:2]  # so that no two banks see all of a ring
        others = np.concatenate([elsewhere[two], np.delete(elsewhere, two)])
        inside = min(round(self.home * size), len(here), size - 2)
        members: NDArray[np.int64] = np.concatenate([here[:inside], others[: size - inside]])
        return members


@dataclass(frozen=True)
class Scheme:
    """One laundering scheme: the ring that runs it, its pattern, its payments (2, m)."""

    ring: int
    pattern: str
    payments: NDArray[np.int64]


@dataclass(frozen=True)
class BankNetwork:
    """A drawn network with the planted truth.

    Args:
        balance: Of every account.
        y: 1 for accounts in a ring.
        bank: Bank of every account.
        licit, illicit: Who pays whom, ordinarily and in schemes (2, m).
        ring: Ring of every account, -1 for none.
        schemes: What the rings did.
        transfers: All payments with amount and day.
    """

    balance: NDArray[np.float64]
    y: NDArray[np.int64]
    bank: NDArray[np.int64]
    licit: NDArray[np.int64]
    illicit: NDArray[np.int64]
    ring: NDArray[np.int64]
    schemes: tuple[Scheme, ...]
    transfers: Transfers

    def loaded(self, *, directed: bool) -> Loaded:
        """As a data set whose natural owners are the banks."""
        payments = np.concatenate([self.licit, self.illicit], axis=1)
        arcs = simple(payments, len(self.y)) if directed else undirected(payments, len(self.y))
        x = account_features(self.transfers, self.balance).astype(np.float64)
        columns = {
            "ring": torch.from_numpy(self.ring),
            "first_day": torch.from_numpy(first_days(self.transfers, len(self.y))),
            "balance": torch.from_numpy(self.balance),
        }
        return Loaded(
            node_data(x, arcs, self.y, 2),
            "generated",
            owner=torch.from_numpy(self.bank),
            columns=columns,
            transfers=self.transfers,
        )


def payments_of(pattern: str, members: NDArray[np.int64]) -> NDArray[np.int64]:
    """Who pays whom in one scheme (2, m); the first members play the parts there is one of."""
    if pattern == "cycle":
        return np.stack([members, np.roll(members, -1)])
    first, second = members[:2]
    if pattern == "scatter-gather":
        middle = members[2:]
        return np.concatenate([_both(first, middle), _both(second, middle)[::-1]], axis=1)
    return _both(first, members[1:])[::-1] if pattern == "fan-in" else _both(first, members[1:])


def _both(source: np.int64, targets: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([np.full_like(targets, source), targets])
