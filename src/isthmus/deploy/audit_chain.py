"""The audit chain of a site: what was asked of it in all its runs, in a file where no line can be changed unnoticed.

``state/audit.jsonl``, one line per event. A line begins with its ``number`` and ``prev``, the SHA-256 of the line
before, so that a removed, changed, inserted or swapped line breaks the chain. There is no value of anybody in it.

======== =============================================================================================
join     a run was joined or continued: contract, stage, attempt, what it spends of the budget
call     a call was admitted; written before the handler runs
refused  a call or a run was refused, and why
meet     keys of the other parties were accepted, with the heads of their chains
order    rollback and export of a run; approvals of contracts
end      the run is over
======== =============================================================================================

It is also the memory of the site: what was asked before, how many runs were joined and what they spent is rebuilt from
it, so neither a restart nor a deleted run folder makes the site forget.

``audit.index`` beside it is a summary up to some line with the hash of all bytes before: a job need not read every line
of all earlier runs. It can be deleted. A chain that is shorter than its index, or has another beginning, was tampered
with. Whoever rewrites both is caught with a head kept elsewhere: the server and the other sites keep them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from isthmus.deploy.run_files import AUDIT
from isthmus.errors import DataError, IsthmusError, ProtocolError, StorageError
from isthmus.experiments.folder import write_atomic
from isthmus.federation.watch import AdmittedCall, RolledBack

logger = logging.getLogger(__name__)

INDEX = "audit.index"
RESTORED = "restored"
"""Name of an order: somebody accepted that a part of the record is lost."""
JOIN, CALL, REFUSED, MEET, ORDER, END = KINDS = ("join", "call", "refused", "meet", "order", "end")
WENT_BACK = ("rollback", "catch_up")
"""Names of orders by which parties go back to a checkpoint."""
FIRST = "0" * 64
"""``prev`` of the first line."""
_INDEXED = 100_000
"""Lines that are read at most before they are summed up in the index."""
_BLOCK = 1 << 20
MOST_REFUSALS = 1000
"""Refused calls that are written, of one run in one job."""
MOST_TEXT = 300
"""Characters of a text in a line: parts of it may be the server's."""


@dataclass(frozen=True)
class Head:
    """The newest line of a chain: how many there are, and its SHA-256."""

    number: int = 0
    hash: str = FIRST


@dataclass(frozen=True)
class RunSummary:
    """A run in the chain: where its first line begins, its contract, what it spent, and the line of the newest job that
    joined it.
    """

    first: int
    contract: str
    epsilon: float = 0.0
    delta: float = 0.0
    ended: bool = False
    joined: int = 0


