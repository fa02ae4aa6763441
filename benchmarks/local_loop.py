"""FedAvg rounds: Isthmus against a straightforward PyG implementation, and against the same training in C.

    python benchmarks/local_loop.py [--only TEXT] [--rounds N] [--commit] [--check]

A round is training (dropout 0.5, full-batch local epochs, persistent optimiser states), messages, averaging and an
evaluation of the new common model at every client, as a run has it by default. Sides take turns, round by round, in one
process on one thread; figures are CPU time (``time.process_time``), medians over rounds, and only ratios within one run
count. Before anything is timed both sides do a round without dropout from the same weights and must agree to 1e-5.

    plain     a module and an optimiser per client, dense features, PyG's layers, `state_dict`s averaged; evaluation is
              a forward pass per client on all its nodes
    ours      the registered method on the local engine, clients together; ``each``: every client by itself
    native    local training alone written in C (`native_floor.c`), where a compiler is found: all weights per client

Settings: ``openfgl`` is GCN, Adam, weight decay 5e-4, three epochs; ``default`` is what ``isthmus run fedavg`` does:
GraphSAGE, AdamW, one epoch; ``norm`` is openfgl's with an input norm.

``--commit`` writes the ratios to benchmarks/ratios.json, ``--check`` fails where one fell by more than a fifth.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv

from isthmus.compiling import use_threads
from isthmus.data.node_data import NodeData
from isthmus.data.scenario import build_scenario
from isthmus.errors import DataError
from isthmus.experiments.scoring import evaluation_line
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import View
from isthmus.federation.session import Session
from isthmus.graph.normalise import gcn_norm
from isthmus.methods.fedavg import METHOD, FedAvgConfig, count_round, fedavg_round, init
from isthmus.nn.inputs import build_inputs
from isthmus.nn.registry import build_backbone
from isthmus.nn.sparse import as_csr
from isthmus.seeds import Stream
from isthmus.tensors import Weights, max_difference

HIDDEN, DROPOUT = 64, 0.5
COMMITTED = Path(__file__).with_name("ratios.json")
FALL = 0.8
"""What a ratio may fall to, of the committed one."""


@dataclass(frozen=True)
class Case:
    """One workload."""

    name: str
    load: Callable[[], list[NodeData]]
    settings: dict[str, Any]
    rounds: int
    native: bool = False


def cora(clients: int, partition: str = "random") -> list[NodeData]:
    """Cora, or where its files are missing a generated graph of its size and sparsity."""
    try:
        return list(build_scenario(dataset="cora", clients=clients, partition=partition).parts.values())
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


OPENFGL: dict[str, Any] = {
    "backbone": "gcn",
    "optimizer": "adam",
    "lr": 0.01,
    "weight_decay": 5e-4,
    "local_epochs": 3,
}
DEFAULT: dict[str, Any] = {
    "backbone": "sage",
    "optimizer": "adamw",
    "lr": 0.01,
    "weight_decay": 0.01,
    "local_epochs": 1,
}
NORM: dict[str, Any] = {**OPENFGL, "input_norm": True}


class PlainModel(nn.Module):
    """What one writes first."""

    def __init__(self, num_features: int, num_classes: int, settings: dict[str, Any], dropout: float) -> None:
        super().__init__()
        layer = GCNConv if settings["backbone"] == "gcn" else SAGEConv
        self.norm = nn.LayerNorm(num_features) if settings.get("input_norm") else None
        self.first, self.second, self.dropout = layer(num_features, HIDDEN), layer(HIDDEN, num_classes), dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        h = torch.relu(self.first(x, edge_index))
        h = nn.functional.dropout(h, self.dropout, self.training)
        logits: Tensor = self.second(h, edge_index)
        return logits


NAMES = {
    "gcn": {"weight": "lin.weight", "bias": "bias"},
    "sage": {"neighbour": "lin_l.weight", "bias": "lin_l.bias", "root": "lin_r.weight"},
}


class PlainLoop:
    """A module and an optimiser per client, dense features, one client after the other."""

    def __init__(self, parts: list[NodeData], start: Weights, settings: dict[str, Any], dropout: float) -> None:
        self.parts = [replace(part, x=part.x.to_dense()) for part in parts]
        self.epochs = settings["local_epochs"]
        sizes = parts[0].num_features, parts[0].num_classes
        self.models = [PlainModel(*sizes, settings, dropout) for _ in parts]
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings["optimizer"]]
        rates = {"lr": settings["lr"], "weight_decay": settings["weight_decay"]}
        self.optimizers = [kind(model.parameters(), **rates) for model in self.models]
        self.names = {}
        for layer, place in (("first", "layers.0"), ("second", "layers.1")):
            for ours, theirs in NAMES[settings["backbone"]].items():
                self.names[f"{layer}.{theirs}"] = f"{place}.{ours}"
        if settings.get("input_norm"):
            self.names |= {"norm.weight": "input_norm.gamma", "norm.bias": "input_norm.beta"}
        self.shared = {theirs: _turned(start[ours]) for theirs, ours in self.names.items()}

    def round(self) -> None:
        total = {name: torch.zeros_like(tensor) for name, tensor in self.shared.items()}
        for part, model, optimizer in zip(self.parts, self.models, self.optimizers, strict=True):
            model.load_state_dict(self.shared)
            model.train()
            for _ in range(self.epochs):
                optimizer.zero_grad()
                logits = model(part.x, part.edge_index)
                nn.functional.cross_entropy(logits[part.train], part.y[part.train]).backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                total[name] += tensor / len(self.parts)
        self.shared = total

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        found = [0.0, 0.0, 0.0]
        for part, model in zip(self.parts, self.models, strict=True):
            model.load_state_dict(self.shared)
            model.eval()
            logits = model(part.x, part.edge_index)
            right = logits.argmax(1) == part.y
            for i, mask in enumerate((part.train, part.val, part.test)):
                found[i] += float(right[mask].sum())
                nn.functional.cross_entropy(logits[mask], part.y[mask])
        return found

    def weights(self) -> dict[str, Tensor]:
        return {ours: _turned(self.shared[theirs]) for theirs, ours in self.names.items()}


def _turned(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous() if tensor.dim() == 2 else tensor.clone()


class Ours:
    """FedAvg as a user runs it: the registered method on the local engine, messages, ledger and sum included."""

    def __init__(self, parts: list[NodeData], settings: dict[str, Any], dropout: float, *, cohort: bool = True) -> None:
        self.config = FedAvgConfig(hidden=(HIDDEN,), dropout=dropout, weighting="uniform", **settings)
        clients = {f"client-{i:04d}": part for i, part in enumerate(parts)}
        self.nodes = {client: part.num_nodes for client, part in clients.items()}
        engine = LocalEngine(clients, METHOD.table, self.config, Stream(0, ("party",)), cohort=cohort)
        if cohort and engine.execution != "cohort":
            raise SystemExit("these clients are not trained together")
        self.session = Session(engine, METHOD.table)
        view = View(engine.parties("client"), parts[0].num_features, parts[0].num_classes)
        self.state, _ = count_round(init(view, self.config, Stream(0, ("common",))), self.session, self.config)
        self.start = self.state.weights

    def round(self) -> None:
        self.session.clock.begin("train", self.state.round + 1, self.state.round + 1)
        self.state, _ = fedavg_round(self.state, self.session, self.config)
        self.session.ledger.take()

    def evaluate(self) -> None:
        self.session.clock.begin("evaluation", self.state.round, self.state.round + 1)
        evaluation_line(METHOD.evaluate(self.state, self.session, self.config), self.nodes)
        self.session.ledger.take()


class Native:
    """The epochs of all clients and their average in C."""

    def __init__(self, library: Path, parts: list[NodeData], start: Weights, settings: dict[str, Any]) -> None:
        self.library, self.settings = ctypes.CDLL(str(library)), settings
        backbone = build_backbone(
            "gcn",
            num_features=parts[0].num_features,
            num_classes=parts[0].num_classes,
            hidden=(HIDDEN,),
            dropout=0.0,
            input_norm=False,
            head=False,
            stream=Stream(0),
        )
        order = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
        self.shared = torch.cat([start[name].flatten() for name in order]).numpy()
        self.sizes = parts[0].num_features, HIDDEN, parts[0].num_classes
        self.clients, self.step = [], 0
        for part in parts:
            steps = gcn_norm(part.edge_index, part.num_nodes)
            inputs = build_inputs(part, backbone, part.train)
            seeds = np.flatnonzero(part.train.numpy())
            near = np.flatnonzero(np.asarray(abs(steps[seeds]).sum(0)).ravel())
            s = sp.csr_matrix(steps[near] @ as_csr(part.x))
            a = sp.csr_matrix(steps[seeds][:, near])
            assert inputs.counts[0] == len(seeds)
            matrices = []
            for matrix in (s, s.T.tocsr(), a, a.T.tocsr()):
                parts_of = (matrix.indptr, np.int64), (matrix.indices, np.int32), (matrix.data, np.float32)
                matrices += [np.ascontiguousarray(array, dtype=kind) for array, kind in parts_of]
            y = np.ascontiguousarray(part.y.numpy()[seeds], dtype=np.int64)
            moments = [np.zeros_like(self.shared) for _ in range(2)]
            self.clients.append((len(near), len(seeds), matrices, y, np.empty_like(self.shared), moments))

    def round(self) -> None:
        settings, total = self.settings, np.zeros_like(self.shared)
        rates = ctypes.c_float(settings["lr"]), ctypes.c_float(settings["weight_decay"])
        for p, q, matrices, y, weights, moments in self.clients:
            weights[:] = self.shared
            arrays = [_pointer(array) for array in (*matrices, y, weights, *moments)]
            self.library.train(*self.sizes, p, q, *arrays, self.step, settings["local_epochs"], *rates, 1)
            share = ctypes.c_float(1.0 / len(self.clients))
            self.library.add(ctypes.c_int64(total.size), share, _pointer(weights), _pointer(total))
        self.shared, self.step = total, self.step + settings["local_epochs"]


def _pointer(array: Any) -> Any:
    return ctypes.c_void_p(array.ctypes.data)


def native_library(folder: Path) -> Path | None:
    """`native_floor.c` compiled, None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, target = Path(__file__).with_name("native_floor.c"), folder / "native_floor.so"
    flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target), "-lm"], check=True)
    return target


