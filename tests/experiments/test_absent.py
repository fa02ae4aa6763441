"""Clients that vanish: rounds go on with those who are left, results say who was missing, and who comes back takes part
again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, FaultyEngine
from run_helpers import lines, result, run_in_folder, small

from isthmus.deploy.federation_folder import _run_status
from isthmus.deploy.run_status import ProgressWriter
from isthmus.errors import ConfigError, ProtocolError
from isthmus.experiments.callbacks import Progress
from isthmus.experiments.config import Settings
from isthmus.experiments.contract import at_least_of
from isthmus.experiments.disclosure import sheet_of_settings
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun, scenario_of
from isthmus.experiments.scenarios import parts_for, view_of
from isthmus.federation.interface import QuorumError
from isthmus.federation.ledger import differences
from isthmus.federation.script import total
from isthmus.methods.fedavg import Broadcast, FedAvgClient, ServerState

STEPS = ("share", "mask", "confirm", "release")


def settings(method: str = "fedavg", **changes: Any) -> Settings:
    given = {"reset_optimizer": True} if method != "fedsgd" else {}
    given |= {"checkpoint.every": 1, **changes.pop("set", {})}
    return small(method, given, **{"clients": 5, "least_clients": 4, "rounds": 6, **changes})


def lost(step: str = "", round: int = 3, client: str = "client-3", **more: Any) -> Fault:
    return Fault(client, "train", round, more.pop("handler", "local_update"), "crashed", step=step, **more)


def run(tmp_path: Path, given: Settings, *plan: Fault) -> SimulatedRun:
    return run_in_folder(given, tmp_path / "run", engine=FaultyEngine, plan=plan)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedsgd"])
def test_a_run_goes_on_without_a_lost_client_and_takes_it_back(tmp_path: Path, method: str, secure: bool) -> None:
    handler = "gradient" if method == "fedsgd" else "local_update"
    simulated = run(tmp_path, settings(method, secure_sum=secure), lost(handler=handler, back=5))
    found = result(tmp_path / "run")
    # Round r is step r + 1; lost in round 3, reachable again after step 5: it misses rounds 3 and 4.
    assert found["absent"] == {"client-3": [[4, 5]]}
    missing = [line.get("absent") for line in lines(tmp_path / "run")]
    assert missing == [None, None, ["client-3"], ["client-3"], None, None]
    assert simulated.engine.rollbacks == 0  # type: ignore[attr-defined]
    assert sorted(path.name for path in (tmp_path / "run" / "models").iterdir()) == [f"client-{k}" for k in range(5)]


@pytest.mark.parametrize("step", STEPS)
def test_secure_and_plain_sums_over_those_who_are_left_agree(tmp_path: Path, step: str) -> None:
    """Lost before its vector came, a client is left out; lost after, its vector still counts."""
    masked = run(tmp_path / "s", settings(secure_sum=True), lost(step))
    counts = step in ("confirm", "release")
    fault = Fault("client-3", "evaluation", 3, "deploy", "crashed") if counts else lost()
    plain = run(tmp_path / "p", settings(), fault)
    assert result(tmp_path / "s/run")["absent"] == result(tmp_path / "p/run")["absent"] == {"client-3": [[4, 7]]}
    assert isinstance(masked.loop.state, ServerState) and isinstance(plain.loop.state, ServerState)
    for name, weight in plain.loop.state.weights.items():
        torch.testing.assert_close(masked.loop.state.weights[name], weight, atol=1e-6, rtol=0)


def test_who_watches_the_run_is_told_who_is_missing_since_when(tmp_path: Path) -> None:
    """What `isthmus status` shows: the file that the server writes after each round."""

    class Seen(ProgressWriter):
        def on_round(self, progress: Progress) -> None:
            super().on_round(progress)
            seen.append(_run_status(tmp_path, None)["missing"])

    seen: list[Any] = []
    given, before = settings(), time.time()
    simulated = SimulatedRun(
        given, scenario_of(given), engine=FaultyEngine, plan=[lost(back=5)], callbacks=[writer := Seen()]
    )
    writer.on_start(given, tmp_path, 0, given.total_rounds)
    simulated.loop.play()
    assert [list(each) for each in seen] == [[], [], [], ["client-3"], ["client-3"], [], []]
    (step, since), (_, later) = seen[3]["client-3"], seen[4]["client-3"]
    assert step == 4 and since == later and before <= since <= time.time()


def test_shares_of_those_who_are_left_sum_to_one(tmp_path: Path) -> None:
    """A run with one client absent throughout is the run of the other four."""
    simulated = run(tmp_path, settings(rounds=2), lost(round=1))
    weights = simulated.loop.state.weights  # type: ignore[attr-defined]
    given = settings(rounds=2, least_clients=0, execution="each")
    again = SimulatedRun(given, scenario_of(given))
    for role in again.engine._parties.values():  # type: ignore[attr-defined]
        del role["client-3"]
    again.loop.play()
    for name, weight in again.loop.state.weights.items():  # type: ignore[attr-defined]
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("secure", [False, True])
def test_one_more_loses_the_round_and_the_run_recovers_with_all(tmp_path: Path, secure: bool) -> None:
    plan = [lost(client="client-3"), lost(client="client-1")]
    simulated = run(tmp_path, settings(secure_sum=secure), *plan)
    assert simulated.engine.rollbacks == 1  # type: ignore[attr-defined]
    assert "absent" not in result(tmp_path / "run")


@pytest.mark.parametrize("step", STEPS)
def test_two_lost_in_one_sum_reveal_nothing_and_abort(tmp_path: Path, step: str) -> None:
    """Four are needed of five; the second is lost in another step than the first."""
    given = settings(secure_sum=True, rounds=3)
    simulated = SimulatedRun(
        given, scenario_of(given), engine=FaultyEngine, plan=[lost("share", 1), lost(step, 1, "client-1")]
    )
    simulated.loop.play(1)
    with pytest.raises(QuorumError, match=r"which needs 4: 3 of 5 parties answered"):
        simulated.loop._round(1)


def test_a_resumed_run_knows_who_was_absent(tmp_path: Path) -> None:
    given = settings(secure_sum=True)
    scenario = scenario_of(given)
    first = SimulatedRun(given, scenario, engine=FaultyEngine, plan=[lost()])
    folder = RunFolder.create(tmp_path / "run", first.settings.to_toml(), {})
    first.engine.keep_tags(folder.store)
    first.loop = first.new_loop(folder)
    first.loop.play(5)
    assert first.loop.absent == {"client-3": 4}
    folder.close()
    second = SimulatedRun(given, scenario)
    second.play(RunFolder.open(tmp_path / "run"), resumed=True)  # here it can be reached again
    assert result(tmp_path / "run")["absent"] == {"client-3": [[4, 5]]}


def test_a_rollback_while_somebody_is_absent_needs_only_the_others(tmp_path: Path) -> None:
    plan = [lost(), Fault("client-1", "train", 5, "local_update", "crashed")]
    simulated = run(tmp_path, settings(), *plan)
    assert simulated.engine.rollbacks == 1  # type: ignore[attr-defined]
    assert result(tmp_path / "run")["absent"]["client-3"][0][0] == 4


def test_the_ledger_keeps_to_the_sheet(tmp_path: Path) -> None:
    given = settings(secure_sum=True)
    simulated = run(tmp_path, given, lost("mask"))
    assert not differences(simulated.loop.sheet, sheet_of_settings(given))
    sent = {row["message"] for row in simulated.loop.sheet.rows()}
    assert {"SharedSecrets", "ConfirmedGroup", "ReleasedShares", "SumStepRequest"} <= sent


def test_methods_that_need_everyone_say_so() -> None:
    remember = r"its clients remember earlier rounds, and one that missed some would answer something else\): leave"
    for method, why in (
        ("fedper", remember),
        ("ditto", remember),
        ("fedgcn", remember),
        ("scaffold", r"local_update is asked of all of them\): leave least_clients out"),
        ("fedspray", r"local_update is asked of all of them\): leave least_clients out"),
        ("fedstruct", r"begin is asked of all of them\): leave least_clients out"),
        ("hifgl", r"begin is asked of all of them\): leave least_clients out"),
    ):
        given = small(method, {}, clients=5, least_clients=4)
        with pytest.raises(ConfigError, match=why):
            SimulatedRun(given, scenario_of(given))
    for changes, why in (
        ({"clients": 5, "least_clients": 6}, "more than the 5 clients"),
        ({"clients": 5, "least_clients": 3, "secure_sum": True}, "too few for secure sums: at least 4"),
        ({"clients": 5, "least_clients": 4, "set": {"reset_optimizer": False}}, "set reset_optimizer=true"),
        ({"set": {"score_model": "after_local"}}, "set score_model=received"),
        ({"method": "fedsgd", "secure_sum": True, "local_epochs": 2}, "sums 2 times in a round"),
    ):
        given = settings(**changes)
        with pytest.raises(ConfigError, match=why):
            SimulatedRun(given, scenario_of(given))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    ("least", "at_least", "why"),
    [
        (4, 5, "at_least=5, but this run goes on with 4 of 5 clients .least_clients.: pass at_least=federation.least"),
        (0, 4, "at_least=4, but this run goes on with all of 5 clients"),
        (4, 6, "at_least=6 of 5 parties; pass at_least=federation.least"),
        (4, 0, "at_least=0 of 5 parties"),
    ],
)
def test_a_sum_goes_on_with_as_many_as_the_run_says(least: int, at_least: int, why: str, secure: bool) -> None:
    """An author is told before anybody is asked."""
    given = settings(secure_sum=secure, least_clients=least)
    simulated = SimulatedRun(given, scenario_of(given))
    simulated.loop.play(1)
    session, state = simulated.loop.session, simulated.loop.state
    assert isinstance(state, ServerState)
    session.clock.begin("train", 1, 2)
    with pytest.raises(ProtocolError, match=why):
        session.sum(FedAvgClient.local_update, Broadcast(state.weights, state.total), at_least=at_least)


def test_a_script_names_the_sums_that_can_do_without_parties() -> None:
    given = settings()
    simulated = SimulatedRun(given, scenario_of(given))
    simulated.loop.session.clock.begin("setup", 1, 1)
    with pytest.raises(ProtocolError, match="write survivors=True in the script of fedavg"):
        simulated.loop.session.sum(FedAvgClient.size, at_least=4)
    view = view_of(parts_for(given, scenario_of(given)))
    script = {"train": (total(FedAvgClient.local_update, each=True, survivors=True),)}
    for secure in (False, True):
        with pytest.raises(ConfigError, match=r"script of fedavg: local_update .* all must be asked the same"):
            at_least_of(settings(secure_sum=secure), view, script)


@pytest.mark.parametrize(("step", "missed"), [("mask", [4, 5]), ("release", [4, 5])])
def test_a_round_that_is_repeated_is_over_its_first_group(tmp_path: Path, step: str, missed: list[int]) -> None:
    """Behind masks the same numbers are never summed over two groups: who was lost when the round was first run and is
    back when it is run again is left out of it once more. Lost when its numbers were in the sum already, it is needed.
    """
    plan = [lost(step), Fault("client-1", "train", 5, "local_update", "crashed")]
    given = settings(secure_sum=True, rounds=5, set={"checkpoint.every": 20})
    simulated = run(tmp_path, given, *plan)
    assert simulated.engine.rollbacks == 1  # type: ignore[attr-defined]
    assert result(tmp_path / "run")["absent"] == {"client-3": [missed]}


def test_another_server_process_knows_the_groups_of_the_first(tmp_path: Path) -> None:
    given = settings(secure_sum=True, set={"checkpoint.every": 20})
    first = SimulatedRun(given, scenario_of(given), engine=FaultyEngine, plan=[lost("mask")])
    folder = RunFolder.create(tmp_path / "run", first.settings.to_toml(), {})
    first.loop = first.new_loop(folder)
    first.loop.play(5)
    with (folder.path / "left_out.jsonl").open("a") as file:
        file.write('\n{"sum": "train/9/loc')  # torn by a crash
    folder.keep_left_out("train/9/x/server", ["client-1"])
    found = first.new_loop(folder).session.clock.left_out
    assert found["train/2/local_update/server"] == () and found["train/3/local_update/server"] == ("client-3",)
    assert found["train/9/x/server"] == ("client-1",) and len([key for key in found if "/9/" in key]) == 1
