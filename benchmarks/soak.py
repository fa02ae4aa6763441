"""Many rounds between organisations: do memory and threads stay flat?

    python benchmarks/soak.py [--rounds 2000] [--sites 3]

A federation on loopback (real kits and processes) runs FedAvg on a small generated graph; resident memory and threads
of every process are read twenty times on the way. Flat means: the most that is read in the last quarter of the run is
above the most in the second by no more than a tenth plus 20 MB, and 40 threads.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

from isthmus.deploy.heartbeat import read_heartbeat
from isthmus.deploy.loopback import LoopbackFederation, prepare_run
from isthmus.deploy.processes import descendants
from isthmus.deploy.run_status import HEARTBEAT, committed_rounds
from isthmus.experiments.config import resolve

READINGS = 20
Reading = dict[str, tuple[float, int]]


def usage(pid: int) -> tuple[float, int] | None:
    """Resident megabytes and threads of a process."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        return int(lines["VmRSS"].split()[0]) / 1024, int(lines["Threads"])
    except (OSError, KeyError, ValueError):
        return None


def read(federation: LoopbackFederation, run: str) -> Reading:
    found: Reading = {}
    beat = read_heartbeat(federation.runs / run / HEARTBEAT)
    pids = {"server job": beat[0] if beat is not None else -1}
    for name, parent in federation.parents.items():
        if parent.pid is not None:
            pids[f"{name} parent"] = parent.pid
            if name != "server":
                pids |= {f"{name} job": pid for pid in descendants(parent.pid)[-1:]}
    for name, pid in pids.items():
        used = usage(pid)
        if used is not None:
            found[name] = used
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--sites", type=int, default=3)
    given = parser.parse_args()
    flags = {
        "dataset": "csbm:nodes=300,classes=3,features=16",
        "clients": given.sites,
        "rounds": given.rounds,
        "hidden": 16,
        "eval_every": max(1, given.rounds // READINGS),
        "patience": 0,
        "seed": 0,
    }
    settings = resolve("fedavg", flags, {"engine": "nvflare", "checkpoint.every": 50, "nvflare.sites": given.sites})
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        runs.mkdir()
        with LoopbackFederation(given.sites, runs, Path(folder) / "state") as federation:
            prepare_run(settings, runs / "soak")
            supervisor = federation.supervisor()
            running = threading.Thread(target=supervisor.finish, args=(["soak"],), daemon=True)
            running.start()
            readings = follow(federation, running, given.rounds)
            running.join()
            attempts = len(supervisor.attempts)
    report(readings, attempts)


def follow(federation: LoopbackFederation, running: threading.Thread, rounds: int) -> list[tuple[int, float, Reading]]:
    readings: list[tuple[int, float, Reading]] = []
    begun = 0.0
    while running.is_alive():
        step = committed_rounds(federation.runs / "soak")
        begun = begun or (time.monotonic() if step else 0.0)
        if step >= len(readings) * rounds / READINGS and step and step < rounds:
            readings.append((step, time.monotonic() - begun, read(federation, "soak")))
            shown = "  ".join(f"{name} {mb:.0f} MB {threads} t" for name, (mb, threads) in readings[-1][2].items())
            print(f"round {step:6d}  {readings[-1][1]:7.1f} s  {shown}", flush=True)
        time.sleep(0.1)
    return readings


def report(readings: list[tuple[int, float, Reading]], attempts: int) -> None:
    quarters = [readings[part * len(readings) // 4 : (part + 1) * len(readings) // 4] for part in range(4)]
    (first_step, first_time, _), (last_step, last_time, _) = quarters[1][0], readings[-1]
    spent = 1e3 * (last_time - first_time) / (last_step - first_step)
    print(f"\n{attempts} attempt(s), {spent:.1f} ms per round from round {first_step} on")
    print(f"{'most in quarter 2 and 4':24s} {'MB':>8s} {'MB':>8s} {'threads':>8s} {'threads':>8s}")
    flat = True
    for name in sorted(quarters[1][0][2].keys() & readings[-1][2].keys()):
        (mb, threads), (mb_end, threads_end) = (_most(quarters[part], name) for part in (1, 3))
        flat = flat and mb_end <= 1.1 * mb + 20 and threads_end <= threads + 40
        print(f"{name:24s} {mb:8.0f} {mb_end:8.0f} {threads:8d} {threads_end:8d}")
    print("flat" if flat else "NOT FLAT")


def _most(readings: list[tuple[int, float, Reading]], name: str) -> tuple[float, int]:
    """Of all readings of a process: a pool of threads swings by a hundred from one moment to the next."""
    seen = [reading[name] for _, _, reading in readings if name in reading]
    return max(mb for mb, _ in seen), max(threads for _, threads in seen)


if __name__ == "__main__":
    main()
