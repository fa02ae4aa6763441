"""What is said before the first round: settings that cannot act, data that lack what a method uses."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

from isthmus.errors import ConfigError
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


@pytest.mark.parametrize(
    ("method", "changes", "idle"),
    [
        ("fedggr", {"encoder": "projection", "encoder_lr": 0.1}, True),
        ("fedggr", {"encoder": "common_start", "encoder_lr": 0.1}, False),
        ("fedpub", {"weighting": "uniform"}, True),
        ("fedper", {"first_weights": "own"}, False),
        ("fedavg", {"first_weights": "own", "input_norm": True, "share_input_norm": False}, False),
        ("hifgl", {"message_noise": 0.5}, True),
        ("hifgl", {"message_noise": 0.5, "one_neighbour": "dp"}, False),
        ("mlpteacher", {"proxy_lr": 0.1}, True),
        ("fedstruct-server", {"walks": 3}, True),
        ("fedstruct-server", {"walks": 3, "nsf": "node2vec"}, False),
    ],
)
def test_a_method_names_what_it_has_no_use_for(
    method: str, changes: dict[str, Any], idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    resolve(method, {**GRAPH, **changes})
    assert any("changes nothing here" in record.getMessage() for record in caplog.records) is idle


SETTINGS: dict[str, Any] = {**GRAPH, "rounds": 3, "split": "50/25/25", "hidden": "8", "lr_step": 1, "trim": 0.4}
OTHER: dict[str, Any] = {
    "hidden": (6,),
    "max_step": 1e-3,
    "fraction": 0.4,
    "local_epochs": 2,
    "fanout": (3,),
    "hops": 3,
}
"""Values that must show, of settings for which twice the number or the other choice is none."""
OTHER |= {"backbone": "gcn", "dp_clip": 1e-3}
NEEDS = {"dp_noise": {"dp_clip": 1.0, "weighting": "uniform"}, "dp_clip": {"weighting": "uniform"}}


def course(**changes: Any) -> list[tuple[Any, ...]]:
    settings = resolve("fedavg", {**SETTINGS, "clients": 3, **changes})
    with SimulatedRun(settings, scenario_of(settings)) as simulated:
        simulated.loop.play()
        return [(line["val_loss"], line["test_loss"], line["bytes"]) for line in simulated.loop.lines]


def test_every_setting_of_fedavg_acts_or_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config = resolve("fedavg", SETTINGS).method_config
    plain, silent = course(), []
    for field in fields(config):
        value, hint = getattr(config, field.name), get_type_hints(type(config))[field.name]
        others = [each for each in get_args(hint) if isinstance(each, str) and each != value]
        other = OTHER.get(field.name, others[0] if others else not value if hint is bool else (value or 0.5) * 2)
        changes = {**NEEDS.get(field.name, {}), field.name: other}
        caplog.clear()
        try:
            before = course(**NEEDS[field.name]) if field.name in NEEDS else plain
            after = course(**changes)
        except ConfigError:
            continue  # said as well
        if before == after and not any(record.getMessage().startswith(field.name) for record in caplog.records):
            silent.append(field.name)
    assert not silent


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


def test_accuracy_of_a_rare_class_is_doubted() -> None:
    rare = {"dataset": "banks:accounts=300,rate=0.05", "clients": 8, "split": "stratified:40/20/40"}
    (note,) = notes("fedavg", **rare, metric="accuracy")
    assert "so a model that never names it is" in note and note.endswith("take metric=auprc")
    common = rare | {"dataset": "banks:accounts=300,rate=0.2"}
    assert not notes("fedavg", **rare) and not notes("fedavg", **common, metric="accuracy")
