"""Run folders made up from a formula: what a finished run leaves behind, with numbers a test can predict."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FINAL = {"local": 0.62, "fedavg": 0.78, "fedsgd": 0.80, "central": 0.84, "fedstruct": 0.83}
PARAMETERS = 92_231
PROTECTIONS = {
    "clear": "the receiver reads each message",
    "summed": "the program is given only the total; the messages travel unmasked",
    "masked": "the receiver can read only the total",
    "sealed": "encrypted to the receiver",
}


def write_run(
    folder: Path,
    method: str = "fedavg",
    *,
    seed: int = 0,
    dataset: str = "cora",
    clients: Sequence[str] | int = 5,
    rounds: int = 50,
    partition: str = "louvain",
    split: str = "10/10/80",
    score: float | None = None,
    result: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    classes: int = 7,
) -> Path:
    """Write one run folder and return it. `result` replaces keys of result.json, `settings` of the [method] table."""
    draw = random.Random(f"{dataset}/{partition}/{seed}")  # same scenario, same partition, whatever the method
    names = [f"client-{k}" for k in range(clients)] if isinstance(clients, int) else list(clients)
    folder.mkdir(parents=True)
    final = score if score is not None else FINAL.get(method, 0.75) + 0.008 * (seed - 1)
    sizes = {name: draw.randint(150, 420) for name in names}
    labels = {name: _skewed(draw, sizes[name], classes) for name in names}
    cross = [[0] * len(names) for _ in names]
    for i in range(len(names)):
        for j in range(i):
            cross[i][j] = cross[j][i] = draw.randint(0, 120)
    silent = method in ("local", "central")
    size = 4 * PARAMETERS + 300
    total = 0 if silent else rounds * size * len(names)
    per_client = [
        {
            "client": name,
            "nodes": sizes[name],
            "train": sizes[name] // 10,
            "val": sizes[name] // 10,
            "test": sizes[name] - 2 * (sizes[name] // 10),
            "val_score": final,
            "test_score": min(1.0, max(0.0, final + draw.uniform(-0.12, 0.12))),
            "test_score_last": final,
        }
        for name in names
    ]
    if method == "central":
        nodes = sum(sizes.values())
        per_client = [
            {
                "client": "central",
                "nodes": nodes,
                "train": nodes // 10,
                "val": nodes // 10,
                "test": nodes - 2 * (nodes // 10),
                "val_score": final,
                "test_score": final,
                "test_score_last": final,
            }
        ]
    _json(
        folder / "result.json",
        {
            "method": method,
            "dataset": dataset,
            "partition": partition,
            "clients": len(names),
            "split": split,
            "seed": seed,
            "engine": "local",
            "preset": "fedstruct",
            "profile": "paper",
            "execution": "each",
            "rounds": rounds,
            "selected_round": rounds - 5,
            "metric": "accuracy",
            "val": final + 0.01,
            "test": final,
            "test_last": final - 0.004,
            "test_client_mean": final - 0.02,
            "test_client_mean_last": final - 0.02,
            "test_minority": None,
            "score": final,
            "score_rule": "Pooled test accuracy at the round with the best validation accuracy.",
            "per_client": per_client,
            "parameters": {"trainable": PARAMETERS, "shared": 0 if silent else PARAMETERS},
            "bytes": {
                "setup_up": 0,
                "setup_down": 0,
                "up": total,
                "down": total,
                "peer": 0,
                "device": 0,
                "evaluation_up": 0,
                "evaluation_down": 0,
            },
            "seconds": {"setup": 0.5, "train": 4.0, "eval": 0.7},
            "seconds_per_round": 0.08,
            "peak_rss_mb": 512.0,
            "run_dir": folder.name,
            "versions": {"isthmus": "0.1.0", "python": "3.11.9", "torch": "2.13.0"},
            "source": "planetoid",
            **(result or {}),
        },
    )
    table = {"lr": 0.01, "hidden": 64, **(settings or {})}
    (folder / "config.toml").write_text(
        "[run]\n"
        + "".join(
            f"{k} = {json.dumps(v)}\n"
            for k, v in {"method": method, "dataset": dataset, "seed": seed, "rounds": rounds}.items()
        )
        + "\n[method]\n"
        + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items()),
        encoding="utf-8",
    )
    pace = {"local": 4.0, "central": 5.0, "fedsgd": 14.0}.get(method, 8.0)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for index in range(5, rounds + 1, 5):
            value = final - 0.5 * math.exp(-index / pace) * (1 + 0.1 * seed)
            line = {
                "phase": "train",
                "round": index,
                "val": value + 0.01,
                "test": value,
                "val_loss": 0.7,
                "train_loss": 0.6,
            }
            file.write(json.dumps(line) + "\n")
    _json(
        folder / "disclosure.json",
        {
            "method": method,
            "rows": [] if silent else _rows(method, rounds * len(names), total),
            "protections": PROTECTIONS,
        },
    )
    _json(
        folder / "scenario.json",
        {
            "sizes": sizes,
            "cross_edges": cross,
            "cross_share": 0.23,
            "labels": labels,
            "homophily": {name: round(draw.uniform(0.7, 0.9), 3) for name in names},
            "edges_inside": {name: 2 * sizes[name] for name in names},
        },
    )
    return folder


def _rows(method: str, times: int, total: int) -> list[dict[str, Any]]:
    rows = [
        _row("train", "client", "server", "Update", "summed", times, {"model": total - 8 * times, "count": 8 * times}),
        _row("train", "server", "client", "Shared", "clear", times, {"model": total}),
    ]
    if method == "fedstruct":
        rows.append(_row("setup", "client", "client", "StructureSums", "sealed", 20, {"structure": total // 5}))
        rows.append(
            _row(
                "evaluation", "client", "server", "Scores", "clear", 10, {"label statistic": total // 10, "metric": 200}
            )
        )
    return rows


def _row(
    phase: str, sender: str, receiver: str, message: str, protection: str, times: int, by_kind: dict[str, int]
) -> dict[str, Any]:
    return {
        "phase": phase,
        "sender": sender,
        "receiver": receiver,
        "message": message,
        "kinds": sorted(by_kind),
        "protection": protection,
        "times": times,
        "bytes": sum(by_kind.values()),
        "bytes_by_kind": by_kind,
    }


def _skewed(draw: random.Random, size: int, classes: int) -> list[int]:
    weights = [draw.random() ** 3 + 0.02 for _ in range(classes)]
    counts = [int(size * weight / sum(weights)) for weight in weights]
    counts[0] += size - sum(counts)
    return counts


def _json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
