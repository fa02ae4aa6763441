"""SCAFFOLD, Ditto, MOON, FedProto, FedGTA, FED-PUB, FedTAD, AdaFGL: what they reduce to, their equations by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rivals_helpers import RIVALS, SGD, SMALL, clients_of, mean_of, models, play, same, start

import isthmus
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of_settings
from isthmus.methods import adafgl, fedgta, fedpub, fedtad, moon
from isthmus.methods.fedtad import distillation
from isthmus.methods.fedtad.algorithm import alikeness
from isthmus.nn.inputs import build_inputs
from isthmus.nn.registry import build_backbone
from isthmus.seeds import Stream
from isthmus.tensors import equal_weights, max_difference, num_values
from isthmus.testing import check_method


@pytest.mark.parametrize("method", RIVALS)
def test_general_properties(method: str) -> None:
    check_method(method)


@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_general_properties_on_graphs(method: str) -> None:
    check_method(method, task="graph")


@pytest.mark.parametrize("method", RIVALS)
def test_labels_of_validation_and_test_nodes_change_no_model(method: str) -> None:
    honest, poisoned = start(method), start(method)
    for client in clients_of(poisoned):
        other = ~client.data.train
        y = client.data.y.clone()
        y[other] = (y[other] + 1) % client.data.num_classes
        client.data = replace(client.data, y=y)
        client.setup()
    for each in (honest, poisoned):
        each.loop.play()
    assert same(honest, poisoned)


@pytest.mark.parametrize("method", ["fedgta", "fedpub", "fedtad"])
def test_methods_that_read_single_models_refuse_secure_sums(method: str) -> None:
    with pytest.raises(ConfigError, match="single clients' messages"):
        sheet_of_settings(resolve(method, {**SMALL, "secure_sum": True}))


@pytest.mark.parametrize("method", ["ditto", "moon"])
def test_a_clip_that_nothing_reaches_changes_nothing(method: str) -> None:
    """Without noise no secret is kept, and none is asked for."""
    plain, clipped = (play(method, **SGD, weighting="uniform", dp_clip=clip) for clip in (0.0, 1e6))
    assert max_difference(clipped.loop.state.weights, plain.loop.state.weights) < 1e-9


def test_adafgl_counts_the_noise_of_its_first_step() -> None:
    noisy = {"dp_clip": 1.0, "dp_noise": 2.0, "weighting": "uniform"}
    ours, theirs = start("adafgl", **noisy, extractor_rounds=3, rounds=7), start("fedavg", **noisy, rounds=3)
    told = [
        each.settings.method.privacy(each.loop.state, each.settings.method_config, rounds, 5, False)
        for each, rounds in ((ours, 7), (theirs, 3))
        if each.settings.method.privacy is not None
    ]
    assert len(told) == 2 and told[0] == told[1] is not None


# -- SCAFFOLD --------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["I", "II"])
def test_one_local_step_of_scaffold_is_a_step_on_the_mean_gradient(option: str) -> None:
    """Then the corrections cancel in the mean: FedAvg with equal clients."""
    ours = play("scaffold", **SGD, local_epochs=1, option=option)
    theirs = play("fedavg", **SGD, local_epochs=1, weighting="uniform")
    assert max_difference(ours.loop.state.weights, theirs.loop.state.weights) < 1e-12


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_the_options_of_scaffold_agree_after_one_step(decay: float) -> None:
    first, second = (play("scaffold", **SGD, local_epochs=1, option=o, weight_decay=decay) for o in ("I", "II"))
    assert max_difference(first.loop.state.control, second.loop.state.control) < 1e-12


def test_scaffold_by_hand() -> None:
    """Round 2 with two local steps, written out."""
    settings = {**SGD, "local_epochs": 2, "weight_decay": 0.0, "option": "I"}
    first, second = (play("scaffold", **settings, rounds=rounds) for rounds in (1, 2))
    x, c = first.loop.state.weights, first.loop.state.control
    ends = []
    for client in clients_of(first):
        own, y = client.state.control, dict(x)
        for _ in range(2):
            g = client.learner.gradients(y, client.stream)
            y = {name: y[name] - 0.1 * (g[name] - own[name] + c[name]) for name in y}
        ends.append(y)
    assert max_difference(second.loop.state.weights, mean_of(ends)) < 1e-12
    at_x = [client.learner.gradients(x, client.stream) for client in clients_of(first)]
    assert max_difference(second.loop.state.control, mean_of(at_x)) < 1e-12


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_server_holds_the_mean_of_the_control_variates(option: str) -> None:
    experiment = play("scaffold", **SGD, local_epochs=3, option=option)
    own = mean_of([client.state.control for client in clients_of(experiment)])
    assert max_difference(experiment.loop.state.control, own) < 1e-12


def test_clients_of_scaffold_do_not_drift() -> None:
    """Where clients differ and take many steps, FedAvg stops beside the optimum of the mean loss, SCAFFOLD at it."""
    settings = {**SGD, "backbone": "sgc", "input_norm": False, "local_epochs": 10, "rounds": 150, "weight_decay": 0.05}
    norms = {}
    for method, more in (("scaffold", {}), ("fedavg", {"weighting": "uniform"})):
        experiment = play(method, **settings, **more)
        x = experiment.loop.state.weights
        mean = mean_of([client.learner.gradients(x, client.stream) for client in clients_of(experiment)])
        slope = [(mean[name] + 0.05 * tensor).flatten() for name, tensor in x.items()]  # of the mean loss, with decay
        norms[method] = float(torch.cat(slope).norm())
    assert norms["scaffold"] < 0.1 * norms["fedavg"]


def test_clients_that_are_not_drawn_keep_their_control_variate() -> None:
    experiment = play("scaffold", **SGD, fraction=0.4, rounds=1)
    idle = [
        client for client in clients_of(experiment) if not any(bool(t.any()) for t in client.state.control.values())
    ]
    assert len(idle) == 3
    total = mean_of([client.state.control for client in clients_of(experiment)])  # over all, not over those drawn
    assert max_difference(experiment.loop.state.control, total) < 1e-12


def test_scaffold_reads_no_gradient_off_the_steps_of_adam() -> None:
    with pytest.raises(ConfigError, match="option=II"):
        resolve("scaffold", {**SMALL, "option": "II"})
    assert not resolve("scaffold", SMALL).method_config.by_distance
    assert resolve("scaffold", {**SMALL, "option": "ports"}).method_config.by_distance  # for comparison, by name
    with pytest.raises(ConfigError, match="server_lr"):
        resolve("scaffold", {**SMALL, "server_lr": -1.0})


def test_scaffold_needs_only_sums() -> None:
    plain, masked = (play("scaffold", **SGD, secure_sum=secure) for secure in (False, True))
    assert max_difference(plain.loop.state.weights, masked.loop.state.weights) < 1e-4
    shown = {row["message"]: row["protection"] for row in masked.loop.sheet.rows()}
    assert shown["Update"] == "masked"


# -- Ditto -----------------------------------------------------------------------------------------


def test_ditto_is_local_without_pull_and_fedavg_beneath() -> None:
    settings = {"dropout": 0.3, "local_epochs": 2}
    assert same(play("ditto", **settings, pull=0.0), play("local", **settings))
    federated = play("fedavg", **settings).loop.state.weights
    for pull in (0.0, 1.0):
        assert equal_weights(play("ditto", **settings, pull=pull).loop.state.weights, federated)


def test_a_strong_pull_leads_to_the_received_model() -> None:
    experiment = play("ditto", optimizer="sgd", lr=0.01, pull=99.0, local_epochs=200, weight_decay=0.0, rounds=1)
    first = start("ditto").loop.state.weights
    for client in clients_of(experiment):
        assert max_difference(client.state.weights, first) < 1e-2


def test_a_pull_that_overshoots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lr \* pull"):
        resolve("ditto", {**SMALL, "optimizer": "sgd", "lr": 0.5, "pull": 5.0})


# -- MOON ------------------------------------------------------------------------------------------


def test_moon_without_its_term_is_fedavg() -> None:
    settings = {"dropout": 0.3, "local_epochs": 2}
    plain = play("fedavg", **settings)
    assert same(play("moon", **settings, mu=0.0), plain) and not same(play("moon", **settings), plain)


def test_the_first_round_of_moon_is_fedavgs() -> None:
    assert same(play("moon", rounds=1, mu=5.0), play("fedavg", rounds=1))


@pytest.mark.parametrize("nodes", ["all", "train"])
def test_the_contrastive_term_by_hand(nodes: str) -> None:
    client = clients_of(play("moon", contrast=nodes, mu=2.0, precision="float64"))[0]
    common = {name: tensor + 0.1 for name, tensor in client.state.weights.items()}
    term = client.contrast(common, client.state.previous)
    inputs = client.learner.whole if nodes == "all" else client.learner.inputs
    rows = client.data.num_nodes if nodes == "all" else int(client.data.train.sum())
    z = torch.randn(inputs.padded[0], client.learner.embedding(common, inputs).shape[1], dtype=torch.float64)
    anchor, away = (client.learner.embedding(w, inputs)[:rows] for w in (common, client.state.previous))
    near, far = (torch.nn.functional.cosine_similarity(z[:rows], other, dim=1) / 0.5 for other in (anchor, away))
    expected = -2.0 * torch.log(near.exp() / (near.exp() + far.exp())).mean()
    assert float(term.value(z, inputs)) == pytest.approx(float(expected), abs=1e-9)
    assert float(term.value(3.0 * z, inputs)) == pytest.approx(float(expected), abs=1e-9)  # lengths do not matter


def test_rows_of_zeros_have_no_direction_and_no_gradient() -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    moon.unit_rows(z).sum().backward()
    assert z.grad is not None and not bool(z.grad.any()) and bool(torch.isfinite(z.grad).all())


# -- FedProto --------------------------------------------------------------------------------------


def test_fedproto_is_local_without_pull() -> None:
    assert same(play("fedproto", pull=0.0, dropout=0.3), play("local", dropout=0.3))
    assert not same(play("fedproto"), play("local"))


def test_prototypes_are_means_over_all_training_nodes() -> None:
    experiment = play("fedproto", rounds=1, precision="float64")
    rows, y = [], []
    for client in clients_of(experiment):
        every = client.learner.embedding(client.state.weights, client.learner.everything)[: client.data.num_nodes]
        rows.append(every[client.data.train])
        y.append(client.data.y[client.data.train])
    together, labels = torch.cat(rows), torch.cat(y)
    for j, prototype in enumerate(experiment.loop.state.rows):
        assert torch.allclose(prototype, together[labels == j].mean(0), atol=1e-12)


def test_the_pull_to_prototypes_by_hand_and_absent_classes() -> None:
    client = clients_of(play("fedproto", precision="float64", pull=3.0))[0]
    known = torch.tensor([1.0, 0.0, 1.0])
    client.state = replace(client.state, known=known)
    term, count = client.term(), int(client.data.train.sum())
    assert term is not None
    h = torch.randn(
        client.learner.inputs.padded[0], client.state.rows.shape[1], dtype=torch.float64, requires_grad=True
    )
    y = client.data.y[client.data.train]
    away = (h[:count] - client.state.rows[y]) * known[y].unsqueeze(1)
    value = term.value(h, client.learner.inputs)
    assert float(value.detach()) == pytest.approx(3.0 * float(away.detach().square().mean(1).mean()), abs=1e-12)
    (grad,) = torch.autograd.grad(value.sum(), h)
    assert torch.allclose(grad[:count], 2 * 3.0 * away / (count * h.shape[1]), atol=1e-12)


def test_bytes_of_fedproto_do_not_depend_on_the_model_and_it_needs_only_sums() -> None:
    narrow, deep = play("fedproto", hidden=(8,)), play("fedproto", hidden=(32, 8))
    assert narrow.loop.totals.training["up"] == deep.loop.totals.training["up"]
    masked = play("fedproto", secure_sum=True)
    assert torch.allclose(narrow.loop.state.rows, masked.loop.state.rows, atol=1e-3)


def test_nearest_prototypes_predict() -> None:
    client = clients_of(play("fedproto", classify="prototype"))[0]
    z = client.learner.embedding(client.state.weights, client.learner.everything)[: client.data.num_nodes]
    nearest = torch.cdist(z, client.state.rows).argmin(1)
    assert torch.equal(client.logits().argmax(1), nearest)


# -- FedGTA ----------------------------------------------------------------------------------------


def test_fedgta_with_nobody_near_is_local_and_with_everybody_one_model() -> None:
    assert same(play("fedgta", similarity=1.0), play("local"))
    ended = list(models(play("fedgta", similarity=-1.0)).values())
    assert all(equal_weights(ended[0], other) for other in ended[1:])


def test_sets_and_averages_of_fedgta() -> None:
    sets = fedgta.neighbour_sets([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.1]), torch.tensor([0.0, 1.0])], 0.5)
    assert sets == [[0, 1], [0, 1], [2]]
    found = fedgta.averaged([{"w": torch.tensor([v])} for v in (1.0, 4.0, 9.0)], [1.0, 2.0, 5.0], [0, 1])
    assert float(found["w"]) == pytest.approx(3.0)


def test_moments_and_confidence() -> None:
    soft = torch.softmax(torch.randn(50, 4, dtype=torch.float64), dim=1)
    raw = fedgta.moments(soft, 5, "raw").view(5, 4)
    assert bool((raw >= 0).all()) and bool((raw[1:] <= raw[:-1]).all())
    both = fedgta.moments(soft, 5, "hybrid")
    assert len(both) == 40 and torch.allclose(both[20:24], torch.zeros(4, dtype=torch.float64), atol=1e-12)
    degree = torch.randint(1, 5, (50,)).double()
    assert 0.0 < fedgta.confidence(soft, degree) == pytest.approx(fedgta.confidence(soft, 2 * degree) / 2)


def test_a_pair_that_can_subtract_is_counted() -> None:
    experiment = play("fedgta", clients=2, similarity=-1.0)
    facts = experiment.settings.method.facts
    assert facts is not None
    told = facts(experiment.loop.state, experiment.settings.method_config, None)
    assert told["sets_of_two"] == 2 * SMALL["rounds"] and "work out the other's model" in told["summary"]


# -- FED-PUB ---------------------------------------------------------------------------------------


def test_fedpub_without_masks_and_sharpness_is_fedavg_of_equal_clients() -> None:
    ours = play("fedpub", sharpness=0.0, train_masks=False, terms=False, sparsity=0.0, lr=0.005)
    theirs = play("fedavg", weighting="uniform", lr=0.005)
    assert max_difference(ours.loop.state.models[0], theirs.loop.state.weights) < 1e-6


def test_similarities_are_shares_and_identical_models_count_the_same() -> None:
    rows = fedpub.similarity([torch.tensor([1.0, 0.0]), torch.tensor([0.6, 0.8]), torch.tensor([1.0, 0.0])], 3.0)
    assert torch.allclose(rows.sum(1), torch.ones(3, dtype=torch.float64)) and rows[0, 0] == rows[0, 2] > rows[0, 1]
    assert torch.allclose(fedpub.similarity([torch.ones(4)] * 5, 9.0), torch.full((5, 5), 0.2, dtype=torch.float64))
    lonely = fedpub.similarity([torch.tensor([1.0, 0.0]), torch.tensor([0.9, 0.1])], 1e6)
    assert torch.allclose(lonely, torch.eye(2, dtype=torch.float64))


def test_masks_stay_at_home_and_terms_act() -> None:
    plain, without = play("fedpub", rounds=3), play("fedpub", rounds=3, terms=False)
    assert not same(plain, without)
    sent = {row["message"] for row in plain.loop.sheet.rows()}
    assert sent == {"OwnModel", "Report", "Deployed", "Evaluation"}
    client = clients_of(plain)[0]
    assert not any(name.startswith(fedpub.MASK) for name in plain.loop.state.models[0])
    assert any(not torch.equal(mask, torch.ones_like(mask)) for mask in client.state.masks.values())


def test_the_random_graph_is_the_same_everywhere_and_nobodys() -> None:
    first, second = (client.random_inputs for client in clients_of(start("fedpub"))[:2])
    weights = clients_of(start("fedpub"))[0].state.weights
    client = clients_of(start("fedpub"))[0]
    assert torch.equal(client.learner.embedding(weights, first), client.learner.embedding(weights, second))


# -- FedTAD ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [{"distil_epochs": 0}, {"distil_lr": 0.0}])
def test_fedtad_without_distillation_is_fedavg(off: dict[str, Any]) -> None:
    assert same(play("fedtad", **off), play("fedavg"))


def test_reliability_is_shared_out_and_absent_classes_get_none() -> None:
    reliability = play("fedtad").loop.state.reliability
    assert torch.allclose(reliability.sum(0), torch.ones(3, dtype=torch.float64))
    one = start("fedtad")
    for client in clients_of(one):
        data = client.data
        client.data = replace(data, train=data.train & (data.y != 2))
    one.loop.play(until=1)
    assert not bool(one.loop.state.reliability[:, 2].any()) and bool(torch.isfinite(one.loop.state.reliability).all())


def test_alikeness_counts_nodes_without_edges_and_grows_with_a_like_neighbour() -> None:
    data = clients_of(start("fedtad"))[0].data
    known = data.train
    bare = replace(data, edge_index=torch.zeros(2, 0, dtype=torch.int64))
    counts = torch.bincount(data.y[known], minlength=3).double()
    assert torch.allclose(alikeness(bare, known, 5), counts)
    order = torch.randperm(data.num_nodes)
    place = torch.argsort(order)
    moved = replace(
        data, x=data.x.to_dense()[order], y=data.y[order], train=data.train[order], edge_index=place[data.edge_index]
    )
    assert torch.allclose(alikeness(moved, moved.train, 5), alikeness(data, known, 5))


def test_distillation_leaves_equal_models_where_they_are() -> None:
    model = build_backbone("gcn", num_features=6, num_classes=3, hidden=(5,), stream=Stream(0))
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    generator = distillation.first_generator(6, 3, 4, Stream(1), torch.float32)
    settings = fedtad.FedTADConfig(pseudo_nodes=9, noise_width=4, distil_weight_decay=0.0).distillation
    states = distillation.fresh_adam(weights), distillation.fresh_adam(generator)
    teachers, reliability = [weights] * 2, torch.full((2, 3), 0.5)
    found = distillation.distil(
        model, weights, states[0], teachers, reliability, generator, states[1], settings, Stream(2)
    )
    assert equal_weights(found.weights, weights) and found.distance == 0.0
    assert not equal_weights(found.generator, generator)


@pytest.mark.parametrize("backbone", ["gcn", "sage", "mlp"])
def test_the_pseudo_graph_is_computed_as_any_other(backbone: str) -> None:
    """The differentiable forward pass of the server gives what a client's model gives on the same graph."""
    model = build_backbone(
        backbone, num_features=6, num_classes=3, hidden=(5,), input_norm=backbone == "gcn", stream=Stream(0)
    ).double()
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    x = torch.randn(9, 6, dtype=torch.float64)
    graph = distillation.pseudo_graph(model, x, 2)
    found = distillation.pseudo_logits(model, weights, graph)
    rows, columns = torch.nonzero(graph.first, as_tuple=True)
    arcs = torch.stack([columns, rows])
    arcs = arcs[:, arcs[0] != arcs[1]]
    if backbone != "mlp":
        plain = distillation._Nodes(x, arcs, torch.zeros(9, dtype=torch.int64), 9)
        assert torch.allclose(found, model(build_inputs(plain, model, dtype=torch.float64)), atol=1e-10)
    assert torch.equal(distillation.pseudo_labels(10, 3), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2]))


