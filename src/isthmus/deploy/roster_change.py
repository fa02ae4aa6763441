"""A change of the roster, signed by everybody who stays: ``isthmus client roster add|remove|sign|apply``.

One organisation writes the change and sends it round; each looks at it and signs it with its long-term key; with all
signatures each applies it to its own ``roster.toml``. So neither the hub nor a single organisation can put a key on the
roster of another one, and all end with the same roster. The signatures are bound to the roster they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import tomli_w

from isthmus.deploy.roster import ANY_CLIENT, OrganisationKeys
from isthmus.errors import ConfigError, unknown
from isthmus.experiments.config_values import read_toml
from isthmus.privacy.keys import Identity, frame, signed_by

FORMAT = 1


@dataclass(frozen=True)
class Line:
    """An organisation on the roster."""

    client: str
    key: str


def read_lines(path: Path) -> dict[str, Line]:
    """The lines of a roster, one client per organisation."""
    roster = OrganisationKeys.read(path)
    if ANY_CLIENT in roster.keys:
        raise ConfigError(f"{path} is the roster of a simulation: list every organisation")
    return {roster.organisations[client]: Line(client, key.hex()) for client, key in roster.keys.items()}


def roster_hash(lines: Mapping[str, Line]) -> str:
    parts = [part for name, line in sorted(lines.items()) for part in (name, line.client, line.key)]
    return sha256(frame("isthmus/roster/1", *parts)).hexdigest()


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
            line = Line(str(raw["client"]), str(raw["key"])) if "key" in raw else None
            signatures = {str(name): str(value) for name, value in raw.get("signatures", {}).items()}
            return cls(str(raw["before"]), str(raw["organisation"]), line, signatures)
        except (KeyError, AttributeError, TypeError):
            raise ConfigError(f"{path} is no change of a roster: ask for it again") from None

    def write(self, path: Path) -> None:
        content: dict[str, Any] = {"format": FORMAT, "before": self.before, "organisation": self.organisation}
        if self.line is not None:
            content |= {"client": self.line.client, "key": self.line.key}
        path.write_text(tomli_w.dumps(content | {"signatures": dict(self.signatures)}))

    def signed(self) -> bytes:
        line = ("", "") if self.line is None else (self.line.client, self.line.key)
        return frame("isthmus/roster-change/1", self.before, self.organisation, *line)

    @property
    def words(self) -> str:
        if self.line is None:
            return f"{self.organisation} leaves the roster"
        return f"{self.organisation} is {self.line.client} with the key {self.line.key}"

    def stay(self, lines: Mapping[str, Line]) -> list[str]:
        """Who must sign: everybody on the roster but the organisation that the change is about."""
        return sorted(set(lines) - {self.organisation})

    def check_applies(self, lines: Mapping[str, Line]) -> None:
        if roster_hash(lines) != self.before:
            raise ConfigError(
                "this change is of another roster than yours: apply the changes before it first, or ask for a new one"
            )

    def sign(self, lines: Mapping[str, Line], name: str, identity: Identity) -> RosterChange:
        self.check_applies(lines)
        if name not in self.stay(lines):
            raise ConfigError(f"{name} does not sign this change ({self.words}); those who stay do")
        if lines[name].key != identity.public.hex():
            raise ConfigError(f"the roster holds another key of {name} than your identity: use the right identity")
        return replace(self, signatures={**self.signatures, name: identity.sign_bytes(self.signed()).hex()})

    def missing(self, lines: Mapping[str, Line]) -> list[str]:
        """Who stays and has not signed; an error if a signature is not theirs."""
        self.check_applies(lines)
        for name, text in self.signatures.items():
            if name not in lines:
                raise unknown("organisation among the signatures", name, list(lines))
            try:
                valid = signed_by(bytes.fromhex(lines[name].key), self.signed(), bytes.fromhex(text))
            except ValueError:
                valid = False
            if not valid:
                raise ConfigError(f"the signature of {name} is not by its key, or of another change: ask it to sign")
        return [name for name in self.stay(lines) if name not in self.signatures]

    def apply(self, lines: Mapping[str, Line]) -> dict[str, Line]:
        """The roster afterwards, if all who stay have signed."""
        missing = self.missing(lines)
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} has not signed yet: send the change there (`isthmus client roster sign`)"
            )
        changed = {name: line for name, line in lines.items() if name != self.organisation}
        return changed if self.line is None else {**changed, self.organisation: self.line}


def propose(lines: Mapping[str, Line], organisation: str, line: Line | None) -> RosterChange:
    """A change that nobody has signed yet."""
    if line is None and organisation not in lines:
        raise unknown("organisation on the roster", organisation, list(lines))
    if lines.get(organisation) == line:
        raise ConfigError(f"the roster says so already: {organisation} needs no change")
    taken = {one.client: name for name, one in lines.items() if name != organisation}
    if line is not None and line.client in taken:
        raise ConfigError(f"the client {line.client} belongs to {taken[line.client]}: agree on another name")
    return RosterChange(roster_hash(lines), organisation, line, {})


def write_roster(path: Path, lines: Mapping[str, Line]) -> Path:
    """Write a roster; the one before is kept beside it and returned."""
    kept = path.with_name(f"{path.name}.{roster_hash(read_lines(path))[:12]}")
    kept.write_bytes(path.read_bytes())
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(tomli_w.dumps({n: {"client": li.client, "key": li.key} for n, li in sorted(lines.items())}))
    temporary.rename(path)
    return kept
