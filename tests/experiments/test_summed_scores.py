"""Scores under secure sums: the server reads totals and a histogram, pooled scores stay what they were, and constant
models no longer tell what classes a client has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.cli.main import main
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError, ProtocolError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.round_loop import RoundLoop
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import view_of
from isthmus.experiments.score_rules import SCORE_RULES
from isthmus.experiments.scoring import evaluation_line, score_of
from isthmus.federation.ledger import differences
from isthmus.federation.session import Session
from isthmus.methods.evaluation import (
    ALL_CLIENTS,
    LOSS_UNIT,
    Evaluation,
    ScoreBins,
    SummedScores,
    Tally,
    WantedMetric,
    bin_scores,
)
from isthmus.methods.global_model import GlobalModel, evaluate_models
from isthmus.methods.registry import all_methods
from isthmus.methods.training import Deployed, ModelClient
from isthmus.metrics.score_bins import LEAST_CLIENTS, WIDTH, mean_of_bins
from isthmus.privacy.attacks.sums import difference_of_sums
from isthmus.testing import small_runs

CLIENTS = 6
MASKABLE = [method.name for method in all_methods() if not method.needs_single_updates and not method.pooled]


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    place = "csbm:nodes=240,classes=3,features=16,degree=4"
    return build_scenario(dataset=place, clients=CLIENTS, split="30/20/50", seed=5)


def play(scenario: Scenario, method: str = "fedavg", **settings: Any) -> SimulatedRun:
    flags = {"dataset": "csbm", "clients": CLIENTS, "seed": 5, "rounds": 2, "hidden": (8,), "execution": "each"}
    simulated = SimulatedRun(resolve(method, {**flags, **settings}), scenario)
    simulated.loop.play()
    return simulated


def without_contract(simulated: SimulatedRun) -> None:
    """Parties that answer whatever they are asked, as those that agreed to it would."""
    engine: Any = simulated.engine
    for role in simulated.settings.method.roles:
        for party in engine.parties(role):
            engine.party(party).watch = None


def scores(simulated: SimulatedRun, *, secure: bool) -> Mapping[str, Evaluation]:
    """The models of a finished run scored again, by the same engine and the same method."""
    loop = simulated.loop
    clock = loop.session.clock
    without_contract(simulated)
    session = Session(loop.engine, loop.method.table, incarnation=clock.incarnation + 1, secure=secure)
    session.clock.begin("evaluation", loop.at.round, loop.at.step + (2 if secure else 1))
    return loop.method.evaluate(loop.state, session, loop.config)


@pytest.mark.parametrize("method", MASKABLE)
def test_every_method_sums_its_scores_and_pooled_scores_stay_what_they_were(method: str) -> None:
    for settings, where in small_runs(method, settings={"secure_sum": True, "rounds": 1}).values():
        simulated = SimulatedRun(settings, where)
        simulated.loop.play()
        assert simulated.loop.lines[-1]["per_client"] is None
        single, together = scores(simulated, secure=False), scores(simulated, secure=True)
        assert isinstance(together, SummedScores) and len(single) == 3
        for part, total in together[ALL_CLIENTS].parts.items():
            tallies = [evaluation.parts[part] for evaluation in single.values()]
            assert (total.correct, total.total) == (sum(t.correct for t in tallies), sum(t.total for t in tallies))
            assert total.loss == pytest.approx(sum(t.loss for t in tallies), abs=3 * LOSS_UNIT * 2.0**-40)


def test_lines_and_result_of_a_masked_run(scenario: Scenario, tmp_path: Path) -> None:
    masked = play(scenario, secure_sum=True)
    line = masked.loop.lines[-1]
    single = scores(masked, secure=False)
    plain = evaluation_line(single, {client: 1 for client in single})
    for key in ("val", "test", "test_groups"):
        assert line[key] == plain[key]
    assert line["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-6)
    for key in ("val_client_mean", "test_client_mean"):
        assert abs(line[key] - plain[key]) <= WIDTH / 2 + 1e-9
    for group in ("minority", "majority"):
        found, exact = line["test_group_client_means"][group], plain["test_group_client_means"][group]
        assert abs(found - exact) <= WIDTH / 2 + 1e-9
    assert line["test_group_client_means"]["degree 2-3"] is None
    assert line["test_node_weighted"] is None and line["per_client"] is None
    assert sum(line["client_scores"]["test"]) == CLIENTS and line["client_scores"]["bin_width"] == WIDTH
    assert json.loads(json.dumps(line, allow_nan=False)) == line


def test_few_clients_have_no_histogram() -> None:
    few = build_scenario(dataset="csbm:nodes=90,classes=3,features=16", clients=3, split="30/20/50", seed=5)
    masked = play(few, secure_sum=True, clients=3)
    assert masked.loop.lines[-1]["client_scores"] is None and masked.loop.lines[-1]["test_client_mean"] is None
    assert "ScoreBins" not in {row["message"] for row in masked.loop.sheet.rows()}
    assert LEAST_CLIENTS > 3


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1"])
def test_what_is_sent_for_scores_is_on_the_sheet_and_masked(scenario: Scenario, metric: str) -> None:
    masked = play(scenario, secure_sum=True, metric=metric, rounds=1)
    stated = sheet_of(masked.settings.method, secure_sum=True, metric=metric, clients=CLIENTS)
    assert differences(masked.loop.sheet, stated) == []
    protection = {row["message"]: row["protection"] for row in masked.loop.sheet.rows()}
    assert protection["Evaluation"] == protection["ScoreBins"] == "masked"
    assert protection.get("Detail") == (None if metric == "accuracy" else "masked")


def test_another_metric_is_pooled_from_summed_counts_and_its_spread_is_binned(scenario: Scenario) -> None:
    plain, masked = (play(scenario, secure_sum=on, metric="macro_f1").loop.lines[-1] for on in (False, True))
    assert (
        masked["test"] == pytest.approx(plain["test"], abs=1e-9) and masked["test_accuracy"] == plain["test_accuracy"]
    )
    assert abs(masked["test_client_mean"] - plain["test_client_mean"]) <= WIDTH / 2 + 1e-9


def test_a_metric_of_clients_with_different_classes_is_their_mean_or_refused(scenario: Scenario) -> None:
    run = play(scenario, secure_sum=True, metric="macro_f1", rounds=1)

    def loop(clients: int) -> RoundLoop:
        view = replace(view_of(run.parts), alike=False)
        view = replace(view, clients=view.clients[:clients])
        return RoundLoop(run.settings, run.engine, view, {}, incarnation=1)

    with pytest.raises(ConfigError, match=r"at least 5 clients: leave --metric out"):
        loop(3)
    differing = loop(CLIENTS)
    differing.at = run.loop.at
    line, _ = differing._evaluate(run.loop.state, run.loop.method.phases[-1], {})
    assert line["test"] == line["test_client_mean"] is not None
    assert "Detail" not in {entry.message for entry in differing.session.ledger.take()}


# -- attacks ---------------------------------------------------------------------------------------


def constant(weights: Mapping[str, Tensor], says: int) -> dict[str, Tensor]:
    """A model that gives every node the same class."""
    model = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    output = [name for name, tensor in model.items() if tensor.dim() == 1][-1]
    model[output][says] = 1.0
    return model


def class_counts(simulated: SimulatedRun, *, secure: bool) -> list[Mapping[str, Evaluation]]:
    """One constant model per evaluated round: what a server that chooses them is answered."""
    loop = simulated.loop
    without_contract(simulated)
    session = Session(loop.engine, loop.method.table, incarnation=9, secure=secure)
    answers = []
    for says in range(3):
        session.clock.begin("evaluation", says + 1, loop.at.step + 1 + says)
        state = GlobalModel(constant(loop.state.weights, says))  # type: ignore[attr-defined]
        answers.append(evaluate_models(state, session, loop.config))
    return answers


def test_constant_models_tell_a_clients_classes_in_the_clear_and_only_totals_behind_masks(scenario: Scenario) -> None:
    truth = {client: np.bincount(data.y[data.train].numpy(), minlength=3) for client, data in scenario.parts.items()}
    run = play(scenario, dropout=0.0)
    answers = class_counts(run, secure=False)
    seen = {client: [answer[client].parts["train"].correct for answer in answers] for client in truth}
    assert all((np.array(seen[client]) == truth[client]).all() for client in truth), "the attack works in the clear"
    run = play(scenario, dropout=0.0, secure_sum=True)
    answers = class_counts(run, secure=True)
    assert [list(answer) for answer in answers] == [[ALL_CLIENTS]] * 3
    totals = [(tuple(truth), np.array([answer[ALL_CLIENTS].parts["train"].correct], float)) for answer in answers]
    assert [int(total[0]) for _, total in totals] == np.stack(list(truth.values())).sum(0).tolist()
    assert difference_of_sums(totals) == {}, "no client's counts follow from the totals"


def test_a_histogram_of_scores_is_the_same_whoever_has_which(scenario: Scenario) -> None:
    """It tells how many clients have a score, not who: two clients that swap their scores cannot be told apart."""
    one, other = Evaluation({"test": Tally(1, 2, 0.0)}), Evaluation({"test": Tally(9, 10, 0.0)})
    first, second = ([bin_scores(each, "accuracy") for each in pair] for pair in ((one, other), (other, one)))

    def together(bins: list[ScoreBins]) -> Tensor:
        return bins[0].counts["test"] + bins[1].counts["test"]

    assert torch.equal(together(first), together(second)) and mean_of_bins(together(first).tolist()) == pytest.approx(
        0.725
    )
    exact = Evaluation({"test": Tally(901, 1000, 0.0)})
    assert torch.equal(bin_scores(exact, "accuracy").counts["test"], bin_scores(other, "accuracy").counts["test"])


def test_sizes_of_clients_are_no_message_of_a_masked_run(scenario: Scenario) -> None:
    """Without masks every evaluation says how many training nodes a client has."""

    def read(secure: bool) -> set[str]:
        rows = play(scenario, secure_sum=secure).loop.sheet.rows()
        return {row["message"] for row in rows if row["receiver"] == "server" and row["protection"] == "clear"}

    assert read(False) == {"Evaluation"} and read(True) == {"SumKey"}


@pytest.mark.parametrize(
    ("settings", "ask", "refusal"),
    [
        ({}, lambda session: session.call(ModelClient.detail), "client.detail is not in the contract of this run"),
        (
            {"secure_sum": True},
            lambda session: session.call(ModelClient.evaluate),
            "client.evaluate is not in the contract of this run",
        ),
        (
            {"secure_sum": True},
            lambda session: session.call(ModelClient.deploy, Deployed({})),
            "client.deploy is summed behind masks in this run, and the call has no order to mask",
        ),
        (
            {"secure_sum": True},
            lambda session: session.sum(ModelClient.deploy, Deployed({}), to=session.clients[1:]),
            "a sum of client.deploy is over everybody in this run (6 parties), not over 5",
        ),
        (
            {"secure_sum": True},
            lambda session: [session.sum(ModelClient.deploy, Deployed({})) for _ in range(2)],
            "client.deploy",
        ),
    ],
    ids=["detail", "another handler", "in the clear", "without one client", "twice in a round"],
)
def test_a_server_that_asks_for_more_scores_is_refused(
    scenario: Scenario, settings: dict[str, Any], ask: Any, refusal: str
) -> None:
    """The session has no contract: only the parties check."""
    loop = play(scenario, rounds=2, **settings).loop
    session = Session(
        loop.engine, loop.method.table, incarnation=1, secure=loop.session.secure
    )  # checks nothing itself
    session.clock.begin("evaluation", 2, loop.at.step)
    with pytest.raises(RunError, match=re.escape(refusal)):
        ask(session)


def test_few_clients_are_not_asked_for_bins_either() -> None:
    few = build_scenario(dataset="csbm:nodes=90,classes=3,features=16", clients=3, split="30/20/50", seed=5)
    loop = play(few, secure_sum=True, clients=3).loop
    session = Session(loop.engine, loop.method.table, incarnation=1, secure=True)
    session.clock.begin("evaluation", 2, loop.at.step)
    session.sum(ModelClient.deploy, Deployed({}))
    with pytest.raises(RunError, match=r"client\.score_bins is not in the contract of this run"):
        session.sum(ModelClient.score_bins, WantedMetric("accuracy"))


# -- results ---------------------------------------------------------------------------------------


def test_a_method_that_asks_every_client_is_told_what_to_do(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = resolve(
        "local", {"dataset": "csbm", "clients": CLIENTS, "rounds": 1, "secure_sum": True, "execution": "each"}
    )
    simulated = SimulatedRun(settings, scenario)
    asks = replace(simulated.loop.method, evaluate=lambda state, f, config: f.call(ModelClient.evaluate))
    monkeypatch.setattr(simulated.loop, "method", asks)
    with pytest.raises(ProtocolError, match=r"scores_of\(federation, handler, request\), or run without secure_sum"):
        simulated.loop.play()


@pytest.mark.parametrize(
    ("rule", "mean", "column", "sentence"),
    [
        ("node_weighted_last", 0.4, "test", "pooled test accuracy, last round (secure sums show no mean over clients)"),
        ("client_mean_selected", None, "test", "pooled test accuracy, at the round picked by validation (secure"),
        ("client_mean_last", 0.4, "test_client_mean", "last round, from a histogram with bins of 0.05"),
        ("pooled_last", None, "test", "pooled test accuracy, last round"),
    ],
)
def test_the_score_of_a_preset(rule: str, mean: float | None, column: str, sentence: str) -> None:
    line = {"test": 0.5, "test_client_mean": mean, "test_node_weighted": None, "per_client": None}
    score, said = score_of(line, line, rule, "accuracy")
    assert score == line[column] and sentence in said
    told = {**line, "test_client_mean": 0.3, "test_node_weighted": 0.2, "per_client": {}}
    assert score_of(told, told, rule, "accuracy")[0] == told[SCORE_RULES[rule][0]]


def test_commands_cope_with_clients_whose_scores_nobody_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--dataset", "csbm:nodes=160,features=6", "--clients", "5", "--rounds", "2", "--set", "hidden=8"]
    run = tmp_path / "run"
    masked = ["run", "fedavg", *where, "--preset", "fedstruct", "--set", "secure_sum=true"]
    assert main([*masked, "--out", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["per_client"] is None and sum(result["client_scores"]["test_last"]) == 5
    assert result["score"] == result["test_last"] and "secure sums" in result["score_rule"]
    assert main([*masked, "--out", str(tmp_path / "again")]) == 0
    assert "(within 0.025)" in capsys.readouterr().out
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert "scores of single clients are not known" in (tmp_path / "report.html").read_text()
    compared = ["compare", "local", "central", "fedavg", *where, "--runs", "1", "--set", "secure_sum=true"]
    assert main([*compared, "--preset", "fedstar", "--out", str(tmp_path / "batch"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]
    assert [row["method"] for row in rows] == ["local", "central", "fedavg"]
    assert all(row["score"]["mean"] is not None and row["client_stds"] is None for row in rows)
