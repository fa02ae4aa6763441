"""FedPerGNN for node classification (baselines spec, section 16)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hifgl_helpers import dense_logits, matrix_of, small

from isthmus.data.scenario import Scenario
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.messages import SERVER
from isthmus.methods.fedpergnn import FedPerGNNClient, HashKey, match
from isthmus.tensors import max_difference
from isthmus.testing import check_method

CALM = {"preset": "hifgl", "selection": "last", "hidden": (6,), "seed": 5, "dataset": "csbm", "precision": "float64"}


def play(method: str, scenario: Scenario, **settings: Any) -> SimulatedRun:
    experiment = SimulatedRun(
        resolve(method, {**CALM, "clients": len(scenario.parts), "rounds": 3, **settings}), scenario
    )
    experiment.loop.play()
    return experiment


def without_cross(scenario: Scenario) -> Scenario:
    """The same silos with no edge between them."""
    parts = {}
    for client, part in scenario.parts.items():
        assert part.cross is not None
        none = torch.zeros(0, dtype=torch.int64)
        parts[client] = replace(
            part, cross=replace(part.cross, own=none, owner=none, other=none, outgoing=none.bool(), weight=none.float())
        )
    return replace(scenario, parts=parts)


def test_without_cross_edges_and_noise_it_is_fedavg() -> None:
    apart = without_cross(small())
    for epochs in (1, 3):
        ours, theirs = (play(name, apart, local_epochs=epochs).loop.state.weights for name in ("fedpergnn", "fedavg"))  # type: ignore[attr-defined]
        assert max_difference(ours, theirs) < 1e-6


def test_with_the_whole_graphs_hidden_values_layer_two_is_central() -> None:
    scenario = small()
    experiment = play("fedpergnn", scenario)
    weights = experiment.loop.state.weights  # type: ignore[attr-defined]
    matrix = matrix_of("gcn", scenario.whole)
    first = {name: tensor for name, tensor in weights.items() if name.startswith("layers.0")}
    hidden = torch.relu(dense_logits("gcn", scenario.whole, first))
    degree = (matrix != 0).sum(1).double()
    for client, part in scenario.parts.items():
        party: Any = experiment.engine.party(client).client
        assert isinstance(party, FedPerGNNClient)
        party.own = __import__("scipy.sparse").sparse.csr_matrix(
            (matrix @ scenario.whole.x.to_dense().double())[part.node_id].numpy()
        )
        rows = (hidden / degree.sqrt()[:, None])[torch.from_numpy(party.wanted)]
        expected = dense_logits("gcn", scenario.whole, weights)[part.node_id]
        torch.testing.assert_close(party._forward(weights, rows).logits, expected, atol=1e-6, rtol=0)


def test_foreign_neighbours_are_constants_and_reach_layer_two() -> None:
    scenario = small()
    ours, alone = play("fedpergnn", scenario).loop.lines[-1], play("fedavg", scenario).loop.lines[-1]
    assert ours["train_loss"] != alone["train_loss"]


def test_updates_are_clipped_and_noise_has_the_scale_of_epsilon() -> None:
    config: Any = resolve("fedpergnn", {**CALM, "clip": 0.3, "epsilon": 0.5}).method_config
    update = {"a": torch.full((100,), 1.0, dtype=torch.float64), "b": torch.zeros(20000, dtype=torch.float64)}
    quiet: Any = replace(config, epsilon=0.0)
    assert (
        float(sum(tensor.abs().sum() for tensor in quiet.mechanism.release_update(update).weights.values()))
        <= 0.3 + 1e-9
    )
    noise = config.mechanism.release_update(update).weights["b"]
    assert float(noise.abs().mean()) == pytest.approx(2 * 0.3 / 0.5, rel=0.05)  # of a Laplace distribution, its scale
    experiment = play("fedpergnn", small(), clip=0.3, epsilon=0.5)
    assert (
        experiment.privacy is not None
        and experiment.privacy["epsilon"] == pytest.approx(1.5)
        and experiment.privacy["warning"]
    )
    plain, moved = play("fedpergnn", small()), play("fedpergnn", small(), clip=1e-6)
    first = experiment.settings.method_config.first_model
    assert callable(first) and max_difference(plain.loop.state.weights, moved.loop.state.weights) > 1e-3  # type: ignore[attr-defined]


def test_hashes_match_nodes_and_the_server_has_no_key() -> None:
    experiment = play("fedpergnn", small())
    state: Any = experiment.loop.state
    offered = np.concatenate(
        [
            experiment.engine.party(client).client.data.node_id.numpy()[experiment.engine.party(client).client.boundary]  # type: ignore[attr-defined]
            for client in sorted(state.routes)
        ]
    )
    for client, route in state.routes.items():
        party: Any = experiment.engine.party(client).client
        assert np.array_equal(offered[route.numpy()], party.wanted)
    keys = [row for row in experiment.loop.sheet.rows() if row["message"] == HashKey.__name__]
    assert {row["receiver"] for row in keys} == {"client"} and SERVER not in {row["receiver"] for row in keys}


def test_arcs_nobody_offers_and_settings_that_do_not_fit() -> None:
    scenario = small()
    part = scenario.parts["client-0"]
    assert part.cross is not None
    only_in = ~part.cross.outgoing
    cross = replace(
        part.cross,
        **{name: getattr(part.cross, name)[only_in] for name in ("own", "owner", "other", "outgoing", "weight")},
    )
    with pytest.raises(RunError, match="nobody offers"):
        play("fedpergnn", replace(scenario, parts={**scenario.parts, "client-0": replace(part, cross=cross)}))
    for bad, words in (
        ({"backbone": "sage"}, "two layers"),
        ({"hidden": (4, 4)}, "two layers"),
        ({"epsilon": 1.0}, "clip above 0"),
        ({"loss": "double_softmax"}, "cross entropy"),
        ({"clip": 1.0, "weighting": "train"}, "uniform"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve("fedpergnn", {**CALM, **bad})
    with pytest.raises(RunError, match="same hash"):
        match({"a": type("O", (), {"offered": torch.tensor([1, 1]), "wanted": torch.tensor([])})()})  # type: ignore[dict-item]


def test_general_properties() -> None:
    check_method(
        "fedpergnn",
        settings={"preset": "hifgl", "selection": "last"},
        skip={
            "one_client_equals_local": (
                "the same up to rounding (test_without_cross_edges_and_noise_it_is_fedavg), by other kernels"
            ),
            "cohort_equals_each": "clients have no cohort",
        },
    )
