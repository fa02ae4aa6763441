"""A round of FED-PUB beside one of FedAvg: Cora, FedTAD's ten published parts, GCN 1433-64-7, three local epochs.

    python benchmarks/fedpub_round.py [--rounds N]

CPU time per round (``time.process_time``, one thread), the median over rounds, without evaluation; one run times all in
turns. FedAvg is timed with clients trained each by itself, as FED-PUB's are, and as a cohort, its default.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of

SIDES = {"fedavg, cohort": ("fedavg", "cohort"), "fedavg, each": ("fedavg", "each"), "fedpub": ("fedpub", "each")}


def new_run(method: str, execution: str, rounds: int) -> SimulatedRun:
    settings = resolve(
        method,
        {
            "dataset": "cora",
            "clients": 10,
            "partition": "fedtad",
            "split": "published:fedtad",
            "preset": "fedtad",
            "execution": execution,
            "rounds": rounds + 5,
            "eval_every": rounds + 5,
        },
    )
    return SimulatedRun(settings, scenario_of(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    runs = {name: new_run(*side, rounds) for name, side in SIDES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run.loop.play(until=3)  # set-up, compiled loops, the random graph
    for step in range(4, 4 + rounds):
        for name, run in runs.items():
            began = time.process_time()
            run.loop.play(until=step)
            seconds[name].append(time.process_time() - began)
    least = statistics.median(seconds["fedavg, cohort"])
    for name, each in seconds.items():
        middle = statistics.median(each)
        print(f"{name:16} {1000 * middle:7.1f} ms of CPU per round, {middle / least:4.1f} x")


if __name__ == "__main__":
    main()
