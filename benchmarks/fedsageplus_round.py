"""One generator round across clients of FedSage+ against a straightforward implementation that does the same.

Cora on FedTAD's ten published parts; generators that were first trained alone, as in a run. The plain side is how one
would write it first, and how public implementations do: dense features, fGen for every node and all five candidates,
loops over nodes and candidates to find the nearest hidden neighbour, other clients' features read directly, autograd
and torch.optim.Adam. Without noise and dropout, in float64, both must hold the same fGen to 1e-6 after a round before
anything is timed; the timed rounds are float32 with both.

    python benchmarks/fedsageplus_round.py [--rounds N] [--skip-memory] [--widths 256 2048]

Times are CPU time per round (``time.process_time``, one thread), the median over rounds; one run times all sides in
turns. "the same" is the plain side with our widths and our last layer of rank 64; "published sizes" has fGen as
published, with a full last layer of 15 M numbers, and does more. Ours counts the messages, too. Memory is that of
processes of their own (``--memory SIDE``): the peak resident size after a round, in all.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.methods.fedsageplus.algorithm import FedSagePlusClient

SETTINGS: dict[str, Any] = {
    "dataset": "cora",
    "clients": 10,
    "partition": "fedtad",
    "split": "published:fedtad",
    "preset": "fedtad",
    "rounds": 1,
    "hide": "nodes",
    "hidden_share": 0.2,
    "execution": "each",
}


def new_run(**settings: Any) -> tuple[SimulatedRun, list[FedSagePlusClient]]:
    """A run whose clients have trained their generators alone."""
    resolved = resolve("fedsageplus", {**SETTINGS, "cross_rounds": 100, **settings})
    run = SimulatedRun(resolved, scenario_of(resolved))
    run.loop.play(until=1)
    engine: Any = run.engine
    return run, [engine.party(name).client for name in engine.parties("client")]


PUBLISHED = (256, 2048)
"""Widths of fGen before its full last layer."""


class Plain:
    """One client of the plain side; weights are those of one of ours."""

    def __init__(self, ours: FedSagePlusClient, full: bool) -> None:
        self.ours, impaired = ours, ours.impaired
        self.x = torch.from_numpy(ours.x.toarray()).to(ours.config.dtype)
        self.own, self.edges = self.x[impaired.kept], impaired.graph.edge_index
        self.weights = {name: tensor.clone() for name, tensor in ours.state.generator.items()}
        sizes = ours.sizes
        layers: list[nn.Module] = []
        widths = (sizes.code, *(PUBLISHED if full else sizes.widths))
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.before = nn.Sequential(*layers).to(ours.config.dtype)
        last = sizes.most * sizes.features
        low = [nn.Linear(widths[-1], sizes.rank), nn.Linear(sizes.rank, last)]
        self.after = nn.Sequential(*([nn.Linear(widths[-1], last)] if full else low)).to(ours.config.dtype)
        if not full:
            linear = [m for m in (*self.before, *self.after) if isinstance(m, nn.Linear)]
            with torch.no_grad():
                for layer, module in enumerate(linear):
                    module.weight.copy_(self.weights[f"rows.{layer}.weight"].T)
                    module.bias.copy_(self.weights[f"rows.{layer}.bias"])
        parameters = [*self.before.parameters(), *self.after.parameters()]
        config = ours.config
        self.adam = torch.optim.Adam(parameters, lr=config.generator_lr, weight_decay=config.generator_weight_decay)
        state = ours.state.generator_optimizer
        if not full:  # go on from the moments of the steps taken alone
            for layer, module in enumerate(linear):
                for kind, parameter in (("weight", module.weight), ("bias", module.bias)):
                    name = f"rows.{layer}.{kind}"
                    first, second = (part[name].t().clone() for part in (state.first, state.second))
                    step = torch.tensor(float(state.steps[0]))
                    self.adam.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def mean(self, h: Tensor, edges: Tensor) -> Tensor:
        """D^-1 (A + I) h."""
        source, target = edges
        total = h.index_add(0, target, h[source])
        degree = torch.ones(len(h), dtype=h.dtype).index_add(0, target, torch.ones(len(source), dtype=h.dtype))
        return total / degree[:, None]

    def two_layers(self, name: str, x: Tensor, edges: Tensor) -> Tensor:
        w = self.weights
        h = torch.relu(self.mean(x @ w[f"{name}.0.weight"], edges) + w[f"{name}.0.bias"])
        return self.mean(h @ w[f"{name}.1.weight"], edges) + w[f"{name}.1.bias"]

    def greedy(self, rows: Tensor, counts: list[int], targets: list[list[Tensor]]) -> Tensor:
        """Every used row against the nearest of its node's targets, in loops."""
        loss = rows.new_zeros(())
        for v, wanted in zip(self.ours.impaired.train.tolist(), targets, strict=True):
            for p in range(counts[v] if wanted else 0):
                nearest = None
                for x in wanted:
                    away = torch.nn.functional.mse_loss(rows[v, p], x)
                    if nearest is None or float(away.detach()) < float(nearest.detach()):
                        nearest = away
                assert nearest is not None
                loss = loss + nearest
        return loss / len(targets)

    def round(self, others: list[Plain], noisy: bool) -> None:
        impaired, sizes = self.ours.impaired, self.ours.sizes
        with torch.no_grad():
            codes = torch.relu(self.two_layers("encoder", self.own, self.edges))
            counts = torch.relu(codes @ self.weights["count.0.weight"] + self.weights["count.0.bias"])[:, 0]
        used = counts.round().clamp(max=sizes.most).int().tolist()
        h = self.before(codes + torch.randn_like(codes) if noisy else codes)
        h = torch.nn.functional.dropout(h, 0.5) if noisy else h
        rows = self.after(h).view(len(codes), sizes.most, -1)
        rows = torch.tanh(rows) if sizes.output == "tanh" else rows
        own = [[self.x[u] for u in line if u >= 0] for line in impaired.hidden_of.tolist()]
        loss = self.greedy(rows, used, own)
        new = [(v, p) for p in range(sizes.most) for v in range(len(used)) if p < used[v]]
        arcs = [[v, len(codes) + i] for i, (v, _) in enumerate(new)]
        both = torch.tensor(arcs + [arc[::-1] for arc in arcs]).T if arcs else self.edges[:, :0]
        x = torch.cat([self.own, *[rows[v, p][None] for v, p in new]])
        logits = self.two_layers("classifier", x, torch.cat([self.edges, both], dim=1))[impaired.train]
        loss = loss + torch.nn.functional.cross_entropy(logits, impaired.y[impaired.train])
        asked = [i for i, d in enumerate(impaired.missing.tolist()) if d and used[int(impaired.train[i])]]
        for other in others:
            drawn = other.ours.targets(self.ours.party, impaired.missing[asked])
            targets: list[list[Tensor]] = [[] for _ in impaired.train]
            for i, line in zip(asked, drawn.tolist(), strict=True):
                targets[i] = [other.x[u] for u in line if u >= 0]
            loss = loss + self.greedy(rows, used, targets)
        self.adam.zero_grad()
        (loss / (len(others) + 1)).backward()
        self.adam.step()


