"""A method with settings that are sensible on data nobody has tuned it for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMMON: Mapping[str, Any] = {"selection": "best_val_acc", "eval_every": 2, "rounds": 100}
SAGE: Mapping[str, Any] = {
    "backbone": "sage",
    "hidden": (64,),
    "lr": 0.01,
    "weight_decay": 5e-4,
    "dropout": 0.5,
}
"""GraphSAGE, which has a path of its own for a node's own features."""


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
    # What a plan does not say is of a preset it names, so that a plan means the same on all data: as it was measured.
    preset = method if method in ("hifgl", "fedspray", "fedggr") else "fedstruct"
    return Plan(name, method, {"preset": preset, **COMMON, **settings})


PLANS: Mapping[str, Plan] = {
    plan.name: plan
    for plan in (
        _plan("local", "local", **SAGE),
        _plan("fedavg", "fedavg", **SAGE),
        _plan("fedavg-mlp", "fedavg", **{**SAGE, "backbone": "mlp"}),
        _plan("fedsgd", "fedsgd", **SAGE),
        _plan("fedper", "fedper", **SAGE),
        _plan("fedgcn", "fedgcn", backbone="gcn", hidden=(64,), lr=0.01, weight_decay=5e-4, dropout=0.5),
        # Far neighbourhoods in a learnt embedding of the structure: the paper's own kind, with fewer hops.
        _plan("fedstruct", "fedstruct", backbone="dgcn", structure_hops=4, lr=0.005, dropout=0.5),
        # Two hops read directly, beside GraphSAGE.
        _plan("fedstruct-direct", "fedstruct", **SAGE, structure_hops=2, form="direct", nsf_lr=0.03),
        _plan(
            "hifgl",
            "hifgl",
            **SAGE,
            mode="cross-silo",
            lr_decay=1.0,
            algorithm="fedsgd",
            weighting="train",
        ),
        _plan("fedspray", "fedspray", **SAGE, encoder_lr=0.01, lambda1=1.0),
        _plan(
            "fedggr",
            "fedggr",
            **SAGE,
            encoder="projection",
            encoder_hops=False,
            embedding_width=64,
            embedding_norm="standard",
            k=5,
        ),
    )
}
"""For one graph, by name."""
GRAPH_PLANS: Mapping[str, Plan] = {
    name: Plan(name, name, {"preset": "fedstar", "selection": "best_val_acc"})
    for name in ("local", "fedavg", "fedstar", "gcflplus", "fedsage")
}
"""For sets of graphs: with the settings of FedStar's paper, which is about them."""
