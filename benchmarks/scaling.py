"""How time per round and memory grow with nodes, edges, clients, features and hops, for every method of node tasks.

    python benchmarks/scaling.py [--method fedavg,fedstruct] [--axis nodes,clients] [--seconds 600]
    python benchmarks/scaling.py --page          the table and the pictures from what was measured, nothing is run

One axis is moved at a time, the others stay at their first value; graphs are generated (``powerlaw``). Every point is
kept in ``benchmarks/scaling.jsonl`` as soon as it is measured and not measured again, so a run that was stopped goes
on where it was; delete lines to repeat them. A point is left out where the one before it took more than 15 s.

Times are CPU seconds (``time.process_time``, one thread): set-up is everything before the first round of the main
phase, a round is the mean of two after a first one, without evaluation. Memory is the largest resident size from
building the scenario on, less that of the process before. The exponent of an axis is the slope of log(value) against
log(size), by least squares: 0 does not grow, 1 grows as the size, 2 as its square. On graphs this small what every
call costs hides slow growth, so an exponent below 1 is a lower bound; one well above 1 is real.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.methods.registry import all_methods
from isthmus.papers.svg import Series, chart

RECORDS = Path(__file__).with_suffix(".jsonl")
FIGURES = Path(__file__).parents[1] / "docs" / "results" / "figures"
SIZES: dict[str, tuple[int, ...]] = {
    "nodes": (1000, 3000, 9000),
    "edges": (4, 12, 36),
    "clients": (3, 9, 27),
    "features": (32, 96, 288),
    "hops": (1, 2, 4),
}
"""Edges as mean degrees; hops as layers of the graph neural network."""
DRAWN = {"nodes": "nodes", "clients": "clients"}
LIMIT = 15.0

Record = dict[str, Any]


def points() -> Iterator[tuple[str, dict[str, int]]]:
    """Axis and sizes of every point; the first, common to all axes, comes once."""
    first = {axis: sizes[0] for axis, sizes in SIZES.items()}
    yield "", first
    for axis, sizes in SIZES.items():
        for size in sizes[1:]:
            yield axis, first | {axis: size}


def measure(method: str, at: Mapping[str, int]) -> Record:
    """One run of a few rounds."""
    flags: dict[str, Any] = {
        "dataset": f"powerlaw:nodes={at['nodes']},degree={at['edges']},features={at['features']}",
        "partition": "random",
        "preset": "general",
        "rounds": 4,
        "eval_every": 100,
        "hidden": [32] * at["hops"],
    }
    if method != "central":
        flags["clients"] = at["clients"]
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size is counted from here
    begun = time.process_time()
    settings = resolve(method, flags)
    run = SimulatedRun(settings, scenario_of(settings))
    phases = settings.method.phases
    main = next(i for i, phase in enumerate(phases) if settings.rounds_of(phase) == 4 and phase.rounds is None)
    steps = sum(settings.rounds_of(phase) for phase in phases[:main])
    run.loop.play(until=steps)
    ready = time.process_time()
    run.loop.play(until=steps + 1)
    warm = time.process_time()
    run.loop.play(until=steps + 3)
    ended = time.process_time()
    return {"setup": ready - begun, "round": (ended - warm) / 2, "mb": (memory("VmHWM") - before) / 1024}


def tried(method: str, at: Mapping[str, int]) -> Record:
    """A point, or why there is none: the other methods are measured then."""
    try:
        return measure(method, at)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def apart(method: str, at: Mapping[str, int]) -> Record:
    """A point in a process of its own, so that its memory is its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as file:
            json.dump(tried(method, at), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    found: Record = json.loads(text) if text else {"failed": "the process ended"}
    return found


def memory(field: str) -> int:
    """Resident memory of this process, kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def read() -> dict[tuple[str, str], Record]:
    """What was measured, by method and sizes."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    records = map(json.loads, lines)
    return {(each["method"], json.dumps(each["at"])): each for each in records}


def run(methods: list[str], axes: list[str], seconds: float) -> None:
    """Measure what is missing, until the CPU time is used up."""
    known, warmed = read(), set[str]()
    for method in methods:
        slow: set[str] = set()
        for axis, at in points():
            key = (method, json.dumps(at))
            if (axis and axis not in axes) or axis in slow or "" in slow:
                continue
            if key not in known:
                if sum(os.times()[:4]) > seconds:
                    print("out of time: run again to go on")
                    return
                if method not in warmed:
                    tried(method, at)  # loads compiled loops, which is no part of a point
                    warmed.add(method)
                known[key] = {"method": method, "axis": axis, "at": at} | apart(method, at)
                with RECORDS.open("a") as file:
                    file.write(json.dumps(known[key]) + "\n")
                print(method, axis or "first", at[axis] if axis else "", known[key], flush=True)
            record = known[key]
            if "failed" in record or record["setup"] + 3 * record["round"] > LIMIT:
                slow.add(axis)


def series(records: Mapping[tuple[str, str], Record], method: str, axis: str, what: str) -> list[float | None]:
    """Values along an axis."""
    first = {each: sizes[0] for each, sizes in SIZES.items()}
    found = [records.get((method, json.dumps(first | {axis: size})), {}) for size in SIZES[axis]]
    return [each.get(what) for each in found]


def exponent(sizes: tuple[int, ...], values: list[float | None]) -> float | None:
    """The slope of log(value) on log(size)."""
    pairs = [(math.log(x), math.log(max(y, 1e-6))) for x, y in zip(sizes, values, strict=True) if y is not None]
    if len(pairs) < 2:
        return None
    x_mean, y_mean = (sum(pair[i] for pair in pairs) / len(pairs) for i in (0, 1))
    return sum((x - x_mean) * (y - y_mean) for x, y in pairs) / sum((x - x_mean) ** 2 for x, _ in pairs)


def page() -> None:
    """Print the table in Markdown, and draw the pictures."""
    records = read()
    methods = sorted({method for method, _ in records})
    print("| method | round, ms | " + " | ".join(f"{axis}: round / set-up / memory" for axis in SIZES) + " |")
    print("|---|---|" + "---|" * len(SIZES))
    for method in methods:
        cells = []
        for axis, sizes in SIZES.items():
            found = [exponent(sizes, series(records, method, axis, what)) for what in ("round", "setup", "mb")]
            cells.append(" / ".join("-" if value is None else f"{value:.1f}" for value in found))
        first = series(records, method, "nodes", "round")[0]
        print(f"| {method} | {'-' if first is None else f'{1000 * first:.1f}'} | " + " | ".join(cells) + " |")
    for axis, name in DRAWN.items():
        lines = [
            Series(method, tuple(None if v is None else math.log10(1000 * v) for v in values))
            for method in methods
            if any(values := series(records, method, axis, "round"))
        ]
        picture = chart([f"{size:,}" for size in SIZES[axis]], lines, x=name, y="log10 of CPU ms per round")
        (FIGURES / f"scaling-{axis}.svg").write_text(picture)
    for record in records.values():
        if "failed" in record:
            print(f"{record['method']} {record['at']}: {record['failed']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", help="Some methods, by name; default: all of node tasks.")
    parser.add_argument("--axis", default=",".join(SIZES), help="Some axes.")
    parser.add_argument("--seconds", type=float, default=600.0, help="CPU seconds after which no point is begun.")
    parser.add_argument("--page", action="store_true", help="Only print the table and draw.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    every = [method.name for method in all_methods() if "node" in method.tasks]
    methods = given.method.split(",") if given.method else every
    axes = given.axis.split(",")
    if strange := (set(methods) - set(every)) | (set(axes) - set(SIZES)):
        parser.error(f"unknown: {', '.join(sorted(strange))}; methods: {', '.join(every)}; axes: {', '.join(SIZES)}")
    if not given.page:
        run(methods, axes, given.seconds)
    page()


if __name__ == "__main__":
    main()
