"""HiFGL against dense computations, in all modes and protocols (spec, section 12: properties 10 to 13, 15, 16, 19 to
23).
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, FaultyEngine
from hifgl_helpers import (
    Driver,
    dense_gradients,
    dense_logits,
    experiment_of,
    matrix_of,
    silo_balanced_loss,
    small,
    with_edges,
)
from safetensors.torch import load_file
from torch_geometric.data import Data

import isthmus
from isthmus.cli.main import main
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError, DataError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.interface import Failure
from isthmus.federation.ledger import differences
from isthmus.federation.party import Invocation, Turn
from isthmus.methods.hifgl.facts import owners, releases
from isthmus.methods.hifgl.hardened import HardenedDevices, ShareRows
from isthmus.methods.hifgl.layers import neighbourhood, propagation
from isthmus.methods.hifgl.messages import Pass
from isthmus.privacy.dp import zcdp_epsilon
from isthmus.tensors import max_difference
from isthmus.testing import check_method

DEPTHS = {1: (), 2: (6,), 3: (6, 5)}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    difference = max_difference({name: tensor.double() for name, tensor in a.items()}, b)
    assert difference <= tolerance, difference


# -- exact forward and backward (properties 10, 11)
# -----------------------------------------------------------------------------------


@pytest.mark.parametrize("secmp", ["hardened", "published", "plain"])
@pytest.mark.parametrize("backbone", ["gcn", "sage"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_forward_and_backward_are_those_of_the_whole_graph(secmp: str, backbone: str, layers: int) -> None:
    scenario = small()
    driver = Driver(
        scenario, secmp=secmp, backbone=backbone, hidden=DEPTHS[layers], first_layer="raw" if layers < 3 else "project"
    )
    driver.differentiate()
    tolerance = (
        1e-7 if secmp == "plain" else 2e-5
    )  # features are float32; 2^-25 per message, through up to three layers
    expected = dense_logits(backbone, scenario.whole, driver.state.weights)
    assert float((driver.logits() - expected).abs().max()) < tolerance
    labelled = scenario.whole.num_train
    wanted = {name: grad * labelled for name, grad in dense_gradients(backbone, scenario, driver.state.weights).items()}
    found = driver.gradients()
    close(found, wanted, tolerance * labelled)
    assert float(next(iter(found.values())).abs().max()) > 1e-3  # the first layer learns


@pytest.mark.parametrize(
    "mode, threshold",
    [("hierarchical", 1), ("hierarchical", 3), ("cross-silo", 1), ("cross-silo", 3), ("cross-device", 1)],
)
@pytest.mark.parametrize("first_layer", ["raw", "project"])
def test_modes_and_thresholds_give_the_same(mode: str, threshold: int, first_layer: str) -> None:
    scenario = small()
    driver = Driver(scenario, mode=mode, threshold=threshold, first_layer=first_layer, weighting="train")
    driver.differentiate()
    labelled = scenario.whole.num_train
    wanted = {
        name: grad * labelled
        for name, grad in dense_gradients("gcn", scenario, driver.state.weights, pooled=True).items()
    }
    close(driver.gradients(), wanted, 1e-4)


@pytest.mark.parametrize("backbone", ["gcn", "sage"])
def test_cross_silo_passes_inner_edges_in_the_clear_and_drops_only_foreign_ones(backbone: str) -> None:
    scenario = small()
    driver = Driver(scenario, mode="cross-silo", backbone=backbone, one_neighbour="drop", k_min=100)
    driver.differentiate()
    for silo, part in scenario.parts.items():  # nobody hears a foreign neighbour: every silo is alone
        alone = replace(part, edge_index=part.edge_index)
        found = driver.devices(silo).scratch.model.logits
        h1 = driver.devices(silo).scratch.model.outputs[1]
        assert torch.isfinite(found).all() and h1.shape[0] == part.num_nodes
        expected = matrix_of("sage", alone) @ part.x.to_dense().double() if backbone == "sage" else None
        if expected is not None:
            first = driver.devices(silo).state.first_sums
            torch.testing.assert_close(first.to_dense().double(), expected, atol=1e-6, rtol=0)


def test_messages_taken_for_constants_leave_the_first_layer_untrained() -> None:
    """The negative: without self-loops, and with received sums detached, W_1 gets no gradient at all (spec 11.4)."""
    scenario = small()
    adjacency = torch.zeros(48, 48, dtype=torch.float64)
    adjacency[scenario.whole.edge_index[1], scenario.whole.edge_index[0]] = 1.0
    weights = {name: tensor.double() for name, tensor in Driver(scenario, secmp="plain").state.weights.items()}
    first = weights["layers.0.weight"].requires_grad_()
    hidden = torch.relu(adjacency @ scenario.whole.x.to_dense().double() @ first)
    exact = silo_balanced_loss(adjacency @ hidden @ weights["layers.1.weight"], scenario)
    assert float(torch.autograd.grad(exact, first, retain_graph=True)[0].abs().max()) > 0
    constant = silo_balanced_loss(adjacency @ hidden.detach() @ weights["layers.1.weight"], scenario)
    assert not constant.requires_grad


@pytest.mark.parametrize("secmp", ["hardened", "published", "plain"])
def test_a_first_layer_that_widens_its_input_can_be_projected(secmp: str) -> None:
    """Projected messages are as wide as the output, also where the raw features would be narrower."""
    scenario = small()
    driver = Driver(scenario, secmp=secmp, hidden=(20,), first_layer="project")
    driver.differentiate()
    expected = dense_logits("gcn", scenario.whole, driver.state.weights)
    assert float((driver.logits() - expected).abs().max()) < 2e-5


# -- rounds (properties 12, 13, 23) ----------------------------------------------------------------


def test_one_round_of_sgd_is_one_step_on_the_silo_balanced_loss() -> None:
    scenario = small()
    driver = Driver(scenario, optimizer="sgd", lr=0.5)
    before = driver.state.weights
    wanted = {name: before[name] - 0.5 * grad for name, grad in dense_gradients("gcn", scenario, before).items()}
    close(dict(driver.round().weights), wanted, 1e-6)
    again = Driver(scenario, optimizer="sgd", lr=0.5, algorithm="fedsgd")
    close(dict(again.round().weights), wanted, 1e-6)


def losses(scenario: Any, **settings: Any) -> tuple[list[float], float]:
    experiment = experiment_of(scenario, rounds=20, precision="float32", **settings)
    experiment.loop.play()
    return [line["train_loss"] for line in experiment.loop.lines], experiment.loop.lines[-1]["test"]


@pytest.mark.parametrize("field", [{"prime": 2**31 - 1, "fraction_bits": 16, "bound": 60.0, "max_degree": 128}, {}])
def test_twenty_rounds_track_the_plain_curve(field: dict[str, Any]) -> None:
    scenario = small(dataset="csbm:nodes=200,classes=3,features=20,degree=5")
    plain, accuracy = losses(scenario, secmp="plain")
    hidden, found = losses(scenario, secmp="hardened", **field)
    assert max(abs(a - b) for a, b in zip(plain, hidden, strict=True)) < 1e-3 and abs(accuracy - found) <= 0.005


def test_one_silo_is_central_training_and_the_number_of_silos_changes_nothing() -> None:
    ends = []
    for clients in (1, 2, 6):
        scenario = small(clients)
        driver = Driver(scenario, algorithm="fedsgd", weighting="train", lr_decay=1.0, lr=0.05)
        for _ in range(3):
            driver.round()
        ends.append({name: tensor.double() for name, tensor in driver.state.weights.items()})
    close(ends[1], ends[0], 1e-5)
    close(ends[2], ends[0], 1e-5)
    scenario = small(1)
    central = SimulatedRun(
        resolve(
            "central",
            {
                "dataset": "csbm",
                "preset": "hifgl",
                "seed": 5,
                "rounds": 3,
                "hidden": (6,),
                "lr": 0.05,
                "precision": "float64",
                "clients": 1,
            },
        ),
        scenario,
    )
    central.loop.play()
    close(ends[0], {n: t.double() for n, t in central.engine.party("central").client.export().items()}, 1e-5)


def test_a_silo_per_node_is_the_cross_device_mode() -> None:
    nodes = "csbm:nodes=16,classes=2,features=5,degree=3"
    apart = build_scenario(dataset=nodes, partition="random-equal", clients=16, split="50/25/25", seed=2)
    together = build_scenario(dataset=nodes, partition="random-equal", clients=2, split="50/25/25", seed=2)
    first = Driver(apart, algorithm="fedsgd", weighting="train", dataset="csbm")
    second = Driver(together, mode="cross-device", weighting="train")
    for _ in range(2):
        first.round()
        second.round()
    close(
        {n: t.double() for n, t in first.state.weights.items()},
        {n: t.double() for n, t in second.state.weights.items()},
        1e-6,
    )


def test_further_local_steps_use_the_messages_of_the_rounds_start() -> None:
    scenario = small()
    once, twice = Driver(scenario, optimizer="sgd", lr=0.5), Driver(scenario, optimizer="sgd", lr=0.5, local_epochs=2)
    first, second = once.round().weights, twice.round().weights
    assert max_difference(first, second) > 1e-4
    near, far = (
        Driver(scenario, optimizer="sgd", lr=0.5, local_epochs=3, algorithm="fedprox", mu=mu) for mu in (5.0, 0.0)
    )
    start = dict(near.state.weights)
    assert max_difference(near.round().weights, start) < max_difference(far.round().weights, start)


def test_fedper_keeps_last_layers_and_stays_exact() -> None:
    scenario = small()
    driver = Driver(scenario, algorithm="fedper", optimizer="sgd", lr=0.5)
    assert set(driver.state.weights) == {"layers.0.weight", "layers.0.bias"} and driver.devices(
        "client-0"
    ).plan.forms == (
        "cached",
        "aggregate",
    )
    driver.round()
    heads = [driver.silo(silo).state.weights["layers.1.weight"] for silo in driver.silos]
    assert not torch.equal(heads[0], heads[1])
    driver.session.clock.begin("evaluation", 1, 3)
    scores = driver.experiment.loop.method.evaluate(driver.state, driver.session, driver.config)
    assert sum(each.parts["test"].total for each in scores.values()) == int(scenario.whole.test.sum())


def test_a_model_can_be_scored_before_its_first_round() -> None:
    scenario = small()
    driver = Driver(scenario)
    driver.session.clock.begin("evaluation", 1, 1)
    scores = driver.experiment.loop.method.evaluate(driver.state, driver.session, driver.config)
    expected = dense_logits("gcn", scenario.whole, driver.state.weights).argmax(1)
    right = int((expected == scenario.whole.y)[scenario.whole.test].sum())
    assert sum(each.parts["test"].correct for each in scores.values()) == right


def test_silos_own_their_models() -> None:
    driver = Driver(small())
    driver.round()
    one, other = driver.silo("client-0"), driver.silo("client-1")
    before = other.state.weights["layers.0.weight"].clone()
    one.state.weights["layers.0.weight"].add_(1.0)
    assert torch.equal(other.state.weights["layers.0.weight"], before)
    assert torch.equal(
        driver.devices("client-0").scratch.model.weights["layers.0.weight"],
        driver.devices("client-1").scratch.model.weights["layers.0.weight"],
    )


# -- graphs (properties 15, 16) --------------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["gcn", "sage"])
@pytest.mark.parametrize("mode", ["hierarchical", "cross-silo", "cross-device"])
def test_loops_duplicates_single_arcs_and_lonely_nodes_are_those_of_the_dense_matrix(backbone: str, mode: str) -> None:
    scenario = small()
    odd = [
        (0, 1),
        (1, 0),
        (0, 1),
        (2, 2),
        (3, 4),
        (5, 6),
        (6, 5),
        (7, 0),
        (7, 1),
        (7, 2),
        (9, 9),
        (9, 10),
        (11, 12),
        (12, 11),
        (12, 11),
    ]
    scenario = with_edges(scenario, odd)
    driver = Driver(scenario, backbone=backbone, mode=mode, weighting="train")
    driver.differentiate()
    expected = dense_logits(backbone, scenario.whole, driver.state.weights)
    assert float((driver.logits() - expected).abs().max()) < 1e-5
    labelled = scenario.whole.num_train
    wanted = {
        name: grad * labelled
        for name, grad in dense_gradients(backbone, scenario, driver.state.weights, pooled=True).items()
    }
    close(driver.gradients(), wanted, 1e-4)


def test_scales_multiply_to_the_gcn_weights_and_a_message_knows_only_its_source() -> None:
    scenario = small()
    matrix = matrix_of("gcn", scenario.whole)
    source, target, own = (torch.zeros(48, dtype=torch.float64) for _ in range(3))
    for silo, part in scenario.parts.items():
        factors = propagation("gcn", neighbourhood(part, silo), 0)
        source[part.node_id], target[part.node_id], own[part.node_id] = (
            f.flatten() for f in (factors.source, factors.target, factors.own)
        )
    arcs = scenario.whole.edge_index
    torch.testing.assert_close(target[arcs[1]] * source[arcs[0]], matrix[arcs[1], arcs[0]], atol=1e-7, rtol=0)
    torch.testing.assert_close(own, matrix.diagonal(), atol=1e-7, rtol=0)
    # More arcs into a target change nothing of what its neighbour sends it.
    part = scenario.parts["client-0"]
    plain = with_edges(scenario, [(0, 1), (1, 0)])
    more = with_edges(scenario, [(0, 1), (1, 0), (1, 5), (5, 1), (1, 6), (6, 1)])
    sent = []
    for each in (plain, more):
        driver = Driver(each, secmp="plain", first_layer="project")
        driver.differentiate()
        owner = next(silo for silo, part in each.parts.items() if 0 in part.node_id.tolist())
        devices = driver.devices(owner)
        sent.append(next(devices.scratch.model.forward())[devices.data.node_id.tolist().index(0)])
    assert torch.equal(*sent) and part.num_nodes


def star(foreign: int) -> tuple[Scenario, int, list[int]]:
    """A hub with three leaves, so many of them in other silos."""
    scenario = small()
    own, *others = (part.node_id.tolist() for part in scenario.parts.values())
    hub, *near = own[: 4 - foreign]
    leaves = [*near, *(node for other in others for node in other[:2])][:3]
    return with_edges(scenario, [(a, b) for leaf in leaves for a, b in ((hub, leaf), (leaf, hub))]), hub, leaves


@pytest.mark.parametrize("secmp", ["hardened", "published", "plain"])
@pytest.mark.parametrize("backbone", ["gcn", "sage"])
def test_devices_with_few_neighbours_hear_nothing(backbone: str, secmp: str) -> None:
    scenario, _, leaves = star(foreign=3)
    driver = Driver(scenario, backbone=backbone, secmp=secmp, one_neighbour="drop", k_min=3)
    driver.differentiate()
    matrix = matrix_of(backbone, scenario.whole)
    matrix[leaves] = 0.0
    if backbone == "gcn":
        matrix[leaves, leaves] = 1.0  # as if alone; the hub hears three neighbours as before
    expected = dense_logits(backbone, scenario.whole, driver.state.weights, matrix)
    assert float((driver.logits() - expected).abs().max()) < 1e-5
    # Backward: the hub heard its leaves, but they have one such device each and its gradient is not sent.
    for silo in driver.silos:
        devices = driver.devices(silo)
        rows = [row for row, node in enumerate(devices.data.node_id.tolist()) if node in leaves]
        arrived = torch.ones(devices.where.count, 1, dtype=torch.float64)
        assert not devices.graph.backward(torch.zeros_like(arrived), arrived)[rows].any()
    allowed = Driver(scenario, backbone=backbone, secmp=secmp, one_neighbour="drop", k_min=1)
    allowed.differentiate()
    expected = dense_logits(backbone, scenario.whole, driver.state.weights)
    assert float((allowed.logits() - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("secmp", ["hardened", "plain"])
@pytest.mark.parametrize("foreign", [0, 1, 2])
def test_foreign_values_are_hidden_among_foreign_values_only(secmp: str, foreign: int) -> None:
    """The hub's silo knows what its own devices sent: two foreign leaves and an own one are two unknowns. Devices that
    belong to nobody (cross-device) pool nothing.
    """
    scenario, hub, leaves = star(foreign)
    apart = Driver(scenario, secmp=secmp, one_neighbour="drop", k_min=3, mode="cross-device")
    assert sum(int(apart.devices(silo).arrivals[0].own.sum()) for silo in apart.silos) == 1
    driver = Driver(scenario, secmp=secmp, one_neighbour="drop", k_min=3)
    driver.differentiate()
    matrix = matrix_of("gcn", scenario.whole)
    alone = leaves if foreign == 0 else [hub, *leaves]
    matrix[alone] = 0.0
    matrix[alone, alone] = 1.0
    expected = dense_logits("gcn", scenario.whole, driver.state.weights, matrix)
    assert float((driver.logits() - expected).abs().max()) < 1e-5


def test_a_model_of_withheld_messages_has_exact_gradients_where_gradients_return() -> None:
    """Edges both ways, each device in the middle of a star or at its end: what is cut forward is cut backward."""
    scenario, hub, leaves = star(foreign=3)
    edges = [(leaf, hub) for leaf in leaves]  # values to the hub only, gradients to the leaves only
    directed = with_edges(scenario, edges)
    driver = Driver(directed, one_neighbour="drop", k_min=3, backbone="sage", weighting="train")
    driver.differentiate()
    matrix = matrix_of("sage", directed.whole)
    assert float((driver.logits() - dense_logits("sage", directed.whole, driver.state.weights)).abs().max()) < 1e-5
    assert matrix[hub, leaves].sum() == 1.0
    for silo in driver.silos:  # a leaf has one source of gradients: the hub's is withheld
        devices = driver.devices(silo)
        assert not devices.arrivals[1].foreign.any()


def raw_messages(driver: Driver, silo: str) -> torch.Tensor:
    """What the devices of a silo sent in setup."""
    return next(driver.devices(silo).raw_feature_sums(Pass(0, 1, False, False, 0, 9)))


def test_noise_at_the_source_and_what_it_is_worth() -> None:
    scenario = small()
    driver = Driver(scenario, one_neighbour="dp", message_clip=0.5, message_noise=0.0)
    for silo in driver.silos:
        assert float(raw_messages(driver, silo).norm(dim=1).max()) <= 0.5 + 1e-9
    noisy = Driver(scenario, one_neighbour="dp", message_clip=0.5, message_noise=4.0)
    raw = torch.cat([raw_messages(noisy, silo) for silo in noisy.silos])
    assert float(raw.std()) == pytest.approx(2.0, rel=0.2)
    experiment = experiment_of(scenario, one_neighbour="dp", message_noise=4.0, rounds=10)
    assert experiment.privacy is not None
    count = releases(experiment.settings.method_config, 9, 3, 10)
    assert (
        experiment.privacy["releases"] == count == 1 + 10 * 3
    )  # raw features once; then forward, backward and evaluation of one layer
    rho = count * 2.0**2 / (2 * 4.0**2)
    assert experiment.privacy["epsilon"] == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e5)))
    assert experiment_of(scenario).privacy is None
    # Spec 11.7: epsilon 8 with 100 releases needs sigma about 14 C.
    assert zcdp_epsilon(100 * 4 / (2 * 16.0**2), 1e-5) < 8.0 < zcdp_epsilon(100 * 4 / (2 * 12.0**2), 1e-5)


# -- who holds what (spec 2) -----------------------------------------------------------------------


def test_a_silo_is_built_from_identities_and_never_sent_a_value_of_a_device() -> None:
    scenario = small()
    experiment = experiment_of(scenario, rounds=2)
    silo: Any = experiment.engine.party("client-0").client
    assert {field.name for field in fields(silo.data)} == {"node_id", "num_features", "num_classes"}
    assert torch.equal(silo.data.node_id, scenario.parts["client-0"].node_id)
    experiment.loop.play()
    rows = experiment.loop.sheet.rows()
    seen = {(row["sender"], row["receiver"]) for row in rows}
    upward = [row for row in rows if row["receiver"] != "device"]  # counts, sealed boxes, summed gradients, scores
    assert not {"embedding", "structure"} & {kind for row in upward for kind in row["kinds"]}
    assert {row["message"] for row in upward if "label statistic" in row["kinds"]} == {"Evaluation"}  # by class
    assert ("client", "client") not in seen  # silos have nothing to say to each other
    between = [
        row["kinds"] for row in experiment.loop.sheet.rows() if (row["sender"], row["receiver"]) == ("device", "device")
    ]
    assert {kind for found in between for kind in found} == {"ciphertext", "identifier", "share", "structure"}


# -- what is counted and shown (properties 19 to 21)
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"secmp": "hardened"},
        {"secmp": "hardened", "first_layer": "project"},
        {"secmp": "hardened", "threshold": 1},
        {"secmp": "hardened", "mode": "cross-silo"},
        {"secmp": "hardened", "mode": "cross-silo", "threshold": 1},
        {"secmp": "hardened", "mode": "cross-device"},
        {"secmp": "published"},
        {"secmp": "plain"},
        {"secmp": "plain", "mode": "cross-device"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_sheet_of_these_settings_is_what_a_run_shows(settings: dict[str, Any]) -> None:
    experiment = experiment_of(small(), rounds=2, **settings)
    experiment.loop.play()
    sheet = sheet_of(experiment.settings.method, config=experiment.settings.method_config, view=experiment.view)
    assert differences(experiment.loop.sheet, sheet) == []


def test_disclose_shows_the_protocol_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*flags: str) -> set[str]:
        assert main(["disclose", "hifgl", *flags]) == 0
        words = set(capsys.readouterr().out.split())
        return words & {"ShareRows", "CodedSums", "PlainRows"}

    assert shown() == {"ShareRows"}
    assert shown("--set", "secmp=plain") == {"PlainRows"} and shown("--set", "secmp=published") == {"CodedSums"}


@pytest.mark.parametrize(
    "secmp, own", [("hardened", "send_shares"), ("published", "send_coded"), ("plain", "send_plain")]
)
def test_parties_accept_only_handlers_of_the_protocol_in_use(secmp: str, own: str) -> None:
    handlers = experiment_of(small(), secmp=secmp).settings.method.table.handlers["device"]
    assert {name for name in handlers if name.startswith("send_")} == {own}
    devices: Any = experiment_of(small(), secmp=secmp).engine.party("client-0/devices")
    foreign = "send_plain" if secmp != "plain" else "send_shares"
    answer = devices.invoke(Invocation("client-0/devices", "device", foreign, Turn(0, "train", 1, 1), 1))
    assert isinstance(answer, Failure) and answer.kind == "protocol"


@pytest.mark.parametrize(
    "secmp, threshold, per_edge",
    [("hardened", 1, 32), ("hardened", 2, 32), ("published", 1, 48), ("published", 2, 72), ("plain", 1, 24)],
)
def test_bytes_between_devices_are_those_of_the_cost_model(secmp: str, threshold: int, per_edge: int) -> None:
    """Per directed edge and exchange d = 3 elements and one to check by, (T + 1) d as published; k forward (one
    cached), k - 1 backward.
    """
    scenario = small()
    driver = Driver(scenario, secmp=secmp, threshold=threshold)
    driver.session.ledger.take()
    driver.round()
    cross = sum(part.cross.outgoing.sum().item() for part in scenario.parts.values() if part.cross is not None)
    name = {"hardened": "ShareRows", "published": "CodedRows", "plain": "PlainRows"}[secmp]
    rows = [entry for entry in driver.session.ledger.take() if entry.message == name]
    assert len(rows) == 2 and all(sum(entry.by_kind.values()) == cross * per_edge for entry in rows)
    described = driver.experiment.loop.method.facts(driver.state, driver.config, scenario)  # type: ignore[misc]
    assert described["cost"]["device_device_round"] == scenario.whole.edge_index.shape[1] * 2 * per_edge
    assert described["forward_widths"] == [3] and described["backward_widths"] == [3] and 0 < described["eps_p"] <= 1


def test_owners_are_found_by_id_whatever_the_ids_are() -> None:
    scenario = small()
    renamed = torch.randperm(48, generator=torch.Generator().manual_seed(0)) * 2**56 + 12345
    parts = {silo: replace(part, node_id=renamed[part.node_id]) for silo, part in scenario.parts.items()}
    other = replace(scenario, whole=replace(scenario.whole, node_id=renamed), parts=parts)
    assert torch.equal(owners(other), owners(scenario))
    for number, part in enumerate(scenario.parts.values()):
        assert (owners(scenario)[part.node_id] == number).all()


def test_clipped_values_are_counted_once_however_many_local_steps() -> None:
    once, thrice = (Driver(small(), bound=0.25, first_layer="project", local_epochs=epochs) for epochs in (1, 3))
    once.round()
    thrice.round()
    assert once.log["clipped"] == thrice.log["clipped"] > 0


def test_accuracy_is_pooled_and_permuted_test_labels_do_not_change_the_chosen_round() -> None:
    scenario = small(dataset="csbm:nodes=120,classes=3,features=12,degree=4")
    experiment = experiment_of(scenario, rounds=8)
    experiment.loop.play()
    poisoned = {}
    for client, part in scenario.parts.items():
        y = part.y.clone()
        y[part.test] = y[part.test].roll(1)
        poisoned[client] = replace(part, y=y)
    other = experiment_of(replace(scenario, parts=poisoned), rounds=8)
    other.loop.play()
    assert experiment.loop.best is not None and other.loop.best is not None
    assert (
        experiment.loop.best["round"] == other.loop.best["round"]
        and experiment.loop.best["test"] != other.loop.best["test"]
    )
    line = experiment.loop.lines[-1]
    right, total = (sum(line["per_client"][c]["test"][i] for c in scenario.parts) for i in (0, 1))
    assert line["test"] == right / total


def test_general_properties() -> None:
    skip = {
        "one_client_equals_local": (
            "sums are rounded to fixed point: equal within 2^-24, see test_one_silo_is_central_training"
        ),
    }
    check_method("hifgl", settings={"preset": "hifgl", "selection": "last"}, skip=skip)
    check_method(
        "hifgl",
        settings={"preset": "hifgl", "selection": "last", "one_neighbour": "dp"},
        skip=skip
        | {
            "same_seed_same_result": "noise comes from a secret",
            "wire_coded_equals_local": "likewise",
            "state_is_declared": "likewise",
            "resume_is_bit_equal": "likewise",
            "cohort_equals_each": "likewise",
            "identical_clients_stay_identical": "likewise",
            "order_does_not_matter": "likewise",
        },
    )


def test_silo_updates_behind_masks() -> None:
    plain = experiment_of(small(), rounds=2)
    masked = experiment_of(small(), rounds=2, secure_sum=True)
    for each in (plain, masked):
        each.loop.play()
    close(
        {n: t.double() for n, t in plain.loop.state.weights.items()},
        {n: t.double() for n, t in masked.loop.state.weights.items()},
        1e-5,
    )  # type: ignore[attr-defined]
    assert {row["protection"] for row in masked.loop.sheet.rows() if row["message"] == "Update"} == {"masked"}


def test_cost_model() -> None:
    def forms(**settings: Any) -> tuple[str, ...]:
        config: Any = resolve("hifgl", {"dataset": "cora", **settings}).method_config
        found: tuple[str, ...] = config.plan(1433, 7).forms
        return found

    assert forms() == ("cached", "project") and forms(horizon=5) == ("project", "project")
    assert forms(first_layer="project") == ("project", "project")
    assert forms(hidden=(4, 64)) == ("project", "aggregate", "project")
    assert forms(hidden=()) == ("project",)  # 1433 raw numbers against 3 * 7 in each of 50 rounds
    assert forms(hidden=(), horizon=100) == ("cached",)


# -- bad input -------------------------------------------------------------------------------------


def test_settings_that_cannot_work_are_refused() -> None:
    for settings, words in (
        ({"prime": 12}, "prime"),
        ({"prime": 2**31 - 1}, "overflow"),
        ({"fraction_bits": 60}, "overflow"),
        ({"threshold": 0}, "threshold"),
        ({"prime": 11, "fraction_bits": 0, "bound": 1.0, "max_degree": 4, "threshold": 5}, "distinct points"),
        ({"mode": "cross-device", "threshold": 2}, "two share holders"),
        ({"mode": "cross-silo", "secmp": "published"}, "hierarchical"),
        ({"backbone": "gat"}, "backbone of hifgl"),
        ({"k_min": 0}, "k_min"),
        ({"secmp": "hardend"}, "hardened"),
        ({"one_neighbour": "dpp"}, "dp"),
        ({"lr": 0.0}, "lr"),
        ({"dp_delta": 1.0}, "dp_delta"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve("hifgl", {"dataset": "cora", **settings})
    for threshold, mode in ((3, "hierarchical"), (3, "cross-silo")):
        with pytest.raises(ConfigError, match=f"needs {threshold + 1} share holders"):
            SimulatedRun(
                resolve("hifgl", {"dataset": "csbm", "clients": 2, "threshold": threshold, "mode": mode}), small(2)
            )
    assert resolve("hifgl", {"dataset": "cora"}, {"secure_sum": "false"}).run.secure_sum is False


def test_values_that_are_not_numbers_and_values_beyond_the_bound() -> None:
    scenario = small()
    part = scenario.parts["client-1"]
    for bad in (float("nan"), float("inf")):
        x = part.x.to_dense().clone() if part.x.layout != torch.strided else part.x.clone()
        x[0, 0] = bad
        broken = replace(scenario, parts={**scenario.parts, "client-1": replace(part, x=x)})
        with pytest.raises(RunError, match="NaN or infinite"):
            Driver(broken)
    driver = Driver(scenario, bound=0.25, first_layer="project")
    driver.round()
    assert driver.log["clipped"] > 0


def test_a_graph_beyond_the_format_is_refused() -> None:
    with pytest.raises(DataError, match="raise max_degree"):
        experiment_of(small(), max_degree=2)


def test_a_device_with_very_many_neighbours_is_no_reason_to_stop(tmp_path: Path) -> None:
    """A hub of 1,500 edges, most of them to other owners: the protected sums are those in the clear."""
    leaves = torch.arange(1, 1501)
    arcs = torch.stack([torch.zeros_like(leaves), leaves])
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(1501, 3, generator=generator),
        edge_index=torch.cat([arcs, arcs.flip(0)], 1),
        y=torch.arange(1501) % 2,
    )
    weights = []
    for secmp in ("hardened", "plain"):
        settings = {"secmp": secmp, "mode": "cross-silo", "rounds": 2, "variant": "own", "hidden": 4}
        owner = torch.arange(1501) % 3
        isthmus.run("hifgl", dataset=data, partition=owner, set=settings, seed=1, out=tmp_path / secmp)
        weights.append(load_file(tmp_path / secmp / "models" / "client-0" / "weights.safetensors"))
    assert max_difference(*weights) < 1e-4


def test_edges_known_to_one_end_only_are_refused() -> None:
    scenario = small()
    part = scenario.parts["client-0"]
    assert part.cross is not None
    kept = torch.ones(part.cross.num_edges, dtype=torch.bool)
    kept[int(torch.nonzero(part.cross.outgoing)[0])] = False
    pair = part.cross.own[~kept], part.cross.other[~kept]
    kept &= ~((part.cross.own == pair[0]) & (part.cross.other == pair[1]))
    cut = replace(
        part.cross,
        **{name: getattr(part.cross, name)[kept] for name in ("own", "owner", "other", "outgoing", "weight")},
    )
    broken = replace(scenario, parts={**scenario.parts, "client-0": replace(part, cross=cut)})
    with pytest.raises(RunError, match="do not agree on the edges"):
        Driver(broken)


def test_a_device_that_drops_out_and_shares_that_were_changed_lose_the_round_not_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = HardenedDevices.send_shares

    def tampering(change: Any) -> None:
        def send_shares(self: HardenedDevices, order: Pass) -> Any:
            mail = send(self, order)
            if order.layer == 2 and self.party == "client-0/devices":
                peer = next(peer for peer in sorted(mail) if peer != self.party)
                mail = {**mail, peer: change(mail[peer])}
            return mail

        send_shares.__annotations__ = send.__annotations__
        monkeypatch.setattr(HardenedDevices, "send_shares", _like(send, send_shares))

    for change, words in (
        (lambda sent: ShareRows(sent.rows[:-1]), "a device dropped out"),
        (lambda sent: ShareRows(sent.rows + 1), "lost or changed"),
        (lambda sent: ShareRows(sent.rows.clone().fill_(2**62)), "the modulus is"),
    ):
        driver = Driver(small())
        tampering(change)
        with pytest.raises(RunError, match=words):
            driver.round()
        monkeypatch.setattr(HardenedDevices, "send_shares", send)


@pytest.mark.parametrize(
    "party, handler",
    [("client-1/devices", "send_shares"), ("client-1/devices", "open_sums"), ("client-2", "send_held")],
)
def test_parties_that_crash_in_the_middle_of_a_layer_come_back_and_nothing_changes(party: str, handler: str) -> None:
    scenario = small()
    calm = experiment_of(scenario)
    calm.loop.play()
    plan = [Fault(party, "train", 2, handler, "crashed"), Fault(party, "setup", 1, handler, "crashed")]
    shaken = experiment_of(scenario, engine=FaultyEngine, plan=plan)
    shaken.loop.play()
    assert shaken.engine.rollbacks == 2  # type: ignore[attr-defined]
    before, after = (each.engine.party("client-0").client.export() for each in (calm, shaken))
    assert max_difference(before, after) == 0.0


def _like(original: Any, replacement: Any) -> Any:
    from isthmus.federation.roles import handler

    replacement.__name__, replacement.__qualname__ = original.__name__, original.__qualname__
    return handler(replacement)


def test_a_missing_holder_is_named() -> None:
    driver = Driver(small(), threshold=2)
    silo = driver.silo("client-1")
    silo.state = replace(silo.state, keys={}, sizes={})
    with pytest.raises(RunError, match="no sums of the share holders client-1 in layer 2: repeat"):
        driver.round()


def test_from_the_command_line_to_a_result(tmp_path: Path) -> None:
    result = isthmus.run(
        "hifgl",
        dataset="csbm:nodes=60,features=8",
        preset="hifgl",
        clients=3,
        rounds=2,
        split="40/20/40",
        out=tmp_path / "r",
    )
    assert (
        result["facts"]["secmp"] == "hardened"
        and result["facts"]["one_neighbour"] == "drop"
        and result["preset"] == "hifgl"
    )
    assert (
        result["bytes"]["device"] > 0
        and len(result["per_client"]) == 3
        and result["parameters"]["trainable"] == result["parameters"]["shared"]
    )
