"""Runs whose clients train by mini-batches of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import isthmus
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve

GRAPH: dict[str, Any] = {"dataset": "csbm:nodes=400,features=16,degree=10", "clients": 3, "rounds": 12, "seed": 1}
SETTINGS: dict[str, Any] = {"split": "40/20/40", "dropout": 0.0, "hidden": (16,)}
SUPPORTED = ("fedavg", "fedprox", "fedper", "ditto", "fedsgd", "fedsage", "local", "central")


@pytest.mark.parametrize("batches", ["neighbours", "clusters"])
@pytest.mark.parametrize("method", SUPPORTED)
def test_scores_are_near_those_of_full_batches(method: str, batches: str, tmp_path: Path) -> None:
    common = {**GRAPH, **SETTINGS} | ({"clients": None} if method == "central" else {})
    steps = {"rounds": 40} if method == "fedsgd" else {"local_epochs": 3}
    full = isthmus.run(method, out=tmp_path / "full", **common | steps | {"rounds": 40})
    few = isthmus.run(method, out=tmp_path / batches, **common | steps, batches=batches, batch_size=16, fanout=(5,))
    assert few["test"] > full["test"] - 0.08 and few["test"] > 0.5


@pytest.mark.parametrize("execution", ["cohort", "each"])
def test_clients_run_each_by_itself(execution: str, tmp_path: Path) -> None:
    run = isthmus.run("fedavg", out=tmp_path / execution, **GRAPH, batches="neighbours", execution=execution)
    assert run["rounds"] == GRAPH["rounds"]


@pytest.mark.parametrize("method", ["fedstruct", "hifgl", "fedggr", "fedspray", "fedgcn", "moon", "fedproto", "fedpub"])
def test_a_method_that_needs_the_whole_graph_refuses(method: str) -> None:
    with pytest.raises(ConfigError, match="batches"):
        resolve(method, {**GRAPH, "batches": "neighbours"})


@pytest.mark.parametrize("fanout", ["", "0", "5,0"])
def test_a_fanout_that_draws_nobody_is_refused(fanout: str) -> None:
    with pytest.raises(ConfigError, match="fanout"):
        resolve("fedavg", {**GRAPH, "batches": "neighbours", "fanout": fanout})


def test_batches_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="neighbours"):
        resolve("fedavg", {**GRAPH, "batches": "walks"})
