"""FedSage+: what it reduces to, its losses beside loops over nodes, what crosses between clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of_settings
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.federation.messages import Kind, kinds_of
from isthmus.methods.fedsageplus import algorithm
from isthmus.methods.fedsageplus import generator as neighgen
from isthmus.methods.fedsageplus.algorithm import FedSagePlusConfig, MendedLearner, Residuals, mended
from isthmus.methods.fedsageplus.generator import Sizes, Slots
from isthmus.methods.registry import get_method
from isthmus.seeds import Stream
from isthmus.tensors import Weights, equal_weights, max_difference
from isthmus.testing import METHODS, check_method

SMALL: dict[str, Any] = {
    "dataset": "csbm:nodes=160,classes=3,features=12,degree=6",
    "partition": "random",
    "split": "40/30/30",
    "clients": 4,
    "seed": 3,
    "rounds": 3,
    "hidden": (8,),
    "dropout": 0.0,
    "preset": "fedstruct",
    "head": False,
    "backbone": "sage",
    "execution": "each",
}
GENERATOR: dict[str, Any] = {
    "hide": "nodes",
    "hidden_share": 0.3,
    "generator_epochs": 60,
    "cross_rounds": 2,
    "generator_lr": 0.02,
    "encoder_width": 8,
    "code_width": 8,
    "generator_widths": (16,),
    "generator_rank": 4,
    "generator_output": "linear",
}
SIZES = Sizes(features=12, classes=3, hidden=8, code=8, widths=(16,), rank=4, most=5, output="linear")


def start(method: str = "fedsageplus", **settings: Any) -> SimulatedRun:
    own = GENERATOR if method == "fedsageplus" else {}
    resolved = resolve(method, {**SMALL, **own, **settings})
    return SimulatedRun(resolved, scenario_of(resolved))


def play(method: str = "fedsageplus", **settings: Any) -> SimulatedRun:
    experiment = start(method, **settings)
    experiment.loop.play()
    return experiment


def clients_of(experiment: SimulatedRun) -> list[Any]:
    return [experiment.engine.party(name).client for name in experiment.engine.parties("client")]


def models(experiment: SimulatedRun) -> dict[str, Weights]:
    return {client: export.weights or {} for client, export in experiment.engine.export(selected=False)}


def same(a: SimulatedRun, b: SimulatedRun) -> bool:
    ours, theirs = models(a), models(b)
    return all(equal_weights(ours[client], theirs[client]) for client in ours)


def client() -> Any:
    return clients_of(start(precision="float64"))[0]


def first_generator() -> dict[str, Tensor]:
    weights = neighgen.first_weights(SIZES, Stream(1), torch.float64)
    return {**weights, "count.0.bias": weights["count.0.bias"] + 1.4}  # d^ near 1 and 2


# -- general ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cross", ["gradients", "features", "none"])
def test_general_properties(cross: str) -> None:
    check_method("fedsageplus", settings={**METHODS["fedsageplus", "node"].settings, "cross": cross})


def test_only_fedsageplus_cites_the_paper() -> None:
    assert "Missing Neighbor Generation" in get_method("fedsageplus").reference
    assert "Missing Neighbor Generation" not in get_method("fedsage").reference


def test_labels_of_validation_and_test_nodes_change_no_model() -> None:
    honest, poisoned = start(), start()
    for each in clients_of(poisoned):
        other = ~each.data.train
        y = each.data.y.clone()
        y[other] = (y[other] + 1) % each.data.num_classes
        each.data = replace(each.data, y=y)
        each.setup()
    for run in (honest, poisoned):
        run.loop.play()
    assert same(honest, poisoned)


# -- what it reduces to ----------------------------------------------------------------------------


def test_without_generated_neighbours_it_is_fedsage() -> None:
    ours = start()
    for each in clients_of(ours):
        bias = each.state.generator["count.0.bias"]
        each.state = replace(each.state, generator={**each.state.generator, "count.0.bias": bias - 100.0})
    ours.loop.play()
    assert ours.loop.state.neighbours == 0
    assert same(ours, play("fedsage"))


def test_arcs_to_generated_nodes_only_are_fedsage() -> None:
    plain, outward, both = play("fedsage"), play(edges="outward"), play()
    assert outward.loop.state.neighbours == both.loop.state.neighbours > 0
    assert all(max_difference(models(outward)[c], models(plain)[c]) < 1e-6 for c in models(plain))
    assert all(max_difference(models(both)[c], models(plain)[c]) > 1e-4 for c in models(plain))


def test_a_generated_feature_changes_its_own_nodes_logits() -> None:
    each = client()
    slots = Slots(torch.tensor([2]), torch.tensor([0]))
    low, high = (
        mended(each.data, slots, row.view(1, 12), both=True)
        for row in (torch.arange(12.0, dtype=torch.float64), -torch.arange(12.0, dtype=torch.float64))
    )
    node = low.num_nodes - 1
    assert low.edge_index[:, -2:].tolist() == [[2, node], [node, 2]]
    weights = each.state.weights
    logits = [MendedLearner(each.plain, data).logits(weights) for data in (low, high)]
    assert logits[0].shape[0] == each.data.num_nodes
    assert not torch.allclose(logits[0][2], logits[1][2])


def test_generated_nodes_are_in_no_part_and_in_no_group() -> None:
    each = clients_of(play())[0]
    learner, data = each.learner, each.learner.data
    assert data.num_nodes > each.data.num_nodes
    for part in ("train", "val", "test"):
        assert not getattr(data, part)[each.data.num_nodes :].any()
    assert learner.num_samples == each.data.num_nodes == len(each.logits())
    assert learner.masks == each.plain.masks


def test_generated_neighbours_come_of_codes_with_noise() -> None:
    each = clients_of(play(precision="float64"))[0]
    weights, graph = each.state.generator, neighgen.Graph(each.x, each.data.edge_index, torch.float64)
    codes = neighgen.encode(weights, graph)
    slots = neighgen.used_slots(neighgen.missing_counts(weights, codes), 5)
    found = torch.from_numpy(neighgen.as_csr(each.learner.data.x)[each.data.num_nodes :].toarray()).double()
    quiet = neighgen.generated_rows(weights, each.sizes, codes[torch.unique(slots.node)], slots)
    assert found.shape == quiet.shape and not torch.allclose(found, quiet, atol=1e-2)


def test_one_client_has_no_cross_term() -> None:
    alone, none = play(clients=1), play(clients=1, cross="none")
    assert same(alone, none)


def test_no_rounds_across_clients_are_none() -> None:
    """A phase of no rounds is passed over."""
    without, none = play(cross_rounds=0), play(cross_rounds=0, cross="none")
    assert same(without, none) and without.loop.totals.setup["peer"] == 0 and len(without.loop.round_seconds) == 3


# -- losses beside loops over nodes ----------------------------------------------------------------


def loop_loss(weights: dict[str, Tensor], each: Any, noise: Tensor, most: int) -> Tensor:
    """L^d + L^f + CE as a straightforward program writes them, node by node, dense."""
    impaired, x = each.impaired, each.data.x.to_dense().double()
    count = impaired.graph.count
    own, adjacency = x[impaired.kept], torch.eye(count, dtype=torch.float64)
    for a, b in impaired.graph.edge_index.T.tolist():
        adjacency[b, a] += 1.0
    steps = adjacency / adjacency.sum(1, keepdim=True)
    h = torch.relu(steps @ own @ weights["encoder.0.weight"] + weights["encoder.0.bias"])
    z = torch.relu(steps @ h @ weights["encoder.1.weight"] + weights["encoder.1.bias"])
    counts = torch.relu(z @ weights["count.0.weight"] + weights["count.0.bias"])[:, 0]
    h = torch.relu((z + noise) @ weights["rows.0.weight"] + weights["rows.0.bias"])
    h = h @ weights["rows.1.weight"] + weights["rows.1.bias"]
    rows = (h @ weights["rows.2.weight"] + weights["rows.2.bias"]).view(count, most, -1)
    kept = impaired.kept.tolist()
    hidden = set(range(each.data.num_nodes)) - set(kept)
    edges = each.data.edge_index.T.tolist()
    total, train = torch.zeros((), dtype=torch.float64), impaired.train.tolist()
    for v in train:
        neighbours = [a for a, b in edges if b == kept[v] and a in hidden]
        total = total + torch.nn.functional.smooth_l1_loss(counts[v], torch.tensor(float(len(neighbours))).double())
        for p in range(min(most, round(counts[v].item())) if neighbours else 0):
            away = [((rows[v, p] - x[u]) ** 2).mean() for u in neighbours[:most]]
            total = total + min(away, key=lambda value: value.item())
    new = [(v, p) for p in range(most) for v in range(count) if p < round(counts[v].item())]
    large = torch.zeros(count + len(new), count + len(new), dtype=torch.float64)
    large[:count, :count] = adjacency
    for i, (v, _) in enumerate(new):
        large[count + i, v] = large[v, count + i] = large[count + i, count + i] = 1.0
    steps = large / large.sum(1, keepdim=True)
    everything = torch.cat([own, torch.stack([rows[v, p] for v, p in new])])
    h = torch.relu(steps @ everything @ weights["classifier.0.weight"] + weights["classifier.0.bias"])
    logits = (steps @ h @ weights["classifier.1.weight"] + weights["classifier.1.bias"])[impaired.train]
    right = torch.nn.functional.cross_entropy(logits, impaired.y[impaired.train], reduction="sum")
    return (total + right) / len(train)


def test_loss_and_gradient_equal_a_program_that_loops_over_nodes() -> None:
    each = client()
    noise = torch.randn(1, 8, generator=Stream(5).torch(), dtype=torch.float64)
    found = []
    for loss in (
        lambda w: neighgen.local_loss(w, SIZES, each.impaired, each.x, lambda count: (noise, None)),
        lambda w: loop_loss(w, each, noise, SIZES.most),
    ):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in first_generator().items()}
        value = loss(leaves)
        found.append((value, torch.autograd.grad(value, list(leaves.values()))))
    (ours, ours_by), (loops, loops_by) = found
    assert float(ours) == pytest.approx(float(loops), rel=1e-9)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(ours_by, loops_by, strict=True))
    assert float(ours_by[list(first_generator()).index("rows.2.weight")].abs().max()) > 0.0


def test_rows_that_are_a_permutation_of_the_targets_cost_nothing() -> None:
    x = sp.csr_matrix(np.eye(5))
    rows = torch.eye(5, dtype=torch.float64)[[3, 1, 4]]
    targets = torch.tensor([[4, 1, 3, -1, -1]] * 3)
    assert not neighgen.residuals(rows, targets, x).any()
    assert not neighgen.residuals(rows, torch.full((3, 5), -1), x).any()  # nothing to compare with


def test_order_of_nodes_changes_no_loss() -> None:
    each = client()
    data, order = each.data, torch.randperm(each.data.num_nodes, generator=Stream(8).torch())
    place = torch.argsort(order)
    x = torch.from_numpy(each.x[order.numpy()].toarray())
    parts: Any = {part: getattr(data, part)[order] for part in ("y", "train", "val", "test", "node_id")}
    turned = replace(data, x=x, edge_index=place[data.edge_index], **parts)
    hidden = torch.zeros(data.num_nodes, dtype=torch.bool)
    hidden[::3] = True
    losses, still = [], lambda count: (torch.zeros(1, 8, dtype=torch.float64), None)
    for graph, hide in ((data, hidden), (turned, hidden[order])):
        impaired = neighgen.impair(graph, hide, 99, torch.float64)
        features = sp.csr_matrix(graph.x.to_dense().double().numpy())
        losses.append(float(neighgen.local_loss(first_generator(), SIZES, impaired, features, still)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


# -- between clients -------------------------------------------------------------------------------


def test_sums_of_gradients_train_what_features_in_clear_train() -> None:
    by_sum, by_features, none = (play(cross=cross, precision="float64") for cross in ("gradients", "features", "none"))
    for ours, theirs, alone in zip(*map(clients_of, (by_sum, by_features, none)), strict=True):
        assert max_difference(ours.state.generator, theirs.state.generator) < 1e-9
        assert max_difference(ours.state.generator, alone.state.generator) > 1e-4
    first, second, *_ = clients_of(by_sum)
    assert max_difference(first.state.generator, second.state.generator) > 1e-3  # nobody's generator is averaged


def test_only_fgen_learns_across_clients() -> None:
    experiment = start()
    loop, before = experiment.loop, {}
    original = algorithm.FedSagePlusClient.learn_rows

    def watched(self: Any, away: Any, others: int) -> None:
        before[self.party] = dict(self.state.generator)
        original(self, away, others)
        for name, tensor in self.state.generator.items():
            if not name.startswith(neighgen.ROWS):
                assert torch.equal(tensor, before[self.party][name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithm.FedSagePlusClient, "learn_rows", watched)
        loop.play()
    assert before


@pytest.mark.parametrize("cross", ["gradients", "features"])
def test_a_step_across_clients_by_loops(cross: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fGen's gradient is that of (L^f + CE + L^f with every other client's targets) / K."""
    experiment = start(precision="float64", cross_rounds=1, cross=cross)
    experiment.loop.play(until=1)
    clients = clients_of(experiment)
    taken: list[dict[str, Tensor]] = []
    step, learn, compared = algorithm.take_step, algorithm.FedSagePlusClient.learn_rows, []

    def watched(self: Any, away: Tensor, others: int) -> None:
        leaves = {name: tensor for name, tensor in self.scratch.leaves.items() if tensor.requires_grad}
        rows, known = self.scratch.rows, neighgen.fixed(self.impaired, self.settled().known.slots, self.x)
        asked, asked_by = torch.unique(known.number, return_inverse=True)
        loss = neighgen.row_loss({**self.state.generator, **leaves}, self.impaired, known, rows)
        for other in clients:
            if other is self:
                continue
            x = torch.from_numpy(other.x.toarray()).double()
            targets = other.targets(self.party, self.impaired.missing[asked])[asked_by]
            for row, line in zip(rows[known.which], targets.tolist(), strict=True):
                nearest = min(((row - x[u]).square().mean() for u in line if u >= 0), key=lambda value: value.item())
                loss = loss + nearest / len(self.impaired.train)
        expected = torch.autograd.grad(loss / len(clients), list(leaves.values()), retain_graph=True)
        learn(self, away, others)
        compared.append(len(known.which))
        assert all(torch.allclose(taken[-1][n], e, atol=1e-12) for n, e in zip(leaves, expected, strict=True))

    monkeypatch.setattr(algorithm, "take_step", lambda w, g, *rest: taken.append(g) or step(w, g, *rest))
    monkeypatch.setattr(algorithm.FedSagePlusClient, "learn_rows", watched)
    experiment.loop.play(until=2)
    assert len(compared) == len(clients) and min(compared) > 0


