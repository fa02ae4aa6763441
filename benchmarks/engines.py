"""Engines side by side: what a round costs, what a call costs beside the engine's own call, what large messages cost,
how many clients fit.

    python benchmarks/engines.py [--only TEXT] [--rounds N] [--repeat N] [--clients N]

- **rounds**: FedAvg, two-layer GCN (hidden 64), Cora (a generated graph of its size where its files are missing), 3
  clients, one local epoch, no evaluation in between; median milliseconds per round, and bytes per round as the ledger
  counts them.
- **calls**: one small message to one client and back, `federation.call` (ledger and all) and the engine's part of it
  (`dispatch`), beside the raw call of the same transport with the same bytes (ray: a method of an actor that returns
  its numpy argument; nvflare: a published function that returns its bytes; local: two copies).
  Ours and raw take turns, so both see the same machine; the smallest of many is given with the median, because other
  work on the machine only ever adds. Goal: at most 1.5 times the raw call.
- **messages**: the same with 1, 10 and 50 MB.
- **many**: simulated clients on two actors, milliseconds per round with all of them, `execution=cohort` and `each`.

An engine is a function that yields rows; to add one, write it and name it in ``ENGINES``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from engine_echo import ECHO, Echo, Payload

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import DataError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation import codec
from isthmus.federation.engine import Engine
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.party import Invocation
from isthmus.federation.session import Session
from isthmus.seeds import Stream

SIZES = (1, 10, 50)
SMALL = 64


@dataclass(frozen=True)
class Options:
    rounds: int
    repeat: int
    clients: int


@dataclass(frozen=True)
class Row:
    """One measurement; times in milliseconds."""

    engine: str
    what: str
    ours: float
    raw: float | None = None
    note: str = ""

    def __str__(self) -> str:
        against = f"{self.raw:10.2f} {self.ours / self.raw:6.2f}x" if self.raw else " " * 18
        return f"{self.engine:8s} {self.what:44s} {self.ours:10.2f} {against}  {self.note}"


# -- what is run -----------------------------------------------------------------------------------


def payload(megabytes: float) -> Payload:
    return Payload(torch.ones(SMALL if not megabytes else int(megabytes * 250_000)))


def cora() -> Scenario:
    try:
        return build_scenario(dataset="cora", clients=3, split="10/10/80", seed=0)
    except DataError:
        return build_scenario(
            dataset="csbm:nodes=2708,classes=7,features=1433,degree=4", clients=3, split="10/10/80", seed=0
        )


def cora_flags(options: Options) -> dict[str, Any]:
    """Settings of the measured run."""
    return {
        "dataset": "cora",
        "clients": 3,
        "seed": 0,
        "backbone": "gcn",
        "hidden": 64,
        "rounds": options.rounds,
        "local_epochs": 1,
        "eval_every": options.rounds,
        "execution": "each",
    }


def round_row(name: str, engine: Callable[..., Engine], options: Options) -> Row:
    """FedAvg-GCN on Cora, 3 clients."""
    with SimulatedRun(resolve("fedavg", cora_flags(options)), cora(), engine=engine) as experiment:
        experiment.loop.play()
        sent = sum(experiment.loop.totals.training.values()) / options.rounds
        spent = experiment.loop.round_seconds[2:]
    return Row(
        name,
        "rounds: FedAvg-GCN, Cora, 3 clients",
        1e3 * statistics.median(spent),
        note=f"{sent / 1e6:.2f} MB per round",
    )


def turns(functions: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """Milliseconds of functions that take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for k in range(repeat + 3):
        for name, function in functions.items():
            begun = time.perf_counter()
            function()
            if k >= 3:
                times[name].append(1e3 * (time.perf_counter() - begun))
    return times


