"""The result of a run, ``result.json``."""

from __future__ import annotations

import platform
import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import isthmus
from isthmus.experiments.byte_totals import ByteTotals
from isthmus.experiments.config import Settings
from isthmus.experiments.scoring import round_of_score, score_of, selected_line

SCORED = {"after_local": ", models after local training", "dropped": ", with dropout left on"}
"""What the score rule adds for a ``score_model``."""
PACKAGES = ("torch", "torch_geometric", "numpy", "scipy")


@dataclass(frozen=True)
class Described:
    """What the data of a run is called, and where it came from."""

    dataset: str
    source: str


def versions() -> dict[str, str]:
    """Versions of the packages the results depend on."""
    found = {"isthmus": isthmus.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def form_result(
    settings: Settings,
    described: Described,
    nodes: Mapping[str, int],
    lines: Sequence[Mapping[str, Any]],
    totals: ByteTotals,
    seconds: Mapping[str, float],
    round_seconds: Sequence[float],
    parameters: Mapping[str, int],
    run_dir: str,
    privacy: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The result, from the metrics lines and counters."""
    run = settings.run
    selected, last = selected_line(lines, run.selection), lines[-1]
    score, score_rule = score_of(selected, last, settings.score, run.metric)
    score_rule += SCORED.get(getattr(settings.method_config, "score_model", "received"), "")
    means = selected.get("test_group_client_means", {})  # absent in runs of older versions
    return {
        "method": run.method,
        "dataset": described.dataset,
        "partition": run.partition,
        "clients": run.clients,
        "split": run.split,
        "seed": run.seed,
        "engine": run.engine,
        "preset": run.preset,
        "profile": run.profile,
        "variant": run.variant,
        "execution": run.execution,
        "rounds": last["round"],
        "selected_round": selected["round"],
        "metric": run.metric,
        "val": selected["val"],
        "test": selected["test"],
        "test_last": last["test"],
        "test_client_mean": selected["test_client_mean"],
        "test_client_mean_last": last["test_client_mean"],
        "test_minority": _share(selected["test_groups"].get("minority")),
        "test_minority_last": _share(last["test_groups"].get("minority")),
        "score": score,
        "score_rule": score_rule,
        "score_round": (last if round_of_score(settings.score) == "last" else selected)["round"],
        "selection": run.selection,
        "groups": {
            name: {"share_right": _share(counts), "samples": counts[1], "client_mean": means.get(name)}
            for name, counts in selected["test_groups"].items()
        },
        **_of_clients(nodes, selected, last),
        "model": None if model is None else dict(model),
        "parameters": dict(parameters),
        **({} if privacy is None else {"privacy": dict(privacy)}),
        **({} if facts is None else {"facts": dict(facts)}),
        "bytes": {
            "setup_up": totals.setup["up"],
            "setup_down": totals.setup["down"],
            "up": totals.training["up"],
            "down": totals.training["down"],
            "peer": totals.setup["peer"] + totals.training["peer"],
            "device": totals.setup["device"] + totals.training["device"],
            "evaluation_up": totals.evaluation["up"],
            "evaluation_down": totals.evaluation["down"],
            "evaluation_peer": totals.evaluation["peer"],
            "evaluation_device": totals.evaluation["device"],
        },
        "seconds": {name: round(value, 6) for name, value in seconds.items()},
        "seconds_per_round": statistics.median(round_seconds) if round_seconds else None,
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "run_dir": run_dir,
        "versions": versions(),
        "source": described.source,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _of_clients(nodes: Mapping[str, int], selected: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """Scores and sizes of each client; with secure sums none, but of enough clients a histogram of their scores."""
    if selected["per_client"] is not None:
        rows = [_client(client, nodes[client], selected, last) for client in nodes]
        return {"per_client": rows}
    bins, later = selected["client_scores"], last["client_scores"]
    return {
        "per_client": None,
        "client_scores": None if bins is None else {**bins, "test_last": later["test"]},
    }


def _client(name: str, nodes: int, selected_line: Mapping[str, Any], last_line: Mapping[str, Any]) -> dict[str, Any]:
    selected, last = (line["per_client"].get(name, {}) for line in (selected_line, last_line))

    def score(line: Mapping[str, Any], part: str) -> float | None:
        given: float | None = line[f"{part}_score"] if f"{part}_score" in line else _share(line.get(part))
        return given

    def count(part: str) -> int | None:  # None for a client that was absent
        given: int | None = (last.get(part) or selected.get(part) or (None, None))[1]
        return given

    return {
        "client": name,
        "nodes": nodes,
        "train": count("train"),
        "val": count("val"),
        "test": count("test"),
        "val_score": score(selected, "val"),
        "test_score": score(selected, "test"),
        "test_score_last": score(last, "test"),
        "test_minority": _share(selected_line.get("test_minority_per_client", {}).get(name)),
    }


def _share(counts: Sequence[int] | None) -> float | None:
    return counts[0] / counts[1] if counts and counts[1] else None
