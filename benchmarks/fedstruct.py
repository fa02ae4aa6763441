"""FedStruct: rounds against a straightforward implementation, memory of the powers, and hops in place of powers.

    python benchmarks/fedstruct.py [rounds|pubmed|growth|streamed|large] [--nodes N,N,...] [--rounds N]

``rounds``: HOP2VEC on Cora (or a generated graph of its size), 10 clients, reference profile. The other side forms the
powers at one place, and in every round runs the structure MLP on all nodes once per client under autograd, as the
published code does. Without dropout both must end at the same weights (1e-5 after 3 rounds) before anything is timed;
times are CPU seconds per round with dropout, medians.

``pubmed``: peak memory of 20 hops with p = 30 on PubMed. ``growth``: the same and one training round on generated
graphs of degree 10 with 5 hops, 25k to 200k nodes. Each size runs in a process of its own, so that its peak is its own.

``streamed``: Cora, 10 clients, reference profile, hops against powers in one process: CPU seconds of a round taken in
turn, medians; bytes of setup, of a round and of 40 rounds with an evaluation each, and with secure sums.

``large``: rounds hop by hop on generated graphs of degree 10, 40 classes, 10 hops, random parts of 10 clients, 170k and
1M nodes: CPU seconds per round, peak memory with evaluation and checkpoint, bytes that would travel.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import DataError
from isthmus.experiments.config import resolve
from isthmus.experiments.folder import FileStore
from isthmus.experiments.run import SimulatedRun
from isthmus.graph.normalise import from_torch_csr, row_norm, to_torch_csr
from isthmus.graph.powers import as_csr, keep_largest_by_owner

SIZES = (25_000, 50_000, 100_000, 200_000)
MEMORY_LIMITS = {"pubmed": 2048.0, "growth": 8192.0}
LARGE = (
    (170_000, 4096.0, "headed", "plain"),
    (170_000, 4096.0, "headed", "masked"),
    (1_000_000, 8192.0, "direct", "plain"),
    (1_000_000, 8192.0, "headed", "plain"),
)
"""Nodes, megabytes that they may take, the form of HOP2VEC (a row of S has 256 values, or without head 40), sums."""
PROTOCOLS = {"hardened powers": "hardened", "streamed": "streamed"}
"""Compared in one run; the reference profile's own is the published one."""


class Straightforward:
    """Everything at one place, one autograd graph per client and round."""

    def __init__(self, scenario: Scenario, run: SimulatedRun) -> None:
        config = run.settings.method_config
        self.config = config
        begun = time.process_time()
        order = np.argsort(scenario.whole.node_id.numpy())  # columns are in the order of global ids
        ids = scenario.whole.node_id.numpy()[order]
        one_step = sp.csr_matrix(row_norm(scenario.whole.edge_index, scenario.whole.num_nodes)[order][:, order])
        power = one_step
        for hop in range(config.structure_hops):
            power = as_csr(one_step @ power) if hop else one_step
            if config.prune:
                nodes = scenario.whole.num_nodes
                power = keep_largest_by_owner(power, np.zeros(nodes, dtype=np.int64), config.prune * nodes)
        self.power_seconds = time.process_time() - begun
        self.clients = []
        for data in scenario.parts.values():
            train = torch.nonzero(data.train).flatten()
            x = data.x if data.x.layout == torch.sparse_csr else to_torch_csr(sp.csr_matrix(data.x.numpy()))
            local = to_torch_csr(row_norm(data.edge_index, data.num_nodes))
            rows = to_torch_csr(power[np.searchsorted(ids, data.node_id[train].numpy())])
            self.clients.append(
                (torch.from_numpy(from_torch_csr(x).toarray()), local, rows, train, data.y[train], data.num_nodes)
            )
        self.total = sum(client[-1] for client in self.clients)
        state: Any = run.loop.state
        self.theta = {name: tensor.clone().requires_grad_() for name, tensor in state.weights.items()}
        self.nsf = state.nsf.clone().requires_grad_()
        self.adam = torch.optim.Adam([*self.theta.values(), self.nsf], lr=config.lr, weight_decay=config.weight_decay)

    def mlp(self, x: Tensor, prefix: str, norm: str, dropout: float) -> Tensor:
        theta = self.theta
        x = torch.nn.functional.layer_norm(
            x, (x.shape[1],), theta[f"{prefix}{norm}.gamma"], theta[f"{prefix}{norm}.beta"]
        )
        layers = sum(name.startswith(f"{prefix}layers.") and name.endswith("weight") for name in theta)
        for i in range(layers):
            x = x @ theta[f"{prefix}layers.{i}.weight"] + theta[f"{prefix}layers.{i}.bias"]
            if i < layers - 1:
                x = torch.nn.functional.dropout(torch.relu(x), dropout)
        return x

    def round(self, dropout: float) -> None:
        self.adam.zero_grad()
        for x, local, rows, train, y, nodes in self.clients:
            h = self.mlp(x, "feature.", "input_norm", dropout)
            for _ in range(self.config.hops):
                h = local @ h
            q = h[train] + rows @ self.mlp(self.nsf, "structure.", "norm", dropout)
            # The reference code's loss: softmax twice, mean per client, weighted by all its nodes.
            loss = torch.nn.functional.cross_entropy(torch.softmax(q, dim=1), y)
            (loss * nodes / self.total).backward()  # type: ignore[no-untyped-call]
        self.adam.step()