def call_rows(
    name: str, engine: Engine, raw: Callable[[bytes], Callable[[], object]], options: Options
) -> Iterator[Row]:
    """Calls of one client through an engine that carries ``Echo``; ``raw(data)`` gives the transport's own call with
    these bytes.
    """
    session = Session(engine, ECHO)
    session.clock.begin("train", 1, 1)
    sequence = iter(range(10**6, 10**9))
    for megabytes in (0, *SIZES):
        message = payload(megabytes)

        def dispatch(message: Payload = message) -> object:
            session.clock.begin("train", 1, next(sequence))  # a new step: nothing is answered from memory
            call = Invocation("client-0", "client", "echo", session.clock.turn, session.clock.next(), argument=message)
            return engine.dispatch([call], None)

        def call(message: Payload = message) -> object:
            session.clock.begin("train", 1, next(sequence))
            session.ledger.take()
            return session.call(Echo.echo, message, to=["client-0"])

        functions = {"raw": raw(codec.encode(message)), "dispatch": dispatch, "call": call}
        times = turns(functions, options.repeat if not megabytes else max(5, options.repeat // (4 * megabytes)))
        size = f"{megabytes} MB there and back" if megabytes else "small message"
        for what in ("dispatch", "call"):
            shown = f"median {statistics.median(times[what]):.2f}, raw {statistics.median(times['raw']):.2f}"
            yield Row(
                name,
                f"{'messages' if megabytes else 'calls'}: {what}, {size}",
                min(times[what]),
                min(times["raw"]),
                shown,
            )


# -- engines ---------------------------------------------------------------------------------------


def local_rows(options: Options) -> Iterator[Row]:
    yield round_row("local", LocalEngine, options)
    engine = LocalEngine({"client-0": None}, ECHO, None, Stream(0))  # type: ignore[dict-item]

    def raw(data: bytes) -> Callable[[], object]:
        message = codec.decode(data, Payload)
        return lambda: Payload(message.values.clone().clone())  # isolation is a copy each way

    yield from call_rows("local", engine, raw, options)


def ray_rows(options: Options) -> Iterator[Row]:
    import ray

    from isthmus.federation.engines.ray import Cluster, RayEngine

    class Plain:
        def echo(self, data: np.ndarray) -> np.ndarray:
            return data

    with Cluster(actors=3) as cluster:
        yield round_row("ray", partial(RayEngine, cluster=cluster, actors=2), options)
        plain: Any = ray.remote(num_cpus=1)(Plain).remote()

        def raw(data: bytes) -> Callable[[], object]:
            array = np.frombuffer(data, dtype=np.uint8)
            return lambda: ray.get(plain.echo.remote(array))

        engine = RayEngine({"client-0": None}, ECHO, None, Stream(0), cluster=cluster)
        yield from call_rows("ray", engine, raw, options)
        engine.close()
        ray.kill(plain)
        flags = {
            "dataset": f"csbm:nodes={15 * options.clients},classes=3,features=8,degree=4",
            "clients": options.clients,
            "hidden": 16,
            "rounds": 5,
            "eval_every": 5,
            "seed": 1,
        }
        scenario = build_scenario(dataset=flags["dataset"], clients=options.clients, split="30/20/50", seed=1)
        for execution in ("cohort", "each"):
            settings = resolve("fedavg", {**flags, "execution": execution})
            begun = time.perf_counter()
            with SimulatedRun(settings, scenario, engine=partial(RayEngine, cluster=cluster, actors=2)) as experiment:
                built = time.perf_counter() - begun
                experiment.loop.play()
                spent = 1e3 * statistics.median(experiment.loop.round_seconds[1:])
            yield Row(
                "ray", f"many: {options.clients} clients, 2 actors, {execution}", spent, note=f"built in {built:.1f} s"
            )


def nvflare_rows(options: Options) -> Iterator[Row]:
    """Three sites on loopback for rounds; calls are measured inside a job of one site (`engine_flare`)."""
    import tempfile
    from pathlib import Path

    from engine_flare import measure

    from isthmus.experiments.run import start

    with tempfile.TemporaryDirectory() as folder:
        result = start(
            resolve("fedavg", {**cora_flags(options), "dataset": cora().dataset, "engine": "nvflare"}),
            Path(folder) / "run",
        )
    sent = (result["bytes"]["up"] + result["bytes"]["down"]) / options.rounds
    spent = 1e3 * result["seconds_per_round"]
    yield Row("nvflare", "rounds: FedAvg-GCN, Cora, 3 clients", spent, note=f"{sent / 1e6:.2f} MB per round")
    for row in measure(options):
        yield Row(**row)


ENGINES: dict[str, Callable[[Options], Iterator[Row]]] = {"local": local_rows, "ray": ray_rows, "nvflare": nvflare_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="engines whose name contains this")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--clients", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'engine':8s} {'what':44s} {'ms':>10s} {'raw ms':>10s} {'ratio':>7s}")
    for name, rows in ENGINES.items():
        if given.only in name:
            for row in rows(Options(given.rounds, given.repeat, given.clients)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
