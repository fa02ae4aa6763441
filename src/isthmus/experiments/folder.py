"""The run folder: all files of a run, written so that ``kill -9`` at any moment leaves them consistent.

``config.toml``, ``scenario.json``, ``metrics.jsonl``, ``ledger/NNNNNN.jsonl`` (one per committed round),
``checkpoints/<party>/``, then at the end ``disclosure.json``, ``models/<client>/``, ``result.json``; of the checkpoints
the last one stays, for more rounds. Files that must be complete are written under another name and renamed. ``run-id``
is a random number that every checkpoint contains: those of another run are refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from isthmus.errors import ConfigError, DataError, ProtocolError, RunError, check_run_folder
from isthmus.federation import codec
from isthmus.federation.ledger import Entry
from isthmus.federation.messages import PartyId
from isthmus.records import Record

_DIGEST = 32
_RUN_ID = 16
NO_RUN = bytes(_RUN_ID)
CHECKPOINT_LIMITS = codec.Limits(max_bytes=2**40, max_tensors=10**7, max_header=2**30)
TRIALS = "variants.json"
"""Validation scores of the variants of the method that were tried."""
LEFT_OUT = "left_out.jsonl"
"""Over whom sums that may lose clients were confirmed."""
FILES = (
    *("result.json", "config.toml", "run-id", "scenario.json", "metrics.jsonl", "disclosure.json", "log.txt"),
    *(TRIALS, LEFT_OUT),
)
FOLDERS = ("ledger", "checkpoints", "models", "tensorboard", "transcript", "sites", "tracking")
"""What a run writes into its folder, and what is removed where it is overwritten; nothing else is touched."""


def write_atomic(path: Path, *parts: codec.Buffer) -> None:
    """Write a file so that it is complete or absent, even after a crash."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