def cora() -> Scenario:
    """Cora, or a generated graph of its size."""
    try:
        return build_scenario(dataset="cora", clients=10, seed=0)
    except DataError:
        return build_scenario(dataset="csbm:nodes=2708,classes=7,features=1433,degree=4", clients=10, seed=0)


def experiment(scenario: Scenario, **settings: Any) -> SimulatedRun:
    given = {
        "dataset": "cora",
        "clients": len(scenario.parts),
        "profile": "reference",
        "nsf": "hop2vec",
        "rounds": 10**6,
    }
    given |= {"prune": 30} if settings.get("protocol") != "streamed" else {}
    return SimulatedRun(resolve("fedstruct", {**given, **settings}), scenario)


def compare_rounds(rounds: int) -> dict[str, Any]:
    scenario = cora()
    still = experiment(scenario, dropout=0.0)
    setup_steps = 2 + still.settings.method_config.structure_hops
    begun = time.process_time()
    still.loop.play(until=setup_steps)
    setup = time.process_time() - begun
    plain = Straightforward(scenario, still)
    state: Any = still.loop.state
    for _ in range(3):
        state = train(still, state)
        plain.round(0.0)
    difference = max(float((state.weights[name] - tensor.detach()).abs().max()) for name, tensor in plain.theta.items())
    assert difference < 1e-5, f"the two sides differ by {difference:.2e}: nothing is timed"

    ours = experiment(scenario)
    ours.loop.play(until=setup_steps)
    state = ours.loop.state
    times: dict[str, list[float]] = {"ours": [], "straightforward": []}
    rate = ours.settings.method_config.dropout
    for _ in range(rounds):
        begun = time.process_time()
        state = train(ours, state)
        times["ours"].append(time.process_time() - begun)
        begun = time.process_time()
        plain.round(rate)
        times["straightforward"].append(time.process_time() - begun)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "difference": difference,
        "setup_seconds": setup,
        "straightforward_power_seconds": plain.power_seconds,
        "round_seconds": medians,
        "ratio": medians["straightforward"] / medians["ours"],
    }


def train(run: SimulatedRun, state: Any) -> Any:
    """One round of training, without evaluation."""
    return train_counted(run, state)[0]


def train_counted(run: SimulatedRun, state: Any) -> tuple[Any, int]:
    """The same, and the bytes it sends."""
    clock, phase = run.loop.session.clock, run.settings.method.phases[-1]
    clock.begin("train", clock.turn.round + 1, clock.turn.step + 1)
    state, _ = phase.run_round(state, run.loop.session, run.settings.method_config)
    return state, sum(entry.total for entry in run.loop.session.ledger.take())


