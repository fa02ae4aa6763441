"""Tables of docs/results/general.md: methods with the general preset, and beside the presets of their papers.

    python benchmarks/general.py DIR aml [--draws 3]         AMLSim's fan-in and cycle sample, random split
    python benchmarks/general.py DIR rings [--draws 3]       the same, a laundering ring in one part only
    python benchmarks/general.py DIR tables --methods local fedavg fedstruct    the first, from tables of five banks
    python benchmarks/general.py DIR twitch --draws 1        one data set by name, the general preset alone
    python benchmarks/general.py DIR cora --presets general paper --methods fedstruct    beside its paper's preset
    python benchmarks/general.py DIR time                    CPU seconds by phase: HiFGL hardened, FedGGR
    python benchmarks/general.py DIR others                  Cora, Chameleon, Tolokers, Twitch, both presets
    python benchmarks/general.py DIR ... --print             what is finished, without running anything

Run folders are kept under DIR: what is finished is not run again. A draw is a seed of owners, split and training.
HiFGL runs with values in the clear (``secmp=plain``, ``mode=cross-silo``), FedSpray without masks: protections change
numbers by rounding alone and multiply time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import isthmus
from isthmus.data.transfer_tables import write_tables
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import Settings

METHODS = ("local", "fedavg", "fedsgd", "fedgcn", "fedstruct", "hifgl", "fedggr", "fedspray", "central")
PLAIN: dict[str, dict[str, Any]] = {
    "hifgl": {"secmp": "plain", "mode": "cross-silo"},
    "fedspray": {"secure_sum": False},
}
AML = {"dataset": "amlsim-cycle", "metric": "auprc"}
SCENARIOS: dict[str, dict[str, Any]] = {
    "aml": {**AML, "split": "stratified:40/20/40"},
    "rings": {**AML, "split": "group:ring:40/20/40"},
    "tables": {"metric": "auprc"},  # the split stands in their schema.toml
    "cora": {"dataset": "cora", "partition": "random", "clients": 10, "split": "10/10/80"},
    "chameleon": {"dataset": "chameleon", "partition": "random", "clients": 10, "split": "10/10/80"},
    "pubmed": {"dataset": "pubmed", "partition": "louvain", "clients": 10, "split": "40/30/30"},
    "chem": {"dataset": "chem"},
    "tolokers": {"dataset": "tolokers", "partition": "louvain", "clients": 5, "split": "40/20/40", "metric": "auroc"},
    "twitch": {"dataset": "twitch", "split": "40/20/40", "metric": "auroc"},
}
PAPER = {
    "fedgcn": "fedstruct",
    "fedstruct": "fedstruct",
    "hifgl": "hifgl",
    "fedggr": "fedggr",
    "fedspray": "fedspray",
    "fedstar": "fedstar",
}
OTHERS = ("cora", "chameleon", "tolokers", "twitch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("table", choices=(*SCENARIOS, "others", "time"))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--presets", nargs="*", choices=("general", "paper"))
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    if given.table == "time":
        print_times(given.folder)
        return
    scenarios = OTHERS if given.table == "others" else (given.table,)
    presets = given.presets or (("general", "paper") if given.table == "others" else ("general",))
    for seed in range(given.draws):
        for scenario in scenarios:
            for method in given.methods:
                for preset in presets:
                    if not given.print:
                        run_one(given.folder, scenario, method, preset, seed)
    for scenario in scenarios:
        print_table(given.folder, scenario, given.methods, presets, given.draws)


def run_one(folder: Path, scenario: str, method: str, preset: str, seed: int) -> None:
    """One run, unless it is there."""
    out = folder / f"{scenario}-{method}-{preset}-s{seed}"
    if (out / "result.json").exists() or (preset == "paper" and method not in PAPER):
        return
    settings = {**SCENARIOS[scenario], **PLAIN.get(method, {}), "seed": seed}
    if scenario == "tables":
        settings["dataset"] = str(tables(folder, seed))
    settings |= {"preset": PAPER[method] if preset == "paper" else preset, "selection": "best_val_acc"}
    begun = time.process_time()
    try:
        result = isthmus.run(method, out=out, quiet=True, overwrite=True, **settings)
    except isthmus.errors.IsthmusError as error:
        print(f"{out.name}: {error}", flush=True)
        return
    (out / "cpu.json").write_text(json.dumps(time.process_time() - begun))
    print(f"{out.name}: test {result['test']:.4f}, val {result['val']:.4f}, variant {result['variant']}", flush=True)


class Clock(Callback):
    """CPU seconds of every phase."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        self.last = time.process_time()

    def on_round(self, progress: Progress) -> None:
        now = time.process_time()
        self.spent[progress.phase] = self.spent.get(progress.phase, 0.0) + now - self.last
        self.last = now


def print_times(folder: Path) -> None:
    """On all accounts of AMLSim's cycle sample, protections as they are by default."""
    for method, more in (("hifgl", {"variant": "own", "rounds": 1}), ("fedggr", {})):
        begun, clock = time.process_time(), Clock()
        settings: dict[str, Any] = {**SCENARIOS["aml"], "preset": "general", "seed": 0, "overwrite": True, **more}
        isthmus.run(method, out=folder / f"time-{method}", quiet=True, callbacks=[clock], **settings)
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in clock.spent.items())
        print(f"{method}: {phases}; whole run {time.process_time() - begun:.1f} s of CPU", flush=True)


def tables(folder: Path, seed: int) -> Path:
    """AMLSim's cycle sample as five banks' tables, one folder per draw of owners."""
    out = folder / f"tables-of-draw-{seed}"
    if not out.exists():
        write_tables("amlsim-cycle", out, clients=5, seed=seed, split="stratified:40/20/40")
    return out


def print_table(folder: Path, scenario: str, methods: Any, presets: Any, draws: int) -> None:
    """Test scores of what is finished, in Markdown."""
    print(f"\n{scenario}\n\n| method | preset | draws | mean | single | variant | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for method in methods:
        for preset in presets:
            outs = [folder / f"{scenario}-{method}-{preset}-s{seed}" for seed in range(draws)]
            outs = [out for out in outs if (out / "result.json").exists()]
            found = [json.loads((out / "result.json").read_text()) for out in outs]
            cpu = [json.loads((out / "cpu.json").read_text()) for out in outs if (out / "cpu.json").exists()]
            if found:
                scores = [result["test"] for result in found]
                single = " ".join(f"{score:.3f}" for score in scores)
                variant = ", ".join(sorted({result["variant"] for result in found}))
                seconds = f"{statistics.mean(cpu):.0f}" if cpu else "-"
                mean = statistics.mean(scores)
                print(f"| {method} | {preset} | {len(scores)} | {mean:.3f} | {single} | {variant} | {seconds} |")


if __name__ == "__main__":
    main()
