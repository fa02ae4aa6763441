"""Cost of the privacy core: FedAvg with and without secure sums, field, Lagrange shares and masks, in
one run on one thread.

    python benchmarks/privacy.py [--numbers 100000,1000000,10000000] [--clients 3,10,100] [--budget SECONDS] [--skip
    field,masks,...] [--runs cora:10,cora:50,cora:50:45,pubmed:1000]

The runs are those of `isthmus run fedavg` with clients trained together, plain and secure rounds in turn, in CPU
seconds: `masking` is all that a secure round does more at the clients (encoding, streams, check words), `streams` what
the library's generator (AES-128 in counter mode) alone needs for as many words in as many streams, and `own loop` what
the compiled loop needs that makes and adds them (`aes_blocks`; the library where the processor has no such
instructions). `setup` is keys, the mask graph, key agreements, and the first sum. Keys are bytes per client, `round`
all bytes of a secure round per client, both ways. A third number is `least_clients`: sums go on when others are lost.

Each protocol's sum is compared with the exact one. Times are wall seconds, the better of two where a run takes less
than a second. `client` is what one client spends, `server` what the receiver spends on all clients' uploads; bytes are
per client. What would not fit in the time budget is left out and said so.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.federation import codec
from isthmus.federation.messages import Message
from isthmus.federation.party import Invocation, Outcome, Party
from isthmus.federation.secure import SumKeys
from isthmus.privacy.field import P31, P61, Field
from isthmus.privacy.fixedpoint import FixedPoint
from isthmus.privacy.flatten import WordRows, encode_all, error_bound, template_of_leaves
from isthmus.privacy.lagrange import LagrangeCode
from isthmus.privacy.mask_graph import choices_for
from isthmus.privacy.masks import CHECK_WORDS, SumParty, SumRoster, SumServer, SumTag
from isthmus.privacy.prg import SHORT_KEY_BYTES, Keystream, add_streams

T = TypeVar("T")
PRIMES = {"2^31-1": P31, "2^61-1": P61}


def timed(work: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - begin
    if seconds < 1.0:
        begin = time.perf_counter()
        work()
        seconds = min(seconds, time.perf_counter() - begin)
    return seconds, result


def line(part: str, numbers: int, clients: int | None, text: str) -> None:
    print(f"{part:<22} {numbers:>10,} {clients or '':>8}  {text}", flush=True)


def bench_field(numbers: int) -> None:
    for name, prime in PRIMES.items():
        field = Field(prime)
        a, b = field.random(numbers), field.random(numbers)
        seconds = {
            what: timed(work)[0]
            for what, work in (
                ("add", lambda f=field, x=a, y=b: f.add(x, y)),
                ("mul", lambda f=field, x=a, y=b: f.mul(x, y)),
                ("random", lambda f=field: f.random(numbers)),
            )
        }
        line(f"field {name}", numbers, None, "  ".join(f"{what} {value:.4f} s" for what, value in seconds.items()))


def bench_lagrange(numbers: int) -> None:
    x = np.random.default_rng(0).normal(size=numbers)
    for name, prime in PRIMES.items():
        format = FixedPoint(Field(prime), 16, 16.0, 100)
        for threshold in (1, 2):
            code = LagrangeCode(format.field, threshold)
            quantise, encoded = timed(lambda f=format: f.encode(x).values)
            encode, shares = timed(lambda c=code, e=encoded: c.encode(e))
            seeded, _ = timed(lambda c=code, e=encoded: c.encode_seeded(e))
            decode, back = timed(lambda c=code, s=shares: c.decode(s))
            assert np.array_equal(back, encoded)
            element = 4 if prime == P31 else 8
            line(
                f"lagrange {name} T={threshold}",
                numbers,
                None,
                f"fixed point {quantise:.4f} s  encode {encode:.4f} s  seeded {seeded:.4f} s  decode {decode:.4f} s  "
                f"bytes {(threshold + 1) * element * numbers:,} (seeded {element * numbers + 32 * threshold:,})",
            )


def check_masks(clients: int) -> None:
    """All parties, few numbers: the total is the plain sum within the bound."""
    parties = {f"client-{i}": SumParty(f"client-{i}") for i in range(clients)}
    roster = SumRoster({name: party.public_key for name, party in parties.items()}, choices_for(clients))
    tag = SumTag("benchmark", "check", 0, 0)
    values = {name: torch.randn(500, dtype=torch.float64) for name in parties}
    server = SumServer(roster, tag)
    for name, party in parties.items():
        server.add(name, party.mask([values[name]], roster, tag))
    total = server.total(template_of_leaves([values["client-0"]]))
    error = float((torch.as_tensor(total[0]) - torch.stack(list(values.values())).sum(0)).abs().max())
    assert error <= error_bound(clients) + 1e-12, error


def bench_masks(numbers: int, clients: int) -> None:
    party = SumParty("client-0")
    others = {f"client-{i}": SumParty(f"client-{i}").public_key for i in range(1, clients)}
    roster = SumRoster({"client-0": party.public_key, **others}, choices_for(clients))
    values = torch.randn(numbers)
    encode, words = timed(lambda: encode_all([values], parties=clients))
    attempts = iter(range(10))
    mask, masked = timed(
        lambda: party.mask_words(words, roster, SumTag("benchmark", "train", 1, 1, attempt=next(attempts)))
    )

    def add() -> None:
        server = SumServer(roster, SumTag("benchmark", "train", 1, 1))
        for name in roster.parties:
            server.add(name, masked)  # the same vector for everybody: adding costs the same whatever is in it

    def add_plain() -> None:
        total = values.clone()
        for _ in range(clients - 1):
            total += values

    plain_sum, _ = timed(add_plain)
    server, _ = timed(add)
    line(
        "masks",
        numbers,
        clients,
        f"client: encode {encode:.4f} s, mask {mask:.4f} s  server: {server:.4f} s (plain {plain_sum:.4f} s)  "
        f"bytes {masked.nbytes:,} (plain float32 {4 * numbers:,})",
    )


def bench_run(dataset: str, clients: int, rounds: int, least: int = 0) -> None:
    """FedAvg, plain and secure rounds in turn."""
    loops, scenario = {}, None
    for secure in (False, True):
        flags = {"dataset": dataset, "clients": clients, "partition": "random", "secure_sum": secure}
        flags |= {"least_clients": least, "reset_optimizer": True} if least else {}
        settings = resolve("fedavg", {**flags, "rounds": rounds})
        try:
            scenario = scenario or scenario_of(settings)
        except DataError as error:
            line(f"fedavg {dataset}", 0, clients, f"left out: {error}")
            return
        loops[secure] = SimulatedRun(settings, scenario)
    masked: list[float] = []
    genuine = Party.mask

    def timed_mask(party: Party, outcome: Outcome, call: Invocation, rows: WordRows | None = None) -> Message:
        begin = time.process_time()
        reply = genuine(party, outcome, call, rows)
        masked[-1] += time.process_time() - begin
        return reply

    spent: dict[bool, list[float]] = {False: [], True: []}
    states = {secure: experiment.loop.state for secure, experiment in loops.items()}
    phases = {phase.name: phase for phase in loops[True].settings.method.phases}
    Party.mask = timed_mask  # type: ignore[method-assign]
    try:
        for step, name in enumerate(["setup", *["train"] * rounds]):
            for secure, experiment in loops.items():
                masked.append(0.0)
                session = experiment.loop.session
                session.clock.begin(name, max(1, step), step + 1)
                session.ledger.take()
                begin = time.process_time()
                states[secure], _ = phases[name].run_round(states[secure], session, experiment.settings.method_config)
                spent[secure].append(time.process_time() - begin)
    finally:
        Party.mask = genuine  # type: ignore[method-assign]
    numbers = sum(weight.numel() for weight in states[True].weights.values()) + 1 + CHECK_WORDS
    session = loops[True].loop.session
    roster = next(one for one in session.clock.rosters.values() if one.at_least == least)
    sent = sum(sum(entry.bytes) for entry in session.ledger.take()) / clients
    streams = sum(len(roster.neighbours(party)) for party in roster.parties)
    plain, secured = (statistics.median(spent[secure][1:]) for secure in (False, True))
    masking, generator = statistics.median(masked[3::2]), generator_seconds(streams, numbers)
    loop = loop_seconds(streams, numbers)
    keys = sum(codec.size(SumKeys(roster.seen_by(party).keys)) for party in roster.parties) / clients
    line(
        f"fedavg {dataset}" + (f", {least} left" if least else ""),
        numbers,
        clients,
        f"round: plain {1000 * plain:.1f} ms, secure {1000 * secured:.1f} ms  masking {1000 * masking:.1f} ms = "
        f"{masking / generator:.2f} x streams {1000 * generator:.1f} ms "
        f"({8e-9 * streams * numbers / generator:.1f} GB/s), {masking / loop:.2f} x own loop {1000 * loop:.1f} ms "
        f"({8e-9 * streams * numbers / loop:.1f} GB/s)  "
        f"neighbours {streams / clients:.1f}  setup {spent[True][0]:.2f} s (plain {spent[False][0]:.2f} s)  keys "
        f"{keys:,.0f} bytes, round {sent:,.0f} bytes",
    )


def generator_seconds(streams: int, numbers: int) -> float:
    """CPU seconds of the generator alone for so many streams of so many words, from a part of them."""
    part = min(streams, max(50, 40_000_000 // numbers))
    buffer = bytearray(8 * numbers + 16)
    zeros = memoryview(bytes(8 * numbers))
    found = []
    for _ in range(3):
        begin = time.process_time()
        for _ in range(part):
            Keystream(bytes(SHORT_KEY_BYTES)).fill(zeros, buffer)
        found.append(time.process_time() - begin)
    return statistics.median(found) * streams / part


def loop_seconds(streams: int, numbers: int) -> float:
    """The same for the loop that masks, which also adds them to one vector, in calls of 10 streams."""
    part = max(10, min(streams, max(50, 40_000_000 // numbers)) // 10 * 10)
    target, keys = np.zeros(numbers, np.uint64), [bytes([k]) * SHORT_KEY_BYTES for k in range(10)]
    add_streams(target, keys)
    found = []
    for _ in range(3):
        begin = time.process_time()
        for _ in range(part // 10):
            add_streams(target, keys[:5], keys[5:])
        found.append(time.process_time() - begin)
    return statistics.median(found) * streams / part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--numbers", default="100000,1000000,10000000")
    parser.add_argument("--clients", default="3,10,100")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which larger sizes are left out")
    parser.add_argument("--skip", default="", help="comma-separated: runs, field, lagrange, masks")
    parser.add_argument("--runs", default="cora:10,cora:50,cora:50:45,pubmed:1000", help="data set:clients[:least]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    sizes, counts = ([int(n) for n in text.split(",")] for text in (options.numbers, options.clients))
    for clients in counts:
        check_masks(clients)
    Field(P61).mul(*2 * [Field(P61).random(2)])  # compile outside the timings
    for prime in PRIMES.values():
        LagrangeCode(Field(prime), 1).encode(Field(prime).random(2))
    print(f"{'part':<22} {'numbers':>10} {'clients':>8}")
    for text in options.runs.split(",") if "runs" not in options.skip.split(",") else ():
        dataset, clients, *least = text.split(":")
        bench_run(dataset, int(clients), 3 if int(clients) > 100 else 12, *map(int, least))
    for numbers in sizes:
        jobs: list[tuple[str, float, Callable[[], None]]] = [
            ("field", 3e-7 * numbers, lambda n=numbers: bench_field(n)),
            ("lagrange", 2e-6 * numbers, lambda n=numbers: bench_lagrange(n)),
            *(
                ("masks", (1e-8 + 6e-9) * numbers * clients, lambda n=numbers, c=clients: bench_masks(n, c))
                for clients in counts
            ),
        ]
        for part, guess, job in jobs:
            if part in options.skip.split(","):
                continue
            if time.perf_counter() - begin + guess > options.budget:
                line(
                    part,
                    numbers,
                    None,
                    f"left out: about {guess:.0f} s more than the budget of {options.budget:.0f} s allows",
                )
                continue
            try:
                job()
            except ConfigError as error:  # an extra is missing
                line(part, numbers, None, f"left out: {error}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"total {time.perf_counter() - begin:.1f} s, peak memory {peak:.0f} MB")


if __name__ == "__main__":
    main()