class AuditChain:
    """The chain of one site. Several jobs may append to it at the same time: each line is written under a lock."""

    def __init__(self, state: Path) -> None:
        self.path, self.index = state / AUDIT, state / INDEX
        self.head = Head()
        self.runs: dict[str, RunSummary] = {}
        self._bytes = 0
        self._digest = hashlib.sha256()
        self._locked: IO[bytes] | None = None
        self._since_index = 0

    # -- reading -----------------------------------------------------------------------------------

    def open(self) -> AuditChain:
        """Verify the chain, cut off a line that was torn when the disk or the process failed, and sum up."""
        with self.locked():
            pass
        return self

    def records(self, run: str, mark: str) -> Iterator[dict[str, Any]]:
        """Everything of one run, in order."""
        summary = self.runs.get(run_key(run, mark))
        if summary is None:
            return
        for record in self.read(summary.first):
            if record.get("run") == run and record.get("mark") == mark:
                yield record

    def read(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """The lines from a byte on, up to where the chain has been verified."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                while file.tell() < self._bytes:
                    record: dict[str, Any] = json.loads(file.readline())
                    yield record
        except FileNotFoundError:
            return
        except ValueError:
            raise self._broken("a line of it cannot be read") from None

    @property
    def spent(self) -> tuple[float, float]:
        """Epsilon and delta of all runs that were joined, added up."""
        return (
            sum(summary.epsilon for summary in self.runs.values()),
            sum(summary.delta for summary in self.runs.values()),
        )

    def has_head(self, wanted: str) -> int | None:
        """The number of the line with this hash; None if there is none."""
        if wanted == FIRST:
            return 0
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if _hash(line) == wanted:
                    return number
        return None

    # -- writing -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else appends meanwhile; what others appended before has been read."""
        if self._locked is not None:
            yield
            return
        with self._file() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file)
            self._locked = file
            try:
                yield
            finally:
                self._locked = None

    def has_accepted(self, head: str) -> bool:
        """Whether somebody wrote down that what followed up to this head is lost (``isthmus client restored``)."""
        return any(
            record["kind"] == ORDER and record.get("name") == RESTORED and head.startswith(str(record["contract"]))
            for record in self.read()
        )

    def append(self, kind: str, **fields: Any) -> None:
        """Write a line; on return it is on the disk. Nothing that it announces may be done if this raises."""
        assert kind in KINDS
        with self.locked():
            file = self._locked
            assert file is not None
            record = {"number": self.head.number + 1, "prev": self.head.hash, "kind": kind, **fields}
            line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            try:
                file.seek(self._bytes)
                if file.write(line) != len(line):  # what a disk does first that is nearly full
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError as error:
                with contextlib.suppress(OSError):
                    file.truncate(self._bytes)
                raise self._cannot(error, "written") from None
            self._take(line)
            if kind in (JOIN, END) or self._since_index >= _INDEXED:
                self._write_index()

    def _file(self) -> IO[bytes]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            return os.fdopen(descriptor, "r+b", buffering=0)
        except OSError as error:
            raise self._cannot(error, "opened") from None

    def _cannot(self, error: OSError, done: str) -> IsthmusError:
        return StorageError(
            f"the audit chain {self.path.name} cannot be {done} ({error.strerror}), so nothing is answered here: "
            "set that right, then continue the run"
        )

    def _catch_up(self, file: IO[bytes]) -> None:
        """Verify and sum up what was appended since the last look."""
        size = os.fstat(file.fileno()).st_size
        if size < self._bytes:
            raise self._broken("lines were cut off its end")
        if self._bytes == 0:
            self._start_from_index(file, size)
        file.seek(self._bytes)
        for line in _lines(file):
            if not line.endswith(b"\n"):
                logger.warning("%s: the last line was torn while it was written; it is cut off", self.path.name)
                file.truncate(self._bytes)
                os.fsync(file.fileno())
                return
            self._check(line)
            self._take(line)
            if self._since_index >= _INDEXED:
                self._write_index()

    def _check(self, line: bytes) -> None:
        number = self.head.number + 1
        if not line.startswith(b'{"number":%d,"prev":"%s","kind":"' % (number, self.head.hash.encode())):
            raise self._broken(f"line {number} does not follow from the line before")

    def _take(self, line: bytes) -> None:
        start, number = self._bytes, self.head.number + 1
        kind = line[len(f'{{"number":{number},"prev":"{self.head.hash}","kind":"') :]
        if kind.startswith((b"join", b"end")):
            self._sum_up(line, start, number)
        self.head = Head(number, _hash(line))
        self._bytes += len(line)
        self._digest.update(line)
        self._since_index += 1

    def _sum_up(self, line: bytes, start: int, number: int) -> None:
        try:
            record = json.loads(line)
            key = run_key(record["run"], record["mark"])
            if record["kind"] == END:
                self.runs[key] = replace(self.runs[key], ended=True)
                return
            found = self.runs.get(key, RunSummary(start, record["contract"]))
            self.runs[key] = replace(
                found,
                epsilon=found.epsilon + float(record["epsilon"]),
                delta=found.delta + float(record["delta"]),
                ended=False,
                joined=number,
            )
        except (ValueError, KeyError, TypeError):
            raise self._broken(f"line {number} cannot be read") from None

    def _broken(self, why: str) -> IsthmusError:
        return DataError(
            f"the audit chain {self.path.name} is broken: {why}; this site joins no run until the file is restored "
            "(`isthmus client audit --verify` shows where it breaks)"
        )

    # -- index -------------------------------------------------------------------------------------

    def _start_from_index(self, file: IO[bytes], size: int) -> None:
        try:
            raw = json.loads(self.index.read_bytes())
            end, head = int(raw["bytes"]), Head(**raw["head"])
            digest, runs = str(raw["digest"]), {key: RunSummary(**each) for key, each in raw["runs"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError):
            logger.warning("%s cannot be read: the whole chain is read instead", self.index.name)
            return
        if size < end:
            self._read_all(file, size)
            raise self._broken(f"it ends before line {head.number}, which its index knows")
        file.seek(0)
        found, left = hashlib.sha256(), end
        while left and (block := file.read(min(left, _BLOCK))):
            found.update(block)
            left -= len(block)
        if found.hexdigest() != digest:
            self._read_all(file, end)
            raise self._broken("its lines fit each other, but are not those its index was made from")
        self.head, self.runs, self._bytes, self._digest = head, runs, end, found

    def _read_all(self, file: IO[bytes], end: int) -> None:
        """Say which line is wrong, if any is by itself."""
        other = AuditChain(self.path.parent)
        file.seek(0)
        for line in _lines(file):
            if other._bytes >= end:
                return
            other._check(line)
            other._take(line)

    def _write_index(self) -> None:
        """Losing it costs time only, so a full disk is no reason to stop."""
        content = {
            "bytes": self._bytes,
            "head": asdict(self.head),
            "digest": self._digest.hexdigest(),
            "runs": {key: asdict(summary) for key, summary in self.runs.items()},
        }
        try:
            write_atomic(self.index, json.dumps(content, separators=(",", ":")).encode())
        except OSError as error:
            logger.warning("%s cannot be written (%s): the next job reads more lines", self.index.name, error.strerror)
        self._since_index = 0


class RunLog:
    """The lines of one run: what its parties were asked, and what they refused.

    Implements :class:`isthmus.federation.watch.CallLog`.
    """

    def __init__(self, chain: AuditChain, run: str, mark: str) -> None:
        self.chain, self.run, self.mark = chain, run, mark
        self._joined = 0  # line by which this job joined
        self._refusals = 0

    def join(self, **fields: Any) -> None:
        """From now on this job answers for the run, and no other one that joined before."""
        with self.chain.locked():
            self.chain.append(JOIN, run=self.run, mark=self.mark, **fields)
            self._joined = self.chain.head.number

    def append(self, kind: str, **fields: Any) -> None:
        """Write a line, if this job still answers for the run."""
        with self.chain.locked():
            if kind != REFUSED:
                self.check()
            self.chain.append(kind, run=self.run, mark=self.mark, **fields)

    def check(self) -> None:
        """Raise once another job has joined the run: what this one knows of it is what was in the chain before."""
        with self.chain.locked():
            if self._joined and self.chain.runs[run_key(self.run, self.mark)].joined != self._joined:
                raise ProtocolError(f"{self.run} was begun again in another job of this site: this one is over")

    def admitted(self, call: AdmittedCall) -> None:
        self.append(CALL, **call.to_json())

    def refused(self, party: str, handler: str, text: str) -> None:
        """Refusals cost a server nothing, so after many of them they do not fill the disk any more."""
        self._refusals += 1
        if self._refusals <= MOST_REFUSALS:
            last = " (further refusals are not written)" if self._refusals == MOST_REFUSALS else ""
            self.append(REFUSED, party=party[:MOST_TEXT], handler=handler[:MOST_TEXT], text=text[:MOST_TEXT] + last)

    def calls(self) -> tuple[AdmittedCall | RolledBack, ...]:
        """Every call of this run that was admitted so far, and where it went back in between."""
        return tuple(
            AdmittedCall.from_json(record) if record["kind"] == CALL else RolledBack(int(record["step"]))
            for record in self.chain.records(self.run, self.mark)
            if record["kind"] == CALL or (record["kind"] == ORDER and record["name"] in WENT_BACK)
        )


def verify(state: Path) -> Head:
    """Check every line of a chain, whatever its index says; an error names the first that does not fit."""
    chain = AuditChain(state)
    try:
        with chain.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    raise chain._broken(f"line {chain.head.number + 1} is torn; the next job cuts it off")
                chain._check(line)
                try:
                    record = json.loads(line)
                except ValueError:
                    record = {}
                if record.get("kind") not in KINDS:
                    raise chain._broken(f"line {chain.head.number + 1} cannot be read")
                chain._take(line)
    except FileNotFoundError:
        raise DataError(f"there is no {chain.path}: this site has joined no run yet") from None
    AuditChain(state).open()  # against the index
    return chain.head


def run_key(run: str, mark: str) -> str:
    """A run by its name and the id that tells it from another run of that name."""
    return f"{run}/{mark}"


def _hash(line: bytes) -> str:
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines of an unbuffered file; the last may have no end."""
    rest = b""
    while block := file.read(_BLOCK):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line + b"\n"
    if rest:
        yield rest