class FileStore:
    """A party's checkpoints on disk, one file each: checksum, id of the run, state. Implements
    ``federation.party.Store``.
    """

    def __init__(self, folder: Path, run: bytes = NO_RUN) -> None:
        self.folder, self.run = folder.absolute(), run  # another process may use it, from another working directory

    def save(self, step: int, state: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = [self.run, *codec.pieces(state)]
        checksum = hashlib.sha256()
        for part in parts:
            checksum.update(part)
        write_atomic(self.folder / f"{step:07d}.tag", checksum.digest(), *parts)

    def load(self, step: int, record: type[Record]) -> Record:
        path = self.folder / f"{step:07d}.tag"
        try:
            raw = memoryview(path.read_bytes())
            if hashlib.sha256(raw[_DIGEST:]).digest() != raw[:_DIGEST]:
                raise ProtocolError("checksum differs")
            if raw[_DIGEST : _DIGEST + _RUN_ID] != self.run:
                raise DataError(
                    f"checkpoint {self.folder.name}/{path.name} is of another run: take it out of this folder"
                )
            return codec.decode(raw[_DIGEST + _RUN_ID :].tobytes(), record, CHECKPOINT_LIMITS)
        except (OSError, ProtocolError) as error:
            raise DataError(f"checkpoint {self.folder.name}/{path.name} is damaged ({error})") from None

    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(int(path.stem) for path in self.folder.glob("*.tag") if path.stem.isdigit()))

    def forget(self, keep: Sequence[int]) -> None:
        for step in self.steps():
            if step not in keep:
                (self.folder / f"{step:07d}.tag").unlink(missing_ok=True)
        for left in self.folder.glob(".*.tmp"):  # of a process that was killed while writing
            left.unlink(missing_ok=True)


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, config: str, scenario: Mapping[str, Any]) -> RunFolder:
        """Make a new folder. Refuses one that already holds a run."""
        folder = cls(path)
        folder.refuse_used()
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.lock()
            folder.refuse_used()  # another process may have been faster
            (path / "ledger").mkdir(exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            (path / "scenario.json").write_text(json.dumps(scenario))
            write_atomic(path / "run-id", secrets.token_hex(_RUN_ID).encode())
            write_atomic(path / "config.toml", config.encode())
        except OSError as error:
            folder.close()
            raise ConfigError(f"cannot write the run folder {path}: {error.strerror}; choose another --out") from None
        except BaseException:
            folder.close()
            raise
        return folder

    def refuse_used(self) -> None:
        """Raise if the folder holds a run or files of one: two runs in one folder would mix."""
        path = self.path
        try:
            if (path / "config.toml").exists():
                raise ConfigError(
                    f"{path} already holds a run: continue it with `isthmus resume {path}`, choose another --out, or "
                    "replace it with --overwrite"
                )
            if (path / "metrics.jsonl").exists() or (path / "result.json").exists() or self._segments():
                raise ConfigError(f"{path} holds files of a run: delete them or choose another --out")
        except OSError as error:
            raise ConfigError(f"cannot use the run folder {path}: {error.strerror}; choose another --out") from None

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that was started before, locked."""
        folder = cls(path)
        try:
            check_run_folder(path)
            folder.lock()
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {path}: {error.strerror}; make it writable") from None
        return folder

    def lock(self) -> None:
        """Let only one process work on a run. The lock ends with the process."""
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise RunError(f"{self.path} is in use by another process; wait for it or stop it") from None
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def config(self) -> str:
        try:
            return (self.path / "config.toml").read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path / 'config.toml'} cannot be read ({error}); start the run again") from None

    @property
    def run_id(self) -> bytes:
        """Distinguishes this run's checkpoints from those of any other."""
        try:
            found = bytes.fromhex((self.path / "run-id").read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path / 'run-id'} cannot be read ({error}); start the run again") from None
        if len(found) != _RUN_ID:
            raise DataError(f"{self.path / 'run-id'} is damaged; start the run again")
        return found

    def store(self, party: PartyId) -> FileStore:
        return FileStore(self.path / "checkpoints" / party.replace("/", "."), self.run_id)

    def keep_last_checkpoint(self, before_last: bool = False) -> None:
        """Of a finished run: what more rounds can begin from.

        Args:
            before_last: Also the checkpoint before the last.
        """
        for party in (self.path / "checkpoints").glob("*"):
            store = FileStore(party)
            store.forget(keep=store.steps()[-2 if before_last else -1 :])

    def drop_checkpoints(self) -> None:
        """Of a finished run that nobody will give more rounds."""
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)

    def reopen(self, config: str, *, repeat_last: bool) -> None:
        """Let a finished run go on with other settings. Stopped in between, it is continued with the old ones.

        Args:
            repeat_last: The last round is repeated: it would not have been evaluated.
        """
        (self.path / "result.json").unlink(missing_ok=True)
        for party in (self.path / "checkpoints").glob("*") if repeat_last else ():
            store = FileStore(party)
            store.forget(keep=store.steps()[:-1])
        write_atomic(self.path / "config.toml", config.encode())

    def clear(self) -> None:
        """Remove the run that is in this folder, and nothing else."""
        if not self.path.is_dir():
            return
        try:
            self.lock()
            for name in FILES:
                (self.path / name).unlink(missing_ok=True)
            for name in FOLDERS:
                if (self.path / name).is_dir():
                    shutil.rmtree(self.path / name)
        except OSError as error:
            raise ConfigError(f"cannot clear the run folder {self.path}: {error.strerror}; choose another") from None
        finally:
            self.close()

    # -- written in every round --------------------------------------------------------------------

    def append_round(self, step: int, entries: Iterable[Entry], metrics: Mapping[str, Any] | None) -> None:
        text = "".join(entry.to_json() + "\n" for entry in entries)
        (self.path / "ledger" / f"{step:06d}.jsonl").write_text(text)
        if metrics is not None:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")

    def keep_left_out(self, content: str, parties: Sequence[PartyId]) -> None:
        """Who was not in a sum when it was first confirmed; not removed with rounds that will be repeated."""
        line = json.dumps({"sum": content, "left_out": list(parties)})
        with (self.path / LEFT_OUT).open("a") as file:
            file.write(f"\n{line}")  # its own line, also after one that a crash has cut short
            file.flush()
            os.fsync(file.fileno())

    def left_out(self) -> dict[str, tuple[PartyId, ...]]:
        """What :meth:`keep_left_out` has kept."""
        path, found = self.path / LEFT_OUT, dict[str, tuple[PartyId, ...]]()
        for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                line = json.loads(text)
                found[line["sum"]] = tuple(line["left_out"])
        return found

    def truncate(self, step: int) -> None:
        """Remove the rounds after a checkpoint: they will be repeated."""
        for number, path in self._segments().items():
            if number > step:
                path.unlink()
        lines = [json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step]
        write_atomic(self.path / "metrics.jsonl", "".join(lines).encode())

    def check(self, step: int, evaluated: Sequence[int]) -> None:
        """Raise unless metrics and ledger of all rounds up to ``step`` are there: they cannot be made up later."""
        if not set(evaluated) <= {line["step"] for line in self.metrics()}:
            raise DataError(f"{self.path / 'metrics.jsonl'} is damaged: rounds before checkpoint {step} are missing")
        if not set(range(1, step + 1)) <= self._segments().keys():
            raise DataError(f"{self.path / 'ledger'} is damaged: rounds before checkpoint {step} are missing")

    @property
    def begun(self) -> bool:
        """True once a round was committed."""
        return any(step > 0 for step in self._segments())  # segment 0 holds the preparation of tables

    def metrics(self) -> list[dict[str, Any]]:
        """Evaluated rounds, up to an incomplete line (a process killed while writing leaves one at the end)."""
        path = self.path / "metrics.jsonl"
        lines: list[dict[str, Any]] = []
        for text in path.read_text(errors="replace").splitlines() if path.exists() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                break
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                break
            lines.append(line)
        return lines

    def ledger(self, step: int | None = None) -> Iterable[Entry]:
        """Entries of all committed rounds, or of those up to ``step``."""
        for number, path in self._segments().items():
            if step is None or number <= step:
                try:
                    yield from [Entry.from_json(line) for line in path.read_text().splitlines()]
                except (ValueError, TypeError, AttributeError) as error:
                    raise DataError(f"{path} is damaged ({error})") from None

    def _segments(self) -> dict[int, Path]:
        """The ledger's files by step, in order."""
        return dict(
            sorted((int(path.stem), path) for path in (self.path / "ledger").glob("*.jsonl") if path.stem.isdecimal())
        )

    # -- written at the end ------------------------------------------------------------------------

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        write_atomic(self.path / name, (json.dumps(value, indent=2) + "\n").encode())

    def result(self) -> dict[str, Any] | None:
        path = self.path / "result.json"
        if not path.exists():
            return None
        try:
            result = json.loads(path.read_text())
        except ValueError:
            return None
        return result if isinstance(result, dict) else None
