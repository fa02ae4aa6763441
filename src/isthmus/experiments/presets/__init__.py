"""Settings of the papers' experiments, one TOML file per paper, and ``general`` for data of no paper, as layers with
conditions.

Each ``[[layer]]`` applies when all its conditions hold (``task``, ``dataset``, ``backbone``, ``nsf``, ``profile``,
``method``, ``variant``: a name or a list of names); later layers win. ``score`` names the rule that forms the number
the paper reports, ``datasets`` the data sets it reports it for. Layers with a ``variant`` are alternatives of a method,
of which validation chooses one (`isthmus.experiments.variants`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from isthmus.errors import unknown

CONDITIONS = ("task", "dataset", "backbone", "nsf", "profile", "method", "variant")
GENERAL = "general"


@dataclass(frozen=True)
class Preset:
    """One paper's settings."""

    name: str
    title: str
    score: str
    layers: tuple[Mapping[str, Any], ...]
    datasets: tuple[str, ...] = ()

    def values(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a run of which ``facts`` are known."""
        values: dict[str, Any] = {}
        for layer in self.layers:
            if all(_holds(layer[name], facts.get(name)) for name in CONDITIONS if name in layer):
                values |= layer["set"]
        return values

    def variants(self, method: str) -> dict[str, dict[str, Any]]:
        """What the variants of a method set, by name; empty where it has none."""
        return {
            layer["variant"]: dict(layer["set"])
            for layer in self.layers
            if "variant" in layer and _holds(layer["method"], method)
        }


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
    return Preset(name, raw["title"], raw["score"], tuple(raw["layer"]), tuple(raw.get("datasets", ())))


def default_preset(paper: str | None, dataset: str, task: str, profile: str | None) -> str:
    """The preset of a run that names none: the method's paper's on that paper's data sets, else the general one.

    Args:
        paper: The method's paper; None for a baseline.
        dataset: Name of the data set, in registry spelling.
        profile: Where one is given, a paper is meant: for a baseline FedStruct's on nodes and FedStar's on graphs.
    """
    if profile is not None:
        return paper or {"node": "fedstruct", "graph": "fedstar"}[task]
    return paper if paper is not None and dataset in load_preset(paper).datasets else GENERAL