# -- AdaFGL ----------------------------------------------------------------------------------------


def test_step_one_of_adafgl_is_fedavg_and_step_two_says_nothing() -> None:
    experiment = play("adafgl", extractor_rounds=3, rounds=2)
    assert equal_weights(experiment.loop.state.weights, play("fedavg", rounds=3).loop.state.weights)
    rows = [row for row in experiment.loop.sheet.rows() if row["phase"] == "train"]
    assert rows == []


def test_homophily_of_pure_cliques_is_one() -> None:
    data = clients_of(start("adafgl"))[0].data
    y = torch.arange(data.num_nodes) % 2
    pairs = torch.cartesian_prod(torch.arange(data.num_nodes), torch.arange(data.num_nodes)).T
    edges = pairs[:, (y[pairs[0]] == y[pairs[1]]) & (pairs[0] != pairs[1])]
    pure = replace(data, y=y, edge_index=edges)
    assert adafgl.label_propagation(pure, torch.arange(4), torch.arange(4, data.num_nodes)) == 1.0


def test_rewiring_by_hand() -> None:
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]])
    agrees = adafgl.agreeing(p, 0.999)
    assert agrees.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert adafgl.agreeing(torch.full((3, 2), 0.5), 0.999).sum() == 6  # all alike: complete, without loops
    own = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    plain = adafgl.rewired(own, agrees, 1.0)  # the client's own edges alone
    assert torch.allclose(plain, torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]))
    signs = adafgl.signed_messages(agrees, torch.randn(3, 2), 0.2) - torch.eye(3)
    assert bool((signs.abs() <= 1.0 + 1e-6).all())