def compare_protocols(rounds: int) -> None:
    """Hops against powers, in one run."""
    scenario = cora()
    runs, states, times = {}, {}, {}
    for name, protocol in PROTOCOLS.items():
        run = runs[name] = experiment(scenario, protocol=protocol)
        setup_steps = sum(run.settings.rounds_of(phase) for phase in run.settings.method.phases if phase.setup)
        begun = time.process_time()
        run.loop.play(until=setup_steps)
        print(f"{name}: setup {time.process_time() - begun:.2f} s CPU")
        states[name], times[name] = run.loop.state, list[float]()
        train(run, states[name])  # compiled loops are loaded
    for _ in range(rounds):
        for name, run in runs.items():
            begun = time.process_time()
            states[name] = train(run, states[name])
            times[name].append(time.process_time() - begun)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        print(f"{name}: {1000 * seconds:.1f} ms CPU per round, {seconds / medians['hardened powers']:.2f} of powers'")
    for secure in (False, True):
        totals = {name: sent(scenario, protocol, secure) for name, protocol in PROTOCOLS.items()}
        for name, (setup, each, scored) in totals.items():
            whole = setup + 40 * (each + scored)
            print(
                f"{name}, {'masked' if secure else 'plain'}: setup {setup / 1e6:.1f} MB, a round {each / 1e6:.1f} MB, "
                f"its evaluation {scored / 1e6:.1f} MB, 40 rounds {whole / 1e6:.0f} MB"
            )


def sent(scenario: Scenario, protocol: str, secure: bool) -> tuple[int, int, int]:
    """Bytes of setup, of a training round and of an evaluation."""
    run = experiment(scenario, protocol=protocol, secure_sum=secure, rounds=1)
    run.loop.play()
    totals = run.loop.totals
    return sum(totals.setup.values()), sum(totals.training.values()), sum(totals.evaluation.values())


def measure_large(nodes: int, rounds: int, form: str, secure: bool) -> dict[str, Any]:
    """In this process: setup and a round hop by hop with its evaluation and checkpoint, then rounds that are timed."""
    dataset = f"csbm:nodes={nodes},classes=40,features=16,degree=10"
    scenario = build_scenario(dataset=dataset, clients=10, seed=0)
    before = _peak()
    given = {"structure_hops": 10, "protocol": "streamed", "form": form, "secure_sum": secure, "checkpoint.every": 1}
    with tempfile.TemporaryDirectory() as folder, experiment(scenario, dataset=dataset, **given) as run:
        run.engine.keep_tags(lambda party: FileStore(Path(folder) / party))
        begun = time.process_time()
        run.loop.play(until=1)
        setup, seconds, peer = time.process_time() - begun, list[float](), 0
        begun = time.process_time()
        run.loop.play(until=2)
        whole, state = time.process_time() - begun, run.loop.state
        for _ in range(rounds):
            begun = time.process_time()
            state, peer = train_counted(run, state)
            seconds.append(time.process_time() - begun)
    return {
        "nodes": nodes,
        "setup_seconds": setup,
        "whole_seconds": whole,
        "round_seconds": min(seconds),
        "data_mb": before,
        "peak_mb": _peak(),
        "round_gb": peer / 1e9,
    }


