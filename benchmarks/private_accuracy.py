"""What a guarantee costs: accuracy of FedAvg against epsilon, with noise that clients share behind masks
(``dp_noise_in=total``), for several data sets and numbers of clients.

    python benchmarks/private_accuracy.py [--data cora,pubmed,amlsim-fanin] [--clients 10,100,1000] [--epsilons 8,2]
        [--rounds 5] [--clip 1.0] [--out FILE.jsonl]

Epsilon is per client (all its data replaced), at delta 1e-5, of all rounds together, as long as four fifths of the
clients add their noise and tell nobody. The first row of a data set is the same training without clip and noise;
`noise` is the standard deviation of the noise in the total over the clip, chosen for the epsilon by the accountant, and
`noise / signal` how long the noise in a round's mean is beside the longest step that clipping lets through. Training,
clip and rounds are the same for all: they were not tuned for each cell, and nothing was chosen by test labels. One
seed; every line that is printed is also appended to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.methods.averaging import shares_counted
from isthmus.methods.noise import shared_statement
from isthmus.privacy.shared_noise import SharedNoise

DELTA = 1e-5
METRIC = {"amlsim-fanin": "auprc"}


def noise_for(epsilon: float, clip: float, rounds: int, values: int, clients: int) -> float:
    """The smallest noise multiplier whose statement is at most epsilon."""
    low, high = 0.1, 1000.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        noise = SharedNoise(clip, middle, shares_counted(clients, 0))
        stated = shared_statement(noise, delta=DELTA, releases=rounds, values=values, clients=clients)["epsilon"]
        low, high = (low, middle) if stated is not None and stated <= epsilon else (middle, high)
    return high


def settings_for(data: str, clients: int, rounds: int, **more: Any) -> Settings:
    flags: dict[str, Any] = {
        "dataset": data,
        "clients": clients,
        "partition": "random-equal",
        "rounds": rounds,
        "eval_every": rounds,
        "selection": "last",
        "weighting": "uniform",
        "backbone": "gcn",
        "hidden": (16,),
        "dropout": 0.0,
        "optimizer": "sgd",
        "weight_decay": 0.0,
        "reset_optimizer": True,
        "local_epochs": 5,
        "lr": 1.0,
        "metric": METRIC.get(data, "accuracy"),
    }
    return resolve("fedavg", {**flags, **more})


def cell(data: str, clients: int, rounds: int, epsilon: float | None, clip: float) -> dict[str, Any]:
    """One run, and what it says of itself."""
    begin = time.process_time()
    more: dict[str, Any] = {}
    if epsilon is not None:
        plain = settings_for(data, clients, rounds)
        values = SimulatedRun(plain, scenario_of(plain)).loop.state.weights.values()  # type: ignore[attr-defined]
        numbers = sum(tensor.numel() for tensor in values)
        noise = noise_for(epsilon, clip, rounds, numbers, clients)
        more = {"secure_sum": True, "dp_clip": clip, "dp_noise": noise, "dp_noise_in": "total", "dp_delta": DELTA}
    given = settings_for(data, clients, rounds, **more)
    run = SimulatedRun(given, scenario_of(given))
    with tempfile.TemporaryDirectory() as place:
        result = run.play(RunFolder.create(Path(place) / "run", given.to_toml(), {}), resumed=False)
    private = result.get("privacy") or {}
    found = {
        "data": data,
        "clients": clients,
        "rounds": rounds,
        "metric": given.run.metric,
        "epsilon": private.get("epsilon"),
        "noise": private.get("noise"),
        "clip": private.get("clip"),
        "score": result["score"],
        "seconds": time.process_time() - begin,
    }
    if private:
        mean = private["noise"] * math.sqrt(clients / private["shares"] * private["values"]) / clients
        found |= {"values": private["values"], "noise_over_signal": mean}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", default="cora,pubmed,amlsim-fanin")
    parser.add_argument("--clients", default="10,100,1000")
    parser.add_argument("--epsilons", default="8,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| data | clients | epsilon | noise | noise / signal | score | CPU s |\n|---|---|---|---|---|---|---|")
    for clients in map(int, options.clients.split(",")):
        for data in options.data.split(","):
            for epsilon in (None, *(float(text) for text in options.epsilons.split(",") if text)):
                found = cell(data, clients, options.rounds, epsilon, options.clip)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                stated = "none" if found["epsilon"] is None else f"{found['epsilon']:.3g}"
                noise = "" if found["noise"] is None else f"{found['noise']:.2f}"
                ratio = f"{found['noise_over_signal']:.2g}" if "noise_over_signal" in found else ""
                score = f"{found['metric']} {found['score']:.3f}"
                print(
                    f"| {data} | {clients} | {stated} | {noise} | {ratio} | {score} | {found['seconds']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
