"""FedStruct's communication beside the paper's formulas (FedStruct spec, section 11): numbers that travel before
training and in one round, measured from the ledger of a short run, on one scenario for all variants.

    python benchmarks/fedstruct_bytes.py --dataset cora --clients 10

A formula counts numbers of the paper's own protocol up to a constant; measured are bytes / 4 (float32), ids and headers
included. B is the number of boundary nodes of all clients. Sparse products carry a value and a column of 8 bytes per
entry, so three numbers of 4 bytes each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.experiments.config import resolve
from isthmus.experiments.run import start
from isthmus.experiments.scenarios import scenario_of

Formula = Callable[[dict[str, float]], float]
ROUNDS = 2
ENDS = ("sender", "receiver")  # one address may stand for all

VARIANTS: list[tuple[str, str, dict[str, Any], str, Formula, str, Formula]] = [
    (
        *("FedStruct (DEG), p = 30", "fedstruct", {"nsf": "degree", "protocol": "published", "prune_mode": "block"}),
        *("K d n + Ls K p n", lambda x: x["K"] * x["d"] * x["n"] + x["Ls"] * x["K"] * x["p"] * x["n"]),
        *("K |theta|", lambda x: x["K"] * x["theta"]),
    ),
    (
        *("FedStruct + H2V, p = 30", "fedstruct", {"protocol": "published", "prune_mode": "block"}),
        *("Ls K p n", lambda x: x["Ls"] * x["K"] * x["p"] * x["n"]),
        *("K |theta| + K d n", lambda x: x["K"] * (x["theta"] + x["d"] * x["n"])),
    ),
    (
        *("server knows graph, GDV, residuals", "fedstruct-server", {"nsf": "gdv"}),
        *("0", lambda x: 0.0),
        *("K |theta| + n c (ours)", lambda x: x["K"] * x["theta"] + x["n"] * x["c"]),
    ),
    (
        *("server knows graph, H2V, residuals", "fedstruct-server", {"nsf": "hop2vec"}),
        *("0", lambda x: 0.0),
        *("K |theta| + n c (ours)", lambda x: x["K"] * x["theta"] + x["n"] * x["c"]),
    ),
    (
        *("FedStruct + H2V, streamed (ours)", "fedstruct", {"protocol": "streamed"}),
        *("0", lambda x: 0.0),
        *("K |theta| + 2 Ls (K - 1) B c", lambda x: x["K"] * x["theta"] + 2 * x["Ls"] * (x["K"] - 1) * x["B"] * x["c"]),
    ),
    (
        *("private (G.1), H2V direct", "fedstruct-private", {"protocol": "published", "prune_mode": "block"}),
        *("Ls K p n", lambda x: x["Ls"] * x["K"] * x["p"] * x["n"]),
        *("K (|theta| + |Vt| c) + K n c", lambda x: x["K"] * (x["theta"] + x["Vt"] * x["c"] + x["n"] * x["c"])),
    ),
]


def sent(folder: Path) -> dict[str, int]:
    """Bytes by phase, from the ledger: every message, whoever sent it to whom."""
    found: dict[str, int] = {}
    for path in sorted((folder / "ledger").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            ends = (entry[end] * len(entry["bytes"]) if len(entry[end]) == 1 else entry[end] for end in ENDS)
            pairs = zip(*ends, entry["bytes"], strict=True)
            size = sum(number for sender, receiver, number in pairs if sender != receiver)  # mail to oneself stays
            found[entry["phase"]] = found.get(entry["phase"], 0) + size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--only", default="", help="variants whose name has this text")
    options = parser.parse_args()
    print(f"{options.dataset}, {options.clients} clients, random partition; millions of numbers")
    print("| variant | before training: formula | measured | one round: formula | measured |")
    print("|---|---|---|---|---|")
    for name, method, settings, before, before_of, during, during_of in VARIANTS:
        if options.only not in name:
            continue
        given = {"dataset": options.dataset, "clients": options.clients, "partition": "random", "rounds": ROUNDS}
        resolved = resolve(method, {**given, "eval_every": ROUNDS, **settings})
        scenario = scenario_of(resolved)
        config, whole = resolved.method_config, scenario.whole
        parts: Any = [data for data in scenario.parts.values() if data.cross is not None]
        with tempfile.TemporaryDirectory() as folder:
            result = start(resolved, Path(folder) / "run")
            bytes_of = sent(Path(folder) / "run")
        facts = {
            "K": options.clients,
            "n": whole.num_nodes,
            "c": whole.num_classes,
            "B": sum(len(np.unique(part.cross.own.numpy()[part.cross.outgoing.numpy()])) for part in parts),
            "Vt": int(whole.train.sum()),
            "d": config.nsf_dim,
            "Ls": config.structure_hops,
            "p": getattr(config, "prune", 0),
            "theta": result["parameters"]["trainable"],
        }
        setup = sum(size for phase, size in bytes_of.items() if phase not in ("train", "evaluation"))
        print(
            f"| {name} | {before} = {before_of(facts) / 1e6:.2f} | {setup / 4e6:.2f} | "
            f"{during} = {during_of(facts) / 1e6:.2f} | {bytes_of['train'] / ROUNDS / 4e6:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