def test_the_mixture_follows_homophily() -> None:
    client = clients_of(play("adafgl"))[0]
    assert 0.0 <= client.state.homophily <= 1.0
    client.state = replace(client.state, homophily=1.0)
    p, _, _ = client.extracted()
    label = client.outputs(client.state.heads)[0]
    expected = (torch.softmax(label, 1) + torch.softmax(p, 1)) / 2
    assert torch.allclose(client.logits().exp(), expected, atol=1e-6)


def test_a_client_with_too_many_nodes_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adafgl, "MOST_NODES", 5)
    with pytest.raises(Exception, match="split the graph among more clients"):
        play("adafgl")


def test_sizes_of_messages_beside_the_formulas() -> None:
    """FedGTA sends 2 m C moments and one confidence beside the model; SCAFFOLD twice the model."""
    values = num_values(start("fedavg").loop.state.weights)
    report = play("fedgta", rounds=1, order=6).loop
    kinds = next(row for row in report.sheet.rows() if row["message"] == "Report")["bytes_by_kind"]
    assert kinds["model"] >= 4 * values * SMALL["clients"] and kinds["label statistic"] >= 8 * (2 * 6 * 3) * 5
    twice = play("scaffold", rounds=1).loop
    rows = next(row for row in twice.sheet.rows() if row["message"] == "Update")["bytes_by_kind"]
    assert rows["model"] == rows["gradient"] == 4 * values * SMALL["clients"]


