"""Long-term keys of the organisations, agreed outside the federation.

Each organisation makes its own identity (``isthmus client identity``) and sends the others the lines it prints;
``roster.toml`` holds those lines, the same file at every organisation, and is read at ``isthmus client start`` and when
a run begins::

    [bank-a]
    client = "client-0"
    key = "9f3c..."

With it a site verifies that mail and masks are meant for that organisation's party, not for one the server invented.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.experiments.config_values import read_toml
from isthmus.federation.messages import SERVER, client_of
from isthmus.privacy.keys import PUBLIC_BYTES, Identity

_MOST_NAME = 100
CHANGES = "changes"
ANY_CLIENT = "*"
"""Stands for all clients that are not listed. For simulations, where all share one key."""


def make_identity(path: Path) -> Identity:
    """Make an identity and keep its secret half in a file only its owner can read. An existing one is not replaced."""
    identity = Identity()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already and the others may have its key: keep it, or delete it and send them a new one"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(identity.seed.hex() + "\n")
    return identity


def read_identity(path: Path) -> Identity:
    try:
        return Identity(bytes.fromhex(path.read_text().strip()))
    except OSError as error:
        raise ConfigError(
            f"cannot read the identity {path}: {error.strerror}; make one with `isthmus client identity`"
        ) from None
    except ValueError:
        raise ConfigError(f"{path} is not an identity: make one with `isthmus client identity`") from None


def check_client_name(client: object, file: str, what: str = "a client") -> str:
    """The name of a client, if it is one that is also a folder and an address, and looks like no other."""
    if (
        not isinstance(client, str)
        or not 0 < len(client) <= _MOST_NAME
        or not client.isprintable()
        or set(client) & set("/\\?")
        or client in (".", "..", SERVER)
        or client != unicodedata.normalize("NFKC", client).strip()
    ):
        raise ConfigError(
            f"{what} cannot be called {str(client)[:_MOST_NAME]!r} ({file}): use letters, digits and - as in bank-a, "
            f"at most {_MOST_NAME}"
        )
    return client


@dataclass(frozen=True)
class OrganisationKeys:
    """The roster: public key and organisation of every client; ``changes``: how often it was changed
    (``roster_change``).
    """

    keys: Mapping[str, bytes]
    organisations: Mapping[str, str]
    changes: int = 0

    @classmethod
    def read(cls, path: Path) -> OrganisationKeys:
        raw = read_toml(path, "the roster ")
        keys: dict[str, bytes] = {}
        organisations: dict[str, str] = {}
        owners: dict[bytes, str] = {}
        changes = raw.pop(CHANGES) if type(raw.get(CHANGES)) is int else 0
        for organisation, entry in raw.items():
            check_client_name(organisation, path.name, "an organisation")
            try:
                key = bytes.fromhex(entry["key"])
                clients = [entry["client"]] if "client" in entry else list(entry["clients"])
            except (KeyError, TypeError, ValueError):
                raise ConfigError(
                    f'[{organisation}] in {path} must hold client = "..." and key = "64 hexadecimal digits"'
                ) from None
            if len(key) != PUBLIC_BYTES:
                raise ConfigError(
                    f"the key of [{organisation}] in {path} has {len(key)} bytes instead of {PUBLIC_BYTES}: ask for it "
                    "again"
                )
            if key in owners:
                raise ConfigError(
                    f"[{owners[key]}] and [{organisation}] in {path} have the same key, so one could sign for the "
                    "other: ask both for theirs again"
                )
            owners[key] = organisation
            for client in clients:
                check_client_name(client, path.name)
                if client in keys:
                    raise ConfigError(
                        f"{path} gives {client!r} to two organisations ({organisations[client]} and {organisation}): "
                        "agree on one"
                    )
                keys[client], organisations[client] = key, organisation
        return cls(keys, organisations, changes)

    def key_of(self, party: str) -> bytes:
        """The long-term key of a party's organisation; a device belongs to that of its client."""
        client = client_of(party)
        if client not in self.keys and ANY_CLIENT in self.keys:
            return self.keys[ANY_CLIENT]
        if client not in self.keys:
            raise ConfigError(f"the roster has no organisation for {client!r}: agree on one with all organisations")
        return self.keys[client]
