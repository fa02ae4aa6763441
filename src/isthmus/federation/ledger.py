"""The ledger: every message between parties, and what follows from it.

One line per batch (one direction of one verb), with a column entry per message. Bytes are codec bytes on every engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from isthmus.federation.messages import Kind, Message, PartyId, kinds_of, role_of

Protection = Literal["clear", "summed", "masked", "sealed"]
PROTECTIONS: dict[str, str] = {
    "clear": "the receiver reads each message",
    "summed": "the receiver's program is given only the total; the messages themselves travel unmasked",
    "masked": "the receiver can read only the total",
    "sealed": "encrypted to the receiver; whoever relays it sees sizes and addresses",
}
CHANNELS = ("up", "down", "peer", "device")


@dataclass(frozen=True)
class Entry:
    """A batch of messages of one type. ``sender`` or ``receiver`` may hold one address that stands for all."""

    attempt: int
    phase: str
    round: int
    sequence: int
    handler: str
    message: str
    kinds: Mapping[str, str]
    protection: Protection
    sender: tuple[PartyId, ...]
    receiver: tuple[PartyId, ...]
    bytes: tuple[int, ...]
    by_kind: Mapping[str, int]
    """Bytes of the whole batch by kind of content; what is missing to the total is framing."""

    @classmethod
    def of(cls, message: type[Message], **columns: Any) -> Entry:
        return cls(message=message.__name__, kinds=dict(_kinds_by_name(message)), **columns)  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, line: str) -> Entry:
        raw: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(line).items()
        }
        return cls(**raw)

    def to_json(self) -> str:
        return json.dumps(vars(self), separators=(",", ":"))  # not asdict, which copies every address

    @property
    def roles(self) -> tuple[str, str]:
        return role_of(self.sender[0]), role_of(self.receiver[0])

    @property
    def channel(self) -> str:
        """``up`` and ``down`` between client and server, ``peer`` between clients, ``device`` where a device is an
        end.
        """
        sender, receiver = self.roles
        if "device" in (sender, receiver):
            return "device"
        if receiver == "server":
            return "up"
        return "down" if sender == "server" else "peer"

    @property
    def total(self) -> int:
        return sum(self.bytes)


@cache
def _kinds_by_name(message: type[Message]) -> Mapping[str, str]:
    return {name: str(kind) for name, kind in kinds_of(message).items()}


class Ledger:
    """Entries of the current round, handed over when it is committed; running totals by phase and channel."""

    def __init__(self) -> None:
        self.round: list[Entry] = []

    def add(self, entry: Entry) -> None:
        self.round.append(entry)

    def take(self) -> list[Entry]:
        """The entries since the last call."""
        entries, self.round = self.round, []
        return entries


def channel_totals(entries: Iterable[Entry]) -> dict[str, int]:
    """Bytes by channel."""
    totals = dict.fromkeys(CHANNELS, 0)
    for entry in entries:
        totals[entry.channel] += entry.total
    return totals


class SheetKey(NamedTuple):
    """What makes two lines of a disclosure sheet the same: who shows whom which content. A message is its name and the
    kinds of its fields; a name alone would let another message of that name pass.
    """

    phase: str
    sender: str
    receiver: str
    message: str
    protection: str
    fields: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{' / '.join(self[:5])} ({', '.join(f'{name}: {kind}' for name, kind in self.fields)})"


def _fields(kinds: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(kinds.items()))


@dataclass(frozen=True)
class Disclosure:
    """One line of a disclosure sheet: in this phase, this role shows that role these kinds of things, under this
    protection.
    """

    phase: str
    sender: str
    receiver: str
    message: type[Message]
    protection: Protection = "clear"

    @property
    def key(self) -> SheetKey:
        kinds = {name: str(kind) for name, kind in kinds_of(self.message).items()}
        return SheetKey(self.phase, self.sender, self.receiver, self.message.__name__, self.protection, _fields(kinds))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(sorted(set(kinds_of(self.message).values())))


class Sheet:
    """The disclosure sheet of a run, gathered from the ledger as rounds are committed."""

    def __init__(self) -> None:
        self._rows: dict[SheetKey, dict[str, Any]] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            sender, receiver = entry.roles
            key = SheetKey(entry.phase, sender, receiver, entry.message, entry.protection, _fields(entry.kinds))
            row = self._rows.setdefault(
                key, {"kinds": sorted(set(entry.kinds.values())), "times": 0, "bytes": 0, "bytes_by_kind": {}}
            )
            row["times"] += len(entry.bytes)
            row["bytes"] += entry.total
            for kind, size in entry.by_kind.items():
                row["bytes_by_kind"][kind] = row["bytes_by_kind"].get(kind, 0) + size

    def keys(self) -> set[SheetKey]:
        return set(self._rows)

    def rows(self) -> list[dict[str, Any]]:
        columns = SheetKey._fields[:5]
        return [dict(zip(columns, key[:5], strict=True)) | row for key, row in self._rows.items()]


def differences(sheet: Sheet, declared: Sequence[Disclosure]) -> list[str]:
    """What a run showed that was not declared, and what was declared but never shown; empty if the sheet is right.

    ``declared``: every line of the run, those of the framework's own messages among them
    (`isthmus.experiments.disclosure.sheet_of` gives them).
    """
    shown, stated = sheet.keys(), {line.key for line in declared}
    return [f"shown but not declared: {key}" for key in sorted(shown - stated)] + [
        f"declared but never shown: {key}" for key in sorted(stated - shown)
    ]
