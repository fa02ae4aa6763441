"""What it costs that parties refuse what is not in the contract of a run.

    python benchmarks/contracts.py [--dataset cora] [--clients 10] [--rounds 40]

In a simulation: CPU time of a FedAvg round (training, messages, averaging, evaluation) with watches and without, round
by round in turn, and the time inside the checks as a share of the round. At a site: CPU time of one admitted call with
the schedule, tags, rosters, counts and replays, without the digest of the request, which is printed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.federation import codec
from isthmus.federation.party import Invocation, Turn
from isthmus.federation.secure import MaskOrder
from isthmus.federation.watch import MemoryLog, Watch
from isthmus.methods.fedavg import Broadcast
from isthmus.privacy.masks import SumRoster, SumTag


class Stopwatch:
    """CPU time spent in some functions."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun
                self.calls += 1

        return timed


def simulated(dataset: str, clients: int, rounds: int, execution: str) -> None:
    settings = resolve(
        "fedavg", {"dataset": dataset, "clients": clients, "rounds": 2 * rounds + 5, "execution": execution}
    )
    with SimulatedRun(settings, scenario_of(settings)) as run:
        engine: Any = run.engine
        parties = [engine.party(name) for name in engine.parties("client")]
        watches, server = [party.watch for party in parties], run.loop.session.clock.watch
        run.loop.play(until=5)
        times: dict[bool, list[float]] = {True: [], False: []}
        for step in range(6, run.loop.steps + 1):
            on = bool(step % 2)
            for party, watch in zip(parties, watches, strict=True):
                party.watch = watch if on else None
            run.loop.session.clock.watch = server if on else None
            begun = time.process_time()
            run.loop.play(until=step)
            times[on].append(time.process_time() - begun)
        inside = Stopwatch()
        for party, watch in zip(parties, watches, strict=True):
            party.watch = watch
            watch.check, watch.enter = inside.around(watch.check), inside.around(watch.enter)
        server.check = inside.around(server.check)  # type: ignore[union-attr,method-assign]
        run.loop.session.clock.watch = server
        run.loop.at = type(run.loop.at)(run.loop.steps - 1, run.loop.at.phase - 1, settings.run.rounds)
        run.loop.play()
    on, off = statistics.median(times[True]), statistics.median(times[False])
    print(
        f"{execution}: round {1e3 * off:.2f} ms without watches, {1e3 * on:.2f} ms with them "
        f"({100 * (on / off - 1):+.1f} %, medians of {len(times[True])}); inside the "
        f"checks {1e3 * inside.seconds:.3f} ms of a round, "
        f"{100 * inside.seconds / off:.2f} %, {inside.calls} checks"
    )


def at_a_site(dataset: str, clients: int, calls: int) -> None:
    settings = resolve(
        "fedavg",
        {"dataset": dataset, "clients": clients, "rounds": calls, "execution": "each", "secure_sum": True},
    )
    with SimulatedRun(settings, scenario_of(settings)) as run:
        contract: Any = run.contract
        weights = run.loop.state.weights  # type: ignore[attr-defined]
    request = Broadcast(weights, 96.0)
    values = sum(tensor.numel() for tensor in weights.values())
    begun = time.process_time()
    for _ in range(20):
        digest = codec.digest(request)
    digesting = (time.process_time() - begun) / 20
    name = min(contract.clients)
    roster = SumRoster({client: bytes([number]) * 32 for number, client in enumerate(sorted(contract.clients))})
    watch = Watch(contract, name, "client", full=True, log=MemoryLog())
    spent = 0.0
    for round in range(1, calls + 1):
        turn = Turn(0, "train", round, round + 1)
        order = MaskOrder(roster, SumTag("", "train", round, 1, "local_update", 0, "server", digest))
        call = Invocation(name, "client", "local_update", turn, 1, argument=request, mask=order)
        begun = time.process_time()
        watch.enter(call, watch.check(call))
        spent += time.process_time() - begun
    print(
        f"at a site: {1e3 * (spent / calls - digesting):.3f} ms per call beside the digest; digest of a request of "
        f"{values} values {1e3 * digesting:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"FedAvg, {given.dataset}, {given.clients} clients, one thread")
    for execution in ("cohort", "each"):
        simulated(given.dataset, given.clients, given.rounds, execution)
    at_a_site(given.dataset, given.clients, given.rounds)


if __name__ == "__main__":
    main()
