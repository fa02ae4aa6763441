"""Settings of the papers' experiments, one TOML file per paper, as layers with conditions.

Each ``[[layer]]`` applies when all its conditions hold (``dataset``, ``backbone``, ``profile``, ``method``: a name or a
list of names); later layers win. ``score`` names the rule that forms the number the paper reports.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from isthmus.errors import unknown

CONDITIONS = ("dataset", "backbone", "profile", "method")


@dataclass(frozen=True)
class Preset:
    """One paper's settings."""

    name: str
    title: str
    score: str
    layers: tuple[Mapping[str, Any], ...]

    def values(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a run of which ``facts`` are known."""
        values: dict[str, Any] = {}
        for layer in self.layers:
            if all(_holds(layer[name], facts.get(name)) for name in CONDITIONS if name in layer):
                values |= layer["set"]
        return values


def _holds(wanted: Any, fact: Any) -> bool:
    return fact in wanted if isinstance(wanted, list) else fact == wanted


def preset_names() -> list[str]:
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in resources.files(__name__).iterdir()
        if entry.name.endswith(".toml")
    )


def load_preset(name: str) -> Preset:
    """Read a preset by the name of its paper."""
    if name not in preset_names():
        raise unknown("preset", name, preset_names())
    raw = tomllib.loads(resources.files(__name__).joinpath(f"{name}.toml").read_text())
    return Preset(name, raw["title"], raw["score"], tuple(raw["layer"]))
