"""What owners of tables do together before the first round: agree on scaling, and on the edges between them.

owner.py      the owner's side: one class whose handlers give sums, and mail for linking
rounds.py     the server's side: the order of the steps
linking.py    ids under a common key, and the edges two owners both list
script.py     which calls are made, for the disclosure sheet and the contract
plain_links.py the same in the clear, for one process
prepared.py   from tables and what was agreed to the data a method is given
"""

from typing import Literal

SCALING, LINKING = "scaling", "linking"
"""Phases, as the ledger names them."""
Link = Literal["psi", "plain", "none"]
"""How owners find the edges between them: privately, in the clear (one process), not at all."""


def link_of(setting: str, *, organisations: bool) -> Link:
    """What the setting ``link`` means: ``auto`` is private between organisations and plain in one process."""
    if setting == "none":
        return "none"
    return "psi" if organisations or setting == "psi" else "plain"
