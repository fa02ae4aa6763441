"""Local training: a cohort in one set of kernels against a plain PyG loop over clients, and against the arithmetic
lower bound.

FedAvg, two-layer GCN (hidden 64), full-batch local epochs with Adam and weight decay, persistent optimiser states; a
round is training, messages and averaging, without evaluation. Both sides start from the same weights; the averaged
weights must agree to 1e-5 after one round before anything is timed.

    python benchmarks/local_loop.py [--threads N] [--only TEXT] [--rounds N]

Times are CPU time per round (``time.process_time``, all threads), the median over rounds. The lower bound of a round
is, per step, the larger of
  - the floating-point operations of the sparse products (2 x non-zeros x width, forward and backward, first layer and
    propagation) and of the dense ones (hidden x classes) at the rate of a dense float32 product measured here, and
  - the memory traffic of Adam on the first layer, 24 bytes per parameter (read and write weight and both moments;
    parameters of features that no training node of a client sees need it only once per round), at the bandwidth
    measured here by scaling an array of the size of weights and moments in place.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import build_scenario
from isthmus.errors import DataError
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import View
from isthmus.federation.session import Session
from isthmus.methods.fedavg import METHOD, FedAvgConfig, count_round, fedavg_round, init
from isthmus.nn import Inputs, stack_inputs
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, max_difference

HIDDEN, LR, WEIGHT_DECAY = 64, 0.01, 5e-4


@dataclass(frozen=True)
class Case:
    """One workload."""

    name: str
    load: Callable[[int], list[NodeData]]
    clients: int
    epochs: int
    rounds: int


def cora(clients: int) -> list[NodeData]:
    """Cora, or where its files are missing a generated graph of its size and sparsity."""
    try:
        return list(build_scenario(dataset="cora", clients=clients).parts.values())
    except DataError as error:
        print(f"note: {error}; using a generated graph of Cora's size")
        return generated(2708, 1433, 0.0127, 5278, 7, clients)


def pubmed_sized(clients: int) -> list[NodeData]:
    """A generated graph with PubMed's counts: nodes, features, share of non-zeros, edges, classes."""
    return generated(19717, 500, 0.1, 44324, 3, clients)


def generated(nodes: int, features: int, density: float, edges: int, classes: int, clients: int) -> list[NodeData]:
    """A random graph with random sparse features, dealt to the clients; arcs between clients are dropped, 10 %
    train.
    """
    rng = Stream(0, ("benchmark", nodes)).numpy()
    owner = rng.permutation(np.arange(nodes) % clients)
    # Three of four edges stay inside a client, as a community partition would have it: random ones would leave nothing
    # to propagate.
    order = np.argsort(owner, kind="stable")
    size = np.bincount(owner, minlength=clients)
    start = np.cumsum(size) - size
    source = rng.integers(0, nodes, edges)
    inside = order[start[owner[source]] + rng.integers(0, size[owner[source]])]
    target = np.where(rng.random(edges) < 0.75, inside, rng.integers(0, nodes, edges))
    keep = (owner[source] == owner[target]) & (source != target)
    source, target = source[keep], target[keep]
    x = sp.random(nodes, features, density, format="csr", dtype=np.float32, random_state=rng)
    y, train = rng.integers(0, classes, nodes), rng.random(nodes) < 0.1
    parts = []
    local = np.empty(nodes, dtype=np.int64)
    arc_order = np.argsort(owner[source], kind="stable")
    arc_start = np.searchsorted(owner[source][arc_order], np.arange(clients + 1))
    for client in range(clients):
        rows = order[start[client] : start[client] + size[client]]
        local[rows] = np.arange(len(rows))
        arcs = arc_order[arc_start[client] : arc_start[client + 1]]
        half = np.stack([local[source[arcs]], local[target[arcs]]])
        mask = torch.from_numpy(train[rows])
        parts.append(
            NodeData(
                x=torch.from_numpy(x[rows].toarray()),
                edge_index=torch.from_numpy(np.unique(np.concatenate([half, half[::-1]], axis=1), axis=1)),
                y=torch.from_numpy(y[rows]),
                train=mask,
                val=~mask,
                test=~mask,
                node_id=torch.from_numpy(rows),
                num_classes=classes,
            )
        )
    return parts


