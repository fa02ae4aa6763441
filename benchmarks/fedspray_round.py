"""One round of FedSpray against a straightforward dense implementation, and the memory of a round on Physics.

Both sides run the reference profile (proxies of training nodes go on from their last value, projector loaded from the
classifier, teaching above a confidence of 0.7) on PubMed's published seven clients: two-layer GCN (hidden 64), proxies
of width 64, 5 local epochs per phase, Adam. The plain side is how one would write it first: PyG's GCNConv on dense
features, torch modules, autograd and torch.optim.Adam, a proxy for every node, both networks on all nodes in every
epoch. They start from the same weights. In float64 GNNs, encoder and proxies must agree to 1e-5 after two rounds, in
float32 to 1e-3 (Adam's first steps divide rounding errors by tiny gradients), before anything is timed; the timed
rounds are float32.

After that the product is also timed as users get it by default ("by default"): the paper profile, whose sums are masked
between the clients, so that the server reads only totals; the plain side stays as it is, without any masks.

    python benchmarks/fedspray_round.py [--rounds N] [--dataset NAME] [--skip-memory]

Times are CPU time per round (``time.process_time``, one thread), the median over rounds, without evaluation; one run
times both sides, in turns.
The memory part runs in processes of its own (``--memory ours|plain``): the peak resident size after two rounds on
Physics' twelve clients (8,415 sparse features), less what the process had when data were loaded.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch_geometric.nn import GCNConv

from isthmus.compiling import use_threads
from isthmus.data.node_data import NodeData
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of

TOLERANCE = {"float64": 1e-5, "float32": 1e-3}
"""After two rounds. Our propagation matrix is rounded to float32 once, in both."""


class GCN(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.one, self.two = GCNConv(features, 64, cached=True), GCNConv(64, classes, cached=True)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.two(torch.relu(self.one(x, edges)), edges)
        return out


class Encoder(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.embed, self.classify, self.project = (
            nn.Linear(features, 64),
            nn.Linear(64, classes),
            nn.Linear(64, classes),
        )

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        e = torch.relu(self.embed(x))
        return self.classify(e + s), self.project(e)


class PlainClient:
    """One client, as one would write it first."""

    def __init__(self, data: NodeData, gnn: Mapping[str, Tensor], config: Any) -> None:
        self.config, self.edges, self.y, self.train = config, data.edge_index, data.y, data.train
        self.x = data.x.to_dense().to(config.dtype)
        self.gnn, self.encoder = GCN(data.num_features, data.num_classes), Encoder(data.num_features, data.num_classes)
        self.gnn = self.gnn.to(config.dtype)
        with torch.no_grad():
            for name, layer in (("0", self.gnn.one), ("1", self.gnn.two)):
                layer.lin.weight.copy_(gnn[f"layers.{name}.weight"].T)
                layer.bias.copy_(gnn[f"layers.{name}.bias"])
        self.encoder = self.encoder.to(config.dtype)
        self.s = nn.Parameter(torch.full((data.num_nodes, config.proxy_width), 0.1, dtype=config.dtype))
        self.classes = data.num_classes
        self.gnn_adam = torch.optim.Adam(self.gnn.parameters(), lr=config.lr)
        self.encoder_adam = torch.optim.Adam(self.encoder.parameters(), lr=config.encoder_lr)
        self.proxy_adam = torch.optim.Adam([self.s], lr=config.proxy_lr)

    def round(self, encoder: Mapping[str, Tensor], classes: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        config, train = self.config, self.train
        self.encoder.load_state_dict(encoder)
        with torch.no_grad():
            q = softmax(self.encoder(self.x, self.s)[1], dim=-1)
            self.s[~train] = (q @ classes)[~train]
            p = softmax(self.encoder(self.x, self.s)[0], dim=-1)
        chosen = train | (q.max(dim=-1).values > config.kd_confidence)
        for _ in range(config.local_epochs):
            log_y = log_softmax(self.gnn(self.x, self.edges), dim=-1)
            loss = nn.functional.nll_loss(log_y[train], self.y[train])
            loss = loss + config.lambda1 * kl_div(log_y[chosen], p[chosen], reduction="batchmean")
            self.step(loss, self.gnn_adam)
        with torch.no_grad():
            predicted = softmax(self.gnn(self.x, self.edges), dim=-1)
        self.encoder.project.load_state_dict(self.encoder.classify.state_dict())
        for _ in range(config.local_epochs):
            p_logits, q_logits = self.encoder(self.x, self.s)
            loss = cross_entropy(q_logits[train], self.y[train])
            loss = loss + config.lambda2 * kl_div(
                log_softmax(p_logits, dim=-1)[train], predicted[train], reduction="batchmean"
            )
            self.step(loss, self.encoder_adam, self.proxy_adam)
        means = torch.zeros_like(classes)
        for j in range(self.classes):
            rows = self.s.detach()[train & (self.y == j)]
            means[j] = rows.mean(0) if len(rows) else 0.0
        return {name: tensor.clone() for name, tensor in self.encoder.state_dict().items()}, means

    @staticmethod
    def step(loss: Tensor, *optimizers: torch.optim.Adam) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()


class Plain:
    """All clients and the server."""

    def __init__(self, experiment: SimulatedRun) -> None:
        state: Any = experiment.loop.state
        parts: Mapping[str, Any] = experiment.parts
        config = experiment.settings.method_config
        gnns = {name: experiment.engine.party(name).client.export() for name in parts}
        self.clients = {name: PlainClient(data, gnns[name], config) for name, data in parts.items()}
        self.encoder = {
            name: tensor.T.contiguous() if tensor.dim() == 2 else tensor for name, tensor in state.encoder.items()
        }
        self.proxies: Tensor = state.proxies
        sizes = torch.tensor([float(data.num_train) for data in parts.values()], dtype=config.dtype)
        self.shares = sizes / sizes.sum()
        counts = torch.stack(
            [torch.bincount(data.y[data.train], minlength=data.num_classes) for data in parts.values()]
        )
        class_shares = counts.to(config.dtype) / counts.sum(1, keepdim=True)
        self.class_shares = class_shares / class_shares.sum(0)

    def round(self) -> None:
        uploads = [client.round(self.encoder, self.proxies) for client in self.clients.values()]
        self.encoder = {
            name: sum(
                (share * upload[0][name] for share, upload in zip(self.shares, uploads, strict=True)), torch.zeros(())
            )
            for name in self.encoder
        }
        self.proxies = torch.einsum("kc,kcd->cd", self.class_shares, torch.stack([upload[1] for upload in uploads]))


def new_experiment(dataset: str, precision: str = "float32", *, default: bool = False) -> SimulatedRun:
    flags = {"dataset": dataset, "partition": "fedspray", "eval_every": 10**6, "rounds": 10**6}
    if not default:
        flags |= {"profile": "reference", "init": "standard", "precision": precision}
    settings = resolve("fedspray", flags)
    return SimulatedRun(settings, scenario_of(settings))


def largest_difference(ours: SimulatedRun, plain: Plain) -> float:
    state: Any = ours.loop.state
    found = [float((state.proxies - plain.proxies).abs().max())]
    for name, tensor in state.encoder.items():
        other = plain.encoder[name]
        found.append(float((tensor - (other.T if other.dim() == 2 else other)).abs().max()))
    for name, client in plain.clients.items():
        weights = ours.engine.party(name).client.export()
        for layer, module in (("0", client.gnn.one), ("1", client.gnn.two)):
            found.append(float((weights[f"layers.{layer}.weight"] - module.lin.weight.detach().T).abs().max()))
    return max(found)


def compare(dataset: str, rounds: int) -> None:
    for precision, allowed in TOLERANCE.items():
        ours = new_experiment(dataset, precision)
        plain = Plain(ours)
        ours.loop.play(until=3)  # setup and two rounds
        plain.round()
        plain.round()
        difference = largest_difference(ours, plain)
        print(f"{dataset}, {precision}: largest difference after two rounds {difference:.2g} (allowed {allowed:g})")
        if not difference <= allowed:
            raise SystemExit("the two sides do not compute the same")
    usual = new_experiment(dataset, default=True)
    usual.loop.play(until=3)
    config = usual.settings.method_config
    print(f"by default: secure sums {usual.settings.secure}, {config.backbone}, {config.local_epochs} local epochs")
    sides = {
        "ours": lambda: ours.loop.play(until=ours.loop.at.step + 1),
        "ours by default": lambda: usual.loop.play(until=usual.loop.at.step + 1),
        "plain": plain.round,
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, play in sides.items():
            begun = time.process_time()
            play()
            times[name].append(time.process_time() - begun)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        print(f"{dataset}: {name:15} {seconds:.3f} s of CPU per round, median of {rounds}")
    for name in ("ours", "ours by default"):
        print(f"plain / {name}: {medians['plain'] / medians[name]:.2f} (at least 5 wanted)")


def memory(side: str, dataset: str) -> None:
    """Two rounds, then the peak."""
    experiment = new_experiment(dataset)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if side == "ours":
        experiment.loop.play(until=3)
    else:
        plain = Plain(experiment)
        plain.round()
        plain.round()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{dataset}: peak memory {side} {peak / 1024:.0f} MB, of which {(peak - before) / 1024:.0f} MB by the rounds")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dataset", default="pubmed")
    parser.add_argument("--memory", choices=("ours", "plain"))
    parser.add_argument("--memory-dataset", default="coauthor-physics")
    parser.add_argument("--skip-memory", action="store_true")
    arguments = parser.parse_args()
    use_threads(1)
    if arguments.memory:
        memory(arguments.memory, arguments.memory_dataset)
        return
    compare(arguments.dataset, arguments.rounds)
    if not arguments.skip_memory:
        for side in ("ours", "plain"):
            subprocess.run(
                [sys.executable, __file__, "--memory", side, "--memory-dataset", arguments.memory_dataset], check=True
            )


if __name__ == "__main__":
    main()
