"""Small runs, and what two runs that must be the same have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packages import weight_hashes

from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun, report_statistics, scenario_of
from isthmus.methods.registry import get_method

SMALL: dict[str, Any] = {
    "dataset": "csbm:nodes=90,features=6,degree=4",
    "clients": 3,
    "rounds": 4,
    "backbone": "gcn",
    "hidden": 8,
    "lr": 0.05,
}
TIMES = {"seconds", "peak_rss_mb", "run_dir", "finished", "seconds_per_round"}
"""Keys of a result that may differ between two runs that are the same."""


def small(method: str = "fedavg", set: Mapping[str, Any] | None = None, **changes: Any) -> Settings:
    fixed = {"backbone": "sage"} if method == "fedsage" else {}
    fixed |= {"preset": get_method(method).preset or "fedstruct"}  # not the general one, which tries variants
    return resolve(method, {**SMALL, **fixed, **changes}, set)


def run_in_folder(settings: Settings, path: Path, **options: Any) -> SimulatedRun:
    """Run in a folder, on any engine."""
    scenario = scenario_of(settings)
    simulated = SimulatedRun(settings, scenario, **options)
    folder = RunFolder.create(path, simulated.settings.to_toml(), report_statistics(scenario))
    simulated.play(folder, resumed=False)
    return simulated


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def result(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((path / "result.json").read_text())
    return loaded


def ledger(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Entries by segment, without the number of the attempt."""
    segments = {}
    for file in sorted((path / "ledger").iterdir()):
        segments[file.name] = [
            {k: v for k, v in json.loads(line).items() if k != "attempt"} for line in file.read_text().splitlines()
        ]
    return segments


def models(path: Path) -> dict[str, Any]:
    """The weights of every model package, and the bytes of its other files but ``model.toml``, which says how often
    there were checkpoints and the like.
    """
    folder, apart = path / "models", ("model.toml", "weights.safetensors")
    others = {file: file.read_bytes() for file in sorted(folder.rglob("*.*")) if file.name not in apart}
    return {str(file.relative_to(folder)): content for file, content in others.items()} | weight_hashes(path)


def assert_same_run(a: Path, b: Path) -> None:
    """The same bits, apart from times."""
    assert models(a) == models(b)
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in lines(a)] == [
        {k: v for k, v in line.items() if k != "seconds"} for line in lines(b)
    ]
    first, second = result(a), result(b)
    assert {k: v for k, v in first.items() if k not in TIMES} == {k: v for k, v in second.items() if k not in TIMES}
    assert first.keys() == second.keys()
    assert ledger(a) == ledger(b)
    assert json.loads((a / "disclosure.json").read_text()) == json.loads((b / "disclosure.json").read_text())
