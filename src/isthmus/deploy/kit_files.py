"""The ``client.toml`` a new organisation begins with: a place for its data, and a strict policy with a word on each
key.
"""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.deploy.policy import STRICT

_WORDS = {
    "secure_sum": "sums only behind masks",
    "least_in_sum": "fewest clients of a sum",
    "fixed_roster": "no sums over a draw of the clients",
    "hidden_from_server": "kinds never shown to the server by one client",
    "hidden_from_others": "the same towards other clients",
    "scores": 'the server sees scores of all clients added up; or "each"',
    "rounds": "of one run",
    "changes": "repeated calls of a run that may ask for something else",
    "approve": "a person must approve every contract: isthmus client approve",
}
_OPTIONAL = (
    ('methods = ["fedavg"]', "no other method"),
    ("runs = 10", "of all time"),
    ("epsilon = 8.0", "budget of all runs together; a run without differential privacy is refused"),
    ("delta = 1e-5", "the same"),
    ("shared_noise = true", "epsilon may rest on the noise of other clients (dp_noise_in=total)"),
    ("link.max_ids = 100000", "more edges are never compared with a partner's"),
)


def client_toml(client: str, identity: str) -> str:
    """Content of a new organisation's ``client.toml``."""
    lines = [
        f"client = {json.dumps(client)}",
        'roster = "roster.toml"                 # the lines of all organisations, agreed outside the federation',
        f"identity = {json.dumps(identity)}",
        'state = "state"                        # checkpoints, models and the audit chain: they never leave',
        "",
        "[tables]",
        'folder = "data"                        # this organisation\'s tables and schema.toml',
        "",
        "[policy]                               # what a run must be like; docs/policy.md",
    ]
    values = STRICT.to_table()
    lines += [f"{f'{key} = {json.dumps(values[key])}':<38} # {words}" for key, words in _WORDS.items()]
    lines += [f"{f'# {text}':<38} # {words}" for text, words in _OPTIONAL]
    return "\n".join(lines) + "\n"


def write_client_toml(path: Path, client: str, identity: str) -> bool:
    """Write it unless there is one already; returns whether it was written."""
    try:
        with path.open("x") as file:
            file.write(client_toml(client, identity))
    except FileExistsError:
        return False
    return True
