"""How good the first choice of `isthmus advise` is: every plan is run on ten data sets and parts.

    python benchmarks/advise.py --out runs/advise            # resumable; results are kept in runs/advise/results.jsonl
    python benchmarks/advise.py --out runs/advise --table    # the table of what is there, in Markdown

A choice is right when its test score is within a point of the best plan's. All plans see the same partition, split and
seed; the advice sees training and validation nodes only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import isthmus
from isthmus.errors import IsthmusError
from isthmus.experiments.advice.facts import Facts, measure
from isthmus.experiments.advice.plans import PLANS
from isthmus.experiments.advice.rules import advise
from isthmus.experiments.scenarios import build

SCENARIOS: tuple[dict[str, Any], ...] = (
    {"dataset": "cora", "partition": "fedtad"},
    {"dataset": "cora", "partition": "louvain", "clients": 10},
    {"dataset": "citeseer", "partition": "random", "clients": 10},
    {"dataset": "citeseer", "partition": "louvain", "clients": 5},
    {"dataset": "chameleon", "partition": "louvain", "clients": 5, "split": "60/20/20"},
    {"dataset": "actor", "partition": "random", "clients": 5, "split": "60/20/20"},
    {"dataset": "banks"},
    {"dataset": "amlsim-cycle", "split": "group:ring:40/20/40"},
    {"dataset": "minesweeper", "partition": "random", "clients": 5, "split": "50/25/25"},
    {"dataset": "amazon-photo", "partition": "louvain", "clients": 10},
)
POINT, MOST_OF = 0.01, 7
FASTER = {"hifgl": {"secmp": "plain"}, "fedspray": {"secure_sum": False}}
"""Without protections, which cost time and change scores by rounding only."""
_FACTS: dict[tuple[str, int], Facts] = {}


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", default="", help="plans to run, separated by commas")
    parser.add_argument("--rows", type=int, nargs="*", help="which of the data sets and parts, counted from 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="at most so many rounds, for every plan alike")
    options = parser.parse_args()
    scenarios = tuple(SCENARIOS[row] for row in options.rows) if options.rows else SCENARIOS
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / ("results.jsonl" if options.rounds is None else f"results-{options.rounds}.jsonl")
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if options.table:
        print_table(done, scenarios, options.seed)
        return
    known = {(title(row["scenario"]), row["plan"], row["seed"]) for row in done}
    chosen = options.only.split(",") if options.only else list(PLANS)
    for scenario in scenarios:
        for name in chosen:
            if (title(scenario), name, options.seed) not in known:
                row = run(scenario, name, options.seed, options.rounds)
                with file.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                print(row, flush=True)


def facts_of(scenario: dict[str, Any], seed: int) -> Facts:
    """What `isthmus advise` measures."""
    key = (title(scenario), seed)
    if key not in _FACTS:
        wanted = {"partition": None, "clients": None, "split": None, **scenario, "seed": seed}
        wanted |= {"scale": "auto", "undirected": True}  # as the general preset has it
        _FACTS[key] = measure(build(**wanted))
    return _FACTS[key]


def run(scenario: dict[str, Any], name: str, seed: int, rounds: int | None) -> dict[str, Any]:
    """One plan on one scenario."""
    plan, begin = PLANS[name], time.process_time()
    row = {"scenario": scenario, "plan": name, "seed": seed, "val": None, "test": None, "refused": None}
    keys = {**plan.settings, **FASTER.get(name, {}), **scenario, "metric": facts_of(scenario, seed).metric}
    keys |= {"rounds": rounds} if rounds else {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = isthmus.run(plan.method, seed=seed, out=Path(folder) / "run", set=keys)
        row |= {"val": result["val"], "test": result["test"], "variant": result["variant"]}
    except IsthmusError as error:
        row["refused"] = str(error)
    return row | {"seconds": round(time.process_time() - begin, 1)}


def title(scenario: dict[str, Any]) -> str:
    """Data set and partition in words."""
    return ", ".join(f"{value}" for key, value in scenario.items() if key in ("dataset", "partition", "split"))


def print_table(done: list[dict[str, Any]], scenarios: tuple[dict[str, Any], ...], seed: int) -> None:
    """One row per scenario: the advice, the best plan, FedAvg."""
    print(
        "| data, parts | metric | first choice | its test score | best of all plans | FedAvg | picked by validation "
        "| plans run |"
    )
    print("|---|---|---|---|---|---|---|---|")
    hits, averages, picked = 0, 0, 0
    rows = 0
    for scenario in scenarios:
        mine = {row["plan"]: row for row in done if title(row["scenario"]) == title(scenario) and row["seed"] == seed}
        tests = {name: row["test"] for name, row in mine.items() if row["test"] is not None}
        if "fedavg" not in tests or len(tests) < MOST_OF:
            continue
        rows += 1
        facts = facts_of(scenario, seed)
        choices = [choice.plan.name for choice in advise(facts).choices]
        first = next(name for name in choices if name in tests)
        auto = max((name for name in choices[:3] if name in tests), key=lambda name: mine[name]["val"])
        best = max(tests, key=lambda name: tests[name])
        hits += tests[first] >= tests[best] - POINT
        averages += tests["fedavg"] >= tests[best] - POINT
        picked += tests[auto] >= tests[best] - POINT
        cells = [title(scenario), facts.metric, first, f"{100 * tests[first]:.1f}", f"{best} {100 * tests[best]:.1f}"]
        cells += [f"{100 * tests['fedavg']:.1f}", f"{auto} {100 * tests[auto]:.1f}", f"{len(tests)} of {len(PLANS)}"]
        print(f"| {' | '.join(cells)} |")
    print(f"\nwithin a point of the best, of {rows}: first choice {hits}, always FedAvg {averages},")
    print(f"best of the first three on validation (isthmus run auto) {picked}")


if __name__ == "__main__":
    main()
