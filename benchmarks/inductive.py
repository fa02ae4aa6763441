"""Nodes that come after training: a fifth of all nodes is held out with all their edges, the five systems are trained
on the rest, then the nodes and their edges are added and predicted from the model packages, without training again.
Beside it a transductive run that has all nodes and edges in training (never the labels of the held-out nodes).

    python benchmarks/inductive.py cora --rounds 60
    python benchmarks/inductive.py amlsim-cycle --rounds 150 --preset general --metric auprc --split stratified:40/20/40

Held-out nodes are drawn from the test part, so that no run trains on their labels. Prints one JSON object per system.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.data.whole_graph import select_rows
from isthmus.experiments.config import resolve
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.models import load_models
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.experiments.variants import first_variant
from isthmus.methods.evaluation import detail
from isthmus.metrics.registry import METRICS
from isthmus.seeds import Stream

SYSTEMS = ("fedstruct", "fedggr", "hifgl", "fedspray", "fedstar")
SHARE = 0.2
MORE: Mapping[str, Mapping[str, Any]] = {"hifgl": {"secmp": "plain"}}
"""The sums are the same with secmp=hardened, which takes longer."""


def held_out(parts: Mapping[str, NodeData], seed: int) -> dict[str, Tensor]:
    """Masks of the nodes that come later: a fifth of all, drawn from the test part."""
    found = {}
    for client, data in parts.items():
        test = torch.nonzero(data.test).flatten()
        count = min(len(test), round(SHARE * data.num_nodes))
        chosen = test[torch.randperm(len(test), generator=Stream(seed, ("held out", client)).torch())[:count]]
        found[client] = torch.zeros(data.num_nodes, dtype=torch.bool)
        found[client][chosen] = True
    return found


def without(parts: Mapping[str, NodeData], gone: Mapping[str, Tensor]) -> dict[str, NodeData]:
    """Every owner's data without these nodes and without their edges."""
    ids = torch.cat([data.node_id[gone[client]] for client, data in parts.items()])
    found = {}
    for client, data in parts.items():
        keep = torch.nonzero(~gone[client]).flatten()
        rows = torch.full((data.num_nodes,), -1)
        rows[keep] = torch.arange(len(keep))
        ends = rows[data.edge_index]
        cross = data.cross
        if cross is not None:
            left = (rows[cross.own] >= 0) & ~torch.isin(cross.other, ids)
            names = ("owner", "other", "outgoing", "weight")
            cross = replace(cross, own=rows[cross.own[left]], **{name: getattr(cross, name)[left] for name in names})
        per_node = {name: getattr(data, name)[keep] for name in ("y", "train", "val", "test", "node_id")}
        inside = ends[:, (ends >= 0).all(0)]
        found[client] = replace(data, x=select_rows(data.x, keep), edge_index=inside, cross=cross, **per_node)
    return found


def score(found: Mapping[str, Tensor], parts: Mapping[str, NodeData], gone: Mapping[str, Tensor]) -> dict[str, Any]:
    """Of the held-out nodes of all owners together."""
    logits = torch.cat([found[client][gone[client]] for client in parts]).clamp(min=1e-12).log()
    y = torch.cat([data.y[gone[client]] for client, data in parts.items()])
    counts = detail(logits, y, {"new": torch.ones_like(y, dtype=torch.bool)})
    numbers = counts.confusion["new"], counts.histogram["new"]
    return {
        "accuracy": float((logits.argmax(1) == y).double().mean()),
        "auprc": METRICS["auprc"](*numbers),
        "nodes": len(y),
    }


def trained(settings: Any, scenario: Any, folder: Path) -> None:
    with SimulatedRun(settings, scenario) as run:
        run.scenario = None  # facts that need the whole graph are not wanted
        run.play(RunFolder.create(folder, run.settings.to_toml(), {}), resumed=False)


def compare(system: str, dataset: str, rounds: int, seed: int, more: Mapping[str, Any]) -> dict[str, Any]:
    given = {"dataset": dataset, "rounds": rounds, "seed": seed, **more, **MORE.get(system, {})}
    settings = first_variant(resolve(system, given))
    scenario: Any = scenario_of(settings)
    gone = held_out(scenario.parts, seed)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        early, whole = Path(place) / "early", Path(place) / "whole"
        trained(settings, replace(scenario, parts=without(scenario.parts, gone)), early)
        trained(settings, scenario, whole)
        cross = settings.method.cross_edges
        parts = {c: data if cross else data.without_cross() for c, data in scenario.parts.items()}
        line: dict[str, Any] = {"system": system, "dataset": dataset, "rounds": rounds, "seed": seed}
        for name, folder in (("inductive", early), ("transductive", whole)):
            found = load_models(folder).predict(data=parts)
            line[name] = score({client: one.probability for client, one in found.items()}, scenario.parts, gone)
    return line | {"seconds": round(time.perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    for name in ("preset", "metric", "split", "mode"):
        parser.add_argument(f"--{name}", help="a setting of the runs" + (", of hifgl" if name == "mode" else ""))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for system in given.systems.split(","):
        names = ("preset", "metric", "split", *(("mode",) if system == "hifgl" else ()))
        more = {name: value for name in names if (value := getattr(given, name)) is not None}
        print(json.dumps(compare(system, given.dataset, given.rounds, given.seed, more)), flush=True)


if __name__ == "__main__":
    main()
