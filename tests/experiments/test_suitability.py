"""What is said before the first round: settings that cannot act, data that lack what a method uses."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun, scenario_of

GRAPH: dict[str, Any] = {"dataset": "csbm:nodes=80,features=5,degree=4", "clients": 2, "rounds": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": "", "dropout": 0.3}, "dropout changes nothing"),
        ({"hidden": "8", "head": True, "backbone": "sage", "dropout": 0.3}, "dropout changes nothing"),
        ({"batch_size": 16}, "batch_size changes nothing"),
        ({"batch_size": 16, "batches": "neighbours", "fanout": "5,3"}, None),
        ({"batches": "clusters", "fanout": "5"}, "fanout changes nothing"),
        ({"lr_step": 3}, "lr_step changes nothing"),
        ({"schedule": "decay", "schedule_rounds": 3}, "schedule_rounds changes nothing"),
        ({"hidden": "8", "dropout": 0.3}, None),
        ({"schedule": "decay", "lr_step": 3}, None),
        ({"backbone": "gat", "hidden": "8", "dropout": 0.3}, None),
    ],
)
def test_a_setting_that_cannot_act_is_named(
    changes: dict[str, Any], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="isthmus"):
        resolve("fedavg", {**GRAPH, **changes})
    texts = [record.message for record in caplog.records if "changes nothing" in record.message]
    assert [text.partition(" here")[0] for text in texts] == ([said] if said else [])


def notes(method: str, **changes: Any) -> list[str]:
    settings = resolve(method, {**GRAPH, "preset": "fedstruct", **changes})
    with SimulatedRun(settings, scenario_of(settings)) as simulated:
        return list(simulated.notes)


def test_a_method_says_that_clients_have_no_edges_between_them() -> None:
    alone = {"dataset": "csbm:nodes=80,features=5,degree=0"}
    assert any("edges between clients" in note for note in notes("fedgcn", **alone))
    assert not notes("fedgcn") and not notes("fedavg", **alone)


def test_clients_without_a_training_label_are_named() -> None:
    (note,) = notes("local", split="2/49/49", clients=8)
    assert note.startswith("no training label at client-")


def test_a_backbone_for_directions_says_that_there_are_none() -> None:
    directed = {"dataset": "banks:accounts=300,directed=1", "clients": 8, "backbone": "dirsage"}
    assert not notes("fedavg", **directed, undirected=False)
    (note,) = notes("fedavg", **directed, undirected=True)
    assert "set undirected=false" in note
    assert not notes("fedavg", **directed | {"backbone": "sage"}, undirected=True)


@pytest.mark.parametrize(("epochs", "said"), [(1, True), (2, False)])
def test_fedprox_with_one_step_says_that_it_is_fedavg(
    epochs: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="isthmus"):
        resolve("fedprox", {**GRAPH, "local_epochs": epochs})
    assert any("fedprox is fedavg" in record.message for record in caplog.records) == said
