"""The two samples IBM published with AMLSim: simulated transfers between 20,000 accounts, some of them in laundering
schemes. Apache-2.0.

There is no column for the bank: owners are drawn. ``fraudStep`` tells the label, so it is not read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isthmus.data import store
from isthmus.data.datasets import NODE_SETS, Counts, NodeSet
from isthmus.data.transfers import FEATURES, Transfers, account_features, first_days, rings

ORDINARY = 50.0
"""Amounts of ordinary transfers begin at 100, those of schemes end at 20 in both samples: a transfer below this is one
of a scheme. Only the rings are found by it, which splits use and models do not see.
"""
DEFAULTS = {"partition": "random", "clients": 5, "split": "stratified:40/20/40", "metric": "auprc"}


def read_amlsim(folder: Path) -> dict[str, Tensor]:
    """Accounts and transfers of one sample.

    Columns beside the features: ``ring`` (fraudulent accounts joined by transfers of a scheme, -1 for others),
    ``first_day``, ``balance``.
    """
    accounts = np.loadtxt(folder / "nodes.csv", delimiter=",", skiprows=1, usecols=(0, 1, 2))
    rows = np.loadtxt(folder / "transactions.csv", delimiter=",", skiprows=1)
    order = np.argsort(accounts[:, 0], kind="stable")
    fraud, balance = accounts[order, 1] > 0, accounts[order, 2]
    source, target = (torch.from_numpy(rows[:, column].astype(np.int64)) for column in (0, 1))
    transfers = Transfers(source, target, torch.from_numpy(rows[:, 2].copy()), torch.from_numpy(rows[:, 3].copy()))
    return {
        "x": torch.from_numpy(account_features(transfers, balance)),
        "edge_index": transfers.arcs(len(fraud)),
        "y": torch.from_numpy(fraud.astype(np.int64)),
        "column.ring": torch.from_numpy(rings(transfers, rows[:, 2] < ORDINARY, fraud)),
        "column.first_day": torch.from_numpy(first_days(transfers, len(fraud))),
        "column.balance": torch.from_numpy(balance.copy()),
        **{f"transfers.{name}": values for name, values in vars(transfers).items()},
    }


def _sample(name: str, folder: str, arcs: int, aliases: tuple[str, ...] = ()) -> NodeSet:
    raw = store.RawFiles(name, f"AMLSim/{folder}", ("nodes.csv", "transactions.csv"))
    counts = Counts(20000, arcs, len(FEATURES), 2)
    return NodeSet(name, raw, counts, parse=read_amlsim, aliases=aliases, defaults=DEFAULTS)


for _entry in (
    _sample("amlsim-fanin", "20K_fanin200", 116507),
    _sample("amlsim-cycle", "20K_fanin200cycle200", 117326, aliases=("amlsim",)),
):
    NODE_SETS.add(_entry.name, _entry)
