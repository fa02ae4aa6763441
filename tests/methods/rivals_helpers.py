"""Small runs of SCAFFOLD, Ditto, MOON, FedProto, FedGTA, FED-PUB, FedTAD and AdaFGL for their tests."""

from __future__ import annotations

from typing import Any

from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.tensors import Weights, equal_weights, weighted_mean

RIVALS = ("scaffold", "ditto", "moon", "fedproto", "fedgta", "fedpub", "fedtad", "adafgl")
SMALL: dict[str, Any] = {
    "dataset": "csbm:nodes=120,classes=3,features=16,degree=4",
    "partition": "dirichlet:alpha=1",
    "split": "50/20/30",
    "clients": 5,
    "seed": 3,
    "rounds": 3,
    "hidden": (8,),
    "dropout": 0.0,
    "preset": "fedstruct",
    "head": False,
    "execution": "each",
}
FEW: dict[str, dict[str, Any]] = {
    "adafgl": {"extractor_rounds": 2, "head_width": 6},
    "fedpub": {"proxy_nodes": 10, "proxy_graphs": 2},
    "fedtad": {"distil_epochs": 1, "model_steps": 2, "pseudo_nodes": 12},
}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "precision": "float64"}


def start(method: str, **settings: Any) -> SimulatedRun:
    resolved = resolve(method, {**SMALL, **FEW.get(method, {}), **settings})
    return SimulatedRun(resolved, scenario_of(resolved))


def play(method: str, **settings: Any) -> SimulatedRun:
    experiment = start(method, **settings)
    experiment.loop.play()
    return experiment


def clients_of(experiment: SimulatedRun) -> list[Any]:
    return [experiment.engine.party(name).client for name in experiment.engine.parties("client")]


def models(experiment: SimulatedRun) -> dict[str, Weights]:
    return {client: export.weights or {} for client, export in experiment.engine.export(selected=False)}


def same(a: SimulatedRun, b: SimulatedRun) -> bool:
    ours, theirs = models(a), models(b)
    return ours.keys() == theirs.keys() and all(equal_weights(ours[client], theirs[client]) for client in ours)


def mean_of(items: list[Weights]) -> Weights:
    return weighted_mean(items, [1.0 / len(items)] * len(items))
