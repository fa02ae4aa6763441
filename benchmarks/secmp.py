"""What secret message passing costs, in one run on one thread.

    python benchmarks/secmp.py [--datasets cora,citeseer,pubmed] [--rounds 5] [--skip epochs,sealing,growth]

Three parts. `epochs`: seconds per training epoch of HiFGL-GCN (5 silos, the whole federation around it) with plain,
published and hardened message passing; what happens once (keys, raw features) apart. `sealing`: one box per edge, which
hides the sender from the holder, against one envelope per holder, which does not. `growth`: the arithmetic of one
exchange alone (fixed point, masks, sums, decoding) against a plain sum over the same edges, by edges, width and T.
Every sum is compared with the plain one. All times are processor seconds of the one thread, so that a busy machine does
not show in them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from isthmus.data.scenario import build_scenario
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.methods.hifgl.hardened import Hardened
from isthmus.privacy.anonymous_seal import BoxHolder, fresh_keys, seal_boxes
from isthmus.privacy.field import P61, Field
from isthmus.privacy.fixedpoint import FixedPoint
from isthmus.privacy.sealed_message import Header, Mailbox
from isthmus.privacy.secmp import Exchange, SecretSums, deal_slots

PROTOCOLS = (("plain", 1), ("published", 1), ("hardened", 1), ("hardened", 2), ("hardened", 3))


def timed(work: Callable[[], Any], times: int = 3) -> float:
    """The best of a few."""
    best = float("inf")
    for _ in range(times):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def bench_epochs(dataset: str, rounds: int) -> None:
    scenario = build_scenario(dataset=dataset, partition="random-equal", clients=5, split="client:60/20/20", seed=0)
    arcs = scenario.whole.edge_index.shape[1]
    base: float | None = None
    for secmp, threshold in PROTOCOLS:
        flags = {
            "dataset": dataset,
            "clients": 5,
            "rounds": rounds + 2,
            "secmp": secmp,
            "threshold": threshold,
            "one_neighbour": "allow",
            "eval_every": rounds + 2,
        }
        experiment = SimulatedRun(resolve("hifgl", flags), scenario)
        sealing = 0.0
        exchange_keys = Hardened.setup

        def clocked(*arguments: Any, inner: Any = exchange_keys) -> Any:
            nonlocal sealing
            begin = time.process_time()
            try:
                return inner(*arguments)
            finally:
                sealing = time.process_time() - begin

        Hardened.setup = clocked
        begin = time.process_time()
        try:
            experiment.loop.play(until=1)
        finally:
            Hardened.setup = exchange_keys
        once = time.process_time() - begin - sealing
        experiment.loop.play(until=2)  # compiles
        epochs = []
        for step in range(3, rounds + 3):
            begin = time.process_time()
            experiment.loop.play(until=step)
            epochs.append(time.process_time() - begin)
        epoch = statistics.median(epochs)
        base = base or epoch
        experiment.loop.play()
        loss = experiment.loop.lines[-1]["train_loss"]
        print(
            f"{dataset:<10} {arcs:>7,} arcs  {secmp:<10} T={threshold}  {epoch:8.4f} s/epoch  {epoch / base:5.2f} x "
            "plain   once: "
            f"raw features {once:6.2f} s, sealed keys {sealing:6.2f} s   loss {loss:.6f}",
            flush=True,
        )


def tell_sealing(edges: int, what: str, sealed: float, opened: float) -> None:
    each = [seconds / edges * 1e6 for seconds in (sealed, opened)]
    print(
        f"sealing    {edges:>7,} keys   {what:<23} seal {each[0]:8.3f} us/edge  open {each[1]:8.3f} us/edge", flush=True
    )


def bench_sealing(edges: int) -> None:
    keys, holder = fresh_keys(edges), BoxHolder(b"bench")
    begin = time.process_time()
    boxes = seal_boxes(holder.public, keys, b"bench")
    sealed = time.process_time() - begin
    begin = time.process_time()
    holder.open(boxes)
    opened = time.process_time() - begin
    tell_sealing(edges, "a box per edge", sealed, opened)
    sender, receiver = Mailbox("devices", "bench"), Mailbox("silo", "bench")
    sender.meet(receiver.announce())
    receiver.meet(sender.announce())
    message = keys.tobytes()
    header = Header("bench", "setup", 1, 0, 1, "devices", "silo", "keys", "Keys", len(message))
    begin = time.process_time()
    envelope = sender.seal(header, message)
    sealed = time.process_time() - begin
    begin = time.process_time()
    receiver.open(envelope)
    opened = time.process_time() - begin
    tell_sealing(edges, "an envelope per holder", sealed, opened)


def bench_growth(edges: int, width: int, threshold: int) -> None:
    nodes = edges // 4
    generator = np.random.default_rng(0)
    source, target = generator.integers(0, nodes, (2, edges))
    values = generator.normal(size=(nodes, width))
    sums = SecretSums(FixedPoint(Field(P61), 24, 1024.0, 1024), threshold)
    keys, slots, nonce = fresh_keys(edges, threshold), deal_slots(target, nodes), Exchange(1, 1).nonce()
    padding = fresh_keys(slots.padding.size, threshold)
    held = np.concatenate([keys, padding])[slots.order]
    times, tensor = np.ones(edges, np.int64), torch.from_numpy(values)

    def plain() -> np.ndarray:
        return (
            torch.zeros(nodes, width, dtype=torch.float64)
            .index_add_(0, torch.from_numpy(target), tensor[torch.from_numpy(source)])
            .numpy()
        )

    def hardened() -> np.ndarray:
        shares = sums.hide(sums.encode(values, nonce).values, source, times, keys, nonce)
        field = sums.field
        first = field.add(
            field.segment_sum(shares, target, nodes),
            field.segment_sum(sums.zeros(padding, width, nonce), slots.padding, nodes),
        )
        others = [sums.held(held[:, j], slots.sizes, width, nonce)[slots.handle] for j in range(threshold)]
        return sums.open(first, others, 1024, nonce)

    worst = float(np.abs(plain() - hardened()).max())
    fast, slow = timed(plain), timed(hardened)
    per_number = slow / (edges * width) * 1e9
    print(
        f"growth     {edges:>7,} edges  width {width:>3}  T={threshold}  plain {fast:8.4f} s  all parties {slow:8.4f} "
        "s  "
        f"{per_number:7.1f} ns per number  error {worst:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="cora,citeseer,pubmed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    skipped = options.skip.split(",")
    if "growth" not in skipped:
        bench_growth(1000, 4, 1)  # compiles
        for edges, width, threshold in (
            (10_000, 64, 1),
            (40_000, 64, 1),
            (160_000, 64, 1),
            (40_000, 8, 1),
            (40_000, 256, 1),
            (40_000, 64, 2),
            (40_000, 64, 3),
        ):
            bench_growth(edges, width, threshold)
    if "sealing" not in skipped:
        bench_sealing(5_000)
    if "epochs" not in skipped:
        for dataset in options.datasets.split(","):
            bench_epochs(dataset, options.rounds)


if __name__ == "__main__":
    main()
