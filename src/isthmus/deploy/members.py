"""The register of a federation: which certificates were issued to whom, and which of them were revoked.

``FOLDER/members.json``, written by ``isthmus server init|approve|revoke|renew`` and read by the server's parent process
at every connection (``connection_gate``): a certificate that is not in it is not let in, even if the root signed it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cryptography import x509

from isthmus.deploy.certificates import common_name, digest, key_digest, now
from isthmus.errors import ConfigError

MEMBERS, FORMAT = "members.json", 2
"""In format 1 certificates were known by their serial numbers, which the holder of the root key can give to others."""


@dataclass(frozen=True)
class Issued:
    """A certificate and its public key, by their digests; ``revoked`` says when it was revoked, empty if it was not."""

    name: str
    digest: str
    key: str
    issued: str
    expires: str
    revoked: str = ""

    def __post_init__(self) -> None:
        if not all(type(value) is str for value in vars(self).values()):
            raise TypeError
        if datetime.datetime.fromisoformat(self.expires).tzinfo is None:
            raise ValueError

    @property
    def days_left(self) -> float:
        return (datetime.datetime.fromisoformat(self.expires) - now()).total_seconds() / 86400


@dataclass(frozen=True)
class Members:
    """The register: certificates, and the long-term key with which each organisation signs its requests."""

    certificates: tuple[Issued, ...] = ()
    identities: Mapping[str, str] | None = None

    @classmethod
    def read(cls, path: Path) -> Members:
        """The register; a missing one is empty, so nobody is let in."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read ({type(error).__name__}): restore it from a backup") from None
        try:
            if raw["format"] == 1:
                raise ConfigError(
                    f"{path} is of an older version, which knew certificates by their numbers only: delete it, then "
                    "`isthmus server renew`, and approve a renewal of every organisation"
                )
            if raw["format"] != FORMAT:
                raise ConfigError(
                    f"{path} has format {raw['format']}, this version reads {FORMAT}: use the version that wrote it"
                )
            identities = {str(name): str(key) for name, key in raw["identities"].items()}
            return cls(tuple(Issued(**one) for one in raw["certificates"]), identities)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{path} is damaged: restore it from a backup") from None

    def write(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        content = {
            "format": FORMAT,
            "certificates": [asdict(one) for one in self.certificates],
            "identities": dict(self.identities or {}),
        }
        with temporary.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    def issued(self, certificate: x509.Certificate) -> Members:
        one = Issued(
            common_name(certificate.subject),
            digest(certificate),
            key_digest(certificate.public_key()),
            now().isoformat(timespec="seconds"),
            certificate.not_valid_after_utc.isoformat(),
        )
        return replace(self, certificates=(*self.certificates, one))

    def revoked(self, name: str, but: str = "") -> Members:
        """All certificates of a party revoked, except the one with the digest ``but``."""
        when = now().isoformat(timespec="seconds")
        certificates = tuple(
            replace(one, revoked=when) if one.name == name and not one.revoked and one.digest != but else one
            for one in self.certificates
        )
        return replace(self, certificates=certificates)

    def knows(self, name: str, key: str) -> Members:
        return replace(self, identities={**(self.identities or {}), name: key})

    def valid(self, name: str) -> Issued | None:
        """The certificate of a party that is valid longest, if one is."""
        found = [one for one in self.certificates if one.name == name and not one.revoked and one.days_left > 0]
        return max(found, key=lambda one: one.expires, default=None)

    def lost(self, key: str) -> bool:
        """Whether a certificate of this public key was revoked: its private half may be in other hands."""
        return any(one.key == key and one.revoked for one in self.certificates)

    def joined(self, name: str) -> bool:
        """Whether a party has a certificate that was not revoked; it may have expired."""
        return any(one.name == name and not one.revoked for one in self.certificates)

    def refusal(self, certificate: x509.Certificate) -> str:
        """Why a certificate is not let in; empty if it is."""
        name, own = common_name(certificate.subject), digest(certificate)
        found = next((one for one in self.certificates if one.digest == own and one.name == name), None)
        if found is None:
            return f"a certificate of {name[:60]!r} that is not in the register"
        if found.revoked:
            return f"{name} was revoked at {found.revoked}"
        if certificate.not_valid_after_utc <= now():
            return f"the certificate of {name} expired at {found.expires}"
        return ""


@contextlib.contextmanager
def changing(path: Path) -> Iterator[Members]:
    """The register, while no other process changes it."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Members.read(path)
