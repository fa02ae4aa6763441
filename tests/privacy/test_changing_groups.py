"""Client sampling with secure sums: least squares over the totals of many rounds gives single clients away where groups
change, and nothing below the groups where they are fixed (review: an honest server recovered every client's mean update
and exact size).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.session import Session
from isthmus.methods import fedavg
from isthmus.methods.averaging import groups_of_draws
from isthmus.methods.fedavg import Broadcast, FedAvgClient, Update
from isthmus.privacy.attacks.sums import difference_of_sums, mean_parts
from isthmus.privacy.guard import LEAST_IN_SUM, fixed_groups

CLIENTS, ROUNDS = 10, 24
Totals = list[tuple[tuple[str, ...], Any]]


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    place = "csbm:nodes=300,classes=3,features=8,degree=4"
    return build_scenario(dataset=place, clients=CLIENTS, partition="dirichlet:alpha=0.5", split="40/20/40", seed=5)


class Watching(LocalEngine):
    """Notes what each client sends, for the truth; a server does not see it."""

    updates: dict[str, list[Update]]

    def _invoke(self, call: Any) -> Any:
        if call.handler != "local_update":
            return super()._invoke(call)
        party = self._parties[call.role][call.party]
        kept = party.client.local_update

        def noting(common: Broadcast) -> Update:
            update: Update = kept(common)
            self.updates.setdefault(call.party, []).append(update)
            return update

        party.client.local_update = noting
        try:
            return super()._invoke(call)
        finally:
            del party.client.local_update


def flat(update: Update, before: Any) -> Any:
    """n_k / n times the client's step: what a total is a sum of."""
    return np.concatenate(
        [(update.weights[name] - update.share * before[name]).numpy().ravel() for name in sorted(before)]
    )


def observed(scenario: Scenario, monkeypatch: pytest.MonkeyPatch, *, secure: bool) -> tuple[SimulatedRun, Totals, Any]:
    """A run with half of the clients per round; totals as the server has them, and the true mean part of each."""
    totals: Totals = []
    parts: dict[str, list[Any]] = {}
    real = Session.sum

    def summing(self: Session, handler: Any, request: Any = None, *, to: Any = None, **given: Any) -> Any:
        total = real(self, handler, request, to=to, **given)
        if handler is FedAvgClient.local_update:
            totals.append((tuple(to), np.append(flat(total, request.weights), total.share)))
            engine: Any = self.engine
            for party in to:
                parts.setdefault(party, []).append(flat(engine.updates[party][-1], request.weights))
        return total

    monkeypatch.setattr(Session, "sum", summing)
    flags = {"dataset": "csbm", "clients": CLIENTS, "seed": 5, "rounds": ROUNDS, "hidden": (8,), "execution": "each"}
    settings = resolve("fedavg", {**flags, "fraction": 0.5, "secure_sum": secure, "eval_every": ROUNDS, "lr": 0.02})
    simulated = SimulatedRun(settings, scenario, engine=Watching)
    simulated.engine.updates = {}  # type: ignore[attr-defined]
    simulated.loop.play()
    return simulated, totals, {party: np.mean(rows, axis=0) for party, rows in parts.items()}


def cosine(a: Any, b: Any) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_totals_over_changing_groups_give_sizes_and_mean_updates(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {client: int(data.train.sum()) for client, data in scenario.parts.items()}
    everybody = sum(sizes.values())
    _, totals, truth = observed(scenario, monkeypatch, secure=False)
    assert difference_of_sums(totals).keys() == sizes.keys(), "draws determine every client"
    found = mean_parts(totals)
    assert {client: round(float(found[client][-1]) * everybody) for client in sizes} == sizes, "every n_k, exactly"
    assert np.median([cosine(found[client][:-1], truth[client]) for client in truth]) > 0.6

    _, totals, truth = observed(scenario, monkeypatch, secure=True)
    assert len({roster for roster, _ in totals}) == 2 and min(len(roster) for roster, _ in totals) == 5
    assert difference_of_sums(totals) == {}, "fixed groups determine nobody"
    found = mean_parts(totals)
    for roster in {roster for roster, _ in totals}:
        assert len({round(float(found[client][-1]), 9) for client in roster}) == 1, "a group's clients look the same"
    guessed = sum(round(float(found[client][-1]) * everybody) == sizes[client] for client in sizes)
    assert guessed <= 2, "a size is right only by chance, where it is near the mean of its group"


def test_a_party_refuses_groups_that_change(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server would like: each party derives the groups from the clients' names."""
    rosters = iter([("client-0", "client-1", "client-2"), ("client-0", "client-1", "client-3")])
    monkeypatch.setattr(fedavg, "chosen_clients", lambda federation, config: next(rosters))
    flags = {"dataset": "csbm", "clients": CLIENTS, "rounds": 2, "hidden": (8,), "execution": "each"}
    simulated = SimulatedRun(resolve("fedavg", {**flags, "fraction": 0.5, "secure_sum": True}), scenario)
    with pytest.raises(RunError, match=r"a sum of client\.local_update is over one of 2 fixed groups in this run"):
        simulated.loop.play()


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "adafgl"])
def test_methods_that_draw_clients_draw_groups_behind_masks(scenario: Scenario, method: str) -> None:
    given = {"extractor_rounds": 5} if method == "adafgl" else {}
    flags = {"dataset": "csbm", "clients": CLIENTS, "rounds": 5, "hidden": (8,), "execution": "each", **given}
    simulated = SimulatedRun(resolve(method, {**flags, "fraction": 0.5, "secure_sum": True}), scenario)
    simulated.loop.play()
    rosters = {
        frozenset(entry.sender)
        for _, entries in simulated.loop._entries
        for entry in entries
        if entry.handler == "local_update" and entry.protection == "masked"
    }
    assert rosters == set(map(frozenset, fixed_groups(scenario.parts, 2)))


def test_groups_are_the_same_in_every_run_and_never_too_small() -> None:
    names = [f"client-{k}" for k in range(13)]
    assert fixed_groups(reversed(names), 3) == fixed_groups(names, 3)
    for clients in range(1, 14):
        for drawn in range(1, clients + 1):
            sizes = [len(group) for group in groups_of_draws(names[:clients], drawn)]
            assert sum(sizes) == clients and max(sizes) - min(sizes) <= 1
            assert min(sizes) >= min(clients, max(drawn, LEAST_IN_SUM))


def test_a_quorum_of_masked_sums_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"two totals that differ by a client reveal it: set quorum=1"):
        resolve("fedggr", {"dataset": "cora", "secure_sum": True, "quorum": 0.8})
