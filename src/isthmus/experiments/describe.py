"""The settings of a method, for people: key, default and meaning, read from the config classes and their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass
from typing import Any

from isthmus.experiments.config import RunConfig
from isthmus.methods.registry import get_method

_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.+)")


@dataclass(frozen=True)
class Setting:
    """One key; ``group`` is ``method`` or ``run``, ``default`` that without a preset (None: none)."""

    group: str
    key: str
    default: Any
    meaning: str


def settings_of(method: str) -> list[Setting]:
    """Everything ``--set`` takes for a method, its own settings first."""
    found, entry = [], get_method(method)
    for group, config in (("method", entry.config), ("run", RunConfig)):
        meanings = {name: text for cls in reversed(config.__mro__) for name, text in documented(cls).items()}
        for field in dataclasses.fields(config):
            if field.name == "method":
                continue
            default = None if field.default is dataclasses.MISSING else field.default
            if field.name == "preset":
                default = entry.preset
            found.append(Setting(group, field.metadata.get("key", field.name), default, meanings.get(field.name, "")))
    return found


def documented(cls: type) -> dict[str, str]:
    """Meaning of each argument in the class's own docstring: ``name, name: text``, continued on deeper lines."""
    _, _, section = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("Args:\n")
    entries: list[str] = []
    for line in section.split("\n\n")[0].splitlines():
        if line.startswith(" " * 8) and entries:
            entries[-1] += f" {line.strip()}"
        elif line.startswith(" " * 4):
            entries.append(line.strip())
    meanings: dict[str, str] = {}
    for entry in entries:
        if match := _ENTRY.fullmatch(entry):
            meanings |= dict.fromkeys(match[1].split(", "), match[2].replace("`", ""))
    return meanings
