"""FedStruct's private variant: the same mathematics (FedStruct spec, section 14: 9), queries that are refused before a
row of S can be computed (section 14: 10), and the attacks it is against.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from fedstruct_helpers import SMALL, graph, opaque_ids, states
from fedstruct_helpers import experiment as plain_experiment

import isthmus
from isthmus.cli.recover import recover
from isthmus.data.scenario import Scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.audit import MATCHING, NEIGHBOURS, SOLVING
from isthmus.methods.fedstruct.query_guard import QueryGuard
from isthmus.methods.fedstruct.state import block_of
from isthmus.privacy.attacks.nsf import labels_by_matching, rows_from_queries, score_labels
from isthmus.testing import check_method

SKIP = {
    "one_client_equals_local": "one client still has its structure branch",
    "identical_clients_stay_identical": "a node has one owner",
    "order_does_not_matter": "names of clients are in the cross edges",
}
GIVEN = {"structure_hops": 2, "prune": 0, "protocol": "published", "loss": "ce", "lr": 0.02, "weight_decay": 1e-3}


def experiment(where: Scenario, **settings: Any) -> SimulatedRun:
    given = {"dataset": "csbm", "preset": "fedstruct", "clients": len(where.parts), "rounds": 4, "execution": "each"}
    given |= {**SMALL, **GIVEN, **settings}
    return SimulatedRun(resolve("fedstruct-private", given), opaque_ids(where))


@pytest.mark.parametrize(
    "settings", [{}, {"nsf": "degree", "nsf_dim": 6, "structure_hidden": (5,)}], ids=["h2v", "deg"]
)
def test_general_properties(settings: dict[str, Any]) -> None:
    given = {"structure_hops": 2, "protocol": "published", "prune": 0, **settings}
    assert "resume_is_bit_equal" in check_method("fedstruct-private", settings=given, skip=SKIP)


@pytest.mark.parametrize("gradients", ["residuals", "jacobian"])
@pytest.mark.parametrize("nsf", ["degree", "walk"])
def test_fixed_features_give_the_model_of_the_published_protocol(nsf: str, gradients: str) -> None:
    where = graph(30, clients=3, directed=True, isolated=1)
    small = {"nsf": nsf, "structure_hidden": (5,), "nsf_dim": 6, "rounds": 4}
    base = plain_experiment(where, **{**GIVEN, **small})
    private = experiment(where, queries="none", gradients=gradients, **small)
    for run in (base, private):
        run.loop.play()
    for name, tensor in base.loop.state.weights.items():  # type: ignore[attr-defined]
        torch.testing.assert_close(private.loop.state.weights[name], tensor, atol=1e-9, rtol=0)  # type: ignore[attr-defined]
    assert base.loop.lines[-1]["test"] == private.loop.lines[-1]["test"]


def test_learned_features_follow_the_pooled_gradient() -> None:
    """HOP2VEC, direct form: after a step S is S - lr_s Abar^T R / |Vt|, each owner its own rows."""
    where = graph(30, clients=3)
    run = experiment(where, queries="none", optimizer="sgd", weight_decay=0.0, nsf_lr=0.5, rounds=1)
    run.loop.play(until=4)
    before = {client: state.own_s.clone() for client, state in states(run).items()}
    n = where.whole.num_nodes
    nsf, abar, h = torch.zeros(n, 3, dtype=torch.float64), np.zeros((n, n)), torch.zeros(n, 3, dtype=torch.float64)
    columns = {client: state.columns.numpy() for client, state in states(run).items()}
    for client, state in states(run).items():
        nsf[state.columns.sort().values] = before[client]
        abar[columns[client]] = sp.csr_matrix(block_of(state.combined[0])).toarray()
        party: Any = run.engine.party(client).client
        feature = {k.removeprefix("feature."): v for k, v in run.loop.state.weights.items()}  # type: ignore[attr-defined]
        h[state.columns] = party.learner.logits({k: v for k, v in feature.items() if not k.startswith("structure.")})
    y, train = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool)
    for client, data in where.parts.items():
        y[columns[client]], train[columns[client]] = data.y, data.train
    nsf.requires_grad_()
    q = torch.from_numpy(abar) @ nsf + h
    torch.nn.functional.cross_entropy(q[train], y[train]).backward()  # type: ignore[no-untyped-call]
    run.loop.play()
    assert nsf.grad is not None
    for client, state in states(run).items():
        wanted = before[client] - 0.5 * nsf.grad[state.columns.sort().values]
        torch.testing.assert_close(state.own_s, wanted, atol=1e-10, rtol=0)


# -- queries ---------------------------------------------------------------------------------------


def seen_by_the_others(run: SimulatedRun, target: str) -> tuple[np.ndarray, np.ndarray]:
    """All answered queries against one client, and their answers."""
    state = states(run)[target]
    rows = [
        sp.csr_matrix(block_of(queries)).toarray()[state.answered[client].numpy()]
        for client, queries in state.asked.items()
    ]
    asked = np.vstack(rows)
    return asked, asked @ state.own_s.numpy()


@pytest.mark.parametrize(("rule", "falls"), [("none", True), ("counted", True), ("safe", False)])
def test_rows_fall_where_queries_are_counted_and_not_where_they_are_checked(rule: str, falls: bool) -> None:
    run = experiment(graph(40, clients=3), queries=rule, rounds=1, structure_hops=1)
    run.loop.play()
    recovered = 0
    for target, state in states(run).items():
        asked, answers = seen_by_the_others(run, target)
        found = rows_from_queries(asked, answers)
        recovered += found.score(state.own_s.numpy(), "all other clients").correct
    assert (recovered > 0) == falls
    told = run.settings.method.facts(run.loop.state, run.settings.method_config, None)  # type: ignore[misc]
    assert (told["queries_refused"] > 0) == (rule != "none") and told["queries"] == 80


def test_a_guard_refuses_the_query_that_would_complete_a_row_and_answers_those_before() -> None:
    guard = QueryGuard("safe", 3, 1)
    assert guard.answered(np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]), 1).all()
    assert not guard.allows(np.array([1.0, 0.5, 0.0]), 1)  # with the first it would tell two nodes
    assert guard.allows(np.array([1.0, 0.0, 1.0]), 1)
    assert not guard.allows(np.array([0.0, 0.0, 3.0]), 1)
    counted = QueryGuard("counted", 3, 1)
    assert not counted.allows(np.array([1.0, 0.0, 0.0]), 1)  # one query over one node: 1 < 1 is false
    assert counted.answered(np.array([[1.0, 1.0, 0.0], [1.0, 2.0, 1.0]]), 1).all()  # and these two tell ...
    assert not counted.allows(np.array([1.0, 3.0, 4.0]), 1)


@pytest.mark.parametrize("rule", ["counted", "safe"])
def test_jacobians_count_as_the_numbers_they_have(rule: Any) -> None:
    """A single Jacobian has more numbers than all rows of S in it: no linear rule covers that (6.2)."""
    query = np.array([0.5, 0.25, 0.25])
    assert QueryGuard(rule, 3, 4).allows(query, 3) and not QueryGuard(rule, 3, 4).allows(query, 12)
    small = {"nsf": "degree", "nsf_dim": 6, "structure_hidden": (5,), "rounds": 1, "queries": rule}
    told = {}
    for gradients in ("residuals", "jacobian"):
        run = experiment(graph(30, clients=3), gradients=gradients, **small)
        run.loop.play()
        told[gradients] = [
            int((np.diff(block_of(rows).indptr)[:labelled] * state.answered[client][:labelled].numpy()).sum())
            for state in states(run).values()
            for (client, rows), labelled in zip(state.asked.items(), state.labelled.values(), strict=True)
        ]
    assert sum(told["residuals"]) > 0 and sum(told["jacobian"]) == 0


def test_matching_structure_features_tells_labels_to_whoever_holds_s() -> None:
    """The published protocol gives every client S; here nobody holds a foreign row."""
    where = graph(90, clients=3, train=0.6)
    base = plain_experiment(where, **{**GIVEN, "form": "direct", "nsf_at": "clients", "nsf_lr": 0.5, "rounds": 60})
    base.loop.play()
    everyone = states(base)
    mine = everyone["client-0"]
    data = where.parts["client-0"]
    guessed = labels_by_matching(
        mine.nsf[mine.columns[data.train]].numpy(),
        data.y[data.train].numpy(),
        np.vstack([mine.nsf[everyone[c].columns[where.parts[c].train]].numpy() for c in ("client-1", "client-2")]),
    )
    truth = np.concatenate([where.parts[c].y[where.parts[c].train].numpy() for c in ("client-1", "client-2")])
    assert score_labels(guessed, truth, "client").recall > 0.5  # three classes: 1/3 by chance
    private = experiment(where, rounds=1)
    private.loop.play()
    for client, state in states(private).items():
        assert state.nsf is None and len(state.own_s) == where.parts[client].num_nodes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "headed"}, "direct form"),
        ({"train_betas": True}, "fixed betas"),
        ({"structure_hops": 0}, "structure_hops must be at least 1"),
        ({"betas": (1.0,), "structure_hops": 3}, "betas must name one weight per power"),
        ({"queries": "many"}, "unknown value for queries"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("fedstruct-private", {"dataset": "csbm", "preset": "general", **settings})


def audited(folder: Path, method: str, **settings: Any) -> dict[tuple[str, str], dict[str, float]]:
    """Numbers of each attack by whom it is run, on a small run whose messages were kept."""
    given = {"dataset": "csbm:nodes=90,classes=3,features=8,degree=3", "clients": 3, "split": "50/20/30", "seed": 1}
    given |= {"preset": "fedstruct", "structure_hops": 2, "transcript": True, "protocol": "published"}
    isthmus.run(method, **{**given, "prune_mode": "global", "rounds": 1, **settings}, out=folder, quiet=True)
    return {(found.attack, found.who): dict(found.numbers) for found in recover(RunFolder(folder))}


@pytest.mark.parametrize(
    ("rule", "secure", "falls"), [("none", False, True), ("none", True, True), ("safe", True, False)]
)
def test_an_audit_solves_answered_queries_and_reads_edges(rule: str, secure: bool, falls: bool, tmp_path: Path) -> None:
    """Masks hide gradients from the server; queries and answers go from one client to one other."""
    found = audited(tmp_path / "r", "fedstruct-private", queries=rule, secure_sum=secure)
    together, alone = found[SOLVING, "all clients but the owner"], found[SOLVING, "client"]
    assert together["of"] == 90 and alone["of"] == 180
    assert (together["determined"] > 0) == falls and alone["determined"] <= 2 * together["determined"]
    assert found[NEIGHBOURS, "client"]["correct"] > 0, "the private variant protects S, not edges"


def test_an_audit_matches_structure_features_where_everybody_is_sent_them(tmp_path: Path) -> None:
    found = audited(tmp_path / "r", "fedstruct", rounds=40, lr=0.05)[MATCHING, "client"]
    assert found["claimed"] == found["of"] == 2 * 45
    assert found["correct"] > found["by_chance"] + 3 * found["by_chance"] ** 0.5