CASES = [
    Case("cora 10, openfgl", lambda: cora(10), OPENFGL, 15, native=True),
    Case("cora 10, default", lambda: cora(10), DEFAULT, 15),
    Case("cora 10, norm", lambda: cora(10), NORM, 9),
    Case("cora 50, openfgl", lambda: cora(50), OPENFGL, 9, native=True),
    Case("cora 50, default", lambda: cora(50), DEFAULT, 9),
    Case("cora 50 louvain, openfgl", lambda: cora(50, "louvain"), OPENFGL, 9),
    Case("pubmed-sized 1000, one epoch", lambda: pubmed_sized(1000), {**OPENFGL, "local_epochs": 1}, 3),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds (default: per case)")
    parser.add_argument("--commit", action="store_true", help="write the ratios to benchmarks/ratios.json")
    parser.add_argument("--check", action="store_true", help="fail where a ratio fell by more than a fifth")
    options = parser.parse_args()
    use_threads(1)
    if not any(options.only in case.name for case in CASES):
        parser.error(f"no case has {options.only!r} in its name: {', '.join(case.name for case in CASES)}")
    print("one thread; CPU ms per round, medians; +e with evaluation")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        library = native_library(Path(folder))
        for case in CASES:
            if options.only in case.name:
                rows[case.name] = run(case, options.rounds or case.rounds, library)
    print()
    columns = "plain", "plain +e", "ours", "ours +e", "each +e", "native", "ratio", "ratio +e"
    print(f"| case | {' | '.join(columns)} | each / together | ours / native |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row.cells())} |")
    ratios = {name: round(row.plain_both / row.ours_both, 1) for name, row in rows.items()}
    if options.commit:
        known = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
        COMMITTED.write_text(json.dumps({**known, **ratios}, indent=2) + "\n")
    if options.check:
        check(ratios)


def check(ratios: dict[str, float]) -> None:
    """Fail where a ratio is more than a fifth below the committed one, or where none is committed."""
    known = json.loads(COMMITTED.read_text())
    if missing := [name for name in ratios if name not in known]:
        raise SystemExit(f"no ratio is committed of {', '.join(missing)}: run with --commit first")
    fallen = [
        f"{name}: {ratio} times plain, committed {known[name]}"
        for name, ratio in ratios.items()
        if ratio < FALL * known[name]
    ]
    if fallen:
        raise SystemExit("slower than committed: " + "; ".join(fallen))
    print(f"all {len(ratios)} ratios within a fifth of the committed ones, or above")


@dataclass(frozen=True)
class Row:
    """Medians of a case in milliseconds."""

    plain: float
    plain_both: float
    ours: float
    ours_both: float
    each_both: float
    native: float | None

    def cells(self) -> list[str]:
        native = "-" if self.native is None else f"{self.native:.2f}"
        beside = "-" if self.native is None else f"{self.ours / self.native:.2f}"
        times = (self.plain, self.plain_both, self.ours, self.ours_both, self.each_both)
        ratios = f"{self.plain / self.ours:.1f}", f"{self.plain_both / self.ours_both:.1f}"
        return [*(f"{ms:.2f}" for ms in times), native, *ratios, f"{self.each_both / self.ours_both:.2f}", beside]


def cpu_ms(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return 1e3 * (time.process_time() - begin)


def run(case: Case, rounds: int, library: Path | None) -> Row:
    parts = [part for part in case.load() if part.num_train]  # the plain loop knows no mean over nothing
    check_equal(case, parts)
    ours, each = Ours(parts, case.settings, DROPOUT), Ours(parts, case.settings, DROPOUT, cohort=False)
    plain = PlainLoop(parts, ours.start, case.settings, DROPOUT)
    sides: dict[str, Any] = {"plain": plain, "ours": ours, "each": each}
    if case.native and library is not None:
        sides["native"] = Native(library, parts, ours.start, case.settings)
    times: dict[str, list[float]] = {name: [] for name in (*sides, "plain e", "ours e", "each e")}
    for turn in range(rounds + 2):
        for name, side in sides.items():
            train = cpu_ms(side.round)
            score = cpu_ms(side.evaluate) if name != "native" else 0.0
            if turn >= 2:  # the first ones compile, allocate and warm up
                times[name].append(train)
                if name != "native":
                    times[f"{name} e"].append(train + score)
    median = {name: statistics.median(found) for name, found in times.items() if found}
    row = Row(
        median["plain"],
        median["plain e"],
        median["ours"],
        median["ours e"],
        median["each e"],
        median.get("native"),
    )
    print(f"{case.name} ({len(parts)} clients with training nodes): {', '.join(row.cells())}", flush=True)
    return row


def check_equal(case: Case, parts: list[NodeData]) -> None:
    """One round without dropout: all sides do the same."""
    ours, each = Ours(parts, case.settings, 0.0), Ours(parts, case.settings, 0.0, cohort=False)
    plain = PlainLoop(parts, ours.start, case.settings, 0.0)
    for side in (ours, each, plain):
        side.round()
    for name, side in (("clients together", ours), ("each by itself", each)):
        difference = max_difference(plain.weights(), side.state.weights)
        if not difference < (1e-3 if case.settings.get("input_norm") else 1e-5):
            raise SystemExit(f"{case.name}: plain loop and {name} differ by {difference:.1e} after one round")


if __name__ == "__main__":
    main()
