"""Predictions for a large graph from one model package: seconds and peak memory, in blocks and all nodes at once.

    python benchmarks/predict_large.py --nodes 1000000 --features 32 --degree 5
    python benchmarks/predict_large.py --nodes 1000000 --features 32 --degree 5 --whole

A FedAvg model is trained on a small graph of the same features first. Edges join uniformly drawn nodes, the worst case
for blocks: nothing is near anything. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch

import isthmus
from isthmus.data.node_data import NodeData
from isthmus.methods import learners
from isthmus.seeds import Stream


def graph(nodes: int, features: int, degree: int) -> NodeData:
    generator = Stream(0, ("large",)).torch()
    source = torch.randint(0, nodes, (nodes * degree,), generator=generator)
    target = torch.randint(0, nodes, (nodes * degree,), generator=generator)
    nobody = torch.zeros(nodes, dtype=torch.bool)
    return NodeData(
        x=torch.randn(nodes, features, generator=generator),
        edge_index=torch.stack([torch.cat([source, target]), torch.cat([target, source])]),
        y=torch.full((nodes,), -1),
        train=nobody,
        val=nobody,
        test=nobody,
        node_id=torch.arange(nodes),
        num_classes=4,
    )


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--degree", type=int, default=5)
    parser.add_argument("--backbone", default="gcn")
    parser.add_argument("--whole", action="store_true", help="all nodes at once, for comparison")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.whole:
        learners.BLOCK = given.nodes
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "r"
        small = f"csbm:nodes=2000,features={given.features}"
        isthmus.run(
            "fedavg", dataset=small, clients=2, rounds=2, backbone=given.backbone, hidden=64, out=out, quiet=True
        )
        models = isthmus.load_models(out / "models" / "client-0")
        data = graph(given.nodes, given.features, given.degree)
        before, begun = peak_mb(), time.perf_counter()
        found = models.predict(data=data)["client-0"]
        seconds = time.perf_counter() - begun
    line = {"nodes": len(found), "arcs": int(data.edge_index.shape[1]), "features": given.features}
    line |= {"backbone": given.backbone, "whole": given.whole, "seconds": round(seconds, 1)}
    print(json.dumps(line | {"peak_mb_with_data": round(before), "peak_mb": round(peak_mb())}))


if __name__ == "__main__":
    main()
