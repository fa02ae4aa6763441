"""Every method on graphs as strangers bring them, and with every kind of setting: what works, what is refused, how.

    python benchmarks/odd_data.py                    # all graphs and settings, all methods: some minutes
    python benchmarks/odd_data.py --methods fedavg hifgl --cases rare no-labels-at-one metric=auprc

A case that is no mistake of the user's must end with scores; a refusal must come before the first round. What broke is
listed last.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

import isthmus
from isthmus.errors import IsthmusError
from isthmus.methods.registry import all_methods

NODES, OWNERS, ROUNDS = 120, 3, 3
BASE = {"preset": "general", "split": "stratified:40/20/40", "rounds": ROUNDS}
Parts = dict[str, Any]


def parts(classes: int = 3, nodes: int = NODES, owners: int = OWNERS) -> Parts:
    """Features, classes, owners and arcs of a graph in which only the first column says something."""
    draw = np.random.default_rng(0)
    y = draw.integers(0, classes, nodes)
    x = draw.normal(size=(nodes, 5)).astype(np.float32)
    x[:, 0] += y
    return {
        "x": x,
        "y": y,
        "owner": draw.integers(0, owners, nodes),
        "edge_index": draw.integers(0, nodes, (2, 3 * nodes)),
    }


def changed(change: Callable[[Parts], Parts | None], **size: int) -> Callable[[], Parts]:
    """A graph with something odd about it."""

    def make() -> Parts:
        made = parts(**size)
        return made | (change(made) or {})

    return make


def kept(made: Parts, arcs: Any) -> Parts:
    return {"edge_index": made["edge_index"][:, arcs]}


def ends(made: Parts) -> Any:
    return made["owner"][made["edge_index"]]


def among(made: Parts, column: int, value: float) -> Parts:
    x = made["x"].copy()
    x[3, column] = value
    return {"x": x}


GRAPHS: dict[str, Callable[[], Parts]] = {
    "plain": parts,
    "rare": changed(lambda made: {"y": (np.arange(400) % 50 == 0).astype(np.int64)}, nodes=400),
    "one-class": changed(lambda made: {"y": np.zeros(NODES, np.int64)}),
    "thirty-classes": changed(lambda made: None, classes=30, nodes=300),
    "classes-with-gaps": changed(lambda made: {"y": made["y"] * 7 + 5}),
    "regression": changed(lambda made: {"y": np.linspace(0, 1, NODES)}),
    "no-features": changed(lambda made: {"x": np.zeros((NODES, 0), np.float32)}),
    "constant-feature": changed(lambda made: {"x": np.ones((NODES, 1), np.float32)}),
    "huge-feature": changed(lambda made: {"x": made["x"] * np.float32([1, 1e8, 1, 1, 1])}),
    "whole-number-features": changed(lambda made: {"x": (3 * made["x"]).astype(np.int64)}),
    "nan": changed(lambda made: among(made, 1, math.nan)),
    "infinite": changed(lambda made: among(made, 1, math.inf)),
    "weighted-edges": changed(lambda made: {"edge_weight": np.ones(3 * NODES)}),
    "no-edges": changed(lambda made: kept(made, slice(0, 0))),
    "no-cross-edges": changed(lambda made: kept(made, ends(made)[0] == ends(made)[1])),
    "cross-edges-only": changed(lambda made: kept(made, ends(made)[0] != ends(made)[1])),
    "no-edges-at-one": changed(lambda made: kept(made, (ends(made) != 1).all(0))),
    "isolated-nodes": changed(lambda made: kept(made, (made["edge_index"] < 80).all(0))),
    "edges-again-and-loops": changed(
        lambda made: {"edge_index": np.concatenate([made["edge_index"]] * 2 + [np.tile(np.arange(NODES), (2, 1))], 1)}
    ),
    "no-labels-at-one": changed(lambda made: {"y": np.where(made["owner"] == 1, -1, made["y"])}),
    "one-class-at-one": changed(lambda made: {"y": np.where(made["owner"] == 1, 2, made["y"])}),
    "one-node-at-one": changed(lambda made: {"owner": np.where(np.arange(NODES) == 40, 2, made["owner"] % 2)}),
    "two-owners": changed(lambda made: None, owners=2),
    "thirty-owners": changed(lambda made: None, owners=30),
}
SETTINGS: tuple[str, ...] = (
    *("metric=auprc", "metric=auroc", "metric=macro_f1", "metric=balanced_accuracy", "metric=recall@20"),
    *("class_weight=balanced", "patience=1", "schedule=cosine", "schedule=decay", "optimizer=adamw", "optimizer=sgd"),
    *("split=group:ring:40/20/40", "split=time:opened:40/20/40", "secure_sum=true", "selection=best_val_loss"),
    *("backbone=gcn", "batches=neighbours", "local_epochs=2", "input_norm=true", "undirected=false", "execution=each"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=[each.name for each in all_methods() if "node" in each.tasks])
    parser.add_argument("--cases", nargs="*", default=[*GRAPHS, *SETTINGS])
    given = parser.parse_args()
    broken = []
    for case in given.cases:
        ended: dict[str, list[str]] = {}
        for method in given.methods:
            how = outcome(method, case)
            ended.setdefault(how, []).append(method)
            broken += [f"{method} on {case}: {how}"] if how.startswith("broke") else []
        print(f"{case}: {len(ended.get('works', []))} of {len(given.methods)} work", flush=True)
        for how, names in ended.items():
            if how != "works":
                print(f"    {', '.join(names)}: {how}", flush=True)
    print(f"\n{len(broken)} broke", *broken, sep="\n")


def outcome(method: str, case: str) -> str:
    """``works``, ``no score``, ``refused: ...`` or ``broke: ...``."""
    key, _, value = case.partition("=")
    made = GRAPHS[case]() if case in GRAPHS else parts(classes=2)
    if case not in GRAPHS:
        made |= {"ring": np.arange(NODES) // 4, "opened": np.arange(NODES)}
    owner = [f"org-{number}" for number in made.pop("owner")]
    data = Data(**{name: torch.as_tensor(array) for name, array in made.items()}, owner=owner)
    settings = BASE | ({} if case in GRAPHS else {key: value})
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            result = isthmus.run(method, dataset=data, out=run, quiet=True, set=settings)
        except IsthmusError as error:
            text = str(error)
            began = (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0
            return f"broke: {text}" if began or " failed: " in text else f"refused: {text}"
        except Exception as error:
            return f"broke: {type(error).__name__}: {error}"
    scores = [result[name] for name in ("val", "test", "score")]
    return "works" if all(score is not None and math.isfinite(score) for score in scores) else "no score"


if __name__ == "__main__":
    main()
