"""One client that works against the others: FedAvg's accuracy with and without a bound on what a client can do.

    python benchmarks/poisoning.py [--dataset cora] [--clients 10] [--rounds 30] [--seeds 5] [--factors 10 50]
    python benchmarks/poisoning.py --steps        # lengths of steps where nobody attacks, to choose max_step

One client (another in every seed) trains as the others do and then sends ``received - b * update`` in the place of
``received + update``. Accuracy is the pooled test accuracy of the last round: a round picked by validation would be one
from before the damage. Every defence is run as users set it; those "behind masks" run with ``secure_sum=true``, where
the server sees totals only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.federation.engines.local import LocalEngine
from isthmus.methods.fedavg import Broadcast, Update
from isthmus.tensors import scaled

MAX_STEP = 0.5
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "median": {"aggregation": "median"},
    "trimmed mean, 0.2": {"aggregation": "trimmed"},
    "bounded": {"aggregation": "bounded"},
    f"max_step={MAX_STEP:g}": {"max_step": MAX_STEP},
    "masks, none": {"secure_sum": True},
    f"masks, max_step={MAX_STEP:g}": {"secure_sum": True, "max_step": MAX_STEP},
    "masks, 3 groups, median": {"secure_sum": True, "groups": 3, "aggregation": "median"},
    "masks, 3 groups, bounded": {"secure_sum": True, "groups": 3, "aggregation": "bounded"},
    f"masks, 3 groups, median, max_step={MAX_STEP:g}": {
        "secure_sum": True,
        "groups": 3,
        "aggregation": "median",
        "max_step": MAX_STEP,
    },
}


class Poisoned(LocalEngine):
    """Everything in one process; one client sends what harms the others."""

    def __init__(self, *arguments: Any, attacker: str, factor: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        client: Any = self.party(attacker).client
        honest = client.local_update

        def harm(common: Broadcast) -> Update:
            update: Update = honest(common)
            own = scaled(update.weights, 1.0 / update.share)
            sent = {name: received - factor * (own[name] - received) for name, received in common.weights.items()}
            return Update(scaled(sent, update.share), update.share)

        client.local_update = harm


def play(arguments: argparse.Namespace, seed: int, factor: float, **options: Any) -> SimulatedRun:
    """One run; nobody attacks with factor 0."""
    place = {"dataset": arguments.dataset, "partition": arguments.partition, "clients": arguments.clients, "seed": seed}
    settings = resolve("fedavg", {**place, "rounds": arguments.rounds, "execution": "each", **options})
    attack: dict[str, Any] = {}
    if factor:
        attack = {"engine": Poisoned, "attacker": f"client-{seed % arguments.clients}", "factor": factor}
    simulated = SimulatedRun(settings, scenario_of(settings), **attack)
    simulated.loop.play()
    return simulated


def table(arguments: argparse.Namespace) -> None:
    """Accuracy by defence: mean and standard deviation over seeds."""
    factors = [0.0, *arguments.factors]
    print("| defence | " + " | ".join("nobody attacks" if not b else f"b = {b:g}" for b in factors) + " |")
    print("|---" * (len(factors) + 1) + "|")
    rows = {name: given for name, given in DEFENCES.items() if arguments.only in name}
    for name, given in rows.items():
        begun, cells = time.perf_counter(), []
        for factor in factors:
            scores = [play(arguments, seed, factor, **given).loop.lines[-1]["test"] for seed in range(arguments.seeds)]
            cells.append(f"{statistics.fmean(scores):.3f} ± {statistics.pstdev(scores):.3f}")
            print(json.dumps({"defence": name, "b": factor, "test_last": scores}), file=sys.stderr, flush=True)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


def steps(arguments: argparse.Namespace) -> None:
    """How long the steps of the total are where nobody attacks; a seed that the table does not use."""
    lines = play(arguments, 100, 0.0, max_step=1e9).loop.lines
    lengths = [line["log"]["step_norm"] for line in lines]
    print(json.dumps({"first": lengths[0], "median": statistics.median(lengths), "largest": max(lengths)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--partition", default="random")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--factors", type=float, nargs="+", default=[10.0, 50.0])
    parser.add_argument("--only", default="", help="Only defences whose name holds this text.")
    parser.add_argument("--steps", action="store_true", help="Print lengths of steps instead.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.steps:
        steps(arguments)
    else:
        table(arguments)


if __name__ == "__main__":
    main()
