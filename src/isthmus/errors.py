"""Errors we raise on purpose.

Each carries the exit code the command line ends with, so a mistake made deep inside the library reaches
a person as one line and a script as a number (architecture, section 6).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class IsthmusError(Exception):
    """Base of everything we raise on purpose. The message says what to do next."""

    exit_code = 1

    def __str__(self) -> str:
        """One line of printable characters: parts of it may be another party's, and it is shown in terminals and logs,
        where control characters would make lines that nobody wrote.
        """
        return "".join(one if one.isprintable() else " " for one in super().__str__())


class ConfigError(IsthmusError):
    """A flag, key, name or value that cannot be used."""

    exit_code = 2


class DataError(IsthmusError):
    """Data that is missing, damaged, or not what it claims to be (checkpoints included)."""

    exit_code = 3


class RunError(IsthmusError):
    """A run that could not go on: lost quorum, failed handler, full disk."""

    exit_code = 4


class StorageError(RunError):
    """Nothing could be kept: a disk that is full or has failed. Once that is set right, another attempt helps."""


class ProtocolError(RunError):
    """A message that is malformed, oversized, undeclared or out of turn."""


def unknown(what: str, given: str, allowed: Iterable[str], *, error: type[IsthmusError] = ConfigError) -> IsthmusError:
    """The error for an unknown name: quotes it, names the nearest valid one, lists what is allowed."""
    names = sorted(allowed)
    near = [name for name in names if len(given) > 1 and name.startswith(given)]
    near = near or difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return error(f"unknown {what} {given!r}: {hint}allowed: {', '.join(names) or '(none)'}")


def check_run_folder(path: Path) -> None:
    """Refuse what is no folder of a run."""
    if not (path / "config.toml").is_file():
        raise DataError(f"{path} is not a run folder (no config.toml); start one with `isthmus run`")


def no_federation(path: Path) -> ConfigError:
    """The error for a folder that holds no federation."""
    return ConfigError(f"{path} holds no federation (no federation.toml): make one with `isthmus server init`")


def no_tables(dataset: str) -> DataError:
    """The error for a data set that names a folder which is not there."""
    return DataError(f"there is no folder {dataset}: a data set with a slash is a folder of tables, or a .pt file")


def no_package(path: Path, hint: str = "") -> DataError:
    """The error for a folder without a model package."""
    return DataError(f"{path} holds no model package, that is a folder with model.toml{hint}")