class PlainGCN(nn.Module):
    """What one writes first."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.first = GCNConv(num_features, HIDDEN)
        self.second = GCNConv(HIDDEN, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h: Tensor = self.second(torch.relu(self.first(x, edge_index)), edge_index)
        return h


class PlainLoop:
    """A module and an optimiser per client, dense features, one client after the other."""

    def __init__(self, parts: list[NodeData], start: Weights, epochs: int) -> None:
        self.parts = [replace(part, x=part.x.to_dense()) for part in parts]
        self.epochs = epochs
        self.models = [PlainGCN(part.num_features, part.num_classes) for part in parts]
        self.optimizers = [
            torch.optim.Adam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY) for model in self.models
        ]
        self.shared = {
            "first.lin.weight": start["layers.0.weight"].mT.contiguous(),
            "first.bias": start["layers.0.bias"],
            "second.lin.weight": start["layers.1.weight"].mT.contiguous(),
            "second.bias": start["layers.1.bias"],
        }

    def round(self) -> None:
        total = {name: torch.zeros_like(tensor) for name, tensor in self.shared.items()}
        for part, model, optimizer in zip(self.parts, self.models, self.optimizers, strict=True):
            model.load_state_dict(self.shared)
            for _ in range(self.epochs):
                optimizer.zero_grad()
                logits = model(part.x, part.edge_index)
                nn.functional.cross_entropy(logits[part.train], part.y[part.train]).backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                total[name] += tensor / len(self.parts)
        self.shared = total

    def weights(self) -> dict[str, Tensor]:
        return {
            "layers.0.weight": self.shared["first.lin.weight"].mT,
            "layers.0.bias": self.shared["first.bias"],
            "layers.1.weight": self.shared["second.lin.weight"].mT,
            "layers.1.bias": self.shared["second.bias"],
        }


class Cohort:
    """FedAvg as a user runs it: the registered method on the local engine with ``execution=cohort``, messages, ledger
    and sum included.
    """

    def __init__(self, parts: list[NodeData], epochs: int) -> None:
        self.config = FedAvgConfig(
            backbone="gcn",
            hidden=(HIDDEN,),
            dropout=0.0,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            local_epochs=epochs,
            weighting="uniform",
        )
        clients = {f"client-{i:04d}": part for i, part in enumerate(parts)}
        engine = LocalEngine(clients, METHOD.table, self.config, Stream(0, ("party",)), cohort=True)
        if engine.execution != "cohort":
            raise SystemExit("these clients are too uneven to be trained together")
        self.session = Session(engine, METHOD.table)
        view = View(engine.parties("client"), parts[0].num_features, parts[0].num_classes)
        self.state, _ = count_round(init(view, self.config, Stream(0, ("common",))), self.session, self.config)
        learner: Any = engine.party("client-0000").client
        self.inputs = stack_inputs([engine.party(name).client.learner.inputs for name in clients])  # type: ignore[attr-defined]
        self.start = get_weights(learner.learner.model)

    def round(self) -> None:
        self.session.clock.begin("train", self.state.round + 1, self.state.round + 1)
        self.state, _ = fedavg_round(self.state, self.session, self.config)
        self.session.ledger.take()


def cpu_ms(work: Callable[[], object], rounds: int) -> float:
    """Median CPU milliseconds of one call."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - begin))
    return statistics.median(times)


def lower_bound_ms(inputs: Inputs, num_features: int, num_classes: int, epochs: int) -> tuple[float, float]:
    """(arithmetic, memory) milliseconds of a round; see the module docstring."""
    square = torch.randn(512, 512)
    rate = 2 * 512**3 / cpu_ms(lambda: square @ square, 20)  # operations per millisecond
    parameters = inputs.clients * num_features * HIDDEN
    array = torch.from_numpy(np.ones(3 * parameters, dtype=np.float32))  # weight and both moments
    array.mul_(1.0)
    bandwidth = 8 * array.numel() / cpu_ms(lambda: array.mul_(1.0), 9)  # bytes per millisecond
    first = inputs.first["layers.0.weight"]
    products = int(first.matrix.numel() if isinstance(first.matrix, torch.Tensor) else first.matrix.nnz)
    products += 0 if first.after is None else first.after.csr.nnz
    operations = 4 * products * HIDDEN + 4 * inputs.hidden[0].csr.nnz * num_classes
    operations += 6 * sum(inputs.rows[0]) * HIDDEN * num_classes
    blocks = first.blocks
    idle = 0 if blocks is None else int((np.diff(blocks.transposed.indptr) == 0).sum()) * HIDDEN
    return epochs * operations / rate, 24 * (epochs * (parameters - idle) + idle) / bandwidth


CASES = [
    Case("cora, 10 clients, 3 epochs", cora, 10, 3, 15),
    Case("cora, 10 clients, 1 epoch", cora, 10, 1, 15),
    Case("cora, 50 clients, 3 epochs", cora, 50, 3, 7),
    Case("pubmed-sized, 100 clients, 1 epoch", pubmed_sized, 100, 1, 7),
    Case("pubmed-sized, 1000 clients, 1 epoch", pubmed_sized, 1000, 1, 3),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: as they come)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds (default: per case)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"threads {torch.get_num_threads()}; CPU ms per round")
    for case in CASES:
        if options.only in case.name:
            run(case, options.rounds or case.rounds)


def run(case: Case, rounds: int) -> None:
    parts = case.load(case.clients)
    parts = [part for part in parts if part.num_train]  # the plain loop knows no mean over nothing
    width, classes = parts[0].num_features, parts[0].num_classes
    cohort = Cohort(parts, case.epochs)
    plain = PlainLoop(parts, cohort.start, case.epochs)
    plain.round()
    cohort.round()
    difference = max_difference(plain.weights(), cohort.state.weights)
    if not difference < 1e-5:
        raise SystemExit(f"{case.name}: plain loop and cohort differ by {difference:.1e} after one round")
    cohort.round()
    ours = cpu_ms(cohort.round, 3 * rounds)
    theirs = cpu_ms(plain.round, rounds)
    arithmetic, memory = lower_bound_ms(cohort.inputs, width, classes, case.epochs)
    print(
        f"{case.name}: plain {theirs:.1f}, cohort {ours:.2f}, ratio {theirs / ours:.1f}x; lower bound "
        f"{max(arithmetic, memory):.2f} "
        f"(arithmetic {arithmetic:.2f}, memory {memory:.2f}), {ours / max(arithmetic, memory):.1f}x above it; "
        f"equal to {difference:.0e}; {len(parts)} clients with training nodes"
    )


if __name__ == "__main__":
    main()
