"""A change of the roster, signed by everybody who stays: ``isthmus client roster add|remove|sign|apply``.

One organisation writes the change and sends it round; each looks at it and signs it with its long-term key; with all
signatures each applies it to its own ``roster.toml``. So neither the hub nor a single organisation can put a key on the
roster of another one, and all end with the same roster. The signatures are bound to the roster they change, and to how
often it was changed before: a roster that is again what it once was takes none of its old changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import tomli_w

from isthmus.deploy.roster import ANY_CLIENT, CHANGES, OrganisationKeys, check_client_name
from isthmus.errors import ConfigError, unknown
from isthmus.experiments.config_values import read_toml
from isthmus.privacy.keys import PUBLIC_BYTES, Identity, frame, signed_by

FORMAT = 2
"""In 1 a change did not say how often the roster had been changed before."""


@dataclass(frozen=True)
class Line:
    """An organisation on the roster."""

    client: str
    key: str


@dataclass(frozen=True)
class Roster:
    """The lines of a roster, one client per organisation, and how often it was changed."""

    lines: Mapping[str, Line]
    changes: int = 0

    @classmethod
    def read(cls, path: Path) -> Roster:
        found = OrganisationKeys.read(path)
        if ANY_CLIENT in found.keys:
            raise ConfigError(f"{path} is the roster of a simulation: list every organisation")
        lines = {found.organisations[client]: Line(client, key.hex()) for client, key in found.keys.items()}
        return cls(lines, found.changes)

    @property
    def hash(self) -> str:
        parts = [part for name, line in sorted(self.lines.items()) for part in (name, line.client, line.key)]
        return sha256(frame("isthmus/roster/2", self.changes, *parts)).hexdigest()

    def write(self, path: Path) -> Path:
        """Write it; the one before is kept beside it and returned."""
        kept = path.with_name(f"{path.name}.{Roster.read(path).hash[:12]}")
        kept.write_bytes(path.read_bytes())
        tables = {name: {"client": line.client, "key": line.key} for name, line in sorted(self.lines.items())}
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(tomli_w.dumps({CHANGES: self.changes, **tables}))
        temporary.rename(path)
        return kept


@dataclass(frozen=True)
class RosterChange:
    """An organisation's new line, or none if it leaves; ``before``: hash of the roster that is changed."""

    before: str
    organisation: str
    line: Line | None
    signatures: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> RosterChange:
        raw: dict[str, Any] = read_toml(path, "the change ")
        if raw.get("format") != FORMAT:
            raise ConfigError(f"{path} has format {raw.get('format')}, this version reads {FORMAT}: install the same")
        try:
            organisation = check_client_name(raw["organisation"], path.name, "an organisation")
            line = Line(check_client_name(raw["client"], path.name), raw["key"]) if "key" in raw else None
            signatures = {str(name): str(value) for name, value in raw.get("signatures", {}).items()}
            if line is not None and not re.fullmatch(f"[0-9a-f]{{{2 * PUBLIC_BYTES}}}", line.key):
                raise ValueError
            return cls(str(raw["before"]), organisation, line, signatures)
        except (KeyError, AttributeError, TypeError, ValueError):
            raise ConfigError(f"{path} is no change of a roster: ask for it again") from None

    def write(self, path: Path) -> None:
        content: dict[str, Any] = {"format": FORMAT, "before": self.before, "organisation": self.organisation}
        if self.line is not None:
            content |= {"client": self.line.client, "key": self.line.key}
        path.write_text(tomli_w.dumps(content | {"signatures": dict(self.signatures)}))

    def signed(self) -> bytes:
        line = ("", "") if self.line is None else (self.line.client, self.line.key)
        return frame("isthmus/roster-change/2", self.before, self.organisation, *line)

    @property
    def words(self) -> str:
        if self.line is None:
            return f"{self.organisation} leaves the roster"
        return f"{self.organisation} is {self.line.client} with the key {self.line.key}"

    def stay(self, roster: Roster) -> list[str]:
        """Who must sign: everybody on the roster but the organisation that the change is about."""
        return sorted(set(roster.lines) - {self.organisation})

    def check_applies(self, roster: Roster) -> None:
        if roster.hash != self.before:
            raise ConfigError(
                "this change is of another roster than yours: apply the changes before it first, or ask for a new one"
            )

    def sign(self, roster: Roster, name: str, identity: Identity) -> RosterChange:
        self.check_applies(roster)
        if name not in self.stay(roster):
            raise ConfigError(f"{name} does not sign this change ({self.words}); those who stay do")
        if roster.lines[name].key != identity.public.hex():
            raise ConfigError(f"the roster holds another key of {name} than your identity: use the right identity")
        return replace(self, signatures={**self.signatures, name: identity.sign_bytes(self.signed()).hex()})

    def missing(self, roster: Roster) -> list[str]:
        """Who stays and has not signed; an error if a signature is not theirs."""
        self.check_applies(roster)
        lines = roster.lines
        for name, text in self.signatures.items():
            if name not in lines:
                raise unknown("organisation among the signatures", name, list(lines))
            try:
                valid = signed_by(bytes.fromhex(lines[name].key), self.signed(), bytes.fromhex(text))
            except ValueError:
                valid = False
            if not valid:
                raise ConfigError(f"the signature of {name} is not by its key, or of another change: ask it to sign")
        return [name for name in self.stay(roster) if name not in self.signatures]

    def apply(self, roster: Roster) -> Roster:
        """The roster afterwards, if all who stay have signed."""
        missing = self.missing(roster)
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} has not signed yet: send the change there (`isthmus client roster sign`)"
            )
        lines = {name: line for name, line in roster.lines.items() if name != self.organisation}
        if self.line is not None:
            lines[self.organisation] = self.line
        return Roster(lines, roster.changes + 1)


def propose(roster: Roster, organisation: str, line: Line | None) -> RosterChange:
    """A change that nobody has signed yet."""
    lines = roster.lines
    if line is None and organisation not in lines:
        raise unknown("organisation on the roster", organisation, list(lines))
    if lines.get(organisation) == line:
        raise ConfigError(f"the roster says so already: {organisation} needs no change")
    taken = {one.client: name for name, one in lines.items() if name != organisation}
    if line is not None and line.client in taken:
        raise ConfigError(f"the client {line.client} belongs to {taken[line.client]}: agree on another name")
    return RosterChange(roster.hash, organisation, line, {})
