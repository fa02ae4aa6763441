"""Transfers between accounts, and what a bank derives from its own accounts' transfers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from isthmus.data.from_arrays import simple

FEATURES = (
    "balance",
    *(
        f"{way} {what}"
        for way in ("in", "out")
        for what in ("count", "sum", "mean amount", "mean day", "spread of days")
    ),
)
"""What `account_features` gives of every account. Both ends of a transfer know it, so a bank can derive all of them for
its own accounts, whoever the counterparty's bank is.
"""


@dataclass(frozen=True)
class Transfers:
    """Every single transfer, also several from one account to another. Shapes: all (m,).

    Args:
        source, target: Rows of the accounts that pay and are paid, int64.
        amount: How much, float64.
        day: When, in days from the first, float64.
    """

    source: Tensor
    target: Tensor
    amount: Tensor
    day: Tensor

    @property
    def num_transfers(self) -> int:
        return int(self.source.numel())

    def arcs(self, accounts: int) -> Tensor:
        """Who pays whom, every pair once (2, E), without transfers of an account to itself."""
        return torch.from_numpy(simple(np.stack([self.source.numpy(), self.target.numpy()]), accounts))

    def without_loops(self) -> Transfers:
        """The same without transfers of an account to itself."""
        kept = self.source != self.target
        return Transfers(*(values[kept] for values in (self.source, self.target, self.amount, self.day)))


def account_features(transfers: Transfers, balance: NDArray[np.float64]) -> NDArray[np.float32]:
    """`FEATURES` of every account (n, 11), the logarithm of each standardised; the mean where there is no transfer.

    The same as tables give with ``scale = "log-standard"`` and features made from edges.
    """
    accounts, known = len(balance), transfers.without_loops()
    columns = [balance]
    for ends in (known.target, known.source):
        columns += _of_side(ends.numpy(), known.amount.numpy(), known.day.numpy(), accounts)
    logs = np.stack([np.sign(values) * np.log1p(np.abs(values)) for values in columns], axis=1)
    mean, deviation = np.nanmean(logs, axis=0), np.nanstd(logs, axis=0)
    scaled = (logs - mean) / np.where(deviation > 0, deviation, 1.0)
    found: NDArray[np.float32] = np.nan_to_num(scaled, nan=0.0).astype(np.float32)
    return found


def _of_side(
    account: NDArray[np.int64], amount: NDArray[np.float64], day: NDArray[np.float64], accounts: int
) -> list[NDArray[np.float64]]:
    """Count, sum, mean amount, mean day and deviation of days of one direction; means of nothing are NaN."""
    number = np.bincount(account, minlength=accounts).astype(np.float64)
    safe = np.where(number > 0, number, np.nan)
    total = np.bincount(account, weights=amount, minlength=accounts)
    mean_day = np.bincount(account, weights=day, minlength=accounts) / safe
    apart = np.bincount(account, weights=(day - mean_day[account]) ** 2, minlength=accounts)
    return [number, total, total / safe, mean_day, np.sqrt(apart / safe)]


def first_days(transfers: Transfers, accounts: int) -> NDArray[np.float64]:
    """Day of every account's first transfer, in or out; the day after the last one where an account has none."""
    ends = np.concatenate([transfers.source.numpy(), transfers.target.numpy()])
    days = np.tile(transfers.day.numpy(), 2)
    first = np.full(accounts, days.max(initial=0.0) + 1)
    np.minimum.at(first, ends, days)
    return first


def rings(transfers: Transfers, chosen: NDArray[np.bool_], members: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number of the ring of every member (n,), -1 for others: members joined by chosen transfers, directly or not."""
    source, target = transfers.source.numpy(), transfers.target.numpy()
    kept = chosen & members[source] & members[target]
    shape = (len(members), len(members))
    joined = coo_matrix((np.ones(int(kept.sum())), (source[kept], target[kept])), shape=shape)
    label = connected_components(joined, directed=False)[1].astype(np.int64)
    ring = np.full(len(members), -1, dtype=np.int64)
    ring[members] = np.unique(label[members], return_inverse=True)[1]
    return ring
