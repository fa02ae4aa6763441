"""Contracts that a person of the organisation has approved, for a policy with ``approve = true``.

``state/contracts/HASH.json`` holds every contract this site has derived itself: from a run file (``isthmus client
contract``), or from a run it was asked to join. Only such a one can be approved, so nobody approves what nobody saw.
``state/approved.toml`` holds the approvals, each signed with the organisation's ``identity.key``::

    [[approved]]
    contract = "9abe9fd1..."
    by = "alice"
    on = "2026-03-01"
    signature = "5e0c..."

``on`` is for people: nothing depends on a clock.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config_values import read_toml
from isthmus.experiments.folder import write_atomic
from isthmus.privacy.keys import Identity, frame, signed_by

CONTRACTS, APPROVED = "contracts", "approved.toml"
SHORT = 16
"""Digits of a hash that people compare."""
_LEAST_DIGITS = 8
MOST_CONTRACTS = 1000


@dataclass(frozen=True)
class Approval:
    """One entry of ``approved.toml``."""

    contract: str
    by: str
    on: str
    signature: str

    def signed(self) -> bytes:
        return frame("isthmus/approval/1", self.contract, self.by, self.on)


class Approvals:
    """The contracts one site has derived, and those of them that were approved."""

    def __init__(self, state: Path, identity: Identity) -> None:
        self.contracts, self.path, self.identity = state / CONTRACTS, state / APPROVED, identity

    # -- derived -----------------------------------------------------------------------------------

    def derived(self) -> list[str]:
        """Hashes of all contracts this site has derived."""
        return sorted(path.stem for path in self.contracts.glob("*.json"))

    def find(self, digits: str) -> str:
        """The contract whose hash begins so."""
        found = [each for each in self.derived() if each.startswith(digits.lower())]
        if len(digits) < _LEAST_DIGITS or len(found) > 1:
            raise ConfigError(f"{digits!r} is too short to name a contract: give at least {SHORT} digits")
        if not found:
            raise ConfigError(
                f"this site has derived no contract {digits}: look at it with `isthmus client contract RUN.toml`, or "
                "let the run be submitted and refused once"
            )
        content = (self.contracts / f"{found[0]}.json").read_bytes()
        if hashlib.sha256(content).hexdigest() != found[0]:
            raise DataError(f"the contract {found[0][:SHORT]} kept here was changed: derive it again")
        return found[0]

    # -- approved ----------------------------------------------------------------------------------

    def all(self) -> list[Approval]:
        """Every approval; one that ``identity.key`` did not sign is an error."""
        if not self.path.exists():
            return []
        raw = read_toml(self.path, "the approvals ")
        try:
            found = [
                Approval(**{key: str(each[key]) for key in Approval.__dataclass_fields__}) for each in _entries(raw)
            ]
            valid = [signed_by(self.identity.public, each.signed(), bytes.fromhex(each.signature)) for each in found]
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{self.path.name} is damaged: delete it and approve again") from None
        if not all(valid):
            name = found[valid.index(False)].contract[:SHORT]
            raise DataError(
                f"{self.path.name} holds an approval of {name} that this organisation's identity.key did not sign: "
                "delete it and approve again"
            )
        return found

    def approve(self, digits: str, by: str) -> Approval:
        contract, today = self.find(digits), time.strftime("%Y-%m-%d")
        unsigned = Approval(contract, by, today, "")
        made = Approval(contract, by, today, self.identity.sign_bytes(unsigned.signed()).hex())
        self._write([*(each for each in self.all() if each.contract != contract), made])
        return made

    def withdraw(self, digits: str) -> list[Approval]:
        kept: list[Approval] = []
        gone: list[Approval] = []
        for each in self.all():
            (gone if len(digits) >= _LEAST_DIGITS and each.contract.startswith(digits.lower()) else kept).append(each)
        if not gone:
            raise ConfigError(
                f"no contract {digits} is approved here: `isthmus client approve --list` shows those that are"
            )
        self._write(kept)
        return gone

    def check(self, contract: str) -> None:
        """Raise unless a contract is approved."""
        if all(each.contract != contract for each in self.all()):
            raise ConfigError(
                f"contract {contract[:SHORT]} is not approved here: somebody of this organisation must look at it and "
                f"run `isthmus client approve {contract[:SHORT]}`"
            )

    def _write(self, approvals: list[Approval]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, tomli_w.dumps({"approved": [asdict(each) for each in approvals]}).encode())


def check_approved(state: Path, identity: Identity | None, contract: str) -> None:
    """Raise unless a contract is approved at this site."""
    if identity is None:
        raise ConfigError("approve = true in [policy] needs an identity to sign approvals with: add identity")
    Approvals(state, identity).check(contract)


def keep_derived(state: Path, contract: str, content: bytes) -> None:
    """Remember a contract this site derived; ``content`` is what its hash was made from."""
    folder = state / CONTRACTS
    if not (folder / f"{contract}.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.iterdir())) >= MOST_CONTRACTS:  # whoever may ask to join could fill the disk with them
            raise ConfigError(f"{folder.name} holds {MOST_CONTRACTS} contracts: delete those nobody will approve")
        write_atomic(folder / f"{contract}.json", content)


def _entries(raw: dict[str, Any]) -> list[dict[str, Any]]:
    found = raw["approved"]
    if not isinstance(found, list):
        raise TypeError
    return found
