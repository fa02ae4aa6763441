"""FedGGR's graph: time and memory of finding neighbours, and of one pass of the server, as ratios within one run.
Seconds are those of the processor, on one thread: other work on the machine does not count.

    python benchmarks/fedggr_graph.py [--dataset pubmed] [--k 20] [--largest 200000] [--json]

Part 1, on a data set's features in a random projection: neighbours in blocks against the dense similarity matrix, each
in a process of its own: seconds, extra memory (peak above what was in use before), and whether the edges are the same.
Then forward and backward of the server's module, through chosen pairs only against through the dense matrix (on a part
of the nodes, where that fits).
Part 2, on generated nodes in communities: the approximate search while nodes double up to the largest, with its recall
on a sample.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.data.scenario import build_scenario
from isthmus.graph.ann import approximate
from isthmus.graph.knn import exact
from isthmus.nn.autoencoder import FeatureTask, project
from isthmus.nn.learned_graph import Adjacency, Pattern, generate, non_negative
from isthmus.seeds import Stream

WIDTH = 64
DENSE_NODES = 4000
SAMPLE = 1000


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def now_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def dense_neighbours(rows: Tensor, k: int) -> Tensor:
    """Every similarity at once."""
    similar = rows @ rows.mT
    similar.fill_diagonal_(2.0)
    return similar.topk(k + 1, dim=1).indices


def generated(nodes: int) -> Tensor:
    """Unit rows around a centre for every 50 nodes."""
    generator = torch.Generator().manual_seed(nodes)
    centres = torch.randn(max(1, nodes // 50), WIDTH, generator=generator)
    return torch.nn.functional.normalize(
        centres[torch.arange(nodes) % len(centres)] + 0.5 * torch.randn(nodes, WIDTH, generator=generator)
    )


def worker(how: str, source: Path, k: int, target: Path) -> dict[str, Any]:
    """One search in this process: seconds and memory beyond what was there before."""
    rows = torch.load(source, weights_only=True)
    search = {"blocks": exact, "dense": dense_neighbours, "approximate": approximate}[how]
    search(rows[:2000].clone(), k)  # compile and load first
    before, begun = now_mb(), time.process_time()
    found = search(rows, k)
    seconds = time.process_time() - begun
    torch.save(found, target)
    return {"search": how, "nodes": len(rows), "seconds": round(seconds, 2), "extra_mb": round(peak_mb() - before, 1)}


def apart(how: str, rows: Tensor, k: int) -> tuple[dict[str, Any], Tensor]:
    """`worker` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "rows.pt", Path(folder) / "found.pt"
        torch.save(rows, source)
        command = [sys.executable, __file__, "--worker", how, str(source), str(k), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1]), torch.load(target, weights_only=True)


def same_edges(a: Tensor, b: Tensor) -> float:
    """Share of rows with the same neighbours; ties may be broken either way in a dense product of floats."""
    return float((a.sort(1).values == b.sort(1).values).all(1).double().mean())


def one_pass(rows_of: Tensor, k: int, *, dense: bool) -> tuple[float, Tensor]:
    """Forward and backward of A* h once, and the gradient of w1."""
    w1, w2 = torch.ones(WIDTH, requires_grad=True), torch.ones(WIDTH)
    h = torch.randn(len(rows_of), WIDTH, generator=torch.Generator().manual_seed(0))
    neighbours = exact(generate(rows_of, w1, w2), k)
    pattern = Pattern.of(neighbours)
    begun = time.process_time()
    rows = generate(rows_of, w1, w2)
    if dense:
        mask = torch.zeros(len(rows), len(rows), dtype=torch.bool).scatter_(1, neighbours, True)
        chosen = torch.where(mask, non_negative(rows @ rows.mT), 0.0)
        symmetric = (chosen + chosen.mT) / 2
        scale = symmetric.sum(1).rsqrt()
        out = scale[:, None] * (symmetric @ (scale[:, None] * h))
    else:
        out = Adjacency.of(pattern, rows) @ h
    out.square().sum().backward()
    assert w1.grad is not None
    return time.process_time() - begun, w1.grad


def part_one(dataset: str, k: int) -> dict[str, Any]:
    scenario = build_scenario(dataset=dataset, clients=3, partition="random-equal")
    task = FeatureTask.of(scenario.whole, hops=False)
    rows = generate(project(task, WIDTH, Stream(0)), torch.ones(WIDTH), torch.ones(WIDTH))
    blocks, found = apart("blocks", rows, k)
    dense, expected = apart("dense", rows, k)
    few = rows[:DENSE_NODES].clone()
    one_pass(few[:500], k, dense=False)
    (quick, gradient), (slow, right) = one_pass(few, k, dense=False), one_pass(few, k, dense=True)
    return {
        "dataset": dataset,
        "blocks": blocks,
        "dense": dense,
        "same_rows": same_edges(found, expected),
        "memory_ratio": round(dense["extra_mb"] / max(1.0, blocks["extra_mb"]), 1),
        "pass": {
            "nodes": len(few),
            "pairs_seconds": round(quick, 3),
            "dense_seconds": round(slow, 3),
            "gradient_difference": float((gradient - right).abs().max() / right.abs().max()),
        },
    }


def part_two(largest: int, k: int) -> list[dict[str, Any]]:
    lines = []
    for nodes in (largest // 8, largest // 4, largest // 2, largest):
        rows = generated(nodes)
        line, found = apart("approximate", rows, k)
        sample = torch.randperm(nodes, generator=torch.Generator().manual_seed(1))[:SAMPLE]
        similar = rows[sample] @ rows.mT
        similar[torch.arange(len(sample)), sample] = 2.0
        right = similar.topk(k + 1, dim=1).indices
        hits = sum(len(set(a) & set(b)) for a, b in zip(found[sample].tolist(), right.tolist(), strict=True))
        lines.append({**line, "recall": round(hits / right.numel(), 4)})
        if len(lines) > 1:
            lines[-1]["growth"] = round(lines[-1]["seconds"] / max(1e-9, lines[-2]["seconds"]), 2)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="pubmed")
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--largest", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.worker:
        how, source, k, target = given.worker
        print(json.dumps(worker(how, Path(source), int(k), Path(target))))
        return
    result = {"exact": part_one(given.dataset, given.k), "approximate": part_two(given.largest, given.k)}
    if given.json:
        print(json.dumps(result))
        return
    first = result["exact"]
    assert isinstance(first, dict)
    print(f"{first['dataset']}, {first['blocks']['nodes']} nodes, k = {given.k}")
    for line in (first["blocks"], first["dense"]):
        print(f"  {line['search']:12s} {line['seconds']:8.2f} s  {line['extra_mb']:8.1f} MB extra")
    print(
        f"  same neighbours in {100 * first['same_rows']:.3f} % of the rows; dense takes {first['memory_ratio']} times "
        "the memory"
    )
    step = first["pass"]
    print(
        f"  forward and backward, {step['nodes']} nodes: chosen pairs {step['pairs_seconds']} s, dense "
        f"{step['dense_seconds']} s, "
        f"gradients differ by {step['gradient_difference']:.1e}"
    )
    print("approximate search on generated nodes")
    for line in result["approximate"]:
        growth = f"  {line['growth']} times the time" if "growth" in line else ""  # type: ignore[operator]
        print(
            f"  {line['nodes']:8d} nodes {line['seconds']:8.2f} s  {line['extra_mb']:8.1f} MB extra  recall "
            f"{line['recall']}{growth}"
        )


if __name__ == "__main__":
    main()
