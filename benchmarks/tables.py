"""Tables: reading a large owner's folder, and private set intersection of two owners' edges.

    python benchmarks/tables.py read [--nodes 1000000] [--edges 10000000]
    python benchmarks/tables.py link [--items 100000]

``read`` writes a folder of CSV files and reads it in a fresh process: seconds, CPU seconds, largest memory. ``link``
intersects two sets that share half of their items: CPU seconds and bytes of every step; whoever relays the sealed
messages sees these sizes and the two addresses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

from isthmus.privacy.psi import Receiver, answer

SCHEMA = """
[nodes]
file = "accounts.*"
id = "id"
label = "fraud"
classes = ["no", "yes"]
[features]
balance = { type = "number", scale = "log-standard" }
country = { type = "category", values = ["DE", "FR"] }
[edges]
file = "transfers.*"
source = "from"
target = "to"
directed = true
weight = "amount"
time = "day"
self_loops = "drop"
[edges.features]
in_count = true
out_sum = "amount"
out_mean = ["day", "amount"]
"""

READ = """
import json, resource, sys, time
from pathlib import Path
begun, cpu = time.perf_counter(), time.process_time()
from isthmus.data.tables.owner import read_owner
tables = read_owner(Path(sys.argv[1]), "owner", seed=0)
print(json.dumps({
    "nodes": tables.num_nodes, "edges": len(tables.edges.source),
    "seconds": round(time.perf_counter() - begun, 1), "cpu_seconds": round(time.process_time() - cpu, 1),
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
}))
"""


def read(nodes: int, edges: int) -> None:
    """Write and read one owner's folder."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "schema.toml").write_text(SCHEMA)
        ids = pl.Series([f"ACC{number:09d}" for number in range(nodes)])
        pl.DataFrame(
            {
                "id": ids,
                "fraud": np.where(draw.random(nodes) < 0.05, "yes", "no"),
                "balance": draw.lognormal(5, 2, nodes).round(2),
                "country": np.where(draw.random(nodes) < 0.5, "DE", "FR"),
            }
        ).write_csv(folder / "accounts.csv")
        pl.DataFrame(
            {
                "from": ids.gather(draw.integers(0, nodes, edges)),
                "to": ids.gather(draw.integers(0, nodes, edges)),
                "amount": draw.lognormal(3, 1, edges).round(2),
                "day": draw.integers(0, 100, edges),
            }
        ).write_csv(folder / "transfers.csv")
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        done = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True, check=True)
        facts = json.loads(done.stdout)
    print(
        f"read {facts['nodes']:,} nodes, {facts['edges']:,} edges ({size:.0f} MB of CSV): "
        f"{facts['seconds']} s, {facts['cpu_seconds']} CPU s, {facts['peak_mb']} MB at most"
    )


def link(items: int) -> None:
    """Intersect two sets of edges."""

    def edges(first: int) -> list[bytes]:
        return [hashlib.sha256(str(number).encode()).digest()[:16] for number in range(first, first + items)]

    mine, theirs = edges(0), edges(items // 2)
    begun = time.process_time()
    receiver = Receiver(mine)
    asked = time.process_time()
    reply = answer(theirs, receiver.request)
    answered = time.process_time()
    common = receiver.common(reply)
    done = time.process_time()
    right = common == list(range(items // 2, items))
    print(
        f"link {items:,} by {items:,} edges: request {asked - begun:.1f} CPU s, {len(receiver.request):,} bytes; "
        f"answer {answered - asked:.1f} CPU s, {len(reply):,} bytes; reading {done - answered:.1f} CPU s; "
        f"{len(common):,} in common, {'right' if right else 'WRONG'}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["read", "link"])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--items", type=int, default=100_000)
    given = parser.parse_args()
    if given.what == "read":
        read(given.nodes, given.edges)
    else:
        link(given.items)
