"""Small folders of tables."""

from __future__ import annotations

from pathlib import Path

SCHEMA = """
[nodes]
file = "accounts.*"
id = "account"
label = "fraud"
classes = ["no", "yes"]
split = "part"

[features]
balance = { type = "number", scale = "log-standard", missing = "median" }
country = { type = "category", values = ["DE", "FR"], missing = "own" }
company = { type = "flag", missing = false }

[edges]
file = "transfers.*"
source = "from"
target = "to"
directed = true
weight = "amount"
time = "day"

[edges.features]
in_count = true
out_sum = "amount"
in_mean = ["amount", "day"]
"""

ACCOUNTS = """account,fraud,balance,country,company,part
a1,no,100,DE,yes,train
a2,yes,,FR,no,train
a3,no,5.5,,no,val
a4,,7,DE,no,
a5,yes,9,FR,yes,test
"""

TRANSFERS = """from,to,amount,day
a1,a2,10,2026-01-01
a1,a2,5,2026-01-03
a2,a3,1,2026-01-02
x1,a1,3,2026-01-02
a3,x2,4,2026-01-05
"""


def write_owner(
    folder: Path, *, schema: str = SCHEMA, accounts: str | bytes = ACCOUNTS, transfers: str | bytes = TRANSFERS
) -> Path:
    """A folder as one owner has it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("schema.toml", schema), ("accounts.csv", accounts), ("transfers.csv", transfers)):
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
