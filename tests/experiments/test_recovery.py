"""Lost parties, failing handlers: roll back and end with the same bits, or stop with the reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, FaultyEngine
from run_helpers import assert_same_run, run_in_folder, small

import isthmus
from isthmus.errors import RunError
from isthmus.experiments import round_loop as loop_module
from isthmus.experiments.callbacks import Callback
from isthmus.experiments.config import Settings
from isthmus.federation.interface import FailureKind, QuorumError
from isthmus.methods import fedavg
from isthmus.methods.fedavg import FedAvgClient, FedAvgCohort


class Recoveries(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_recover(self, reason: str, step: int) -> None:
        self.steps.append(step)


def settings(**changes: Any) -> Settings:
    return small("fedavg", {"checkpoint.every": changes.pop("every", 1)}, execution="each", dropout=0.4, **changes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "run"
    run_in_folder(settings(selection="best_val_acc", rounds=6), path)
    return path


@pytest.mark.parametrize("every", [1, 3, 0])
@pytest.mark.parametrize(("kind", "after"), [("crashed", False), ("timeout", True)])
def test_a_lost_party_is_taken_back_and_the_run_ends_with_the_same_bits(
    every: int, after: bool, kind: FailureKind, plain: Path, tmp_path: Path
) -> None:
    plan = [
        Fault("client-1", "train", 2, "local_update", kind, after=after),
        Fault("client-0", "evaluation", 5, "deploy", kind, after=after),
        Fault("client-2", "train", 6, "local_update", kind, after=after),
    ]
    seen = Recoveries()
    given = settings(selection="best_val_acc", rounds=6, every=every)
    simulated = run_in_folder(given, tmp_path / "r", engine=FaultyEngine, plan=plan, callbacks=[seen])
    assert_same_run(tmp_path / "r", plain)
    # Setup is step 1, so round r of training is step r + 1; tags are at phase ends and every so many steps.
    if every:
        assert seen.steps == {1: [2, 5, 6], 3: [1, 3, 6]}[every]
    assert simulated.engine.rollbacks == 3  # type: ignore[attr-defined]
    attempts = [
        json.loads(line)["attempt"]
        for f in sorted((tmp_path / "r" / "ledger").iterdir())
        for line in f.read_text().splitlines()
    ]
    assert attempts == sorted(attempts) and attempts[-1] == 3


def test_a_short_absence_needs_no_rollback(plain: Path, tmp_path: Path) -> None:
    plan = [Fault("client-1", "train", r, "local_update", "unavailable", after=r % 2 == 0) for r in range(1, 7)]
    simulated = run_in_folder(
        settings(selection="best_val_acc", rounds=6), tmp_path / "r", engine=FaultyEngine, plan=plan
    )
    assert simulated.engine.rollbacks == 0  # type: ignore[attr-defined]
    assert_same_run(tmp_path / "r", plain)


@pytest.mark.parametrize("kind", ["crashed", "timeout", "unavailable"])
def test_a_party_that_always_fails_ends_the_run_after_a_few_recoveries(kind: FailureKind, tmp_path: Path) -> None:
    plan = [Fault("client-1", "train", 3, "local_update", kind, times=10**6)]
    seen = Recoveries()
    with pytest.raises(QuorumError, match="train round 3, local_update: 2 of 3 parties answered") as caught:
        run_in_folder(settings(), tmp_path / "r", engine=FaultyEngine, plan=plan, callbacks=[seen])
    assert caught.value.exit_code == 4 and len(seen.steps) == loop_module.MAX_RECOVERIES
    assert not (tmp_path / "r" / "result.json").exists()
    output = isthmus.resume(tmp_path / "r")  # with the party back
    run_in_folder(settings(), tmp_path / "plain")
    assert_same_run(tmp_path / "r", tmp_path / "plain")
    assert output["rounds"] == 4


def test_parties_that_fail_in_turn_do_not_loop_for_ever(tmp_path: Path) -> None:
    """With one tag at the start, failures at different rounds before the furthest point still count as one trouble."""
    plan = [Fault("client-0", "train", r, "local_update", "timeout", times=2) for r in (1, 2, 3, 4)]
    plan += [Fault("client-1", "train", 4, "local_update", "timeout", times=10**6)]
    seen = Recoveries()
    with pytest.raises(QuorumError):
        run_in_folder(settings(every=100), tmp_path / "r", engine=FaultyEngine, plan=plan, callbacks=[seen])
    assert len(seen.steps) <= 4 * (loop_module.MAX_RECOVERIES + 1)


@pytest.mark.parametrize("execution", ["each", "cohort"])
def test_a_handler_that_raises_ends_the_run_at_once(
    execution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken(self: Any, *rest: Any, **named: Any) -> Any:
        calls.append(1)
        raise ValueError("bad luck")

    monkeypatch.setattr(FedAvgClient, "train", broken)
    monkeypatch.setattr(FedAvgCohort, "train_together", broken)
    with pytest.raises(RunError, match="bad luck") as caught:
        run_in_folder(small(execution=execution), tmp_path / "r")
    assert caught.value.exit_code == 4 and "train round 1" in str(caught.value)
    assert len(calls) <= 3, "a handler that raises is not asked again"
    monkeypatch.undo()
    isthmus.resume(tmp_path / "r")
    run_in_folder(small(execution=execution), tmp_path / "plain")
    assert_same_run(tmp_path / "r", tmp_path / "plain")


def test_a_server_function_that_raises_leaves_its_traceback_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*rest: Any) -> Any:
        raise ZeroDivisionError("nobody there")

    monkeypatch.setattr(fedavg, "Broadcast", broken)
    with pytest.raises(RunError, match=r"train round 1 of fedavg failed: ZeroDivisionError: nobody there") as caught:
        run_in_folder(small(), tmp_path / "r")
    assert isinstance(caught.value.__cause__, Exception)
    assert "Traceback" in (tmp_path / "r" / "log.txt").read_text()


def test_recovery_is_logged_in_the_folder_not_on_the_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = settings()
    caplog.clear()  # what is said of the settings themselves
    with caplog.at_level(logging.WARNING):
        run_in_folder(
            given,
            tmp_path / "r",
            engine=FaultyEngine,
            plan=[Fault("client-1", "train", 2, "local_update", "crashed")],
        )
    assert "client-1: crashed" in (tmp_path / "r" / "log.txt").read_text()
    assert not caplog.records
    assert logging.getLogger("isthmus").handlers == [], "the log file is closed with the run"
