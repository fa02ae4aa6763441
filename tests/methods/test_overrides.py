"""Whoever overrides a client's function gets it run: in the default execution as in ``execution=each``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import isthmus
from isthmus.errors import RunError
from isthmus.federation.interface import Stacked
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.methods import fedavg, registry
from isthmus.methods.fedavg import Broadcast, FedAvgClient, FedAvgCohort, FedAvgConfig, Update
from isthmus.methods.training import ModelState
from isthmus.nn.train import ExtraGradient
from isthmus.tensors import Weights, scaled

SMALL: dict[str, Any] = {
    "dataset": "csbm:nodes=120,classes=3,features=16,degree=4",
    "clients": 3,
    "rounds": 3,
    "hidden": 8,
    "dropout": 0.0,
    "backbone": "gcn",
    "precision": "float64",
}
Start = Callable[[type[FedAvgClient[Any]]], str]


class OtherUpdate(FedAvgClient[FedAvgConfig]):
    @handler
    def local_update(self, common: Broadcast) -> Update:
        update = super().local_update(common)
        return Update(scaled(update.weights, 0.5), update.share)


class OtherTraining(FedAvgClient[FedAvgConfig]):
    def train(self, weights: Weights, received: Weights) -> ModelState:
        return replace(super().train(weights, received), weights=scaled(received, 0.5))


class OtherLoss(FedAvgClient[FedAvgConfig]):
    def extra_gradient(self, received: Weights) -> ExtraGradient | None:
        return pull(3.0)


class OwnPull(FedAvgClient[FedAvgConfig]):
    """A term that differs between clients, as SCAFFOLD's control variates do; its cohort is declared again."""

    cohort: ClassVar[type[Cohort[Any]] | None] = FedAvgCohort

    def extra_gradient(self, received: Weights) -> ExtraGradient | None:
        return None if self.party == "client-1" else pull(float(self.party[-1]) + 1.0)


def pull(strength: float) -> ExtraGradient:
    def add(weights: Weights, grads: Mapping[str, Tensor]) -> None:
        for name, grad in grads.items():
            grad.add_(weights[name], alpha=strength)

    return add


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Registers FedAvg with another client for the time of a test; gives the method's name."""

    def register(cls: type[FedAvgClient[Any]]) -> str:
        name = cls.__name__.lower()
        monkeypatch.setitem(
            registry.METHODS._entries, name, replace(fedavg.METHOD, name=name, roles={"client": Role(cls)})
        )
        return name

    registry.get_method("fedavg")  # everything is loaded before the first is added
    return register


@pytest.mark.parametrize("cls", [OtherUpdate, OtherTraining, OtherLoss])
def test_an_override_counts_in_every_execution(
    cls: type[FedAvgClient[Any]], start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = isthmus.run("fedavg", out=tmp_path / "plain", **SMALL)
    assert plain["execution"] == "cohort" and not caplog.records
    name = start(cls)
    each = isthmus.run(name, out=tmp_path / "each", execution="each", **SMALL)
    assert not caplog.records, "no warning where execution=each was asked for"
    default = isthmus.run(name, out=tmp_path / "default", **SMALL)
    assert default["execution"] == "each"
    assert default["val"] == each["val"] and default["per_client"] == each["per_client"]
    losses = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("default", "plain")]
    assert losses[0] != losses[1], "the override has an effect"
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{cls.__name__} overrides" in line and "set `cohort`" in line
    assert line in (tmp_path / "default" / "log.txt").read_text()


def test_a_cohort_that_is_declared_again_is_used(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used: list[str] = []

    class HalfTogether(FedAvgCohort):
        def local_update(self, common: Broadcast) -> Stacked[Update]:
            used.append("cohort")
            update = super().local_update(common)
            halves: Any = self.scaled({name: self.weights[name] for name in common.weights}, update.message.share / 2)
            return Stacked(Update(halves, update.message.share), self.parties)

    class Half(OtherUpdate):
        cohort: ClassVar[type[Cohort[Any]] | None] = HalfTogether

    name = start(Half)
    together, each = (
        isthmus.run(name, out=tmp_path / execution, execution=execution, **SMALL) for execution in ("auto", "each")
    )
    assert together["execution"] == "cohort" and used == ["cohort"] * SMALL["rounds"] and not caplog.records
    assert together["per_client"] == each["per_client"]


def test_every_client_of_a_cohort_has_its_own_extra_gradient(start: Start, tmp_path: Path) -> None:
    name = start(OwnPull)
    runs = {}
    for execution in ("cohort", "each"):
        assert isthmus.run(name, out=tmp_path / execution, execution=execution, **SMALL)["execution"] == execution
        runs[execution] = models(tmp_path / execution)
    for client, weights in runs["each"].items():
        for key, tensor in weights.items():
            torch.testing.assert_close(runs["cohort"][client][key], tensor, atol=1e-10, rtol=0)


def test_clients_that_freeze_different_weights_cannot_train_together(start: Start, tmp_path: Path) -> None:
    class Freezing(FedAvgClient[FedAvgConfig]):
        cohort: ClassVar[type[Cohort[Any]] | None] = FedAvgCohort

        def frozen(self) -> Collection[str]:
            return ("layers.0.bias",) if self.party == "client-0" else ()

    with pytest.raises(RunError, match="execution=each"):
        isthmus.run(start(Freezing), out=tmp_path / "run", **SMALL)


def models(folder: Path) -> dict[str, dict[str, Tensor]]:
    from safetensors.torch import load_file

    return {path.parent.name: load_file(path) for path in sorted((folder / "models").glob("*/weights.safetensors"))}
