"""What secret message passing costs, in one run on one thread.

    python benchmarks/secmp.py [--datasets cora,citeseer,pubmed] [--rounds 5] [--skip epochs,keys,growth,setup]

Four parts. `epochs`: seconds per training epoch of HiFGL-GCN (5 silos, the whole federation around it) with plain,
published and hardened message passing; what happens once (keys, raw features) apart. `keys`: one agreement per group of
messages, by size of the group (what a holder could link grows with it). `setup`: the keys of all accounts of AMLSim's
bank transfers (``AMLSim/`` in ``ISTHMUS_DATA``), five banks drawn at random. `growth`: the arithmetic of one exchange
alone (fixed point, masks, sums, decoding) against a plain sum over the same edges, by edges, width and T.
Every sum is compared with the plain one. All times are processor seconds of the one thread, so that a busy machine does
not show in them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import build_scenario
from isthmus.data.split_graph import split_graph
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.roles import RoleTable
from isthmus.federation.session import Session
from isthmus.methods.hifgl.algorithm import ServerState
from isthmus.methods.hifgl.hardened import Hardened
from isthmus.methods.hifgl.method import roles
from isthmus.nn.optim import fresh_state
from isthmus.privacy import edge_keys
from isthmus.privacy.edge_keys import GROUP, fresh_keys
from isthmus.privacy.field import P61, Field
from isthmus.privacy.fixedpoint import FixedPoint
from isthmus.privacy.secmp import Exchange, SecretSums, deal_slots
from isthmus.seeds import Stream

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
            f"raw features {once:6.2f} s, keys {sealing:6.2f} s   loss {loss:.6f}",
            flush=True,
        )


def bench_keys(edges: int) -> None:
    target = np.random.default_rng(0).integers(0, edges // 4, edges)
    for size in (1, 8, 16, 32, 64):
        edge_keys.GROUP = size
        holders = [edge_keys.KeyHolder(f"holder {j}".encode()) for j in range(2)]
        begin = time.process_time()
        keys, groups = edge_keys.make_keys([(holder.public, holder.context) for holder in holders], target)
        made = time.process_time() - begin
        begin = time.process_time()
        for j, holder in enumerate(holders):
            found = holder.keys(groups.group, groups.number, groups.public, groups.proof[:, j])
            assert np.array_equal(found, keys[:, j])
        taken = time.process_time() - begin
        each = [seconds / edges * 1e6 for seconds in (made, taken)]
        print(
            f"keys       {edges:>7,} edges  T=2  groups of {size:>2}  source {each[0]:8.3f} us/edge  holders "
            f"{each[1]:8.3f} us/edge",
            flush=True,
        )
    edge_keys.GROUP = GROUP


def bench_setup(sample: str = "20K_fanin200cycle200", banks: int = 5) -> None:
    """Accounts as nodes, transfers as edges both ways, no feature but the balance: keys do not depend on features."""
    folder = Path(os.environ.get("ISTHMUS_DATA", "")) / "AMLSim" / sample
    if not folder.is_dir():
        print(f"setup      no {folder}: set ISTHMUS_DATA to a folder that holds AMLSim", flush=True)
        return
    nodes = np.loadtxt(folder / "nodes.csv", delimiter=",", skiprows=1, usecols=(0, 2))
    transfers = np.loadtxt(folder / "transactions.csv", delimiter=",", skiprows=1, usecols=(0, 1)).astype(np.int64)
    ids = nodes[:, 0].astype(np.int64)
    ends = np.searchsorted(np.sort(ids), transfers).T
    both = np.unique(np.concatenate([ends, ends[::-1]], axis=1), axis=1)
    generator = np.random.default_rng(0)
    marks = torch.from_numpy(generator.integers(0, 5, ids.size))
    whole = NodeData(
        x=torch.from_numpy(np.log1p(nodes[:, 1:])).float(),
        edge_index=torch.from_numpy(both),
        y=torch.from_numpy(generator.integers(0, 2, ids.size)),
        train=marks < 2,
        val=marks == 2,
        test=marks > 2,
        node_id=torch.arange(ids.size),
        num_classes=2,
    )
    owner = torch.from_numpy(generator.integers(0, banks, ids.size))
    names = tuple(f"bank-{number}" for number in range(banks))
    parts = split_graph(whole, owner, names)
    config: Any = resolve("hifgl", {"dataset": "csbm", "clients": banks}).method_config
    table = RoleTable(roles(config))
    session = Session(LocalEngine(parts, table, config, Stream(0, ("party",))), table)
    session.clock.begin("setup", 1, 1)
    begin = time.process_time()
    state = Hardened(config).setup(ServerState(0, {}, fresh_state("adam", {}), 1, 2), session)
    seconds = time.process_time() - begin
    slots = sum(int(sizes.sum()) for sizes in state.sizes.values())
    print(
        f"setup      {sample}: {ids.size:,} accounts, {both.shape[1]:,} arcs, {banks} banks, T="
        f"{config.holders(banks)}: {slots:,} keys per holder (padding included), {seconds:.2f} s for all parties",
        flush=True,
    )


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
    if "keys" not in skipped:
        bench_keys(1_000)  # compiles
        bench_keys(10_000)
    if "setup" not in skipped:
        bench_setup()
    if "epochs" not in skipped:
        for dataset in options.datasets.split(","):
            bench_epochs(dataset, options.rounds)


if __name__ == "__main__":
    main()
