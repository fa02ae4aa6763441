"""A method with settings that are sensible on data nobody has tuned it for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What to run.

    Args:
        name: Name of the plan: the method's, with what distinguishes it where a method has several plans.
        method: The method.
        settings: Its settings.
    """

    name: str
    method: str
    settings: Mapping[str, Any]

    def words(self) -> str:
        """The settings as options of a command."""
        return " ".join(f"--set {key}={_text(value)}" for key, value in self.settings.items())


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plan(name: str, method: str, **settings: Any) -> Plan:
    # One preset for all: features on one scale, the same arcs and the same split whichever plan runs.
    return Plan(name, method, {"preset": "general", **settings})


PLANS: Mapping[str, Plan] = {
    plan.name: plan
    for plan in (
        _plan("local", "local"),
        _plan("fedavg", "fedavg"),
        _plan("fedavg-mlp", "fedavg", backbone="mlp"),
        _plan("fedsgd", "fedsgd"),
        _plan("fedper", "fedper"),
        _plan("fedgcn", "fedgcn"),
        # Structure of far neighbours, of links or of near ones, as validation says.
        _plan("fedstruct", "fedstruct"),
        _plan("hifgl", "hifgl", mode="cross-silo"),
        _plan("fedspray", "fedspray"),
        _plan("fedggr", "fedggr"),
    )
}
"""For one graph, by name."""
GRAPH_PLANS: Mapping[str, Plan] = {
    name: Plan(name, name, {"preset": "fedstar", "selection": "best_val_acc"})
    for name in ("local", "fedavg", "fedstar", "gcflplus", "fedsage")
}
"""For sets of graphs: with the settings of FedStar's paper, which is about them."""
