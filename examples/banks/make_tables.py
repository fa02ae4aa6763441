"""Three banks' folders of tables, made up: accounts, transfers and the schema they agreed on.

    python examples/banks/make_tables.py banks

writes ``banks/bank-a``, ``banks/bank-b``, ``banks/bank-c``. Fraudulent accounts pass money on quickly, mostly to one
another and across banks, so both training together and edges between banks help to find them. A few transfers stand in
one bank's ledger only, as in real life.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

BANKS = ("bank-a", "bank-b", "bank-c")
SCHEMA = """\
[nodes]
file = "accounts.*"
id = "account"
label = "fraud"
classes = ["no", "yes"]
split = "stratified:40/20/40"

[features]
balance = { type = "number", scale = "log-standard", missing = "median" }
country = { type = "category", values = ["DE", "FR", "NL"], missing = "own" }
company = { type = "flag" }

[edges]
file = "transfers.*"
source = "from"
target = "to"
directed = true
weight = "amount"
time = "booked"

[edges.features]
in_count = true
out_count = true
in_sum = "amount"
out_sum = "amount"
in_mean = "booked"
out_mean = "booked"
"""


def write_banks(folder: Path, accounts: int = 600, transfers: int = 6000, seed: int = 0) -> None:
    """Write the three folders."""
    draw = np.random.default_rng(seed)
    names = [f"AC{number:08d}" for number in draw.choice(10**8, accounts, replace=False)]
    bank = draw.integers(0, len(BANKS), accounts)
    fraud = draw.random(accounts) < 0.1
    ring = np.flatnonzero(fraud)
    rows = []
    for _ in range(transfers):
        source = int(draw.integers(accounts))
        inside = fraud[source] and draw.random() < 0.5
        target = int(draw.choice(ring) if inside else draw.integers(accounts))
        if source != target:
            amount = draw.lognormal(5.2 if inside else 4.8, 0.8)
            day = f"2026-0{draw.integers(1, 7)}-{draw.integers(1, 29):02d}"
            rows.append((source, target, f"{amount:.2f}", day))
    for number, name in enumerate(BANKS):
        home = folder / name
        home.mkdir(parents=True, exist_ok=True)
        (home / "schema.toml").write_text(SCHEMA)
        with (home / "accounts.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["account", "fraud", "balance", "country", "company"])
            for row in np.flatnonzero(bank == number).tolist():
                balance = "" if draw.random() < 0.02 else f"{draw.lognormal(7.2 if fraud[row] else 7.0, 1.0):.2f}"
                country = draw.choice(["DE", "FR", "NL", ""], p=[0.5, 0.3, 0.15, 0.05])
                table.writerow([names[row], "yes" if fraud[row] else "no", balance, country, int(draw.random() < 0.2)])
        with (home / "transfers.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["from", "to", "amount", "booked"])
            for source, target, paid, day in rows:
                ends = bank[source], bank[target]
                if number in ends and not (ends[0] != ends[1] and draw.random() < 0.01):
                    table.writerow([names[source], names[target], paid, day])


if __name__ == "__main__":
    write_banks(Path(sys.argv[1] if len(sys.argv) > 1 else "banks"))