def test_sheet_marks_features_where_they_are_read_and_nowhere_else() -> None:
    for cross, expected in (("gradients", False), ("features", True), ("none", False)):
        lines = sheet_of_settings(resolve("fedsageplus", {**SMALL, **GENERATOR, "cross": cross}))
        kinds = {kind for line in lines for kind in kinds_of(line.message).values()}
        assert (Kind.FEATURE in kinds) is expected
    (answer,) = [
        line
        for line in sheet_of_settings(resolve("fedsageplus", {**SMALL, **GENERATOR}))
        if line.message is Residuals and line.receiver == "client"
    ]
    assert answer.protection == "summed"


def test_gradients_of_the_last_layer_give_away_the_features_a_sum_over_clients_does_not() -> None:
    """Why fGen's gradients, as the paper sends them, are no protection. The curious client knows H, the inputs of its
    last layer, and what it generated; from one client's H^T D it solves for D and so for the other's features."""
    draws = Stream(2).numpy()
    x = (draws.random((40, 30)) < 0.2).astype(np.float64)  # the other client's features
    inputs, rows = draws.standard_normal((6, 16)), draws.standard_normal((6, 30))
    targets = torch.from_numpy(draws.integers(0, 40, (6, 5)))
    away = neighgen.residuals(torch.from_numpy(rows), targets, sp.csr_matrix(x)).numpy()
    solved = rows - np.linalg.lstsq(inputs.T, inputs.T @ away, rcond=None)[0]
    assert all((np.abs(x - row).max(1) < 1e-8).any() for row in solved)  # every row is a node's features, exactly
    others = [(draws.random((40, 30)) < 0.2).astype(np.float64) for _ in range(3)]
    total = sum(neighgen.residuals(torch.from_numpy(rows), targets, sp.csr_matrix(z)).numpy() for z in others)
    guess = rows - total / 3.0
    assert not any((np.abs(z - row).max(1) < 0.3).any() for row in guess for z in others)


def test_settings_that_hide_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="clear"):
        start(cross="features", secure_sum=True)
    with pytest.raises(ConfigError, match="three clients"):
        start(clients=2)
    with pytest.raises(ConfigError, match="cross=none"):
        FedSagePlusConfig(dp_clip=1.0, weighting="uniform")


def test_masked_sums_train_the_same_generator() -> None:
    clear, masked = play(precision="float64"), play(precision="float64", secure_sum=True)
    for ours, theirs in zip(clients_of(clear), clients_of(masked), strict=True):
        assert max_difference(ours.state.generator, theirs.state.generator) < 1e-4
