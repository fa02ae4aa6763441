"""``secure_sum=true``: the server reads only totals, results stay within the fixed-point bound, nothing is summed by
mistake.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from faults import Fault, FaultyEngine
from torch import Tensor

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.run import SimulatedRun
from isthmus.federation import codec
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import QuorumError
from isthmus.federation.ledger import differences
from isthmus.federation.messages import Count, Identifier, Message, Model, Structure
from isthmus.federation.roles import Client, Role, RoleTable, handler
from isthmus.federation.secure import Masked, SumKeys
from isthmus.federation.session import Session
from isthmus.methods.fedstruct.algorithm import FedStructCohort
from isthmus.privacy.attacks.uniform import uniformity
from isthmus.privacy.flatten import error_bound
from isthmus.privacy.mask_graph import choices_for
from isthmus.privacy.masks import SumRoster
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, equal_weights, max_difference


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(dataset="csbm:nodes=90,classes=3,features=16,degree=4", clients=3, split="30/20/50", seed=5)


def play(method: str, scenario: Scenario, engine: type[LocalEngine] = LocalEngine, **settings: Any) -> SimulatedRun:
    flags = {"dataset": "csbm", "clients": 3, "seed": 5, "rounds": 4, "hidden": (8,), "execution": "each", **settings}
    plan = {"plan": flags.pop("plan")} if "plan" in flags else {}
    experiment = SimulatedRun(resolve(method, flags), scenario, engine=engine, **plan)
    experiment.loop.play()
    return experiment


def model(experiment: SimulatedRun) -> Weights:
    exported: Weights = experiment.engine.party(experiment.engine.parties("client")[0]).client.export()
    return exported


@pytest.mark.parametrize("method", ["fedavg", "fedsgd", "fedprox", "fedper"])
def test_masked_sums_give_the_same_weights_within_the_fixed_point_bound(scenario: Scenario, method: str) -> None:
    settings = {"optimizer": "sgd", "lr": 0.1, "precision": "float64", "dropout": 0.0}
    plain, masked = (play(method, scenario, secure_sum=on, **settings) for on in (False, True))
    # One rounding per round and number; training passes an error on, so a small factor on top of the bound of one sum.
    assert 0.0 < max_difference(model(plain), model(masked)) < 4 * 10 * error_bound(3)
    assert differences(masked.loop.sheet, sheet_of(masked.settings.method, secure_sum=True)) == []
    protections = {row["message"]: row["protection"] for row in masked.loop.sheet.rows()}
    assert "summed" not in protections.values() and "masked" in protections.values()


def test_what_one_party_sends_is_uniform_and_only_the_sum_means_anything(scenario: Scenario) -> None:
    sent: list[Masked] = []

    class Recording(LocalEngine):
        def _invoke(self, call: Any) -> Any:
            outcome = super()._invoke(call)
            if isinstance(outcome, Masked):
                sent.append(outcome)
            return outcome

    play("fedavg", scenario, engine=Recording, secure_sum=True, hidden=(32,))
    assert len(sent) == 3 * (1 + 4 + 4), "one masked message per client and sum: sizes, updates, scores"
    words = np.concatenate([message.words.numpy().view(np.uint64) for message in sent])
    assert uniformity(words) > 1e-4
    spoiled = words.copy()
    spoiled[: len(words) // 10] >>= np.uint64(16)
    assert uniformity(spoiled) < 1e-6, "the test itself would notice"


def test_a_masked_run_is_the_same_twice_although_its_masks_are_not(scenario: Scenario) -> None:
    first, second = (model(play("fedavg", scenario, secure_sum=True, dropout=0.3)) for _ in range(2))
    assert equal_weights(first, second)


def test_a_party_that_comes_back_is_asked_again_under_new_masks(scenario: Scenario) -> None:
    fault = Fault("client-1", "train", 2, "local_update", kind="crashed")
    broken = play("fedavg", scenario, engine=FaultyEngine, plan=[fault], secure_sum=True)
    assert equal_weights(model(broken), model(play("fedavg", scenario, secure_sum=True)))


def test_a_missing_party_aborts_the_sum(scenario: Scenario) -> None:
    fault = Fault("client-1", "train", 2, "local_update", kind="timeout", times=99)
    with pytest.raises(QuorumError, match="2 of 3"):
        play("fedavg", scenario, engine=FaultyEngine, plan=[fault], secure_sum=True)


def test_bytes_of_masked_messages_are_on_the_ledger(scenario: Scenario) -> None:
    plain, masked = (play("fedavg", scenario, secure_sum=on).loop.totals.training["up"] for on in (False, True))
    assert 1.5 * plain < masked < 3 * plain, "64-bit words instead of float32"


def test_one_client_is_refused(scenario: Scenario) -> None:
    alone = build_scenario(dataset="csbm:nodes=40,classes=3,features=16", clients=1, split="30/20/50", seed=5)
    with pytest.raises(RunError, match="one party"):
        play("fedavg", alone, clients=1, secure_sum=True)


LOSSY = {"least_clients": 4, "reset_optimizer": True}
"""Sums that go on when a client is lost."""


@pytest.mark.parametrize(
    ("method", "clients", "more"), [("fedavg", 20, {}), ("fedspray", 3, {}), ("fedsgd", 3, {}), ("fedavg", 5, LOSSY)]
)
def test_clients_trained_together_mask_the_same_numbers_as_each_by_itself(
    method: str, clients: int, more: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"precision": "float64", "clients": clients, "rounds": 2, "secure_sum": True, **more}
    many = build_scenario(
        dataset=f"csbm:nodes={12 * clients},classes=3,features=8", clients=clients, split="30/20/50", seed=5
    )
    each, together = (play(method, many, execution=how, **settings) for how in ("each", "cohort"))
    assert (each.settings.run.execution, together.settings.run.execution) == ("each", "cohort")
    assert max_difference(model(each), model(together)) < 1e-9
    assert masked_rows(each) == masked_rows(together), "the same ledger"
    plain = play(method, many, execution="cohort", **settings | {"secure_sum": False})
    assert max_difference(model(plain), model(together)) < 1e-8


def test_a_cohort_that_forms_only_totals_is_not_asked_for_rows(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(cohort: FedStructCohort, task: Any) -> Any:
        raise AssertionError("rows of this stack are nobody's own")

    monkeypatch.setattr(FedStructCohort, "gradient", wrong)
    experiment = play("fedstruct", scenario, execution="cohort", secure_sum=True, rounds=1, protocol="hardened")
    assert experiment.settings.run.execution == "cohort"


def test_a_cohort_that_stands_for_exchanges_is_not_used_behind_masks(scenario: Scenario) -> None:
    experiment = play("fedstruct", scenario, execution="cohort", secure_sum=True, rounds=1)
    assert experiment.settings.run.execution == "each", "its mail has no parts of single clients that could be masked"


def masked_rows(experiment: SimulatedRun) -> list[Any]:
    """The ledger without the keys: how many neighbours a client has depends on secret keys."""
    return [row for row in experiment.loop.sheet.rows() if row["message"] != "SumKeys"]


def test_what_clients_trained_together_send_is_uniform(scenario: Scenario) -> None:
    sent: list[Masked] = []

    class Recording(LocalEngine):
        def dispatch(self, calls: Any, timeout: float | None) -> Any:
            outcome = super().dispatch(calls, timeout)
            if calls[0].mask is not None:
                assert len(outcome) == 3 and all(isinstance(reply, Masked) for reply in outcome.values())
                sent.extend(Masked(reply.words.clone(), reply.layout) for reply in outcome.values())
            return outcome

    play("fedavg", scenario, engine=Recording, secure_sum=True, hidden=(32,), execution="cohort")
    assert uniformity(np.concatenate([message.words.numpy().view(np.uint64) for message in sent])) > 1e-4


def test_keys_for_a_client_grow_as_the_logarithm_of_their_number() -> None:
    mean = []
    for clients in (50, 200, 800):
        keys = {f"client-{i:03d}": secrets.token_bytes(32) for i in range(clients)}
        roster = SumRoster(keys, choices_for(clients))
        mean.append(sum(codec.size(SumKeys(roster.seen_by(party).keys)) for party in keys) / clients)
    assert mean[0] < mean[1] < mean[2] < mean[1] + 1.5 * (mean[1] - mean[0]), "four times the clients add the same"


@dataclass(frozen=True)
class Nothing(Record):
    pass


@dataclass(frozen=True)
class Named(Message):
    value: Model[Tensor]
    name: Identifier[str]


@dataclass(frozen=True)
class Flag(Message):
    value: Count[bool]


@dataclass(frozen=True)
class Sparse(Message):
    value: Structure[Tensor]


@dataclass(frozen=True)
class Uneven(Message):
    value: Model[Tensor]


class Sender(Client[None, Nothing]):
    def initial_state(self) -> Nothing:
        return Nothing()

    @handler
    def named(self) -> Named:
        return Named(torch.ones(2), "me")

    @handler
    def flag(self) -> Flag:
        return Flag(True)

    @handler
    def sparse(self) -> Sparse:
        return Sparse(torch.eye(2).to_sparse_csr())

    @handler
    def uneven(self) -> Uneven:
        return Uneven(torch.ones(self.data.num_nodes))

    @handler
    def wild(self) -> Uneven:
        return Uneven(torch.tensor([float("nan")]))


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (Sender.named, "a text"),
        (Sender.flag, "a bool"),
        (Sender.sparse, "a sparse matrix"),
        (Sender.uneven, "different shape"),
        (Sender.wild, "nan|finite|NaN"),
    ],
)
def test_what_has_no_masked_sum_is_refused(scenario: Scenario, function: Any, complaint: str) -> None:
    table = RoleTable({"client": Role(Sender)})
    session = Session(LocalEngine(scenario.parts, table, None, Stream(0)), table, secure=True)
    session.clock.begin("train", 1, 1)
    with pytest.raises(RunError, match=complaint):
        session.sum(function)
