"""One run on a large generated graph: seconds and peak memory of building the scenario, of setting up, and of a round.

    python benchmarks/large.py --method fedavg --nodes 1000000 --clients 10
    python benchmarks/large.py --method central --nodes 1000000 --set batches=neighbours --set batch_size=1024
    python benchmarks/large.py --nodes 2400000 --degree 49.6 --features 100 --clients 10   # as large as ogbn-products

Peak memory is that of the process so far, imports included.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import isthmus


def peak() -> float:
    """Largest resident memory of this process so far, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--degree", type=float, default=10.0)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--partition", default="random")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    dataset = f"powerlaw:nodes={given.nodes},degree={given.degree},features={given.features}"
    flags: dict[str, Any] = dict(text.split("=", 1) for text in given.set)
    clock = time.process_time()

    def tell(what: str) -> None:
        nonlocal clock
        print(f"{what:<24} {time.process_time() - clock:9.2f} s CPU   peak {peak():6.2f} GB", flush=True)
        clock = time.process_time()

    class Teller(isthmus.Callback):
        """Says when something is done."""

        def on_start(self, settings: Any, folder: Path, step: int, steps: int) -> None:
            facts = json.loads((folder / "scenario.json").read_text())
            print(f"{facts['nodes']:,} nodes, {facts['edges']:,} arcs, {len(facts['clients'])} clients: {given.method}")
            tell("scenario, set-up")

        def on_round(self, *arguments: Any) -> None:
            tell("round, evaluated")

    fixed: dict[str, Any] = {"dataset": dataset, "partition": given.partition, "rounds": given.rounds, "threads": 1}
    clients = {} if given.method == "central" else {"clients": given.clients}
    tell("imports")
    with tempfile.TemporaryDirectory() as folder:
        result = isthmus.run(given.method, out=f"{folder}/run", callbacks=[Teller()], **fixed | clients | flags)
    tell("models, result")
    print(f"test {result['test']:.4f}")


if __name__ == "__main__":
    main()