def plain_round(clients: list[Plain], noisy: bool = True) -> None:
    for client in clients:
        client.round([other for other in clients if other is not client], noisy)


def check() -> None:
    """Both sides hold the same fGen after a round."""
    quiet = FedSagePlusClient.noise
    FedSagePlusClient.noise = lambda self, draws, count: (  # type: ignore[method-assign, assignment]
        torch.zeros(count, self.config.code_width, dtype=self.config.dtype),
        None,
    )
    run, clients = new_run(precision="float64")
    plain = [Plain(client, full=False) for client in clients]
    start = [client.state.generator for client in clients]
    plain_round(plain, noisy=False)
    run.loop.play(until=2)
    FedSagePlusClient.noise = quiet  # type: ignore[method-assign]
    worst = moved = 0.0
    for ours, theirs, before in zip(clients, plain, start, strict=True):
        linear = [m for m in (*theirs.before, *theirs.after) if isinstance(m, nn.Linear)]
        for layer, module in enumerate(linear):
            now = ours.state.generator[f"rows.{layer}.weight"]
            worst = max(worst, float((now - module.weight.detach().T).abs().max()))
            moved = max(moved, float((now - before[f"rows.{layer}.weight"]).abs().max()))
    print(f"float64, one round without noise: largest difference {worst:.1e}, largest step {moved:.1e}")
    assert worst < 1e-6 < moved, "the two sides do not do the same"


def compare(rounds: int, **settings: Any) -> None:
    check()
    run, clients = new_run(**settings)
    same, full = ([Plain(client, full=each) for client in clients] for each in (False, True))
    seconds: dict[str, list[float]] = {"ours": [], "plain, the same": [], "plain, published sizes": []}
    for at in range(rounds):
        for name, play in (
            ("ours", lambda step=2 + at: run.loop.play(until=step)),
            ("plain, the same", lambda: plain_round(same)),
            ("plain, published sizes", lambda: plain_round(full)),
        ):
            began = time.process_time()
            play()
            seconds[name].append(time.process_time() - began)
    ours = statistics.median(seconds["ours"])
    for name, each in seconds.items():
        print(
            f"{name:24} {statistics.median(each):8.3f} s of CPU per round, {statistics.median(each) / ours:5.1f} x ours"
        )


def memory(side: str, **settings: Any) -> None:
    """Peak resident size in MB of a process that did one side's round."""
    run, clients = new_run(**settings)
    if side == "ours":
        run.loop.play(until=2)
    else:
        plain_round([Plain(client, full=side == "full") for client in clients])
    # Not getrusage: a process starts with the peak of the one it was forked from.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(line.split()[1]) // 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--widths", type=int, nargs="+", help="of fGen, on both sides, in place of the default's")
    parser.add_argument("--memory", choices=("ours", "same", "full"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"generator_widths": tuple(arguments.widths)} if arguments.widths else {}
    if arguments.memory:
        memory(arguments.memory, **settings)
        return
    compare(arguments.rounds, **settings)
    if not arguments.skip_memory:
        for side, name in (("ours", "ours"), ("same", "plain, the same"), ("full", "plain, published sizes")):
            command = [sys.executable, __file__, *sys.argv[1:], "--memory", side]
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
            print(f"{name:24} {found} MB at most, in all")


if __name__ == "__main__":
    main()
