"""What every party was sent, kept for an audit of a simulation: ``transcript/<party>/NNNNNN.bin`` through the codec,
and an index.

Only for simulations (``transcript=true``): the files hold what the protections of a run are there to hide. Attempts
that were lost and repeated stay in it, because their messages were seen. Mail between clients is with its receiver, not
with whoever relayed it; the keys and rosters of secure sums, which say nothing of anybody's data, are only on the
ledger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.errors import DataError, ProtocolError
from isthmus.federation import codec
from isthmus.federation.messages import Message, PartyId
from isthmus.federation.roles import RoleTable
from isthmus.federation.secure import MailOrders, MailPlan, Masked, SumKey, SumKeys

FOLDER = "transcript"
INDEX = "index.jsonl"
FRAMEWORK: tuple[type[Message], ...] = (SumKey, SumKeys, Masked, MailPlan, MailOrders)


@dataclass(frozen=True)
class Line:
    """Where a message belongs."""

    number: int
    attempt: int
    phase: str
    round: int
    sequence: int
    handler: str
    sender: PartyId
    message: str


class Transcript:
    """Writes down messages as they arrive."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER
        self._next: dict[PartyId, int] = {}

    def note(
        self,
        receiver: PartyId,
        sender: PartyId,
        message: Message,
        *,
        attempt: int,
        phase: str,
        round: int,
        sequence: int,
        handler: str,
    ) -> None:
        folder = self.folder / receiver.replace("/", ".")
        if receiver not in self._next:
            folder.mkdir(parents=True, exist_ok=True)
            self._next[receiver] = 1 + max((int(path.stem) for path in folder.glob("*.bin")), default=0)
        number = self._next[receiver]
        self._next[receiver] = number + 1
        (folder / f"{number:06d}.bin").write_bytes(codec.encode(message))
        line = Line(number, attempt, phase, round, sequence, handler, sender, type(message).__name__)
        with (folder / INDEX).open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")


def received(run_folder: Path, party: PartyId, table: RoleTable) -> Iterator[tuple[Line, Message]]:
    """What a party was sent, in order. Messages of types the method no longer has are an error."""
    types = _types(table)
    folder = run_folder / FOLDER / party.replace("/", ".")
    index = folder / INDEX
    for text in index.read_text().splitlines() if index.exists() else []:
        try:
            line = Line(**json.loads(text))
            yield line, codec.decode((folder / f"{line.number:06d}.bin").read_bytes(), types[line.message])
        except (ValueError, TypeError, KeyError, OSError, ProtocolError) as error:
            raise DataError(
                f"{folder} is damaged ({type(error).__name__}: {error}); run again with transcript=true"
            ) from None


def _types(table: RoleTable) -> Mapping[str, type[Message]]:
    declared = [
        kind
        for names in table.handlers.values()
        for signature in names.values()
        for kind in (signature.request, signature.reply)
    ]
    return {kind.__name__: kind for kind in (*declared, *FRAMEWORK) if kind is not None}