def measure(dataset: str, hops: int, clients: int, rounds: int) -> dict[str, Any]:
    """In this process: the powers, then training rounds; seconds and peak memory."""
    scenario = build_scenario(dataset=dataset, clients=clients, seed=0)
    before = _peak()
    run = experiment(scenario, dataset=dataset, structure_hops=hops, profile="paper", protocol="published")
    begun = time.process_time()
    run.loop.play(until=1 + hops)
    powers, peak = time.process_time() - begun, _peak()
    if rounds:
        run.loop.play(until=2 + hops)
        state: Any = run.loop.state
        for _ in range(rounds):
            state = train(run, state)
    known: Any = run.loop.state
    return {
        "dataset": dataset,
        "nodes": scenario.whole.num_nodes,
        "hops": hops,
        "clients": clients,
        "power_seconds": powers,
        "data_mb": before,
        "powers_peak_mb": peak,
        "peak_mb": _peak(),
        "entries_per_row": known.kept.entries / known.nodes,
        "peer_mb": run.loop.totals.setup["peer"] / 2**20,
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured_apart(dataset: str, hops: int, rounds: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "measure", dataset, str(hops), "10", str(rounds)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )
    return found


def main() -> None:
    if sys.argv[1:2] == ["measure_large"]:
        torch.set_num_threads(1)
        print(json.dumps(measure_large(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5] == "masked")))
        return
    if sys.argv[1:2] == ["measure"]:
        dataset, hops, clients, rounds = sys.argv[2:6]
        print(json.dumps(measure(dataset, int(hops), int(clients), int(rounds))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("rounds", "pubmed", "growth", "streamed", "large"))
    parser.add_argument("--nodes", default=",".join(map(str, SIZES)))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part in (None, "rounds"):
        found = compare_rounds(options.rounds)
        seconds = found["round_seconds"]
        print(
            f"round, Cora, 10 clients: {1000 * seconds['ours']:.1f} ms against {1000 * seconds['straightforward']:.1f} "
            "ms: "
            f"{found['ratio']:.1f} times; same weights to {found['difference']:.1e} after 3 rounds; "
            f"setup {found['setup_seconds']:.2f} s with messages, {found['straightforward_power_seconds']:.2f} s at "
            "one place"
        )
    if options.part in (None, "pubmed"):
        report(measured_apart("pubmed", 20, 0), "powers_peak_mb", MEMORY_LIMITS["pubmed"])
    if options.part in (None, "growth"):
        rows = [
            measured_apart(f"csbm:nodes={nodes},classes=5,features=16,degree=10", 5, 1)
            for nodes in map(int, options.nodes.split(","))
        ]
        for row in rows:
            report(row, "peak_mb", MEMORY_LIMITS["growth"])
        if len(rows) > 1:
            first, last = rows[0], rows[-1]
            memory = (last["peak_mb"] - first["peak_mb"]) / (last["nodes"] - first["nodes"]) * 1000
            print(
                f"growth: {memory:.1f} MB per 1000 nodes; {last['nodes'] / first['nodes']:.0f} times the nodes take "
                f"{last['peak_mb'] / first['peak_mb']:.1f} times the memory and "
                f"{last['power_seconds'] / first['power_seconds']:.1f} "
                "times the CPU time"
            )
    if options.part in (None, "streamed"):
        compare_protocols(options.rounds)
    if options.part in (None, "large"):
        for nodes, limit, form, sums in LARGE:
            if (
                options.part == "large"
                and options.nodes != parser.get_default("nodes")
                and str(nodes) not in options.nodes
            ):
                continue
            command = [sys.executable, __file__, "measure_large", str(nodes), "2", form, sums]
            shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            row = json.loads(shown)
            verdict = "below" if row["peak_mb"] < limit else "ABOVE"
            print(
                f"{nodes:,} nodes hop by hop, {form}, {sums}: {row['round_seconds']:.1f} s CPU per round, "
                f"{row['whole_seconds']:.1f} s with evaluation and checkpoint, setup {row['setup_seconds']:.1f} s, "
                f"peak {row['peak_mb']:.0f} MB, {verdict} {limit:.0f} MB (data alone {row['data_mb']:.0f} MB), "
                f"{row['round_gb']:.1f} GB per round between owners"
            )


def report(row: dict[str, Any], key: str, limit: float) -> None:
    verdict = "below" if row[key] < limit else "ABOVE"
    print(
        f"{row['nodes']:,} nodes, {row['hops']} hops: peak {row[key]:.0f} MB, {verdict} {limit:.0f} MB "
        f"(data alone {row['data_mb']:.0f} MB); powers {row['power_seconds']:.1f} s CPU, {row['entries_per_row']:.1f} "
        "entries per row, "
        f"{row['peer_mb']:.0f} MB between clients"
    )


if __name__ == "__main__":
    main()
