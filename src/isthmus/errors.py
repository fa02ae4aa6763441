"""Errors we raise on purpose.

Each carries the exit code the command line ends with, so a mistake made deep inside the library reaches
a person as one line and a script as a number (architecture, section 6).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class IsthmusError(Exception):
    """Base of everything we raise on purpose. The message says what to do next."""

    exit_code = 1


class ConfigError(IsthmusError):
    """A flag, key, name or value that cannot be used."""

    exit_code = 2


class DataError(IsthmusError):
    """Data that is missing, damaged, or not what it claims to be (checkpoints included)."""

    exit_code = 3


class RunError(IsthmusError):
    """A run that could not go on: lost quorum, failed handler, full disk."""

    exit_code = 4


class ProtocolError(RunError):
    """A message that is malformed, oversized, undeclared or out of turn."""


def unknown(what: str, given: str, allowed: Iterable[str], *, error: type[IsthmusError] = ConfigError) -> IsthmusError:
    """The error for an unknown name: quotes it, names the nearest valid one, lists what is allowed."""
    names = sorted(allowed)
    near = [name for name in names if len(given) > 1 and name.startswith(given)]
    near = near or difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return error(f"unknown {what} {given!r}: {hint}allowed: {', '.join(names) or '(none)'}")
