"""The remaining properties of the rivals spec, method by method: equations written out, limits, traps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rivals_helpers import SGD, SMALL, clients_of, mean_of, models, play, same, start
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.methods import adafgl, fedgta, fedpub, fedtad, moon
from isthmus.methods.fedtad import distillation
from isthmus.methods.fedtad.algorithm import alikeness
from isthmus.methods.single_models import OwnModel
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.registry import build_backbone
from isthmus.seeds import Stream
from isthmus.tensors import Weights, equal_weights, max_difference, weighted_mean


def dense(data: Any, *, loops: bool = True) -> Tensor:
    """Dt^-1/2 (A + I) Dt^-1/2, or A."""
    a = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    a[data.edge_index[1], data.edge_index[0]] = 1.0
    if not loops:
        return a
    a += torch.eye(len(a))
    return a / torch.sqrt(torch.outer(a.sum(1), a.sum(1)))


# -- FedGTA ----------------------------------------------------------------------------------------


def test_a_report_of_fedgta_by_hand() -> None:
    client = clients_of(play("fedgta", rounds=1, precision="float64", temperature=20.0, mix=0.3))[0]
    data, known = client.data, client.data.train
    shared = dict(client.state.weights)
    report = client.report_update(OwnModel(shared))
    z = torch.softmax(client.logits().double(), 1)
    one_hot = torch.nn.functional.one_hot(data.y, data.num_classes).double()
    first = torch.where(known[:, None], one_hot, z)
    y, matrix = first.clone(), dense(data)
    for _ in range(5):
        y = 0.3 * matrix @ y + 0.7 * first
        y[known] += one_hot[known]
    q, t = (torch.where(known[:, None], one_hot, torch.softmax(y / heat, 1)) for heat in (1.0, 20.0))
    raw = [(q**p).mean(0) for p in range(1, 7)]
    central = [((q - q.mean(0)) ** p).mean(0) for p in range(1, 7)]
    assert torch.allclose(report.moments, torch.cat(raw + central), atol=1e-6)
    degree = dense(data, loops=False).sum(1)
    expected = (degree * (data.num_classes / np.e + (t * torch.log(t + 1e-8)).sum(1))).sum()
    assert report.confidence == pytest.approx(float(expected), rel=1e-6)


def test_one_neighbourhood_of_all_weighs_by_confidence_and_equal_ones_are_fedavg(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    original = fedgta.confidence

    def kept(soft: Tensor, degree: Tensor) -> float:
        seen.append(original(soft, degree))
        return seen[-1]

    monkeypatch.setattr(fedgta, "confidence", kept)
    experiment = play("fedgta", rounds=1, similarity=-1.0, precision="float64")
    trained = [client.state.weights for client in clients_of(play("local", rounds=1, precision="float64"))]
    expected = weighted_mean(trained, [value / sum(seen) for value in seen])
    assert max_difference(experiment.loop.state.models[0], expected) < 1e-12
    monkeypatch.setattr(fedgta, "confidence", lambda soft, degree: 1.0)
    ours = play("fedgta", similarity=-1.0, precision="float64").loop.state.models[0]
    assert max_difference(ours, play("fedavg", weighting="uniform", precision="float64").loop.state.weights) < 1e-12


def test_names_of_classes_and_order_of_clients_do_not_matter_to_fedgta() -> None:
    draws = Stream(4).torch()
    soft = [torch.softmax(torch.randn(30, 4, generator=draws, dtype=torch.float64), 1) for _ in range(5)]
    degree, turned, order = torch.ones(30, dtype=torch.float64), [2, 0, 3, 1], [3, 1, 4, 0, 2]
    reported = [fedgta.moments(rows, 3, "hybrid") for rows in soft]
    renamed = [fedgta.moments(rows[:, turned], 3, "hybrid") for rows in soft]
    middle = float(np.median([torch.cosine_similarity(a, b, dim=0) for a in reported for b in reported])) + 1e-9
    sets = fedgta.neighbour_sets(reported, middle)
    assert sets == fedgta.neighbour_sets(renamed, middle) and {len(each) for each in sets} != {1}
    assert fedgta.confidence(soft[0], degree) == pytest.approx(fedgta.confidence(soft[0][:, turned], degree))
    moved = fedgta.neighbour_sets([reported[i] for i in order], middle)
    for place, client in enumerate(order):
        assert client in sets[client]  # everybody is near itself
        assert {order[j] for j in moved[place]} == set(sets[client])
    assert all((j in sets[i]) == (i in sets[j]) for i in range(5) for j in range(5))


def test_two_clients_with_the_same_moments_are_not_nearer_than_one() -> None:
    """A threshold of 1 is Local, although rounding puts some cosines of equal moments above 1."""
    draws = Stream(5).torch()
    for _ in range(50):
        moments = torch.rand(12, generator=draws, dtype=torch.float64)
        assert fedgta.neighbour_sets([moments, moments], 1.0) == [[0], [1]]


@pytest.mark.parametrize("method", ["fedgta", "fedpub", "fedtad"])
def test_answers_for_every_client_need_every_client(method: str) -> None:
    with pytest.raises(ConfigError, match="fraction"):
        resolve(method, {**SMALL, "fraction": 0.5})


# -- FedTAD ----------------------------------------------------------------------------------------


def test_alikeness_by_a_loop_over_nodes() -> None:
    """phi of one client: cosines of features beside return probabilities; it grows with an alike neighbour."""
    data = clients_of(start("fedtad"))[1].data
    x, a = data.x.to_dense().double().abs(), dense(data, loops=False)
    a.fill_diagonal_(0.0)
    data = replace(data, x=x.float(), edge_index=torch.nonzero(a.T).T.contiguous())
    walk = a / a.sum(0).clamp(min=1.0)
    powers, t = [], torch.eye(len(a), dtype=torch.float64)
    for _ in range(3):
        t = walk @ t
        powers.append(t.diagonal())
    h = torch.cat([x.float().double(), torch.stack(powers, 1)], 1)
    phi = torch.zeros(data.num_classes, dtype=torch.float64)
    for v in torch.nonzero(data.train).flatten().tolist():
        near = torch.nonzero(a[v]).flatten().tolist()
        cosines = [float(torch.nn.functional.cosine_similarity(h[v], h[u], dim=0)) for u in near]
        phi[data.y[v]] += (1.0 + sum(cosines)) / (len(near) + 1)
    assert torch.allclose(alikeness(data, data.train, 3), phi, atol=1e-5)


def test_an_alike_neighbour_raises_reliability_and_shares_are_never_negative() -> None:
    data = clients_of(start("fedtad"))[0].data
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]])
    nothing = torch.zeros(4, dtype=torch.bool)
    known = torch.tensor([True, False, False, False])
    small = replace(
        data, x=x, y=torch.zeros(4, dtype=torch.int64), train=known, val=nothing, test=nothing, node_id=torch.arange(4)
    )

    def phi(*edges: tuple[int, int]) -> float:
        both = [*edges, *((b, a) for a, b in edges)]
        return float(alikeness(replace(small, edge_index=torch.tensor(both).T), known, 1)[0])

    assert phi((0, 1)) < phi((0, 1), (0, 2)) < 1.0 + 1e-9
    assert phi((0, 3)) == pytest.approx(0.0, abs=1e-9)  # opposite, and not below nothing
    assert bool((play("fedtad").loop.state.reliability >= 0.0).all())  # features of this graph are of both signs


def test_a_client_without_a_class_has_no_say_in_it() -> None:
    experiment = start("fedtad")
    first = clients_of(experiment)[0]
    first.data = replace(first.data, train=first.data.train & (first.data.y != 1))
    experiment.loop.play(until=1)
    reliability = experiment.loop.state.reliability
    assert float(reliability[0, 1]) == 0.0 and float(reliability[:, 1].sum()) == pytest.approx(1.0)


def distilled(**steps: int) -> tuple[Weights, Weights, distillation.Distilled]:
    model = build_backbone("gcn", num_features=6, num_classes=3, hidden=(5,), stream=Stream(0))
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    teachers = [{name: tensor + 0.1 * (k + 1) for name, tensor in weights.items()} for k in range(2)]
    generator = distillation.first_generator(6, 3, 4, Stream(1), torch.float32)
    settings = fedtad.FedTADConfig(pseudo_nodes=9, noise_width=4, **steps).distillation
    states = distillation.fresh_adam(weights), distillation.fresh_adam(generator)
    found = distillation.distil(
        model, weights, states[0], teachers, torch.full((2, 3), 0.5), generator, states[1], settings, Stream(2)
    )
    return weights, generator, found


def test_steps_of_the_generator_leave_the_average_and_the_reverse() -> None:
    weights, generator, found = distilled(model_steps=0)
    assert equal_weights(found.weights, weights) and not equal_weights(found.generator, generator)
    weights, generator, found = distilled(generator_steps=0)
    assert equal_weights(found.generator, generator) and not equal_weights(found.weights, weights)


def test_terms_of_the_generator_by_hand() -> None:
    values, classes = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2])
    assert distillation.by_class(values, classes, 3).tolist() == [2.0, 0.0, 5.0]
    x, noise = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0], [3.0]])
    # mean over pairs of mean|x_i - x_j| mean (z_i - z_j)^2: two pairs of 1 * 9, two of 0
    assert float(distillation.diversity(x, noise)) == pytest.approx(np.exp(-4.5))
    model = build_backbone("gcn", num_features=3, num_classes=2, hidden=(4,), stream=Stream(0))
    graph = distillation.pseudo_graph(model, torch.randn(8, 3, generator=Stream(3).torch()), 2)
    linked = (graph.first > 0).sum(1) - 1  # without loops
    assert int(linked.min()) >= 2 and torch.equal(graph.first > 0, (graph.first > 0).T)


def test_both_losses_of_fedtad_by_loops_over_clients_and_classes() -> None:
    draws, count = Stream(6).torch(), 3
    model = build_backbone("gcn", num_features=6, num_classes=count, hidden=(5,), stream=Stream(0))
    average = {name: tensor.detach() for name, tensor in model.named_parameters()}
    teachers = [{n: w + torch.randn(w.shape, generator=draws) for n, w in average.items()} for _ in range(2)]
    x, noise = (torch.randn(9, width, generator=draws) for width in (6, 4))
    classes, reliability = distillation.pseudo_labels(9, count), torch.rand(2, count, generator=draws)
    settings = fedtad.FedTADConfig(pseudo_nodes=9, accuracy=0.7, spread=3.0).distillation
    graph = distillation.pseudo_graph(model, x, settings.neighbours)
    ours, *answers = (distillation.pseudo_logits(model, weights, graph) for weights in (average, *teachers))
    pairs = [(i, j) for i in range(9) for j in range(9)]
    apart = [float((x[i] - x[j]).abs().mean() * (noise[i] - noise[j]).square().mean()) for i, j in pairs]
    of_generator = 2 * 3.0 * float(np.exp(-np.mean(apart)))
    of_average = 0.0
    for k, theirs in enumerate(answers):
        for c in range(count):
            rows, share = classes == c, float(reliability[k, c])
            away = float((ours[rows] - theirs[rows]).abs().mean())
            wrong = float(torch.nn.functional.cross_entropy(theirs[rows], classes[rows]))
            of_generator += share * (0.7 * wrong - away)  # sure teachers, from which the average is far
            of_average += share * away
    found = distillation.generator_loss(model, x, noise, classes, average, teachers, reliability, settings)
    assert float(found) == pytest.approx(of_generator, rel=1e-5)
    assert float(distillation.model_loss(ours, answers, classes, reliability)) == pytest.approx(of_average, rel=1e-5)


def test_scores_of_fedtad_are_the_same_twice() -> None:
    experiment = play("fedtad", dropout=0.5)
    first, second = ([client.logits() for client in clients_of(experiment)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- AdaFGL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_edges", [1.0, 0.3])
def test_heads_of_adafgl_by_hand(own_edges: float) -> None:
    """l, o, s and t from [X, ÂX, Â²X, Â³X] written out; with own_edges=1 that is the plain SGC stack."""
    client = clients_of(play("adafgl", own_edges=own_edges, precision="float64"))[0]
    data, heads = client.data, client.state.heads
    p = torch.softmax(client.learner.logits(client.state.weights), 1)
    q = torch.nn.functional.normalize(torch.softmax(p, 1), dim=1)
    agrees = (q @ q.T > 0.999).double().fill_diagonal_(0.0)
    a = dense(data, loops=False)
    both = own_edges * torch.maximum(a, a.T).fill_diagonal_(0.0) + (1 - own_edges) * agrees + torch.eye(len(a))
    step = both / torch.sqrt(torch.outer(both.sum(1), both.sum(1)))
    if own_edges == 1.0:
        assert torch.allclose(step, dense(data), atol=1e-12)
    x = data.x.to_dense().double()
    stack = torch.cat([x, step @ x, step @ step @ x, step @ step @ step @ x], 1)

    def mlp(name: str, h: Tensor, layers: int) -> Tensor:
        for layer in range(layers):
            h = h @ heads[f"{name}.{layer}.weight"] + heads[f"{name}.{layer}.bias"]
            if layer < layers - 1:
                h = torch.where(h > 0, h, heads[f"{name}.slope"] * h)
        return h

    z = mlp("signed", stack, 3)
    zq = torch.nn.functional.normalize(torch.softmax(z, 1), dim=1)
    m = 0.2 * agrees + 0.8 * (zq @ zq.T).fill_diagonal_(0.0)
    signs = torch.where(m > m.mean(), (m - m.mean()) / (m.max() - m.mean()), -m / m.mean()) + torch.eye(len(m))
    slope = heads["signs.slope"]
    toward, away = (torch.softmax(torch.where(s > 0, s, slope * s) @ z, 1) for s in (signs, -signs))
    expected = mlp("homophilous", stack, 2), mlp("own", x, 3), mlp("smooth", stack, 3), (toward - away + z) / 2
    for ours, theirs in zip(client.outputs(heads), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-8)
    ce = torch.nn.functional.cross_entropy
    loss = sum(ce(each[data.train], data.y[data.train]) for each in expected)
    assert float(client.loss(heads)) == pytest.approx(
        float(loss + torch.nn.functional.mse_loss(expected[0], p)), abs=1e-8
    )


def test_edgeless_clients_stack_their_features() -> None:
    nothing = torch.zeros(4, 4)
    assert torch.equal(adafgl.rewired(nothing, nothing, 1.0), torch.eye(4))


def test_dropout_acts_while_heads_learn_and_not_where_they_are_scored() -> None:
    client = clients_of(play("adafgl", dropout=0.5))[0]
    heads, source = client.state.heads, DropoutSource([Stream(0).torch()])
    assert float(client.loss(heads, source)) != float(client.loss(heads))
    assert torch.equal(client.logits(), client.logits())
    halved = adafgl.dropped(torch.ones(500, 40), source, 0.5)
    assert set(halved.unique().tolist()) == {0.0, 2.0} and float(halved.mean()) == pytest.approx(1.0, abs=0.05)


def test_before_step_two_adafgl_predicts_as_fedavg_and_its_wire_is_fedavgs() -> None:
    ours, theirs = play("adafgl", extractor_rounds=3, rounds=2), play("fedavg", rounds=3)
    client, plain = clients_of(ours)[0], clients_of(theirs)[0]
    client.state = replace(client.state, homophily=-1.0)
    assert torch.equal(client.logits(), plain.learner.logits(theirs.loop.state.weights))
    assert ours.loop.totals.training["up"] == theirs.loop.totals.training["up"]


def test_held_labels_do_not_spread() -> None:
    """With two classes: other labels of the held half turn the share that is right into the share that is wrong."""
    data = clients_of(start("adafgl"))[0].data
    y = torch.arange(data.num_nodes) % 2
    given, held = torch.arange(0, 8), torch.arange(8, data.num_nodes)
    flipped = y.clone()
    flipped[held] = 1 - y[held]
    two = replace(data, y=y)
    found = adafgl.label_propagation(two, given, held)
    assert adafgl.label_propagation(replace(two, y=flipped), given, held) == pytest.approx(1.0 - found)


def test_labels_spread_ten_steps_along_a_chain() -> None:
    """Both classes start alike where no label is given, and ties are class 0: class 1 is right as far as it comes."""
    data = clients_of(start("adafgl"))[0].data
    line = torch.arange(data.num_nodes - 1)
    there = torch.stack([line, line + 1])
    y = torch.ones(data.num_nodes, dtype=torch.int64)
    chain = replace(data, y=y, edge_index=torch.cat([there, there.flip(0)], dim=1))
    found = adafgl.label_propagation(chain, torch.tensor([0]), torch.arange(1, 16))
    assert found == pytest.approx(10 / 15)


def test_one_head_alone_by_the_switch() -> None:
    client = clients_of(play("adafgl", switch=0.9))[0]
    p, _, _ = client.extracted()
    label, *others = client.outputs(client.state.heads)
    for homophily, expected in (
        (0.95, (torch.softmax(label, 1) + torch.softmax(p, 1)) / 2),
        (0.5, sum(torch.softmax(each, 1) for each in others) / 3),
    ):
        client.state = replace(client.state, homophily=homophily)
        assert torch.allclose(client.logits().exp(), expected, atol=1e-6)


# -- SCAFFOLD --------------------------------------------------------------------------------------


def test_the_first_round_of_scaffold_is_fedavgs() -> None:
    """All control variates are 0 then, whatever the number of local steps."""
    ours = play("scaffold", **SGD, local_epochs=4, rounds=1)
    theirs = play("fedavg", **SGD, local_epochs=4, rounds=1, weighting="uniform")
    assert max_difference(ours.loop.state.weights, theirs.loop.state.weights) < 1e-12


def test_the_servers_rate_scales_the_mean_change() -> None:
    first = start("scaffold", **SGD).loop.state.weights
    full, half = (play("scaffold", **SGD, rounds=1, server_lr=rate).loop.state.weights for rate in (1.0, 0.5))
    expected = {name: first[name] + 0.5 * (full[name] - first[name]) for name in first}
    assert max_difference(half, expected) < 1e-12


GRAPHS: dict[str, Any] = {
    **SGD,
    "dataset": "motifs",
    "partition": None,
    "split": "stratified:60/20/20",
    "preset": "fedstar",
    "hidden": (8, 8),
    "weight_decay": 0.0,
    "lr": 1e-9,
    "rounds": 1,
}


def test_every_batch_of_graphs_is_a_step_of_scaffold() -> None:
    """With steps too short to matter the mean gradient along the way is the gradient at x, however many they are."""
    settings = {**GRAPHS, "batch_size": 1, "local_epochs": 2}
    walked, asked = (play("scaffold", **settings, option=option).loop.state.control for option in ("II", "I"))
    assert all(torch.allclose(walked[name], asked[name], rtol=1e-4, atol=1e-6) for name in asked)
    assert max(float(tensor.abs().max()) for tensor in asked.values()) > 1e-3


def test_a_client_of_scaffold_that_takes_no_step_has_no_gradient() -> None:
    experiment = start("scaffold", **{**GRAPHS, "rounds": 2})
    idle = clients_of(experiment)[0]
    idle.data = replace(idle.data, train=torch.zeros_like(idle.data.train))
    idle.setup()
    experiment.loop.play()
    assert not any(bool(tensor.any()) for tensor in idle.state.control.values())
    assert any(bool(tensor.any()) for tensor in experiment.loop.state.control.values())


def test_decay_beside_the_gradient_is_no_part_of_a_control_variate() -> None:
    """adamw shrinks weights by itself; sgd and adam add the decay to the gradient."""
    settings = {"precision": "float64", "rounds": 1, "weight_decay": 0.05}
    kinds = ("adam", "adamw")
    within, beside = (play("scaffold", **settings, optimizer=kind).loop.state.control for kind in kinds)
    first = start("scaffold", **settings).loop.state.weights
    expected = {name: tensor - 0.05 * first[name] for name, tensor in within.items()}
    assert max_difference(beside, expected) < 1e-12


# -- Ditto -----------------------------------------------------------------------------------------


def test_the_pull_of_ditto_by_hand() -> None:
    """v = w at the start, so the first step has no pull; the second has lambda (v - w)."""
    settings = {**SGD, "weight_decay": 0.0, "rounds": 1}
    assert same(play("ditto", **settings, pull=3.0, local_epochs=1), play("local", **settings, local_epochs=1))
    experiment = play("ditto", **settings, pull=3.0, local_epochs=2)
    first = start("ditto", **settings).loop.state.weights
    for client in clients_of(experiment):
        v = dict(first)
        for _ in range(2):
            g = client.learner.gradients(v, client.stream)
            v = {name: v[name] - 0.1 * (g[name] + 3.0 * (v[name] - first[name])) for name in v}
        assert max_difference(client.state.weights, v) < 1e-12


def test_ditto_pulls_to_what_was_received_last() -> None:
    settings = {**SGD, "weight_decay": 0.0, "pull": 3.0, "local_epochs": 2}
    first, second = (play("ditto", **settings, rounds=rounds) for rounds in (1, 2))
    w = first.loop.state.weights  # far from every v by now
    for before, after in zip(clients_of(first), clients_of(second), strict=True):
        v = dict(before.state.weights)
        assert max_difference(v, w) > 1e-3
        for _ in range(2):
            g = before.learner.gradients(v, before.stream)
            v = {name: v[name] - 0.1 * (g[name] + 3.0 * (v[name] - w[name])) for name in v}
        assert max_difference(after.state.weights, v) < 1e-12


def test_clients_that_are_not_drawn_keep_their_personal_model() -> None:
    experiment, first = play("ditto", fraction=0.4, rounds=1), start("ditto").loop.state.weights
    still = [equal_weights(client.state.weights, first) for client in clients_of(experiment)]
    assert sum(still) == 3


def test_another_clients_data_reach_a_personal_model_through_the_common_one_only() -> None:
    ended = []
    for poisoned in (False, True):
        experiment = start("ditto", rounds=2)
        other = clients_of(experiment)[1]
        if poisoned:
            other.data = replace(other.data, y=(other.data.y + 1) % other.data.num_classes)
            other.setup()
        experiment.loop.play(until=1)
        once = dict(clients_of(experiment)[0].state.weights)
        experiment.loop.play()
        ended.append((once, clients_of(experiment)[0].state.weights))
    assert equal_weights(ended[0][0], ended[1][0])  # nothing of the other has come yet
    assert not equal_weights(ended[0][1], ended[1][1])


# -- MOON ------------------------------------------------------------------------------------------


def contrast_of(tau: float, mu: float = 1.0) -> tuple[Any, Any, int]:
    client = clients_of(play("moon", mu=mu, temperature=tau, precision="float64"))[0]
    common = {name: tensor + 0.1 for name, tensor in client.state.weights.items()}
    return client, common, client.data.num_nodes


def test_equal_models_leave_the_contrastive_term_at_log_two_without_a_gradient() -> None:
    client, common, count = contrast_of(0.5)
    term = client.contrast(common, common)
    z = torch.randn(count, 8, dtype=torch.float64, requires_grad=True)
    value = term.value(z, client.learner.whole)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    assert float(value.detach()) == pytest.approx(np.log(2.0)) and float(gradient.abs().max()) < 1e-12


def test_at_the_received_model_only_the_previous_one_pushes() -> None:
    client, common, count = contrast_of(0.5)
    z = client.learner.embedding(common, client.learner.whole)[:count].detach().requires_grad_()
    previous = moon.unit_rows(client.learner.embedding(client.state.previous, client.learner.whole)[:count]).detach()
    anchor = moon.unit_rows(z).detach()
    value = client.contrast(common, client.state.previous).value(z, client.learner.whole)
    share = torch.sigmoid(((anchor * previous).sum(1) - (anchor * anchor).sum(1)) / 0.5)
    pushed = (share * (moon.unit_rows(z) * previous).sum(1) / 0.5).sum() / count  # d/dz of cos(z, z_glob) is 0 here
    (found,), (expected,) = (torch.autograd.grad(each.sum(), z) for each in (value, pushed))
    assert torch.allclose(found, expected, atol=1e-10)


def test_bounds_of_the_contrastive_term_and_a_flat_temperature() -> None:
    for tau in (0.2, 0.5, 1e6):
        client, common, count = contrast_of(tau)
        term = client.contrast(common, client.state.previous)
        z = torch.randn(count, 8, dtype=torch.float64, requires_grad=True)
        value = term.value(z, client.learner.whole)
        assert 0.0 < float(value.detach()) <= np.log1p(np.exp(2.0 / tau))
        if tau == 1e6:
            assert float(torch.autograd.grad(value.sum(), z)[0].abs().max()) < 1e-5


def test_a_client_alone_never_feels_the_contrastive_term() -> None:
    assert same(play("moon", clients=1, partition="random", mu=5.0), play("local", clients=1, partition="random"))


# -- FedProto --------------------------------------------------------------------------------------


def test_a_class_of_one_client_has_its_prototype() -> None:
    experiment = start("fedproto", rounds=1, precision="float64")
    clients = clients_of(experiment)
    for client in clients[1:]:
        client.data = replace(client.data, train=client.data.train & (client.data.y != 2))
        client.setup()
    experiment.loop.play()
    only = clients[0]
    rows = only.learner.embedding(only.state.weights, only.learner.everything)[: only.data.num_nodes]
    expected = rows[only.data.train & (only.data.y == 2)].mean(0)
    assert torch.allclose(experiment.loop.state.rows[2], expected, atol=1e-12)


def test_a_class_nobody_holds_has_no_prototype_to_be_near() -> None:
    experiment = start("fedproto", classify="prototype")
    for client in clients_of(experiment):
        client.data = replace(client.data, train=client.data.train & (client.data.y != 2))
        client.setup()
    experiment.loop.play()
    assert experiment.loop.state.known.tolist() == [1.0, 1.0, 0.0]
    for client in clients_of(experiment):
        assert bool(client.state.known.any()) and not bool((client.logits().argmax(1) == 2).any())


def test_a_strong_pull_gathers_a_class() -> None:
    """Within-class variance of training embeddings shrinks; also with one client, whose prototypes are its own."""
    spread = []
    for pull in (0.0, 100.0):
        client = clients_of(play("fedproto", pull=pull, rounds=60, clients=1, partition="random"))[0]
        rows = client.learner.embedding(client.state.weights, client.learner.everything)[: client.data.num_nodes]
        y = torch.where(client.data.train, client.data.y, -1)
        spread.append(sum(float(rows[y == c].var(0).sum()) for c in range(3)))
    assert spread[1] < 0.2 * spread[0]


# -- FED-PUB ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("round_", [1, 2])
def test_a_step_of_fedpub_by_hand(round_: int) -> None:
    """On W and on mu: CE through W mu, lambda_1 sign(mu), and from round 2 on lambda_2 (W - W_received) / its norm."""
    settings: dict[str, Any] = {**SGD, "weight_decay": 0.01, "local_epochs": 2, "sparsity": 0.03, "nearness": 0.02}
    client = clients_of(play("fedpub", **settings, rounds=round_))[0]
    masks = {name: mask.clone() for name, mask in client.state.masks.items()}
    received = {name: tensor + 0.05 for name, tensor in client.state.weights.items()}
    w, mu = dict(received), dict(masks)
    for _ in range(2):
        g = client.learner.gradients({n: t * mu.get(n, torch.ones(())) for n, t in w.items()}, client.stream)
        steps, mask_steps = {}, {}
        for name, gradient in g.items():
            away = w[name] - received[name]
            near = 0.02 * away / away.norm() if round_ > 1 and float(away.norm()) else 0.0
            steps[name] = gradient * mu.get(name, torch.ones(())) + near + 0.01 * w[name]
            if name in mu:
                mask_steps[name] = gradient * w[name] + 0.03 * mu[name].sign() + 0.01 * mu[name]
        w = {name: tensor - 0.1 * steps[name] for name, tensor in w.items()}
        mu = {name: mask - 0.1 * mask_steps[name] for name, mask in mu.items()}
    assert client.round == round_
    client.learn(received)
    assert max_difference(client.state.weights, w) < 1e-10 and max_difference(client.state.masks, mu) < 1e-10


def test_the_random_graph_has_blocks_of_the_degree_asked_for() -> None:
    graph = fedpub.random_graph(fedpub.FedPubConfig(), 3, Stream(7))
    source, target = graph.edge_index
    assert graph.x.shape == (500, 3) and torch.equal(source // 100, target // 100) and bool((source != target).all())
    assert len(source) / 500 == pytest.approx(10.0, abs=0.5)
    assert float(graph.x.mean()) == pytest.approx(0.0, abs=0.1) and float(graph.x.std()) == pytest.approx(1.0, abs=0.1)


def test_small_entries_of_a_mask_are_left_out_where_a_model_is_used() -> None:
    client = clients_of(play("fedpub", sparsity=0.5))[0]
    name = next(iter(client.state.masks))
    mask = torch.linspace(-1.0, 1.0, client.state.masks[name].numel()).view_as(client.state.masks[name])
    client.state = replace(client.state, masks={**client.state.masks, name: mask})
    used = client.used()[name]
    assert torch.equal(used, client.state.weights[name] * torch.where(mask.abs() >= 0.5, mask, 0.0))
    assert torch.equal(client.export()[name], used)


def test_the_functional_embedding_is_of_the_pruned_model_after_training() -> None:
    client = clients_of(play("fedpub", sparsity=0.5))[0]
    masks = {name: torch.linspace(-1.0, 1.0, mask.numel()).view_as(mask) for name, mask in client.state.masks.items()}
    client.state = replace(client.state, masks=masks)
    report = client.report_update(OwnModel(dict(client.state.weights)))
    used = client.learner.embedding(client.used(), client.random_inputs).mean(0)
    assert torch.equal(report.embedding, used)
    whole = client.learner.embedding(client.state.weights, client.random_inputs).mean(0)
    assert not torch.allclose(used, whole, atol=1e-3)


def test_a_client_of_fedpub_gets_the_average_of_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """W_i = sum_j alpha_ij W_j: here every client gets what the next one trained."""
    turned = torch.eye(5, dtype=torch.float64).roll(1, dims=1)
    monkeypatch.setattr(fedpub, "similarity", lambda embeddings, sharpness: turned)
    settings = {**SGD, "rounds": 1}
    ours = play("fedpub", **settings, train_masks=False, terms=False, sparsity=0.0).loop.state.models
    trained = [client.state.weights for client in clients_of(play("local", **settings))]
    assert all(max_difference(ours[i], trained[(i + 1) % 5]) < 1e-12 for i in range(5))
    assert max_difference(trained[0], trained[1]) > 1e-3


def test_the_functional_embedding_depends_on_the_model_alone_and_on_the_order_of_hidden_units() -> None:
    one, other = clients_of(start("fedpub"))[:2]
    weights = {name: tensor + 0.01 for name, tensor in one.state.weights.items()}
    first, second = (each.learner.embedding(weights, each.random_inputs).mean(0) for each in (one, other))
    assert torch.equal(first, second)  # whatever data the two hold
    turned = first.flip(0)  # hidden units in another order: the same function, another embedding
    rows = fedpub.similarity([first, turned], 3.0)
    assert float(rows[0, 0]) > float(rows[0, 1]) + 1e-6


def test_a_sharp_average_is_local_and_the_published_terms_act_on_nothing() -> None:
    alone = play("fedpub", sharpness=1e9, train_masks=False, terms=False, sparsity=0.0, lr=0.005)
    ours, theirs = models(alone), models(play("local", lr=0.005))
    assert all(max_difference(ours[client], theirs[client]) < 1e-6 for client in ours)
    without, weighed = (play("fedpub", terms=False, nearness=value) for value in (0.0, 5.0))
    assert same(without, weighed)


def test_shares_of_every_average_are_those_of_a_mean() -> None:
    """P1: none is negative, and they add up to 1."""
    alpha = play("fedpub").loop.state.alpha
    assert bool((alpha >= 0).all()) and torch.allclose(alpha.sum(1), torch.ones(5, dtype=torch.float64))
    equal = [{"w": torch.tensor([3.0])}] * 3
    assert float(fedgta.averaged(equal, [0.2, 5.0, 1.0], [0, 1, 2])["w"]) == pytest.approx(3.0)
    assert float(mean_of(equal)["w"]) == pytest.approx(3.0)