@pytest.mark.parametrize("method", ["fedavg", "moon", "fedtad", "fedpub"])
def test_which_model_is_scored_is_a_setting(method: str) -> None:
    """After local training a client scores what its own epochs made, which nobody has averaged yet."""
    received, after = play(method), play(method, score_model="after_local")
    ours = models(after)
    assert any(not equal_weights(weights, ours["client-0"]) for weights in ours.values())
    assert not same(received, after)


def test_the_score_rule_says_which_model_was_scored(tmp_path: Path) -> None:
    settings = {**SMALL, "dropout": 0.5, "execution": "auto"}
    plain, told = "", {"after_local": ", models after local training", "dropped": ", with dropout left on"}
    for choice, said in ({"received": ""} | told).items():
        result = isthmus.run("fedavg", **settings, score_model=choice, out=tmp_path / choice, quiet=True)
        plain = plain if said else result["score_rule"]
        assert result["score_rule"] == plain + said


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "moon", "gcflplus", "fedgta", "fedpub", "fedtad"])
def test_dropout_left_on_changes_scores_and_no_model(method: str) -> None:
    plain, dropped = (play(method, dropout=0.5, score_model=choice) for choice in ("received", "dropped"))
    assert same(plain, dropped)
    ours, theirs = clients_of(plain)[0], clients_of(dropped)[0]
    found = theirs.scored_logits()
    assert torch.equal(found, theirs.scored_logits())  # the same within a round: further scores are of the same model
    assert torch.equal(ours.scored_logits(), theirs.logits()) and not torch.allclose(found, theirs.logits(), atol=1e-3)


def test_dropout_is_left_on_where_it_means_something() -> None:
    for method, settings in (("fedavg", {}), ("adafgl", {"dropout": 0.5}), ("fedsageplus", {"dropout": 0.5})):
        with pytest.raises(ConfigError, match="score_model=dropped is for"):
            resolve(method, {**SMALL, "score_model": "dropped", **settings})
    with pytest.raises(ConfigError, match="backbones in node tasks"):
        graphs = {"dataset": "motifs", "partition": None, "split": "stratified:60/20/20", "preset": "fedstar"}
        play("fedavg", **graphs, hidden=(8, 8), dropout=0.5, score_model="dropped")


def test_a_method_whose_personal_models_are_scored_refuses_to_choose() -> None:
    with pytest.raises(ConfigError, match="score_model"):
        start("ditto", score_model="after_local")
